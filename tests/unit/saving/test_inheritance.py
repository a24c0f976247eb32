"""What a save of some components takes over from the manifest of its parent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.ondisk.manifest import (
    BLOCK_BYTES,
    IMPORTED_FROM,
    ChunkRecord,
    FileRecord,
    Manifest,
    TensorRecord,
    TreeRecord,
    UserMetadata,
)
from holdfast.runs.annotations import Note
from holdfast.runs.checkpoint import Checkpoint
from holdfast.saving.inheritance import Inheritance, inherit, inherited_metadata, inherited_versions
from holdfast.testing import MemoryStorage

DIGEST = "0" * 64


def file(name: str) -> FileRecord:
    return FileRecord(name=name, size_bytes=100, digest=DIGEST, header_bytes=8 if name.endswith("safetensors") else 0)


def tensor(name: str, *files: str) -> TensorRecord:
    chunks = [
        ChunkRecord(file=one, start=8, offsets=(index,), sizes=(1,), digests=(DIGEST,))
        for index, one in enumerate(files)
    ]
    return TensorRecord(name=name, dtype="float32", shape=(len(files),), chunks=tuple(chunks))


def tree(component: str, where: str, scope: str = "") -> TreeRecord:
    return TreeRecord(component=component, kind="values", file=where, scope=scope)


def manifest(
    files: Sequence[str] = (), tensors: Sequence[TensorRecord] = (), trees: Sequence[TreeRecord] = (), **more: Any
) -> Manifest:
    empty = {"metrics": {}, "progress": {}, "extra": {}, "config": None, "guards": {}, "tags": (), "versions": {}}
    return Manifest(
        run_id="run",
        folder="step-000000500",
        step=500,
        sequence=1,
        parent=None,
        created="2024-12-31T23:59:59",
        world_size=2,
        meshes=(),
        block_bytes=BLOCK_BYTES,
        files=tuple(map(file, files)),
        tensors=tuple(tensors),
        trees=tuple(trees),
        **{**empty, **more},
    )


PARENT = manifest(
    ["b.safetensors", "a.safetensors", "eval.safetensors", "shared.json", "eval.json", "assets/plan/a", "assets/b"],
    [
        tensor("model.weight", "a.safetensors", "b.safetensors"),
        # Its name begins like that of another component.
        tensor("evaluation_model.weight", "a.safetensors"),
        tensor("evaluation.sums", "eval.safetensors"),
        tensor("evaluation@rank-00001.sums", "eval.safetensors"),
        tensor("evaluation", "b.safetensors"),
    ],
    [tree("model", "shared.json"), tree("evaluation", "shared.json"), tree("evaluation", "eval.json", "rank-00001")],
)


def names(files: Sequence[FileRecord]) -> list[str]:
    return [one.name for one in files]


def test_a_file_is_taken_over_as_it_is_or_without_what_is_stored_anew_or_not_at_all() -> None:
    found = inherit(PARENT, ("evaluation",), ())
    assert names(found.files) == ["a.safetensors", "assets/b", "assets/plan/a", "shared.json"]
    assert names(found.mixed) == ["b.safetensors"]
    assert [one.name for one in found.tensors] == ["model.weight", "evaluation_model.weight"]
    assert [one.name for one in found.trees] == ["model"]
    assert (found.size_bytes, found.mixed_bytes) == (400, 100)


@pytest.mark.parametrize(
    ("assets", "left"),
    [
        (("b",), ["assets/plan/a"]),
        (("plan",), ["assets/b"]),
        (("plan/a",), ["assets/b"]),
        (("plan/a/b", "pla", "plan/aa"), ["assets/b", "assets/plan/a"]),
    ],
)
def test_an_asset_replaces_all_that_has_its_name(assets: tuple[str, ...], left: list[str]) -> None:
    found = inherit(PARENT, ("evaluation",), assets)
    assert [name for name in names(found.files) if name.startswith("assets/")] == left


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_ranks_share_the_files_and_every_chunk_is_taken_over_once(size: int) -> None:
    whole = inherit(PARENT, ("evaluation",), ())
    shares = [whole.share(rank, size) for rank in range(size)]

    def chunks(some: Inheritance) -> list[tuple[str, str]]:
        return [(leaf.name, chunk.file) for leaf, chunk in some.chunks_in((*some.files, *some.mixed))]

    files = [name for share in shares for name in names((*share.files, *share.mixed))]
    assert sorted(files) == sorted(names((*whole.files, *whole.mixed)))
    assert sorted(pair for share in shares for pair in chunks(share)) == sorted(chunks(whole))


def test_what_is_not_given_is_the_parents_and_tags_are_not() -> None:
    stored = {"metrics": {"loss": 1, "late": 0}, "progress": {"tokens": 1}, "extra": {"x": 1}, "guards": {"g": 1}}
    head = manifest(**stored, config={"lr": 1}, tags=("first",), epoch=3, ranking=(("loss", "min"),))
    note = Note(checkpoint=DIGEST, created="", metrics={"late": 5})
    parent = Checkpoint(head, DIGEST, MemoryStorage(), (note,))
    found = inherited_metadata(UserMetadata(), parent, {})
    assert found.metrics == {"loss": 1, "late": 5}
    assert (found.progress, found.extra, found.guards) == (stored["progress"], stored["extra"], stored["guards"])
    assert (found.config, found.tags, found.epoch, found.ranking) == ({"lr": 1}, (), 3, (("loss", "min"),))


def test_what_is_given_replaces_what_has_the_same_name() -> None:
    stored = {"metrics": {"loss": 1, "old": 0}, "progress": {"tokens": 1}, "extra": {"x": 1}, "guards": {"g": 1}}
    parent = Checkpoint(manifest(**stored, config={"lr": 1}, epoch=3), DIGEST, MemoryStorage())
    given = UserMetadata(
        metrics={"loss": 2},
        progress={"samples": 2},
        extra={"x": 2},
        config={"lr": 2},
        guards={"g": 2},
        tags=("second",),
        epoch=0,
        ranking=(("accuracy", "max"),),
    )
    found = inherited_metadata(given, parent, {"frozen:model": DIGEST})
    assert found.metrics == {"loss": 2, "old": 0}
    assert found.progress == {"tokens": 1, "samples": 2}
    assert (found.extra, found.guards) == ({"x": 2}, {"g": 2, "frozen:model": DIGEST})
    assert (found.config, found.tags, found.epoch, found.ranking) == ({"lr": 2}, ("second",), 0, given.ranking)


def test_state_that_was_imported_stays_known_as_such() -> None:
    for versions, expected in (({}, {"torch": "2"}), ({IMPORTED_FROM: "x"}, {"torch": "2", IMPORTED_FROM: "x"})):
        parent = Checkpoint(manifest(versions=versions), DIGEST, MemoryStorage())
        assert inherited_versions({"torch": "2"}, parent) == expected
