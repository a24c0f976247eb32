"""The current folder holds modules with the names of those that the writer process, the command line and the ranks of
`run_ranks` import: none of them may run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import blake3
import msgspec
import pytest

from tests.sizes import if_deep

_HOSTILE = """
import os
with open({marker!r}, "a") as file:
    file.write(__name__ + chr(10))
raise SystemExit(3)
"""

_TRAINING = """
import json, os, pathlib, select, signal, sys
import torch, holdfast

def writers():
    children = " ".join(one.read_text() for one in pathlib.Path("/proc/self/task").glob("*/children")).split()
    return [int(one) for one in children if b"holdfast.saving.writer" in open(f"/proc/{one}/cmdline", "rb").read()]

class Part:
    def __init__(self): self.value = torch.arange(1000.0)
    def state_dict(self): return {"value": self.value}
    def load_state_dict(self, state): self.value = state["value"]

def save_twice(run, mode):
    with holdfast.CheckpointManager(run, {"h": Part()}, mode=mode, rng=False, timeout=60) as manager:
        manager.save(0, wait=True)
        for writer in writers():
            end = select.poll()
            end.register(os.pidfd_open(writer), select.POLLIN)
            os.kill(writer, signal.SIGKILL)
            end.poll()
        manager.save(1, wait=True)
    return [found.step for found in holdfast.checkpoints(run)]

def train(told):
    # What the training itself imports late comes first: from its own folder it may take anything.
    save_twice(f"{told['run']}-first", "async")
    os.chdir(told["folder"])
    for name in told["modules"]:
        pathlib.Path(f"{name}.py").write_text(told["hostile"])
        package = pathlib.Path("packages", name)
        package.mkdir(parents=True)
        package.joinpath("__init__.py").write_text(told["hostile"])
    sys.path[:0] = [pathlib.Path("not text")] if told["odd_path"] else []
    os.environ.update(told["environment"])
    print(json.dumps([save_twice(f"{told['run']}-{mode}", mode) for mode in ("sync", "async")]))

if __name__ == "__main__":
    train(json.loads(os.environ.pop("TOLD")))
