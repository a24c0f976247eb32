"""Folders of `dcp.save`: what is damaged or hostile is refused; what one process saved is read and written."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from holdfast.errors import CorruptCheckpointError, HoldfastError, UnsafeContentError, UnsupportedFormatError
from holdfast.formats.binary import BinaryFile
from holdfast.formats.dcp_folders.dcp_folder import DCPFormat, open_dcp
from holdfast.formats.source import Source, tensors_of

STATE = {
    "model": {"weight": torch.arange(12.0).reshape(4, 3), "bias": torch.ones(3, dtype=torch.bfloat16)},
    "step": 3,
    "groups": [{"lr": 0.1, "params": ["weight"]}, {"lr": 0.2, "params": []}],
}


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    dcp.save(dict(STATE), checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    return tmp_path / "checkpoint"


def opened(folder: pathlib.Path) -> Source:
    assert DCPFormat().detects(folder)
    return DCPFormat().open(folder)


def read_everything(source: Source) -> dict[str, bytes]:
    return {
        name: b"".join(map(bytes, source.pieces(entry, limit_bytes=8)))
        for name, entry in tensors_of(source.tree).items()
    }


def change_metadata(folder: pathlib.Path, change: Callable[[Metadata], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def change_places(folder: pathlib.Path, **fields: Any) -> None:
    def change(metadata: Metadata) -> None:
        metadata.storage_data = {index: replace(info, **fields) for index, info in metadata.storage_data.items()}

    change_metadata(folder, change)


def refused(folder: pathlib.Path) -> HoldfastError:
    with pytest.raises(HoldfastError) as caught, DCPFormat().open(folder) as source:
        read_everything(source)
    return caught.value


def test_a_folder_of_one_process_is_read(folder: pathlib.Path) -> None:
    with opened(folder) as source:
        assert source.tree["step"] == 3
        assert source.tree["groups"] == STATE["groups"]
        assert list(source.tree) == list(STATE)
        found = read_everything(source)
    assert found["model.weight"] == torch.arange(12.0).numpy().tobytes()
    assert found["model.bias"] == torch.ones(3, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()


def test_nothing_of_tensors_is_read_before_it_is_asked_for(folder: pathlib.Path) -> None:
    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata = {"model.weight": metadata.state_dict_metadata["model.weight"]}

    change_metadata(folder, change)
    data = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(bytes(len(data)))
    with opened(folder) as source:
        entry = source.tree["model"]["weight"]
        with pytest.raises(CorruptCheckpointError):
            list(source.pieces(entry))


def held_after_reading(source: Source, limit_bytes: int) -> tuple[int, int]:
    """Return the memory that is held after every tensor was read, and the most while it was."""
    entries = tensors_of(source.tree).values()
    tracemalloc.start()
    try:
        for entry in entries:
            for piece in source.pieces(entry, limit_bytes=limit_bytes):
                assert len(piece) <= limit_bytes
        return tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


def test_a_tensor_that_is_expanded_from_a_few_bytes_is_never_whole_in_memory(tmp_path: pathlib.Path) -> None:
    dcp.save({name: torch.zeros(16 << 20) for name in "ab"}, checkpoint_id=tmp_path / "c", no_dist=True)
    stream = io.BytesIO()
    torch.save(torch.full((1,), 7.0).expand(16 << 20), stream)
    (tmp_path / "c" / "__0_0.distcp").write_bytes(stream.getvalue() * 2)

    def change(metadata: Metadata) -> None:
        length = len(stream.getvalue())
        metadata.storage_data = {
            index: replace(info, offset=number * length, length=length)
            for number, (index, info) in enumerate(metadata.storage_data.items())
        }

    change_metadata(tmp_path / "c", change)
    with opened(tmp_path / "c") as source:
        held, most = held_after_reading(source, 1 << 20)
        assert held < 1 << 20
        assert most < 16 << 20
        assert next(source.pieces(source.tree["a"], limit_bytes=8)).tobytes() == torch.full((2,), 7.0).numpy().tobytes()


def test_a_tensor_that_does_not_lie_row_by_row_is_read_in_order_and_not_kept(tmp_path: pathlib.Path) -> None:
    turned = torch.arange(float(1 << 20)).view(1 << 10, 2, -1).permute(2, 0, 1)
    assert not turned.is_contiguous()
    dcp.save({"turned": turned}, checkpoint_id=tmp_path / "c", no_dist=True)
    with opened(tmp_path / "c") as source:
        assert held_after_reading(source, 1 << 19)[0] < 1 << 20
        entry = source.tree["turned"]
        data = b"".join(map(bytes, source.pieces(entry, limit_bytes=300_000)))
        assert data == turned.contiguous().numpy().tobytes()


def test_values_of_parts_that_are_not_asked_for_are_not_read(tmp_path: pathlib.Path) -> None:
    state = {"note": Touch(tmp_path / "touched"), "model": {"weight": torch.ones(2), "count": 5}}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    with opened(tmp_path / "c") as source:
        assert list(source.tree) == ["note", "model"]
        assert source.tree["model"]["count"] == 5
        assert source.tree["model"] is source.tree["model"]
        assert "other" not in source.tree
        with pytest.raises(UnsafeContentError, match="note"):
            source.tree["note"]
    assert not (tmp_path / "touched").exists()


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("name", ["step", "model.weight"])
@pytest.mark.parametrize("shift", [0, 1])
def test_items_that_share_bytes_of_a_file_are_damage(name: str, shift: int, folder: pathlib.Path) -> None:
    def change(metadata: Metadata) -> None:
        places = {index.fqn: info for index, info in metadata.storage_data.items()}
        shared = replace(places[name], offset=places[name].offset + shift, length=places[name].length - shift)
        metadata.storage_data = {
            index: shared if index.fqn == "groups.0.lr" else info for index, info in metadata.storage_data.items()
        }

    change_metadata(folder, change)
    with pytest.raises(CorruptCheckpointError, match=r"two items overlap in '__0_0\.distcp'.*groups\.0\.lr"):
        DCPFormat().open(folder)


def test_a_folder_inside_of_an_archive_is_read(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    joined = tmp_path / "archive"
    parts = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    joined.write_bytes(b"head" + b"".join(parts.values()))
    with BinaryFile.open(joined) as file:
        files, start = {}, 4
        for name, data in parts.items():
            files[name] = file.part(start, len(data), name)
            start += len(data)
        with open_dcp(files, "archive") as source:
            assert read_everything(source)["model.weight"] == torch.arange(12.0).numpy().tobytes()
            assert source.tree["step"] == 3


def test_a_folder_without_paths_has_flat_names(folder: pathlib.Path) -> None:
    change_metadata(folder, lambda metadata: setattr(metadata, "planner_data", None))
    with opened(folder) as source:
        assert sorted(source.tree)[0] == "groups.0.lr"
        assert "model.weight" in source.tree


def test_more_files_than_may_be_open_are_read(tmp_path: pathlib.Path) -> None:
    state = {f"tensor{number}": torch.full((3,), float(number)) for number in range(150)}
    writer = dcp.FileSystemWriter(tmp_path / "many", single_file_per_rank=False, sync_files=False)
    dcp.save(dict(state), storage_writer=writer, no_dist=True)
    before = len(os.listdir("/proc/self/fd"))
    with opened(tmp_path / "many") as source:
        for _ in range(2):
            found = read_everything(source)
            assert len(os.listdir("/proc/self/fd")) < before + 80
    assert found == {name: tensor.numpy().tobytes() for name, tensor in state.items()}
    assert len(os.listdir("/proc/self/fd")) == before


def test_other_folders_are_not_taken_for_dcp(tmp_path: pathlib.Path) -> None:
    assert not DCPFormat().detects(tmp_path)
    for data in (b"", b"{}", pickle.dumps({"a": 1})):
        (tmp_path / ".metadata").write_bytes(data)
        assert not DCPFormat().detects(tmp_path)
    assert not DCPFormat().detects(tmp_path / ".metadata")


def test_metadata_that_was_cut_off_is_damage(folder: pathlib.Path) -> None:
    data = (folder / ".metadata").read_bytes()
    for size in range(0, len(data), 7):
        (folder / ".metadata").write_bytes(data[:size])
        assert DCPFormat().detects(folder)
        assert isinstance(refused(folder), CorruptCheckpointError)


def test_metadata_of_each_rank_alone_is_refused_with_the_way_to_save(folder: pathlib.Path) -> None:
    (folder / ".metadata").rename(folder / "__0.metadata")
    assert DCPFormat().detects(folder)
    with pytest.raises(UnsupportedFormatError, match=r"metadata of its own.*dcp\.save"):
        DCPFormat().open(folder)


class Touch:
    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.guarantee("G9")
def test_code_in_the_metadata_is_refused_by_its_name(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    change_metadata(folder, lambda metadata: setattr(metadata, "planner_data", Touch(tmp_path / "touched")))
    error = refused(folder)
    assert isinstance(error, UnsafeContentError)
    assert "posix.mkdir" in str(error)
    assert ".metadata" in str(error)
    assert not (tmp_path / "touched").exists()


@pytest.mark.guarantee("G9")
def test_code_in_a_value_is_refused_by_its_name(tmp_path: pathlib.Path) -> None:
    dcp.save({"weight": torch.ones(2), "note": Touch(tmp_path / "touched")}, checkpoint_id=tmp_path / "c", no_dist=True)
    error = refused(tmp_path / "c")
    assert isinstance(error, UnsafeContentError)
    assert "posix.mkdir" in str(error)
    assert not (tmp_path / "touched").exists()


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("place", ["../outside", "/etc/passwd", "a/../../outside"])
def test_a_place_outside_of_the_folder_is_refused(place: str, folder: pathlib.Path) -> None:
    change_places(folder, relative_path=place)
    error = refused(folder)
    assert isinstance(error, UnsafeContentError)
    assert place in str(error)


@pytest.mark.guarantee("G9")
def test_a_place_outside_is_refused_in_an_archive_too(folder: pathlib.Path) -> None:
    change_places(folder, relative_path="../outside")
    with BinaryFile.open(folder / ".metadata") as metadata, BinaryFile.open(folder / "__0_0.distcp") as data:
        files = {".metadata": metadata, "../outside": data}
        with pytest.raises(UnsafeContentError, match="outside"):
            open_dcp(files, "archive")


@pytest.mark.guarantee("G9")
def test_a_link_out_of_the_folder_is_refused(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (folder / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (folder / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    assert isinstance(refused(folder), UnsafeContentError)


def test_a_transformed_item_is_refused_by_its_transformation(folder: pathlib.Path) -> None:
    change_places(folder, transform_descriptors=["zstd"])
    error = refused(folder)
    assert isinstance(error, UnsupportedFormatError)
    assert "zstd" in str(error)


def lose_a_chunk(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.weight"].chunks.clear()


def cover_twice(metadata: Metadata) -> None:
    tensor = metadata.state_dict_metadata["model.weight"]
    tensor.size = torch.Size([5, 3])
    tensor.chunks.append(ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 3])))


def lose_a_place(metadata: Metadata) -> None:
    metadata.storage_data.pop(next(index for index in metadata.storage_data if index.fqn == "model.weight"))


def change_a_type(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.weight"].properties.dtype = torch.int32


def change_a_shape(metadata: Metadata) -> None:
    tensor = metadata.state_dict_metadata["model.weight"]
    tensor.size = tensor.chunks[0].sizes = torch.Size([2, 6])


def collide(metadata: Metadata) -> None:
    metadata.planner_data["step"] = ("model",)


def collide_first(metadata: Metadata) -> None:
    others = {name: path for name, path in metadata.planner_data.items() if name != "step"}
    metadata.planner_data = {"step": ("model",), **others}


def make_a_hole(metadata: Metadata) -> None:
    metadata.planner_data["groups.1.lr"] = ("groups", 1 << 40, "lr")


def lose_storage(metadata: Metadata) -> None:
    metadata.storage_data = None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lose_a_chunk, "none of its bytes"),
        (cover_twice, "overlap"),
        (lose_a_place, "does not say where"),
        (change_a_type, "float32.* is stored, not int32"),
        (change_a_shape, r"is stored, not float32\[2, 6\]"),
        (collide, "two values are at"),
        (collide_first, "a value is at a part of"),
        (make_a_hole, "holes"),
        (lose_storage, "where anything is stored"),
    ],
)
def test_metadata_that_does_not_fit_is_damage(change: Any, problem: str, folder: pathlib.Path) -> None:
    change_metadata(folder, change)
    with pytest.raises(CorruptCheckpointError, match=problem):
        raise refused(folder)


def test_a_missing_file_and_one_that_is_too_short_are_damage(folder: pathlib.Path) -> None:
    data = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(data[:-1])
    assert isinstance(refused(folder), CorruptCheckpointError)
    (folder / "__0_0.distcp").unlink()
    error = refused(folder)
    assert isinstance(error, CorruptCheckpointError)
    assert "'__0_0.distcp' is missing" in str(error)


def test_a_value_where_a_tensor_should_be_is_damage(folder: pathlib.Path) -> None:
    stream = io.BytesIO()
    torch.save({"no": "tensor"}, stream)
    (folder / "__0_0.distcp").write_bytes(stream.getvalue())

    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata = {"model.weight": metadata.state_dict_metadata["model.weight"]}
        index = next(index for index in metadata.storage_data if index.fqn == "model.weight")
        place = replace(metadata.storage_data[index], offset=0, length=len(stream.getvalue()))
        metadata.storage_data = {index: place}

    change_metadata(folder, change)
    with pytest.raises(CorruptCheckpointError, match="no tensor is stored"):
        raise refused(folder)


@pytest.mark.parametrize("value", [False, True], ids=["tensor", "value"])
def test_a_conjugated_view_is_refused_with_the_way_to_save_it(value: bool, tmp_path: pathlib.Path) -> None:
    waves = torch.ones(2, dtype=torch.complex64).conj()
    state = {"waves": {(1, 2): waves} if value else waves}
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    with opened(tmp_path / "checkpoint") as source:
        with pytest.raises(UnsupportedFormatError, match=r"waves.*conjugated or negated.*resolve_conj\(\)"):
            read_everything(source)
