"""What a command leaves on the terminal: text that cannot harm it, JSON, errors, exit codes. Knows no checkpoints.

Names and values come from files that anybody may have written. They are printed only through `visible`, and never as
markup: a checkpoint can neither move the cursor, nor recolour a verdict, nor forge a line of our output.
"""

from __future__ import annotations

import functools
import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, ParamSpec

import typer
from rich.console import Console
from rich.text import Text

from holdfast.errors import CorruptCheckpointError, HoldfastError

SOUND = 0
DAMAGED = 1
REFUSED = 2
_INTERRUPTED = 130
_PIPE_CLOSED = 141

# A pipe has no width. Wide enough that no row is folded: what reads a pipe counts lines.
_PIPE_COLUMNS = 1000
_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

_Parameters = ParamSpec("_Parameters")


def as_command(command: Callable[_Parameters, int]) -> Callable[_Parameters, None]:
    """Make a function that returns its exit code one that typer can call; see `_exit_code` for what it may raise."""

    @functools.wraps(command)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> None:
        raise typer.Exit(_exit_code(lambda: command(*args, **kwargs)))

    return run


def _exit_code(work: Callable[[], int]) -> int:
    """Run a command and print what failed on stderr. Only damage may give 1, because scripts act on it."""
    try:
        return work()
    except HoldfastError as error:
        print_error(_neutral(error))
        return DAMAGED if isinstance(error, CorruptCheckpointError) else REFUSED
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return _PIPE_CLOSED
    except Exception:
        # Python would exit with 1 here, which means that the checkpoint is damaged.
        typer.echo(traceback.format_exc() + "This is a bug in Holdfast; please report it.", err=True)
        return REFUSED


def visible(text: object) -> str:
    """Text with everything that a terminal would obey, or not show, as an escape such as `\\x1b`."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in shown)


def cut(text: str, characters: int) -> str:
    """Return the beginning of a text that is too long."""
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def cell(text: object, style: str = "") -> Text:
    """Text for a table or a line. A `Text` is never read as markup."""
    return Text(visible(text), style=style)


def stdout() -> Console:
    console = _QuietConsole(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_COLUMNS
    return console


def stderr() -> Console:
    return _QuietConsole(stderr=True, highlight=False, markup=False, emoji=False)


def print_json(value: Any) -> None:
    """Plain values as JSON, in ASCII: safe for any encoding, and an escape in a name stays an escape."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_error(message: str) -> None:
    _say("error: ", "bold red", message)


def print_note(message: str) -> None:
    _say("note: ", "yellow", visible(message))


def size_text(size_bytes: int) -> str:
    """`11.6 KiB`."""
    exponent = min(max(size_bytes.bit_length() - 1, 0) // 10, len(_SIZE_UNITS) - 1)
    return f"{size_bytes / 1024**exponent:,.1f} {_SIZE_UNITS[exponent]}" if exponent else f"{size_bytes} B"


def count_text(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def forgive_encoding() -> None:
    """Print characters that the encoding of the terminal does not have as escapes instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class _QuietConsole(Console):
    """A console that lets a closed pipe through: rich would exit with 1, which here means damage."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _say(label: str, style: str, message: str) -> None:
    # Not wrapped, so that a path can be copied and a log can be searched.
    stderr().print(Text.assemble((label, style), message), soft_wrap=True)


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


def _neutral(error: HoldfastError) -> str:
    """Return the message of an error with control characters in its fields escaped: its line breaks are our own."""
    return str(type(error)(**{name: _neutral_field(value) for name, value in error.fields.items()}))


def _neutral_field(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible(key): _neutral_field(item) for key, item in value.items()}
    return tuple(_neutral_field(item) for item in value) if isinstance(value, list | tuple) else value


def _drop_stdout() -> None:
    """Redirect stdout, which its reader has closed: otherwise the interpreter reports an error at its exit."""
    try:
        target = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, target)
    os.close(nowhere)
