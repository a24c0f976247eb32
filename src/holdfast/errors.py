"""What can go wrong, as one tree. Knows nothing of the rest of the package.

    HoldfastError
    |-- UsageError (ValueError)                        an argument, a type or a combination that cannot work
    |-- ClosedError (RuntimeError)                     the manager was closed
    |-- CheckpointNotFoundError (FileNotFoundError)    what was asked for is not there
    |-- CorruptCheckpointError                         bytes are not what the manifest says they are
    |   `-- DamagedRecordError                         a small record around the checkpoints is damaged
    |-- UnsupportedFormatError                         written by a newer format, or not ours
    |-- StateMismatchError (RuntimeError)              checkpoint and live objects do not fit together
    |-- GuardMismatchError (ValueError)                a guarded value differs
    |-- SaveFailedError                                a save did not commit
    |   `-- SaveUncertainError                         a save of which it is not known whether it did
    |-- RunInUseError (RuntimeError)                   another process writes to the run
    |-- RankError (TimeoutError)                       another rank did not answer in time
    |-- StorageError (OSError)                         the storage refused or failed
    |   |-- KeyExistsError (FileExistsError)           a name is written once, and it was
    |   |-- KeyDamagedError                            what a name holds cannot be what was written there
    |   `-- KeyMissingError (FileNotFoundError)
    |       `-- AttemptClosedError                     an attempt that can never be committed any more
    `-- UnsafeContentError                             content that could run code or escape its target

Every error is made from fields, so that it can cross to other ranks as its type and fields and be the same there. A
subclass that a plug-in defines crosses like those of this module, to ranks that have imported it, too.
The message is built from the fields: what happened, where, and what to do about it.
"""

from __future__ import annotations

import builtins
import errno as errno_names
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self

__all__ = [
    "AttemptClosedError",
    "CheckpointNotFoundError",
    "ClosedError",
    "CorruptCheckpointError",
    "DamagedRecordError",
    "GuardMismatchError",
    "HoldfastError",
    "KeyDamagedError",
    "KeyExistsError",
    "KeyMissingError",
    "RankError",
    "RunInUseError",
    "SaveFailedError",
    "SaveUncertainError",
    "StateMismatchError",
    "StorageError",
    "UnsafeContentError",
    "UnsupportedFormatError",
    "UsageError",
]

_SHOWN_NAMES = 8
# Every class of this tree that this process has imported, plug-ins' too, by module and name. A record names a class;
# this is the only place where it is looked for.
_known: weakref.WeakValueDictionary[str, type[HoldfastError]] = weakref.WeakValueDictionary()


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class HoldfastError(Exception):
    """The base of every error that Holdfast raises on purpose.

    `problem` is what happened and `advice` what to do; the others are the place, and None where they do not apply.
    """

    def __init__(
        self,
        problem: str,
        *,
        advice: str = "",
        run: str | None = None,
        step: int | None = None,
        rank: int | None = None,
        component: str | None = None,
        leaf: str | None = None,
        file: str | None = None,
        byte_range: Sequence[int] | None = None,
        **extra: Any,
    ) -> None:
        self.problem = problem
        self.advice = advice
        self.run = run
        self.step = step
        self.rank = rank
        self.component = component
        self.leaf = leaf
        self.file = file
        self.byte_range = tuple(byte_range) if byte_range is not None else None
        self._extra_names = tuple(extra)
        vars(self).update(extra)
        super().__init__(self._message())
        # Again after it: OSError's own constructor sets `errno` to None when it is given a single argument.
        for name, value in extra.items():
            setattr(self, name, value)

    @property
    def fields(self) -> dict[str, Any]:
        """Return the constructor's arguments that are set, as plain values."""
        names = ("problem", "advice", "run", "step", "rank", "component", "leaf", "file", "byte_range")
        values = {name: getattr(self, name) for name in (*names, *self._extra_names)}
        return {name: value for name, value in values.items() if value not in (None, "", ())}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _known[_full_name(cls)] = cls

    def at(self, **where: Any) -> HoldfastError:
        """Return the error with more fields of its place set; fields that are set already stay."""
        return _rebuild(type(self), {**where, **self.fields})

    def changed(self, **fields: Any) -> Self:
        """Return the error with other fields, whatever arguments the constructor of its class takes."""
        return _rebuild(type(self), {**self.fields, **fields})  # type: ignore[return-value]

    def _message(self) -> str:
        where = _escaped(", ".join(self._where()))
        problem, advice = _escaped(self.problem, keep="\n\t"), _escaped(self.advice, keep="\n\t")
        text = f"{where}: {problem}" if where else problem
        details = self._details()
        if not advice:
            return text + details
        return f"{text}{details}\n{advice}" if details else f"{text}; {advice}"

    def _details(self) -> str:
        """Return what an error lists, a line each, between what happened and what to do."""
        return ""

    def _where(self) -> list[str]:
        places = []
        if self.run is not None:
            places.append(f"run {self.run}")
        if self.step is not None:
            places.append(f"step {self.step}")
        if self.rank is not None:
            places.append(f"rank {self.rank}")
        if self.component is not None:
            places.append(f"component '{self.component}'")
        if self.leaf is not None:
            places.append(f"leaf '{self.leaf}'")
        if self.file is not None:
            places.append(f"file {self.file}")
        if self.byte_range is not None:
            places.append(f"bytes {self.byte_range[0]}-{self.byte_range[1]}")
        return places

    def __str__(self) -> str:
        return self._message()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.fields)


