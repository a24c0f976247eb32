"""Read pickles of strangers without running anything of them. Bytes and an allow-list enter; plain values leave.

This is an interpreter of its own, not `pickle.Unpickler` with another `find_class`: that one sets attributes of what it
finds, hashes tuples of any depth, which overflows the stack, and takes as much memory as a number in the data says.
Here a global is looked up in the caller's table and nowhere else, only what the table holds is called, BUILD gives its
value to a `Record` and to nothing else, and what is made is counted against the size of the data.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast.errors import CorruptCheckpointError, HoldfastError
from holdfast.formats.torch_files import pickle_codes as codes
from holdfast.formats.torch_files.pickle_machine import Machine, Record, Truncated
from holdfast.formats.torch_files.pickle_operations import OPERATIONS

__all__ = ["MAX_DEPTH", "MAX_PICKLE_BYTES", "load_first", "load_plain"]

MAX_PICKLE_BYTES = 1 << 30
"""No pickle of names and places is larger; tensors are not part of it."""
MAX_DEPTH = 100
"""How deep values nest at most, as in Holdfast's own checkpoints."""
_FREE_NODES = 1 << 20
_LEAVES = frozenset((int, str, float, bool, bytes, type(None)))


def load_plain(
    data: bytes,
    *,
    allowed: Mapping[tuple[str, str], Any],
    persistent: Callable[[Any], Any] | None,
    name: str,
) -> Any:
    """Return the value of a pickle of protocol 0 to 5.

    allowed: by module and name, what a global stands for: a callable that is called in its place with whatever
    arguments the data has, or a value. persistent: what is called with a persistent id. name: the file, for messages.

    A global that is not allowed is an UnsafeContentError that names it; data that is no pickle, or that would take far
    more memory than it has bytes, a CorruptCheckpointError.
    """
    try:
        return load_first(data, 0, allowed=allowed, persistent=persistent, name=name)[0]
    except Truncated as error:
        raise CorruptCheckpointError(error.problem, file=name) from None


def load_first(
    data: bytes,
    start: int,
    *,
    allowed: Mapping[tuple[str, str], Any],
    persistent: Callable[[Any], Any] | None,
    name: str,
) -> tuple[Any, int]:
    """Return the value of the pickle that starts at a byte, and where it ends. Data that ends too early: Truncated."""
    if len(data) > MAX_PICKLE_BYTES:
        raise CorruptCheckpointError(f"a pickle of {len(data)} bytes is larger than any of a checkpoint", file=name)
    machine = Machine(data, start, allowed, persistent)
    try:
        value = _run(machine)
        _require_finite(value, len(data))
    except HoldfastError as error:
        raise error.at(file=name) from None
    except (RecursionError, MemoryError) as error:
        raise CorruptCheckpointError(f"the pickle cannot be read: {type(error).__name__}", file=name) from None
    except Exception as error:
        text = f"{type(error).__name__}: {str(error)[:200]}"
        raise CorruptCheckpointError(
            f"the pickle cannot be read at byte {machine.position}: {text}", file=name
        ) from None
    return value, machine.position


def _run(machine: Machine) -> Any:
    operations, data, stop = OPERATIONS, machine.data, codes.STOP[0]
    while True:
        try:
            code = data[machine.position]
        except IndexError:
            raise Truncated("the data ends before the pickle does", needed_bytes=len(data) + 1) from None
        machine.position += 1
        if code == stop:
            return machine.pop()
        operation = operations[code]
        if operation is None:
            raise CorruptCheckpointError(f"byte {machine.position - 1} is no instruction of a pickle: {code:#04x}")
        operation(machine)


def _require_finite(value: Any, data_bytes: int) -> None:
    """Refuse a value that holds itself, nests too deep, or is far larger than its data when each mention of a shared
    part counts: code that walks it would not come to an end."""
    limit = max(_FREE_NODES, 4 * data_bytes)
    sizes: dict[int, tuple[int, int]] = {}
    walk: list[tuple[Any, list[Any]]] = [(value, list(_parts(value)))]
    open_ids = {id(value)}
    while walk:
        node, left = walk[-1]
        if left:
            part = left.pop()
            if id(part) in open_ids:
                raise CorruptCheckpointError("a value of the pickle holds itself")
            if type(part) not in _LEAVES and id(part) not in sizes and (parts := list(_parts(part))):
                open_ids.add(id(part))
                walk.append((part, parts))
            continue
        inner = [sizes.get(id(part), (1, 0)) for part in _parts(node)]
        count, depth = 1 + sum(size for size, _ in inner), 1 + max((deep for _, deep in inner), default=0)
        if depth > MAX_DEPTH:
            raise CorruptCheckpointError(f"the values of the pickle nest more than {MAX_DEPTH} deep")
        if count > limit:
            raise CorruptCheckpointError("the values of the pickle are far larger than its data")
        sizes[id(node)] = (count, depth)
        open_ids.discard(id(node))
        walk.pop()


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
        yield from (getattr(value, "_metadata", None),) if type(value) is OrderedDict else ()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value
    elif isinstance(value, Record):
        yield from (value.arguments, value.state, value.items)
