"""Power cuts under real file systems: the writes below ext4, XFS and btrfs are logged, cut, and mounted again."""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.testing import run_ranks as run_new_ranks, values
from tests.crash.image_training import MODES, STEPS, Judge, go_on, train
from tests.crash.images import FILE_SYSTEMS, Cut, Disk, FileSystem, Recording, cuts, recording, scratch, why_not
from tests.ranks import run_ranks
from tests.sizes import DEEP

STATES = 300 if DEEP else 100
CONTROL_STATES = 40
# Every so many states the run is not only looked at but resumed, with one more save.
RESUMED_EVERY = 25
KINDS = list(FILE_SYSTEMS) if DEEP else ["ext4"]


@pytest.fixture(scope="module")
def kinds() -> list[FileSystem]:
    """The file systems that can be made and mounted here."""
    usable = [FILE_SYSTEMS[name] for name in KINDS if not why_not(FILE_SYSTEMS[name])]
    if not usable:
        pytest.skip("; ".join(sorted({why_not(FILE_SYSTEMS[name]) for name in KINDS})))
    return usable


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with scratch() as folder:
        yield folder


@pytest.fixture(scope="module")
def recorded(kinds: list[FileSystem], folder: Path) -> Recording:
    """What a training of one process, and then one of two ranks, writes to every file system."""
    with recording(kinds, _new(folder / "recording")) as recorded:
        values(run_ranks(1, train, 1, _places(recorded), backend=None))
        values(run_ranks(2, train, 2, _places(recorded)))
    return recorded


@pytest.fixture(scope="module")
def recorded_without_fsync(kinds: list[FileSystem], folder: Path) -> Recording:
    """The same of one process in which every fsync says that it is done and does nothing."""
    shim = _compiled(folder, "int fsync(int f) { return 0; } int fdatasync(int f) { return 0; }")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LD_PRELOAD", str(shim))
        with recording(kinds, _new(folder / "control")) as recorded:
            # New interpreters: the server of the others was started without the shim.
            values(run_new_ranks(1, train, 1, _places(recorded), backend=None))
    return recorded


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _places(recorded: Recording) -> list[tuple[str, str]]:
    return [(str(recorded.mount(kind)), str(recorded.marks(kind))) for kind in recorded.kinds]


def _compiled(folder: Path, source: str) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler to make fsync do nothing")
    shim = folder / "no-fsync.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-o", str(shim), "-"], input=source.encode(), check=True)
    return shim


def _usable(name: str) -> FileSystem:
    if reason := why_not(FILE_SYSTEMS[name]):
        pytest.skip(reason)
    return FILE_SYSTEMS[name]


def _judged(recorded: Recording, kind: FileSystem, states: int) -> Iterator[tuple[Cut, list[str]]]:
    """Each state after a cut, and what is wrong with it."""
    log = recorded.log_of(kind)
    disk, judge = Disk(kind, recorded.empty(kind), log, recorded.folder / f"{kind.name}.cut"), Judge()
    with disk.attached() as device:
        for cut in cuts(log, states):
            with disk.after(cut, device) as (mounted, marks):
                yield cut, judge.violations(mounted, marks)


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("name", KINDS)
def test_a_power_cut_under_a_real_file_system_loses_nothing_that_was_committed(
    name: str, recorded: Recording, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    judged = list(_judged(recorded, _usable(name), STATES))
    assert [(cut, wrong) for cut, wrong in judged if wrong] == []
    assert len({cut for cut, _ in judged}) >= STATES


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("name", KINDS)
def test_a_run_is_resumed_and_saved_again_after_a_power_cut_under_a_real_file_system(
    name: str, recorded: Recording, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    kind = _usable(name)
    log = recorded.log_of(kind)
    disk = Disk(kind, recorded.empty(kind), log, recorded.folder / f"{kind.name}.resumed")
    with disk.attached() as device:
        for cut in cuts(log, STATES)[::RESUMED_EVERY]:
            with disk.after(cut, device, flags=0) as (mounted, _):
                assert go_on(mounted) == [], cut


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("name", KINDS)
def test_without_fsync_the_power_cuts_under_a_real_file_system_are_noticed(
    name: str, recorded_without_fsync: Recording, caplog: pytest.LogCaptureFixture
) -> None:
    """The replay above can fail: a training whose fsyncs do nothing is told of saves that a cut then loses."""
    caplog.set_level(logging.ERROR)
    kind = _usable(name)
    marked = [entry for entry in recorded_without_fsync.log_of(kind) if entry.data.startswith(b"committed")]
    assert len(marked) == len(STEPS) * len(MODES)
    wrong = [text for _, texts in _judged(recorded_without_fsync, kind, CONTROL_STATES) for text in texts[:1]]
    assert len(wrong) >= CONTROL_STATES // 2
