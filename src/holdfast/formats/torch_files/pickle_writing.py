"""Write pickles of protocol 2 that depend on values alone. A tree enters; bytes, and the tensors in it, leave."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from holdfast.errors import UsageError
from holdfast.formats.exporting.export import ExportItem
from holdfast.ondisk.regions import strides_of

__all__ = ["Call", "Instance", "Pairs", "Pickler"]

_STORAGE_CLASSES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}


class Call(NamedTuple):
    """A value that the reader makes by calling a global."""

    module: str
    name: str
    arguments: tuple[Any, ...]


class Instance(NamedTuple):
    """A value that the reader makes as an empty object of a class, which it then gives a state."""

    module: str
    name: str
    state: Any


class Pairs(list[tuple[Any, Any]]):
    """A dict as pairs, of which the keys cannot be hashed here."""


class Pickler:
    """Write protocol 2 with the instructions that torch's own reader of weights knows. Only globals are memoized: what
    is written depends on values alone, not on which of them are the same object."""

    def __init__(self) -> None:
        self.storages: list[ExportItem] = []
        self._keys: dict[tuple[int, str], int] = {}
        self._globals: dict[tuple[str, str], int] = {}
        self._parts: list[bytes] = []

    def dump(self, tree: Any) -> bytes:
        self._parts.append(b"\x80\x02")
        self._value(tree, "")
        self._parts.append(b".")
        return b"".join(self._parts)

    def _value(self, value: Any, path: str) -> None:
        writer = self._writers.get(type(value))
        if writer is None:
            self._rare(value, path)
        else:
            writer(self, value, path)

    def _constant(self, value: Any, path: str) -> None:
        self._parts.append({None: b"N", True: b"\x88", False: b"\x89"}[value])

    def _int(self, value: int, path: str) -> None:
        if 0 <= value < 256:
            self._parts.append(struct.pack("<cB", b"K", value))
        elif -(2**31) <= value < 2**31:
            self._parts.append(struct.pack("<ci", b"J", value))
        else:
            size = value.bit_length() // 8 + 1
            if size > 255:
                raise UsageError("a number is too large for a torch file", leaf=path)
            self._parts.append(struct.pack("<cB", b"\x8a", size) + value.to_bytes(size, "little", signed=True))

    def _float(self, value: float, path: str) -> None:
        self._parts.append(struct.pack(">cd", b"G", value))

    def _text(self, value: str, path: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self._parts.append(struct.pack("<cI", b"X", len(data)) + data)

    def _list(self, value: list[Any], path: str) -> None:
        self._parts.append(b"](")
        for place, inner in enumerate(value):
            self._value(inner, f"{path}.{place}")
        self._parts.append(b"e")

    def _tuple(self, value: tuple[Any, ...], path: str) -> None:
        self._parts.append(b"(")
        for place, inner in enumerate(value):
            self._value(inner, f"{path}.{place}")
        self._parts.append(b"t")

    def _dict(self, value: Mapping[Any, Any], path: str) -> None:
        self._parts.append(b"}(")
        self._items(value, path)

    def _items(self, value: Mapping[Any, Any], path: str) -> None:
        for key, inner in value.items():
            self._value(key, path)
            self._value(inner, f"{path}.{key}" if path else str(key))
        self._parts.append(b"u")

    def _ordered_dict(self, value: OrderedDict[Any, Any], path: str) -> None:
        self._global("collections", "OrderedDict")
        self._parts.append(b")R(")
        self._items(value, path)
        metadata = getattr(value, "_metadata", None)
        if isinstance(metadata, Mapping):
            self._value({"_metadata": metadata}, path)
            self._parts.append(b"b")

    def _counter(self, value: Counter[Any], path: str) -> None:
        self._call("collections", "Counter", dict(value), path=path)

    def _set(self, value: set[Any] | frozenset[Any], path: str) -> None:
        self._call("__builtin__", "set", sorted(value, key=lambda item: (type(item).__name__, repr(item))), path=path)

    def _bytes(self, value: bytes, path: str) -> None:
        self._call("_codecs", "encode", value.decode("latin-1"), "latin1", path=path)

    def _byte_array(self, value: bytearray, path: str) -> None:
        self._call("__builtin__", "bytearray", bytes(value), path=path)

    def _complex(self, value: complex, path: str) -> None:
        self._call("__builtin__", "complex", value.real, value.imag, path=path)

    def _call(self, module: str, name: str, *arguments: Any, path: str) -> None:
        self._global(module, name)
        self._tuple(arguments, path)
        self._parts.append(b"R")

    def _global(self, module: str, name: str) -> None:
        place = self._globals.get((module, name))
        if place is not None:
            self._parts.append(struct.pack("<cI", b"j", place))
            return
        place = self._globals[module, name] = len(self._globals)
        self._parts.append(f"c{module}\n{name}\n".encode() + struct.pack("<cI", b"r", place))

    def _pairs(self, value: Pairs, path: str) -> None:
        self._parts.append(b"}(")
        for key, inner in value:
            self._value(key, path)
            self._value(inner, path)
        self._parts.append(b"u")

    def _called(self, value: Call, path: str) -> None:
        self._call(value.module, value.name, *value.arguments, path=path)

    def _instance(self, value: Instance, path: str) -> None:
        self._global(value.module, value.name)
        self._parts.append(b")\x81")
        self._value(dict(value.state) if isinstance(value.state, Mapping) else value.state, path)
        self._parts.append(b"b")

    def _item(self, item: ExportItem, path: str) -> None:
        """Write a tensor: the function that rebuilds it, its storage, and how it lies there."""
        has_class = item.dtype in _STORAGE_CLASSES
        self._global("torch._utils", "_rebuild_tensor_v2" if has_class else "_rebuild_tensor_v3")
        self._parts.append(b"((")
        self._text("storage", path)
        self._global(*("torch", _STORAGE_CLASSES[item.dtype]) if has_class else ("torch.storage", "UntypedStorage"))
        self._text(str(self._storage(item)), path)
        self._text("cpu", path)
        count = 1
        for size in item.shape:
            count *= size
        self._int(count if has_class else item.size_bytes, path)
        self._parts.append(b"tQ")
        layout: tuple[Any, ...] = (0, item.shape, strides_of(item.shape), False, OrderedDict())
        for part in layout:
            self._value(part, path)
        if not has_class:
            self._global("torch", item.dtype)
        self._parts.append(b"tR")

    def _storage(self, item: ExportItem) -> int:
        key = (id(item.entry), item.dtype)
        if key not in self._keys:
            self._keys[key] = len(self.storages)
            self.storages.append(item)
        return self._keys[key]

    def _rare(self, value: Any, path: str) -> None:
        """Write a torch or numpy value, or refuse it."""
        import numpy
        import torch

        if isinstance(value, torch.Size):
            self._call("torch", "Size", tuple(value), path=path)
        elif isinstance(value, torch.dtype):
            self._global("torch", str(value).removeprefix("torch."))
        elif isinstance(value, torch.device):
            place = (value.type,) if value.index is None else (value.type, value.index)
            self._call("torch", "device", *place, path=path)
        elif isinstance(value, numpy.bool_ | numpy.integer | numpy.floating) and value.dtype.itemsize <= 8:
            self._value(value.item(), path)
        else:
            raise UsageError(
                f"a value of type '{type(value).__name__}' cannot be written so that torch.load(weights_only=True) "
                "reads it",
                leaf=path,
                advice="export the model alone, or leave the component out",
            )

    _writers: dict[type, Callable[[Pickler, Any, str], None]] = {
        type(None): _constant,
        bool: _constant,
        int: _int,
        float: _float,
        str: _text,
        list: _list,
        tuple: _tuple,
        dict: _dict,
        OrderedDict: _ordered_dict,
        # torch's reader of weights has no defaultdict. What is stored is the same.
        defaultdict: _dict,
        Counter: _counter,
        set: _set,
        frozenset: _set,
        bytes: _bytes,
        bytearray: _byte_array,
        complex: _complex,
        ExportItem: _item,
        Pairs: _pairs,
        Call: _called,
        Instance: _instance,
    }
