"""Changing a run from the command line, on real runs: what goes and what stays, tags, and how notes are shown."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app
from holdfast.cli.output import size_text
from holdfast.ondisk.manifest import decode_manifest, encode_manifest
from holdfast.runs.catalog import Catalog
from holdfast.runs.readers import reading
from holdfast.storage.local.local import LocalStorage

pytestmark = pytest.mark.slow

# Clears the screen, sets the title, rings, recolours (also with a C1 byte), goes back, forges a line, turns the text.
HOSTILE = "\x1b[2J\x1b]0;pwned\x07[red]x[/red]\r\nfreed 9 TiB\x9b31m\u202eevil"
LOSSES = {10: 0.5, 20: 0.1, 30: 0.4, 40: 0.2, 50: 0.3}


def components() -> dict[str, Any]:
    return {"model": torch.nn.Linear(4, 3)}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five checkpoints. The least loss is that of step 20, the highest accuracy that of step 10."""
    run = tmp_path_factory.mktemp("made") / "run"
    with holdfast.CheckpointManager(run, components()) as manager:
        for step, loss in LOSSES.items():
            manager.save(step, metrics={"val_loss": loss, "accuracy": 1 - step / 100})
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run", symlinks=True))


def call(*words: object) -> Any:
    return CliRunner(env={"COLUMNS": "1000"}).invoke(app, [str(word) for word in words], prog_name="holdfast")


def call_json(*words: object) -> Any:
    result = call(*words, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def steps(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in holdfast.checkpoints(run)]


def files(run: Path) -> dict[str, bytes]:
    """Everything that lies in a run."""
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def committed(run: Path) -> dict[str, bytes]:
    """The same without the signs of life that a training leaves."""
    return {name: data for name, data in files(run).items() if name.startswith("step-")}


def attempt(run: Path, step: int, size_bytes: int) -> Path:
    """An attempt whose writer has died: it is no process that there is."""
    with subprocess.Popen([sys.executable, "-c", _ATTEMPT, str(run), str(step)], stdout=subprocess.PIPE) as died:
        died.communicate(timeout=60)
    folder = run / f"step-{step:09d}"
    (folder / "rank-00000.safetensors").write_bytes(b"x" * size_bytes)
    return folder


_ATTEMPT = """
import sys
from holdfast.runs.catalog import Catalog
from holdfast.storage.local.local import LocalStorage
Catalog(LocalStorage(sys.argv[1])).attempts.claim(int(sys.argv[2]), 1)
"""

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
            process.communicate("\n", timeout=60)
    assert process.returncode == 0


# prune: the plan


def test_prune_shows_the_plan_and_touches_nothing(run: Path) -> None:
    before = files(run)
    result = call("prune", run, "--keep-last", 2, "--keep-best", "val_loss")
    assert (result.exit_code, result.stderr) == (0, "")
    header, *rows, verdict = result.stdout.splitlines()
    assert header.split() == ["step", "folder", "size", "reasons"]
    size = re.escape(size_text(holdfast.resolve(run).size_bytes))
    for row, (word, step, reasons) in zip(
        rows,
        [
            ("keep", 50, "the newest; among the last 2"),
            ("keep", 40, "among the last 2"),
            ("delete", 30, "no policy keeps it"),
            ("keep", 20, r"best 1 of val_loss \(min\): 0.1"),
            ("delete", 10, "no policy keeps it"),
        ],
        strict=True,
    ):
        assert re.fullmatch(rf"{word} +{step}  step-0000000{step}  {size}  {reasons} *", row), row
    room = size_text(2 * holdfast.resolve(run).size_bytes)
    assert verdict == f"nothing was deleted; --yes would free {room}: 2 of 5 checkpoints"
    assert files(run) == before


def test_prune_as_json_has_the_plan_and_nothing_else_on_stdout(run: Path) -> None:
    found = call_json("prune", run, "--keep-last", 4)
    size = holdfast.resolve(run).size_bytes
    assert set(found) == {"run", "dry_run", "planned_bytes", "freed_bytes", "checkpoints", "attempts"}
    assert (found["run"], found["dry_run"], found["attempts"]) == (str(run), True, [])
    assert (found["planned_bytes"], found["freed_bytes"]) == (size, 0)
    assert [one["step"] for one in found["checkpoints"]] == [50, 40, 30, 20, 10]
    assert found["checkpoints"][-1] == {
        "folder": "step-000000010",
        "path": str(run / "step-000000010"),
        "step": 10,
        "size_bytes": size,
        "keep": False,
        "reasons": ["no policy keeps it"],
        "deleted": False,
    }
    assert found["checkpoints"][0]["reasons"] == ["the newest", "among the last 4"]


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("--keep-last 2", [50, 40]),
        ("--keep-last 9", [50, 40, 30, 20, 10]),
        ("--keep-best val_loss", [50, 20]),
        ("--keep-best val_loss:2", [50, 40, 20]),
        ("--keep-best val_loss:1:min", [50, 20]),
        ("--keep-best val_loss:2:max", [50, 30, 10]),
        ("--keep-best val_loss --keep-best accuracy:1:max", [50, 20, 10]),
        ("--keep-every-steps 20", [50, 40, 20]),
        ("--keep-every-minutes 60", [50, 10]),
        ("--keep-every-minutes 0.000001", [50, 40, 30, 20, 10]),
        ("--keep-tagged", [50]),
        ("--keep-tagged --keep-last 2 --keep-best accuracy:1:max", [50, 40, 10]),
    ],
)
def test_prune_deletes_exactly_what_it_said_it_would(run: Path, words: str, kept: list[int]) -> None:
    planned = call_json("prune", run, *words.split())
    assert [one["step"] for one in planned["checkpoints"] if one["keep"]] == kept
    assert steps(run) == [50, 40, 30, 20, 10]
    done = call_json("prune", run, *words.split(), "--yes")
    assert (done["dry_run"], done["freed_bytes"]) == (False, planned["planned_bytes"])
    assert [one["deleted"] for one in done["checkpoints"]] == [not one["keep"] for one in planned["checkpoints"]]
    for before, after in zip(planned["checkpoints"], done["checkpoints"], strict=True):
        assert after == {**before, "deleted": not before["keep"]}
    assert steps(run) == kept
    assert sorted(path.name for path in run.glob("step-*")) == [f"step-{step:09d}" for step in sorted(kept)]
    assert call("verify", run, "--all").exit_code == 0


