"""What the globals in a torch file stand for: plain values, and nothing that does any work. No file is opened here.

Every callable may be called with anything: arguments of other types are a CorruptCheckpointError.
"""

from __future__ import annotations

import datetime
import io
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from holdfast.errors import CorruptCheckpointError
from holdfast.formats.torch_files.pickle_machine import Global, Record, Refused, cheap_key

if TYPE_CHECKING:
    import numpy

__all__ = ["plain_globals", "plain_record"]

_FACTORIES = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str)}
_NUMPY_TYPE = re.compile(r"[biufc](1|2|4|8|16)|[SU][0-9]{1,6}|V1")
_DICT_CLASSES = (
    ("pytorch_lightning.utilities.parsing", "AttributeDict"),
    ("lightning.pytorch.utilities.parsing", "AttributeDict"),
    ("lightning_fabric.utilities.data", "AttributeDict"),
    ("lightning.fabric.utilities.data", "AttributeDict"),
)
_NUMPY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")


@lru_cache(maxsize=1)
def plain_globals() -> Mapping[tuple[str, str], Any]:
    """Return what plain Python, numpy and torch values in a pickle refer to."""
    return {**_python_globals(), **_numpy_globals(), **_torch_globals()}


def plain_record(record: Record, inner: Callable[[Any], Any]) -> Any:
    """Return the value that a record of one of these globals is, with `inner` applied to the values in it."""
    if record.kind == "namespace" and type(record.state) is dict:
        return {key: inner(value) for key, value in record.state.items()}
    if record.kind == "dict" and not record.state:
        return {key: inner(value) for key, value in record.items.items()}
    if record.kind == "bytes file" and _is_of(record.state, bytes, int, object) and record.state[1] >= 0:
        stream = io.BytesIO(record.state[0])
        stream.seek(record.state[1])
        return stream
    if record.kind == "numpy array" and type(record.state) is tuple and len(record.state) == 5:
        return _numpy_array(*record.state[1:])
    if record.kind == "numpy dtype":
        return _numpy_dtype(record)
    raise CorruptCheckpointError(f"a {record.kind} of the pickle is incomplete")


def _python_globals() -> dict[tuple[str, str], Any]:
    made: dict[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): _ordered_dict,
        ("collections", "defaultdict"): _default_dict,
        ("collections", "Counter"): _counter,
        ("collections", "deque"): _deque,
        ("builtins", "set"): lambda *items: set(_items(items)),
        ("builtins", "frozenset"): lambda *items: frozenset(_items(items)),
        ("builtins", "complex"): lambda *parts: complex(*_require(parts, *[float] * len(parts))),
        ("builtins", "bytearray"): _byte_array,
        ("builtins", "bytes"): lambda *data: bytes(*_require(data, *[bytes] * len(data))),
        ("builtins", "slice"): _slice,
        ("builtins", "range"): lambda *numbers: range(*_require(numbers, *[int] * len(numbers))),
        ("_codecs", "encode"): _encode,
        ("datetime", "datetime"): lambda *state: datetime.datetime(*_time(state)),
        ("datetime", "date"): lambda *state: datetime.date(*_require(state, bytes)),
        ("datetime", "time"): lambda *state: datetime.time(*_time(state)),
        ("datetime", "timedelta"): lambda *state: datetime.timedelta(*_require(state, int, int, int)),
        ("datetime", "timezone"): lambda *state: datetime.timezone(*_require(state[:1], datetime.timedelta)),
        ("argparse", "Namespace"): Record.named("namespace"),
        ("_io", "BytesIO"): Record.named("bytes file"),
    }
    made |= {("builtins", name): _not_called(name) for name in _FACTORIES if ("builtins", name) not in made}
    made |= {("pathlib", f"{pure}{kind}Path"): _path for pure in ("", "Pure") for kind in ("", "Posix", "Windows")}
    # Python 3.13 has them in a module of their own.
    made |= {("pathlib._local", name): target for (module, name), target in made.items() if module == "pathlib"}
    made |= dict.fromkeys(_DICT_CLASSES, Record.named("dict"))
    return made


