"""G3 by enumeration: every byte of every file of a checkpoint is changed, one at a time.

`verify` must report each of them, in its file, and name its leaf and a range that holds it. `restore` of everything
must refuse each byte that it needs: all chunks and all values. It does not need the header of a tensor file, which
repeats for other readers what the manifest says; with a damaged header it restores the right state, bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.errors import CorruptCheckpointError
from holdfast.testing import MemoryStorage
from tests.security.scene import FOLDER, SHARED, TENSORS, Objects, save_run
from tests.sizes import DEEP

NEWER = "step-000000002"
# Odd, so that each of the eight bits has its turn.
STRIDE = 1 if DEEP else 11


class Run:
    """The keys of a run, and copies of it with a byte changed."""

    def __init__(self, *steps: int) -> None:
        storage = MemoryStorage()
        save_run(None, *steps, storage=storage, rng=False)
        self.keys = dict(all_keys(storage))

    def changed(self, key: str, offset: int, flip: int) -> MemoryStorage:
        data = bytearray(self.keys[key])
        data[offset] ^= flip
        storage = MemoryStorage()
        for name, value in {**self.keys, key: bytes(data)}.items():
            storage.put(name, value)
        return storage


def all_keys(storage: MemoryStorage, folder: str = "") -> list[tuple[str, bytes]]:
    found = []
    for entry in storage.entries(folder):
        key = f"{folder}/{entry.name}" if folder else entry.name
        found += all_keys(storage, key) if entry.is_folder else [(key, storage.read(key, 1 << 30))]
    return found


@pytest.fixture(scope="module")
def run() -> Run:
    return Run(1)


@pytest.fixture(scope="module")
def leaves(run: Run) -> list[tuple[int, int, str]]:
    storage = run.changed(f"{FOLDER}/attempt.json", 0, 0)
    found = []
    for tensor in holdfast.resolve(storage, 1).manifest.tensors:
        for chunk in tensor.chunks:
            found.append((chunk.start, chunk.start + chunk.box.volume * tensor.item_bytes, tensor.name))
    return sorted(found)


def restore(storage: MemoryStorage, objects: Objects, selector: str | int) -> holdfast.RestoreResult:
    with holdfast.CheckpointManager("", objects.components(), storage=storage, rng=False) as manager:
        return manager.restore(selector)


def flip_for(offset: int) -> int:
    """Each of the eight bits in its turn."""
    return 1 << (offset % 8)


def test_the_run_is_sound_and_every_file_is_listed(run: Run) -> None:
    storage = run.changed(f"{FOLDER}/attempt.json", 0, 0)
    assert holdfast.verify(storage, 1).ok
    listed = {f"{FOLDER}/{file.name}" for file in holdfast.resolve(storage, 1).manifest.files}
    # What lies beside them is no part of the checkpoint's content: the commit record, and who began it.
    # Who writes to the run is no part of any checkpoint either.
    keys = {key for key in run.keys if "/" in key and not key.startswith("lease/")}
    assert keys - listed == {f"{FOLDER}/manifest.json", f"{FOLDER}/attempt.json"}
    assert listed == {f"{FOLDER}/{TENSORS}", f"{FOLDER}/{SHARED}"}


@pytest.mark.guarantee("G3")
def test_verify_reports_every_changed_byte_with_its_leaf_and_range(
    run: Run, leaves: list[tuple[int, int, str]]
) -> None:
    header = leaves[0][0]
    for file in (TENSORS, SHARED):
        key = f"{FOLDER}/{file}"
        for offset in range(0, len(run.keys[key]), STRIDE):
            report = holdfast.verify(run.changed(key, offset, flip_for(offset)), 1)
            assert len(report.problems) == 1, offset
            problem = report.problems[0]
            assert problem.file == file
            assert problem.byte_range is not None
            assert problem.byte_range[0] <= offset < problem.byte_range[1]
            if file == TENSORS and offset >= header:
                place = next(leaf for leaf in leaves if leaf[0] <= offset < leaf[1])
                assert (*problem.byte_range, problem.leaf) == place
            elif file == SHARED:
                assert problem.leaf is None


@pytest.mark.guarantee("G3")
@pytest.mark.guarantee("G7")
def test_restore_refuses_every_changed_byte_that_it_needs_and_changes_nothing(
    run: Run, leaves: list[tuple[int, int, str]]
) -> None:
    header = leaves[0][0]
    objects = Objects(7)
    before = objects.bits()
    for file, begin in ((TENSORS, header), (SHARED, 0)):
        key = f"{FOLDER}/{file}"
        for offset in range(begin, len(run.keys[key]), STRIDE):
            with pytest.raises(CorruptCheckpointError) as caught:
                restore(run.changed(key, offset, flip_for(offset)), objects, 1)
            assert file in str(caught.value)
            if file == TENSORS:
                start, end, leaf = next(leaf for leaf in leaves if leaf[0] <= offset < leaf[1])
                assert f"{file}, bytes {start}-{end}, leaf '{leaf}'" in str(caught.value)
    assert objects.bits() == before


@pytest.mark.guarantee("G3")
def test_restore_with_a_damaged_header_gives_the_right_state(run: Run, leaves: list[tuple[int, int, str]]) -> None:
    expected = Objects(1).bits()
    for offset in (*range(16), *range(16, leaves[0][0], 97)):
        objects = Objects(7)
        result = restore(run.changed(f"{FOLDER}/{TENSORS}", offset, 0xFF), objects, 1)
        assert result.step == 1
        assert {name: bits for name, bits in objects.bits().items() if name.startswith(("model", "optimizer"))} == {
            name: bits for name, bits in expected.items() if name.startswith(("model", "optimizer"))
        }


@pytest.mark.guarantee("G3")
@pytest.mark.guarantee("G11")
def test_latest_falls_back_over_every_damage_and_says_why_and_a_named_one_does_not() -> None:
    run = Run(1, 2)
    older: dict[str, Any] = Objects(1).bits()
    header = 4096
    places = [
        (file, offset)
        for file, begin in ((TENSORS, header), (SHARED, 0))
        for offset in range(begin, len(run.keys[f"{NEWER}/{file}"]), 7 * STRIDE)
    ]
    places += [("manifest.json", offset) for offset in range(0, len(run.keys[f"{NEWER}/manifest.json"]), 61)]
    for file, offset in places:
        storage = run.changed(f"{NEWER}/{file}", offset, flip_for(offset))
        objects = Objects(7)
        result = restore(storage, objects, "latest")
        assert (result.resumed, result.step, result.next_step) == (True, 1, 2), (file, offset)
        assert [text for text in result.rejected if text.startswith(f"{NEWER}: ") and file in text]
        bits = objects.bits()
        assert all(bits[name] == older[name] for name in older if name.startswith(("model", "optimizer")))
        assert objects.ledger.state["mark"] == 1
    for file, offset in places[::50]:
        objects = Objects(7)
        before = objects.bits()
        with pytest.raises(holdfast.HoldfastError):
            restore(run.changed(f"{NEWER}/{file}", offset, flip_for(offset)), objects, 2)
        assert objects.bits() == before


@pytest.mark.guarantee("G3")
def test_latest_says_that_nothing_is_sound_when_nothing_is(run: Run) -> None:
    objects = Objects(7)
    before = objects.bits()
    for file in (TENSORS, SHARED, "manifest.json"):
        data = run.keys[f"{FOLDER}/{file}"]
        with pytest.raises(CorruptCheckpointError, match="no sound checkpoint"):
            restore(run.changed(f"{FOLDER}/{file}", len(data) - 4, 1), objects, "latest")
    assert objects.bits() == before
