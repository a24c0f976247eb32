"""Recognise very many tensors: live tensors enter; where their memory lies leaves, or None when anything about them is
new. Knows torch.

To ask 20,000 small tensors what they are takes as long as to copy them. So each is asked for as little as possible, and
for all of it at once, while it is in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from operator import attrgetter, not_
from typing import Any

import torch

from holdfast.state.tensors import PLAIN_TYPES, any_sharded, is_sharded, require_whole_storage

__all__ = ["Signature"]

_BLOCK = 1024
# The layout is not among them: a tensor of another one than the dense one has no address, and raises.
_COLUMNS = (*map(attrgetter, ("dtype", "shape", "device")), torch.Tensor.is_contiguous, torch.Tensor.is_neg)


class Signature:
    """All that must be the same about some tensors for what was found out about them to hold: what they are, and which
    of them share their memory. Content may differ, and where the memory lies."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        plain = _locals(tensors)
        self._kinds = list(map(type, tensors))
        self._cuts = [one._spec for one in tensors if is_sharded(one)]
        self._local_kinds = list(map(type, plain)) if self._cuts else []
        self._blocks = [_columns(block) for block in _blocks(plain)]
        self._places = list(map(torch.Tensor.data_ptr, plain))
        self._firsts = _firsts(self._places)
        self._shared = _shared(self._firsts)
        self._views = _views(plain, self._shared)
        in_place = list(map(_is_in_place, plain))
        self._in_place = None if all(in_place) else in_place
        self.devices = frozenset(one.device for one in plain)

    def addresses_of(self, tensors: Sequence[Any], keep: list[Any] | None = None) -> list[int] | None:
        """Return for each tensor where its bytes lie in host memory as a file has them, 0 where torch has to copy them;
        None if these are other tensors, or none at all.

        `keep` gets what keeps that memory alive: a tensor can be given another memory before it is copied."""
        if list(map(type, tensors)) != self._kinds:
            return None
        if self._cuts and [one._spec for one in tensors if is_sharded(one)] != self._cuts:
            return None
        plain = _locals(tensors) if self._cuts else tensors
        if self._cuts and list(map(type, plain)) != self._local_kinds:
            return None
        try:
            if keep is not None:
                # First: what is kept is what the addresses are of.
                keep += map(torch.Tensor.untyped_storage, self._in_place_of(plain))
            places = self._places_of(plain)
        except RuntimeError:
            return None  # one that is sparse or nested by now, and has no shape or no address
        if places is None or (places != self._places and _firsts(places) != self._firsts):
            return None
        if self._shared and _views(plain, self._shared) != self._views:
            return None
        if places != self._places:
            for tensor in self._in_place_of(plain):
                require_whole_storage(tensor)
            self._places = places
        if self._in_place is None:
            return places
        return [place if is_in_place else 0 for place, is_in_place in zip(places, self._in_place, strict=True)]

    def _in_place_of(self, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        """Return those of the tensors that are copied by their addresses."""
        return tensors if self._in_place is None else compress(tensors, self._in_place)

    def _places_of(self, tensors: Sequence[torch.Tensor]) -> list[int] | None:
        places: list[int] = []
        for block, known in zip(_blocks(tensors), self._blocks, strict=True):
            if _columns(block) != known:
                return None
            places += map(torch.Tensor.data_ptr, block)
        return places


def _locals(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the memory that this rank has of each."""
    if not any_sharded(tensors):
        return tensors
    return [one._local_tensor if is_sharded(one) else one for one in tensors]


def _blocks(tensors: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    for start in range(0, len(tensors), _BLOCK):
        yield tensors[start : start + _BLOCK]


def _columns(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    """Return what the tensors are, in columns, and the strides of those that are not contiguous."""
    columns = [list(map(column, tensors)) for column in _COLUMNS]
    return [*columns, [one.stride() for one in compress(tensors, map(not_, columns[3]))]]


def _firsts(places: list[int]) -> list[int]:
    """Return for each tensor the first one that begins at the same place in memory."""
    if 0 in places:
        # One without memory shares with none, so it gets its own place.
        places = [place or -index - 1 for index, place in enumerate(places)]
    if len(set(places)) == len(places):
        return list(range(len(places)))
    first: dict[int, int] = {}
    return [first.setdefault(place, index) for index, place in enumerate(places)]


def _shared(firsts: Sequence[int]) -> list[int]:
    """Return the tensors that begin where another one does."""
    several = {first for index, first in enumerate(firsts) if first != index}
    return [index for index, first in enumerate(firsts) if first in several]


def _views(tensors: Sequence[torch.Tensor], shared: Sequence[int]) -> list[Any]:
    """Return how tensors see the memory that they share: they are one tensor only if they see it in the same way."""
    return [(one.stride(), one.is_conj(), one.is_neg()) for one in (tensors[index] for index in shared)]


def _is_in_place(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's host memory holds its bytes as a file has them. Whether a complex one is conjugated is
    no part of a signature, so none is taken for such."""
    plain = type(tensor) in PLAIN_TYPES and tensor.is_cpu and not tensor.dtype.is_complex
    return bool(plain and tensor.is_contiguous() and not tensor.is_neg())
