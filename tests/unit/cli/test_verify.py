"""`holdfast verify` on real runs: what it checks, and how it names damage."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from holdfast.cli.output import size_text
from holdfast.cli.verify import Depth
from holdfast.runs import verify as verifying
from tests.unit.cli.scene import call, call_json, manifest_of


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def test_verify_of_a_sound_checkpoint_says_what_was_checked(run: Path) -> None:
    result = call("verify", run)
    assert result.exit_code == 0
    size = size_text(manifest_of(run / "step-000000030").size_bytes)
    assert result.stdout.splitlines()[0] == f"sound  step 30  {run}/step-000000030"
    assert re.fullmatch(rf"sound: 1 checkpoint, {size} checked in \d+\.\d\d s", result.stdout.splitlines()[1])
    assert result.stderr == ""


def test_verify_as_json(run: Path) -> None:
    size = manifest_of(run / "step-000000030").size_bytes
    path = str(run / "step-000000030")
    sound = {"path": path, "step": 30, "ok": True, "checked_bytes": size, "problems": []}
    assert call_json("verify", run) == (0, {"ok": True, "checkpoints": [sound]})


def test_verify_names_the_leaf_and_the_bytes_of_a_flipped_bit(run: Path) -> None:
    chunk = manifest_of(run / "step-000000030").tensors[0].chunks[0]
    flip(run / "step-000000030" / chunk.file, chunk.start)
    code, found = call_json("verify", run)
    assert (code, found["ok"], found["checkpoints"][0]["ok"]) == (1, False, False)
    assert found["checkpoints"][0]["problems"] == [
        {
            "file": chunk.file,
            "leaf": "model.weight",
            "byte_range": [chunk.start, chunk.start + 48],
            "what": "the bytes do not have their digest",
        }
    ]
    result = call("verify", run)
    assert result.exit_code == 1
    assert f"  {chunk.file}, bytes {chunk.start}-{chunk.start + 48}, leaf 'model.weight': the bytes" in result.stdout
    assert re.search(r"^damaged: 1 of 1 checkpoint, 1 problem, .* checked in", result.stdout, re.MULTILINE)


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("depth", ["full", "quick"])
@pytest.mark.parametrize("damage", [_truncate, Path.unlink])
def test_verify_finds_a_short_and_a_missing_file_at_any_depth(
    run: Path, depth: str, damage: Callable[[Path], None]
) -> None:
    damage(run / "step-000000030" / "shared.json")
    code, found = call_json("verify", run, "--depth", depth)
    assert code == 1
    assert [one["file"] for one in found["checkpoints"][0]["problems"]] == ["shared.json"]


def test_quick_verification_reads_no_bytes_and_says_so(run: Path) -> None:
    flip(run / "step-000000030" / "rank-00000.safetensors", 5000)
    result = call("verify", run, "--depth", "quick")
    assert result.exit_code == 0
    assert "names and sizes checked, no bytes" in result.stdout
    assert call_json("verify", run, "--depth", "quick")[1]["checkpoints"][0]["checked_bytes"] == 0


def test_verify_all_checks_every_checkpoint_and_counts_a_damaged_manifest(run: Path) -> None:
    code, found = call_json("verify", run, "--all")
    assert (code, found["ok"], [one["step"] for one in found["checkpoints"]]) == (0, True, [30, 20, 10])
    (run / "step-000000030" / "manifest.json").write_text("garbage")
    flip(run / "step-000000010" / "shared.json", 3)
    code, found = call_json("verify", run, "--all")
    assert (code, found["ok"]) == (1, False)
    assert [(one["step"], one["ok"]) for one in found["checkpoints"]] == [(30, False), (20, True), (10, False)]
    assert found["checkpoints"][0]["problems"][0]["file"] == "manifest.json"
    result = call("verify", run, "--all")
    assert result.exit_code == 1
    assert "damaged: 2 of 3 checkpoints, 2 problems" in result.stdout


def test_verify_all_of_nothing_but_damaged_manifests_is_damage(run: Path) -> None:
    for folder in run.glob("step-*/manifest.json"):
        folder.write_bytes(b"\xff")
    code, found = call_json("verify", run, "--all")
    assert (code, len(found["checkpoints"])) == (1, 3)
    result = call("verify", run)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: run {run}: 'latest' finds no sound checkpoint")


def test_a_damaged_manifest_that_was_named_is_a_problem_of_its_checkpoint(run: Path) -> None:
    flip(run / "step-000000030" / "manifest.json", 200)
    code, found = call_json("verify", run / "step-000000030")
    assert (code, found["checkpoints"][0]["step"]) == (1, 30)
    problem = found["checkpoints"][0]["problems"][0]
    assert (problem["file"], problem["leaf"], problem["byte_range"]) == ("manifest.json", None, None)
    assert call("show", run / "step-000000030").exit_code == 1


def test_a_newer_format_is_refused_and_is_no_damage(run: Path) -> None:
    (run / "step-000000030" / "manifest.json").write_text('{"holdfast_format": 99}')
    for command in ("show", "verify"):
        result = call(command, run / "step-000000030")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "written in format 99" in result.stderr
        assert "use a newer version of Holdfast" in result.stderr
    code, found = call_json("verify", run, "--all")
    assert (code, found["ok"]) == (2, False)
    assert "not checked: 1 of 3 checkpoints" in call("verify", run, "--all").stdout


def test_verify_all_takes_a_run_with_a_checkpoint_and_no_selector(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for words in ((run / "latest",), (f"{run}@20",), (run, "--select", "20"), (tmp_path / "empty",)):
        result = call("verify", *words, "--all")
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("error: ")


def test_verify_takes_the_depths_of_the_library() -> None:
    assert [depth.value for depth in Depth] == list(get_args(verifying.Depth))