@pytest.mark.parametrize(("words", "kept"), [("val:loss:1", [3, 1]), ("val:loss:1:max", [3, 2]), ("val:1:1", [3])])
def test_prune_takes_a_metric_with_a_colon_in_its_name(tmp_path: Path, words: str, kept: list[int]) -> None:
    with holdfast.CheckpointManager(tmp_path, components(), mode="sync") as manager:
        for step, value in ((1, 1.0), (2, 3.0), (3, 2.0)):
            manager.save(step, metrics={"val:loss": value, "val:1": -step})
    assert call("prune", tmp_path, "--keep-best", words, "--yes").exit_code == 0
    assert steps(tmp_path) == kept
    refused = call("prune", tmp_path, "--keep-best", "val:loss")
    assert refused.exit_code == 2
    assert "a METRIC with a ':' in it needs its N" in refused.stderr


def test_prune_says_what_was_freed(run: Path) -> None:
    room = size_text(3 * holdfast.resolve(run).size_bytes)
    result = call("prune", run, "--keep-last", 2, "--yes")
    assert (result.exit_code, result.stderr) == (0, "")
    assert re.findall(r"^\w+", result.stdout, re.MULTILINE) == [*["keep"] * 2, *["deleted"] * 3, "freed"]
    assert result.stdout.splitlines()[-1] == f"freed {room}: 3 of 5 checkpoints"
    again = call("prune", run, "--keep-last", 2, "--yes")
    assert again.stdout.splitlines()[-1] == "nothing to delete: 2 checkpoints kept"


# prune: what it refuses


