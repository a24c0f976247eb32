"""The commands: `holdfast ls`, `show`, `verify`, `tag`, `prune`, `export`, `import`, `unlock`, `doctor`.

Words enter, text and an exit code leave.

A command is a function that prints and returns its exit code; what it raises becomes a line and a code in one place.
Only `export` and `import` import torch, when they run.
"""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from holdfast._version import __version__
from holdfast.cli import doctor, export, import_, ls, prune, show, tag, unlock, verify
from holdfast.cli.output import as_command, forgive_encoding, print_note

__all__ = ["app", "main"]

app = typer.Typer(
    name="holdfast",
    no_args_is_help=True,
    add_completion=False,
    # A traceback of ours is for a bug report: plain, complete, and without the values of local variables.
    pretty_exceptions_enable=False,
    # Plain help reads the same in a terminal, a pipe and a document, and keeps the lines of the examples.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("ls")(as_command(ls.ls))
app.command("show", cls=show.ShowCommand)(as_command(show.show))
app.command("verify")(as_command(verify.verify))
app.command("tag")(as_command(tag.tag))
app.command("prune")(as_command(prune.prune))
app.command("export")(as_command(export.export))
app.command("import")(as_command(import_.import_checkpoint))
app.command("unlock")(as_command(unlock.unlock))
app.command("doctor")(as_command(doctor.doctor))


def main() -> None:
    """Run the `holdfast` script."""
    forgive_encoding()
    app(prog_name="holdfast")


class _Notes(logging.Handler):
    """What the library warns of, as a note. Python itself would print it as it is, with names that a file holds."""

    def emit(self, record: logging.LogRecord) -> None:
        print_note(record.getMessage())


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {__version__}")
        raise typer.Exit()


@app.callback()
def _about(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Look at the checkpoints of a training run, check them to the byte, tag, prune and export them.

    SOURCE is a run's folder, a checkpoint's folder, its manifest.json, a link such as RUN/latest, or RUN@SELECTOR.
    A selector is 'latest', 'best', 'best:METRIC', 'best:METRIC:max', a step, a tag or a folder's name.

    \b
    Examples:
      holdfast ls runs/tiny
      holdfast show runs/tiny@best:val_loss
      holdfast verify runs/tiny --all
      holdfast tag runs/tiny@500 release
      holdfast prune runs/tiny --keep-last 3 --keep-best val_loss:2
      holdfast export runs/tiny tiny.safetensors --format safetensors
      holdfast import last.ckpt runs/tiny
      holdfast unlock runs/tiny
      holdfast doctor runs/tiny --fix

    \b
    Exit codes:
      0  sound
      1  damaged
      2  a wrong argument, nothing there, a newer format, a run in use, or a storage that failed
    """
    notes = _Notes(logging.WARNING)
    logging.getLogger("holdfast").addHandler(notes)
    context.call_on_close(lambda: logging.getLogger("holdfast").removeHandler(notes))
