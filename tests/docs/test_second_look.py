"""A test that fails once and passes alone is named and forgiven, twice; one that fails again is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import os, pathlib, pytest

def once(name):
    note = pathlib.Path(__file__).with_name(name)
    first = not note.exists()
    note.touch()
    assert not first, "the reason of " + name

def test_fine(): pass
"""
ONCE = "def test_{0}(): once('{0}')\n"
ALWAYS = "def test_always(): once('a'); assert False\n"
FIXTURE = """
@pytest.fixture(scope="module")
def shared(): once("shared")

def test_one(shared): pass
def test_other(shared): pass
"""


def run(folder: Path, text: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(TESTS + text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    arguments = ["-p", "no:cacheprovider", "-c", "pytest.ini", str(folder)]
    return subprocess.run(
        [sys.executable, "-m", "tests.second_look", *arguments],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "FLAKY_TESTS": ""}
        | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("text", "names", "code"),
    [
        ("", [], 0),
        (ONCE.format("x"), ["test_x"], 0),
        (ONCE.format("x") + ONCE.format("y") + ONCE.format("z"), ["test_x", "test_y", "test_z"], 1),
        (ONCE.format("x") + ALWAYS, ["test_x"], 1),
        (FIXTURE + ONCE.format("x"), ["test_one", "test_x"], 0),
    ],
    ids=["all pass", "one is flaky", "three are flaky", "one fails again", "a fixture counts once"],
)
def test_what_failed_is_run_once_more_alone(text: str, names: list[str], code: int, tmp_path: Path) -> None:
    done = run(tmp_path, text)
    assert done.returncode == code, done.stdout + done.stderr
    flaky = [line.rpartition("::")[2] for line in done.stdout.splitlines() if line.startswith("flaky: test")]
    assert sorted(flaky) == sorted(names)
    assert all(f"the reason of {name.removeprefix('test_')}" in done.stdout for name in names if name != "test_one")


def test_the_flaky_tests_of_several_runs_are_counted_together(tmp_path: Path) -> None:
    ledger = tmp_path / "flaky"
    codes = []
    for name in ("x", "y", "z"):
        folder = tmp_path / name
        folder.mkdir()
        codes.append(run(folder, ONCE.format(name), FLAKY_TESTS=str(ledger)).returncode)
    assert codes == [0, 0, 1]
    assert len(ledger.read_text().splitlines()) == 3
