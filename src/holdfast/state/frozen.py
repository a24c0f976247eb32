"""Fingerprints of parameters that a `Trainable` component leaves out. Live components enter, guards leave."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.ondisk.manifest import digest_of
from holdfast.ondisk.regions import Box
from holdfast.state.names import parameter_names
from holdfast.state.tensors import address, fingerprint, held_piece, plain_parts, sample_of
from holdfast.state.trees import FrozenEntry
from holdfast.state.wrappers import Trainable


def take_frozen(components: Mapping[str, Any], *, anew: bool = False) -> tuple[FrozenEntry, ...]:
    """Return the fingerprint of every parameter that a `Trainable` leaves out; `anew` ignores earlier results."""
    if anew:
        _fingerprints.clear()
    entries = []
    for name, component in components.items():
        if isinstance(component, Trainable):
            names = parameter_names(component.component)
            for parameter in component.component.parameters():
                if not parameter.requires_grad:
                    parts = plain_parts(parameter)
                    entries += [_frozen_entry(name, names[id(parameter)] + suffix, part) for suffix, part in parts]
    return tuple(entries)


def _frozen_entry(component: str, name: str, parameter: torch.Tensor) -> FrozenEntry:
    key = (parameter._version, address(parameter), sample_of(parameter))
    known: tuple[object, FrozenEntry] | None = _fingerprints.get(parameter)
    if known is not None and known[0] == key:
        return known[1]
    box, local = held_piece(parameter, leaf=f"{component}.{name}")
    shape = tuple(parameter.shape)
    entry = FrozenEntry(component, name, str(parameter.dtype), shape, box, fingerprint(local, box, shape))
    _fingerprints[parameter] = (key, entry)
    return entry


# A frozen parameter is read through once and not at every save, unless its version or a sample of its content changed.
# The sample is there for writes through `.data`, which the version does not count.
_fingerprints = WeakIdKeyDictionary()


def frozen_guards(entries: Iterable[FrozenEntry]) -> dict[str, str]:
    """Return one guard per component with a frozen base, the same however the base is sharded."""
    # Replicas count once; where they differ, each counts, so that one rank with another base is found.
    pieces: dict[str, dict[tuple[str, str, tuple[int, ...], Box], set[int]]] = {}
    for entry in entries:
        held = pieces.setdefault(entry.component, {})
        held.setdefault((entry.name, entry.dtype, entry.shape, entry.box), set()).add(entry.fingerprint)
    guards = {}
    for component, held in pieces.items():
        sums: dict[tuple[str, str, tuple[int, ...]], int] = {}
        for (name, dtype, shape, _), values in held.items():
            sums[name, dtype, shape] = (sums.get((name, dtype, shape), 0) + sum(values)) % 2**63
        guards[f"frozen:{component}"] = digest_of(
            msgspec.json.encode(sorted((list(key), v) for key, v in sums.items()))
        )
    return guards
