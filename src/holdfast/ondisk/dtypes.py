"""The element types that can be stored: their size and how a safetensors file stores them. Knows no torch.

A type that safetensors cannot name is stored as one that it can, with one more dimension at the end: `complex128` as
pairs of F64, the rarer eight-bit floats as U8. The manifest always has the true type and shape.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import UnsupportedFormatError

MAX_TENSOR_BYTES = 2**63 - 1
"""No tensor is larger; of an empty one each size of 0 counts as 1."""


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type. `extra` is the size of the dimension that is added at the end, or 0."""

    name: str
    item_bytes: int
    code: str
    extra: int = 0

    @property
    def alignment(self) -> int:
        return self.item_bytes // self.extra if self.extra else self.item_bytes

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape, self.extra) if self.extra else shape

    def stored_offsets(self, offsets: tuple[int, ...]) -> tuple[int, ...]:
        return (*offsets, 0) if self.extra else offsets


ELEMENT_TYPES = {
    kind.name: kind
    for kind in (
        ElementType("float64", 8, "F64"),
        ElementType("float32", 4, "F32"),
        ElementType("float16", 2, "F16"),
        ElementType("bfloat16", 2, "BF16"),
        ElementType("int64", 8, "I64"),
        ElementType("int32", 4, "I32"),
        ElementType("int16", 2, "I16"),
        ElementType("int8", 1, "I8"),
        ElementType("uint64", 8, "U64"),
        ElementType("uint32", 4, "U32"),
        ElementType("uint16", 2, "U16"),
        ElementType("uint8", 1, "U8"),
        ElementType("bool", 1, "BOOL"),
        ElementType("float8_e4m3fn", 1, "F8_E4M3"),
        ElementType("float8_e5m2", 1, "F8_E5M2"),
        ElementType("float8_e4m3fnuz", 1, "U8", 1),
        ElementType("float8_e5m2fnuz", 1, "U8", 1),
        ElementType("float8_e8m0fnu", 1, "U8", 1),
        ElementType("complex32", 4, "F16", 2),
        ElementType("complex64", 8, "C64"),
        ElementType("complex128", 16, "F64", 2),
    )
}

STORED_CODES = {kind.code: kind.alignment for kind in ELEMENT_TYPES.values()}


def element_type(name: str) -> ElementType:
    try:
        return ELEMENT_TYPES[name]
    except KeyError:
        raise UnsupportedFormatError(
            f"tensors of type '{name}' are not known to this version", advice="use a newer version of Holdfast"
        ) from None
