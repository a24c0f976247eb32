"""`holdfast show` on real runs: every part of a checkpoint, and every way to name one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.cli.show import outline
from tests.counting import calls
from tests.unit.cli.scene import call, call_json, manifest_of


def test_show_prints_every_part_of_a_checkpoint(run: Path) -> None:
    result = call("show", run)
    assert result.exit_code == 0
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    manifest = manifest_of(run / "step-000000030")
    for line in (
        "step        30",
        "sequence    3",
        f"parent      {manifest.parent}",
        f"path        {run}/step-000000030",
        "world size  1",
        "  val_loss: 0.03333333333333333",
        "  tokens: 3000",
        "  pair: [1, 2]",
        "  lr: 0.001",
        "  dtype: bfloat16",
        "  scale: 0.5",
        "  layers:",
        "  data: abc",
        "model      module          1        2     60 B",
        "optimizer  optimizer       1        6    128 B",
    ):
        assert line in lines
    assert f"torch {torch.__version__}" in result.stdout
    assert "rank-00000.safetensors" in result.stdout
    assert "model.weight" not in result.stdout


def test_show_as_json_has_every_part(run: Path) -> None:
    code, found = call_json("show", f"{run}@good")
    manifest = manifest_of(run / "step-000000020")
    assert code == 0
    assert set(found) == {
        *("path", "folder", "run_id", "step", "sequence", "parent", "digest", "created", "world_size", "meshes"),
        *("size_bytes", "tags", "damage", "versions", "metrics", "progress", "extra", "config", "guards"),
        *("components", "files"),
    }
    assert (found["step"], found["sequence"], found["tags"]) == (20, 2, ["good"])
    assert found["size_bytes"] == manifest.size_bytes == sum(file["size_bytes"] for file in found["files"])
    assert found["config"]["layers"] == [{"width": 4}, {"width": 3}]
    assert (found["config"]["dtype"], found["config"]["scale"]) == ("bfloat16", 0.5)
    assert found["components"][0] == {
        "name": "model", "kind": "module", "scopes": 1, "tensors": 2, "size_bytes": 60,
    }  # fmt: skip
    assert {file["name"] for file in found["files"]} == {file.name for file in manifest.files}


def test_show_lists_all_tensors_or_those_that_match(run: Path) -> None:
    code, found = call_json("show", run, "--tensors", "model.*")
    assert code == 0
    assert found["tensors"] == [
        {"name": "model.weight", "dtype": "float32", "shape": [3, 4], "size_bytes": 48, "chunks": 1, "sharded": False},
        {"name": "model.bias", "dtype": "float32", "shape": [3], "size_bytes": 12, "chunks": 1, "sharded": False},
    ]
    every = {tensor.name for tensor in manifest_of(run / "step-000000030").tensors}
    assert {one["name"] for one in call_json("show", run, "--tensors")[1]["tensors"]} == every
    assert re.search(r"model.weight +float32 +\[3, 4\] +48 B +1", call("show", run, "--tensors").stdout)
    assert "model.bias" not in call("show", "--tensors=model.w*", run).stdout


def test_show_refuses_a_glob_that_matches_no_tensor(run: Path) -> None:
    result = call("show", run, "--tensors", "modle.*")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no tensor's name matches 'modle.*'" in result.stderr


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (("{run}",), 30),
        (("{run}@10",), 10),
        (("{run}@good",), 20),
        (("{run}@best:val_loss:max",), 10),
        (("{run}", "--select", "best:val/acc"), 10),
        (("{run}/latest",), 30),
        (("{run}/step-000000010",), 10),
        (("{run}/step-000000010/manifest.json",), 10),
    ],
)
def test_show_takes_every_way_to_name_a_checkpoint(run: Path, words: tuple[str, ...], step: int) -> None:
    assert call_json("show", *(word.format(run=run) for word in words))[1]["step"] == step


def test_show_and_verify_say_which_folders_latest_passed_over(run: Path) -> None:
    (run / "step-000000030" / "manifest.json").write_text("garbage")
    for command in ("show", "verify"):
        result = call(command, run)
        assert result.exit_code == 0
        assert "note: step-000000030 is rejected: the content is no manifest" in result.stderr
        assert "step-000000020" in result.stdout


def test_show_takes_a_few_calls_for_each_metric(tmp_path: Path) -> None:
    def work(count: int) -> int:
        run = tmp_path / f"run-{count}"
        with holdfast.CheckpointManager(run, {"model": torch.nn.Linear(1, 1)}) as manager:
            manager.save(1, metrics={f"metric/{number}": float(number) for number in range(count)})
        return calls(call, "show", run)

    work(1)  # the modules that the first call imports
    assert work(2000) - work(1000) < 1000 * 40


def test_show_counts_the_scopes_of_each_component_in_one_pass(tmp_path: Path) -> None:
    def work(count: int) -> int:
        parts = {f"part-{number}": torch.nn.Linear(1, 1) for number in range(count)}
        with holdfast.CheckpointManager(tmp_path / f"run-{count}", parts) as manager:
            manager.save(1)
        return calls(call, "show", tmp_path / f"run-{count}")

    work(2)  # what is imported and made once
    few, many, more = work(1), work(100), work(200)
    assert more - many < 1.2 * (many - few)


def test_nested_values_become_indented_lines() -> None:
    value: Any = {"a": {"b": [1, True, None, 0.5]}, "empty": {}, "list": [{"x": 1, "y": [[2]]}], "one": {"k": 1}}
    assert list(outline(value)) == [
        *("a:", "  b: [1, true, null, 0.5]", "empty: {}", "list:", "  -", "    x: 1", "    y:", "      - [2]"),
        *("one:", "  k: 1"),
    ]
    assert list(outline(list(range(20)))) == [f"[{', '.join(map(str, range(16)))}, ... 4 more]"]
    assert len(next(iter(outline("x" * 1000)))) == 200
