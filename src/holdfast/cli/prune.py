"""`holdfast prune`: what goes when a policy decides what to keep of a run, shown or done. Knows no torch.

Without `--yes` it looks and does nothing. What was freed is what was there before and is not there afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from holdfast.cli.columns import Columns
from holdfast.cli.output import SOUND, cell, count_text, print_json, print_note, size_text, stdout
from holdfast.cli.sources import open_run, print_rejected, scan_run, unreadable
from holdfast.errors import UsageError
from holdfast.manager import functions
from holdfast.ondisk import paths
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Scan
from holdfast.runs.retention import Decision, KeepBest, KeepEvery, KeepLast, KeepPolicy, KeepTagged
from holdfast.runs.selection import not_found
from holdfast.runs.selector import Selector
from holdfast.storage.base import Storage

_RECORDS = (paths.ATTEMPT, paths.MANIFEST)


def prune(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run: a folder or a URL.")],
    keep_last: Annotated[
        int | None, typer.Option(metavar="N", help="Keep the last N of the line that goes on.")
    ] = None,
    keep_best: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC[:N[:min|max]]", help="Keep the best N, 1 by default. May be given several times."),
    ] = None,
    keep_every_steps: Annotated[
        int | None, typer.Option(metavar="N", help="Keep the first at or after each multiple of N.")
    ] = None,
    keep_every_minutes: Annotated[
        float | None, typer.Option(metavar="MINUTES", help="Keep one in so many minutes, from the first on.")
    ] = None,
    keep_tagged: Annotated[
        bool, typer.Option("--keep-tagged", help="Keep those with a tag, as all others do.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it nothing is deleted.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")] = False,
) -> int:
    """Show what would be deleted of a run, and with --yes delete it.

    A checkpoint is kept if any of the options keeps it. These are always kept: the newest sound one, those with a tag,
    those that a process is reading, and those that a restore found damaged. Files of uncommitted attempts are deleted.

    A run that is being trained is refused: the training prunes it, as its keep= says.

    \b
    Examples:
      holdfast prune runs/tiny --keep-last 3 --keep-best val_loss:2
      holdfast prune runs/tiny --keep-best accuracy:1:max --keep-every-steps 10000
      holdfast prune runs/tiny --keep-last 3 --yes

    \b
    Exit codes:
      0  shown, or deleted
      1  nothing can be decided, because manifests are damaged
      2  no option that keeps anything, a wrong argument, nothing there, a run in use, or a storage that failed
    """
    policy = _policy(keep_last, keep_best or [], keep_every_steps, keep_every_minutes, keep_tagged)
    catalog = open_run(run)
    scan = scan_run(catalog)
    scan.require_readable()
    if not scan.checkpoints:
        raise not_found(catalog.storage, Selector("latest"), scan)
    print_rejected(unreadable(catalog, scan))
    outcome = _prune(catalog, scan, policy) if yes else _look(catalog, scan, policy)
    if json:
        print_json(_as_json(outcome))
    else:
        _print(stdout(), outcome)
    return SOUND


class _Line(NamedTuple):
    """A checkpoint, or, where not `committed`, an attempt: whether it is kept, and whether it is deleted already."""

    folder: str
    step: int
    size_bytes: int
    keep: bool
    reasons: tuple[str, ...]
    deleted: bool
    committed: bool


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What was decided, line by line, and whether it was done."""

    run: str
    lines: tuple[_Line, ...]
    done: bool

    @property
    def checkpoints(self) -> list[_Line]:
        return [line for line in self.lines if line.committed]

    @property
    def going(self) -> list[_Line]:
        return [line for line in self.lines if not line.keep]

    @property
    def planned_bytes(self) -> int:
        return sum(line.size_bytes for line in self.going)

    @property
    def freed_bytes(self) -> int:
        return sum(line.size_bytes for line in self.going if line.deleted)


# What to keep


def _policy(
    last: int | None, best: Sequence[str], every_steps: int | None, every_minutes: float | None, tagged: bool
) -> KeepPolicy:
    parts: list[KeepPolicy] = [_keep_best(text) for text in best]
    if last is not None:
        parts.insert(0, KeepLast(last))
    if every_steps is not None:
        parts.append(KeepEvery(steps=every_steps))
    if every_minutes is not None:
        parts.append(KeepEvery(minutes=every_minutes))
    if tagged:
        parts.append(KeepTagged())
    if not parts:
        raise UsageError(
            "no option says what to keep",
            advice="use --keep-last, --keep-best, --keep-every-steps, --keep-every-minutes or --keep-tagged",
        )
    return reduce(lambda joined, part: joined | part, parts)


