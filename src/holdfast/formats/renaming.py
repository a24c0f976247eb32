"""Bring names of tensors together: prefixes that wrappers add, and the renaming that a user asks for. Names only."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from holdfast.errors import UsageError

__all__ = ["PREFIXES", "Rename", "Renamed", "aligned", "renamed", "suggested"]

Rename = Mapping[str, str] | Sequence[tuple[str, str]] | Callable[[str], str | None]
"""How names of a source become names of the model: a mapping of whole names or of names with `*`, pairs of a regular
expression and its replacement, applied in order, or a function; None drops a tensor."""

PREFIXES = ("module.", "_orig_mod.", "model.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_INNER = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, slots=True)
class Renamed:
    """Names of a source by the name that each gets, and what was done to them, for people."""

    names: dict[str, str]
    changes: tuple[str, ...] = ()


def renamed(names: Collection[str], rename: Rename | None) -> Renamed:
    """Return what a user's renaming makes of names. Two names that become one, and an entry of a mapping that matches
    nothing, are errors."""
    if rename is None:
        return Renamed({name: name for name in names})
    change, unused = _function_of(rename)
    found: dict[str, str] = {}
    count = 0
    for name in names:
        new = change(name)
        if new is None:
            continue
        if not isinstance(new, str) or not new:
            raise UsageError(f"rename makes {new!r:.100} of '{name}'", advice="return a name, or None to drop it")
        if new in found:
            raise UsageError(f"rename makes '{new}' of both '{found[new]}' and '{name}'")
        found[new] = name
        count += new != name
    if unused:
        raise UsageError(
            f"rename names {', '.join(repr(one) for one in sorted(unused)[:8])}, which nothing in the source matches",
            advice=f"the source has {', '.join(list(names)[:8])} and so on",
        )
    return Renamed(found, (f"{count} names changed by rename",) if count else ())


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


def _function_of(rename: Rename) -> tuple[Callable[[str], str | None], set[str]]:
    """Return the renaming as a function, and the set of entries that have matched nothing yet."""
    if isinstance(rename, Mapping):
        return _of_mapping(rename)
    if callable(rename):
        return rename, set()
    return _of_patterns(rename)


def _of_mapping(rename: Mapping[str, str]) -> tuple[Callable[[str], str | None], set[str]]:
    for old, new in rename.items():
        if not isinstance(old, str) or not isinstance(new, str | None) or (new or "").count("*") > old.count("*"):
            raise UsageError(f"rename={{{old!r}: {new!r}}}", advice="both are texts, with '*' in both or in neither")
    unused = set(rename)
    patterns = [(old, re.compile("(.*)".join(map(re.escape, old.split("*")))), new) for old, new in rename.items()]

    def change(name: str) -> str | None:
        for old, pattern, new in patterns:
            match = pattern.fullmatch(name)
            if match is not None:
                unused.discard(old)
                return _filled(new, match.groups()) if new is not None else None
        return name

    return change, unused


def _filled(template: str, parts: Sequence[str]) -> str:
    """Return a template with its stars replaced, in order."""
    pieces = template.split("*")
    text = pieces[0]
    for part, piece in zip(parts, pieces[1:], strict=False):
        text += part + piece
    return text


def _of_patterns(rename: Sequence[tuple[str, str]]) -> tuple[Callable[[str], str | None], set[str]]:
    if not isinstance(rename, list | tuple):
        raise UsageError(f"rename={rename!r:.100}", advice="give a mapping, a list of pairs, or a function")
    compiled = []
    for pair in rename:
        try:
            old, new = pair
            compiled.append((old, re.compile(old), new))
        except (TypeError, ValueError, re.error) as error:
            raise UsageError(
                f"rename has {pair!r:.100}: {error}", advice="give pairs of a regular expression and its replacement"
            ) from None
    unused = {old for old, _, _ in compiled}

    def change(name: str) -> str | None:
        for old, pattern, new in compiled:
            changed, count = pattern.subn(new, name)
            if count:
                unused.discard(old)
                name = changed
        return name

    return change, unused


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
