"""Every command alike: help, exit codes, interrupts, and how little is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast._version import __version__
from tests.unit.cli.scene import ENVIRONMENT, call, process


@pytest.mark.parametrize("words", [(), ("show",), ("verify", "x", "--depth", "deep"), ("ls", "a", "b"), ("nothing",)])
def test_wrong_words_are_exit_code_2(words: tuple[str, ...]) -> None:
    result = process(*words)
    assert result.returncode == 2
    assert "Usage: holdfast" in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["ls", "show", "verify", "tag", "prune"])
def test_the_help_of_every_command_has_examples_and_exit_codes(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"Usage: holdfast {command}" in result.stdout
    assert f"\n    holdfast {command} runs/tiny" in result.stdout
    assert re.search(r"Exit codes:\n    0  .*\n    1  .*\n    2  ", result.stdout)


def test_the_version_is_printed_by_the_script_and_by_the_module() -> None:
    assert call("--version").stdout == f"holdfast {__version__}\n"
    assert process("--version").stdout == f"holdfast {__version__}\n"


@pytest.fixture
def odd_storages(tmp_path: Path) -> dict[str, str]:
    """An installed package with two doors: behind one somebody presses Ctrl-C, behind the other is a bug."""
    information = tmp_path / "site" / "odd_storage-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-storage\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[holdfast.storages]\ninterrupted = odd_storage:Interrupted\nbuggy = odd_storage:Buggy\n"
    )
    (tmp_path / "site" / "odd_storage.py").write_text(
        "import os, signal\n"
        "from holdfast.storage.local.local import LocalStorage\n"
        "class Interrupted(LocalStorage):\n"
        "    def entries(self, folder):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        return super().entries(folder)\n"
        "class Buggy(LocalStorage):\n"
        "    def entries(self, folder):\n"
        "        return 1 // 0\n"
    )
    paths = [str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize("words", [("ls",), ("show",), ("verify",), ("tag", "x"), ("prune", "--keep-last", "1")])
def test_an_interrupt_is_quiet_and_130(odd_storages: dict[str, str], words: tuple[str, ...]) -> None:
    result = process(words[0], "interrupted://run", *words[1:], env=odd_storages)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_a_bug_is_shown_whole_and_does_not_count_as_damage(odd_storages: dict[str, str]) -> None:
    result = process("verify", "buggy://run", env=odd_storages)
    assert (result.returncode, result.stdout) == (2, "")
    assert "ZeroDivisionError" in result.stderr
    assert "This is a bug in Holdfast" in result.stderr


_IMPORTED = """
import sys
from holdfast.cli import main
try:
    main()
finally:
    sys.stderr.write(" ".join(name for name in ("torch", "numpy") if name in sys.modules))
"""


@pytest.mark.parametrize(
    "words",
    [
        ("ls",),
        ("show", "--tensors"),
        ("verify", "--all"),
        ("show", "--select", "best:val_loss", "--json"),
        ("tag", "release"),
        ("tag", "good", "--remove", "--select", "20", "--json"),
        ("prune", "--keep-last", "2", "--keep-best", "val_loss:1:max", "--json"),
        ("prune", "--keep-every-steps", "20", "--keep-every-minutes", "0.5", "--keep-tagged", "--yes"),
    ],
)
def test_no_command_imports_torch_or_numpy(run: Path, words: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", _IMPORTED, words[0], str(run), *words[1:]]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert (result.returncode, result.stderr) == (0, "")


def test_importing_holdfast_is_quick_and_brings_no_torch() -> None:
    program = (
        "import sys, time; start = time.process_time(); import holdfast; "
        "print(time.process_time() - start, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    took = []
    for _ in range(3):
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
        seconds, *imported = result.stdout.split()
        assert imported == ["False", "False"]
        took.append(float(seconds))
    # The best of three: also processor time grows a little where the machine is busy.
    assert min(took) < 0.15
