"""Thousands of changed files of every format: each is opened or refused with an error of Holdfast's, nothing else.

HOLDFAST_FUZZ_COUNT sets how many there are, HOLDFAST_FUZZ_SEED the number that the changes follow from.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.security.fuzzing import make_seeds
from tests.security.scene import bytes_on_disk
from tests.sizes import DEEP

COUNT = int(os.environ.get("HOLDFAST_FUZZ_COUNT", 20000 if DEEP else 4000))
SEED = int(os.environ.get("HOLDFAST_FUZZ_SEED", "12"))
KINDS = ("dcp", "manifest", "nemo", "nemo_compressed", "nemo_folder", "safetensors", "torch", "torch_legacy")


@pytest.mark.guarantee("G9")
def test_changed_files_raise_nothing_but_errors_of_holdfast_in_bounded_memory(tmp_path: Path) -> None:
    seeds, scratch = tmp_path / "seeds", tmp_path / "scratch"
    scratch.mkdir()
    make_seeds(seeds)
    assert sorted(folder.name for folder in seeds.iterdir()) == list(KINDS)
    before = _outside(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.security.fuzzing", seeds, str(COUNT), str(SEED)],
        env={**os.environ, "TMPDIR": str(scratch), "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == []
    assert sum(found["outcomes"].values()) == COUNT
    for kind in KINDS:
        # Neither all too broken to get far, nor all unharmed: else nothing was tried.
        assert found["outcomes"].get(f"{kind} refused", 0) >= COUNT // 40, found["outcomes"]
        assert found["outcomes"].get(f"{kind} opened", 0) >= COUNT // 2000, found["outcomes"]
    assert _outside(tmp_path) == before


def _outside(folder: Path) -> dict[str, tuple[int, str]]:
    """Return all that lies in a folder except for what the changed files were laid down in."""
    return {name: state for name, state in bytes_on_disk(folder).items() if not name.startswith("scratch/")}
