"""`holdfast export` on real runs: what it writes, what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app
from holdfast.cli.export import _renames, _size_bytes
from holdfast.errors import UsageError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    state = {"model": {"body.weight": torch.ones(4, 2), "body.bias": torch.zeros(4)}, "ema": {"x": torch.ones(1)}}
    with holdfast.CheckpointManager(tmp_path / "run", state, rng=False, mode="sync") as manager:
        for step in (1, 2):
            state["model"]["body.bias"].fill_(step)
            manager.save(step)
    return tmp_path / "run"


def call(*words: object) -> Any:
    return CliRunner(env={"COLUMNS": "1000"}).invoke(app, [str(word) for word in words], prog_name="holdfast")


def test_it_writes_the_checkpoint_that_is_named_and_prints_what_it_did(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    result = call("export", f"{run}@1", target, "--format", "safetensors")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"exported 2 tensors, 4.0 KiB, to {target} (safetensors) in ")
    assert load_file(target)["body.bias"].tolist() == [1.0] * 4


def test_its_options_are_those_of_the_function(run: Path, tmp_path: Path) -> None:
    words = ["--dtype", "bfloat16", "--rename", "body.*=layer.*", "--max-shard-size", "16B", "--json"]
    result = call("export", run, tmp_path / "out", "--format", "safetensors", *words)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["tensors"], report["format"], report["left_out"]) == (2, "safetensors", [])
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    found = {name: tensor.dtype for file in files for name, tensor in load_file(file).items()}
    assert len(files) == 2
    assert found == {"layer.weight": torch.bfloat16, "layer.bias": torch.bfloat16}
    assert call("export", run, tmp_path / "e.safetensors", "--format", "safetensors", "--only", "ema").exit_code == 0
    assert load_file(tmp_path / "e.safetensors").keys() == {"x"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "onnx"], "no format 'onnx'"),
        (["--format", "safetensors", "--only", "none"], "no component 'none'"),
        (["--format", "safetensors", "--dtype", "int8"], "int8"),
        (["--format", "safetensors", "--rename", "x"], "OLD=NEW"),
        (["--format", "safetensors", "--max-shard-size", "five"], "no size"),
        (["--format", "hf"], "model_type"),
    ],
)
def test_a_wrong_argument_exits_with_2_and_writes_nothing(
    run: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    result = call("export", run, tmp_path / "out", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert os.listdir(tmp_path) == ["run"]


def test_a_damaged_checkpoint_exits_with_1(run: Path, tmp_path: Path) -> None:
    (file,) = run.glob("step-000000002/rank-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    result = call("export", run, tmp_path / "out.safetensors", "--format", "safetensors")
    assert result.exit_code == 1
    assert "digest" in result.stderr
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("5GB", 5 * 10**9), ("512MiB", 512 << 20), ("1.5kb", 1500), ("7", 7), ("2 t", 2 * 10**12), ("1GiB", 1 << 30)],
)
def test_sizes_are_decimal_unless_they_say_otherwise(text: str, size_bytes: int) -> None:
    assert _size_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["9" * 400 + "GB", "", "GB", "-1", "0", "1XB", "1 2", "0.1"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no size"):
        _size_bytes(text)


def test_an_empty_new_name_leaves_tensors_out() -> None:
    assert _renames(["a.*=b.*", "c="]) == {"a.*": "b.*", "c": None}
    with pytest.raises(UsageError, match="twice"):
        _renames(["a=b", "a=c"])


@pytest.mark.slow
def test_ctrl_c_exits_with_130_and_leaves_nothing(run: Path, tmp_path: Path) -> None:
    """The process stops itself when it opens the target's file, and is interrupted there."""
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def watch(event, arguments):\n"
        "    if event == 'open' and '.partial' in str(arguments[0]) and not done:\n"
        "        done.append(1)\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "done = []\n"
        "sys.addaudithook(watch)\n"
        "from holdfast.cli import main\n"
        "main()\n"
    )
    words = ["export", str(run), str(tmp_path / "out.safetensors"), "--format", "safetensors"]
    finished = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 130, finished.stderr
    assert os.listdir(tmp_path) == ["run"]
