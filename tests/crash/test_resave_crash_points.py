"""Every crash point of a save that takes files over from the checkpoint before it: the power is cut at each call."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import HoldfastError
from holdfast.loading.pipeline import load
from holdfast.loading.records import LoadRequest
from holdfast.loading.strategy import LoadStrategy
from holdfast.ranks.base import Ranks
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.selector import Selector
from holdfast.runs.verify import verify
from holdfast.saving.pipeline import Saver
from holdfast.saving.request import SaveRequest
from holdfast.state.wrappers import PerRank
from holdfast.storage.base import Storage, StorageFeatures
from holdfast.testing import PowerLossStorage
from holdfast.testing.simulation import simulate_ranks
from tests.crash.runs import Part, Place

pytestmark = pytest.mark.deep
SEEDS = range(8)
STEP = 1
PARTS = (2, 3)
ASSETS = {"notes/a.txt": b"of the first save"}


@dataclass
class Witness:
    """The marks of the evaluation that the training was told to be committed, in order."""

    marks: list[int] = field(default_factory=list)
    ended: list[Any] = field(default_factory=list)


def components(mark: int, rank: int) -> dict[str, Any]:
    """The evaluation has changed, "mine" is as it was."""
    return {"evaluation": Part(mark), "mine": PerRank(Part(100 + rank))}


def run(storage: Storage, n: int) -> Witness:
    """Save a step on `n` ranks, and then its evaluation alone, twice."""
    witness = Witness()

    def note(mark: int) -> None:
        if mark not in witness.marks:
            witness.marks.append(mark)

    def rank(ranks: Ranks) -> None:
        saver = Saver(Catalog(storage), ranks, mode="sync")
        assets = ASSETS if ranks.rank == 0 else {}
        saver.save(STEP, lambda: SaveRequest(STEP, components(STEP, ranks.rank), assets=assets)).result()
        note(STEP)
        for mark in PARTS:
            request = SaveRequest(STEP, components(mark, ranks.rank), only=("evaluation",))
            saver.save_part(STEP, "evaluation", lambda request=request: request).result()
            note(mark)

    witness.ended = simulate_ranks(n, rank)
    return witness


def violations(storage: Storage, n: int, witness: Witness) -> list[str]:
    """What is wrong with a disk after the crash."""
    catalog = Catalog(storage)
    scan = catalog.scan()
    wrong = [f"{skipped}" for skipped in scan.damaged]
    for checkpoint in scan.checkpoints:
        wrong += [f"{checkpoint.folder}: {problem}" for problem in verify(checkpoint).problems]
    if wrong:
        return wrong
    if len(scan.checkpoints) < len(witness.marks):
        return [f"{witness.marks} were committed and {len(scan.checkpoints)} are there"]
    # The oldest first; one more than the training was told of may be there.
    return [
        text
        for mark, checkpoint in zip([STEP, *PARTS], reversed(scan.checkpoints), strict=False)
        for rank in range(n)
        for text in restored_wrongly(catalog, checkpoint, mark, rank, n)
    ]


def restored_wrongly(catalog: Catalog, checkpoint: Checkpoint, mark: int, rank: int, n: int) -> list[str]:
    live, expected = components(-1, -1), components(mark, rank)
    request = LoadRequest(Selector("folder", name=checkpoint.folder), live, LoadStrategy())
    try:
        load(request, catalog, Place(rank, n))
    except HoldfastError as error:
        return [f"{checkpoint.folder} cannot be restored: {error}"]
    equal = live["evaluation"] == expected["evaluation"] and live["mine"].component == expected["mine"].component
    return [] if equal else [f"{checkpoint.folder}, rank {rank} is not what was saved"]


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Memory if there is some: the power loss is simulated, so no real disk has to be waited for."""
    shared = Path("/dev/shm")
    folder = shared / f"holdfast-{tmp_path.name}-{id(tmp_path)}" if shared.is_dir() else tmp_path / "scratch"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


class WithoutClones(PowerLossStorage):
    """A disk of a file system without links: the bytes are copied."""

    @property
    def features(self) -> StorageFeatures:
        return replace(super().features, clone=None)


def keep_all(path: str) -> bool:
    return False


def power_cuts(
    n: int, scratch: Path, forget: Callable[[str], bool], door: type[PowerLossStorage] = PowerLossStorage
) -> Iterator[tuple[str, list[str]]]:
    """Cut the power at every call from the first save of a part on, look at several disks each."""
    whole = door(scratch / "whole", ignore_fsync_of=forget)
    assert run(whole, n).marks == [STEP, *PARTS]
    first = next(index for index, text in enumerate(whole.log, 1) if "step-000000001.2" in text)
    for point in range(first, whole.calls + 2):
        storage = door(scratch / f"{point}", crash_at=point, ignore_fsync_of=forget)
        witness = run(storage, n)
        operation = whole.log[point - 1] if point <= whole.calls else "the end"
        for seed in SEEDS:
            disk = scratch / f"disk-{point}-{seed}"
            yield (
                f"{n} ranks, cut at {point} ({operation}), seed {seed}",
                violations(storage.after_power_loss(seed, disk), n, witness),
            )
            shutil.rmtree(disk, ignore_errors=True)
        shutil.rmtree(scratch / f"{point}", ignore_errors=True)


@pytest.mark.slow
@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G2")
@pytest.mark.parametrize(
    ("n", "door"), [(1, PowerLossStorage), (2, PowerLossStorage), (1, WithoutClones)], ids=["one", "two", "copies"]
)
def test_a_power_cut_at_any_call_leaves_whole_checkpoints(n: int, door: Any, scratch: Path) -> None:
    points = 0
    for where, wrong in power_cuts(n, scratch, keep_all, door):
        assert wrong == [], where
        points += 1
    assert points > 30 * len(SEEDS)


def forget_first(place: str, count: int) -> Callable[[str], bool]:
    """Forget the first syncs of a folder."""
    seen = 0

    def forget(path: str) -> bool:
        nonlocal seen
        seen += path == place
        return path == place and seen <= count

    return forget


# The folder is synced after its own names and after those in the folders below it, and then after the manifest.
NEEDED = {
    "the folder before the manifest": ("step-000000001.2", 2),
    "the folder of the assets": ("step-000000001.2/assets/notes", 1),
}


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("sync", NEEDED)
def test_without_the_sync_of_the_names_of_clones_the_power_cuts_are_noticed(sync: str, scratch: Path) -> None:
    """The enumeration above can fail."""

    class Forgetful(PowerLossStorage):
        def __init__(self, scratch: Path, *, crash_at: int | None = None, ignore_fsync_of: Any = None) -> None:
            super().__init__(scratch, crash_at=crash_at, ignore_fsync_of=forget_first(*NEEDED[sync]))

    assert any(wrong for _, wrong in power_cuts(1, scratch, keep_all, Forgetful))