_known[_full_name(HoldfastError)] = HoldfastError


class UsageError(HoldfastError, ValueError):
    """An argument, a type or a combination of them that cannot work. Nothing was read or written."""


class ClosedError(HoldfastError, RuntimeError):
    """The manager was closed before this call."""


class CheckpointNotFoundError(HoldfastError, FileNotFoundError):
    """A run, a step, a tag or a path that was asked for is not there."""


class CorruptCheckpointError(HoldfastError):
    """Bytes are not what the manifest says they are. `problems` lists every damage that was found."""

    def __init__(self, problem: str, *, problems: Sequence[str] = (), **where: Any) -> None:
        super().__init__(problem, problems=tuple(problems), **where)

    def _details(self) -> str:
        return _listing(getattr(self, "problems", ()))


class DamagedRecordError(CorruptCheckpointError):
    """A small record around the checkpoints (a lease claim, `attempt.json`, `run.json`, a note, a receipt) is damaged.
    No checkpoint is."""


class UnsupportedFormatError(HoldfastError):
    """Written by a newer format than this version knows, or not written by Holdfast at all."""


class StateMismatchError(HoldfastError, RuntimeError):
    """Checkpoint and live objects do not fit together. No live object was changed, unless a component's own
    `load_state_dict` raised: then the message says which components had been restored before; no model or optimizer."""

    def __init__(
        self,
        problem: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Sequence[str] = (),
        **where: Any,
    ) -> None:
        super().__init__(
            problem, missing=tuple(missing), unexpected=tuple(unexpected), mismatched=tuple(mismatched), **where
        )

    def _details(self) -> str:
        text = ""
        parts = (
            ("not in the checkpoint", "missing"),
            ("only in the checkpoint", "unexpected"),
            ("different", "mismatched"),
        )
        for title, name in parts:
            names = getattr(self, name, ())
            if names:
                text += f"\n{title}:{_listing(names)}"
        return text


class GuardMismatchError(HoldfastError, ValueError):
    """A guarded value of the checkpoint differs from the one of this run. No tensor file was opened."""

    def __init__(self, problem: str, *, guards: Mapping[str, Sequence[str]] | None = None, **where: Any) -> None:
        super().__init__(problem, guards={name: tuple(pair) for name, pair in (guards or {}).items()}, **where)


class SaveFailedError(HoldfastError):
    """A save did not commit. Every older checkpoint is untouched."""


class SaveUncertainError(SaveFailedError):
    """Whether a save was committed is not known: its checkpoint may be there, now or a little later. Its data files
    were not removed, and every older checkpoint is untouched."""


class RunInUseError(HoldfastError, RuntimeError):
    """Another process holds the run: `process` on `host`, whose last heartbeat was `age_seconds` ago."""

    def __init__(
        self,
        problem: str,
        *,
        host: str = "",
        process: int | None = None,
        age_seconds: float | None = None,
        **where: Any,
    ) -> None:
        super().__init__(problem, host=host, process=process, age_seconds=age_seconds, **where)


class RankError(HoldfastError, TimeoutError):
    """Another rank did not answer in time, or the ranks called different things."""

    def __init__(
        self, problem: str, *, ranks: Sequence[int] = (), timeout_seconds: float | None = None, **where: Any
    ) -> None:
        super().__init__(problem, ranks=tuple(ranks), timeout_seconds=timeout_seconds, **where)