def _numpy_globals() -> dict[tuple[str, str], Any]:
    made: dict[tuple[str, str], Any] = {
        ("numpy", "ndarray"): _not_called("numpy.ndarray"),
        ("numpy", "dtype"): Record.named("numpy dtype"),
    }
    for module in _NUMPY_MODULES:
        made[module, "_reconstruct"] = Record.named("numpy array")
        made[module, "scalar"] = _numpy_scalar
    return made


def _torch_globals() -> dict[tuple[str, str], Any]:
    import torch

    kinds: dict[tuple[str, str], Any] = {
        ("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
    }
    layouts = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
    kinds["torch", "Size"] = lambda *sizes: torch.Size(_sizes(sizes))
    kinds["torch", "device"] = lambda *place: torch.device(*_device(place))
    kinds["torch.serialization", "_get_layout"] = lambda name: layouts[name]
    classes = "this is an object of a class, not a state dict: save model.state_dict() and load that"
    sharded = (
        "this is a part of a tensor that several ranks hold: save the run with torch.distributed.checkpoint, whose "
        "folders are read, or gather the full state dict before torch.save"
    )
    for name in ("DTensor", "DeviceMesh"):
        kinds["torch.distributed.tensor", name] = Refused(sharded)
        kinds["torch.distributed.device_mesh", name] = Refused(sharded)
    kinds["torch._utils", "_rebuild_wrapper_subclass"] = Refused(sharded)
    kinds["torch.distributed._shard.sharded_tensor.api", "ShardedTensor"] = Refused(sharded)
    for name in ("_rebuild_sparse_tensor", "_rebuild_qtensor", "_rebuild_nested_tensor"):
        kinds["torch._utils", name] = Refused(
            "only dense tensors are read: convert it with .to_dense() or .dequantize()"
        )
    kinds["torch._utils", "_rebuild_meta_tensor_no_storage"] = Refused("a tensor on the meta device has no values")
    kinds["torch.jit._pickle", "restore_type_tag"] = Refused(classes)
    return kinds


def _is_of(values: Any, *types: type) -> bool:
    return (
        type(values) is tuple
        and len(values) == len(types)
        and all(kind is object or type(value) is kind for value, kind in zip(values, types, strict=True))
    )


def _require(values: tuple[Any, ...], *types: type) -> tuple[Any, ...]:
    if not _is_of(values, *types):
        raise CorruptCheckpointError("a value of the pickle is made from what it cannot be made from")
    return values


def _not_called(name: str) -> Callable[..., Any]:
    """Return what stands for a class that is only named, as the factory of a defaultdict is."""

    def refuse(*arguments: Any) -> Any:
        if not arguments and name in _FACTORIES:
            return _FACTORIES[name]()
        raise CorruptCheckpointError(f"the pickle calls {name}")

    return refuse


def _items(arguments: tuple[Any, ...]) -> list[Any]:
    """Return the items of a set that is made from a list, if all of them can be hashed cheaply."""
    if not arguments:
        return []
    if len(arguments) != 1 or type(arguments[0]) not in (list, tuple):
        raise CorruptCheckpointError("a set of the pickle is not made from a list")
    return list(map(cheap_key, arguments[0]))


def _ordered_dict(*arguments: Any) -> OrderedDict[Any, Any]:
    """Return an ordered dict, empty or of a list of pairs, which is how Python 2 wrote it."""
    made: OrderedDict[Any, Any] = OrderedDict()
    for pair in arguments[0] if len(arguments) == 1 and type(arguments[0]) is list else ():
        if type(pair) not in (list, tuple) or len(pair) != 2 or type(pair[0]) not in (str, int):
            raise CorruptCheckpointError("an OrderedDict of the pickle is not made of pairs")
        made[pair[0]] = pair[1]
    if len(arguments) > 1 or (arguments and type(arguments[0]) is not list):
        raise CorruptCheckpointError("an OrderedDict of the pickle is not made of pairs")
    return made


def _default_dict(factory: Any = None) -> defaultdict[Any, Any]:
    if factory is None:
        return defaultdict(None)
    if not isinstance(factory, Global) or factory.module != "builtins" or factory.name not in _FACTORIES:
        raise CorruptCheckpointError("the factory of a defaultdict is no plain type")
    return defaultdict(_FACTORIES[factory.name])


def _counter(counts: Any = None) -> Counter[Any]:
    if counts is not None and type(counts) is not dict:
        raise CorruptCheckpointError("a Counter of the pickle is not made from a dict")
    return Counter(counts)


def _deque(items: Any = (), limit: Any = None) -> deque[Any]:
    if type(items) not in (list, tuple) or not (limit is None or type(limit) is int):
        raise CorruptCheckpointError("a deque of the pickle is not made from a list")
    return deque(items, limit)


def _byte_array(*arguments: Any) -> bytearray:
    if _is_of(arguments, str, str):
        return bytearray(_encode(*arguments))
    return bytearray(*_require(arguments, *[bytes] * len(arguments)))


def _slice(*arguments: Any) -> slice:
    if len(arguments) != 3 or any(type(value) not in (int, type(None)) for value in arguments):
        raise CorruptCheckpointError("a slice of the pickle is not made from numbers")
    return slice(*arguments)


def _encode(*arguments: Any) -> bytes:
    """Return bytes, which old protocols write as text with one character for each."""
    text, encoding = _require(arguments, str, str)
    if encoding not in ("latin1", "latin-1", "utf-8", "utf8"):
        raise CorruptCheckpointError("the pickle encodes text in a way that is not bytes")
    return bytes(text, encoding)


def _time(state: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(state) == 2 and isinstance(state[1], datetime.timezone):
        return _require(state[:1], bytes) + state[1:]
    return _require(state, bytes)


def _path(*parts: Any) -> str:
    return "/".join(_require(parts, *[str] * len(parts))).replace("//", "/")


def _sizes(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    if len(arguments) != 1 or type(arguments[0]) not in (tuple, list) or len(arguments[0]) > 1000:
        raise CorruptCheckpointError("a torch.Size of the pickle is not made from numbers")
    return _require(tuple(arguments[0]), *[int] * len(arguments[0]))


def _device(place: tuple[Any, ...]) -> tuple[Any, ...]:
    return _require(place, *(str, int)[: max(len(place), 1)])


def _numpy_dtype(record: Any) -> numpy.dtype[Any]:
    """Return a numpy type of numbers or text. A type of objects, which holds pickles itself, is refused."""
    import numpy

    arguments = record.arguments if isinstance(record, Record) and record.kind == "numpy dtype" else ()
    if not arguments or type(arguments[0]) is not str or not _NUMPY_TYPE.fullmatch(arguments[0]):
        raise CorruptCheckpointError("a numpy value of the pickle has no type of numbers or text")
    kind = numpy.dtype(arguments[0])
    order = record.state[1] if type(record.state) is tuple and len(record.state) > 1 else "="
    if order not in ("<", ">", "=", "|"):
        raise CorruptCheckpointError("a numpy value of the pickle has no byte order")
    if type(record.state) is tuple and any(part is not None for part in record.state[2:5]):
        raise CorruptCheckpointError("a numpy value of the pickle has a type with fields")
    return kind.newbyteorder("<" if order == "<" else ">") if order in "<>" else kind


def _numpy_scalar(*arguments: Any) -> Any:
    import numpy

    kind, data = _require(arguments, Record, bytes)
    found = _numpy_dtype(kind)
    if len(data) != found.itemsize:
        raise CorruptCheckpointError("a numpy value of the pickle has another size than its type")
    return numpy.frombuffer(data, found)[0]


def _numpy_array(shape: Any, kind: Any, is_fortran: Any, data: Any) -> Any:
    import numpy

    found = _numpy_dtype(kind)
    sizes = _sizes((shape,))
    if type(data) is not bytes or any(size < 0 for size in sizes) or len(sizes) > 32:
        raise CorruptCheckpointError("a numpy array of the pickle has no bytes")
    array = numpy.frombuffer(data, found) if data else numpy.empty(0, found)
    return array.reshape(sizes, order="F" if is_fortran is True else "C").copy()
