"""Surroundings that hide, forbid or mislead: /proc with hidepid, another user, containers, a hostile current folder.

What cannot be seen is not dead: a writer that is hidden is watched for its heartbeat, and never taken for another.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast.runs.lease import Lease
from holdfast.runs.process_identity import is_alive, this_process
from holdfast.storage.local.local import LocalStorage
from tests.security.scene import Objects

NOBODY = 65534
SOURCE = Path(holdfast.__file__).parents[1]
# Everything is imported before the user is changed: another user may not be able to read the interpreter's own files.
AS_NOBODY = f"""
import json, os, sys
sys.path.insert(0, {str(SOURCE)!r})
import msgspec
from holdfast.runs.catalog import Catalog
from holdfast.errors import HoldfastError
from holdfast.runs.process_identity import Identity, is_alive, this_process
from holdfast.runs.clock import Clock
from holdfast.runs.lease import Lease
from holdfast.storage.local.local import LocalStorage

def become_nobody():
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})

def show(**values):
    print(json.dumps(values), flush=True)
"""


def can(*words: str) -> bool:
    try:
        return subprocess.run(words, capture_output=True, timeout=300, check=False).returncode == 0
    except OSError:
        return False


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
needs_hidepid = pytest.mark.skipif(
    os.geteuid() != 0 or not can("unshare", "-m", "sh", "-c", "mount -t proc -o hidepid=2 proc /proc"),
    reason="no private mount of /proc is allowed here",
)
needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not can("unshare", "--pid", "--uts", "--fork", "--mount-proc", "true"),
    reason="no namespaces of process numbers are allowed here",
)


@pytest.fixture
def run() -> Iterator[Path]:
    """A folder that every user may enter and change, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-"))
    folder.chmod(0o777)
    run = folder / "run"
    run.mkdir()
    run.chmod(0o777)
    yield run
    shutil.rmtree(folder)