class StorageError(HoldfastError, OSError):
    """The storage refused or failed. `errno` is the system's number where there is one."""

    def __init__(self, problem: str, *, errno: int | None = None, **where: Any) -> None:
        super().__init__(problem, errno=errno, **where)

    @classmethod
    def of(cls, error: OSError, doing: str, *, file: str | None = None, advice: str = "") -> StorageError:
        """Return the error for a failed system call."""
        code = errno_names.errorcode.get(error.errno or 0, "")
        reason = f"{error.strerror or error} [{code}]" if code else str(error)
        return cls(f"{doing} failed: {reason}", errno=error.errno, file=file, advice=advice)


class KeyExistsError(StorageError, FileExistsError):
    """A name is written once, and this one was written already."""


class KeyDamagedError(StorageError):
    """What a name holds cannot be what was written there: a link, no regular file, fewer bytes than are asked for, or
    more than are allowed. To read it again would not help; any other `StorageError` of a read does not mean damage.
    """


class KeyMissingError(StorageError, FileNotFoundError):
    """The storage holds nothing under this name."""


class AttemptClosedError(KeyMissingError):
    """An attempt that was given up for good: there is no manifest in it, and there never will be."""


class UnsafeContentError(HoldfastError):
    """Content that could run code, escape its target, or take more memory than it has bytes."""


def error_record(error: BaseException) -> dict[str, Any]:
    """Return an error as plain values, to send to other ranks."""
    fields = error.fields if isinstance(error, HoldfastError) else {"problem": str(error) or repr(error)}
    types = [_full_name(cls) for cls in type(error).__mro__ if issubclass(cls, HoldfastError)]
    return {"type": type(error).__name__, "types": types, "fields": _sendable(fields)}


def error_from_record(record: Mapping[str, Any]) -> HoldfastError:
    """Return the error that another rank had, with the same fields and of the same type, or, where this process has not
    imported that, of the nearest base that it has. Nothing is imported by a name."""
    name, fields = str(record["type"]), dict(record["fields"])
    for full_name in record.get("types", ()):
        cls = _known.get(full_name)
        if cls is not None:
            return _rebuild(cls, fields if cls.__name__ == name else _named(name, fields))
    fields = _named(name, fields)
    foreign = getattr(builtins, name, None)
    if isinstance(foreign, type) and issubclass(foreign, OSError):
        return StorageError(**fields)
    return HoldfastError(**fields)


def _sendable(value: Any) -> Any:
    """Return a field as values that a message can carry: an error that cannot be sent would leave ranks waiting."""
    if isinstance(value, str):
        # A file name that is no UTF-8 has lone surrogates in it.
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {str(key): _sendable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_sendable(inner) for inner in value]
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and -(2**63) <= value < 2**63):
        return value
    return _sendable(str(value))


def _named(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an error that is not of the type that it should be, with that type's name in its text."""
    return {**fields, "problem": f"{name}: {fields['problem']}"}


def _rebuild(cls: type[HoldfastError], fields: dict[str, Any]) -> HoldfastError:
    """Return an error of this class with these fields; one of its nearest base, where the class allows neither."""
    for make in (_constructed, _filled):
        try:
            error = make(cls, fields)
            str(error)
        except Exception:
            continue
        return error
    base = next(base for base in cls.__mro__[1:] if issubclass(base, HoldfastError))
    return _rebuild(base, _named(cls.__name__, fields))


def _constructed(cls: type[HoldfastError], fields: dict[str, Any]) -> HoldfastError:
    return cls(**fields)


def _filled(cls: type[HoldfastError], fields: dict[str, Any]) -> HoldfastError:
    """Make the error without its own constructor: that of a plug-in may take something else than fields."""
    error = cls.__new__(cls)
    HoldfastError.__init__(error, **fields)
    return error


def _escaped(text: object, keep: str = "") -> str:
    """Return text with everything that a terminal would obey, or hide, as an escape such as `\\x1b`: names that come
    from files stand in messages, and messages are printed. `keep`: characters that stay as they are."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode("ascii")
        for letter in shown
    )


def _listing(names: Sequence[str]) -> str:
    shown = "".join(f"\n  {_escaped(name)}" for name in names[:_SHOWN_NAMES])
    hidden = len(names) - _SHOWN_NAMES
    return f"{shown}\n  ... and {hidden} more" if hidden > 0 else shown
