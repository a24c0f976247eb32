"""`holdfast verify`: check checkpoints to the byte, and name what is damaged. Knows no torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console

from holdfast.cli.output import DAMAGED, REFUSED, SOUND, cell, count_text, print_json, size_text, stdout
from holdfast.cli.sources import (
    Unreadable,
    find,
    open_run,
    open_source,
    print_rejected,
    reason_of,
    scan_run,
    unreadable,
)
from holdfast.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError, UsageError
from holdfast.ondisk import paths
from holdfast.runs import verify as verifying
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.progress import Progress
from holdfast.runs.report import Problem


class Depth(StrEnum):
    """How much is checked."""

    full = "full"
    quick = "quick"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one checkpoint. `newer`: only a newer version can read it, so nothing was checked. Where not
    `known`: the storage cannot be read now, so the result is unknown."""

    path: str
    step: int
    problems: tuple[Problem, ...]
    checked_bytes: int = 0
    newer: bool = False
    known: bool = True

    @property
    def damaged(self) -> bool:
        return not self.ok and not self.newer and self.known

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A run, a checkpoint, a link, or RUN@SELECTOR.")],
    select: Annotated[str, typer.Option(metavar="SELECTOR", help="Which checkpoint of the run.")] = "latest",
    depth: Annotated[
        Depth, typer.Option(help="full: every byte. quick: that each file is there and has its size.")
    ] = Depth.full,
    every: Annotated[bool, typer.Option("--all", help="Every checkpoint of the run; SOURCE is a run.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")] = False,
) -> int:
    """Check checkpoints to the byte and name every damage.

    What is on the disk is compared with the manifest; a damage is named by its file, leaf and byte range.

    A selector is 'latest', 'best', 'best:METRIC', 'best:METRIC:max', a step, a tag or a folder's name.

    \b
    Examples:
      holdfast verify runs/tiny
      holdfast verify runs/tiny@500 --depth quick
      holdfast verify runs/tiny --all --json

    \b
    Exit codes:
      0  sound
      1  damaged; with --all, any of them, or a manifest
      2  nothing there, a wrong argument, a newer format, or a storage that cannot be read now
    """
    if every and select != "latest":
        raise UsageError("--all and --select contradict each other", advice="give one of them")
    started = time.monotonic()
    outcomes = []
    for outcome in _every(source, depth) if every else _one(source, select, depth):
        outcomes.append(outcome)
        if not json:
            _print_outcome(stdout(), outcome)
    if json:
        print_json(_as_json(outcomes))
    else:
        _print_verdict(stdout(), outcomes, depth, time.monotonic() - started)
    return _exit_code(outcomes)


def _one(source: str, select: str, depth: Depth) -> Iterator[Outcome]:
    catalog, selector = open_source(source, select)
    try:
        checkpoint, rejected = find(catalog, selector)
    except CorruptCheckpointError as error:
        # A folder that was named is one checkpoint, and its manifest a file of it like any other.
        if selector.kind != "folder":
            raise
        yield _unread(catalog, Unreadable(selector.name, reason_of(error), newer=False))
        return
    print_rejected(rejected)
    yield _checked(checkpoint, depth)


def _every(source: str, depth: Depth) -> Iterator[Outcome]:
    catalog = open_run(source)
    scan = scan_run(catalog)
    if not scan.checkpoints and not scan.damaged and not scan.unreadable:
        raise CheckpointNotFoundError("there is no checkpoint to verify", run=catalog.storage.url)
    for one in unreadable(catalog, scan):
        yield _unread(catalog, one)
    for checkpoint in scan.checkpoints:
        try:
            yield _checked(checkpoint, depth)
        except StorageError as error:
            yield _unread(
                catalog, Unreadable(checkpoint.folder, reason_of(error), newer=False, known=False), error.file
            )


def _checked(checkpoint: Checkpoint, depth: Depth) -> Outcome:
    with Progress(f"verifying step {checkpoint.step}", checkpoint.size_bytes) as bar:
        report = verifying.verify(checkpoint, depth.value, on_bytes=bar.add)
    return Outcome(report.path, report.step, report.problems, report.checked_bytes)


def _unread(catalog: Catalog, one: Unreadable, file: str | None = None) -> Outcome:
    named = paths.parse_folder(one.folder)
    problem = Problem(file or paths.MANIFEST, one.reason)
    path = f"{catalog.storage.url}/{one.folder}"
    return Outcome(path, named.step if named else 0, (problem,), newer=one.newer, known=one.known)


def _exit_code(outcomes: list[Outcome]) -> int:
    if any(outcome.damaged for outcome in outcomes):
        return DAMAGED
    return SOUND if all(outcome.ok for outcome in outcomes) else REFUSED


def _as_json(outcomes: list[Outcome]) -> dict[str, Any]:
    return {"ok": all(outcome.ok for outcome in outcomes), "checkpoints": [_outcome_json(one) for one in outcomes]}


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "path": outcome.path,
        "step": outcome.step,
        "ok": outcome.ok,
        "checked_bytes": outcome.checked_bytes,
        "problems": [
            {"file": one.file, "leaf": one.leaf, "byte_range": one.byte_range, "what": one.what}
            for one in outcome.problems
        ],
    }


def _print_outcome(console: Console, outcome: Outcome) -> None:
    word, style = _word(outcome)
    line = cell(word, style)
    line.append_text(cell(f"  step {outcome.step}  {outcome.path}"))
    console.print(line, soft_wrap=True)
    for problem in outcome.problems:
        console.print(cell(f"  {problem}"), soft_wrap=True)


def _word(outcome: Outcome) -> tuple[str, str]:
    if outcome.ok:
        return "sound", "green"
    if not outcome.known:
        return "not readable now", "yellow"
    return ("newer", "yellow") if outcome.newer else ("damaged", "bold red")


def _print_verdict(console: Console, outcomes: list[Outcome], depth: Depth, seconds: float) -> None:
    wrong = [outcome for outcome in outcomes if not outcome.ok]
    size = size_text(sum(outcome.checked_bytes for outcome in outcomes))
    what = f"{size} checked" if depth is Depth.full else "names and sizes checked, no bytes"
    effort = f"{what} in {seconds:.2f} s"
    if not wrong:
        console.print(cell(f"sound: {count_text(len(outcomes), 'checkpoint')}, {effort}", "green"))
        return
    problems = count_text(sum(len(outcome.problems) for outcome in wrong), "problem")
    word = "damaged" if _exit_code(outcomes) == DAMAGED else "not checked"
    of = f"{len(wrong)} of {count_text(len(outcomes), 'checkpoint')}"
    console.print(cell(f"{word}: {of}, {problems}, {effort}", "bold red"))
