"""Suggest what to paste where names or types do not fit: the differences of a restore enter, arguments of a
`LoadStrategy` leave.

Knows names alone. A rename is suggested only where it is the one that brings all names together; with two that would,
none is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from holdfast.errors import UsageError
from holdfast.loading.renaming import Renamer

__all__ = ["CASTABLE", "Differences", "suggested_rename", "suggestion"]

CASTABLE = "; cast=True converts it"
"""How the text of a difference ends that a conversion of types would settle."""

_MAX_ENTRIES = 8
_MAX_PARTNERS = 16
_OTHER_FORM = re.compile(
    r"\w+ \[.*\] in the checkpoint, \w+ \[.*\] now|\[.*\] in the checkpoint, for a parameter of \["
)

_Rule = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Differences:
    """What does not fit: names of leaves that only one side has, and texts about leaves that both have. `saved` are all
    leaves of the checkpoint, `models` and `optimizers` the components that are such."""

    missing: Sequence[str]
    unexpected: Sequence[str]
    mismatched: Sequence[str]
    saved: Collection[str]
    models: Sequence[str]
    optimizers: Sequence[str] = ()

    def of_model(self, names: Collection[str], model: str) -> list[str]:
        """Return the names of one model's leaves, without the component in front."""
        parts = (name.partition(".") for name in names)
        return [rest for tree, dot, rest in parts if dot and tree.partition("@")[0] == model]


def suggestion(found: Differences, *, may_rename: bool) -> str:
    """Return the arguments that would let the restore through, as they are written; an empty text where that is not
    plain to see."""
    arguments = []
    left_out: list[str] = []
    one_sided = [*found.missing, *found.unexpected]
    if one_sided:
        rename = _rename_of(found) if may_rename else ""
        arguments += [rename] if rename else []
        left_out += [] if rename else one_sided
    castable = [text for text in found.mismatched if text.endswith(CASTABLE)]
    for text in found.mismatched:
        leaf, _, what = text.partition(": ")
        if text not in castable:
            if not _OTHER_FORM.match(what):
                return ""
            left_out.append(leaf)
    arguments += ["cast=True"] if castable else []
    if left_out:
        globs = _globs(found, left_out)
        if not globs:
            return ""
        arguments.append(f"exclude={globs!r}")
    return ", ".join(arguments)


def suggested_rename(gone: Collection[str], new: Collection[str], saved: Collection[str]) -> dict[str, str] | None:
    """Return the mapping that makes all names that are gone from the model names that are new in it, and leaves all
    others; None where there is none, or more than one."""
    if not gone or len(gone) != len(new):
        return None
    rules: dict[str, str] = {}
    left, wanted = sorted(gone), set(new)
    while left:
        best = _best_rule(left, wanted, saved)
        if best is None or len(rules) == _MAX_ENTRIES:
            return None
        (old, becomes), explained = best
        rules[old] = becomes
        left = [name for name in left if name not in explained]
        wanted -= set(explained.values())
    try:
        names = Renamer(rules).names(saved)
    except UsageError:
        return None
    return rules if names.keys() == (set(saved) - set(gone)) | set(new) else None


def _rename_of(found: Differences) -> str:
    """Return `rename=...` for all models that differ; an empty text where one of them cannot be brought together."""
    rules: dict[str, dict[str, str]] = {}
    for model in found.models:
        gone, new = found.of_model(found.unexpected, model), found.of_model(found.missing, model)
        if not gone and not new:
            continue
        rename = suggested_rename(gone, new, {*found.of_model(found.saved, model), *gone})
        if rename is None:
            return ""
        rules[model] = rename
    if not rules:
        return ""
    return f"rename={next(iter(rules.values())) if len(found.models) == 1 else rules!r}"


