"""`holdfast doctor`, in processes of its own, on runs with real and with foreign records."""

from __future__ import annotations

import json
import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import holdfast
from holdfast.ondisk.decoding import encode_record
from holdfast.ondisk.manifest import encode_abandoned, is_abandoned
from holdfast.runs.claims import Claim
from holdfast.runs.lease import Lease
from holdfast.runs.process_identity import this_process
from holdfast.storage.local.local import LocalStorage
from tests.unit.cli.scene import command, save_steps


@pytest.fixture
def run(run_of_two: Path) -> Path:
    return run_of_two


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
    save_steps(run, 4)


def test_a_run_whose_record_states_a_newer_format_than_its_checkpoints_is_mended(run: Path) -> None:
    (run / "run.json").write_text('{"holdfast_format":3,"run_id":"x","created":"y"}')
    with pytest.raises(holdfast.UnsupportedFormatError, match="holdfast doctor RUN --fix"):
        save_steps(run, 3)
    assert findings(run, "--fix")["run.json"]["mended"]
    save_steps(run, 3)


def test_the_highest_number_of_all_is_removed(run: Path) -> None:
    (run / "lease" / f"{'9' * 15}.json").write_bytes(encode_record(Claim.of(this_process(), 60.0)))
    assert findings(run, "--fix")[f"lease/{'9' * 15}.json"]["mended"]
    save_steps(run, 3)


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
