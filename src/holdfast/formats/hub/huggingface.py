"""Read and write folders of the Hugging Face Hub: weights, a configuration, a tokenizer. Folders enter and leave."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from holdfast.errors import CorruptCheckpointError, UnsupportedFormatError, UsageError
from holdfast.formats.base import Format
from holdfast.formats.exporting.export import ExportJob
from holdfast.formats.exporting.metadata_files import assets_named, stored_config, write_assets, write_json
from holdfast.formats.hub.folder import Folder
from holdfast.formats.hub.safetensors import read_entries, require_storable, write_shards
from holdfast.formats.registry import format_named
from holdfast.formats.source import Asset, Source, TensorEntry

__all__ = ["HuggingFaceFormat", "HuggingFaceSource", "WeightFiles"]

_CONFIG = "config.json"
_CONFIG_KEYS = ("model_type", "architectures")
_INDEX_SUFFIX = ".index.json"
_DEFAULT_SHARD_BYTES = 5_000_000_000
# The files beside the weights that transformers looks for, and nothing else: a checkpoint may have private assets.
_FILES_BESIDE = (
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)


class WeightFiles:
    """The files of a folder that hold tensors: one, or several with an index, safetensors or files of torch.save."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._closing = ExitStack()
        self.files = [name]
        try:
            self.tensors = self._of_index() if name.endswith(_INDEX_SUFFIX) else self._of_file(name)
        except BaseException:
            self.close()
            raise

    @classmethod
    def find(cls, folder: Folder, stem: str, torch_stem: str) -> str | None:
        """Return the name of the file, or of the index, that transformers would read; None where there is neither."""
        usual = (f"{stem}.safetensors", f"{stem}.safetensors{_INDEX_SUFFIX}")
        return next(filter(folder.has, (*usual, f"{torch_stem}.bin", f"{torch_stem}.bin{_INDEX_SUFFIX}")), None)

    def close(self) -> None:
        self._closing.close()

    def _of_index(self) -> dict[str, TensorEntry]:
        place = str(self._folder.path / self._name)
        index = self._folder.json(self._name)
        places = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise CorruptCheckpointError("the index has no 'weight_map' of names and files", file=place)
        found: dict[str, TensorEntry] = {}
        for file in dict.fromkeys(places.values()):
            self.files.append(file)
            for name, entry in self._of_file(file).items():
                if places.get(name) != file:
                    raise CorruptCheckpointError(
                        f"{file} has a tensor that the index does not list", leaf=name, file=place
                    )
                found[name] = entry
        missing = next((name for name in places if name not in found), None)
        if missing is not None:
            raise CorruptCheckpointError(f"{places[missing]} lacks a tensor of the index", leaf=missing, file=place)
        return {name: found[name] for name in places}

    def _of_file(self, name: str) -> dict[str, TensorEntry]:
        file = self._folder.open(name)
        if name.endswith(".safetensors"):
            self._closing.callback(file.close)
            return read_entries(file)
        # Opened above for the check that it lies in the folder.
        file.close()
        source = self._closing.enter_context(format_named("torch").open(self._folder.path / name))
        tensors = {key: value for key, value in source.tree.items() if isinstance(value, TensorEntry)}
        if len(tensors) != len(source.tree):
            raise CorruptCheckpointError("the file is no state dict of tensors", file=source.location)
        return tensors


class HuggingFaceSource(Source):
    """A folder with weights as transformers saves them. `config` is its config.json."""

    format: ClassVar[str] = "hf"

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._folder = Folder(path)
        name = _weights_in(self._folder)
        if name is None:
            raise UnsupportedFormatError("the folder has no weights", file=str(path))
        self._weights = WeightFiles(self._folder, name)

    @property
    def tree(self) -> Mapping[str, Any]:
        return self._weights.tensors

    @cached_property
    def config(self) -> Any:
        return self._folder.json(_CONFIG) if self._folder.has(_CONFIG) else None

    @cached_property
    def assets(self) -> Mapping[str, Asset]:
        return self._folder.assets(without={_CONFIG, *self._weights.files})

    def close(self) -> None:
        self._weights.close()


def _weights_in(folder: Folder) -> str | None:
    return WeightFiles.find(folder, "model", "pytorch_model")


class HuggingFaceFormat(Format):
    """A folder that transformers loads with `from_pretrained`: weights, config.json and the tokenizer."""

    name: ClassVar[str] = "hf"
    is_folder: ClassVar[bool] = True
    weights_only: ClassVar[bool] = True

    def detects(self, path: Path) -> bool:
        return path.is_dir() and _weights_in(Folder(path)) is not None

    def open(self, path: Path) -> Source:
        return HuggingFaceSource(path)

    def prepare(self, job: ExportJob) -> ExportJob:
        config = _config_of(job)
        assets_named(job, _FILES_BESIDE)
        items = _first_names(job) if config.get("tie_word_embeddings") is True else job.items
        return require_storable(dataclasses.replace(job, items=tuple(items)))

    def write(self, job: ExportJob, target: Path) -> None:
        target.mkdir()
        write_json(target / _CONFIG, _config_of(job))
        write_assets(assets_named(job, _FILES_BESIDE), target)
        write_shards(job, target, job.max_shard_bytes or _DEFAULT_SHARD_BYTES)


def _config_of(job: ExportJob) -> dict[str, Any]:
    config = stored_config(job, _CONFIG, _CONFIG_KEYS)
    if config is None:
        raise UsageError(
            "the checkpoint has no configuration of a Hugging Face model, which has a 'model_type'",
            file=job.source.location,
            advice="save with config=model.config.to_dict(), or with a config.json among the assets, or export the "
            "weights alone with format='safetensors'",
        )
    if job.dtype is not None:
        # Otherwise from_pretrained would convert the weights back.
        spelled = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
        config.update(dict.fromkeys(spelled, job.dtype))
    return config


def _first_names(job: ExportJob) -> Sequence[Any]:
    """Return the tensors under the first of their names: transformers ties the others again when it loads them."""
    first: dict[int, Any] = {}
    for item in job.items:
        first.setdefault(id(item.entry), item)
    return list(first.values())