def test_prune_has_to_be_told_what_to_keep(run: Path) -> None:
    for words in ((), ("--yes",), ("--json", "--yes")):
        result = call("prune", run, *words)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("error: no option says what to keep; use --keep-last, --keep-best, ")
    assert len(steps(run)) == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--keep-last 0", "KeepLast takes a whole number from 1 on, not 0"),
        ("--keep-last -1", "KeepLast takes a whole number from 1 on, not -1"),
        ("--keep-every-steps 0", "KeepEvery(steps=...) takes a whole number from 1 on, not 0"),
        ("--keep-every-steps -5", "KeepEvery(steps=...) takes a whole number from 1 on, not -5"),
        ("--keep-every-minutes 0", "KeepEvery(minutes=...) takes a positive number, not 0.0"),
        ("--keep-every-minutes nan", "KeepEvery(minutes=...) takes a positive number, not nan"),
        ("--keep-best val_loss:0", "KeepBest takes a whole number from 1 on, not 0"),
        ("--keep-best val_loss:-2:max", "KeepBest takes a whole number from 1 on, not -2"),
        ("--keep-best val_loss:1:mix", "KeepBest(mode='mix'); use 'min' or 'max'; did you mean 'min'?"),
        ("--keep-best :2", "KeepBest has no metric ''"),
        (
            "--keep-best val_loss:max",
            "--keep-best 'val_loss:max' cannot be read; write METRIC, METRIC:N or METRIC:N:max",
        ),
        ("--keep-best val_loss:", "--keep-best 'val_loss:' cannot be read"),
        ("--keep-best val_loss:1:max:", "--keep-best 'val_loss:1:max:' cannot be read"),
        (f"--keep-best val_loss:{'9' * 5000}", "cannot be read"),
        ("--keep-best vall_loss:2", "no checkpoint has the metric 'vall_loss'; there are: accuracy, val_loss"),
    ],
)
def test_prune_refuses_what_cannot_be_meant(run: Path, words: str, message: str) -> None:
    before = files(run)
    for more in ((), ("--yes",), ("--keep-last", "1", "--yes")):
        if not (more and words.startswith("--keep-last")):
            result = call("prune", run, *words.split(), *more)
            assert (result.exit_code, result.stdout) == (2, "")
            assert re.fullmatch(r"error: [^\n]+\n", result.stderr)
            assert message in result.stderr
    assert files(run) == before


def test_prune_of_one_checkpoint_names_its_run(run: Path) -> None:
    for source in (run / "step-000000020", run / "latest", f"{run}@20"):
        result = call("prune", source, "--keep-last", 1, "--yes")
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"one checkpoint, not a run; the run is {run}" in result.stderr
    assert len(steps(run)) == 5


def test_prune_leaves_a_run_alone_that_is_being_trained(run: Path) -> None:
    with training(run) as process:
        before = committed(run)
        result = call("prune", run, "--keep-last", 1, "--yes")
        assert (result.exit_code, result.stdout) == (2, "")
        assert re.fullmatch(
            rf"error: run {run}: process {process.pid} on \S+, since \S+, holds this run; "
            r"its last heartbeat was \d+ s ago; end that process .* `holdfast unlock RUN --force` .*\n",
            result.stderr,
        )
        assert committed(run) == before
        # To look needs no permission.
        assert call_json("prune", run, "--keep-last", 1)["planned_bytes"] > 0
    assert steps(run) == [100, 90, 80, 70, 60]


def test_prune_of_a_run_without_a_sound_manifest_is_damage_and_deletes_nothing(run: Path, tmp_path: Path) -> None:
    for manifest in run.glob("step-*/manifest.json"):
        manifest.write_text("garbage")
    before = files(run)
    result = call("prune", run, "--keep-last", 1, "--yes")
    assert (result.exit_code, result.stdout, files(run)) == (1, "", before)
    (tmp_path / "empty").mkdir()
    assert call("prune", tmp_path / "empty", "--keep-last", 1, "--yes").exit_code == 2


# prune: what stays whatever the options say


def test_a_folder_whose_manifest_is_damaged_is_named_and_stays(run: Path) -> None:
    (run / "step-000000010" / "manifest.json").write_text("garbage")
    result = call("prune", run, "--keep-last", 1, "--yes")
    assert result.exit_code == 0
    assert "note: step-000000010 is rejected: the content is no manifest" in result.stderr
    assert sorted(path.name for path in run.glob("step-*")) == ["step-000000010", "step-000000050"]


