"""`holdfast export`: write the weights of a checkpoint in another format. Imports torch only when it runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.output import SOUND, cell, count_text, print_json, size_text, stdout
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.formats.exporting.export import ExportReport

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kmgt]?i?b?)", re.IGNORECASE)
_MAX_SIZE_BYTES = 2**63 - 1
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


_Only = typer.Option("--only", metavar="COMPONENT", help="Which component; model by default. May be given again.")
_Rename = typer.Option(metavar="OLD=NEW", help="Rename tensors; '*' stands for anything, an empty NEW leaves them out.")
_Size = typer.Option(metavar="SIZE", help="The most bytes of tensors in one file, such as 5GB or 512MiB.")
_Type = typer.Option(metavar="TYPE", help="Convert floating-point tensors, as to bfloat16.")
_Format = typer.Option("--format", metavar="FORMAT", help="hf, safetensors, dcp, torch, nemo, peft or a plug-in's.")
_Source = typer.Argument(metavar="SOURCE", help="A run, RUN@SELECTOR, or a file or folder of a known format.")


def export(
    source: Annotated[str, _Source],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The new file or folder.")],
    format: Annotated[str, _Format],
    only: Annotated[list[str] | None, _Only] = None,
    dtype: Annotated[str | None, _Type] = None,
    rename: Annotated[list[str] | None, _Rename] = None,
    max_shard_size: Annotated[str | None, _Size] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")] = False,
) -> int:
    """Write the weights of a checkpoint in another format.

    Every byte is verified on the way. The target is complete or not there, and one that exists is never overwritten.

    \b
    Formats:
      safetensors  one file, or a folder of several with an index
      hf           a folder that transformers loads with from_pretrained
      peft         an adapter folder that PeftModel.from_pretrained loads
      dcp          a folder that torch.distributed.checkpoint.load reads
      torch        a file that torch.load reads with weights_only=True
      nemo         a .nemo archive

    \b
    Examples:
      holdfast export runs/tiny@best:val_loss tiny.safetensors --format safetensors
      holdfast export runs/llama out/llama --format hf --dtype bfloat16 --max-shard-size 5GB
      holdfast export runs/tiny@500 tiny.safetensors --format safetensors --rename 'body.*=layers.*'

    \b
    Exit codes:
      0  exported
      1  the checkpoint is damaged
      2  nothing there, a wrong argument, a target that exists, or a disk without room
    """
    options = _options(only, dtype, rename, max_shard_size)
    # Here, because it imports torch, which most other commands do not need.
    from holdfast.formats.exporting import export as exporting

    report = exporting.export(source, target, format=format, **options)
    if json:
        print_json(_as_json(report))
    else:
        stdout().print(cell(_sentence(report)), soft_wrap=True)
    return SOUND


def _options(
    only: Sequence[str] | None, dtype: str | None, rename: Sequence[str] | None, max_shard_size: str | None
) -> dict[str, Any]:
    """Return what was given on the command line as arguments of the library."""
    names = list(only or ["model"])
    return {
        "only": names[0] if len(names) == 1 else names,
        "dtype": dtype,
        "rename": _renames(rename) if rename else None,
        "max_shard_bytes": _size_bytes(max_shard_size) if max_shard_size is not None else None,
    }


def _size_bytes(text: str) -> int:
    """Return the number of bytes that a size stands for: KB to TB are powers of 1000, KiB to TiB of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--max-shard-size {text!r} is no size", advice="give one such as 5GB or 512MiB")
    unit = match["unit"].lower().removesuffix("b")
    number = float(match["number"]) * (1024 if unit.endswith("i") else 1000) ** _POWERS[unit.removesuffix("i")]
    if number > _MAX_SIZE_BYTES:
        raise UsageError(f"--max-shard-size {text[:40]!r} is no size of a file: it is too large", advice="leave it out")
    size_bytes = int(number)
    if size_bytes <= 0:
        raise UsageError(f"--max-shard-size {text!r} is no size above 0")
    return size_bytes


def _renames(words: Sequence[str]) -> dict[str, str | None]:
    """Return `OLD=NEW` words as a mapping; None where there is no new name."""
    found: dict[str, str | None] = {}
    for word in words:
        old, separator, new = word.partition("=")
        if not old or not separator:
            raise UsageError(f"--rename {word!r} is no pair", advice="give OLD=NEW, such as 'body.*=layers.*'")
        if old in found:
            raise UsageError(f"--rename has '{old}' twice")
        found[old] = new or None
    return found


def _sentence(report: ExportReport) -> str:
    return (
        f"exported {count_text(len(report.names), 'tensor')}, {size_text(report.bytes_written)}, to {report.path} "
        f"({report.format}) in {report.seconds:.2f} s"
    )


def _as_json(report: ExportReport) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "format": report.format,
        "tensors": len(report.names),
        "bytes_written": report.bytes_written,
        "seconds": report.seconds,
        "left_out": list(report.left_out),
    }
