"""NeMo's archives: both kinds are read, what is written has the same bytes each time and reads back, and a config that
means mischief is refused."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast.errors import (
    CorruptCheckpointError,
    HoldfastError,
    UnsafeContentError,
    UnsupportedFormatError,
    UsageError,
)
from holdfast.formats.exporting.export import ExportItem, ExportJob
from holdfast.formats.nemo.archives import Archive
from holdfast.formats.nemo.nemo import NemoFormat, NemoSource
from holdfast.formats.nemo.nemo_config import config_from_yaml, config_to_yaml
from holdfast.formats.registry import open_source
from holdfast.formats.weights.selection import find_weights
from holdfast.runs.assets import Asset

CONFIG = b"target: some.Model\nlr: 1e-4\ntokenizer:\n  model: nemo:abc_tokenizer.model\n"


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "encoder.weight": torch.randn(3, 5, generator=generator),
        "encoder.bias": torch.randn(3, generator=generator).bfloat16(),
        "steps": torch.tensor(4, dtype=torch.int64),
        "empty": torch.zeros(0, 2),
    }


def saved(values: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(values, stream)
    return stream.getvalue()


def archive(path: Path, content: Mapping[str, bytes], mode: str = "w:") -> Path:
    with tarfile.open(path, mode) as target:
        for name, data in content.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(data)
            target.addfile(info, io.BytesIO(data))
    return path


def sharded(folder: Path) -> dict[str, bytes]:
    """Return the files of a DCP checkpoint by their names in an archive."""
    dcp.save(state(), checkpoint_id=folder, no_dist=True)
    return {f"model_weights/{file.name}": file.read_bytes() for file in folder.iterdir()}


def tensors(path: Path) -> dict[str, bytes]:
    with open_source(path) as source:
        assert isinstance(source, NemoSource)
        return {
            name: b"".join(bytes(piece) for piece in source.pieces(entry))
            for name, entry in find_weights(source).items()
        }


def expected(values: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: value.reshape(-1).view(torch.uint8).numpy().tobytes() for name, value in values.items()}


def refused(path: Path) -> HoldfastError:
    with pytest.raises(HoldfastError) as caught:
        tensors(path)
    return caught.value


@pytest.mark.parametrize("mode", ["w:", "w:gz"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_both_kinds_of_weights_are_read_plain_and_compressed(tmp_path: Path, kind: str, mode: str) -> None:
    weights = {"model_weights.ckpt": saved(state())} if kind == "file" else sharded(tmp_path / "dcp")
    content = {"model_config.yaml": CONFIG, "abc_tokenizer.model": b"pieces", **weights}
    path = archive(tmp_path / "of any name", content, mode)
    assert tensors(path) == expected(state())
    with open_source(path) as source:
        assert source.config == {
            "target": "some.Model",
            "lr": 0.0001,
            "tokenizer": {"model": "nemo:abc_tokenizer.model"},
        }
        assert list(source.assets) == ["abc_tokenizer.model"]
        assert source.assets["abc_tokenizer.model"].read() == b"pieces"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_tensors_of_an_archive_fill_a_model(tmp_path: Path, kind: str) -> None:
    import holdfast

    weights = {"model_weights.ckpt": saved(state())} if kind == "file" else sharded(tmp_path / "dcp")
    path = archive(tmp_path / "a.nemo", {"model_config.yaml": CONFIG, **weights})
    model = torch.nn.Module()
    model.encoder = torch.nn.Linear(5, 3)
    model.encoder.bias = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    model.register_buffer("steps", torch.tensor(0))
    model.register_buffer("empty", torch.zeros(0, 2))
    holdfast.load_weights(model, path)
    assert expected(model.state_dict()) == expected(state())


def job(folder: Path, config: Any = None, assets: Mapping[str, bytes] | None = None, values: Any = None) -> ExportJob:
    """Return what `export` would ask the format to write."""
    file = folder / "weights.pt"
    torch.save(values or state(), file)
    source = open_source(file)
    items = {name: ExportItem(name, entry, entry.dtype) for name, entry in find_weights(source).items()}
    found = {name: Asset(name, len(data), lambda data=data: iter([data])) for name, data in (assets or {}).items()}
    return ExportJob(source, tuple(items.values()), items, config=config, assets=found)


def written(folder: Path, name: str = "out.nemo", **options: Any) -> Path:
    with (made := job(folder, **options)).source:
        NemoFormat().write(made, folder / name)
    return folder / name


def test_what_is_written_reads_back_bit_for_bit(tmp_path: Path) -> None:
    config = {"target": "a.B", "sizes": [1, 2], "lr": 1e-5, "text": "1e-5", "none": None, "date": "2020-01-01"}
    path = written(tmp_path, config=config, assets={"tokenizer/vocab.json": b"{}", "notes.txt": b""})
    assert tensors(path) == expected(state())
    with open_source(path) as source:
        assert source.config == config
        assert {name: asset.read() for name, asset in source.assets.items()} == {
            "tokenizer/vocab.json": b"{}",
            "notes.txt": b"",
        }


def test_the_same_content_is_written_as_the_same_bytes_in_a_tar_that_others_read(tmp_path: Path) -> None:
    options: dict[str, Any] = {"config": {"a": 1}, "assets": {"b": b"1", "a": b"2"}}
    first, second = written(tmp_path, "1", **options), written(tmp_path, "2", **options)
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_size % tarfile.RECORDSIZE == 0
    with tarfile.open(first, "r:") as stock:
        assert [member.name for member in stock] == ["model_config.yaml", "a", "b", "model_weights.ckpt"]
        assert {(member.mtime, member.uid, member.gid, member.uname, member.mode) for member in stock} == {
            (0, 0, 0, "", 0o644)
        }
        loaded = torch.load(io.BytesIO(stock.extractfile("model_weights.ckpt").read()), weights_only=True)
    assert expected(loaded) == expected(state())


def test_a_config_refers_to_the_files_that_are_in_the_archive(tmp_path: Path) -> None:
    config = {
        "tokenizer": {"model": "/data/tok/tokenizer.model", "dir": "/data/tok", "vocab": "tokenizer/vocab.txt"},
        "other": ["merges.txt", "absent.txt", "tokenizer.model.bak", "word"],
    }
    assets = {"tokenizer.model": b"1", "tokenizer/vocab.txt": b"2", "deep/er/merges.txt": b"3", "word": b"4"}
    path = written(tmp_path, config=config, assets=assets)
    with open_source(path) as source:
        assert source.config == {
            "tokenizer": {"model": "nemo:tokenizer.model", "dir": "/data/tok", "vocab": "nemo:tokenizer_vocab.txt"},
            "other": ["nemo:deep_er_merges.txt", "absent.txt", "tokenizer.model.bak", "word"],
        }
        assert {name: asset.read() for name, asset in source.assets.items()} == {
            "tokenizer.model": b"1",
            "tokenizer_vocab.txt": b"2",
            "deep_er_merges.txt": b"3",
            "word": b"4",
        }
    assert config["tokenizer"] == {  # type: ignore[comparison-overlap]
        "model": "/data/tok/tokenizer.model",
        "dir": "/data/tok",
        "vocab": "tokenizer/vocab.txt",
    }


def test_a_reference_to_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nemo:gone\.model"):
        written(tmp_path, config={"tokenizer": "nemo:gone.model"})
    assert not (tmp_path / "out.nemo").exists()


def test_a_config_among_the_assets_is_written_as_it_is(tmp_path: Path) -> None:
    text = b"# a comment\ntokenizer: nemo:t.model\nlr: 1e-4\n"
    path = written(tmp_path, config={"other": 1}, assets={"model_config.yaml": text, "t.model": b""})
    with Archive.open(path) as found:
        file = found.members["model_config.yaml"]
        assert file.read(0, file.size_bytes) == text
    single = written(tmp_path, "single", assets={"conf/train.yaml": text, "t.model": b""})
    with Archive.open(single) as found:
        assert list(found.members) == ["model_config.yaml", "t.model", "model_weights.ckpt"]


def test_an_archive_without_a_config_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a config, and the source has none"):
        written(tmp_path)
    with pytest.raises(UsageError, match=r"a\.yaml, b\.yml"):
        written(tmp_path, assets={"a.yaml": b"", "b.yml": b""})


@pytest.mark.parametrize("name", ["model_weights.ckpt", "model_weights", "model_weights/.metadata"])
def test_an_asset_may_not_take_the_name_of_the_weights(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="needs for itself"):
        written(tmp_path, config={"a": 1}, assets={name: b""})


def test_two_assets_that_would_have_one_name_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one name"):
        written(tmp_path, config={"a": "t/v.txt"}, assets={"t/v.txt": b"", "t_v.txt": b""})


def test_a_config_that_yaml_has_no_words_for_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written as YAML"):
        written(tmp_path, config={"a": object()})


def test_a_damaged_asset_ends_the_writing(tmp_path: Path) -> None:
    def broken() -> Any:
        yield b"half"
        raise CorruptCheckpointError("the bytes do not have their digest")

    made = job(tmp_path, config={"a": 1})
    with made.source, pytest.raises(CorruptCheckpointError, match="digest"):
        NemoFormat().write(
            ExportJob(made.source, made.items, made.tree, {"a": 1}, {"x": Asset("x", 8, broken)}), tmp_path / "x.nemo"
        )


@pytest.mark.parametrize(
    ("content", "kind", "said"),
    [
        ({"weights.pt": b""}, UnsupportedFormatError, "no format that is known"),
        ({"model_config.yaml": b""}, CorruptCheckpointError, "neither"),
        ({"model_config.yaml": b"", "model_weights.ckpt": b"junk"}, HoldfastError, "model_weights.ckpt"),
        ({"model_config.yaml": b"", "model_weights.ckpt": saved([torch.ones(1)])}, CorruptCheckpointError, "a list"),
        ({"model_config.yaml": b"", "mp_rank_00/model_weights.ckpt": b""}, UnsupportedFormatError, "split over 1"),
        ({"model_config.yaml": b"", "model_weights/a/.zarray": b""}, UnsupportedFormatError, "no DCP checkpoint"),
        (
            {"model_config.yaml": b"", "model_weights.ckpt": b"", "model_weights/.metadata": b""},
            CorruptCheckpointError,
            "twice",
        ),
    ],
)
def test_an_archive_without_weights_that_can_be_read_says_why(
    tmp_path: Path, content: dict[str, bytes], kind: type[HoldfastError], said: str
) -> None:
    error = refused(archive(tmp_path / "a.nemo", content))
    assert isinstance(error, kind)
    assert said in str(error)


def test_a_compressed_tar_without_a_config_is_refused_by_name(tmp_path: Path) -> None:
    assert "without model_config.yaml" in str(refused(archive(tmp_path / "a.tgz", {"weights.pt": b""}, "w:gz")))


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("a: &x [1]\nb: *x", UnsafeContentError, "alias"),
        ("a: !!python/object/apply:os.system ['true']", UnsafeContentError, "plain values"),
        ("[" * 5000, UnsafeContentError, "nested too deeply"),
        ("a: [", CorruptCheckpointError, "no valid YAML"),
        ("a: " + "9" * 5000, CorruptCheckpointError, "no valid YAML"),
        ("? [a]\n: 1", CorruptCheckpointError, "no valid YAML"),
        ("\x00", CorruptCheckpointError, "no valid YAML"),
        (" " * (3 << 20), UnsafeContentError, "are accepted"),
    ],
)
def test_a_config_that_is_hostile_or_damaged_is_refused(text: str, kind: type[HoldfastError], said: str) -> None:
    with pytest.raises(kind, match=said) as caught:
        config_from_yaml(text.encode(), file="the archive:model_config.yaml")
    assert caught.value.file == "the archive:model_config.yaml"


def test_a_config_that_is_no_text_is_damage() -> None:
    with pytest.raises(CorruptCheckpointError, match="no valid YAML"):
        config_from_yaml(b"\xff\xfe\xfa", file="x")


@pytest.mark.parametrize(
    "value", ["1e-5", "1e5", "-1E+5", "12", "true", "null", "2020-01-01", "a: b", "é", "", "1_0e2"]
)
def test_texts_stay_texts(value: str) -> None:
    assert config_from_yaml(config_to_yaml({"a": value}), file="x") == {"a": value}


WITHOUT_YAML = """
import sys
sys.modules["yaml"] = None
from pathlib import Path
from holdfast import HoldfastError
from holdfast.formats.nemo.nemo import NemoSource
with NemoSource(Path(sys.argv[1])) as source:
    print(sorted(source.tree))
    try:
        source.config
    except HoldfastError as error:
        print(error)
"""


def test_without_pyyaml_weights_are_read_and_the_config_names_the_extra(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.nemo", {"model_config.yaml": CONFIG, "model_weights.ckpt": saved(state())})
    done = subprocess.run([sys.executable, "-c", WITHOUT_YAML, path], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == str(sorted(state()))
    assert "pip install 'holdfast[nemo]'" in done.stdout