def _best_rule(
    left: Sequence[str], wanted: Collection[str], saved: Collection[str]
) -> tuple[_Rule, dict[str, str]] | None:
    """Return the rule that explains most names, the first one among them; None where two explain equally many by
    other new names."""
    first = left[0]
    partners = sorted(wanted, key=lambda name: (-sum(_common(first.split("."), name.split("."))), name))
    found: list[tuple[_Rule, dict[str, str]]] = []
    for partner in partners[:_MAX_PARTNERS]:
        for rule in _rules(first, partner):
            explained = _explained(rule, left, wanted, saved)
            if first in explained:
                found.append((rule, explained))
    if not found:
        return None
    most = max(len(explained) for _, explained in found)
    best = [one for one in found if len(one[1]) == most]
    return best[0] if all(explained == best[0][1] for _, explained in best) else None


def _explained(rule: _Rule, left: Sequence[str], wanted: Collection[str], saved: Collection[str]) -> dict[str, str]:
    """Return the new names that a rule gives; nothing where it would change a name that fits, or make another one."""
    try:
        names = Renamer(dict([rule])).names(saved)
    except UsageError:
        return {}
    changed = {old: new for new, old in names.items() if new != old}
    fits = set(changed) <= set(left) and set(changed.values()) <= set(wanted)
    return changed if fits else {}


def _rules(old: str, new: str) -> Iterator[_Rule]:
    """Yield the mappings that make one name of the other by one change of the parts between dots: wherever it can be
    made first, then only here. Names that have no part in common are not brought together."""
    parts, others = old.split("."), new.split(".")
    before, after = _common(parts, others)
    if before + after == 0:
        return
    start, end = ".".join(parts[:before]), parts[len(parts) - after :]
    was, now = (".".join(some[before : len(some) - after]) for some in (parts, others))
    if was and before and after:
        yield f"*.{was}.*", f"*.{now}.*" if now else "*.*"
    elif was and before and now:
        yield f"*.{was}", f"*.{now}"
    # Anything that follows, or only what begins with the same part.
    for tail in (["*"] if end else [], [end[0], "*"] if len(end) > 1 else end):
        yield ".".join(filter(None, [start, was, *tail])), ".".join(filter(None, [start, now, *tail]))
    yield old, new


def _common(parts: Sequence[str], others: Sequence[str]) -> tuple[int, int]:
    """Return how many parts two names share at the start, and then at the end."""
    most = min(len(parts), len(others))
    before = next((index for index in range(most) if parts[index] != others[index]), most)
    rest = most - before
    after = next((index for index in range(rest) if parts[-1 - index] != others[-1 - index]), rest)
    return before, after


def _globs(found: Differences, leaves: Sequence[str]) -> list[str]:
    """Return few globs that match these leaves and no other; none where that takes too many, or where nothing of a
    model would be left."""
    if not all("." in leaf for leaf in leaves):
        return []
    chosen = set(leaves)
    others = {name for name in found.saved if name not in chosen}
    globs: dict[str, None] = {}
    for model in found.models:
        own = [leaf for leaf in leaves if leaf.partition(".")[0].partition("@")[0] == model]
        if own and not any(name.partition(".")[0].partition("@")[0] == model for name in others):
            return []
        globs |= dict.fromkeys(_covering(leaf, others) for leaf in own)
    inner = [glob.partition(".")[2] for glob in globs]
    for leaf in leaves:
        component = leaf.partition(".")[0].partition("@")[0]
        if component in found.optimizers:
            globs[_of_state(leaf, inner) or f"{leaf}*"] = None
        elif component not in found.models:
            return []
    return list(globs) if len(globs) <= _MAX_ENTRIES else []


def _covering(leaf: str, others: Collection[str]) -> str:
    """Return the shortest prefix of a leaf, as a glob, under which no other leaf lies; else the leaf itself."""
    parts = leaf.split(".")
    for count in range(2, len(parts)):
        prefix = ".".join(parts[:count]) + "."
        if not any(name.startswith(prefix) for name in others):
            return f"{prefix}*"
    return leaf


def _of_state(leaf: str, globs: Sequence[str]) -> str | None:
    """Return a model's glob as one over the state of its optimizer, if that covers a leaf of it."""
    tree, _, rest = leaf.partition(".state.")
    for glob in globs:
        if rest and (rest.startswith(glob[:-1]) if glob.endswith("*") else rest.startswith(glob)):
            return f"{tree}.state.{glob}" if glob.endswith("*") else f"{tree}.state.{glob}*"
    return None