"""

_IMPORTED = """
import sys, holdfast.saving.writer.process
print(" ".join(sorted({name.partition(".")[0] for name in sys.modules} - {"__main__", "__mp_main__"})))
"""


@pytest.fixture(scope="module")
def imported() -> list[str]:
    """Every top-level module that a writer process has imported when it is ready for work."""
    command = [sys.executable, "-I", "-c", _IMPORTED]
    names = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.split()
    assert {"json", "holdfast", "msgspec", "blake3", "socket"} <= set(names)
    return [name for name in names if name.isidentifier()]


def run_training(how: str, folder: Path, told: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Start a training whose current folder becomes hostile after its own imports are done."""
    home = folder / "home"
    home.mkdir()
    (home / "the_training.py").write_text(_TRAINING)
    command = {
        "script": [str(home / "the_training.py")],
        "text": ["-c", _TRAINING],
        "module": ["-m", "the_training"],
    }[how]
    environment = {**os.environ, "TOLD": json.dumps(told)}
    return subprocess.run(
        [sys.executable, *command], cwd=home, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("how", ["text", *if_deep("script", "module")])
def test_no_module_of_the_current_folder_runs_in_the_writer(how: str, imported: list[str], tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    told = {
        # A script and a module have their folder on the import path, `-c` has whatever folder is the current one.
        "folder": str(tmp_path / "home") if how != "text" else str(tmp_path),
        "run": str(tmp_path / "run"),
        "modules": imported,
        "hostile": _HOSTILE.format(marker=str(marker)),
        "odd_path": how == "script",
        "environment": {
            "PYTHONPATH": f".:{tmp_path / 'home' / 'packages'}:{tmp_path / 'packages'}",
            "PYTHONHOME": str(tmp_path / "nowhere"),
            "PYTHONWARNINGS": "error",
            "PYTHONINSPECT": "1",
            "PYTHONPYCACHEPREFIX": str(tmp_path / "home"),
        },
    }
    ended = run_training(how, tmp_path, told)
    assert not marker.exists(), f"these ran: {marker.read_text().split()}\n{ended.stderr}"
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [[1, 0], [1, 0]]


_WITH_OWN_PACKAGES = """
import os, sys, torch, holdfast
with holdfast.CheckpointManager(sys.argv[1], {"h": torch.nn.Linear(2, 2)}, mode="async", rng=False) as manager:
    manager.save(0, wait=True)
    writer = manager._saver._async.supervisor.writer.process_id
    maps = open(f"/proc/{writer}/maps").read()
    print(sorted({line.split()[-1] for line in maps.splitlines() if "msgspec" in line or "blake3" in line}))
"""


def test_the_writer_has_the_packages_of_its_trainer_even_where_they_lie_in_the_current_folder(tmp_path: Path) -> None:
    for package in (msgspec, blake3):
        shutil.copytree(Path(package.__file__).parent, tmp_path / package.__name__)
    (tmp_path / "training.py").write_text(_WITH_OWN_PACKAGES)
    command = [sys.executable, "training.py", str(tmp_path / "run")]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(f"{tmp_path}/msgspec/") == 1, ended.stdout
    assert ended.stdout.count(f"{tmp_path}/blake3/") == 1, ended.stdout
    assert ended.stdout.count(".so") == 2, ended.stdout


_BEFORE_THE_COMMAND = """
import runpy, sys, holdfast
print(" ".join(sorted({name.partition(".")[0] for name in sys.modules})))
"""
_OF_THE_COMMAND = """
import sys, holdfast.cli
print(" ".join(sorted({name.partition(".")[0] for name in sys.modules})))
"""
_WITH_RANKS = """
import os, sys
from holdfast.testing import run_ranks, values

def work(rank):
    import json, torch.distributed
    return json.loads("[1]")[0] + rank, os.environ.get("PYTHONSAFEPATH"), os.getcwd()

if __name__ == "__main__":
    os.chdir(sys.argv[1])
    before = dict(os.environ)
    for backend in (None, "gloo"):
        for value in values(run_ranks(2, work, backend=backend)):
            print(value)
    assert dict(os.environ) == before
"""


def modules_of(text: str) -> set[str]:
    """The top-level modules that are imported after a text was run in an interpreter without a current folder."""
    ended = subprocess.run([sys.executable, "-P", "-c", text], capture_output=True, text=True, check=True, timeout=300)
    return {name for name in ended.stdout.split() if name.isidentifier()}


def make_hostile(folder: Path, names: set[str]) -> Path:
    """Put a module of each name into a folder; return the file that it writes to when it runs."""
    folder.mkdir()
    for name in names - {"__main__", "holdfast"}:
        (folder / f"{name}.py").write_text(_HOSTILE.format(marker=str(folder / "ran")))
    return folder / "ran"


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("options", [[], ["-P"]], ids=["as it comes", "-P"])
def test_no_module_of_the_current_folder_runs_in_the_command_line_as_a_module(
    options: list[str], tmp_path: Path
) -> None:
    # What Python itself imports for -m, and the package before its __main__, come from the folder unless -P is given.
    names = modules_of(_OF_THE_COMMAND) - (set() if options else modules_of(_BEFORE_THE_COMMAND))
    assert {"json", "msgspec", "typer"} <= names
    marker = make_hostile(tmp_path / "hostile", names)
    command = [sys.executable, *options, "-m", "holdfast", "ls", str(tmp_path / "run")]
    ended = subprocess.run(command, cwd=tmp_path / "hostile", capture_output=True, text=True, timeout=300)
    assert not marker.exists(), f"these ran: {marker.read_text().split()}\n{ended.stderr}"
    assert ended.stderr == f"error: {tmp_path / 'run'} is not there; check the path\n"


@pytest.mark.guarantee("G9")
def test_no_module_of_the_current_folder_runs_in_the_ranks_of_run_ranks(imported: list[str], tmp_path: Path) -> None:
    marker = make_hostile(tmp_path / "hostile", {*imported, "multiprocessing", "pickle", "torch", "numpy"})
    home = tmp_path / "home"
    home.mkdir()
    (home / "training.py").write_text(_WITH_RANKS)
    command = [sys.executable, "training.py", str(tmp_path / "hostile")]
    ended = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=120)
    assert not marker.exists(), f"these ran: {marker.read_text().split()}\n{ended.stderr}"
    assert ended.returncode == 0, ended.stderr
    folder = str(tmp_path / "hostile")
    assert ended.stdout.splitlines() == [str((1 + rank, None, folder)) for rank in (0, 1, 0, 1)]
