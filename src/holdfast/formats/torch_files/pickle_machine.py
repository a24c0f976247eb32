"""The state of a reader of pickles: its data, its stack, and what it may make. Bytes enter; values leave, counted."""

from __future__ import annotations

import _compat_pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from holdfast.errors import CorruptCheckpointError, UnsafeContentError

__all__ = ["ADVICE", "Global", "Machine", "Record", "Refused", "Truncated", "cheap_key"]

ADVICE = (
    "only tensors and plain values are read; if you trust the file, load it with the tool that wrote it and save a "
    "state dict without objects of classes"
)
# A container takes some hundred bytes of memory and at least one of the data. More than one in four bytes is no real
# checkpoint, and would take far more memory than its size.
_FREE_CONTAINERS = 1 << 16
_BYTES_PER_CONTAINER = 4
_MAX_LINE_BYTES = 16 << 20
_MAX_KEY_PARTS = 1000


class Global(NamedTuple):
    """A global that the allow-list has: what stands for it, by its name in the data."""

    module: str
    name: str
    target: Any

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Refused(NamedTuple):
    """An entry of an allow-list for a well-known global that is refused with better advice than the usual."""

    advice: str


class Record:
    """A value of a foreign class: its name, the arguments that it was made with, the state that it was given."""

    __slots__ = ("arguments", "items", "kind", "state")

    def __init__(self, kind: str, arguments: tuple[Any, ...] = ()) -> None:
        self.kind = kind
        self.arguments = arguments
        self.state: Any = None
        self.items: dict[Any, Any] = {}

    @classmethod
    def named(cls, kind: str) -> Callable[..., Record]:
        """Return a callable for an allow-list that makes records of this kind."""
        return lambda *arguments: cls(kind, arguments)


class Truncated(CorruptCheckpointError):
    """The data ends before the pickle does, which has at least `needed_bytes`."""

    needed_bytes: int


class Machine:
    """The state of the interpreter: the data, the stack, the marks on it and the memo."""

    def __init__(
        self,
        data: bytes,
        start: int,
        allowed: Mapping[tuple[str, str], Any],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        self.data = data
        self.position = start
        self.allowed = allowed
        self.persistent = persistent
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.protocol = 0
        self.containers_left = _FREE_CONTAINERS + (len(data) - start) // _BYTES_PER_CONTAINER
        self.found: dict[tuple[str, str], Any] = {}

    def read(self, count: int) -> bytes:
        end = self.position + count
        if count < 0 or end > len(self.data):
            raise Truncated(f"{count} bytes from byte {self.position} on are not there", needed_bytes=end)
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.read(form.size))[0]

    def line(self) -> bytes:
        limit = self.position + _MAX_LINE_BYTES
        end = self.data.find(b"\n", self.position, limit)
        if end < 0 and limit <= len(self.data):
            raise CorruptCheckpointError(f"the line at byte {self.position} of the pickle is too long")
        if end < 0:
            raise Truncated("a line has no end", needed_bytes=len(self.data) + 1)
        piece = self.data[self.position : end]
        self.position = end + 1
        return piece

    def pop(self) -> Any:
        if not self.stack:
            raise CorruptCheckpointError(f"the pickle takes a value that is not there, at byte {self.position - 1}")
        return self.stack.pop()

    def top(self) -> Any:
        if not self.stack:
            raise CorruptCheckpointError(f"the pickle takes a value that is not there, at byte {self.position - 1}")
        return self.stack[-1]

    def pop_mark(self) -> list[Any]:
        if not self.marks:
            raise CorruptCheckpointError(f"the pickle has no mark, at byte {self.position - 1}")
        items, self.stack = self.stack, self.marks.pop()
        return items

    def made(self, value: Any, weight: int = 1) -> None:
        """Push a new container, if the data is large enough for one more."""
        self.containers_left -= weight
        if self.containers_left < 0:
            raise CorruptCheckpointError("the pickle has more containers than real data of its size")
        self.stack.append(value)

    def find(self, module: str, name: str) -> Any:
        """Return what a global stands for. Nothing is imported."""
        key = (module, name)
        if self.protocol < 3:
            # What Python 3 writes with these protocols has the names of Python 2.
            key = _compat_pickle.NAME_MAPPING.get(key, (_compat_pickle.IMPORT_MAPPING.get(module, module), name))
        if key in self.found:
            return self.found[key]
        target = self.allowed.get(key)
        if target is None or isinstance(target, Refused):
            advice = target.advice if isinstance(target, Refused) else ADVICE
            raise UnsafeContentError(
                f"the file refers to '{key[0][:100]}.{key[1][:100]}', which is not allowed", advice=advice
            )
        self.found[key] = Global(*key, target) if callable(target) else target
        return self.found[key]

    def call(self, function: Any, arguments: Any) -> None:
        if not isinstance(function, Global) or type(arguments) is not tuple:
            raise CorruptCheckpointError(f"the pickle calls what is no global, at byte {self.position - 1}")
        self.made(function.target(*arguments))


def cheap_key(value: Any) -> Any:
    """Return a key if it is cheap to hash: shared tuples in tuples take forever, deep ones overflow the stack."""
    if type(value) is tuple:
        left = _MAX_KEY_PARTS
        parts = [value]
        while parts:
            part = parts.pop()
            left -= 1
            if left < 0:
                raise CorruptCheckpointError("the key of a dict is too large")
            if type(part) is tuple:
                parts.extend(part[: left + 1])
    return value
