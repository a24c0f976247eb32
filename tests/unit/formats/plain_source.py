"""A source of any tree: its tensors lie one after the other in one file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from holdfast.formats.binary import BinaryFile
from holdfast.formats.source import Source, StoredChunk, TensorEntry
from holdfast.ondisk.regions import whole
from holdfast.state.tensors import dtype_name


class PlainSource(Source):
    """What a training had in a dict. Two names of one tensor are one place in the file. Stands for a file of
    `torch.save`, which keeps the order of a dict as well."""

    format = "torch"

    def __init__(self, tree: Mapping[str, Any], file: Path, config: Any = None) -> None:
        super().__init__(str(file))
        self._places: dict[int, int] = {}
        data = bytearray()
        self._write(tree, data)
        file.write_bytes(data)
        self._file = BinaryFile.open(file)
        self._tree = self._with_entries(tree, "")
        self._config = config

    @property
    def tree(self) -> Mapping[str, Any]:
        return self._tree

    @property
    def config(self) -> Any:
        return self._config

    def close(self) -> None:
        self._file.close()

    def _write(self, value: Any, data: bytearray) -> None:
        if isinstance(value, torch.Tensor):
            if value.data_ptr() not in self._places or not value.numel():
                self._places[value.data_ptr()] = len(data)
                data += bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        elif isinstance(value, Mapping | list | tuple):
            for inner in value.values() if isinstance(value, Mapping) else value:
                self._write(inner, data)

    def _with_entries(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            shape = tuple(value.shape)
            chunk = StoredChunk(self._file, self._places[value.data_ptr()], whole(shape))
            return TensorEntry(path, dtype_name(value), shape, (chunk,)).checked()
        if isinstance(value, Mapping):
            return {key: self._with_entries(inner, f"{path}.{key}") for key, inner in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._with_entries(inner, f"{path}.{index}") for index, inner in enumerate(value))
        return value
