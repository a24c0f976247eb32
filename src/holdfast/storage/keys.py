"""Take a key or a folder apart and refuse what is no name. Knows nothing of disks or object stores."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.errors import UsageError

__all__ = ["TEMPORARY_PREFIX", "folder_parts", "is_part", "key_parts", "parts_among"]

# Names that a storage may use for files on their way to their key. They are no keys, and are never listed.
TEMPORARY_PREFIX = ".tmp-"


def key_parts(key: str) -> tuple[str, ...]:
    """Return the parts of a key such as `step-000000500/manifest.json`."""
    if not isinstance(key, str):
        raise UsageError(f"a key must be a str, not {type(key).__name__}")
    parts = tuple(key.split("/"))
    for part in parts:
        if not is_part(part):
            raise UsageError(
                f"{key!r} is no key: {_complaint(part)}",
                advice="a key is a relative path such as 'step-000000500/manifest.json'",
            )
    return parts


def folder_parts(folder: str) -> tuple[str, ...]:
    """Return the parts of a folder; none for the root, which is written `""`."""
    return key_parts(folder) if folder != "" else ()


def is_part(part: str) -> bool:
    """Return whether this may be one part of a key."""
    return _complaint(part) == ""


def parts_among(names: Iterable[str]) -> list[str]:
    """Return those of these names, none of which is empty, that may be a part of a key. Names in which no character
    could make one refuse it, as nearly always, are looked at all together."""
    found = list(names)
    joined = "/".join(("", *found))
    if joined.isascii() and not any(sign in joined for sign in ("\\", "\0", "/.")) and joined.count("/") == len(found):
        return found
    return [name for name in found if is_part(name)]


def _complaint(part: str) -> str:
    if part == "":
        return "it has an empty part (a '/' at its beginning or end, or two in a row)"
    if part in (".", ".."):
        return f"it has {part!r} as a part"
    if "/" in part or "\\" in part or "\0" in part:
        # A backslash is a separator to tools of other systems: what is one name here would be a path there.
        return f"its part {part!r} has a '/', a backslash or a NUL"
    if part.startswith(TEMPORARY_PREFIX):
        return f"names that begin with {TEMPORARY_PREFIX!r} are kept for files on their way"
    return "" if _is_text(part) else f"its part {part!r} is no valid Unicode"


def _is_text(part: str) -> bool:
    try:
        part.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
