"""The current folder holds modules with the names of those that the writer process imports: none of them may run."""

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
    children = open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split()
    return [int(one) for one in children if b"holdfast.writer" in open(f"/proc/{one}/cmdline", "rb").read()]

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
import sys, holdfast.writer.process
print(" ".join(sorted({name.partition(".")[0] for name in sys.modules} - {"__main__", "__mp_main__"})))
"""


@pytest.fixture(scope="module")
def imported() -> list[str]:
    """Every top-level module that a writer process has imported when it is ready for work."""
    command = [sys.executable, "-I", "-c", _IMPORTED]
    names = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
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
@pytest.mark.parametrize("how", ["script", "text", "module"])
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
    (writer,) = open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split()
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
