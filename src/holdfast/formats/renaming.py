"""Bring names of tensors together by the prefixes that wrappers add, after the renaming that a user asks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from holdfast.loading.renaming import Rename, Renamed, renamed

__all__ = ["PREFIXES", "Rename", "Renamed", "aligned", "renamed", "suggested"]

PREFIXES = ("module.", "_orig_mod.", "model.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_INNER = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def aligned(found: Renamed, wanted: Collection[str]) -> Renamed:
    """Return the names with prefixes removed or added so that most of them are names that are wanted.

    Only one and the same change for all names is made, and only where it brings more of them together than none.
    """
    candidates = [(0, found.names, "")]
    names = _without_inner(found.names)
    inner = "" if names.keys() == found.names.keys() else f"{', '.join(_INNER)} removed inside of names"
    for prefix in ("", *PREFIXES):
        if prefix and not all(name.startswith(prefix) for name in names):
            continue
        cut = {name[len(prefix) :]: old for name, old in names.items()}
        for added in ("", *PREFIXES):
            if added and added == prefix:
                continue
            what = "; ".join(
                part
                for part in (
                    inner,
                    f"'{prefix}' removed from {len(cut)} names" if prefix else "",
                    f"'{added}' added to {len(cut)} names" if added else "",
                )
                if part
            )
            candidates.append((len(candidates), {f"{added}{name}": old for name, old in cut.items()}, what))
    wanted = set(wanted)
    # Of several that bring equally many together, the first one, which changes the least.
    best = max(candidates, key=lambda one: (len(wanted.intersection(one[1])), -one[0]))
    return Renamed(best[1], (*found.changes, best[2]) if best[2] else found.changes)


def _without_inner(names: Mapping[str, str]) -> dict[str, str]:
    """Return the names without the parts that wrappers put inside of them; as they are where two would become one."""
    cut = {}
    for name, old in names.items():
        new = name
        for part in _INNER:
            new = new.replace(f".{part}", ".").removeprefix(part)
        cut[new] = old
    return cut if len(cut) == len(names) else dict(names)


def suggested(
    missing: Sequence[str],
    wanted_shapes: Mapping[str, tuple[int, ...]],
    unexpected: Sequence[str],
    found_shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, str]:
    """Return a renaming that would bring names together which are most likely the same: for an error to print.

    One prefix in place of another where that explains all names, otherwise single names that are the only ones of their
    shape and last part on both sides.
    """
    for old_front in _fronts(unexpected):
        for new_front in _fronts(missing):
            moved = {new_front + name[len(old_front) :]: name for name in unexpected if name.startswith(old_front)}
            whole = len(moved) > 1 and set(moved) == set(missing) and len(moved) == len(unexpected)
            if whole and all(wanted_shapes.get(new) == found_shapes.get(old) for new, old in moved.items()):
                return {f"{old_front}*": f"{new_front}*"}
    return _single_names(missing, wanted_shapes, unexpected, found_shapes)


def _fronts(names: Sequence[str]) -> list[str]:
    """Return the beginnings, up to a dot, that all names share, the longest first; the empty one last."""
    if not names:
        return []
    parts = names[0].split(".")
    fronts = [".".join(parts[:count]) + "." for count in range(len(parts) - 1, 0, -1)]
    return [*(front for front in fronts if all(name.startswith(front) for name in names)), ""]


def _single_names(
    missing: Sequence[str],
    wanted_shapes: Mapping[str, tuple[int, ...]],
    unexpected: Sequence[str],
    found_shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, str]:
    def key(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[object, ...]:
        return (name.rpartition(".")[2], shapes.get(name))

    wanted: dict[object, list[str]] = {}
    found: dict[object, list[str]] = {}
    for name in missing:
        wanted.setdefault(key(name, wanted_shapes), []).append(name)
    for name in unexpected:
        found.setdefault(key(name, found_shapes), []).append(name)
    return {
        found[one][0]: names[0] for one, names in wanted.items() if len(names) == 1 and len(found.get(one, ())) == 1
    }
