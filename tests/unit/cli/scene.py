"""Call the command line on runs that are made once. Used by the tests beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app
from holdfast.ondisk.manifest import Manifest, decode_manifest, encode_manifest

# What changes the output, or, as an unbuffered stdout does, hides what an ordinary user would see.
UNWANTED = ("COLUMNS", "FORCE_COLOR", "PYTHONUNBUFFERED")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in UNWANTED}


def call(*words: object) -> Any:
    return CliRunner(env={"COLUMNS": "1000"}).invoke(app, [str(word) for word in words], prog_name="holdfast")


def call_json(*words: object) -> tuple[int, Any]:
    result = call(*words, "--json")
    assert result.stderr == ""
    return result.exit_code, json.loads(result.stdout)


def process(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", *(str(word) for word in words)]
    return subprocess.run(command, text=True, timeout=300, **{"capture_output": True, "env": ENVIRONMENT, **options})


def rewrite(place: Path, **changes: Any) -> None:
    """Give a checkpoint another manifest, with a right digest: what somebody who wants harm would do."""
    manifest, _ = decode_manifest((place / "manifest.json").read_bytes())
    (place / "manifest.json").write_bytes(encode_manifest(msgspec.structs.replace(manifest, **changes))[0])


def manifest_of(folder: Path) -> Manifest:
    return decode_manifest((folder / "manifest.json").read_bytes())[0]


LOSSES = {10: 0.5, 20: 0.1, 30: 0.4, 40: 0.2, 50: 0.3}


def components() -> dict[str, Any]:
    return {"model": torch.nn.Linear(4, 3)}


def printed_json(*words: object) -> Any:
    """Return what a command that succeeds prints with --json."""
    result = call(*words, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def steps(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in holdfast.checkpoints(run)]


def files(run: Path) -> dict[str, bytes]:
    """Everything that lies in a run."""
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


_TRAINING = """
import sys, torch, holdfast
state, every = {"model": torch.nn.Linear(4, 3)}, holdfast.Every(steps=1)
with holdfast.CheckpointManager(sys.argv[1], state, save=every, keep=holdfast.KeepLast(5)) as manager:
    print("training", flush=True)
    sys.stdin.readline()
    manager.restore()
    for step in range(60, 110, 10):
        manager.step(step)
"""


@contextmanager
def training(run: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the run, and, when the block is left, trains it on. It keeps the last five."""
    command = [sys.executable, "-c", _TRAINING, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "training\n"
        try:
            yield process
        finally:
            process.communicate("\n", timeout=300)
    assert process.returncode == 0


def command(*words: object, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", *map(str, words)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout or done.stderr


def save_steps(run: Path, *steps: int) -> None:
    for step in steps:
        with holdfast.CheckpointManager(run, {"model": torch.nn.Linear(2, 2)}) as manager:
            manager.save(step)
