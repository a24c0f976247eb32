"""Read and write NeMo's archives: a tar with `model_config.yaml`, the weights, and artifacts such as the tokenizer.

The weights are `model_weights.ckpt`, a file of `torch.save`, or the folder `model_weights/`, a DCP checkpoint. Nothing
is unpacked, and nothing that the config names is imported or built.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

from holdfast.errors import CorruptCheckpointError, HoldfastError, UnsupportedFormatError, UsageError
from holdfast.formats.base import Format
from holdfast.formats.binary import BinaryFile
from holdfast.formats.exporting.export import ExportJob
from holdfast.formats.nemo.archive_writer import ArchiveWriter
from holdfast.formats.nemo.archives import Archive, is_archive, is_compressed
from holdfast.formats.nemo.nemo_config import (
    MAX_CONFIG_BYTES,
    config_from_yaml,
    config_to_yaml,
    with_references,
)
from holdfast.formats.source import PIECE_BYTES, Fill, Source, TensorEntry
from holdfast.runs.assets import Asset, Assets

__all__ = ["NemoFormat", "NemoSource"]

CONFIG = "model_config.yaml"
WEIGHTS_FILE = "model_weights.ckpt"
WEIGHTS_FOLDER = "model_weights/"

_PIECE_BYTES = 1 << 20
_YAML_SUFFIXES = (".yaml", ".yml")


class NemoSource(Source):
    """A NeMo archive, open for reading."""

    format: ClassVar[str] = "nemo"

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._archive = Archive.open(path)
        self._folder: Source | None = None
        try:
            self._tree = self._read_tree()
        except BaseException:
            self.close()
            raise

    def _read_tree(self) -> Mapping[str, Any]:
        members = self._archive.members
        if CONFIG not in members:
            raise UnsupportedFormatError(
                f"this is a tar archive without {CONFIG}: no NeMo archive",
                file=self.location,
                advice="unpack it, and name a file or folder of it",
            )
        folder = {
            name.removeprefix(WEIGHTS_FOLDER): file for name, file in members.items() if name.startswith(WEIGHTS_FOLDER)
        }
        if WEIGHTS_FILE in members and folder:
            raise CorruptCheckpointError(
                f"the archive has weights twice, as {WEIGHTS_FILE} and as {WEIGHTS_FOLDER}", file=self.location
            )
        if WEIGHTS_FILE in members:
            return _state_dict(members[WEIGHTS_FILE])
        if ".metadata" in folder:
            from holdfast.formats.dcp_folders.dcp_folder import open_dcp

            self._folder = open_dcp(folder, f"{self.location}:{WEIGHTS_FOLDER}")
            return self._folder.tree
        raise self._no_weights(folder)

    def _no_weights(self, folder: Mapping[str, BinaryFile]) -> HoldfastError:
        split = [name for name in self._archive.members if name.endswith(f"/{WEIGHTS_FILE}")]
        if split:
            return UnsupportedFormatError(
                f"the weights are split over {len(split)} ranks ({split[0]} and so on)",
                file=self.location,
                advice="merge them with NeMo's change of the tensor-parallel size to 1 first",
            )
        if folder:
            return UnsupportedFormatError(
                f"{WEIGHTS_FOLDER} is no DCP checkpoint: it has no .metadata",
                file=self.location,
                advice="convert it with NeMo to the torch_dist form first",
            )
        return CorruptCheckpointError(
            f"the archive has neither {WEIGHTS_FILE} nor {WEIGHTS_FOLDER}", file=self.location
        )

    @property
    def tree(self) -> Mapping[str, Any]:
        return self._tree

    @cached_property
    def config(self) -> Any:
        """The content of `model_config.yaml`. Needs PyYAML."""
        file = self._archive.members[CONFIG]
        return config_from_yaml(file.read(0, min(file.size_bytes, MAX_CONFIG_BYTES + 1)), file=file.name)

    @property
    def assets(self) -> Mapping[str, Asset]:
        return Assets(
            {
                name: Asset(name, file.size_bytes, partial(_pieces_of, file))
                for name, file in self._archive.members.items()
                if name not in (CONFIG, WEIGHTS_FILE) and not name.startswith(WEIGHTS_FOLDER)
            }
        )

    def read(self, fills: Sequence[Fill], on_bytes: Callable[[int], None] = lambda count: None) -> None:
        if self._folder is not None:
            self._folder.read(fills, on_bytes)
        else:
            super().read(fills, on_bytes)

    def pieces(self, entry: TensorEntry, *, limit_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
        if self._folder is not None:
            return self._folder.pieces(entry, limit_bytes=limit_bytes)
        return super().pieces(entry, limit_bytes=limit_bytes)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()
        self._archive.close()


def _state_dict(file: BinaryFile) -> Mapping[str, Any]:
    from holdfast.formats.torch_files.torch_file import read_torch

    found = read_torch(file)
    if not isinstance(found, Mapping):
        raise CorruptCheckpointError(
            f"the weights are a {type(found).__name__} and no state dict", file=file.name, advice="save a state dict"
        )
    return found


def _pieces_of(file: BinaryFile) -> Iterator[bytes]:
    for start in range(0, file.size_bytes, _PIECE_BYTES):
        yield file.read(start, min(_PIECE_BYTES, file.size_bytes - start))


class NemoFormat(Format):
    """NeMo's archives."""

    name: ClassVar[str] = "nemo"

    def detects(self, path: Path) -> bool:
        if not path.is_file():
            return False
        try:
            with BinaryFile.open(path) as file:
                if not is_archive(file):
                    return False
                if is_compressed(file):
                    # Its members are known only when all of it is decompressed.
                    return True
        except HoldfastError:
            return False
        try:
            with Archive.open(path) as archive:
                return CONFIG in archive.members
        except HoldfastError:
            # A tar that is damaged or unsafe: to open it says what is wrong with it.
            return True

    def open(self, path: Path) -> Source:
        return NemoSource(path)

    def write(self, job: ExportJob, target: Path) -> None:
        from holdfast.formats.torch_files.torch_file import write_torch

        text, artifacts = _config_and_artifacts(job)
        with target.open("xb") as stream:
            archive = ArchiveWriter(cast(BinaryIO, stream))
            with archive.member(CONFIG) as member:
                member.write(text)
            for name in sorted(artifacts):
                with archive.member(name) as member:
                    for piece in artifacts[name].pieces():
                        member.write(piece)
            with archive.member(WEIGHTS_FILE) as member:
                write_torch(member, job.tree, job.pieces)
            archive.finish()


