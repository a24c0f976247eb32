"""Rename the leaves of a checkpoint as a user asks for it. Names and a rule enter; new names leave. Names only."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import UsageError

__all__ = [
    "Rename",
    "Renamed",
    "Renamer",
    "frozen_rename",
    "is_by_component",
    "plain_rename",
    "rename_entries",
    "rename_in_words",
    "renamed",
]

Rename = Mapping[str, str | None] | Sequence[tuple[str, str]] | Callable[[str], str | None]
"""How names of a source become names of the model: a mapping of whole names or of names with `*`, pairs of a regular
expression and its replacement, applied in order, or a function; None drops a tensor."""

_Change = Callable[[str], str | None]
_FORMS = "give a mapping of names, a list of pairs of a regular expression and its replacement, or a function"


@dataclass(frozen=True, slots=True)
class Renamed:
    """Names of a source by the name that each gets, and what was done to them, for people."""

    names: dict[str, str]
    changes: tuple[str, ...] = ()


class NameMap(Mapping[str, Any]):
    """A mapping that cannot be changed and can be part of a value: it has a hash, and is written as a dict is."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


class Renamer:
    """One rule, ready to be applied. `unused` are the entries of it that have matched nothing yet."""

    def __init__(self, rename: Rename) -> None:
        self._change, self.unused = _function_of(rename)

    def names(self, names: Collection[str]) -> dict[str, str]:
        """Return the old name by the new one, without those that are dropped. Two that become one are an error."""
        found: dict[str, str] = {}
        for name in names:
            new = self._of(name)
            if new is None:
                continue
            if not isinstance(new, str) or not new:
                raise UsageError(f"rename makes {new!r:.100} of '{name}'", advice="return a name, or None to drop it")
            if new in found:
                raise UsageError(
                    f"rename makes '{new}' of both '{found[new]}' and '{name}'",
                    advice=f"give one of them another name, or drop it with {{{name!r}: None}}",
                )
            found[new] = name
        return found

    def _of(self, name: str) -> str | None:
        try:
            return self._change(name)
        except Exception as error:  # code of the user
            raise UsageError(f"rename raised {type(error).__name__} for '{name}': {error}") from error


def renamed(names: Collection[str], rename: Rename | None) -> Renamed:
    """Return what a user's renaming makes of names. Two names that become one, and an entry of a mapping that matches
    nothing, are errors."""
    if rename is None:
        return Renamed({name: name for name in names})
    renamer = Renamer(rename)
    found = renamer.names(names)
    count = sum(new != old for new, old in found.items())
    if renamer.unused:
        raise UsageError(
            f"rename names {', '.join(repr(one) for one in sorted(renamer.unused)[:8])}, which nothing in the source "
            "matches",
            advice=f"the source has {', '.join(list(names)[:8])} and so on",
        )
    return Renamed(found, (f"{count} names changed by rename",) if count else ())


def frozen_rename(rename: object) -> Any:
    """Return a rule, or a mapping of components to rules, that cannot be changed any more. One that can never be
    applied is an error now."""
    if rename is None:
        return None
    if not isinstance(rename, Mapping):
        return _frozen_rule(rename)
    nested = {name: rule for name, rule in rename.items() if not isinstance(rule, str | None)}
    if nested and len(nested) < len(rename):
        raise UsageError(
            f"rename={dict(rename)!r:.200} has names and components in one mapping",
            advice="give {'old': 'new'} for all models, or {'model': {'old': 'new'}} for single ones",
        )
    if nested:
        return NameMap({name: _frozen_rule(rule) for name, rule in nested.items()})
    return _frozen_rule(rename)


def is_by_component(rename: object) -> bool:
    """Return whether a frozen rule is a mapping of components to rules."""
    return isinstance(rename, NameMap) and any(not isinstance(rule, str | None) for rule in rename.values())


def rename_entries(rename: Rename | None) -> list[str]:
    """Return the entries of one rule, each of which must match something; a function has none."""
    return [] if rename is None else sorted(Renamer(rename).unused)


def plain_rename(rename: object) -> Any:
    """Return a frozen rule as dicts and lists. A function has no such form."""
    if isinstance(rename, NameMap):
        return {name: plain_rename(rule) for name, rule in rename.items()}
    if isinstance(rename, tuple):
        return [list(pair) for pair in rename]
    if callable(rename):
        raise UsageError(
            f"rename={rename_in_words(rename)} is a function, which is no plain data",
            advice="spell it as a mapping or as a list of pairs",
        )
    return rename


def rename_in_words(rename: object) -> str:
    """Return a rule as a text that is the same on all ranks: a function by its name and place, not by its address."""
    if isinstance(rename, NameMap):
        return "{" + ", ".join(f"{name!r}: {rename_in_words(rule)}" for name, rule in rename.items()) + "}"
    if not callable(rename):
        return repr(rename)
    inner = getattr(rename, "func", rename)
    code = getattr(inner, "__code__", None)
    place = f":{code.co_firstlineno}" if code is not None else ""
    kind = type(inner)
    return f"<{getattr(inner, '__module__', '?')}.{getattr(inner, '__qualname__', kind.__qualname__)}{place}>"


def _frozen_rule(rule: Any) -> Any:
    """Return one rule in a form that cannot be changed; None where there is nothing in it."""
    Renamer(rule)
    if isinstance(rule, Mapping):
        return NameMap(rule) if rule else None
    return rule if callable(rule) else tuple((old, new) for old, new in rule) or None


def _function_of(rename: Any) -> tuple[_Change, set[str]]:
    """Return the renaming as a function, and the set of entries that have matched nothing yet."""
    if isinstance(rename, Mapping):
        return _of_mapping(rename)
    if callable(rename):
        return rename, set()
    return _of_patterns(rename)


def _of_mapping(rename: Mapping[str, str | None]) -> tuple[_Change, set[str]]:
    for old, new in rename.items():
        texts = isinstance(old, str) and old and isinstance(new, str | None) and new != ""
        if not texts or (new or "").count("*") > old.count("*"):
            raise UsageError(
                f"rename={{{old!r:.100}: {new!r:.100}}}",
                advice="both are names, with at most as many '*' in the new one; None drops a tensor",
            )
    unused = set(rename)
    exact = {old: new for old, new in rename.items() if "*" not in old}
    patterns = [
        (old, re.compile("(.*)".join(map(re.escape, old.split("*"))), re.DOTALL), new)
        for old, new in rename.items()
        if "*" in old
    ]

    def change(name: str) -> str | None:
        # A whole name goes before any pattern: the order of a mapping that came from a file is not the user's.
        if name in exact:
            unused.discard(name)
            return exact[name]
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


def _of_patterns(rename: Any) -> tuple[_Change, set[str]]:
    if not isinstance(rename, list | tuple):
        raise UsageError(f"rename={rename!r:.100}", advice=_FORMS)
    compiled = []
    for pair in rename:
        try:
            old, new = pair
            if not isinstance(old, str) or not isinstance(new, str):
                raise TypeError("both are texts")
            pattern = re.compile(old)
            # A replacement that names a group which is not there fails here, and not at the first name that matches.
            pattern.sub(new, "")
            compiled.append((old, pattern, new))
        except (TypeError, ValueError, IndexError, re.error) as error:
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
