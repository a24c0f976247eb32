"""What cannot be read now is not damaged: it is tried again, then an error, and never an older checkpoint instead."""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app
from holdfast.errors import StorageError
from holdfast.ondisk import paths
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import FlakyStorage, MemoryStorage

pytestmark = pytest.mark.slow

NEWEST = "step-000000003/manifest.json"
READS = ("open", "read", "entries", "read_into")


def parts(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 4))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def manager_of(storage: Any, state: dict[str, Any], **more: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager("run", state, storage=storage, mode="sync", rng=False, **more)


def bits(state: dict[str, Any]) -> list[torch.Tensor]:
    moments = state["optimizer"].state_dict()["state"]
    return [
        *(value.detach().clone() for value in state["model"].state_dict().values()),
        *(torch.as_tensor(moments[place][name]).clone() for place in moments for name in sorted(moments[place])),
    ]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def trained(storage: Any, steps: int = 3) -> list[torch.Tensor]:
    """Fill a run with checkpoints of steps 1, 2, ..., and give the bits of the newest."""
    state = parts(0)
    with manager_of(storage, state) as manager:
        for step in range(1, steps + 1):
            state["model"](torch.ones(3, 40)).sum().backward()
            state["optimizer"].step()
            manager.save(step, metrics={"loss": 1.0 / step})
        manager.tag(1, "first")
    return bits(state)


def contents(memory: MemoryStorage) -> dict[str, bytes]:
    """All that a run holds, but for who writes to it."""
    return {key: value for key, value in memory._values.items() if not key.startswith(f"{paths.LEASE}/")}


# A restore


def reads_of_a_restore(memory: MemoryStorage) -> list[str]:
    flaky = FlakyStorage(memory)
    with manager_of(flaky, parts(1)) as manager:
        flaky.reads.clear()
        assert manager.restore().step == 3
    return sorted(set(flaky.reads))


@pytest.mark.guarantee("G3")
def test_every_read_of_a_restore_may_fail_once_and_the_newest_is_restored_to_the_bit() -> None:
    memory = MemoryStorage()
    newest = trained(memory)
    names = reads_of_a_restore(memory)
    assert {name.split()[0] for name in names} == set(READS)
    for code in (errno.EIO, errno.ESTALE):
        for name in names:
            state = parts(1)
            with manager_of(FlakyStorage(memory, name, errno=code), state) as manager:
                result = manager.restore()
            assert (result.step, result.rejected) == (3, ()), name
            assert equal(bits(state), newest), name


@pytest.mark.guarantee("G3")
@pytest.mark.guarantee("G7")
def test_a_read_of_a_restore_that_fails_for_ever_raises_and_changes_nothing() -> None:
    memory = MemoryStorage()
    trained(memory)
    before = contents(memory)

    def restore(name: str, code: int) -> tuple[str, str]:
        state = parts(1)
        untouched = bits(state)
        with manager_of(FlakyStorage(memory, name, times=None, errno=code), state) as manager:
            with pytest.raises(StorageError) as caught:
                manager.restore()
        assert equal(bits(state), untouched), name
        assert caught.value.errno == code
        return name, str(caught.value)

    # A place that cannot be read fails every read that touches it, so all reads of a file fail together.
    names = {re.sub(r"(read_into \S+) .*", r"\1 *", name) for name in reads_of_a_restore(memory)}
    names.discard(f"entries {paths.READERS}")  # read to clean up after the restore, which must not fail for that
    names.discard(f"entries {paths.LEASE}")  # who writes to the run; what is committed can be read without it
    cases = [(name, code) for name in sorted(names) for code in (errno.EIO, errno.EACCES)]
    with ThreadPoolExecutor(16) as pool:  # they wait, most of the time
        for name, message in pool.map(lambda case: restore(*case), cases):
            key = name.split()[1]
            assert (key if key != "/" else "memory://") in message
    assert contents(memory) == before


def test_a_lease_that_cannot_be_read_stops_no_restore_and_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    memory = MemoryStorage()
    newest = trained(memory)
    state = parts(1)
    flaky = FlakyStorage(memory, f"entries {paths.LEASE}", times=None, errno=errno.EACCES)
    with manager_of(flaky, state) as manager:
        assert manager.restore().step == 3
    assert equal(bits(state), newest)
    assert "whether a writer is still saving to this run is not known" in caplog.text


@pytest.mark.guarantee("G3")
@pytest.mark.parametrize("verify", ["full", "quick", "off"])
def test_an_error_while_live_tensors_are_filled_says_that_they_may_be_overwritten(verify: Any) -> None:
    memory = MemoryStorage()
    trained(memory)
    state = parts(1)
    flaky = FlakyStorage(memory)

    class Late:
        """Fails every read of a tensor file from the moment on when its state is restored."""

        def state_dict(self) -> dict[str, int]:
            return {"n": 0}

        def load_state_dict(self, state: dict[str, int]) -> None:
            flaky.times, flaky.fail_on = None, "read_into *"

    with manager_of(memory, {**state, "late": Late()}) as manager:
        manager.save(4)
    with manager_of(flaky, {**state, "late": Late()}, verify=verify) as manager:
        with pytest.raises(StorageError, match=r"live tensors may have been overwritten in part.*restore again"):
            manager.restore()


# Every way to look at a run


@pytest.mark.guarantee("G11")
def test_no_way_to_look_at_a_run_takes_an_older_checkpoint_for_an_unreadable_newest() -> None:
    memory = MemoryStorage()
    trained(memory)
    looks = {
        "peek": lambda run: holdfast.peek(run),
        "resolve": lambda run: holdfast.resolve(run),
        "best": lambda run: holdfast.resolve(run, "best:loss"),
        "tag": lambda run: holdfast.resolve(run, "first"),
        "step": lambda run: holdfast.resolve(run, 3),
        "folder": lambda run: holdfast.resolve(run, "step-000000003"),
        "checkpoints": lambda run: holdfast.checkpoints(run),
        "verify": lambda run: holdfast.verify(run),
        "retention": lambda run: holdfast.retention(run, holdfast.KeepLast(1)),
        "prune": lambda run: holdfast.prune(run, holdfast.KeepLast(1)),
    }
    before = contents(memory)

    def look(name: str) -> Any:
        with pytest.raises(StorageError) as caught:
            looks[name](FlakyStorage(memory, f"* {NEWEST}*", times=None))
        return str(caught.value)

    with ThreadPoolExecutor(16) as pool:
        for message in pool.map(look, looks):
            assert NEWEST in message
    assert contents(memory) == before


def test_an_older_step_that_was_asked_for_by_name_is_found_beside_an_unreadable_one() -> None:
    memory = MemoryStorage()
    trained(memory)
    flaky = FlakyStorage(memory, f"* {NEWEST}*", times=None, errno=errno.EACCES)
    assert holdfast.resolve(flaky, 2).step == 2
    assert holdfast.is_restart(flaky)


@pytest.mark.guarantee("G11")
@pytest.mark.parametrize("fail_on", ["entries /", f"* {NEWEST}*"])
def test_a_run_that_cannot_be_listed_or_read_is_no_empty_run(fail_on: str) -> None:
    memory = MemoryStorage()
    trained(memory)
    for key in contents(memory):
        if not key.startswith("step-000000003"):
            memory.delete(key)
    flaky = FlakyStorage(memory, fail_on, times=None, errno=errno.EACCES)
    for look in (holdfast.is_restart, holdfast.peek, holdfast.checkpoints):
        with pytest.raises(StorageError):
            look(flaky)
    with manager_of(flaky, parts(1)) as manager:
        with pytest.raises(StorageError):
            manager.restore()
        with pytest.raises(StorageError):
            manager.should_load()


@pytest.mark.guarantee("G4")
def test_a_note_that_cannot_be_read_takes_no_tag_away() -> None:
    memory = MemoryStorage()
    trained(memory)
    flaky = FlakyStorage(memory, "* notes/*", times=None, errno=errno.EACCES)
    with pytest.raises(StorageError, match="notes/"):
        holdfast.prune(flaky, holdfast.KeepLast(1))
    assert [found.step for found in holdfast.checkpoints(memory)] == [3, 2, 1]


def test_verify_says_that_a_file_cannot_be_read_and_not_that_it_is_damaged() -> None:
    memory = MemoryStorage()
    trained(memory)
    for name in ("read_into step-000000003/*.safetensors*", "open step-000000003/shared.json"):
        with pytest.raises(StorageError, match="EACCES"):
            holdfast.verify(FlakyStorage(memory, name, times=None, errno=errno.EACCES))


# A run in its life


@pytest.mark.guarantee("G4")
def test_cleanup_is_skipped_while_a_manifest_cannot_be_read_and_made_up_for_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = MemoryStorage()
    state = parts(0)
    flaky = FlakyStorage(memory, times=None, errno=errno.EACCES)
    with manager_of(flaky, state, keep=holdfast.KeepLast(1)) as manager:
        manager.save(1)
        manager._run.housekeeper.wait()
        flaky.fail_on = "* step-000000001/manifest.json*"
        manager.save(2)
        manager._run.housekeeper.wait()
        assert [found.step for found in holdfast.checkpoints(memory)] == [2, 1]
        assert "cleanup failed and will be retried after the next save" in caplog.text
        flaky.fail_on = None
        manager.save(3)
        manager._run.housekeeper.wait()
        assert [found.step for found in holdfast.checkpoints(memory)] == [3]


@pytest.mark.guarantee("G4")
def test_what_is_newer_than_the_one_resumed_from_stays_until_somebody_prunes() -> None:
    memory = MemoryStorage()
    trained(memory, steps=4)
    # And so it does in the process after that, which resumes from the line that goes on.
    for selector, steps in ((2, (12, 22)), ("latest", (32, 42))):
        with manager_of(memory, parts(1), keep=holdfast.KeepLast(1)) as manager:
            manager.restore(selector)
            for step in steps:
                manager.save(step)
            manager._run.housekeeper.wait()
            reasons = {decision.step: decision.reasons for decision in manager.retention()}
            assert "went back" in reasons[4][0]
            assert "holdfast prune" in reasons[4][0]
    assert [found.step for found in holdfast.checkpoints(memory)] == [42, 4, 3, 1], "step 1 has a tag"
    holdfast.prune(memory, holdfast.KeepLast(1))
    assert [found.step for found in holdfast.checkpoints(memory)] == [42, 1]


@pytest.mark.guarantee("G4")
def test_a_damaged_newest_survives_the_saves_after_the_fall_back() -> None:
    memory = MemoryStorage()
    trained(memory)
    sound = contents(memory)["step-000000003/manifest.json"]
    memory.delete("step-000000003/manifest.json")
    memory.put("step-000000003/manifest.json", sound.replace(b'"step":3', b'"step":9'))
    state = parts(1)
    with manager_of(memory, state, keep=holdfast.KeepLast(1)) as manager:
        result = manager.restore()
        assert result.step == 2
        assert "step-000000003" in result.rejected[0]
        for step in (5, 6, 7):
            manager.save(step)
        manager._run.housekeeper.wait()
    memory.delete("step-000000003/manifest.json")
    memory.put("step-000000003/manifest.json", sound)
    assert holdfast.verify(memory, 3).ok, "its bytes are all still there"


# The command line


@contextmanager
def unreadable(run: Path, file: Path) -> Iterator[None]:
    """Forbid reading one file of a run, also where the tests run as root, who may read everything."""
    for path in (run.parent, run, *run.rglob("*")):
        path.chmod(path.stat().st_mode | 0o777)
    file.chmod(0)
    was = os.geteuid()
    os.seteuid(was or 65534)
    try:
        yield
    finally:
        os.seteuid(was)
        file.chmod(0o666)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user may enter; those above pytest's own are closed to others."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_the_command_line_lists_what_cannot_be_read_apart_from_damage(open_folder: Path) -> None:
    tmp_path = open_folder
    trained(LocalStorage(tmp_path / "run"))
    loop = tmp_path / "run" / "step-000000003" / "manifest.json"
    text = loop.read_text()
    runner = CliRunner()
    for command in (["ls"], ["verify"], ["show"], ["prune", "--keep-last", "1"]):  # imports everything
        assert runner.invoke(app, [command[0], str(tmp_path / "run"), *command[1:]]).exit_code == 0
    with unreadable(tmp_path / "run", loop):
        listed = runner.invoke(app, ["ls", str(tmp_path / "run"), "--json"])
        assert listed.exit_code == 2, listed.output
        answer = json.loads(listed.stdout)
        assert [one["step"] for one in answer["checkpoints"]] == [2, 1]
        assert [one["folder"] for one in answer["unreadable"]] == ["step-000000003"]
        assert answer["damaged"] == []
        assert not any(one["latest"] for one in answer["checkpoints"]), "nobody knows which is the latest"
        shown = runner.invoke(app, ["ls", str(tmp_path / "run")])
        assert shown.exit_code == 2
        assert "cannot be read" in shown.stdout
        verified = runner.invoke(app, ["verify", str(tmp_path / "run"), "--all", "--json"])
        assert verified.exit_code == 2, verified.output
        assert [one["ok"] for one in json.loads(verified.stdout)["checkpoints"]] == [False, True, True]
        for command in (["show"], ["verify"], ["prune", "--keep-last", "1", "--yes"]):
            refused = runner.invoke(app, [command[0], str(tmp_path / "run"), *command[1:]])
            assert refused.exit_code == 2, refused.output
            assert "manifest.json" in refused.output
    assert loop.read_text() == text
    assert [found.step for found in holdfast.checkpoints(tmp_path / "run")] == [3, 2, 1]