# What goes into an archive beside the weights


def _config_and_artifacts(job: ExportJob) -> tuple[bytes, dict[str, Asset]]:
    """Return the text of the config, and the other files by the names that they get in the archive."""
    text, config, used = _config_of(job)
    assets = {name: asset for name, asset in job.assets.items() if name != used}
    for name in assets:
        if name in (CONFIG, WEIGHTS_FILE) or f"{name}/".startswith(WEIGHTS_FOLDER):
            raise UsageError(f"the asset '{name}' has a name that a NeMo archive needs for itself")
    names = {name: name for name in assets}
    renamed = with_references(config, partial(_referred, names=names))
    if text is None or renamed != config:
        text = config_to_yaml(renamed)
    return text, {names[name]: asset for name, asset in assets.items()}


def _config_of(job: ExportJob) -> tuple[bytes | None, Any, str | None]:
    """Return the config as the text that is stored, where there is one, and as values, and the asset that it is."""
    files = [name for name in job.assets if name.endswith(_YAML_SUFFIXES)]
    if CONFIG in job.assets:
        files = [CONFIG]
    elif isinstance(job.config, Mapping):
        return None, job.config, None
    elif len(files) != 1:
        raise UsageError(
            f"a NeMo archive needs a config, and the source has {', '.join(sorted(files)[:8]) or 'none'}",
            file=job.source.location,
            advice=f"save with config=..., or with a file {CONFIG} among the assets",
        )
    asset = job.assets[files[0]]
    if asset.size_bytes > MAX_CONFIG_BYTES:
        raise UsageError(
            f"the asset '{files[0]}' has {asset.size_bytes} bytes; a config has {MAX_CONFIG_BYTES} at most"
        )
    text = asset.read()
    return text, config_from_yaml(text, file=files[0]), files[0]


def _referred(path: str, *, names: dict[str, str]) -> str | None:
    """Return the name in the archive of the asset that a path in the config means, None if it means none.

    NeMo copies what a config refers to by its bare name when it saves a model again: such an asset gets a name without
    folders, in `names`.
    """
    found = _asset_of(path, names)
    if found is None:
        return None
    bare = found.replace("/", "_")
    if names[found] == found and bare != found:
        if bare in names or bare in names.values():
            raise UsageError(f"the assets '{found}' and '{bare}' would have one name in a NeMo archive")
        names[found] = bare
    return names[found]


def _asset_of(path: str, names: Mapping[str, str]) -> str | None:
    """Return the asset of which a path ends with the name; of several, that of the longest name; or the only one of the
    same file name, which must have a suffix: a text without one is hardly a file."""
    matching = [name for name in names if path == name or path.endswith(f"/{name}")]
    if matching:
        return max(matching, key=len)
    base = posixpath.basename(path)
    alike = [name for name in names if posixpath.basename(name) == base]
    return alike[0] if len(alike) == 1 and "." in base[1:-1] else None
