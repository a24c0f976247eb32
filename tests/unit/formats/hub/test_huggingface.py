"""Folders of the Hugging Face Hub: what is read of them, what is refused, and what an export writes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.errors import CorruptCheckpointError, HoldfastError, UnsafeContentError, UsageError
from holdfast.formats.exporting.export import export
from holdfast.formats.hub.huggingface import HuggingFaceFormat, HuggingFaceSource
from holdfast.formats.source import Fill, Source
from holdfast.ondisk.regions import whole
from tests.unit.formats.exporting.test_export import Net, same, saved

CONFIG = {"model_type": "llama", "hidden_size": 8, "tie_word_embeddings": False}
TENSORS = {"a.weight": torch.arange(12.0).view(3, 4), "a.bias": torch.ones(3), "b.weight": torch.zeros(2, 2)}


def contents(source: Source) -> dict[str, torch.Tensor]:
    """Return every tensor of a source that is flat."""
    entries = source.tree
    found = {name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for name, entry in entries.items()}
    source.read([Fill(entry, whole(entry.shape), found[name]) for name, entry in entries.items()])
    return found


def make_folder(folder: Path, places: dict[str, list[str]]) -> Path:
    """Make a folder with the given tensors in each file, an index, a configuration and two other files."""
    folder.mkdir(parents=True)
    for file, names in places.items():
        save_file({name: TENSORS[name] for name in names}, folder / file)
    if len(places) > 1:
        index = {"metadata": {}, "weight_map": {name: file for file, names in places.items() for name in names}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes").mkdir()
    (folder / "notes" / "private.txt").write_text("private")
    return folder


ONE = {"model.safetensors": list(TENSORS)}
TWO = {"model-1.safetensors": ["a.weight", "b.weight"], "model-2.safetensors": ["a.bias"]}


# Reading


@pytest.mark.parametrize("places", [ONE, TWO], ids=["one file", "two files and an index"])
def test_a_folder_has_its_tensors_its_config_and_its_assets(tmp_path: Path, places: dict[str, list[str]]) -> None:
    folder = make_folder(tmp_path / "folder", places)
    assert HuggingFaceFormat().detects(folder)
    with HuggingFaceSource(folder) as source:
        assert same(contents(source), TENSORS)
        assert source.config == CONFIG
        assert source.assets.keys() == {"tokenizer.json", "notes/private.txt"}
        assert source.assets["notes/private.txt"].read() == b"private"


@pytest.mark.parametrize("path", ["nothing", "file", "empty"])
def test_what_is_no_such_folder_is_not_detected(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    assert not HuggingFaceFormat().detects(tmp_path / path)


def rewrite_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda places: places.update(c="model-1.safetensors"), CorruptCheckpointError, "lacks a tensor"),
        (lambda places: places.pop("b.weight"), CorruptCheckpointError, "does not list"),
        (lambda places: places.update({"a.bias": "../outside.safetensors"}), UnsafeContentError, "safe file name"),
        (lambda places: places.update({"a.bias": "/etc/passwd"}), UnsafeContentError, "safe file name"),
        (lambda places: places.update({"a.bias": 3}), CorruptCheckpointError, "weight_map"),
        (lambda places: places.update({"a.bias": "none.safetensors"}), HoldfastError, "no such file"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], kind: type[HoldfastError], message: str
) -> None:
    folder = make_folder(tmp_path / "folder", TWO)
    save_file({"a.bias": torch.ones(3)}, tmp_path / "outside.safetensors")
    rewrite_index(folder, change)
    with pytest.raises(kind, match=message):
        HuggingFaceSource(folder)


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {}, "weight_map": {}}', "[" * 100_000]
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    folder = make_folder(tmp_path / "folder", TWO)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptCheckpointError):
        HuggingFaceSource(folder)


def test_a_link_to_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = make_folder(tmp_path / "folder", ONE)
    (folder / "vocab.txt").symlink_to("../secret")
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    with HuggingFaceSource(make_folder(tmp_path / "other", ONE)) as source:
        assert "vocab.txt" not in source.assets
    (folder / "model.safetensors").symlink_to("../elsewhere.safetensors")
    with pytest.raises(UnsafeContentError, match="link"):
        HuggingFaceSource(folder)
    (folder / "model.safetensors").unlink()
    (tmp_path / "elsewhere.safetensors").rename(folder / "model.safetensors")
    with HuggingFaceSource(folder) as source, pytest.raises(UnsafeContentError, match="link"):
        source.assets["vocab.txt"].read()
    with HuggingFaceSource(folder) as source, pytest.raises(UnsafeContentError, match="link"):
        export(source, tmp_path / "out", format="hf")
    assert not [name for name in os.listdir(tmp_path) if "out" in name]


def test_the_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    cache = tmp_path / "models--x"
    folder = make_folder(cache / "snapshots" / "abc", ONE)
    (cache / "blobs").mkdir()
    for name in ("model.safetensors", "config.json"):
        (folder / name).rename(cache / "blobs" / name)
        (folder / name).symlink_to(f"../../blobs/{name}")
    with HuggingFaceSource(folder) as source:
        assert same(contents(source), TENSORS)
        assert source.config == CONFIG


# Writing


@pytest.mark.parametrize("config", [CONFIG, {"model": CONFIG, "trainer": {"lr": 0.1}}], ids=["whole", "part"])
def test_the_config_is_the_stored_one(tmp_path: Path, config: Any) -> None:
    model = Net()
    export(saved(tmp_path, {"model": model}, config=config), tmp_path / "out", format="hf")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG
    assert same(load_file(tmp_path / "out" / "model.safetensors"), model.state_dict())
    with HuggingFaceSource(tmp_path / "out") as source:
        assert same(contents(source), model.state_dict())


def test_config_and_tokenizer_come_from_the_assets_whatever_their_folder(tmp_path: Path) -> None:
    assets = tmp_path / "assets"
    for name, text in {
        "config.json": json.dumps({"model_type": "gpt2"}),
        "tokenizer/tokenizer.json": "{}",
        "tokenizer/merges.txt": "a b",
        "generation_config.json": '{"top_k": 1}',
        "train.yaml": "secret: 1",
    }.items():
        (assets / name).parent.mkdir(parents=True, exist_ok=True)
        (assets / name).write_text(text)
    run = saved(tmp_path, {"model": Net()}, config=CONFIG, assets=[assets])
    export(run, tmp_path / "out", format="hf")
    names = {"config.json", "tokenizer.json", "merges.txt", "generation_config.json", "model.safetensors"}
    assert set(os.listdir(tmp_path / "out")) == names
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "gpt2"}
    assert (tmp_path / "out" / "merges.txt").read_text() == "a b"


def test_a_checkpoint_without_a_config_is_refused_with_advice(tmp_path: Path) -> None:
    run = saved(tmp_path, {"model": Net()}, config={"lr": 0.1})
    with pytest.raises(UsageError, match=r"model\.config\.to_dict\(\)"):
        export(run, tmp_path / "out", format="hf")
    assert os.listdir(tmp_path) == ["run"]


def test_two_assets_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / "assets" / folder).mkdir(parents=True)
        (tmp_path / "assets" / folder / "tokenizer.json").write_text(folder)
    run = saved(tmp_path, {"model": Net()}, config=CONFIG, assets=[tmp_path / "assets"])
    with pytest.raises(UsageError, match="same name"):
        export(run, tmp_path / "out", format="hf")


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_tensor_is_written_once_where_the_config_ties_it(tmp_path: Path, tied: bool) -> None:
    model = Net()
    run = saved(tmp_path, {"model": model}, config={**CONFIG, "tie_word_embeddings": tied})
    report = export(run, tmp_path / "out", format="hf")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert set(report.names) == set(found)
    assert model.state_dict().keys() - found.keys() == ({"head.weight"} if tied else set())


def test_dtype_is_noted_in_the_config(tmp_path: Path) -> None:
    run = saved(tmp_path, {"model": Net()}, config={**CONFIG, "torch_dtype": torch.float32})
    export(run, tmp_path / "plain", format="hf")
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["torch_dtype"] == "float32"
    export(run, tmp_path / "half", format="hf", dtype="bfloat16")
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert (config["torch_dtype"], "dtype" in config) == ("bfloat16", False)


def test_a_value_that_json_has_no_form_for_is_refused(tmp_path: Path) -> None:
    run = saved(tmp_path, {"model": Net()}, config={**CONFIG, "seed": 1 + 2j})
    with pytest.raises(UsageError, match=r"config\.json.*complex"):
        export(run, tmp_path / "out", format="hf")
    assert os.listdir(tmp_path) == ["run"]


def test_a_folder_is_exported_from_a_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "folder", TWO)
    with HuggingFaceSource(folder) as source:
        export(source, tmp_path / "out", format="hf", max_shard_bytes=30)
    with HuggingFaceSource(tmp_path / "out") as source:
        assert same(contents(source), TENSORS)
        assert source.config == CONFIG
        assert source.assets.keys() == {"tokenizer.json"}
