"""The command line on real runs: what it prints, its exit codes, and what a hostile checkpoint cannot make it do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy
import pytest
import torch
from typer.testing import CliRunner

import holdfast
from holdfast._version import __version__
from holdfast.cli import app
from holdfast.cli.output import size_text, visible
from holdfast.cli.show import outline
from holdfast.cli.verify import Depth
from holdfast.ondisk.manifest import Manifest, decode_manifest, encode_manifest
from holdfast.runs import verify as verifying
from tests.counting import calls

# Clears the screen, sets the title, rings, recolours (also with a C1 byte), goes back, forges a line, turns the text.
HOSTILE = "\x1b[2J\x1b]0;pwned\x07[red]x[/red]\r\nsound: 9 checkpoints\x9b31m\u202eevil"
# What changes the output, or, as an unbuffered stdout does, hides what an ordinary user would see.
UNWANTED = ("COLUMNS", "FORCE_COLOR", "PYTHONUNBUFFERED")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in UNWANTED}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three checkpoints, steps 10, 20 (tagged) and 30, and an attempt at 40 that nothing committed."""
    run = tmp_path_factory.mktemp("made") / "run"
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    config = {"lr": 1e-3, "dtype": torch.bfloat16, "scale": numpy.float32(0.5), "layers": [{"width": 4}, {"width": 3}]}
    with holdfast.CheckpointManager(run, {"model": model, "optimizer": optimizer}, config=config) as manager:
        for step in (10, 20, 30):
            manager.save(
                step,
                metrics={"val_loss": 1 / step, "val/acc": step},
                progress={"tokens": step * 100},
                extra={"pair": (1, 2)},
                guards={"data": "abc"},
                tag="good" if step == 20 else None,
            )
    (run / "step-000000040").mkdir()
    (run / "step-000000040" / "attempt.json").write_text("{}")
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run", symlinks=True))


def call(*words: object) -> Any:
    return CliRunner(env={"COLUMNS": "1000"}).invoke(app, [str(word) for word in words], prog_name="holdfast")


def call_json(*words: object) -> tuple[int, Any]:
    result = call(*words, "--json")
    assert result.stderr == ""
    return result.exit_code, json.loads(result.stdout)


