"""`holdfast doctor`: what is damaged, unfinished or left over in a run, and with `--fix` what was mended. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console

from holdfast.cli.columns import Columns
from holdfast.cli.output import DAMAGED, SOUND, cell, count_text, print_json, stdout
from holdfast.cli.sources import open_run, scan_run
from holdfast.runs.doctor import Finding, examine, mend


def doctor(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run: a folder or a URL.")],
    fix: Annotated[bool, typer.Option("--fix", help="Repair what is safe to repair.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")] = False,
) -> int:
    """Examine the records of a run: attempts that were never committed, damaged notes and claims, links to nowhere.

    The bytes of checkpoints are not read: 'holdfast verify --all' does that. Without --fix nothing is changed. With
    --fix damaged records are written again or removed, and files that ended attempts and ended readers left are
    removed; no checkpoint is changed. A run that is being trained is not changed.

    \b
    Examples:
      holdfast doctor runs/tiny
      holdfast doctor runs/tiny --fix

    \b
    Exit codes:
      0  nothing is damaged, or all damage was mended
      1  something is damaged
      2  nothing there, a run in use, or a storage that failed
    """
    catalog = open_run(run)
    scan_run(catalog)
    findings = mend(catalog) if fix else examine(catalog)
    if json:
        print_json(_as_json(catalog.storage.url, findings))
    else:
        _print(stdout(), findings, fix)
    return DAMAGED if any(found.damage and not found.mended for found in findings) else SOUND


def _as_json(run: str, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "run": run,
        "damaged": any(found.damage and not found.mended for found in findings),
        "findings": [
            {
                "kind": found.kind,
                "path": found.path,
                "problem": found.problem,
                "remedy": found.remedy,
                "damage": found.damage,
                "mendable": found.mendable,
                "mended": found.mended,
            }
            for found in findings
        ],
    }


def _print(console: Console, findings: Sequence[Finding], fix: bool) -> None:
    if findings:
        rows = Columns("", "kind", "path", "problem", "remedy")
        for found in findings:
            texts = (found.kind, found.path, found.problem, found.remedy)
            rows.add_row(cell(_word(found), _style(found)), *(cell(text) for text in texts))
        console.print(rows)
    console.print(cell(_verdict(findings, fix), "bold"), soft_wrap=True)


def _word(found: Finding) -> str:
    if found.mended:
        return "mended"
    return "damaged" if found.damage else "note"


def _style(found: Finding) -> str:
    if found.mended:
        return "green"
    return "red" if found.damage else "yellow"


def _verdict(findings: Sequence[Finding], fix: bool) -> str:
    if not findings:
        return "nothing is damaged, unfinished or left over"
    damaged = sum(found.damage and not found.mended for found in findings)
    text = f"{count_text(len(findings), 'finding')}, {damaged:,} of them damage"
    if fix:
        return f"{text} that is left; {sum(found.mended for found in findings):,} mended"
    mendable = sum(found.mendable for found in findings)
    return f"{text}; --fix may mend {mendable:,}" if mendable else text