def told(script: str, *front: str, words: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a script shows, started by the command `front`."""
    done = subprocess.run(
        [*front, sys.executable, "-P", "-c", AS_NOBODY + script, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def behind_hidepid(script: str, *words: str) -> dict[str, Any]:
    mount = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
    return told(script, "unshare", "-m", "sh", "-c", mount, "sh", words=words)


LOOK = """
become_nobody()
holder = msgspec.json.decode(sys.argv[1], type=Identity)
show(alive=is_alive(holder), visible=os.path.exists(f"/proc/{holder.process}"), machine=this_process().machine)
"""


@needs_hidepid
@pytest.mark.guarantee("G13")
def test_a_live_process_that_proc_hides_is_unknown_and_not_dead() -> None:
    me = this_process()
    seen = behind_hidepid(LOOK, msgspec.json.encode(me).decode())
    assert seen == {"alive": None, "visible": False, "machine": me.machine}


@needs_hidepid
@pytest.mark.guarantee("G13")
def test_a_process_that_is_gone_is_dead_behind_hidepid_too() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    gone = msgspec.structs.replace(this_process(), process=child.pid, birth=1)
    child.communicate(b"\n")
    assert behind_hidepid(LOOK, msgspec.json.encode(gone).decode())["alive"] is False


ACQUIRE = """
become_nobody()
try:
    show(number=Lease.acquire(LocalStorage(sys.argv[1])).number)
except HoldfastError as error:
    show(error=type(error).__name__, process=error.process)
"""


@needs_hidepid
@pytest.mark.guarantee("G13")
def test_a_writer_of_another_user_that_proc_hides_keeps_its_run(run: Path) -> None:
    lease = Lease.acquire(LocalStorage(run), timeout_seconds=6.0)
    (run / "lease").chmod(0o777)
    assert behind_hidepid(ACQUIRE, str(run)) == {"error": "RunInUseError", "process": os.getpid()}
    lease.require()
    lease.release()
    assert behind_hidepid(ACQUIRE, str(run)) == {"number": 2}


@needs_root
@pytest.mark.guarantee("G13")
def test_a_writer_of_another_user_that_is_seen_keeps_its_run(run: Path) -> None:
    lease = Lease.acquire(LocalStorage(run))
    assert told(ACQUIRE, words=(str(run),)) == {"error": "RunInUseError", "process": os.getpid()}
    lease.release()


READ = """
import holdfast, torch
from tests.security.scene import Objects
objects = Objects(7)
for name in holdfast.__all__:  # all is imported then
    getattr(holdfast, name)
with holdfast.CheckpointManager(sys.argv[1], Objects(8).components()) as warm:
    pass
become_nobody()
with holdfast.CheckpointManager(sys.argv[1], objects.components()) as manager:
    restored = manager.restore().step
    try:
        manager.save(9)
        manager.wait()
        saved = "yes"
    except HoldfastError as error:
        saved = type(error).__name__
found = [checkpoint.step for checkpoint in holdfast.checkpoints(sys.argv[1])]
examined = [finding.path for finding in holdfast.examine(sys.argv[1])]
show(restored=restored, mark=objects.ledger.state["mark"], saved=saved, found=found, examined=examined,
     verified=holdfast.verify(sys.argv[1]).ok)
"""


@needs_root
def test_a_run_that_may_only_be_read_is_restored_and_a_save_says_why_not(run: Path) -> None:
    with holdfast.CheckpointManager(run, Objects(5).components()) as manager:
        manager.save(5)
    run.chmod(0o755)
    script = f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n{READ}"
    said = told(script, words=(str(run),))
    assert said == {
        "restored": 5,
        "mark": 5,
        "saved": "StorageError",
        "found": [5],
        "examined": [],
        "verified": True,
    }


# Containers


CONTAINER = """
if len(sys.argv) > 1:
    other = msgspec.json.decode(sys.argv[1], type=Identity)
    here = this_process()
    show(alive=is_alive(other), same_host=other.host == here.host, same_number=other.process == here.process)
else:
    show(me=msgspec.to_builtins(this_process()), own=is_alive(this_process()))
    sys.stdin.read()
"""
IN_CONTAINER = ("unshare", "--pid", "--uts", "--fork", "--mount-proc")


@needs_namespaces
@pytest.mark.guarantee("G13")
def test_containers_with_one_host_name_and_the_same_process_numbers_are_not_taken_for_each_other() -> None:
    words = [*IN_CONTAINER, sys.executable, "-P", "-c", AS_NOBODY + CONTAINER]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        said = json.loads(first.stdout.readline())
        assert said["own"] is True
        seen = told(CONTAINER, *IN_CONTAINER, words=(json.dumps(said["me"]),))
        first.communicate("")
    assert seen == {"alive": None, "same_host": True, "same_number": True}


@needs_namespaces
@pytest.mark.guarantee("G13")
def test_with_the_proc_of_another_namespace_nobody_is_recognised() -> None:
    """The first process there has the number 1, and so has another one that /proc shows."""
    script = "show(machine=this_process().machine, birth=this_process().birth, alive=is_alive(this_process()))"
    assert told(script, "unshare", "--pid", "--fork") == {"machine": "", "birth": None, "alive": None}


def test_a_process_whose_start_time_is_not_known_is_not_dead() -> None:
    assert is_alive(msgspec.structs.replace(this_process(), birth=None)) is None


# A hostile current folder


HOSTILE = "open({mark!r}, 'w').close()\nraise SystemExit(77)\n"
MODULES = (
    "json",
    "msgspec",
    "blake3",
    "typer",
    "rich",
    "re",
    "os",
    "socket",
    "holdfast",
    "errno",
    "site",
    "sitecustomize",
)


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder with a file for every module that might be imported from it; each leaves a mark when it is run."""
    folder = tmp_path / "trap"
    folder.mkdir()
    for name in MODULES:
        (folder / f"{name}.py").write_text(HOSTILE.format(mark=str(tmp_path / "mark")))
    return folder


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("command", ["ls", "show", "verify", "doctor", "unlock"])
def test_no_command_runs_what_lies_in_the_current_folder(trap: Path, tmp_path: Path, command: str) -> None:
    script = Path(sys.executable).parent / "holdfast"
    if not script.exists():
        pytest.skip("the command is not installed beside this interpreter")
    run = trap / "run"
    with holdfast.CheckpointManager(run, Objects(1).components(), mode="sync") as manager:
        manager.save(1)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [script, command, "run"], cwd=trap, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "mark").exists()
