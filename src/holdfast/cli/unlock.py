"""`holdfast unlock`: free a run whose writer has ended. Knows no torch."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.output import SOUND, cell, print_json, stdout
from holdfast.cli.sources import open_run
from holdfast.manager import functions


def unlock(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run: a folder or a URL.")],
    force: Annotated[
        bool, typer.Option("--force", help="Take the run from a process that lives. Its saves fail from then on.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")] = False,
) -> int:
    """Free a run for the next training when the process that held it has ended.

    If that process ran on this machine, the run is free at once. If it cannot be seen from here, or its claim is
    damaged, the command first waits for a heartbeat: usually one minute, at most two. A live process keeps the run.

    Nothing that was committed is touched. Never delete the folder lease/ by hand instead: the process that held the run
    may live.

    \b
    Examples:
      holdfast unlock runs/tiny
      holdfast unlock runs/tiny --force

    \b
    Exit codes:
      0  the run is free
      2  a process that lives holds it, nothing there, or a storage that failed
    """
    catalog = open_run(run)
    claim = functions.unlock(catalog.storage, force=force)
    if json:
        print_json({"run": catalog.storage.url, "free": True, "was_held_by": None if claim is None else claim.who})
    else:
        text = "was free already" if claim is None else f"is free; {claim.who} held it"
        stdout().print(cell(f"{catalog.storage.url} {text}"), soft_wrap=True)
    return SOUND
