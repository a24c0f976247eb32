"""The examples are complete trainings: each is killed in the middle, resumed, and ends as the undisturbed one does."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

import pytest

import holdfast
from holdfast.testing import Outcome
from tests.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
Line = dict[str, Any]


class StandardOutput:
    """The standard output of an example: a file, and a signal to this very process after the line that asks for it.

    The signal comes at the same line of every run, however busy the machine is.
    """

    def __init__(self, file: TextIO, at: Line, number: signal.Signals) -> None:
        self._file, self._at, self._number = file, at, number

    def write(self, text: str) -> int:
        written = self._file.write(text)
        self._file.flush()
        if self._at and text.strip() and self._at.items() <= json.loads(text).items():
            os.kill(os.getpid(), self._number)
        return written

    def flush(self) -> None:
        self._file.flush()


def run_script(
    rank: int, script: str, arguments: list[str], folder: Path, at: Line, number: signal.Signals, signalled: int
) -> int:
    """Run an example as `python SCRIPT ARGUMENTS` does, in a folder; return its exit code."""
    os.chdir(folder)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str((EXAMPLES / script).parent))
    with open(f"output-{rank}.jsonl", "w") as file:
        sys.stdout = StandardOutput(file, at if rank == signalled else {}, number)  # type: ignore[assignment]
        try:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 0


def run(
    script: str,
    *arguments: str | Path,
    folder: Path,
    ranks: int = 1,
    at: Line | None = None,
    number: signal.Signals = signal.SIGKILL,
    signalled: int = 0,
) -> tuple[list[Line], list[Outcome]]:
    """Run an example on new processes; return what rank 0 printed, and how each rank ended."""
    folder.mkdir(exist_ok=True)
    texts = [str(argument) for argument in arguments]
    backend = "gloo" if ranks > 1 else None
    outcomes = run_ranks(ranks, run_script, script, texts, folder, at or {}, number, signalled, backend=backend)
    return [json.loads(line) for line in (folder / "output-0.jsonl").read_text().splitlines()], outcomes


def complete(script: str, *arguments: str | Path, **options: Any) -> list[Line]:
    """Run an example to its end; return what it printed."""
    lines, outcomes = run(script, *arguments, **options)
    assert [outcome.unwrap() for outcome in outcomes] == [0] * len(outcomes)
    return lines


def killed(script: str, *arguments: str | Path, **options: Any) -> list[Line]:
    """Run an example until it is killed; return what it had printed."""
    lines, outcomes = run(script, *arguments, **options)
    assert outcomes[0].exit_code == -signal.SIGKILL, outcomes
    return lines


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
