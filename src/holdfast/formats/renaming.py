"""Bring names of tensors together: prefixes that wrappers add, and the renaming that a user asks for. Names only."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from holdfast.errors import UsageError

__all__ = ["PREFIXES", "Rename", "Renamed", "aligned", "renamed"]

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
