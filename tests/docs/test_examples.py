"""The examples are complete trainings: each is killed in the middle, resumed, and ends as the undisturbed one does."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TextIO

import pytest

import holdfast
from holdfast.testing import Outcome
from tests.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
Line = dict[str, Any]


class StandardOutput:
    """The standard output of an example: a file, and after the line that asks for it a signal to all ranks.

    The signal comes at the same line of every run, however busy the machine is.
    """

    def __init__(self, file: TextIO, at: Line, number: signal.Signals, ranks: int) -> None:
        self._file, self._at, self._number, self._ranks = file, at, number, ranks

    def write(self, text: str) -> int:
        written = self._file.write(text)
        self._file.flush()
        if self._at and text.strip() and self._at.items() <= json.loads(text).items():
            self._at = {}
            for rank in reversed(range(self._ranks)):  # this one last
                os.kill(int(Path(f"process-{rank}").read_text()), self._number)
        return written

    def flush(self) -> None:
        self._file.flush()


def run_script(
    rank: int, script: str, arguments: list[str], folder: Path, ranks: int, at: Line, number: signal.Signals
) -> int:
    """Run an example as `python SCRIPT ARGUMENTS` does, in a folder; return its exit code."""
    os.chdir(folder)
    Path(f"process-{rank}").write_text(str(os.getpid()))
    sys.argv = [script, *arguments]
    sys.path.insert(0, str((EXAMPLES / script).parent))
    with open(f"output-{rank}.jsonl", "w") as file, redirect_stdout(StandardOutput(file, at, number, ranks)):
        try:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 0


def message_of(rank: int, script: str, argument: str) -> str:
    """Run an example that ends by `SystemExit` with a message; return it."""
    sys.argv = [script, argument]
    sys.path.insert(0, str((EXAMPLES / script).parent))
    with pytest.raises(SystemExit) as found:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return str(found.value.code)


def run(
    script: str,
    *arguments: str | Path,
    folder: Path,
    ranks: int = 1,
    at: Line | None = None,
    number: signal.Signals = signal.SIGKILL,
) -> tuple[list[Line], list[Outcome]]:
    """Run an example on new processes; return what rank 0 printed, and how each rank ended."""
    folder.mkdir(exist_ok=True)
    texts = [str(argument) for argument in arguments]
    backend = "gloo" if ranks > 1 else None
    outcomes = run_ranks(ranks, run_script, script, texts, folder, ranks, at or {}, number, backend=backend)
    return [json.loads(line) for line in (folder / "output-0.jsonl").read_text().splitlines()], outcomes


def complete(script: str, *arguments: str | Path, **options: Any) -> list[Line]:
    """Run an example to its end; return what it printed."""
    lines, outcomes = run(script, *arguments, **options)
    assert [outcome.unwrap() for outcome in outcomes] == [0] * len(outcomes)
    return lines


def killed(script: str, *arguments: str | Path, **options: Any) -> list[Line]:
    """Run an example until it is killed; return what it had printed."""
    lines, outcomes = run(script, *arguments, **options)
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * len(outcomes), outcomes
    return lines


def refused(script: str, *arguments: str | Path, **options: Any) -> BaseException:
    """Run an example that ends with an error; return that error."""
    _, outcomes = run(script, *arguments, **options)
    assert outcomes[0].error is not None, outcomes
    return outcomes[0].error


def by_step(lines: list[Line]) -> dict[int, Line]:
    return {line["step"]: line for line in lines if "step" in line}


def state_of(run: Path, selector: str | int = "latest") -> dict[str, Any]:
    """Return the digests of a checkpoint's tensors, and its counters. The random state of NumPy is left out: no example
    draws from it or seeds it."""
    checkpoint = holdfast.resolve(run, selector)
    tensors = {
        leaf.name: [chunk.digests for chunk in leaf.chunks]
        for leaf in checkpoint.manifest.tensors
        if ".numpy." not in leaf.name
    }
    return {"tensors": tensors, "progress": checkpoint.progress, "metrics": checkpoint.metrics, "step": checkpoint.step}


PPO = ("ppo.py", "runs/ppo", "--updates=36", "--every=5")


@pytest.fixture(scope="module")
def undisturbed_ppo(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Line], Path]:
    folder = tmp_path_factory.mktemp("ppo")
    return complete(*PPO, folder=folder), folder / "runs/ppo"


@pytest.mark.guarantee("G8")
def test_ppo_resumes_in_the_middle_of_an_epoch_over_a_rollout(
    undisturbed_ppo: tuple[list[Line], Path], tmp_path: Path
) -> None:
    expected, undisturbed = undisturbed_ppo
    before = killed(*PPO, folder=tmp_path, at={"step": 22})
    after = complete(*PPO, folder=tmp_path)

    begin = after[0]
    assert begin["resumed_from"] == 20
    assert begin["minibatches_left"] == 3  # of the eight of the third rollout
    assert begin["rollouts"] == 3
    assert sorted(by_step(after)) == list(range(21, 36))
    assert {**by_step(before), **by_step(after)} == by_step(expected)
    assert after[-1] == expected[-1]
    resumed = tmp_path / "runs/ppo"
    assert state_of(resumed) == state_of(undisturbed)
    assert (resumed / "policy.nemo").read_bytes() == (undisturbed / "policy.nemo").read_bytes()


def test_ppo_names_its_checkpoints_by_their_reward_and_keeps_the_best(
    undisturbed_ppo: tuple[list[Line], Path],
) -> None:
    lines, run = by_step(undisturbed_ppo[0]), undisturbed_ppo[1]
    template = holdfast.LinkTemplate("{name}--reward={reward:.2f}-step={step}-episodes={episodes}")
    links = {link.name: link.resolve() for link in run.iterdir() if link.is_symlink() and "--" in link.name}
    kept = holdfast.checkpoints(run)
    assert set(links.values()) == {Path(checkpoint.path) for checkpoint in kept}
    for name in links:
        values = template.parse(name)
        assert values is not None
        line = lines[int(values["step"])]
        reward = round(line["reward"], 2)
        assert values == {"name": "ppo", "reward": reward, "step": line["step"], "episodes": line["episodes"]}
    best = max((5, 10, 15, 20, 25, 30, 35), key=lambda step: (lines[step]["reward"], step))
    assert best in [checkpoint.step for checkpoint in kept]
    assert (run / "best").resolve().name == f"step-{best:09d}"


LOOP = "config_loop/train.py"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the run that base.toml makes."""
    folder = tmp_path_factory.mktemp("base")
    lines = by_step(complete(LOOP, EXAMPLES / "config_loop/base.toml", folder=folder))
    assert lines[59]["val_loss"] < lines[10]["val_loss"]
    return folder / "runs/base"


