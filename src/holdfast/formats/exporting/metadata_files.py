"""Find and write the small files around weights: a configuration, a tokenizer. Assets and values enter; files leave."""

from __future__ import annotations

import enum
import json
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from holdfast.errors import UsageError
from holdfast.formats.exporting.export import ExportJob
from holdfast.formats.exporting.publishing import create_file, put_file
from holdfast.formats.hub.folder import parse_json
from holdfast.runs.assets import Asset

__all__ = ["assets_named", "stored_config", "write_assets", "write_json"]

_MAX_CONFIG_BYTES = 64 << 20


def stored_config(job: ExportJob, file: str, keys: Collection[str]) -> dict[str, Any] | None:
    """Return the configuration that has one of the keys: the asset of this file name, or else the stored configuration
    or the only part of it that has one. None where there is none."""
    found = {name: _mapping_of(asset) for name, asset in job.assets.items() if PurePosixPath(name).name == file}
    fitting = {name: config for name, config in found.items() if any(key in config for key in keys)}
    if len(fitting) > 1:
        raise UsageError(f"several assets could be the {file}: {', '.join(fitting)}", advice="store one of them")
    if fitting:
        return next(iter(fitting.values()))
    if not isinstance(job.config, Mapping):
        return None
    parts = [job.config, *(part for part in job.config.values() if isinstance(part, Mapping))]
    usable = [part for part in parts if any(key in part for key in keys)]
    if len(usable) > 1 and usable[0] is not job.config:
        raise UsageError(f"several parts of the stored configuration could be the {file}", advice="store one of them")
    return dict(usable[0]) if usable else None


def _mapping_of(asset: Asset) -> dict[str, Any]:
    if asset.size_bytes > _MAX_CONFIG_BYTES:
        return {}
    values = parse_json(asset.read(), asset.name)
    return values if isinstance(values, dict) else {}


def assets_named(job: ExportJob, patterns: Collection[str]) -> dict[str, Asset]:
    """Return the assets whose file name fits one of the patterns, by that name, from whatever folder they lie in."""
    found: dict[str, Asset] = {}
    for path, asset in job.assets.items():
        name = PurePosixPath(path).name
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        if name in found:
            raise UsageError(
                f"the assets '{found[name].name}' and '{path}' have the same name",
                advice="store one of them, or export from a checkpoint with one",
            )
        found[name] = asset
    return found


def write_assets(assets: Mapping[str, Asset], folder: Path) -> None:
    """Write assets to files of a folder, verified."""
    for name, asset in assets.items():
        with create_file(folder / name, asset.size_bytes) as sink:
            for piece in asset.pieces():
                sink.write(piece)


def write_json(path: Path, values: Any) -> None:
    """Write values as a JSON file for people."""
    try:
        text = json.dumps(_plain(values), indent=2, sort_keys=True, ensure_ascii=False)
        data = f"{text}\n".encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{path.name} cannot be written as JSON: {error}", advice="store plain values") from None
    put_file(path, data)


def _plain(value: Any) -> Any:
    """Return values as JSON has them. What JSON has no form for stays, and is refused by the encoder."""
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value), key=str)
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    return value
