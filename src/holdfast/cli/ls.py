"""`holdfast ls`: what a run holds, as a table or as JSON. Reads manifests and notes alone, imports no torch."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from holdfast.cli.columns import Columns
from holdfast.cli.output import cell, count_text, cut, print_json, size_text, stdout
from holdfast.cli.sources import Unreadable, exit_code_of, local_time, open_run, scan_run, unreadable
from holdfast.ondisk.codec import Json, plain
from holdfast.ondisk.paths import folder_name
from holdfast.runs.annotations import sum_up
from holdfast.runs.checkpoint import Checkpoint, Scan
from holdfast.runs.selection import choose
from holdfast.runs.selector import Selector

_SHOWN_METRICS = 4
_NAME_CHARACTERS = 40


def ls(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run: a folder or a URL.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")] = False,
) -> int:
    """List the checkpoints of a run, the latest first.

    Below them stands what a restore found damaged, what was never committed, and manifests that are damaged. Only
    manifests and notes are read: 'holdfast verify' checks the bytes.

    \b
    Examples:
      holdfast ls runs/tiny
      holdfast ls runs/tiny --json | jq '.checkpoints[0].step'

    \b
    Exit codes:
      0  every manifest could be read
      1  a manifest is damaged
      2  RUN is not there or no run, one of its manifests cannot be read now, or only by a newer version
    """
    catalog = open_run(run)
    scan = scan_run(catalog)
    broken = unreadable(catalog, scan)
    if json:
        print_json(_as_json(catalog.storage.url, scan, broken))
    else:
        _print(catalog.storage.url, scan, broken)
    return exit_code_of(broken)


def metrics_of(checkpoint: Checkpoint) -> dict[str, Json]:
    """Return the metrics of the save and those reported later, for display. It never raises."""
    late = sum_up(checkpoint.notes, ()).metrics
    return {name: plain(value) for name, value in {**checkpoint.head.metrics, **late}.items()}


def _as_json(url: str, scan: Scan, broken: list[Unreadable]) -> dict[str, Any]:
    latest = _latest(scan)
    return {
        "run": url,
        "checkpoints": [_checkpoint_json(found, latest=found is latest) for found in scan.checkpoints],
        "attempts": list(scan.attempts),
        "damaged": [{"folder": one.folder, "reason": one.reason} for one in broken if one.known and not one.newer],
        "unreadable": [{"folder": one.folder, "reason": one.reason} for one in broken if not one.known],
        "unsupported": [{"folder": one.folder, "reason": one.reason} for one in broken if one.newer],
    }


def _latest(scan: Scan) -> Checkpoint | None:
    """Return the latest checkpoint; None also if a manifest cannot be read now, because that may be the latest."""
    return None if scan.unreadable else choose(scan, Selector("latest"))


def _checkpoint_json(checkpoint: Checkpoint, *, latest: bool) -> dict[str, Any]:
    manifest = checkpoint.head
    return {
        "folder": checkpoint.folder,
        "path": checkpoint.path,
        "latest": latest,
        "step": manifest.step,
        "sequence": manifest.sequence,
        "parent": manifest.parent,
        "digest": checkpoint.digest,
        "created": manifest.created,
        "size_bytes": manifest.size_bytes,
        "world_size": manifest.world_size,
        "metrics": metrics_of(checkpoint),
        "tags": list(checkpoint.tags),
        "damage": checkpoint.damage or None,
    }


def _print(url: str, scan: Scan, broken: list[Unreadable]) -> None:
    console = stdout()
    if scan.checkpoints:
        _print_checkpoints(console, scan)
    else:
        console.print(cell(f"{url} has no checkpoint yet"), soft_wrap=True)
    if scan.attempts:
        console.print(cell(f"{count_text(len(scan.attempts), 'attempt')} never committed:", "dim"))
    for name in scan.attempts:
        console.print(cell(f"  {name}", "dim"))
    for one in broken:
        word = "newer format" if one.newer else "damaged" if one.known else "cannot be read now"
        console.print(cell(f"{word}: {one.folder}: {one.reason}", "dim"), soft_wrap=True)


def _print_checkpoints(console: Console, scan: Scan) -> None:
    checkpoints, latest = scan.checkpoints, _latest(scan)
    # The name of a folder adds nothing to the step, unless it was not the first attempt at it.
    named = any(found.folder != folder_name(found.step) for found in checkpoints)
    columns = ["", "step", "sequence", "created", "size", "ranks", "metrics", "tags", *(["folder"] if named else [])]
    rows = Columns(*columns, right=("step", "sequence", "size", "ranks"))
    for found in checkpoints:
        rows.add_row(
            _mark(found, latest=found is latest),
            cell(found.step, "bold"),
            cell(found.sequence),
            cell(cut(local_time(found.head.created), _NAME_CHARACTERS)),
            cell(size_text(found.size_bytes)),
            cell(found.world_size),
            cell(_metrics(metrics_of(found))),
            cell(cut(", ".join(found.tags), _NAME_CHARACTERS)),
            *([cell(found.folder)] if named else []),
        )
    console.print(rows)
    console.print(cell("the latest is not known" if scan.unreadable else "* latest", "dim"))
    for found in checkpoints:
        if found.damage:
            console.print(cell(f"! found damaged: {found.folder}: {found.damage}", "dim"), soft_wrap=True)


def _mark(checkpoint: Checkpoint, *, latest: bool) -> Text:
    mark = cell("*" if latest else "", "green")
    return mark.append_text(cell("!", "bold red")) if checkpoint.damage else mark


def _metrics(metrics: dict[str, Json]) -> str:
    shown = [f"{_short(name)} {_short(value)}" for name, value in list(metrics.items())[:_SHOWN_METRICS]]
    hidden = len(metrics) - len(shown)
    return ", ".join(shown) + (f", +{hidden} more" if hidden > 0 else "")


def _short(value: Json) -> str:
    return cut(f"{value:.6g}" if isinstance(value, float) else str(value), _NAME_CHARACTERS)
