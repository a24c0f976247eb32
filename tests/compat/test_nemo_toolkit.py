"""NeMo's own connector opens the archives that Holdfast writes, and Holdfast those that it writes, of both kinds.

Run by `make nemo`, in an environment with nemo-toolkit; skipped where that is not installed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

pytest.importorskip("nemo.core.connectors.save_restore_connector", reason="nemo-toolkit is not installed: `make nemo`")

from nemo.core.classes.modelPT import ModelPT
from nemo.core.connectors.save_restore_connector import SaveRestoreConnector
from omegaconf import OmegaConf

import holdfast
from holdfast.formats.exporting.export import ExportItem, ExportJob
from holdfast.formats.nemo.nemo import NemoFormat, NemoSource
from holdfast.formats.registry import open_source
from holdfast.formats.weights.selection import find_weights
from holdfast.runs.assets import Asset

TOKENIZER = b"the pieces of a tokenizer\n"


class Toy(ModelPT):
    """A model of NeMo's with weights of several kinds and a tokenizer."""

    def __init__(self, cfg: Any, trainer: Any = None) -> None:
        super().__init__(cfg=cfg, trainer=trainer)
        self.encoder = torch.nn.Linear(cfg.size, 3)
        self.narrow = torch.nn.Parameter(torch.randn(4).bfloat16())
        self.register_buffer("steps", torch.tensor(5))
        self.tokenizer_text = Path(self.register_artifact("tokenizer.model", cfg.tokenizer.model)).read_bytes()

    def setup_training_data(self, train_data_config: Any) -> None: ...

    def setup_validation_data(self, val_data_config: Any) -> None: ...

    @classmethod
    def list_available_models(cls) -> None: ...


class FolderConnector(SaveRestoreConnector):
    """Keeps the weights as a DCP checkpoint in a folder of the archive, as the connector of large models does."""

    def __init__(self) -> None:
        super().__init__()
        self._model_weights_ckpt = "model_weights"

    @staticmethod
    def _save_state_dict_to_disk(state_dict: Any, filepath: str) -> None:
        dcp.save(dict(state_dict), checkpoint_id=filepath, no_dist=True)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tokenizer.model").write_bytes(TOKENIZER)
    return tmp_path / "data" / "tokenizer.model"


def toy(tokenizer: Path) -> Toy:
    return Toy(OmegaConf.create({"size": 6, "lr": 1e-4, "tokenizer": {"model": str(tokenizer)}}))


def bits(values: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: value.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for name, value in values.items()}


@pytest.mark.parametrize("connector", [SaveRestoreConnector, FolderConnector])
def test_what_nemo_writes_is_read(connector: type[SaveRestoreConnector], tokenizer: Path, tmp_path: Path) -> None:
    model, path = toy(tokenizer), tmp_path / "model.nemo"
    connector().save_to(model, str(path))
    with open_source(path) as source:
        assert isinstance(source, NemoSource)
        assert source.config["size"] == 6
        assert source.config["lr"] == 1e-4
        name = source.config["tokenizer"]["model"].removeprefix("nemo:")
        assert {asset: source.assets[asset].read() for asset in source.assets} == {name: TOKENIZER}
    other = toy(tokenizer)
    holdfast.load_weights(other, path)
    assert bits(other.state_dict()) == bits(model.state_dict())


@pytest.mark.parametrize("place", ["tokenizer.model", "tokenizer/tokenizer.model"])
def test_what_is_written_is_restored_by_nemo_and_saved_again(place: str, tokenizer: Path, tmp_path: Path) -> None:
    model, path = toy(tokenizer), tmp_path / "model.nemo"
    torch.save(dict(model.state_dict()), tmp_path / "weights.pt")
    # As it was at the training, where the tokenizer had another path.
    config = {"size": 6, "lr": 1e-4, "tokenizer": {"model": "/gone/tokenizer.model"}}
    with open_source(tmp_path / "weights.pt") as source:
        items = {name: ExportItem(name, entry, entry.dtype) for name, entry in find_weights(source).items()}
        asset = Asset(place, len(TOKENIZER), lambda: iter([TOKENIZER]))
        NemoFormat().write(ExportJob(source, tuple(items.values()), items, config, {place: asset}), path)
    os.unlink(tokenizer)
    restored = Toy.restore_from(
        str(path), map_location=torch.device("cpu"), save_restore_connector=SaveRestoreConnector()
    )
    assert bits(restored.state_dict()) == bits(model.state_dict())
    assert restored.tokenizer_text == TOKENIZER
    assert restored.cfg.lr == 1e-4
    again = tmp_path / "again.nemo"
    restored.save_to(str(again))
    with open_source(again) as source:
        assert [source.assets[name].read() for name in source.assets] == [TOKENIZER]
