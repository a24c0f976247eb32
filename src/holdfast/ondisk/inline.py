"""Small tensors that are stored in place, as a text. A text enters, a tensor leaves; torch is imported when it does."""

from __future__ import annotations

import base64
import math
from typing import Any

from holdfast.errors import CorruptCheckpointError, UsageError
from holdfast.ondisk.dtypes import MAX_TENSOR_BYTES, element_type
from holdfast.ondisk.regions import MAX_DIMENSIONS


def tensor_of_text(text: str) -> Any:
    """Return the tensor that a text such as `data:DTYPE:SHAPE:BASE64` holds. Any other text is a
    CorruptCheckpointError; an element type that is not known is not damage, and refused by its name."""
    try:
        front, dtype, shape, data = text.split(":")
        sizes = [int(size) for size in shape.split(",") if size]
        raw = bytearray(base64.b64decode(data, validate=True))
        item_bytes = element_type(dtype).item_bytes
        # An empty tensor can have any sizes beside its zero, and torch counts its strides in 64 bits.
        largest = math.prod(max(size, 1) for size in sizes) * item_bytes
        if front != "data" or len(sizes) > MAX_DIMENSIONS or min(sizes, default=0) < 0 or largest > MAX_TENSOR_BYTES:
            raise ValueError(f"no tensor has the shape {sizes}"[:200])
        if len(raw) != math.prod(sizes) * item_bytes:
            raise ValueError(f"{len(raw)} bytes for {dtype} {sizes}")
    except ValueError as error:
        raise CorruptCheckpointError(f"not a tensor that is stored in place: {text[:80]!r} ({error})") from None
    # Only a run with such a tensor needs torch: the command line starts without.
    import torch

    # Not getattr: torch imports more modules when it is asked for certain names.
    known = vars(torch).get(dtype)
    if known is None:
        raise UsageError(f"this version of torch ({torch.__version__}) has no type '{dtype}'")
    if not raw:
        return torch.empty(sizes, dtype=known)
    return torch.frombuffer(raw, dtype=torch.uint8).view(known).reshape(sizes).clone()
