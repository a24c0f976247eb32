"""Lay out a plain state dict as components, and find it again in them. Keys and encoded values enter, and leave.

The rules are in the text of the package, under Names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.errors import CorruptCheckpointError, HoldfastError, UsageError
from holdfast.loading.files import reference_of
from holdfast.ondisk import paths
from holdfast.ondisk.codec import Json, decode, encode
from holdfast.ondisk.manifest import TreeRecord

__all__ = [
    "LOOSE",
    "NOTE",
    "Note",
    "Path",
    "component_of",
    "flattened",
    "is_leaf",
    "leaf_name",
    "loose_component",
    "nested_items",
    "read_note",
    "trees_of",
]

Path = tuple[str | int, ...]

NOTE = "dcp"
LOOSE = "state"


# From keys to components


def component_of(fqn: str) -> str | None:
    """Return the component that a key names itself, or None."""
    front, _, rest = fqn.partition(".")
    try:
        return paths.check_component_name(front) if rest else None
    except UsageError:
        return None


def loose_component(fqns: Sequence[str]) -> str:
    """Return the component for keys that name none: `state`, or, when keys name that one, the next free such name."""
    for fqn in fqns:
        if len(fqn) + len("state_00000.") > paths.MAX_NAME_CHARACTERS:
            raise UsageError(f"a leaf's name has {len(fqn)} characters", leaf=fqn[:80])
    taken = {component_of(fqn) for fqn in fqns}
    name, number = LOOSE, 2
    while name in taken:
        name, number = f"{LOOSE}_{number}", number + 1
    return name


def leaf_name(fqn: str, loose: str) -> str:
    return fqn if component_of(fqn) else paths.leaf_name(loose, fqn)


@dataclass(frozen=True, slots=True)
class _Item:
    """One key of the state dict: its component, its path in the component's values, whether it was cut to get them."""

    fqn: str
    component: str
    path: Path
    flat: bool


def nested_items(fqns: Iterable[str], loose: str, key_paths: Any) -> Iterator[_Item]:
    """Yield where each key stood in the state dict. Of a planner that does not know it, keys have one part."""
    for fqn in fqns:
        known = key_paths.get(fqn) if isinstance(key_paths, Mapping) else None
        path: Path = tuple(known) if known and ".".join(map(str, known)) == fqn else (fqn,)
        component = component_of(fqn)
        if component is None:
            yield _Item(fqn, loose, path, flat=False)
        elif path[0] == component:
            yield _Item(fqn, component, path[1:], flat=False)
        else:
            yield _Item(fqn, component, (str(path[0])[len(component) + 1 :], *path[1:]), flat=True)


class _Branch(dict[str | int, Any]):
    """A dict or, with numbers as keys, a list of the state dict. A value may be a dict too, hence a separate type."""


def trees_of(items: Iterable[_Item], loose: str, values: Mapping[str, Json]) -> tuple[dict[str, Json], list[str]]:
    """Return each component's values as one tree, tensors by reference; and the components that were only fronts."""
    roots: dict[str, _Branch] = {}
    flat: dict[str, bool] = {}
    for item in items:
        branch = roots.setdefault(item.component, _Branch())
        for part in item.path[:-1]:
            branch = branch.setdefault(part, _Branch())
        reference = item.fqn if item.component == loose else item.fqn[len(item.component) + 1 :]
        branch[item.path[-1]] = values.get(item.fqn, {"$tensor": reference})
        flat[item.component] = flat.get(item.component, True) and item.flat
    return {name: _json(root) for name, root in roots.items()}, sorted(name for name in flat if flat[name])


def _json(node: Any) -> Json:
    if not isinstance(node, _Branch):
        return node  # type: ignore[no-any-return]
    if all(isinstance(key, int) for key in node):
        return [_json(node.get(index)) for index in range(max(int(key) for key in node) + 1)]
    keys = [encode(str(key), path="", on_tensor=None) for key in node]
    if all(isinstance(key, str) and not key.startswith("$") for key in keys):
        return {str(key): _json(value) for key, value in node.items()}
    return {"$dict": [[key, _json(value)] for key, value in zip(keys, node.values(), strict=True)]}


# From components to keys


class Note(NamedTuple):
    """What `HoldfastWriter` noted about a state dict; nothing where it wrote no note."""

    loose: str | None
    flat: frozenset[str]
    whole: frozenset[str]
    save_id: str


def read_note(stored: Any) -> Note:
    note = stored if isinstance(stored, dict) else {}
    loose, save_id = note.get("loose"), note.get("save_id")
    flat, whole = (
        frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()
        for names in (note.get("flat"), note.get("whole"))
    )
    return Note(loose if isinstance(loose, str) else None, flat, whole, save_id if isinstance(save_id, str) else "")


def _outer_path(tree: TreeRecord, path: Path, note: Note) -> Path:
    """Return where a value of a tree stood in the state dict that was saved."""
    if tree.name == note.loose and path:
        return path
    if tree.name in note.flat and path:
        return (f"{tree.name}.{path[0]}", *path[1:])
    return (tree.name, *path)


def flattened(stored: Json, tree: TreeRecord, note: Note) -> list[tuple[Path, Json]]:
    """Return a tree's values, still encoded, by the paths that PyTorch's own flattening of the state dict gave."""
    found: list[tuple[Path, Json]] = []

    def is_whole(path: Path) -> bool:
        return bool(path) and ".".join(map(str, _outer_path(tree, path, note))) in note.whole

    try:
        _flatten(stored, (), lambda path, value: found.append((path, value)), is_whole if note.whole else None)
    except RecursionError:
        raise CorruptCheckpointError("the values are nested too deep", file=tree.file) from None
    return [(_outer_path(tree, path, note), value) for path, value in found]


def _flatten(
    value: Json, path: Path, visit: Callable[[Path, Json], None], is_whole: Callable[[Path], bool] | None
) -> None:
    pairs = _pairs_of(value)
    if is_whole is not None and is_whole(path):
        visit(path, value)
    elif pairs is not None:
        for key, inner in pairs:
            _flatten(inner, (*path, key), visit, is_whole)
    elif isinstance(value, list) and not _is_terminal(value):
        for index, inner in enumerate(value):
            _flatten(inner, (*path, index), visit, is_whole)
    else:
        visit(path, value)


def is_leaf(value: Json) -> bool:
    """Return whether flattening keeps this as one value."""
    return _pairs_of(value) is None and not (isinstance(value, list) and not _is_terminal(value))


def _is_terminal(values: list[Json]) -> bool:
    """Return whether a list is one value: PyTorch goes into a list only when a tensor or a dict is in it."""
    return not any(
        _pairs_of(value) is not None
        or reference_of(value) is not None
        or (isinstance(value, list) and not _is_terminal(value))
        for value in values
    )


def _pairs_of(value: Json) -> list[tuple[str, Json]] | None:
    """Return the items of what is decoded to a mapping, its keys as PyTorch spells them; None for anything else."""
    if not isinstance(value, dict):
        return None
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return list(value.items())
    items: Any = value[tag]
    if tag in ("$ordereddict", "$defaultdict") and isinstance(items, dict):
        items = items.get("items")
    elif tag not in ("$dict", "$counter"):
        return None
    try:
        return [(str(decode(key, path="", tensor=None)), inner) for key, inner in items]
    except (HoldfastError, TypeError, ValueError):
        # Malformed, or with keys of a type that is not registered here: one value, and decoding it raises the error.
        return None
