"""Names of folders and files: the only path arithmetic. Numbers enter, keys leave, and back; opens nothing."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple, Self

from holdfast.errors import UnsafeContentError, UsageError

RUN_KEY = "run.json"
MANIFEST = "manifest.json"
ATTEMPT = "attempt.json"
SHARED_VALUES = "shared.json"
ASSETS = "assets"
LATEST_LINK = "latest"
BEST_LINK = "best"
LEASE = "lease"
READERS = "readers"
NOTES = "notes"

MAX_STEP = 2**63 - 1
# No step is tried so often. A higher number was not made by counting, and the next one would be no name any more.
MAX_COUNTED_ATTEMPT = 10**8
MAX_ATTEMPT = 999_999_999
MAX_NAME_CHARACTERS = 1024
_MAX_PART_BYTES = 255

# One spelling per name: `step-0000000500` or `.1` would be a second name for the same attempt.
_FOLDER = re.compile(r"step-([0-9]{9}|[1-9][0-9]{9,18})(?:\.([2-9]|[1-9][0-9]{1,8}))?", re.ASCII)
_PART = re.compile(r"(?:rank-[0-9]{5,}|shared)(?:\.([0-9]{1,18}))?\.(?:json|safetensors)", re.ASCII)
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\\]")


class FolderName(NamedTuple):
    """The name of a checkpoint's folder: the step, and the number of the attempt at it, from 1 on."""

    step: int
    attempt: int


class Floor(NamedTuple):
    """How far the names in a run have come: the highest step, and the highest attempt's number, of whatever step."""

    step: int = -1
    attempt: int = 0

    @classmethod
    def of(cls, names: Iterable[str]) -> Self:
        """Return the floor that is above all these names. Names of no checkpoint's folder are ignored."""
        folders = [parsed for parsed in map(parse_folder, names) if parsed is not None]
        return cls.highest(cls(*folder) for folder in folders)

    @classmethod
    def highest(cls, floors: Iterable[Self]) -> Self:
        """Return the highest of these floors. Numbers of attempts too high to be reached by counting are ignored."""
        found = list(floors)
        steps = (floor.step for floor in found)
        attempts = (floor.attempt for floor in found if floor.attempt <= MAX_COUNTED_ATTEMPT)
        return cls(max(steps, default=-1), max(attempts, default=0))

    def first_attempt(self, step: int) -> int:
        """Return the lowest number of an attempt at a step whose name, and every higher one, is not below the floor."""
        return 1 if step > self.step else self.attempt + 1


def folder_name(step: int, attempt: int = 1) -> str:
    """`step-000000500` for the first attempt at step 500, `step-000000500.2` for the second."""
    check_step(step)
    if attempt < 1:
        raise UsageError(f"an attempt's number is 1 or more, not {attempt}")
    if attempt > MAX_ATTEMPT:
        raise UsageError(
            f"step {step} has no free name: an attempt's number is at most {MAX_ATTEMPT}",
            advice=f"move the folder whose name ends in .{MAX_ATTEMPT} out of the run, and {LEASE}/ with it if nobody "
            "writes to the run",
        )
    return f"step-{step:09d}" if attempt == 1 else f"step-{step:09d}.{attempt}"


def parse_folder(name: str) -> FolderName | None:
    """Return the inverse of `folder_name`; None for any name that it does not make."""
    match = _FOLDER.fullmatch(name)
    if match is None:
        return None
    step, attempt = match.groups()
    parsed = FolderName(int(step), int(attempt or 1))
    return parsed if parsed.step <= MAX_STEP else None


def check_step(step: object) -> int:
    """Return the step as an int, from anything that is an integer, or raise a UsageError that names what is allowed."""
    number = as_integer(step)
    if number is None:
        raise UsageError(f"a step is an int, not {type(step).__name__} ({step!r})", advice="pass int(step)")
    if not 0 <= number <= MAX_STEP:
        # Python refuses to write a number of thousands of digits.
        shown = number if number.bit_length() <= 128 else f"a number of {number.bit_length()} bits"
        raise UsageError(f"a step lies between 0 and 2**63 - 1, and is not {shown}")
    return number


def as_integer(value: object) -> int | None:
    """Return an int for what Python takes for an integer, such as one of NumPy or a tensor of one integer; None for
    anything else, truth values included."""
    if type(value) is int:
        return value
    # NumPy and torch have their own truth values.
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None


def tensor_file(rank: int, part: int = 0) -> str:
    return f"rank-{rank:05d}.safetensors" if part == 0 else f"rank-{rank:05d}.{part}.safetensors"


def receipt_file(rank: int) -> str:
    """Return the name of the receipt of a rank: what it wrote, once that is durable."""
    return f"rank-{rank:05d}.receipt.json"


def values_file(rank: int, part: int = 0) -> str:
    return f"rank-{rank:05d}.json" if part == 0 else f"rank-{rank:05d}.{part}.json"


def shared_values(part: int = 0) -> str:
    """Return the name of the file of values that belong to no rank."""
    return SHARED_VALUES if part == 0 else f"shared.{part}.json"


def next_part(names: Iterable[str]) -> int:
    """Return the lowest part from which on no file of tensors or values has one of these names."""
    matches = (_PART.fullmatch(name) for name in names)
    return max((int(match[1] or 0) + 1 for match in matches if match is not None), default=0)


def rank_scope(index: int) -> str:
    """Return the scope of a component that each rank, or each rank of a group, has for itself."""
    return f"rank-{index:05d}"


def is_rank_scope(scope: str) -> bool:
    """Return whether a scope is that of one rank, or of one rank of a group."""
    return scope.startswith("rank-")


def stage_scope(index: int) -> str:
    """Return the scope of a component that belongs to one pipeline stage."""
    return f"stage-{index:05d}"


def tree_name(component: str, scope: str) -> str:
    """`model`, or `loader@rank-00001` for the part of it that one scope has."""
    return f"{component}@{scope}" if scope else component


def leaf_name(tree: str, path: str) -> str:
    return f"{tree}.{path}" if path else tree


def key(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def check_component_name(name: object) -> str:
    """Refuse a component's name with a separator in it: it becomes the front of the names of its leaves."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]{0,99}", name):
        raise UsageError(
            f"{name!r} cannot name a component",
            advice="use letters, digits, '_' and '-', starting with a letter, at most 100 characters",
        )
    return name


# The manifests of a run name the same files again and again. A name is at most a few kilobytes.
@lru_cache(maxsize=1024)
def safe_relative(name: str) -> str:
    """Return a relative path that stays below where it starts, or an UnsafeContentError."""
    parts = name.split("/")
    bad = (
        not name
        or len(name) > MAX_NAME_CHARACTERS
        or _UNSAFE.search(name) is not None
        or any(part in ("", ".", "..") or len(part.encode("utf-8", "replace")) > _MAX_PART_BYTES for part in parts)
        or any(0xD800 <= ord(character) <= 0xDFFF for character in name)
        # Storages keep this prefix for files on their way: no key can have it.
        or any(part.startswith(".tmp-") for part in parts)
    )
    if bad:
        raise UnsafeContentError(
            f"{name[:200]!r} is no safe file name",
            advice="names are relative, without '..', '.', empty parts, backslashes or control characters",
        )
    return name
