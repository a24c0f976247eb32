"""`holdfast unlock`, in processes of its own: a free run, a dead holder, a live one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec import structs

import holdfast
from holdfast.runs.catalog import Catalog
from holdfast.runs.lease import Lease
from holdfast.runs.process_identity import this_process
from holdfast.storage.local.local import LocalStorage
from tests.unit.cli.scene import command


@pytest.fixture
def run(run_of_two: Path) -> Path:
    return run_of_two


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