def test_what_somebody_reads_stays(run: Path) -> None:
    with reading(LocalStorage(str(run)), "step-000000010"):
        found = call_json("prune", run, "--keep-last", 1, "--yes")
        assert found["checkpoints"][-1]["reasons"] == ["a process is reading it"]
        assert steps(run) == [50, 10]
    call("prune", run, "--keep-last", 1, "--yes")
    assert steps(run) == [50]


def test_what_has_a_tag_stays(run: Path) -> None:
    call("tag", f"{run}@10", "release")
    call("prune", run, "--keep-last", 1, "--yes")
    assert steps(run) == [50, 10]
    call("tag", f"{run}@release", "release", "--remove")
    call("prune", run, "--keep-last", 1, "--yes")
    assert steps(run) == [50]
    assert not list(run.glob("notes/*"))


def test_prune_clears_what_dead_attempts_left_and_counts_it(run: Path) -> None:
    folder = attempt(run, 60, 3 << 20)
    size = 3 << 20
    result = call("prune", run, "--keep-last", 5)
    assert re.search(r"^clear +60  step-000000060 +3.0 MiB  never committed", result.stdout, re.MULTILINE)
    assert result.stdout.endswith("--yes would free 3.0 MiB: 0 of 5 checkpoints, and what 1 attempt left\n")
    assert call_json("prune", run, "--keep-last", 5)["attempts"] == [
        {"folder": folder.name, "size_bytes": size, "cleared": False}
    ]
    assert folder.exists()
    done = call_json("prune", run, "--keep-last", 5, "--yes")
    assert (done["planned_bytes"], done["freed_bytes"]) == (size, size)
    assert done["attempts"] == [{"folder": folder.name, "size_bytes": size, "cleared": True}]
    assert not folder.exists()


# tag


def test_a_tag_is_given_and_taken_back(run: Path) -> None:
    result = call("tag", f"{run}@20", "release")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "step-000000020: tagged release\n", "")
    assert holdfast.resolve(run, "release").step == 20
    assert call("tag", f"{run}@release", "second").stdout == "step-000000020: tagged release, second\n"
    result = call("tag", f"{run}@release", "release", "--remove")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "step-000000020: tagged second\n", "")
    assert call("tag", f"{run}@20", "second", "--remove").stdout == "step-000000020: no tag\n"
    assert holdfast.resolve(run, 20).tags == ()


def test_a_tag_that_came_with_the_save_can_be_taken_back_and_given_again(run: Path) -> None:
    with holdfast.CheckpointManager(run, components()) as manager:
        manager.save(60, tag="early")
    call("tag", f"{run}@early", "early", "--remove")
    assert holdfast.resolve(run, 60).tags == ()
    call("tag", f"{run}@60", "early")
    assert holdfast.resolve(run, 60).tags == ("early",)


@pytest.mark.parametrize("source", ["{}", "{}@best:val_loss:max", "{}/latest", "{}/step-000000010/manifest.json"])
def test_tag_takes_every_way_to_name_a_checkpoint_and_speaks_json(run: Path, source: str) -> None:
    meant = holdfast.resolve(source.format(run))
    assert call_json("tag", source.format(run), "release") == {
        "path": meant.path,
        "folder": meant.folder,
        "step": meant.step,
        "digest": meant.digest,
        "tags": ["release"],
    }
    assert call_json("tag", run, "more", "--select", "release")["tags"] == ["release", "more"]


def test_a_tag_that_is_there_already_is_not_written_again(run: Path) -> None:
    call("tag", f"{run}@20", "release")
    before = files(run)
    assert call("tag", f"{run}@20", "release").stdout == "step-000000020: tagged release\n"
    assert files(run) == before


def test_a_tag_that_is_not_there_cannot_be_taken_back(run: Path) -> None:
    call("tag", f"{run}@20", "release")
    before = files(run)
    for source, advice in ((f"{run}@20", "its tags are: release"), (f"{run}@10", "its tags are: none")):
        result = call("tag", source, "relaese", "--remove")
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"has no tag 'relaese'; {advice}" in result.stderr
    assert files(run) == before