def process(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", *(str(word) for word in words)]
    return subprocess.run(command, text=True, timeout=60, **{"capture_output": True, "env": ENVIRONMENT, **options})


def rewrite(place: Path, **changes: Any) -> None:
    """Give a checkpoint another manifest, with a right digest: what somebody who wants harm would do."""
    manifest, _ = decode_manifest((place / "manifest.json").read_bytes())
    (place / "manifest.json").write_bytes(encode_manifest(msgspec.structs.replace(manifest, **changes))[0])


def manifest_of(folder: Path) -> Manifest:
    return decode_manifest((folder / "manifest.json").read_bytes())[0]


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


# ls


def test_ls_lists_the_latest_first_and_marks_it(run: Path) -> None:
    result = call("ls", run)
    assert result.exit_code == 0
    rows = result.stdout.splitlines()
    assert re.findall(r"\S+", rows[0]) == ["step", "sequence", "created", "size", "ranks", "metrics", "tags"]
    assert re.match(
        r"\* +30 +3 +20\d\d-\d\d-\d\d \d\d:\d\d:\d\d \S+ +[0-9.]+ KiB +1 +val/acc 30, val_loss 0.0333333", rows[1]
    )
    assert re.match(r"  +20 +2 .*val/acc 20, val_loss 0.05 +good", rows[2])
    assert re.match(r"  +10 +1 ", rows[3])
    assert "1 attempt never committed:" in result.stdout
    assert "step-000000040" in result.stdout


def test_ls_shows_local_time(run: Path) -> None:
    rewrite(run / "step-000000030", created="2026-01-02T03:04:05.000000+00:00")
    result = process("ls", run, env={**ENVIRONMENT, "TZ": "XXX-5"})
    assert "2026-01-02 08:04:05 XXX" in result.stdout


def test_ls_as_json_has_every_fact_and_nothing_else_on_stdout(run: Path) -> None:
    code, found = call_json("ls", run)
    assert code == 0
    assert set(found) == {"run", "checkpoints", "attempts", "damaged", "unreadable", "unsupported"}
    assert found["run"] == str(run)
    assert [one["step"] for one in found["checkpoints"]] == [30, 20, 10]
    assert [one["latest"] for one in found["checkpoints"]] == [True, False, False]
    assert found["attempts"] == ["step-000000040"]
    assert found["damaged"] == found["unreadable"] == found["unsupported"] == []
    checkpoint, manifest = found["checkpoints"][1], manifest_of(run / "step-000000020")
    assert checkpoint == {
        "folder": "step-000000020",
        "path": str(run / "step-000000020"),
        "latest": False,
        "step": 20,
        "sequence": 2,
        "parent": found["checkpoints"][2]["digest"],
        "digest": checkpoint["digest"],
        "created": manifest.created,
        "size_bytes": manifest.size_bytes,
        "world_size": 1,
        "metrics": {"val_loss": 0.05, "val/acc": 20},
        "tags": ["good"],
        "damage": None,
    }


def test_ls_names_the_folder_where_it_was_not_the_first_attempt(run: Path) -> None:
    assert "folder" not in call("ls", run).stdout.splitlines()[0]
    (run / "step-000000030").rename(run / "step-000000030.2")
    rewrite(run / "step-000000030.2", folder="step-000000030.2")
    assert "step-000000030.2" in call("ls", run).stdout.splitlines()[1]


def test_ls_shows_a_few_metrics_and_says_how_many_more_there_are(run: Path) -> None:
    rewrite(run / "step-000000030", metrics={f"m{index}": index for index in range(7)})
    assert "m0 0, m1 1, m2 2, m3 3, +3 more" in call("ls", run).stdout


def test_ls_still_lists_a_run_with_a_damaged_manifest_and_exits_1(run: Path) -> None:
    (run / "step-000000030" / "manifest.json").write_text("garbage")
    result = call("ls", run)
    assert result.exit_code == 1
    assert re.search(r"\* +20 +2 ", result.stdout)
    assert "damaged: step-000000030: the content is no manifest" in result.stdout
    code, found = call_json("ls", run)
    assert code == 1
    assert [one["folder"] for one in found["damaged"]] == ["step-000000030"]
    assert found["damaged"][0]["reason"].startswith("the content is no manifest")


def test_ls_does_not_call_a_newer_format_damage(run: Path) -> None:
    (run / "step-000000030" / "manifest.json").write_text('{"holdfast_format": 99}')
    result = call("ls", run)
    assert result.exit_code == 2
    assert "newer format: step-000000030: written in format 99" in result.stdout
    code, found = call_json("ls", run)
    assert code == 2
    assert (len(found["damaged"]), len(found["unsupported"])) == (0, 1)


def test_ls_of_an_empty_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    result = call("ls", tmp_path)
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path} has no checkpoint yet\n")
    assert call_json("ls", tmp_path)[1]["checkpoints"] == []


def test_ls_of_an_empty_folder_says_that_there_is_no_checkpoint(tmp_path: Path) -> None:
    result = call("ls", tmp_path)
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path} has no checkpoint yet\n")


