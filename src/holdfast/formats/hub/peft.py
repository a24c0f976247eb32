"""Read and write adapter folders of peft. Folders enter and leave; names are with the adapter's name in the model, and
without it in the folder."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from holdfast.errors import UnsupportedFormatError, UsageError
from holdfast.formats.base import Format
from holdfast.formats.exporting.components import frozen_bases
from holdfast.formats.exporting.export import ExportItem, ExportJob
from holdfast.formats.exporting.metadata_files import stored_config, write_json
from holdfast.formats.hub.folder import Folder
from holdfast.formats.hub.huggingface import WeightFiles
from holdfast.formats.hub.safetensors import require_storable, write_shards
from holdfast.formats.source import Asset, Source

__all__ = ["PeftFormat", "PeftSource"]

_CONFIG = "adapter_config.json"
_STEM = "adapter_model"
_PREFIX = "base_model.model."
_ADAPTER = "default"
_MAGNITUDE = "lora_magnitude_vector"
# How the parameters of an adapter begin, by its type. Others have parts of their own beside them.
_PARAMETERS = {"LORA": "lora_", "IA3": "ia3_", "LOHA": "hada_", "LOKR": "lokr_"}


class PeftSource(Source):
    """An adapter folder. Names are those of a model whose adapter is called `default`; `config` is the adapter's."""

    format: ClassVar[str] = "peft"

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._folder = Folder(path)
        name = WeightFiles.find(self._folder, _STEM, _STEM)
        if name is None:
            raise UnsupportedFormatError("the folder has no adapter", file=str(path))
        self._weights = WeightFiles(self._folder, name)

    @cached_property
    def tree(self) -> Mapping[str, Any]:
        config = self.config if isinstance(self.config, dict) else {}
        return {_name_in_model(name, config): entry for name, entry in self._weights.tensors.items()}

    @cached_property
    def config(self) -> Any:
        return self._folder.json(_CONFIG)

    @cached_property
    def assets(self) -> Mapping[str, Asset]:
        return self._folder.assets(without={_CONFIG, *self._weights.files})

    def close(self) -> None:
        self._weights.close()


def _name_in_model(name: str, config: Mapping[str, Any]) -> str:
    """Return the name that a parameter of the folder has in a model."""
    prefix = _PARAMETERS.get(str(config.get("peft_type")))
    if prefix is not None and (match := re.search(rf"\.{prefix}[^.]+", name)):
        rest = name[match.end() :]
        if match[0] == f".{_MAGNITUDE}" and not rest:
            rest = ".weight"
        return f"{name[: match.end()]}.{_ADAPTER}{rest}"
    saved = config.get("modules_to_save")
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if isinstance(saved, list) and part in saved:
            return ".".join((*parts[: place + 1], "modules_to_save", _ADAPTER, *parts[place + 1 :]))
    return name


class PeftFormat(Format):
    """An adapter folder that `PeftModel.from_pretrained` loads onto its base."""

    name: ClassVar[str] = "peft"
    is_folder: ClassVar[bool] = True
    weights_only: ClassVar[bool] = True
    takes_adapters: ClassVar[bool] = True

    def detects(self, path: Path) -> bool:
        folder = Folder(path)
        return path.is_dir() and folder.has(_CONFIG) and WeightFiles.find(folder, _STEM, _STEM) is not None

    def open(self, path: Path) -> Source:
        return PeftSource(path)

    def prepare(self, job: ExportJob) -> ExportJob:
        if job.max_shard_bytes is not None:
            raise UsageError("an adapter is one file", advice="leave max_shard_bytes out")
        config = _config_of(job)
        items = _adapter_items(job, config, _PARAMETERS[str(config["peft_type"])])
        return require_storable(dataclasses.replace(job, items=items))

    def write(self, job: ExportJob, target: Path) -> None:
        target.mkdir()
        write_json(target / _CONFIG, _config_of(job))
        write_shards(job, target, None, stem=_STEM)


def _config_of(job: ExportJob) -> dict[str, Any]:
    config = stored_config(job, _CONFIG, ("peft_type",))
    if config is None:
        raise UsageError(
            "the checkpoint has no configuration of an adapter, which has a 'peft_type'",
            file=job.source.location,
            advice="save with config=model.peft_config['default'].to_dict(), or with an adapter_config.json among the "
            "assets",
        )
    # An enum of strings where the configuration was stored as it is.
    config["peft_type"] = str(getattr(config["peft_type"], "value", config["peft_type"]))
    if config["peft_type"] not in _PARAMETERS or config.get("trainable_token_indices"):
        kind = (
            f"{config['peft_type']} with trainable tokens"
            if config["peft_type"] in _PARAMETERS
            else config["peft_type"]
        )
        raise UsageError(
            f"adapters of type {kind} cannot be written",
            advice=f"restore the model and call save_pretrained; known are {', '.join(_PARAMETERS)}",
        )
    return config


def _adapter_items(job: ExportJob, config: Mapping[str, Any], prefix: str) -> tuple[ExportItem, ...]:
    """Return the tensors of the adapter with the names that peft gives them in a file."""
    pattern = re.compile(rf"(?P<front>.*\.{prefix}[^.]+)\.(?P<adapter>[^.]+)(?P<rest>\..+)?")
    saved = re.compile(r"(?P<front>.*)\.modules_to_save\.(?P<adapter>[^.]+)(?P<rest>\..+)")
    found: list[ExportItem] = []
    others: list[str] = []
    adapters: set[str] = set()
    for item in job.items:
        match = pattern.fullmatch(item.name) or saved.fullmatch(item.name)
        if match is not None:
            rest = "" if match["front"].endswith(_MAGNITUDE) else match["rest"] or ""
            adapters.add(match["adapter"])
            found.append(dataclasses.replace(item, name=match["front"] + rest))
        elif config.get("bias", "none") != "none" and item.name.endswith(".bias"):
            found.append(item)
        else:
            others.append(item.name)
    _check_adapters(job, adapters, others)
    if not any(item.name.startswith(_PREFIX) for item in found):
        found = [dataclasses.replace(item, name=_PREFIX + item.name) for item in found]
    return tuple(found)


def _check_adapters(job: ExportJob, adapters: set[str], others: Sequence[str]) -> None:
    if not adapters:
        raise UsageError(
            "the checkpoint has no parameters of an adapter",
            file=job.source.location,
            advice=f"it has {', '.join(others[:4])} and so on",
        )
    if len(adapters) > 1:
        raise UsageError(
            f"the checkpoint has several adapters: {', '.join(sorted(adapters))}",
            file=job.source.location,
            advice="leave all but one out with rename=, as {'*.second.*': None}",
        )
    # Where the base is not stored, what is stored was trained, and would be lost.
    if others and frozen_bases(job.source):
        raise UsageError(
            f"{len(others)} tensors were trained that are no part of the adapter, such as '{others[0]}'",
            file=job.source.location,
            advice="leave them out with rename=, as {'NAME': None}, if the base has them",
        )
