"""Name the stored form and its limits. Knows no values and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
MAX_DEPTH = 100
MAX_DIGITS = 65_536


class Flattened(NamedTuple):
    """A tensor of a wrapper subclass taken apart: its class, its inner tensors by attribute, the rest as its context.

    `shards` is the number of pieces that the tensor is cut into; the inner ones are cut in the same way.
    """

    kind: type
    tensors: Mapping[str, Any]
    context: object
    shards: int = 1


class Subclass(NamedTuple):
    """The stored form of a tensor of a wrapper subclass."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    shards: int
    context: Json
    tensors: Mapping[str, Json]
