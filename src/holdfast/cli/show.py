"""`holdfast show`: one checkpoint, from its manifest and notes, as text or as JSON. Opens no tensor. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from json import dumps
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from holdfast.cli.columns import Columns, Lines
from holdfast.cli.ls import metrics_of
from holdfast.cli.output import SOUND, cell, count_text, cut, print_json, size_text, stdout
from holdfast.cli.sources import find, local_time, open_source, print_rejected
from holdfast.errors import UsageError
from holdfast.ondisk.codec import Json, plain
from holdfast.ondisk.manifest import STATE_DICT_NOTE, Manifest, MeshRecord, TensorRecord
from holdfast.runs.checkpoint import Checkpoint

_EVERY = "*"
_SHOWN_FILES = 24
_SHOWN_ITEMS = 16
_VALUE_CHARACTERS = 200
_VALUES = ("progress", "extra", "config", "guards")


class ShowCommand(TyperCommand):
    """`--tensors` with its glob left out means every tensor; typer itself has no option with an optional value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(_with_glob(args)))


def show(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A run, a checkpoint, a link, or RUN@SELECTOR.")],
    select: Annotated[str, typer.Option(metavar="SELECTOR", help="Which checkpoint of the run.")] = "latest",
    tensors: Annotated[
        str | None,
        typer.Option(metavar="[GLOB]", help="List the tensors, or those whose names match. After SOURCE."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")] = False,
) -> int:
    """Show what one checkpoint holds.

    Its facts, metrics, progress, config, guards, components and files, from the manifest and from what was noted since:
    tags, metrics that came late, damage that a restore found.

    A selector is 'latest', 'best', 'best:METRIC', 'best:METRIC:max', a step, a tag or a folder's name.

    \b
    Examples:
      holdfast show runs/tiny
      holdfast show runs/tiny@500
      holdfast show runs/tiny --select best:val/loss --json
      holdfast show runs/tiny/latest --tensors 'model.*.weight'

    \b
    Exit codes:
      0  shown
      1  its manifest is damaged
      2  nothing there, a wrong selector, no tensor that matches, or a newer format
    """
    checkpoint, rejected = find(*open_source(source, select))
    print_rejected(rejected)
    chosen = None if tensors is None else _matching(checkpoint.manifest, tensors)
    if json:
        print_json(_as_json(checkpoint, chosen))
    else:
        _print(checkpoint, chosen)
    return SOUND


class _Component(NamedTuple):
    name: str
    kind: str
    scopes: int
    tensors: int
    size_bytes: int


def _with_glob(args: list[str]) -> Iterator[str]:
    for index, word in enumerate(args):
        yield word
        following = args[index + 1 : index + 2]
        if word == "--":
            yield from args[index + 1 :]
            return
        if word == "--tensors" and (not following or following[0].startswith("-")):
            yield _EVERY


def _matching(manifest: Manifest, glob: str) -> list[TensorRecord]:
    found = [tensor for tensor in manifest.tensors if fnmatchcase(tensor.name, glob)]
    if not found and glob != _EVERY:
        raise UsageError(
            f"no tensor's name matches {glob!r}", step=manifest.step, advice="'--tensors' alone lists all names"
        )
    return found


def _components(manifest: Manifest) -> list[_Component]:
    """Return each component with its content. A leaf's name starts with its component's, up to the first '.' or '@'."""
    scopes = Counter(tree.component for tree in manifest.trees)
    sizes: dict[str, list[int]] = {name: [] for name in scopes}
    for tensor in manifest.tensors:
        sizes.setdefault(re.split("[.@]", tensor.name, maxsplit=1)[0], []).append(tensor.size_bytes)
    kinds = {tree.component: tree.kind for tree in manifest.trees}
    return [
        _Component(name, kinds.get(name, ""), scopes[name], len(tensor_sizes), sum(tensor_sizes))
        for name, tensor_sizes in sizes.items()
    ]


def _as_json(checkpoint: Checkpoint, tensors: list[TensorRecord] | None) -> dict[str, Any]:
    manifest = checkpoint.manifest
    listed = {} if tensors is None else {"tensors": [_tensor_json(tensor) for tensor in tensors]}
    return {
        "path": checkpoint.path,
        "folder": checkpoint.folder,
        "run_id": manifest.run_id,
        "step": manifest.step,
        "sequence": manifest.sequence,
        "parent": manifest.parent,
        "digest": checkpoint.digest,
        "created": manifest.created,
        "world_size": manifest.world_size,
        "meshes": [{"shape": list(mesh.shape), "dimensions": list(mesh.dimensions)} for mesh in manifest.meshes],
        "size_bytes": manifest.size_bytes,
        "tags": list(checkpoint.tags),
        "damage": checkpoint.damage or None,
        "versions": manifest.versions,
        **_values(checkpoint),
        "components": [component._asdict() for component in _components(manifest)],
        "files": [{"name": file.name, "size_bytes": file.size_bytes, "digest": file.digest} for file in manifest.files],
        **listed,
    }


def _values(checkpoint: Checkpoint) -> dict[str, Json]:
    manifest = checkpoint.manifest
    stored = {name: plain(getattr(manifest, name)) for name in _VALUES}
    # How a plain state dict was laid out is no user's word.
    extra = {key: value for key, value in manifest.extra.items() if key != STATE_DICT_NOTE}
    return {"metrics": metrics_of(checkpoint), **stored, "extra": plain(extra)}


def _tensor_json(tensor: TensorRecord) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "size_bytes": tensor.size_bytes,
        "chunks": len(tensor.chunks),
        "sharded": tensor.sharded,
    }


def _print(checkpoint: Checkpoint, tensors: list[TensorRecord] | None) -> None:
    console = stdout()
    console.print(_facts(checkpoint))
    for name, value in _values(checkpoint).items():
        _print_values(console, name, value)
    _print_table(console, "components", _component_table(_components(checkpoint.manifest)))
    _print_table(console, "files", _file_table(checkpoint.manifest))
    if tensors is not None:
        _print_table(console, "tensors", _tensor_table(tensors))


def _facts(checkpoint: Checkpoint) -> Table:
    manifest = checkpoint.manifest
    facts = {
        "step": manifest.step,
        "sequence": manifest.sequence,
        "parent": manifest.parent or "none",
        "created": local_time(manifest.created),
        "path": checkpoint.path,
        "digest": checkpoint.digest,
        "size": f"{size_text(manifest.size_bytes)} in {count_text(len(manifest.files), 'file')}",
        "world size": manifest.world_size,
        "meshes": ", ".join(_mesh(mesh) for mesh in manifest.meshes),
        "tags": ", ".join(checkpoint.tags),
        "damage": checkpoint.damage,
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    }
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    for name, value in facts.items():
        if value != "":
            rows.add_row(cell(name, "dim"), cell(value))
    return rows


def _mesh(mesh: MeshRecord) -> str:
    shape = " x ".join(str(length) for length in mesh.shape)
    return f"{shape} ({', '.join(mesh.dimensions)})" if mesh.dimensions else shape


def _print_values(console: Console, title: str, value: Json) -> None:
    if value is None or value == {}:
        return
    console.print()
    console.print(cell(title, "bold"))
    console.print(Lines(outline(value, 1)), soft_wrap=True)


def outline(value: Json, depth: int = 0) -> Iterator[str]:
    """Nested plain values as indented lines. Long texts and lists are cut; the JSON output has all of them."""
    pad = "  " * depth
    if not _is_nested(value):
        yield f"{pad}{_inline(value)}"
        return
    for head, item in _entries(value):
        if _is_nested(item):
            yield f"{pad}{head}"
            yield from outline(item, depth + 1)
        else:
            yield f"{pad}{head} {_inline(item)}"


def _is_nested(value: Json) -> bool:
    """Return whether a value is shown on several lines: a dict, or a list that holds more than plain values."""
    if isinstance(value, list):
        return any(isinstance(item, dict | list) and item for item in value)
    return isinstance(value, dict) and bool(value)


def _entries(value: Json) -> Iterator[tuple[str, Json]]:
    if isinstance(value, dict):
        yield from ((f"{cut(key, _VALUE_CHARACTERS)}:", item) for key, item in value.items())
    elif isinstance(value, list):
        yield from (("-", item) for item in value)


def _inline(value: Json) -> str:
    if isinstance(value, list):
        shown = ", ".join(_inline(item) for item in value[:_SHOWN_ITEMS])
        hidden = len(value) - _SHOWN_ITEMS
        return f"[{shown}, ... {hidden:,} more]" if hidden > 0 else f"[{shown}]"
    return cut(value if isinstance(value, str) else dumps(value), _VALUE_CHARACTERS)


def _component_table(components: list[_Component]) -> Columns:
    rows = Columns("name", "kind", "scopes", "tensors", "size", right=("scopes", "tensors", "size"))
    for one in components:
        counts = (f"{one.scopes:,}", f"{one.tensors:,}", size_text(one.size_bytes))
        rows.add_row(cell(one.name), cell(one.kind), *(cell(text) for text in counts))
    return rows


def _file_table(manifest: Manifest) -> Columns:
    rows = Columns("name", "size", "digest", right=("size",))
    for file in manifest.files[:_SHOWN_FILES]:
        rows.add_row(cell(file.name), cell(size_text(file.size_bytes)), cell(file.digest[:16], "dim"))
    hidden = len(manifest.files) - _SHOWN_FILES
    if hidden > 0:
        rows.add_row(cell(f"... {hidden:,} more, all of them with --json", "dim"), cell(""), cell(""))
    return rows


def _tensor_table(tensors: list[TensorRecord]) -> Columns:
    rows = Columns("name", "dtype", "shape", "size", "chunks", right=("size", "chunks"))
    for one in tensors:
        texts = (one.name, one.dtype, list(one.shape), size_text(one.size_bytes), f"{len(one.chunks):,}")
        rows.add_row(*(cell(text) for text in texts))
    return rows


def _print_table(console: Console, title: str, rows: Columns) -> None:
    if not rows.rows:
        return
    console.print()
    console.print(cell(title, "bold"))
    console.print(rows)
