"""`holdfast import`: commit a training checkpoint of another tool to a run. Imports torch only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from holdfast.cli.output import SOUND, cell, print_json, print_note, size_text, stdout
from holdfast.errors import UsageError
from holdfast.runs.checkpoint import Checkpoint

__all__ = ["import_checkpoint"]

_MAX_NAMES_BYTES = 64 << 20


def import_checkpoint(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A DCP folder, a file of torch.save, a .ckpt, a Trainer's folder.")
    ],
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run to add the checkpoint to, new or not.")],
    step: Annotated[
        int | None,
        typer.Option(metavar="N", help="The last step that is done. Needed unless SOURCE counts the steps done."),
    ] = None,
    parameters: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A text file with the names of the optimizer's parameters, one per line."),
    ] = None,
    component: Annotated[
        list[str] | None,
        typer.Option(metavar="PART=NAME", help="The component that a part of SOURCE becomes. Can be repeated."),
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(metavar="PART", help="A part of SOURCE to leave out. Can be repeated.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")] = False,
) -> int:
    """Turn a training checkpoint of another tool into one of Holdfast's, from which a manager resumes.

    Models, optimizers, schedulers and other values become components. Nothing in SOURCE is run: content that could run
    code is refused, and the message names it.

    A framework that has done N steps goes on with step N: its last step, N - 1, is the step of the checkpoint.

    \b
    Examples:
      holdfast import old/step_1000 runs/tiny --step 999
      holdfast import last.pt runs/tiny --step 999 --component net=model
      holdfast import lightning_logs/version_0/checkpoints/last.ckpt runs/tiny
      holdfast import output/checkpoint-500 runs/tiny --parameters names.txt

    \b
    Exit codes:
      0  the checkpoint is committed
      1  the source is damaged; nothing is committed
      2  a source that cannot be imported, a wrong argument, a run in use, or a storage that failed
    """
    from holdfast.formats.importing.importing import import_checkpoint as import_to_run

    names = None if parameters is None else _names_in(parameters)
    checkpoint = import_to_run(
        source, run, step=step, parameters=names, components=_renamed(component or []), skip=tuple(skip or ())
    )
    if json:
        print_json(_as_json(checkpoint))
        return SOUND
    _print(checkpoint, stdout())
    return SOUND


def _names_in(path: Path) -> list[str]:
    try:
        if path.stat().st_size > _MAX_NAMES_BYTES:
            raise UsageError(f"{path} is too large for a list of names", advice="give one name per line")
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", advice="give a text file with one name per line") from error


def _renamed(pairs: list[str]) -> dict[str, str]:
    renamed = {}
    for pair in pairs:
        part, separator, name = pair.rpartition("=")
        if not separator or not part:
            raise UsageError(f"--component {pair}", advice="give PART=NAME, such as --component net=model")
        renamed[part] = name
    return renamed


def _print(checkpoint: Checkpoint, console: Console) -> None:
    note = checkpoint.extra["import"]
    text = f"committed step {checkpoint.step}: {size_text(checkpoint.size_bytes)} to {checkpoint.path}"
    console.print(cell(text), soft_wrap=True)
    for component, origin in note["components"].items():
        console.print(cell(f"  {component}: from {origin}"), soft_wrap=True)
    console.print(cell(f"a manager goes on with step {checkpoint.step + 1}"), soft_wrap=True)
    for line in note["changes"]:
        print_note(line)
    for line in note["left"]:
        print_note(f"left: {line}")


def _as_json(checkpoint: Checkpoint) -> dict[str, Any]:
    note = checkpoint.extra["import"]
    return {
        "path": checkpoint.path,
        "folder": checkpoint.folder,
        "step": checkpoint.step,
        "next_step": checkpoint.step + 1,
        "digest": checkpoint.digest,
        "size_bytes": checkpoint.size_bytes,
        "layout": note["layout"],
        "components": note["components"],
        "changes": note["changes"],
        "left": note["left"],
    }