@pytest.mark.parametrize("name", ["", "latest", "best", "step-000000010", "10", "a b", "a:b", "ä", "x" * 65, HOSTILE])
def test_a_name_that_cannot_be_a_tag_is_refused(run: Path, name: str) -> None:
    before = files(run)
    for more in ((), ("--remove",)):
        result = call("tag", f"{run}@20", name, *more)
        assert (result.exit_code, result.stdout) == (2, "")
        assert re.fullmatch(r"error: [^\n]+\n", result.stderr)
        assert all(letter.isprintable() or letter == "\n" for letter in result.stderr)
    assert files(run) == before


def test_who_tags_an_older_checkpoint_too_is_told_which_one_the_tag_means(run: Path) -> None:
    call("tag", f"{run}@40", "release")
    result = call("tag", f"{run}@20", "release")
    assert (result.exit_code, result.stdout) == (0, "step-000000020: tagged release\n")
    assert result.stderr.startswith("note: step-000000040 has the tag 'release' too, and is the later one")
    assert call("tag", f"{run}@50", "release").stderr == ""


def test_a_tag_that_is_given_while_the_run_is_trained_is_heeded_by_the_training(run: Path) -> None:
    with training(run):
        assert call("tag", f"{run}@20", "release").exit_code == 0
        assert steps(run) == [50, 40, 30, 20, 10]
    assert steps(run) == [100, 90, 80, 70, 60, 20]


# What notes do to ls and show


def test_ls_and_show_have_the_tags_and_the_metrics_that_came_late(run: Path) -> None:
    with holdfast.CheckpointManager(run, components()) as manager:
        manager.report(50, {"val_loss": 0.01, "bleu": float("nan")})
        manager.tag(50, "release")
    metrics = {"val_loss": 0.01, "accuracy": 0.5, "bleu": "nan"}
    listed, shown = call_json("ls", run)["checkpoints"][0], call_json("show", run)
    for found in (listed, shown):
        assert (found["metrics"], found["tags"], found["damage"]) == (metrics, ["release"], None)
    assert re.search(r"^\* +50 .* accuracy 0.5, val_loss 0.01, bleu nan +release", call("ls", run).stdout, re.MULTILINE)
    lines = [line.rstrip() for line in call("show", run).stdout.splitlines()]
    for line in ("tags        release", "  val_loss: 0.01", "  bleu: nan"):
        assert line in lines
    assert not any(line.startswith("damage") for line in lines)


def damaged_by_a_restore(run: Path) -> str:
    """What is noted after the newest checkpoint was damaged and a training was restored."""
    file = run / "step-000000050" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    # A trigger makes the manager the run's writer: only he writes down what he found.
    with holdfast.CheckpointManager(run, components(), save=holdfast.Every(steps=1000)) as manager:
        assert manager.restore().step == 40
    return holdfast.resolve(run, 50).damage


def test_ls_and_show_mark_what_a_restore_found_damaged(run: Path) -> None:
    damage = damaged_by_a_restore(run)
    assert "rank-00000.safetensors" in damage
    result = call("ls", run)
    assert result.exit_code == 0
    rows = result.stdout.splitlines()
    assert re.match(r" ?! +50 ", rows[1])
    assert re.match(r"\* +40 ", rows[2])
    assert f"! found damaged: step-000000050: {damage}" in rows
    assert [one["damage"] for one in call_json("ls", run)["checkpoints"]] == [damage, None, None, None, None]
    meant = f"{run}@50"
    assert call_json("show", meant)["damage"] == damage
    assert f"damage      {damage}" in [line.rstrip() for line in call("show", meant).stdout.splitlines()]
    assert call("verify", meant).exit_code == 1
    assert call_json("show", run)["step"] == 40


def test_prune_keeps_what_a_restore_found_damaged_aside(run: Path) -> None:
    damage = damaged_by_a_restore(run)
    found = call_json("prune", run, "--keep-last", 1, "--yes")
    reasons = {one["step"]: one["reasons"] for one in found["checkpoints"] if one["keep"]}
    assert reasons == {50: [f"damaged, kept for inspection: {damage}"], 40: ["the newest", "among the last 1"]}
    assert steps(run) == [50, 40]