def tuning(base: Path, folder: Path, old: str = "", new: str = "") -> tuple[str, Path]:
    """Copy tune.toml and the run that it starts from into a folder; return how it is started."""
    text = (EXAMPLES / "config_loop/tune.toml").read_text()
    assert old in text
    folder.mkdir(exist_ok=True)
    (folder / "tune.toml").write_text(text.replace(old, new) if old else text)
    if not (folder / "runs/base").exists():
        shutil.copytree(base, folder / "runs/base", symlinks=True)
    return LOOP, folder / "tune.toml"


def preempted(*arguments: str | Path, **options: Any) -> list[Line]:
    """Run an example until a signal ends it; return what it printed. It asks to be put into the queue again."""
    lines, outcomes = run(*arguments, **options)  # type: ignore[arg-type]
    assert [outcome.unwrap() for outcome in outcomes] == [75] * len(outcomes)
    return lines


@pytest.mark.guarantee("G8")
def test_the_config_loop_resumes_exactly_after_a_kill_of_two_sharded_ranks(base: Path, tmp_path: Path) -> None:
    undisturbed, disturbed, alone = (tmp_path / name for name in ("undisturbed", "killed", "alone"))
    expected = by_step(complete(*tuning(base, undisturbed), folder=undisturbed, ranks=2))

    start = tuning(base, disturbed)
    before = preempted(*start, folder=disturbed, ranks=2, at={"evaluated": 3}, number=signal.SIGTERM)
    assert holdfast.resolve(disturbed / "runs/tuned").progress["unevaluated"]
    before += killed(*start, folder=disturbed, ranks=2, at={"step": 14})
    after = complete(*start, folder=disturbed, ranks=2)
    assert {"resumed_from": 12, "ranks": 2} in after
    assert sorted(by_step(after)) == list(range(13, 30))
    assert {**by_step(before), **by_step(after)} == expected
    assert state_of(disturbed / "runs/tuned") == state_of(undisturbed / "runs/tuned")
    stored = state_of(disturbed / "runs/tuned")["tensors"]
    assert {name for name in stored if name.startswith("model.")} == {"model.head.weight", "model.head.bias"}

    shutil.copytree(disturbed, alone, symlinks=True)
    longer = tuning(base, alone, "steps = 30", "steps = 34")
    lines = complete(*longer, folder=alone)
    assert {"resumed_from": 29, "ranks": 1} in lines
    assert sorted(by_step(lines)) == [30, 31, 32, 33]


