"""Start the writer's process. It imports the packages of this process and nothing from the current folder.

`python -c` puts the current folder first on the import path, and the trainer's own path may hold it, too: a file named
`json.py` there would run in the writer. So the interpreter is started without it, the standard library comes first, and
the packages that the writer needs are found in the very folders from which this process has them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from types import ModuleType

import blake3
import msgspec

import holdfast
from holdfast.state.budget import ranks_here

__all__ = ["start_process"]

# `holdfast.saving.writer` is also how one recognises the process in a list of processes.
_BOOT = """
import json, sys
from importlib.machinery import PathFinder

packages, further = json.loads(sys.argv[1])

class Pinned:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [packages[name]]) if name in packages else None

sys.meta_path.insert(0, Pinned)
sys.path += [entry for entry in further if entry not in sys.path]
from holdfast.saving.writer.process import main
main()
"""
_PACKAGES = (holdfast, blake3, msgspec)
# Those that decide how text is encoded and whether byte code is written: they must be as in this process.
_KEPT_VARIABLES = {"PYTHONUTF8", "PYTHONCOERCECLOCALE", "PYTHONDONTWRITEBYTECODE"}


def start_process(handle: int) -> subprocess.Popen[bytes]:
    """Start a writer process that has one end of a channel under this handle."""
    imports = json.dumps([_package_folders(), _further_folders()])
    with _starting:
        return subprocess.Popen(
            # -P: no current folder; -s: no folder of the user's, unless this process has it.
            [sys.executable, "-P", "-s", "-c", _BOOT, imports, str(handle), str(os.getpid())],
            env=_environment(),
            pass_fds=[handle],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # A signal to the training's process group must not end the writer.
            start_new_session=True,
        )


# Another thread that forks, such as for the workers of a DataLoader, waits until a process has been started: its child
# would hold the pipe by which the start is reported, and it would not be over before that child ends.
_starting = threading.RLock()
os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release)


def _package_folders() -> dict[str, str]:
    """Return, for each package that the writer needs, the folder in which this process found it."""
    return {package.__name__: _folder_of(package) for package in _PACKAGES}


def _folder_of(module: ModuleType) -> str:
    file = os.path.abspath(module.__file__ or "")
    return os.path.dirname(os.path.dirname(file) if hasattr(module, "__path__") else file)


def _further_folders() -> list[str]:
    """Return where this process finds other packages, such as a storage's, without the current folder."""
    # One that is relative means another folder after every change of the current one.
    entries = [entry for entry in sys.path if isinstance(entry, str) and os.path.isabs(entry)]
    return [entry for entry in entries if not _is_current_folder(entry)]


def _is_current_folder(path: str) -> bool:
    try:
        return os.path.samefile(path, ".")
    except OSError:
        return False


def _environment() -> dict[str, str]:
    """Return this process's environment without the variables that change what an interpreter imports or does."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    kept |= {name: value for name, value in os.environ.items() if name in _KEPT_VARIABLES}
    # An interpreter that was moved finds its library by this; one that found it elsewhere would not find it with this.
    home = os.environ.get("PYTHONHOME", "")
    if home and home.partition(":")[0] == sys.base_prefix:
        kept["PYTHONHOME"] = home
    # What this process has learned from the other ranks; the writer shares the processors out by it.
    return {**kept, "LOCAL_WORLD_SIZE": str(ranks_here())}
