"""Show what Holdfast promises, on this machine, in about two minutes: `make demo`.

A small GPT (train_gpt.py) is trained undisturbed, then again and killed in the middle, resumed on the same and on other
numbers of ranks, and at last one bit of its newest checkpoint is flipped. Every claim is checked: one that does not
hold makes the exit code 1. Everything that is made lies in `demo-out/`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

TRAINING = Path(__file__).with_name("train_gpt.py")
MARKER = ".made-by-holdfast-demo"
TIMEOUT_SECONDS = 300.0
POLL_SECONDS = 0.02
# Another number of ranks draws other dropout, so its losses are close to the undisturbed run's, not equal to them.
CLOSE = 0.05

console = Console(highlight=False)


@dataclass(frozen=True)
class Plan:
    """How long to train, how often to save, after which step to kill, and what to resume on besides two ranks."""

    steps: int
    every: int
    kill_after: int
    branch_steps: int
    branch_ranks: tuple[int, ...]


FULL = Plan(steps=70, every=10, kill_after=44, branch_steps=15, branch_ranks=(1, 4))
QUICK = Plan(steps=20, every=5, kill_after=11, branch_steps=4, branch_ranks=(1,))


@dataclass(frozen=True)
class Claim:
    what: str
    result: str
    holds: bool


@dataclass(frozen=True)
class Losses:
    """What one training logged: where it began, and the loss of each of its steps."""

    resumed_from: int | None = None
    weights: str = ""
    by_step: Mapping[int, float] = field(default_factory=dict)

    @property
    def last_step(self) -> int:
        return max(self.by_step, default=-1)


class DemoError(Exception):
    """Something that the demo needs did not happen."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="the folder for everything that is made")
    parser.add_argument("--quick", action="store_true", help="fewer steps, and not on four ranks")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="   log of %(name)s: %(message)s", stream=sys.stdout)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    started = time.monotonic()
    try:
        empty(options.out)
        claims = show(QUICK if options.quick else FULL, options.out)
    except DemoError as error:
        console.print(f"\n[bold red]The demo stopped:[/] {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        console.print("\nInterrupted; the trainings were ended.")
        return 130
    return conclude(claims, time.monotonic() - started)


def show(plan: Plan, out: Path) -> list[Claim]:
    """The whole story in order."""
    runs = out / "runs"
    claims: list[Claim] = []

    with chapter(f"1. Train on 2 ranks, undisturbed: {plan.steps} steps, a checkpoint every {plan.every}"):
        reference = train(out, "undisturbed", runs / "undisturbed", ranks=2, plan=plan)
        say(f"loss {reference.by_step[0]:.3f} at step 0, {reference.by_step[plan.steps - 1]:.3f} at the last")

    with chapter("2. The same training again, and SIGKILL to all of it in the middle"):
        killed = train_and_kill(out, "killed", runs / "interrupted", plan=plan)
        newest, claim = check_after_kill(runs / "interrupted", killed)
        claims.append(claim)

    with chapter("3. Run the same command again"):
        resumed = train(out, "resumed", runs / "interrupted", ranks=2, plan=plan)
        say(f"resumed from step {resumed.resumed_from}; steps after it were done again")
        claims += check_exact_resume(reference, killed, resumed, newest, plan)
        claims.append(check_same_state(runs / "undisturbed", runs / "interrupted"))

    branches: dict[str, Losses] = {}
    with chapter(f"4. Resume the checkpoint of step {newest} on {' and on '.join(map(ranks_text, plan.branch_ranks))}"):
        saved_weights = weights_of(runs / "interrupted", newest)
        for ranks in plan.branch_ranks:
            name, text = f"ranks-{ranks}", ranks_text(ranks)
            source, steps = f"{runs / 'interrupted'}@{newest}", newest + 1 + plan.branch_steps
            branches[text] = train(out, name, runs / name, ranks=ranks, plan=plan, steps=steps, restore=source)
            claims.append(check_branch(text, branches[text], saved_weights, reference))

    with chapter("5. Flip one bit in a copy of the newest checkpoint"):
        claims += check_damage(runs / "interrupted", runs / "damaged")

    picture = draw(out / "losses.png", plan, reference, killed, resumed, branches)
    console.print(f"\nThe losses of these runs as a picture: {picture}\n")
    return claims


def conclude(claims: Sequence[Claim], seconds: float) -> int:
    """Print every claim with its result; the exit code says whether all of them hold."""
    table = Table(show_lines=True)
    table.add_column("claim", ratio=3)
    table.add_column("result", ratio=4)
    table.add_column("holds", justify="center")
    for claim in claims:
        table.add_row(escape(claim.what), escape(claim.result), "[green]yes[/]" if claim.holds else "[bold red]NO[/]")
    console.print(table)
    failed = sum(not claim.holds for claim in claims)
    outcome = (
        f"[red]{failed} of {len(claims)} claims do not hold[/]"
        if failed
        else f"[green]All {len(claims)} claims hold[/]"
    )
    console.print(f"[bold]{outcome}[/] ({seconds:.0f} s)")
    return 1 if failed or not claims else 0


# --- what is claimed -------------------------------------------------------------------------------------------------


def differences(reference: Mapping[int, float], other: Mapping[int, float]) -> list[str]:
    """The steps at which two trainings do not have the same loss to the last bit."""
    found = []
    for step, loss in sorted(other.items()):
        if step not in reference:
            found.append(f"step {step}: {loss!r}, and the other training has no such step")
        elif reference[step].hex() != loss.hex():
            found.append(f"step {step}: {loss!r} instead of {reference[step]!r}")
    return found


def check_after_kill(run: Path, killed: Losses) -> tuple[int, Claim]:
    """The step of the newest checkpoint that the kill left behind, and whether all of them are sound."""
    import holdfast

    folders = sorted(run.glob("step-*"))
    reports = [holdfast.verify(folder) for folder in folders if (folder / "manifest.json").exists()]
    if not reports:
        raise DemoError(f"the kill left no checkpoint in {run}")
    sound = sum(report.ok for report in reports)
    say(f"{sound} of {len(reports)} checkpoints are sound, {len(folders) - len(reports)} attempts were not committed")
    claim = Claim(
        "SIGKILL on all ranks leaves every committed checkpoint whole",
        f"killed after step {killed.last_step}; {sound} of {len(reports)} checkpoints verified to the byte",
        holds=sound == len(reports),
    )
    return max(report.step for report in reports), claim


def check_exact_resume(reference: Losses, killed: Losses, resumed: Losses, newest: int, plan: Plan) -> list[Claim]:
    """Every loss from the newest checkpoint to the end is there, and none differs from the undisturbed run's."""
    wrong = differences(reference.by_step, killed.by_step) + differences(reference.by_step, resumed.by_step)
    complete = sorted(resumed.by_step) == list(range(newest + 1, plan.steps))
    same = f"{len(killed.by_step)} losses before the kill and {len(resumed.by_step)} after the resume are equal"
    say(f"[red]{escape(wrong[0])}[/]" if wrong else same)
    return [
        Claim(
            "the run goes on from the newest checkpoint",
            f"resumed from step {resumed.resumed_from}, did {killed.last_step - newest} steps again, "
            f"finished step {resumed.last_step}",
            holds=resumed.resumed_from == newest and complete,
        ),
        Claim(
            "every loss equals the undisturbed run's, bit for bit",
            f"{len(wrong)} differ; {wrong[0]}" if wrong else same,
            holds=complete and not wrong,
        ),
    ]


def check_same_state(undisturbed: Path, resumed: Path) -> Claim:
    """Not only the losses: the last checkpoints of both runs hold the same bytes."""
    import holdfast

    # Python's and NumPy's random states are restored too, but this training draws from neither and seeds neither: they
    # are another in every new run.
    first, second = (
        {
            tensor.name: [chunk.digests for chunk in tensor.chunks]
            for tensor in holdfast.resolve(run).manifest.tensors
            if ".numpy." not in tensor.name
        }
        for run in (undisturbed, resumed)
    )
    same = sum(digests == second.get(name) for name, digests in first.items())
    return Claim(
        "so does the final state: weights, optimizer and torch's random state",
        f"{same} of {len(first)} tensors of the last checkpoints have the same digests",
        holds=same == len(first) == len(second) > 0,
    )


def check_branch(name: str, branch: Losses, saved_weights: str, reference: Losses) -> Claim:
    same = branch.weights == saved_weights
    gaps = [abs(loss - reference.by_step[step]) for step, loss in branch.by_step.items() if step in reference.by_step]
    widest = max(gaps, default=float("inf"))
    weights = f"weights {branch.weights} {'as saved' if same else f'instead of {saved_weights}'}"
    result = f"{weights}; {len(gaps)} more steps, losses within {widest:.3f} of the undisturbed run"
    say(result)
    return Claim(f"the same checkpoint resumes on {name}, weights bit for bit", result, same and widest < CLOSE)


def weights_of(run: Path, step: int) -> str:
    """The digest of a checkpoint's weights, read here, in one process that never saw the ranks."""
    import holdfast
    from train_gpt import GPT, weights_digest

    model = GPT()
    with holdfast.CheckpointManager(run, {"model": model}, rng=False) as manager:
        manager.restore(step, strategy=holdfast.LoadStrategy.weights_only())
    return weights_digest(model)


def check_damage(run: Path, copy: Path) -> list[Claim]:
    """Damage is found and named, never loaded when it was asked for, and passed over otherwise."""
    import holdfast
    from train_gpt import GPT, weights_digest

    shutil.copytree(run, copy, symlinks=True)
    file, leaf, place = flip_bit(copy / "latest")
    say(f"flipped a bit at byte {place} of {file}, in '{leaf}'")

    report = holdfast.verify(copy, "latest")
    for problem in report.problems:
        say(f"verify: {escape(str(problem))}")
    named = [
        problem
        for problem in report.problems
        if problem.file == file and problem.leaf == leaf and problem.byte_range and place in range(*problem.byte_range)
    ]

    model = GPT()
    untouched = weights_digest(model)
    strategy = holdfast.LoadStrategy.weights_only()
    with holdfast.CheckpointManager(copy, {"model": model}, rng=False) as manager:
        newest, before = (checkpoint.step for checkpoint in manager.checkpoints()[:2])
        try:
            manager.restore(newest, strategy=strategy)
            refusal = None
        except holdfast.CorruptCheckpointError as error:
            refusal = error
        say(f"restore({newest}): {escape(str(refusal))}")
        changed = weights_digest(model) != untouched
        fallback = manager.restore("latest", strategy=strategy)
    say(f"restore('latest'): took step {fallback.checkpoint.step}")
    return [
        Claim(
            "one flipped bit is found, and named",
            str(named[0]) if named else f"not named; {report}",
            holds=len(named) == len(report.problems) == 1,
        ),
        Claim(
            "a restore of the damaged step by name is refused",
            f"{type(refusal).__name__}; the model in memory {'changed' if changed else 'was not touched'}",
            holds=refusal is not None and leaf in str(refusal) and not changed,
        ),
        Claim(
            "restore('latest') falls back to the one before, and says so",
            f"took step {fallback.checkpoint.step} instead of {newest}; logged, and named in the result's rejected",
            holds=fallback.checkpoint.step == before
            and any(leaf in reason for reason in fallback.rejected)
            and weights_digest(model) == weights_of(run, before),
        ),
    ]


def flip_bit(checkpoint: Path) -> tuple[str, str, int]:
    """Flip a bit in the middle of a weight; the file, the leaf and the byte. Tensor files are plain safetensors."""
    path = checkpoint / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    header_bytes = int.from_bytes(data[:8], "little")
    leaf = "model.layers.1.linear1.weight"
    start, end = json.loads(data[8 : 8 + header_bytes])[leaf]["data_offsets"]
    place = 8 + header_bytes + (start + end) // 2
    data[place] ^= 0b00000100
    path.write_bytes(data)
    return path.name, leaf, place


# --- the trainings ---------------------------------------------------------------------------------------------------


def train(
    out: Path, name: str, run: Path, *, ranks: int, plan: Plan, steps: int | None = None, restore: str = "latest"
) -> Losses:
    """Train to the end and return what was logged."""
    with training(out, name, run, ranks, plan, steps or plan.steps, restore) as child:
        if child.wait_for_end() != 0:
            raise child.failed(f"exit code {child.process.returncode}")
        return child.losses()


def train_and_kill(out: Path, name: str, run: Path, *, plan: Plan) -> Losses:
    """Train until a step is logged, then kill every process of it at once."""
    with training(out, name, run, 2, plan, plan.steps, "latest") as child:
        child.wait_for_step(plan.kill_after)
        processes = child.kill()
        losses = child.losses()
    if losses.last_step == plan.steps - 1:
        raise DemoError("the training was over before it could be killed; this machine is very busy, try again")
    say(f"{processes} processes killed after step {losses.last_step}")
    return losses


@contextmanager
def training(
    out: Path, name: str, run: Path, ranks: int, plan: Plan, steps: int, restore: str
) -> Iterator[TrainingProcess]:
    """A training under torchrun that does not outlive this block, however it is left."""
    for folder in ("losses", "output"):
        (out / folder).mkdir(exist_ok=True)
    losses, output = out / "losses" / f"{name}.jsonl", out / "output" / f"{name}.txt"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    torchrun.append(f"--log-dir={out / 'output' / 'torchrun'}")  # a killed one would leave its folder in /tmp
    script = [str(TRAINING), str(run), f"--losses={losses}", f"--steps={steps}", f"--every={plan.every}"]
    with output.open("w") as sink:
        process = subprocess.Popen(
            [*torchrun, *script, f"--restore={restore}"],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    child = TrainingProcess(name, process, losses, output)
    try:
        yield child
    finally:
        child.kill()


def read_losses(path: Path) -> Losses:
    """Return what a training has logged so far. A last line that a kill cut off is no step."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    records = [json.loads(line) for line in lines]
    begin = next((record for record in records if "weights" in record), {})
    by_step = {record["step"]: record["loss"] for record in records if "step" in record}
    return Losses(begin.get("resumed_from"), begin.get("weights", ""), by_step)


class TrainingProcess:
    """One torchrun with its ranks, seen from outside."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], losses: Path, output: Path) -> None:
        self.name = name
        self.process = process
        self._losses = losses
        self._output = output
        self._deadline = time.monotonic() + TIMEOUT_SECONDS

    def losses(self) -> Losses:
        return read_losses(self._losses)

    def wait_for_end(self) -> int:
        try:
            return self.process.wait(self._deadline - time.monotonic())
        except subprocess.TimeoutExpired:
            raise self.failed(f"not done after {TIMEOUT_SECONDS:.0f} s") from None

    def wait_for_step(self, step: int) -> None:
        while self.losses().last_step < step:
            if self.process.poll() is not None:
                raise self.failed(f"ended before step {step}, exit code {self.process.returncode}")
            if time.monotonic() > self._deadline:
                raise self.failed(f"did not reach step {step} in {TIMEOUT_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)

    def kill(self) -> int:
        """SIGKILL to torchrun and its ranks; the number of processes that it went to."""
        if self.process.poll() is not None:
            return 0
        # torchrun gives each rank a session of its own, so one signal to its group would leave the ranks alive. It is
        # stopped first, so that it starts no rank while we look.
        os.kill(self.process.pid, signal.SIGSTOP)
        family = descendants(self.process.pid)
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait(TIMEOUT_SECONDS)
        return len(family)

    def failed(self, why: str) -> DemoError:
        tail = "\n".join(self._output.read_text(errors="replace").splitlines()[-25:])
        return DemoError(f"training '{self.name}': {why}. The end of {self._output}:\n{tail}")


def descendants(pid: int) -> list[int]:
    """A process and all that it started, itself first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name stands in brackets and may hold anything; state and parent come after it.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    family = [pid]
    for member in family:
        family += children.get(member, [])
    return family


# --- what is shown ---------------------------------------------------------------------------------------------------


def empty(out: Path) -> None:
    """Begin with an empty folder. One that holds anything and was not made here is left alone."""
    if out.exists() and not (out / MARKER).exists() and (not out.is_dir() or any(out.iterdir())):
        raise DemoError(f"{out} was not made by this demo and will not be emptied; give another folder with --out")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARKER).touch()


@contextmanager
def chapter(title: str) -> Iterator[None]:
    console.print(f"\n[bold]{escape(title)}[/]")
    started = time.monotonic()
    yield
    console.print(f"   [dim]{time.monotonic() - started:.1f} s[/]")


def say(text: str) -> None:
    console.print(Padding(text, (0, 0, 0, 3)))


def ranks_text(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def draw(
    path: Path, plan: Plan, reference: Losses, killed: Losses, resumed: Losses, branches: Mapping[str, Losses]
) -> Path:
    """The curves over each other, and under them how far each is from the undisturbed run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    blue, red, green = "#a9c4e6", "#c23b22", "#1b7f4d"
    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9.5, 6), height_ratios=(3, 1.2), layout="constrained"
    )

    def curve(axes: Any, losses: Mapping[int, float], *style: Any, **options: Any) -> None:
        axes.plot(list(losses), list(losses.values()), *style, **options)

    curve(above, reference.by_step, color=blue, linewidth=9, solid_capstyle="round", label="undisturbed, 2 ranks")
    curve(above, killed.by_step, color=red, linewidth=1.8, label="killed, 2 ranks")
    curve(above, resumed.by_step, "o", color=green, markersize=3.6, label="resumed, 2 ranks")
    above.set_ylabel("loss")
    exact = not differences(reference.by_step, resumed.by_step)
    title = "Killed, resumed, and not a bit of difference" if exact else "Killed, resumed, and DIFFERENT"
    above.set_title(title, loc="left", fontweight="bold")

    def gaps(losses: Losses) -> dict[int, float]:
        return {step: loss - reference.by_step[step] for step, loss in losses.by_step.items()}

    for (name, branch), (color, line) in zip(branches.items(), (("#8a5fbf", "-"), ("#d98c1f", "--")), strict=False):
        curve(below, gaps(branch), line, color=color, linewidth=1.6, label=f"resumed on {name}")
    curve(below, gaps(resumed), "o", color=green, markersize=3.6, label=f"resumed on 2 ranks{': exactly 0' * exact}")
    below.set_ylabel("difference to\nundisturbed")
    below.set_xlabel("step (▲ checkpoint)")
    below.margins(y=0.6)

    kill = killed.last_step + 0.5
    for axes in (above, below):
        axes.axvline(kill, color=red, linestyle=(0, (4, 3)), linewidth=1.2)
        axes.grid(axis="y", color="#e6e6e6")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper right" if axes is above else "upper left")
        saved = range(plan.every - 1, plan.steps, plan.every)
        axes.plot(saved, [0] * len(saved), "^", color="#444444", clip_on=False, transform=axes.get_xaxis_transform())
    above.annotate(
        f"SIGKILL after step {killed.last_step}",
        (kill, 0.62),
        xytext=(6, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        color=red,
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(main())
