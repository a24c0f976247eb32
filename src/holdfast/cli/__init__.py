"""The command line: `holdfast ls`, `show`, `verify`. Words enter, text and an exit code leave. Imports no torch.

A command is a function that prints and returns its exit code; what it raises becomes a line and a code in one place.
"""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast._version import __version__
from holdfast.cli import ls, show, verify
from holdfast.cli.output import as_command, forgive_encoding

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


def main() -> None:
    """The entry point of the `holdfast` script."""
    forgive_encoding()
    app(prog_name="holdfast")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {__version__}")
        raise typer.Exit()


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Look at the checkpoints of a training run, and check them to the byte.

    SOURCE is a run's folder, a checkpoint's folder, its manifest.json, a link such as RUN/latest, or RUN@SELECTOR.
    A selector is 'latest', 'best', 'best:METRIC', 'best:METRIC:max', a step, a tag or a folder's name.

    \b
    Examples:
      holdfast ls runs/tiny
      holdfast show runs/tiny@best:val_loss
      holdfast verify runs/tiny --all

    \b
    Exit codes:
      0  sound
      1  damaged
      2  a wrong argument, nothing there, a newer format, or a storage that failed
    """