def test_ls_of_a_foreign_folder_says_what_is_there_instead(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_text("")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("")
    result = call("ls", tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is no run of Holdfast's; the folder holds holiday.jpg, latest_checkpointed_iteration.txt" in result.stderr


def test_ls_of_one_checkpoint_names_its_run(run: Path) -> None:
    for source in (run / "step-000000020", run / "latest", f"{run}@20"):
        result = call("ls", source)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"one checkpoint, not a run; the run is {run}" in result.stderr


# show


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


# verify


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


def test_verify_takes_the_depths_of_the_library() -> None:
    assert [depth.value for depth in Depth] == list(get_args(verifying.Depth))


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


# What every command shares


@pytest.mark.parametrize("words", [("ls",), ("show",), ("verify",), ("tag", "x"), ("prune", "--keep-last", "1")])
def test_what_is_not_there_is_one_line_and_exit_code_2(words: tuple[str, ...], run: Path, tmp_path: Path) -> None:
    command, *options = words
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    sources = ["nothing", "file", "file/below", "dangling", "loop", "x" * 300]
    for source in [*(str(tmp_path / name) for name in sources), "", "nfs9://server/run"]:
        result = call(command, source, *options)
        assert (result.exit_code, result.stdout) == (2, ""), source
        assert re.fullmatch(r"error: [^\n]+\n", result.stderr), source


@pytest.mark.parametrize("words", [("show",), ("verify",), ("tag", "x")])
@pytest.mark.parametrize(
    "suffix", ["@999", "@nobody", "@best", "@best:nothing", "@!", "/step-000000040", "@10 --select 20"]
)
def test_a_selector_that_finds_nothing_is_exit_code_2(words: tuple[str, ...], suffix: str, run: Path) -> None:
    source, *options = f"{run}{suffix}".split()
    result = call(words[0], source, *words[1:], *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", result.stderr)


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
def hostile(run: Path) -> Path:
    """A checkpoint with a right digest in which everything that can be a text is meant to harm."""
    folder = run / "step-000000030"
    manifest = manifest_of(folder)
    first, *others = manifest.tensors
    rewrite(
        folder,
        created=HOSTILE,
        run_id=HOSTILE,
        tags=(HOSTILE,),
        versions={HOSTILE: HOSTILE},
        metrics={HOSTILE: HOSTILE, "broken": {"$float": HOSTILE}},
        progress={HOSTILE: {HOSTILE: [HOSTILE, {HOSTILE: 1}]}},
        extra={HOSTILE: {"$path": HOSTILE}},
        config=HOSTILE,
        guards={HOSTILE: HOSTILE},
        tensors=(msgspec.structs.replace(first, name=f"model.{HOSTILE}"), *others),
        trees=(msgspec.structs.replace(manifest.trees[0], kind=HOSTILE), *manifest.trees[1:]),
    )
    return run


@pytest.mark.parametrize(
    "words", [("ls",), ("show", "--tensors"), ("show", "--tensors", HOSTILE), ("verify",), ("verify", "--all")]
)
def test_a_hostile_checkpoint_cannot_reach_the_terminal(hostile: Path, words: tuple[str, ...]) -> None:
    command, *options = words
    for extra in ([], ["--json"]):
        result = call(command, hostile, *options, *extra)
        assert result.exit_code in (0, 1, 2)
        printed = result.stdout + result.stderr
        assert "pwned" in printed
        assert all(letter.isprintable() or letter == "\n" for letter in printed)
        assert not re.search(r"^sound: 9", printed, re.MULTILINE)
        assert "[red]x[/red]" in printed


def test_a_hostile_manifest_cannot_forge_a_line_of_an_error(run: Path) -> None:
    manifest = manifest_of(run / "step-000000030")
    broken = msgspec.structs.replace(manifest.tensors[0], name=HOSTILE, chunks=())
    rewrite(run / "step-000000030", tensors=(broken, *manifest.tensors[1:]))
    for words in (("ls", run), ("show", run / "step-000000030"), ("show", f"{run}@30"), ("verify", run, "--all")):
        result = call(*words)
        printed = result.stdout + result.stderr
        # `ls` does not look at the tensors, which have the digest that the manifest states.
        assert result.exit_code == (0 if words[0] == "ls" else 1)
        assert all(letter.isprintable() or letter == "\n" for letter in printed)
        assert not re.search(r"^\s*sound: 9", printed, re.MULTILINE)


def test_text_is_made_visible_and_else_left_alone() -> None:
    assert visible("model.größe [x] 模型 :smile:") == "model.größe [x] 模型 :smile:"
    assert visible("a\x1b[0m\tb\n\x7f\x9b\u202e\udc80") == r"a\x1b[0m\tb\n\x7f\x9b\u202e\udc80"


def test_names_that_the_terminal_cannot_encode_are_escaped(run: Path) -> None:
    rewrite(run / "step-000000030", metrics={"größe": 1})
    result = process("ls", run, env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0
    assert r"gr\xf6\xdfe 1" in result.stdout


def test_output_to_a_pipe_is_plain_and_not_folded(run: Path) -> None:
    rewrite(run / "step-000000030", metrics={f"a_rather_long_name_of_a_metric_{index}": 0.5 for index in range(4)})
    result = process("ls", run)
    assert "\x1b" not in result.stdout
    assert "metric_0 0.5, a_rather_long_name_of_a_metric_1 0.5" in result.stdout
    assert len(result.stdout.splitlines()) == 7


@pytest.mark.parametrize(
    "words",
    [("ls",), ("show",), ("verify", "--all"), ("show", "--json"), ("tag", "x"), ("prune", "--keep-last", "1", "--yes")],
)
def test_a_closed_pipe_is_quiet_and_is_not_damage(run: Path, words: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "holdfast", words[0], str(run), *words[1:]]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=60)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")


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


# What is not imported

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
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


def test_importing_holdfast_is_quick_and_brings_no_torch() -> None:
    program = (
        "import sys, time; start = time.process_time(); import holdfast; "
        "print(time.process_time() - start, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    took = []
    for _ in range(3):
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        seconds, *imported = result.stdout.split()
        assert imported == ["False", "False"]
        took.append(float(seconds))
    # The best of three: also processor time grows a little where the machine is busy.
    assert min(took) < 0.15
