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
from holdfast.errors import DamagedRecordError, RunInUseError
from holdfast.ondisk.decoding import MAX_RECORD_BYTES, MAX_RECORD_DEPTH, decode_record, encode_record
from holdfast.runs.annotations import Note
from holdfast.runs.attempts import MAX_LEASE_NUMBER, MAX_PLAUSIBLE_LEASE_NUMBER, AttemptRecord
from holdfast.runs.claims import Claim, claim_names
from holdfast.runs.clock import Clock
from holdfast.runs.lease import Lease
from holdfast.runs.process_identity import Identity, this_process
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import HostileRun, hostile_runs
from holdfast.testing.hostile import RECORDS
from tests.security.scene import Objects, within
from tests.sizes import DEEP, pairs

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


def looked_at(hostile: HostileRun, *, commands: bool) -> None:
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
    for command in (["ls"], ["show"], ["verify", "--all"], ["doctor"], ["doctor", "--json"]) if commands else ():
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
    assert saved == 3, hostile.description
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
        if DEEP or seen % 3 == 1:
            looked_at(hostile, commands=DEEP or seen == 1)
            written_to(hostile)
    assert seen >= {"name": 10, "place": 12}.get(kind, 22)


@pytest.mark.guarantee("G13")
def test_whatever_a_claim_has_become_its_run_is_followed_after_a_minute(pristine: Path, scratch: Path) -> None:
    for hostile in hostile_runs(pristine, scratch, records=["claim"], bit_stride=STRIDE):
        now = [0.0]
        clock = Clock(lambda now=now: now[0], lambda seconds, now=now: now.__setitem__(0, now[0] + seconds))
        assert Lease.acquire(LocalStorage(hostile.path), clock=clock).number > 1, hostile.description
        assert now[0] <= 70.0, hostile.description


NUMBERS = (MAX_PLAUSIBLE_LEASE_NUMBER + 1, MAX_LEASE_NUMBER - 1, MAX_LEASE_NUMBER, 10**15 - 2, 10**15 - 1)


def state_number(run: Path, where: str, number: int) -> None:
    """Make a claim or the record of an attempt state a lease number. Its writer is seen to be gone."""
    here = this_process()
    gone = Identity(here.host, here.machine, 2**31 - 1, 1)
    if where == "claim":
        (run / f"lease/{number}.json").write_bytes(encode_record(Claim(gone, "2026-01-01T00:00:00+00:00", 1.0)))
    elif where == "folder":
        (run / f"lease/{number}.json/inside").mkdir(parents=True)
        (run / f"lease/{number}.released").touch()
    else:
        folder = run / ("step-000000002" if where == "committed attempt" else "step-000000009")
        folder.mkdir(exist_ok=True)
        # Not checked on the way: what a newer or a hostile writer states need not be what this version accepts.
        (folder / "attempt.json").write_bytes(encode_record({"claim": "c", "lease": number}))


def refusal(run: Path, step: int) -> str:
    """Save, and return the words of the error, if there is one."""
    try:
        with CheckpointManager(run, Objects(step).components()) as manager:
            manager.save(step)
    except HoldfastError as error:
        return str(error)
    return ""


@pytest.mark.guarantee("G13")
@pytest.mark.parametrize(("number", "where"), pairs(NUMBERS, ["claim", "folder", "attempt", "committed attempt"]))
def test_a_lease_number_at_the_limit_is_removed_by_the_command_that_the_error_names(
    pristine: Path, scratch: Path, where: str, number: int
) -> None:
    run = scratch / "run"
    shutil.copytree(pristine, run, symlinks=True)
    state_number(run, where, number)
    for step in (3, 4, 5):
        refused = refusal(run, step)
        if refused:
            assert "`holdfast doctor RUN --fix`" in refused
            fixed = CliRunner().invoke(app, ["doctor", str(run), "--fix"])
            assert fixed.exit_code == 0, fixed.output
            assert refusal(run, step) == ""
    assert holdfast.resolve(run).step == 5
    holdfast.mend(run)
    assert max(claim_names(LocalStorage(run))) < 100, "the numbers count from where they were"
    assert {1, 2} < {found.step for found in holdfast.checkpoints(run)}


@pytest.mark.guarantee("G13")
def test_a_process_that_counts_on_from_such_a_number_keeps_its_claim(pristine: Path, scratch: Path) -> None:
    run = scratch / "run"
    shutil.copytree(pristine, run, symlinks=True)
    state_number(run, "claim", MAX_PLAUSIBLE_LEASE_NUMBER + 1)
    lease = Lease.acquire(LocalStorage(run))
    with pytest.raises(RunInUseError):
        holdfast.mend(run)
    lease.require()
    lease.release()


@pytest.mark.parametrize("folder", ["lease", "readers"])
def test_what_has_the_name_of_a_folder_is_named_and_set_aside_with_all_that_is_in_it(
    pristine: Path, scratch: Path, folder: str
) -> None:
    run = scratch / "run"
    shutil.copytree(pristine, run, symlinks=True)
    shutil.rmtree(run / folder, ignore_errors=True)
    (run / folder).write_text("precious")
    with pytest.raises(HoldfastError, match="`holdfast doctor RUN --fix`"):
        holdfast.prune(run, KeepLast(1))
    (found,) = (finding for finding in holdfast.mend(run) if finding.path == folder)
    assert (found.damage, found.mended) == (True, True)
    (aside,) = run.glob(f"set-aside-*.{folder}")
    assert aside.read_text() == "precious"
    holdfast.prune(run, KeepLast(1))


def test_a_folder_in_the_place_of_the_record_of_a_run_is_set_aside_by_a_save(pristine: Path, scratch: Path) -> None:
    run = scratch / "run"
    shutil.copytree(pristine, run, symlinks=True)
    (run / "run.json").unlink()
    (run / "run.json").mkdir()
    (run / "run.json" / "inside").write_text("precious")
    with CheckpointManager(run, Objects(3).components()) as manager:
        manager.save(3)
    (inside,) = run.glob("set-aside-*.run.json/inside")
    assert inside.read_text() == "precious"


def test_a_file_in_the_place_of_the_notes_is_named_and_keeps_every_checkpoint(pristine: Path, scratch: Path) -> None:
    run = scratch / "run"
    shutil.copytree(pristine, run, symlinks=True)
    shutil.rmtree(run / "notes")
    (run / "notes").touch()
    (found,) = (finding for finding in holdfast.mend(run) if finding.path == "notes")
    assert (found.damage, found.mended) == (True, False)
    assert "by hand" in found.remedy
    with suppress(HoldfastError):
        holdfast.prune(run, KeepLast(1))
    assert [found.step for found in holdfast.checkpoints(run)] == [2, 1]


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