def _keep_best(text: str) -> KeepPolicy:
    # From the end on: a metric may have a ':' in its name, and then has to be followed by its N.
    match = re.fullmatch(r"(?s:(?P<metric>.*):(?P<count>-?[0-9]{1,18})(?::(?P<mode>[^:]+))?)|(?P<alone>[^:]*)", text)
    if match is None:
        raise _unreadable(text)
    if match["alone"] is not None:
        return KeepBest(match["alone"])
    mode: Any = match["mode"] or "min"  # the policy itself refuses what is none
    return KeepBest(match["metric"], int(match["count"]), mode)


def _unreadable(text: str) -> UsageError:
    return UsageError(
        f"--keep-best {text!r} cannot be read",
        advice="write METRIC, METRIC:N or METRIC:N:max, such as val_loss:2; a METRIC with a ':' in it needs its N",
    )


# What goes


def _look(catalog: Catalog, scan: Scan, policy: KeepPolicy) -> _Outcome:
    held = _held(catalog, scan)
    decisions = functions.retention(catalog.storage, policy)
    return _Outcome(catalog.storage.url, _lines(decisions, scan.attempts, held, held), done=False)


def _prune(catalog: Catalog, scan: Scan, policy: KeepPolicy) -> _Outcome:
    held = _held(catalog, scan)
    decisions = functions.prune(catalog.storage, policy)
    left = _held(catalog, catalog.scan())
    outcome = _Outcome(catalog.storage.url, _lines(decisions, scan.attempts, held, left), done=True)
    for line in outcome.going:
        if not line.deleted:
            print_note(f"{line.folder} is not deleted: a process is reading it; prune again later")
    return outcome


def _lines(
    decisions: Sequence[Decision], attempts: Sequence[str], held: Mapping[str, int], left: Mapping[str, int]
) -> tuple[_Line, ...]:
    decided = [
        _Line(one.folder, one.step, held.get(one.folder, 0), one.keep, one.reasons, one.folder not in left, True)
        for one in decisions
    ]
    cleared = [
        _Line(name, parsed.step, held[name], False, ("never committed",), name not in left, False)
        for name in attempts
        if name in held and (parsed := paths.parse_folder(name)) is not None
    ]
    return (*decided, *cleared)


def _held(catalog: Catalog, scan: Scan) -> dict[str, int]:
    """Return the bytes of each checkpoint, and of each attempt that has any. The records of who began and who abandoned
    an attempt do not count: they may have to stay."""
    attempts = {name: _bytes_below(catalog.storage, name, _RECORDS) for name in scan.attempts}
    checkpoints = {found.folder: found.size_bytes for found in scan.checkpoints}
    return {**{name: size_bytes for name, size_bytes in attempts.items() if size_bytes}, **checkpoints}


def _bytes_below(storage: Storage, folder: str, without: Sequence[str] = ()) -> int:
    return sum(
        _bytes_below(storage, paths.key(folder, entry.name)) if entry.size_bytes is None else entry.size_bytes
        for entry in storage.entries(folder)
        if entry.name not in without
    )


# Output


def _as_json(outcome: _Outcome) -> dict[str, Any]:
    return {
        "run": outcome.run,
        "dry_run": not outcome.done,
        "planned_bytes": outcome.planned_bytes,
        "freed_bytes": outcome.freed_bytes,
        "checkpoints": [
            {
                "folder": line.folder,
                "path": f"{outcome.run}/{line.folder}",
                "step": line.step,
                "size_bytes": line.size_bytes,
                "keep": line.keep,
                "reasons": list(line.reasons),
                "deleted": line.deleted,
            }
            for line in outcome.checkpoints
        ],
        "attempts": [
            {"folder": line.folder, "size_bytes": line.size_bytes, "cleared": line.deleted}
            for line in outcome.lines
            if not line.committed
        ],
    }


def _print(console: Console, outcome: _Outcome) -> None:
    rows = Columns("", "step", "folder", "size", "reasons", right=("step", "size"))
    for line in outcome.lines:
        texts = (line.step, line.folder, size_text(line.size_bytes), "; ".join(line.reasons))
        rows.add_row(cell(_word(line), "green" if line.keep else "red"), *(cell(text) for text in texts))
    console.print(rows)
    console.print(cell(_verdict(outcome), "bold"), soft_wrap=True)


def _word(line: _Line) -> str:
    if line.keep:
        return "keep"
    if line.committed:
        return "deleted" if line.deleted else "delete"
    return "cleared" if line.deleted else "clear"


def _verdict(outcome: _Outcome) -> str:
    if not outcome.going:
        return f"nothing to delete: {count_text(len(outcome.checkpoints), 'checkpoint')} kept"
    chosen = [line for line in outcome.going if line.deleted or not outcome.done]
    committed = sum(line.committed for line in chosen)
    of = f"{committed:,} of {count_text(len(outcome.checkpoints), 'checkpoint')}"
    if len(chosen) > committed:
        of += f", and what {count_text(len(chosen) - committed, 'attempt')} left"
    if outcome.done:
        return f"freed {size_text(outcome.freed_bytes)}: {of}"
    return f"nothing was deleted; --yes would free {size_text(outcome.planned_bytes)}: {of}"
