"""Compare a model with the weights of a source. Live tensors and entries enter; what to fill, or an error, leaves.

Changes nothing. No tensor is read, but for two that are one tensor in the model and could differ in the source.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.errors import StateMismatchError, UsageError
from holdfast.formats.source import Source, TensorEntry
from holdfast.formats.weights.renaming import Rename, aligned, renamed
from holdfast.formats.weights.report import WeightsReport
from holdfast.loading.match.forms import CAST
from holdfast.loading.suggestions import suggested_rename
from holdfast.ondisk.regions import Cut
from holdfast.state.modules import tied_names
from holdfast.state.names import cut_at
from holdfast.state.tensors import (
    dtype_name,
    flattened,
    held_piece,
    is_same_memory,
    shares_elements,
    torch_dtype,
    whole_shape,
)

__all__ = ["FittedWeights", "fit"]

_LISTED = 20


@dataclass(frozen=True, slots=True)
class FittedWeights:
    """What goes where: the entry for each name of the model that is filled, once for tied names, and extra states.
    `tied` are all names of what is filled."""

    entries: Mapping[str, TensorEntry]
    extras: Mapping[str, Any]
    report: WeightsReport
    tied: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Findings:
    """What the comparison found so far."""

    entries: dict[str, TensorEntry] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    other_types: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    size_bytes: int = 0


def fit(
    live: Mapping[str, Any],
    weights: Mapping[str, TensorEntry],
    extra_states: Mapping[str, Any],
    *,
    cuts: Mapping[str, Cut],
    module: torch.nn.Module,
    source: Source,
    strict: bool,
    rename: Rename | None,
    cast: bool,
    exclude: Sequence[str],
) -> FittedWeights:
    """Compare every name of the model with the source, and return what is to be filled."""
    stored = {**extra_states, **weights}
    names = aligned(renamed(list(stored), rename), live.keys())
    found = _Findings()
    ties = _ties(module, live)
    unused = set(exclude)
    for name, value in live.items():
        globs = [glob for glob in exclude if fnmatch.fnmatchcase(name, glob)]
        unused.difference_update(globs)
        if globs:
            found.excluded.append(name)
        elif name in names.names:
            _match(found, name, value, stored[names.names[name]], cuts, cast)
        else:
            found.missing.append(name)
    if unused:
        raise UsageError(
            f"exclude has {', '.join(map(repr, sorted(unused)[:8]))}, which no name of the model matches",
            advice=f"the model has {', '.join(list(live)[:8])} and so on",
        )
    _settle_ties(found, live, ties, source)
    unexpected = [old for new, old in names.names.items() if new not in live]
    report = WeightsReport(
        source=source.location,
        format=source.format,
        loaded=tuple(found.loaded),
        missing=tuple(found.missing),
        unexpected=tuple(unexpected),
        excluded=tuple(found.excluded),
        cast=tuple(found.cast),
        renamed=names.changes,
        size_bytes=found.size_bytes,
        source_identity=source.identity,
    )
    _judge(report, found, stored, strict)
    groups = {name: ties.get(name, name) for name in live}
    filled = {groups[name] for name in found.entries}
    return FittedWeights(
        found.entries, found.extras, report, frozenset(name for name, first in groups.items() if first in filled)
    )


def _match(found: _Findings, name: str, value: Any, stored: Any, cuts: Mapping[str, Cut], cast: bool) -> None:
    """Note how one name of the model fits: filled, cast, or a mismatch."""
    if name.rpartition(".")[2] == "_extra_state" or not isinstance(value, torch.Tensor):
        found.extras[name] = stored
        found.loaded.append(name)
        return
    if not isinstance(stored, TensorEntry):
        found.mismatched.append(f"{name}: is a tensor, and the source has a {type(stored).__name__}")
        return
    if flattened(value) is not None:
        found.mismatched.append(
            f"{name}: a tensor of type '{type(value).__qualname__}' is filled by CheckpointManager.restore() alone"
        )
        return
    cut = cut_at(cuts, name, value)
    shape = whole_shape(value, cut)
    if shape != stored.shape:
        found.mismatched.append(f"{name}: {list(stored.shape)} in the source, {list(shape)} in the model")
        return
    if shares_elements(value) and not value.is_meta:
        found.mismatched.append(f"{name}: its elements share memory (expand), so it cannot be filled")
        return
    if value.dtype != torch_dtype(stored.dtype):
        castable = {value.dtype, torch_dtype(stored.dtype)} <= CAST
        if not (cast and castable):
            text = f"{name}: {stored.dtype} in the source, {dtype_name(value)} in the model"
            (found.other_types if castable else found.mismatched).append(text)
            return
        found.cast.append(name)
    box, _ = held_piece(value, leaf=name, cut=cut)
    found.size_bytes += box.volume * stored.item_bytes
    found.entries[name] = stored
    found.loaded.append(name)


def _ties(module: torch.nn.Module, live: Mapping[str, Any]) -> dict[str, str]:
    """Return the first name of each further name of a tensor: of tied parameters, and of what shares their memory."""
    ties = {name: first for name, first in tied_names(module).items() if name in live and first in live}
    places: dict[int, list[str]] = {}
    for name, value in live.items():
        if isinstance(value, torch.Tensor) and not value.is_meta and flattened(value) is None and name not in ties:
            address = (value.to_local() if hasattr(value, "to_local") else value).data_ptr()
            for other in places.setdefault(address, []) if address else ():
                if is_same_memory(value, live[other]):
                    ties[name] = other
            places.get(address, []).append(name)
    return ties


def _settle_ties(found: _Findings, live: Mapping[str, Any], ties: Mapping[str, str], source: Source) -> None:
    """Fill tied tensors once. One name in the source is enough; with several, all must have the same content."""
    groups: dict[str, list[str]] = {}
    for name, first in ties.items():
        groups.setdefault(first, [first]).append(name)
    for names in groups.values():
        there = [name for name in names if name in found.entries]
        if any(name in found.excluded for name in names):
            # A tied tensor of which one name is excluded is excluded.
            for name in there:
                del found.entries[name]
                found.loaded.remove(name)
                found.excluded.append(name)
            there = []
        for name in there[1:]:
            if not _is_same(source, found.entries[there[0]], found.entries[name]):
                found.mismatched.append(f"{name}: is tied to '{there[0]}' in the model, and differs in the source")
            del found.entries[name]
        if there or any(name in found.excluded for name in names):
            found.missing = [name for name in found.missing if name not in names]


def _is_same(source: Source, one: TensorEntry, other: TensorEntry) -> bool:
    if one is other or (one.chunks and one.chunks == other.chunks):
        return True
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pairs = zip(source.pieces(one), source.pieces(other), strict=True)
    return all(bytes(left) == bytes(right) for left, right in pairs)


def _judge(report: WeightsReport, found: _Findings, stored: Mapping[str, Any], strict: bool) -> None:
    """Raise what cannot be loaded, with the argument that would let it through, ready to paste."""
    if not found.entries and not found.extras:
        hint = suggested_rename(report.unexpected, report.missing, stored.keys()) or {}
        raise StateMismatchError(
            "the model and the source have nothing in common that can be loaded; nothing was changed",
            file=report.source,
            missing=list(report.missing),
            unexpected=list(report.unexpected),
            mismatched=[*found.mismatched, *found.other_types],
            advice=f"give rename={hint!r}" if hint else "check the path, component= and rename=",
        )
    wrong = [*found.mismatched, *found.other_types]
    if not wrong and not (strict and (report.missing or report.unexpected)):
        return
    raise StateMismatchError(
        "the weights do not fit the model; nothing was changed",
        file=report.source,
        missing=list(report.missing) if strict else [],
        unexpected=list(report.unexpected) if strict else [],
        mismatched=wrong,
        advice=_advice(report, found, stored, strict),
    )


def _advice(report: WeightsReport, found: _Findings, stored: Mapping[str, Any], strict: bool) -> str:
    ways = []
    hint = suggested_rename(report.unexpected, report.missing, stored.keys()) or {} if strict else {}
    if hint:
        ways.append(f"rename={hint!r}")
    left = list(report.missing) if strict and not hint else []
    left += [line.partition(":")[0] for line in found.mismatched]
    if left:
        more = " # and so on" if len(left) > _LISTED else ""
        ways.append(f"exclude={left[:_LISTED]!r}{more}")
    if found.other_types:
        ways.append("cast=True")
    if strict and report.unexpected and not hint:
        ways.append("strict=False")
    return f"to load what fits: {', '.join(ways)}"
