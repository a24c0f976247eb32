"""Tensors of plain files are read from their chunks, and never taken from memory that nothing has filled."""

from __future__ import annotations

import pytest
import torch

from holdfast.errors import UsageError
from holdfast.formats.reading import fill_all, pieces_of
from holdfast.formats.source import Fill, TensorEntry
from holdfast.ondisk.regions import whole


def test_an_entry_without_a_place_is_an_error_and_not_what_memory_had() -> None:
    entry = TensorEntry("model.x", "float32", (2, 3))
    with pytest.raises(UsageError, match=r"'model\.x'.*overrides read"):
        fill_all([Fill(entry, whole(entry.shape), torch.zeros(2, 3))])
    with pytest.raises(UsageError, match=r"'model\.x'.*overrides read"):
        list(pieces_of(entry, 1 << 20))
