"""Every record around the checkpoints, damaged in every way, at every entry point: a sound checkpoint is always found.

Only errors of ours may come out, in bounded time; a restore gives the newest checkpoint; nothing committed is deleted.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import holdfast
from holdfast import CheckpointManager, HoldfastError, KeepLast
from holdfast.cli import app
from holdfast.errors import DamagedRecordError
from holdfast.identity import Identity
from holdfast.lease import Claim, Clock, Lease
from holdfast.records.attempts import AttemptRecord
from holdfast.records.notes import Note
from holdfast.records.wire import MAX_RECORD_BYTES, MAX_RECORD_DEPTH, decode_record, encode_record
from holdfast.storage.local import LocalStorage
from holdfast.testing import HostileRun, hostile_runs
from holdfast.testing.hostile import RECORDS
from tests.security.scene import Objects, within

SECONDS = 30.0
# A prime, so that the bits that are flipped have every place in their bytes.
STRIDE = 997


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Memory if there is some: hundreds of runs are copied, and no disk has to be waited for."""
    shared = Path("/dev/shm")
    folder = shared / f"holdfast-{tmp_path.name}-{id(tmp_path)}" if shared.is_dir() else tmp_path / "scratch"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, the older one with a tag that was given after the save."""
    run = tmp_path_factory.mktemp("pristine") / "run"
    for step in (1, 2):
        with CheckpointManager(run, Objects(step).components()) as manager:
            manager.save(step)
    with CheckpointManager(run, Objects(2).components()) as manager:
        manager.tag(1, "precious")
    return run


def attempted(hostile: HostileRun, name: str, work: Callable[[], Any]) -> Any:
    """What an entry point gives, or None for an error of ours. Anything else fails the test, and so does hanging."""
    try:
        return within(SECONDS, work)
    except HoldfastError:
        return None
    except BaseException as error:
        raise AssertionError(f"{hostile.description}: {name} ended with {error!r}") from error


def looked_at(hostile: HostileRun) -> None:
    """Every entry point that changes nothing; the newest checkpoint is found by all of them."""
    run = hostile.path
    objects = Objects(7)

    def restore() -> int:
        with CheckpointManager(run, objects.components()) as manager:
            return manager.restore().step

    found = {
        "restore": attempted(hostile, "restore", restore),
        "resolve": attempted(hostile, "resolve", lambda: holdfast.resolve(run).step),
        "peek": attempted(hostile, "peek", lambda: getattr(holdfast.peek(run), "step", None)),
        "checkpoints": attempted(hostile, "checkpoints", lambda: holdfast.checkpoints(run)[0].step),
        "verify": attempted(hostile, "verify", lambda: 2 if holdfast.verify(run).ok else 0),
        "is_restart": attempted(hostile, "is_restart", lambda: 2 if holdfast.is_restart(run) else 0),
    }
    assert found == dict.fromkeys(found, 2), hostile.description
    assert objects.ledger.state["mark"] == 2, hostile.description
    kept = attempted(hostile, "retention", lambda: holdfast.retention(run, KeepLast(1)))
    assert kept is None or all(decision.keep for decision in kept if decision.step == 2), hostile.description
    attempted(hostile, "examine", lambda: holdfast.examine(run))
    for command in (["ls"], ["show"], ["verify", "--all"], ["doctor"], ["doctor", "--json"]):
        done = attempted(hostile, command[0], lambda c=command: CliRunner().invoke(app, [c[0], str(run), *c[1:]]))
        assert done.exit_code in (0, 1, 2), f"{hostile.description}: {command}: {done.output}"
        assert "This is a bug" not in done.output, f"{hostile.description}: {command}: {done.output}"
        assert done.exit_code == 0 or command[0] == "doctor", f"{hostile.description}: {command}: {done.output}"


def written_to(hostile: HostileRun) -> None:
    """Every entry point that changes the run. A claim that cannot be decoded is taken over by force, because a minute
    for each of them is too long; that it is followed after a minute is tested with a clock that can be turned."""
    run = hostile.path
    if hostile.record == "claim":
        attempted(hostile, "unlock", lambda: holdfast.unlock(run, force=True))
    attempted(hostile, "unlock", lambda: holdfast.unlock(run))
    attempted(hostile, "mend", lambda: holdfast.mend(run))
    tag = CliRunner().invoke(app, ["tag", f"{run}@2", "kept"])
    assert tag.exit_code == 0, f"{hostile.description}: {tag.output}"

    def save() -> int:
        with CheckpointManager(run, Objects(3).components(), keep=KeepLast(1)) as manager:
            manager.restore()  # without it, what is there is another start's, and stays whatever it is
            manager.save(3)
            manager.prune()
        return holdfast.resolve(run).step

    saved = attempted(hostile, "save", save)
    # Nothing is done about a folder of somebody's in the place of a record; that it is in the way is an error of ours.
    assert saved == 3 or "run.json): a folder" in hostile.description, hostile.description
    steps = {found.step for found in holdfast.checkpoints(run)}
    assert {1, 2} <= steps, f"{hostile.description}: of what is tagged only {steps} are left"
    attempted(hostile, "prune", lambda: holdfast.prune(run, KeepLast(1)))
    assert steps <= {found.step for found in holdfast.checkpoints(run)}, hostile.description


@pytest.mark.guarantee("G3")
@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("kind", RECORDS)
def test_a_damaged_record_of_any_kind_stops_no_entry_point(pristine: Path, scratch: Path, kind: str) -> None:
    seen = 0
    for hostile in hostile_runs(pristine, scratch, records=[kind], bit_stride=STRIDE):
        seen += 1
        looked_at(hostile)
        written_to(hostile)
    assert seen >= (7 if kind == "name" else 22)


@pytest.mark.guarantee("G13")
def test_whatever_a_claim_has_become_its_run_is_followed_after_a_minute(pristine: Path, scratch: Path) -> None:
    for hostile in hostile_runs(pristine, scratch, records=["claim"], bit_stride=STRIDE):
        now = [0.0]
        clock = Clock(lambda now=now: now[0], lambda seconds, now=now: now.__setitem__(0, now[0] + seconds))
        assert Lease.acquire(LocalStorage(hostile.path), clock=clock).number > 1, hostile.description
        assert now[0] <= 70.0, hostile.description


# What a record says


CLAIM = Claim(Identity("host", "machine", 7, 8), "2026-01-01T00:00:00+00:00", 60.0, "f" * 32)
SAMPLES: list[Any] = [
    AttemptRecord(claim="c" * 32, host="host", machine="machine", process=7, birth=8, world_size=4, lease=3, trainer=6),
    Note(checkpoint="d" * 64, created="2026-01-01T00:00:00+00:00", tag="gold"),
    CLAIM,
]


@pytest.mark.parametrize("record", SAMPLES, ids=lambda record: type(record).__name__)
def test_no_flipped_bit_changes_what_a_record_says(record: Any) -> None:
    data = encode_record(record)
    assert decode_record(data, type(record), what="it") == record
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with suppress(DamagedRecordError):
            assert decode_record(bytes(damaged), type(record), what="it") == record, f"bit {bit}"


@pytest.mark.guarantee("G12")
@pytest.mark.parametrize("record", SAMPLES, ids=lambda record: type(record).__name__)
def test_a_record_of_an_older_version_which_has_no_digest_is_read(record: Any) -> None:
    assert decode_record(msgspec.json.encode(record) + b"\n", type(record), what="it") == record


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"\xff\xfe",
        b"[" * 1_000_000,
        b'{"checkpoint":"","created":"","metrics":{"x":' + b"[" * MAX_RECORD_DEPTH + b"]" * MAX_RECORD_DEPTH + b"}}",
        b'{"checkpoint":"\\ud800","created":""}',
        b'{"checkpoint":12345678901234567890,"created":""}',
        b" " * (MAX_RECORD_BYTES + 1),
    ],
    ids=range(8),
)
def test_what_is_no_record_is_one_kind_of_error(data: bytes) -> None:
    with pytest.raises(DamagedRecordError, match=r"a note (has|cannot)"):
        decode_record(data, Note, what="a note")


def test_nesting_up_to_the_bound_is_read_and_brackets_in_text_do_not_count() -> None:
    deep: Any = []
    for _ in range(MAX_RECORD_DEPTH - 3):
        deep = [deep]
    note = Note(checkpoint="d" * 64, created="", metrics={"deep": deep, "text": '[{"' * 1000})
    assert decode_record(encode_record(note), Note, what="it") == note


# What is done about damage


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("damage", [b"", b"{", b'{"checkpoint":"', b"\xff"])
def test_a_checkpoint_whose_tag_cannot_be_read_is_kept(pristine: Path, scratch: Path, damage: bytes) -> None:
    run = scratch / "run"
    shutil.copytree(pristine, run, symlinks=True)
    (note,) = (run / "notes").iterdir()
    note.write_bytes(damage)
    with CheckpointManager(run, Objects(3).components(), keep=KeepLast(1)) as manager:
        manager.restore()
        manager.save(3)
        decisions = {decision.step: decision for decision in manager.prune()}
    assert [found.step for found in holdfast.checkpoints(run)] == [3, 1]
    assert "what was noted on it cannot be read" in decisions[1].reasons[0]


@pytest.mark.parametrize("damage", [b"", b"{", b"\0" * 100, b'{"holdfast_format":1,"run_id":"","created":""}', None])
def test_a_record_of_the_run_that_is_damaged_or_lost_is_written_again_with_the_same_id(
    pristine: Path, scratch: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    run = scratch / "run"
    shutil.copytree(pristine, run, symlinks=True)
    wanted = json.loads((run / "run.json").read_bytes())["run_id"]
    (run / "run.json").unlink()
    if damage is not None:
        (run / "run.json").write_bytes(damage)
    with CheckpointManager(run, Objects(3).components()) as manager:
        manager.save(3)
    assert json.loads((run / "run.json").read_bytes())["run_id"] == wanted
    assert holdfast.resolve(run).head.run_id == wanted
    assert ("the record of the run is damaged" in caplog.text) is (damage is not None)
