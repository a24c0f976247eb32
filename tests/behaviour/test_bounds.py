"""What a reader refuses is never committed: each limit of a reader is one of the writer, too, before the manifest."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import torch
from blake3 import blake3

import holdfast
from holdfast.errors import HoldfastError, SaveFailedError, UsageError
from holdfast.ondisk import paths
from holdfast.ondisk.manifest import (
    BLOCK_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_SEQUENCE,
    MAX_VALUES_BYTES,
    Manifest,
    encode_manifest,
    require_readable,
)
from holdfast.ondisk.regions import Box
from holdfast.ondisk.safetensors import MAX_HEADER_BYTES, FramedChunk, frame
from holdfast.runs.catalog import Catalog
from holdfast.testing import MemoryStorage


def manager_of(storage: Any, **more: Any) -> holdfast.CheckpointManager:
    state = {"model": torch.nn.Linear(4, 2)}
    return holdfast.CheckpointManager("run", state, storage=storage, mode="sync", rng=False, **more)


def saved(*steps: int) -> MemoryStorage:
    memory = MemoryStorage()
    with manager_of(memory) as manager:
        for step in steps:
            manager.save(step)
    return memory


def with_sequence(memory: MemoryStorage, folder: str, sequence: int) -> None:
    """Give a checkpoint another number, with a right digest, as whoever can write to the run can."""
    key = f"{folder}/manifest.json"
    body = json.loads(memory.read(key, 1 << 20))["manifest"]
    text = json.dumps({**body, "sequence": sequence}, separators=(",", ":")).encode()
    memory.delete(key)
    digest = blake3(text).hexdigest().encode()
    memory.put(key, b'{"holdfast_format":1,"digest":"%s","manifest":%s}\n' % (digest, text))


@pytest.mark.parametrize("sequence", [2**63 - 1, 2**63 - 2, MAX_SEQUENCE + 1])
def test_a_sequence_number_beyond_the_bound_is_damage_and_later_saves_stay_readable(sequence: int) -> None:
    memory = saved(1, 2)
    with_sequence(memory, "step-000000002", sequence)
    with manager_of(memory) as manager:
        result = manager.restore()
        assert result.step == 1
        assert "step-000000002" in result.rejected[0]
        for step in (3, 4):
            manager.save(step)
    assert [(found.step, found.sequence) for found in holdfast.checkpoints(memory)] == [(4, 3), (3, 2), (1, 1)]
    assert holdfast.verify(memory).ok


def test_after_the_highest_sequence_number_a_save_fails_before_its_commit_and_names_the_way_out() -> None:
    memory = saved(1, 2)
    with_sequence(memory, "step-000000002", MAX_SEQUENCE)
    with manager_of(memory) as manager:
        assert manager.restore().step == 2
        with pytest.raises(SaveFailedError, match=r"step-000000002 has the sequence number.*move its folder out"):
            manager.save(3)
    assert [found.step for found in holdfast.checkpoints(memory)] == [2, 1]
    for key in [key for key in memory._values if key.startswith("step-000000002/")]:
        memory.delete(key)
    with manager_of(memory) as manager:
        manager.restore()
        manager.save(3)
    assert [found.step for found in holdfast.checkpoints(memory)] == [3, 1]


def test_a_manifest_above_the_readers_limit_is_not_committed() -> None:
    manifest = manifest_of(saved(1))
    require_readable(manifest, encode_manifest(manifest)[0])
    with pytest.raises(SaveFailedError, match=r"manifest has [0-9,]+ bytes, and no reader takes more.*store less"):
        require_readable(manifest, bytes(MAX_MANIFEST_BYTES + 1))  # memory that is never touched


CHANGES: dict[str, dict[str, Any]] = {
    "a step that the folder does not name": {"step": 7},
    "a sequence above the bound": {"sequence": MAX_SEQUENCE + 1},
    "a negative sequence": {"sequence": -1},
    "a parent that is no digest": {"parent": "none"},
    "a date that is none": {"created": "yesterday"},
    "ranks beyond 64 bits": {"world_size": 2**63},
    "an epoch beyond 64 bits": {"epoch": 2**63},
    "a line that does not ascend": {"line": ((3, 2),)},
    "a ranking of another kind": {"ranking": (("loss", "median"),)},
    "a version that is no text": {"versions": {"torch": 2}},
    "a mesh beyond 64 bits": {"meshes": ({"shape": [2**63]},)},
}


def manifest_of(memory: MemoryStorage) -> Manifest:
    return Catalog(memory).scan().checkpoints[0].manifest


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES.keys())
def test_what_the_reader_refuses_is_refused_before_it_is_created(changed: dict[str, Any]) -> None:
    memory = saved(1)
    manifest = msgspec.structs.replace(manifest_of(memory), folder="step-000000002", step=2, sequence=2)
    manifest = msgspec.structs.replace(manifest, **changed)
    with pytest.raises(HoldfastError):
        Catalog(memory).add(manifest)
    assert [found.step for found in holdfast.checkpoints(memory)] == [1]
    memory.put("step-000000002/manifest.json", encode_manifest(manifest)[0])
    assert [one.folder for one in Catalog(memory).scan().damaged] == ["step-000000002"], "the reader does refuse it"


def test_a_file_of_values_above_the_readers_limit_is_not_committed() -> None:
    memory = saved(1)
    found = manifest_of(memory)
    files = tuple(
        msgspec.structs.replace(file, size_bytes=MAX_VALUES_BYTES + 1) if not file.header_bytes else file
        for file in found.files
    )
    manifest = msgspec.structs.replace(found, folder="step-000000002", step=2, sequence=2, files=files)
    with pytest.raises(SaveFailedError, match="at most 4,294,967,296 are read"):
        Catalog(memory).add(manifest)


def test_a_header_above_the_readers_limit_is_not_written() -> None:
    names = ["\U0001f600" * 1000 + str(place) for place in range(MAX_HEADER_BYTES // 8000 + 1)]
    with pytest.raises(UsageError, match=r"header of [0-9,]+ bytes.*shorter names"):
        frame([FramedChunk.of(name, "float32", Box((0,), (1,))) for name in names], BLOCK_BYTES)


def test_a_note_that_could_not_be_read_again_is_refused() -> None:
    with manager_of(saved(1)) as manager, pytest.raises(UsageError, match="note of"):
        manager.report(1, {"x" * (2 << 20): 1.0})


def test_a_made_up_number_of_a_note_does_not_use_up_the_numbers_after_it() -> None:
    memory = saved(1)
    memory.put(f"{paths.NOTES}/step-000000001--{10**18 - 1}.json", b"{}")
    with manager_of(memory) as manager:
        manager.tag(1, "gold")
    assert holdfast.resolve(memory, 1).tags == ("gold",)


def test_a_made_up_number_of_an_attempt_does_not_use_up_the_names_after_it() -> None:
    memory = saved(1)
    memory.put(f"step-000000002.{paths.MAX_ATTEMPT}/attempt.json", b"{}")
    with manager_of(memory) as manager:
        manager.restore()
        manager.save(2)
    assert [found.step for found in holdfast.checkpoints(memory)] == [2, 1]
