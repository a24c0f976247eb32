"""Values of a torch file on their way from its pickle to a tree: where tensors lie, and what becomes of the rest."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from holdfast.errors import CorruptCheckpointError, HoldfastError, UnsafeContentError, UnsupportedFormatError
from holdfast.formats.binary import BinaryFile
from holdfast.formats.plain_text import require_name
from holdfast.formats.source import StoredChunk, TensorEntry
from holdfast.formats.torch_files.pickle_machine import Record
from holdfast.formats.torch_files.stand_ins import plain_record
from holdfast.ondisk.dtypes import ELEMENT_TYPES
from holdfast.ondisk.regions import MAX_DIMENSIONS, strides_of, whole

__all__ = ["Storage", "StoredTensor", "finished_tree"]

_MAX_SIZE = 2**63 - 1
# An expanded tensor repeats its bytes. A small file must not ask for any amount of memory with it.
_MAX_EXPANDED_BYTES = 256 << 20


@dataclass(eq=False, slots=True)
class Storage:
    """The memory of tensors, as a range of a file, and the element type that it is said to have."""

    key: str
    dtype: str
    file: BinaryFile | None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the pickle has it: where it starts in its storage, and how it lies there."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, storage: Any, offset: Any, shape: Any, strides: Any, *, dtype: str | None = None) -> Self:
        """Return a tensor if everything that the pickle says of it is a number that a tensor can have."""
        if type(storage) is not Storage:
            raise CorruptCheckpointError("a tensor of the pickle has no storage")
        numbers = (offset, *_numbers(shape), *_numbers(strides))
        if any(type(number) is not int or not 0 <= number <= _MAX_SIZE for number in numbers):
            raise CorruptCheckpointError("the place of a tensor is not made of numbers")
        if len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS:
            raise CorruptCheckpointError(f"a tensor has {len(shape)} sizes and {len(strides)} strides")
        return cls(storage, offset, tuple(shape), tuple(strides), dtype or storage.dtype)

    def entry(self, name: str) -> TensorEntry:
        """Return where the tensor is to be read, checked to lie in its storage."""
        if self.dtype not in ELEMENT_TYPES:
            raise UnsupportedFormatError(f"tensors of type '{self.dtype}' are not known", leaf=name)
        if self.storage.file is None:
            raise CorruptCheckpointError(f"the storage '{self.storage.key[:100]}' is not in the file", leaf=name)
        item = ELEMENT_TYPES[self.dtype].item_bytes
        if math.prod(self.shape) * item > max(self.storage.file.size_bytes, _MAX_EXPANDED_BYTES):
            raise UnsafeContentError(
                f"a tensor of {math.prod(self.shape) * item} bytes is stored in {self.storage.file.size_bytes}",
                leaf=name,
                advice="save it as it is, not expanded, with .contiguous()",
            )
        is_contiguous = math.prod(self.shape) == 0 or all(
            size == 1 or stride == dense
            for size, stride, dense in zip(self.shape, self.strides, strides_of(self.shape), strict=True)
        )
        strides = None if is_contiguous else self.strides
        chunk = StoredChunk(self.storage.file, self.offset * item, whole(self.shape), strides)
        if math.prod(self.shape) == 0:
            chunk = chunk._replace(start=0)
        return TensorEntry(name, self.dtype, self.shape, (chunk,)).checked()


def _numbers(sizes: Any) -> tuple[Any, ...]:
    if not isinstance(sizes, tuple | list) or len(sizes) > MAX_DIMENSIONS:
        raise CorruptCheckpointError("the shape of a tensor is not made of numbers")
    return tuple(sizes)


def finished_tree(value: Any, name: str) -> Any:
    """Return a value with entries in the place of tensors and plain values in the place of records.

    The same elements of a storage are one entry, which has the first of its names.
    """
    try:
        return _Finish().value(value, "")
    except HoldfastError as error:
        raise error.at(file=name) from None
    except (ValueError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        raise CorruptCheckpointError(f"a value cannot be read: {str(error)[:200]}", file=name) from None


class _Finish:
    def __init__(self) -> None:
        self._entries: dict[tuple[Any, ...], TensorEntry] = {}

    def value(self, value: Any, path: str) -> Any:
        if type(value) in (str, int, float, bool, type(None), bytes, bytearray, complex):
            return value
        if type(value) is StoredTensor:
            return self._entry(value, path)
        if isinstance(value, dict):
            return self._dict(value, path)
        if type(value) in (list, tuple):
            return type(value)(self.value(inner, _joined(path, place)) for place, inner in enumerate(value))
        if type(value) in (set, frozenset):
            return type(value)(map(_plain_key, value))
        if type(value) is deque:
            return deque((self.value(inner, _joined(path, place)) for place, inner in enumerate(value)), value.maxlen)
        if type(value) is Record:
            return plain_record(value, lambda inner: self.value(inner, path))
        if type(value) is Storage:
            raise UnsupportedFormatError("a storage that is no tensor is not read", leaf=path)
        if type(value).__module__ in (
            "holdfast.formats.torch_files.pickle_machine",
            "holdfast.formats.torch_files.torch_file",
        ):
            raise CorruptCheckpointError(f"a value is a class: {str(value)[:100]}", leaf=path)
        return value

    def _dict(self, value: dict[Any, Any], path: str) -> Any:
        inner = {_plain_key(key): self.value(item, _joined(path, key)) for key, item in value.items()}
        if type(value) is OrderedDict:
            made: OrderedDict[Any, Any] = OrderedDict(inner)
            metadata = getattr(value, "_metadata", None)
            if isinstance(metadata, Mapping):
                made._metadata = self.value(metadata, path)  # type: ignore[attr-defined]
            return made
        if type(value) is defaultdict:
            return defaultdict(value.default_factory, inner)
        return Counter(inner) if type(value) is Counter else inner

    def _entry(self, tensor: StoredTensor, path: str) -> TensorEntry:
        key = (tensor.storage.key, tensor.dtype, tensor.offset, tensor.shape, tensor.strides)
        if key not in self._entries:
            self._entries[key] = tensor.entry(path)
        return self._entries[key]


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _plain_key(key: Any) -> Any:
    """Return a key of a dict, or an item of a set, if it is a plain value or a tuple of such."""
    if type(key) in (tuple, frozenset):
        return type(key)(map(_plain_key, key))
    if type(key) is str:
        return require_name(key)
    if type(key) in (int, float, bool, type(None), bytes, complex):
        return key
    raise CorruptCheckpointError(f"the key of a dict or an item of a set is a {type(key).__name__}")
