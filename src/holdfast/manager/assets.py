"""Check the files that are stored beside the state. Paths, or bytes by name, enter; the content by checked name leaves.

Nothing is read here: a save lists and reads what the paths lead to, in its call.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from holdfast.errors import UnsafeContentError, UsageError
from holdfast.ondisk import paths

__all__ = ["AssetsArgument", "check_apart", "checked_assets", "named_assets"]

AssetPath = str | os.PathLike[str]
AssetsArgument = Sequence[AssetPath] | Mapping[str, AssetPath | bytes | bytearray | memoryview]
"""What `assets=` of a save takes: a list of paths, or a mapping of names to paths or bytes."""


def checked_assets(assets: AssetsArgument | None) -> dict[str, Path | bytes]:
    """Return the assets by name. A path with no file or folder at it, or a name that occurs twice, is an error."""
    named = named_assets(assets)
    for content in named.values():
        if isinstance(content, Path) and not content.exists():
            raise UsageError(f"the asset {content} is not there")
        if isinstance(content, Path) and not content.is_file() and not content.is_dir():
            raise UsageError(f"the asset {content} is neither a file nor a folder")
    return named


def named_assets(assets: AssetsArgument | None) -> dict[str, Path | bytes]:
    """Return the assets by name, whether or not their files are there: those of other ranks than 0 need not be."""
    found: dict[str, Path | bytes] = {}
    for name, content in _pairs(assets):
        if name in found:
            raise UsageError(f"two assets have the name {name!r}", advice="give them as a mapping, with other names")
        found[name] = content
    check_apart(found)
    return found


def check_apart(names: Mapping[str, object]) -> None:
    """Refuse a name that lies inside of another one: the other would be a folder and a file, or a folder twice."""
    # By parts: what lies inside of a name follows it at once.
    parts = sorted(tuple(name.split("/")) for name in names)
    for outer, inner in pairwise(parts):
        if inner[: len(outer)] == outer:
            raise UsageError(
                f"the asset '{'/'.join(inner)}' lies inside of the asset '{'/'.join(outer)}'",
                advice="give one of them another name",
            )


def _pairs(assets: AssetsArgument | None) -> Iterator[tuple[str, Path | bytes]]:
    if assets is None:
        return
    if isinstance(assets, Mapping):
        for name, content in assets.items():
            yield _checked_name(name), _content(content, f"the asset {name!r:.100}")
    elif isinstance(assets, Sequence) and not isinstance(assets, str | bytes | bytearray | memoryview):
        for index, asset in enumerate(assets):
            content = _content(asset, f"assets[{index}]")
            if isinstance(content, bytes):
                raise UsageError(f"assets[{index}] is bytes without a name", advice="give a mapping of names to bytes")
            yield _checked_name(content.name), content
    else:
        raise UsageError(
            f"assets={assets!r:.100}", advice="give a list of paths, or a mapping of names to paths or bytes"
        )


def _content(content: object, what: str) -> Path | bytes:
    """Return the bytes as they are now, or the absolute path. A link keeps its own name: its target may have another,
    as in the cache of the Hugging Face hub."""
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    path = os.fspath(content) if isinstance(content, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise UsageError(f"{what} is {content!r:.100}", advice="give the path of a file or folder, or bytes")
    return Path(os.path.abspath(path))


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise UsageError(f"{name!r:.100} cannot name an asset", advice="a name is a text, such as 'tokenizer.json'")
    try:
        paths.safe_relative(f"{paths.ASSETS}/{name}")
    except UnsafeContentError as error:
        raise UsageError(f"{name[:200]!r} cannot name an asset", advice=error.advice) from None
    return name
