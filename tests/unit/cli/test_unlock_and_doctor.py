"""`holdfast unlock` and `holdfast doctor`, in processes of their own, on runs with real and with foreign records."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

import holdfast
from holdfast.ondisk.decoding import encode_record
from holdfast.ondisk.manifest import encode_abandoned, is_abandoned
from holdfast.runs.catalog import Catalog
from holdfast.runs.claims import Claim
from holdfast.runs.lease import Lease
from holdfast.runs.process_identity import this_process
from holdfast.storage.local.local import LocalStorage


def command(*words: object, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", *map(str, words)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout or done.stderr


def save(run: Path, *steps: int) -> None:
    for step in steps:
        with holdfast.CheckpointManager(run, {"model": torch.nn.Linear(2, 2)}) as manager:
            manager.save(step)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("pristine") / "run"
    save(run, 1, 2)
    return run


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


# unlock


def test_a_run_that_nobody_holds_is_free_already(run: Path) -> None:
    assert "was free already" in command("unlock", run)
    assert json.loads(command("unlock", run, "--json"))["was_held_by"] is None


def test_a_run_whose_holder_is_gone_is_free_afterwards(run: Path) -> None:
    here = this_process()
    gone = structs.replace(here, process=2**31 - 1)
    Lease.acquire(LocalStorage(run), identity=gone)
    said = json.loads(command("unlock", run, "--json"))
    assert said == {"run": str(run), "free": True, "was_held_by": f"process {2**31 - 1} on {here.host}"}
    assert "was free already" in command("unlock", run)


def test_a_run_whose_holder_lives_is_refused_and_taken_only_by_force(run: Path) -> None:
    lease = Lease.acquire(LocalStorage(run))
    refused = command("unlock", run, code=2)
    assert f"process {os.getpid()} on" in refused
    lease.require()
    assert f"process {os.getpid()} on" in command("unlock", run, "--force")
    with pytest.raises(holdfast.RunInUseError):
        lease.require()


def test_an_attempt_that_was_open_when_a_run_was_taken_by_force_is_never_committed(run: Path) -> None:
    lease = Lease.acquire(LocalStorage(run))
    folder, _ = Catalog(LocalStorage(run)).attempts.claim(9, 1, lease=lease.number)
    command("unlock", run, "--force")
    assert folder in Catalog(LocalStorage(run)).scan().closed


def test_what_is_no_run_and_one_checkpoint_are_refused(run: Path, tmp_path: Path) -> None:
    assert "there is no run" in command("unlock", tmp_path / "nothing", code=2)
    assert "names one checkpoint" in command("unlock", run / "step-000000001", code=2)
    assert "is not there" in command("doctor", tmp_path / "nothing", code=2)


# doctor


def findings(run: Path, *options: str, code: int = 0) -> dict[str, Any]:
    said = json.loads(command("doctor", run, "--json", *options, code=code))
    return {found["path"]: found for found in said["findings"]}


def test_of_a_sound_run_nothing_is_found(run: Path) -> None:
    assert "nothing is damaged, unfinished or left over" in command("doctor", run)
    assert findings(run, "--fix") == {}


def hurt(run: Path) -> None:
    """One of each: what is damaged, what was left over, and what is not ours."""
    (run / "run.json").write_bytes(b"{")
    (run / "notes").mkdir()
    (run / "notes" / "step-000000002--000001.json").write_bytes(b"\xff")
    (run / "notes" / "step-000000077--000002.json").write_bytes(encode_record({"checkpoint": "0" * 64, "created": ""}))
    (run / "readers").mkdir()
    gone = structs.replace(this_process(), process=2**31 - 1)
    (run / "readers" / "step-000000002--x.json").write_bytes(encode_record(Claim.of(gone, 60.0)))
    (run / "lease" / f"{'9' * 20}.json").write_bytes(b"{}")
    shutil.copytree(run / "step-000000002", attempt := run / "step-000000003")
    (attempt / "manifest.json").unlink()
    record = json.loads((attempt / "attempt.json").read_bytes())
    for name in ("digest", "trainer", "trainer_birth"):
        record.pop(name, None)
    record.update(process=2**31 - 1, world_size=4)
    (attempt / "attempt.json").write_bytes(encode_record(record))
    (run / "best").symlink_to("step-000000088")
    (run / "notes.txt").write_text("mine")
    (run / "step-000000002" / "more.txt").write_text("mine")


def test_everything_that_is_damaged_unfinished_or_left_over_is_named(run: Path) -> None:
    hurt(run)
    found = findings(run, code=1)
    damaged = {path for path, finding in found.items() if finding["damage"]}
    assert damaged == {"run.json", "notes/step-000000002--000001.json", f"lease/{'9' * 20}.json"}
    assert set(found) - damaged == {
        "step-000000003",
        "notes/step-000000077--000002.json",
        "readers/step-000000002--x.json",
        "best",
        "notes.txt",
        "step-000000002/more.txt",
    }
    assert "is gone; missing: manifest.json, the files of 3 of 4 ranks (1, 2, 3)" in found["step-000000003"]["problem"]
    assert findings(run, code=1) == found, "to look changes nothing"


def test_what_is_safe_to_mend_is_mended_and_no_checkpoint_is_touched(run: Path) -> None:
    hurt(run)
    before = {path: path.read_bytes() for path in run.glob("step-00000000[12]/*")}
    found = findings(run, "--fix", code=1)
    assert {path for path, finding in found.items() if not finding["mended"]} == {
        "notes/step-000000002--000001.json",
        "notes.txt",
        "step-000000002/more.txt",
    }
    assert {path: path.read_bytes() for path in run.glob("step-00000000[12]/*")} == before
    assert json.loads((run / "run.json").read_bytes())["run_id"] == holdfast.resolve(run).head.run_id
    (run / "notes" / "step-000000002--000001.json").unlink()
    assert "2 findings, 0 of them damage" in command("doctor", run)
    save(run, 4)


def test_a_run_whose_record_states_a_newer_format_than_its_checkpoints_is_mended(run: Path) -> None:
    (run / "run.json").write_text('{"holdfast_format":3,"run_id":"x","created":"y"}')
    with pytest.raises(holdfast.UnsupportedFormatError, match="holdfast doctor RUN --fix"):
        save(run, 3)
    assert findings(run, "--fix")["run.json"]["mended"]
    save(run, 3)


def test_the_highest_number_of_all_is_removed(run: Path) -> None:
    (run / "lease" / f"{'9' * 15}.json").write_bytes(encode_record(Claim.of(this_process(), 60.0)))
    assert findings(run, "--fix")[f"lease/{'9' * 15}.json"]["mended"]
    save(run, 3)


def test_a_run_that_is_being_trained_is_examined_and_not_mended(run: Path) -> None:
    lease = Lease.acquire(LocalStorage(run))
    (run / "run.json").write_bytes(b"{")
    assert "run.json" in findings(run, code=1)
    assert f"process {os.getpid()} on" in command("doctor", run, "--fix", code=2)
    lease.require()
    assert (run / "run.json").read_bytes() == b"{"


def damaged_record(run: Path, kind: str, damage: str) -> Path:
    """Damage the record of a checkpoint, or of an attempt that is open or was given up, and return its path."""
    record = run / "step-000000002" / "attempt.json"
    if kind != "committed":
        shutil.copytree(run / "step-000000002", run / "step-000000003")
        record = run / "step-000000003" / "attempt.json"
        record.with_name("manifest.json").unlink()
        if kind != "open":
            give_up(record.parent, timedelta(days=2) if kind == "given up long ago" else timedelta(hours=1))
    data = record.read_bytes()
    record.unlink()
    if damage == "a link":
        record.symlink_to("/dev/zero")
    else:
        record.write_bytes(b"" if damage == "empty" else bytes([data[0], data[1] ^ 1]) + data[2:])
    return record


def give_up(folder: Path, ago: timedelta) -> None:
    (folder / "manifest.json").unlink(missing_ok=True)
    (folder / "manifest.json").write_bytes(encode_abandoned({"by": 1, "at": (datetime.now(UTC) - ago).isoformat()}))


@pytest.mark.parametrize("kind", ["given up long ago", "committed"])
@pytest.mark.parametrize("damage", ["empty", "one bit", "a link"])
def test_a_damaged_record_of_an_attempt_is_mended_and_then_nothing_is_found(run: Path, kind: str, damage: str) -> None:
    record = damaged_record(run, kind, damage)
    path = str(record.relative_to(run))
    lease = Lease.acquire(LocalStorage(run))
    with pytest.raises(holdfast.RunInUseError):
        holdfast.mend(run)
    assert os.path.lexists(record)
    lease.release()
    assert [found.mendable for found in holdfast.examine(run) if found.path == path] == [True]
    assert [found.mended for found in holdfast.mend(run) if found.path == path] == [True]
    assert holdfast.examine(run) == []
    assert [found.step for found in holdfast.checkpoints(run)] == [2, 1]
    assert holdfast.verify(run).ok


@pytest.mark.parametrize("kind", ["open", "given up"])
@pytest.mark.parametrize("damage", ["empty", "one bit", "a link"])
def test_an_attempt_with_a_damaged_record_stays_given_up_while_its_writer_may_live(
    run: Path, kind: str, damage: str
) -> None:
    """Its writer cannot be seen: without the word that it was given up, that process could commit it."""
    record = damaged_record(run, kind, damage)
    path = str(record.relative_to(run))
    for _ in range(2):
        (found,) = [found for found in holdfast.mend(run) if found.path == path]
        assert not found.mendable
        assert not found.mended
        assert "a day after" in found.remedy
        assert os.path.lexists(record)
        assert is_abandoned(record.with_name("manifest.json").read_bytes())
    give_up(record.parent, timedelta(days=2))
    holdfast.mend(run)
    assert holdfast.examine(run) == []
    assert not record.parent.exists()


@pytest.mark.parametrize("at", ["", "now", 7, None, "2001-01-01T00:00:00", "9999-01-01T00:00:00+00:00"])
def test_an_attempt_that_was_given_up_at_no_known_time_counts_as_given_up_just_now(run: Path, at: object) -> None:
    record = damaged_record(run, "given up", "empty")
    record.with_name("manifest.json").unlink()
    record.with_name("manifest.json").write_bytes(encode_abandoned({"by": 1, "at": at}))
    holdfast.mend(run)
    assert record.exists()
    assert is_abandoned(record.with_name("manifest.json").read_bytes())