@pytest.mark.guarantee("G8")
def test_the_config_loop_asks_to_be_requeued_wherever_a_signal_finds_it(base: Path, tmp_path: Path) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "preempted"
    expected = complete(*tuning(base, undisturbed), folder=undisturbed)
    run = disturbed / "runs/tuned"

    start = tuning(base, disturbed)
    assert not by_step(preempted(*start, folder=disturbed, at={"warm_up": 0}, number=signal.SIGTERM))
    assert not holdfast.checkpoints(run)

    lines = preempted(*start, folder=disturbed, at={"evaluated": 2}, number=signal.SIGUSR1)
    assert lines[-2] == {"evaluated": 2}
    unevaluated = holdfast.resolve(run)
    assert (unevaluated.step, unevaluated.progress["unevaluated"]) == (4, True)
    assert set(unevaluated.metrics) == {"loss"}

    lines += preempted(*start, folder=disturbed, at={"step": 10}, number=signal.SIGTERM)
    assert holdfast.resolve(run).step == 10
    assert holdfast.resolve(run, "best:val_loss").step in (4, 8)

    lines += complete(*start, folder=disturbed)
    assert by_step(lines) == by_step(expected)
    assert state_of(run) == state_of(undisturbed / "runs/tuned")


def test_the_config_loop_refuses_another_base_and_another_freeze(base: Path, tmp_path: Path) -> None:
    killed(*tuning(base, tmp_path), folder=tmp_path, at={"step": 5})
    other = tuning(base, tmp_path, 'freeze = ["embedding.*", "body.*"]', 'freeze = ["embedding.*"]')
    error = refused(*other, folder=tmp_path)
    assert isinstance(error, holdfast.GuardMismatchError)
    assert "frozen" in str(error)

    error = refused(*tuning(base, tmp_path, "@best:val_loss", "@50"), folder=tmp_path)
    assert isinstance(error, holdfast.GuardMismatchError)


@pytest.mark.parametrize(
    ("script", "config", "old", "new", "message"),
    [
        (LOOP, "config_loop/tune.toml", "every_steps", "every_step", "did you mean 'save.every_steps'?"),
        (LOOP, "config_loop/tune.toml", "freeze", "freez", "unexpected keyword argument 'freez'"),
        (LOOP, "config_loop/tune.toml", "[warm_start]", "[warmstart]", "unexpected keyword argument 'warmstart'"),
        ("recipe/run.py", "recipe/transfer.yaml", "load:", "laod:", "the recipe has no key 'laod'"),
        ("recipe/run.py", "recipe/transfer.yaml", "name: sgd", "name: sdg", "there is no 'sdg'; there are adamw, sgd"),
        ("recipe/run.py", "recipe/transfer.yaml", "lr: 0.1", "lr: 0.1, mom: 0", "unexpected keyword argument 'mom'"),
    ],
    ids=["a key of Holdfast's", "a key", "a table", "a part of a recipe", "a name", "an option"],
)
def test_what_is_misspelt_in_a_config_is_refused(
    tmp_path: Path, script: str, config: str, old: str, new: str, message: str
) -> None:
    text = (EXAMPLES / config).read_text()
    assert old in text
    path = tmp_path / Path(config).name
    path.write_text(text.replace(old, new))
    (outcome,) = run_ranks(1, message_of, script, str(path), backend=None)
    assert message in outcome.unwrap()