def test_ls_lists_an_attempt_that_was_given_up_like_any_other(run: Path) -> None:
    attempt(run, 60, 1000)
    attempt(run, 70, 1000)
    Catalog(LocalStorage(str(run))).attempts.close_older(1000)
    attempt(run, 80, 1000)
    result = call("ls", run)
    assert result.exit_code == 0
    listed = ["step-000000060", "step-000000070", "step-000000080"]
    assert result.stdout.splitlines()[-4:] == ["3 attempts never committed:", *(f"  {name}" for name in listed)]
    assert call_json("ls", run)["attempts"] == listed
    assert call("show", run / "step-000000060").exit_code == 2


# What a hostile run cannot do


@pytest.fixture
def hostile(run: Path) -> Path:
    """A checkpoint and notes that are sound in form, in which every text is meant to harm."""
    place = run / "step-000000030" / "manifest.json"
    manifest, _ = decode_manifest(place.read_bytes())
    changed = msgspec.structs.replace(manifest, tags=(HOSTILE,), metrics={HOSTILE: 1.0, "val_loss": 0.0})
    place.write_bytes(encode_manifest(changed)[0])
    catalog = Catalog(LocalStorage(str(run)))
    for checkpoint in catalog.scan().checkpoints[:3]:
        catalog.annotations.add(checkpoint, tag=f"{HOSTILE}{checkpoint.step}", metrics={HOSTILE: 2.0})
    catalog.annotations.add(checkpoint, damage=HOSTILE)
    (run / "notes" / "step-000000030--999999.json").write_text(json.dumps({"checkpoint": [HOSTILE], HOSTILE: 1}))
    return run


@pytest.mark.parametrize(
    "words",
    [
        ("ls", "{}"),
        ("show", "{}@30"),
        ("prune", "{}", "--keep-last", "1"),
        ("prune", "{}", "--keep-last", "1", "--yes"),
        ("prune", "{}", "--keep-best", "nothing"),
        ("prune", "{}", "--keep-best", f"{HOSTILE}:1"),
        ("prune", "{}", "--keep-best", f"{HOSTILE}:x"),
        ("tag", "{}@30", "release"),
        ("tag", "{}@30", HOSTILE, "--remove"),
        ("tag", "{}@30", "release", "--remove"),
    ],
)
def test_a_hostile_note_cannot_reach_the_terminal(hostile: Path, words: tuple[str, ...]) -> None:
    spelled = [word.replace("{}", str(hostile)) for word in words]
    for more in ([], ["--json"]):
        result = process(*spelled, *more)
        printed = result.stdout + result.stderr
        assert result.returncode in (0, 2)
        assert "This is a bug" not in printed
        assert "pwned" in printed
        assert all(letter.isprintable() or letter == "\n" for letter in printed)
        assert not re.search(r"^\s*freed 9 TiB", printed, re.MULTILINE)


def test_what_the_library_warns_of_is_a_note(run: Path) -> None:
    (run / "notes").mkdir()
    (run / "notes" / "step-000000030--000001.json").write_text("garbage")
    for words in (("ls", run), ("show", run), ("prune", run, "--keep-last", 1), ("tag", run, "release")):
        result = process(*words)
        assert result.returncode == 0
        lines = result.stderr.splitlines()
        assert lines
        assert all(re.match(r"note: the note step-000000030--000001.json is damaged ", line) for line in lines)


def test_waiting_for_a_training_on_another_machine_is_said_and_its_name_cannot_harm(run: Path) -> None:
    holder = {"host": HOSTILE, "machine": "elsewhere", "process": 1, "birth": 1}
    claim = {"holder": holder, "started": "2026-01-01T00:00:00+00:00", "timeout_seconds": 0.2}
    (run / "lease" / "000000099.json").write_text(json.dumps(claim))
    result = process("prune", run, "--keep-last", 1, "--yes")
    assert (result.returncode, steps(run)) == (0, [50])
    assert re.fullmatch(r"note: process 1 on .*pwned.* waiting up to 0.2 s for a heartbeat of it\n", result.stderr)
    assert all(letter.isprintable() for letter in result.stderr.removesuffix("\n"))


def process(*words: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    command = [sys.executable, "-m", "holdfast", *(str(word) for word in words)]
    return subprocess.run(command, text=True, timeout=60, capture_output=True, env=environment)