def test_the_batch_script_requeues_a_job_that_ran_out_of_time(tmp_path: Path) -> None:
    tools, log = tmp_path / "bin", tmp_path / "scontrol.txt"
    tools.mkdir()
    (tools / "srun").write_text('#!/bin/bash\nSLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1 exec "$@"\n')
    (tools / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> {log}\n[ "$1" != show ] || echo localhost\n')
    (tools / "python").symlink_to(sys.executable)
    for tool in ("srun", "scontrol"):
        (tools / tool).chmod(0o755)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    text = (EXAMPLES / "config_loop/base.toml").read_text()
    (tmp_path / "short.toml").write_text(text.replace('time_limit = "24:00:00"', 'time_limit = "0.001s"'))

    done = subprocess.run(
        ["bash", "examples/config_loop/job.sbatch", "short.toml"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            # The link is not where the environment of this interpreter is.
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "SLURM_JOB_ID": "42",
            "SLURM_JOB_NODELIST": "node[1-2]",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 75, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"warm_up": 0}
    assert log.read_text().splitlines() == ["show hostnames node[1-2]", "requeue 42"]


RECIPE = "recipe/run.py"


@pytest.fixture(scope="module")
def spirals(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Line], Path]:
    folder = tmp_path_factory.mktemp("spirals")
    return complete(RECIPE, EXAMPLES / "recipe/spirals.yaml", folder=folder), folder / "runs/spirals"


@pytest.mark.guarantee("G8")
def test_the_recipe_goes_on_in_the_middle_of_an_evaluation(spirals: tuple[list[Line], Path], tmp_path: Path) -> None:
    expected, undisturbed = spirals
    recipe = EXAMPLES / "recipe/spirals.yaml"
    before = killed(RECIPE, recipe, folder=tmp_path, at={"evaluating": 30, "batches": 5})
    again = killed(RECIPE, recipe, folder=tmp_path, at={"step": 40})
    after = complete(RECIPE, recipe, folder=tmp_path)

    assert again[0] == {"resumed_from": 30, "evaluated": 4}
    assert again[1] == {"evaluating": 30, "batches": 5}
    assert after[0] == {"resumed_from": 30, "evaluated": 8}
    assert after[1]["step"] == 31  # the evaluation is complete and is not made again
    assert {**by_step(before), **by_step(again), **by_step(after)} == by_step(expected)
    results = [line for line in expected if "accuracy" in line]
    assert [line for line in again + after if "accuracy" in line] == results
    assert state_of(tmp_path / "runs/spirals") == state_of(undisturbed)


def test_the_recipe_keeps_the_best_evaluation(spirals: tuple[list[Line], Path]) -> None:
    lines, run = spirals
    results = {line["evaluated"]: line for line in lines if "accuracy" in line}
    assert list(results) == [30, 60, 89]
    assert results[89]["accuracy"] > 0.7
    best = max(results, key=lambda step: (results[step]["accuracy"], step))
    kept = holdfast.checkpoints(run)
    assert {checkpoint.step for checkpoint in kept} == {60, 89, best}
    assert holdfast.resolve(run, "best:accuracy").step == best
    for checkpoint in kept:
        if checkpoint.metrics:
            assert checkpoint.metrics["val_loss"] == results[checkpoint.step]["val_loss"]


def test_the_recipe_loads_what_its_strategy_says(spirals: tuple[list[Line], Path], tmp_path: Path) -> None:
    shutil.copytree(spirals[1], tmp_path / "runs/spirals", symlinks=True)
    recipe = (EXAMPLES / "recipe/transfer.yaml").read_text()

    (tmp_path / "strict.yaml").write_text(recipe.replace("strict: false", "strict: true"))
    error = refused(RECIPE, tmp_path / "strict.yaml", folder=tmp_path)
    assert isinstance(error, holdfast.StateMismatchError)
    assert "model.norm.weight" in str(error)

    lines = complete(RECIPE, EXAMPLES / "recipe/transfer.yaml", folder=tmp_path)
    assert lines[0] == {"loaded": ["model"], "renamed": 4, "missing": ["model.norm.bias", "model.norm.weight"]}
    assert lines[1]["step"] == 0

    again = complete(RECIPE, EXAMPLES / "recipe/transfer.yaml", folder=tmp_path)
    assert again == [{"resumed_from": 59, "evaluated": 8}]  # its own checkpoints go before what it started from
