"""`holdfast tag` on real runs: given, taken back, refused, and how notes are shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

import holdfast
from holdfast.ondisk.manifest import decode_manifest, encode_manifest
from holdfast.runs.catalog import Catalog
from holdfast.storage.local.local import LocalStorage
from tests.unit.cli.scene import call, components, files, printed_json, process, steps, training

pytestmark = pytest.mark.slow

# Clears the screen, sets the title, rings, recolours (also with a C1 byte), goes back, forges a line, turns the text.
HOSTILE = "\x1b[2J\x1b]0;pwned\x07[red]x[/red]\r\nfreed 9 TiB\x9b31m\u202eevil"


@pytest.fixture
def run(run_of_five: Path) -> Path:
    return run_of_five


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
    assert printed_json("tag", source.format(run), "release") == {
        "path": meant.path,
        "folder": meant.folder,
        "step": meant.step,
        "digest": meant.digest,
        "tags": ["release"],
    }
    assert printed_json("tag", run, "more", "--select", "release")["tags"] == ["release", "more"]


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


def test_ls_and_show_have_the_tags_and_the_metrics_that_came_late(run: Path) -> None:
    with holdfast.CheckpointManager(run, components()) as manager:
        manager.report(50, {"val_loss": 0.01, "bleu": float("nan")})
        manager.tag(50, "release")
    metrics = {"val_loss": 0.01, "accuracy": 0.5, "bleu": "nan"}
    listed, shown = printed_json("ls", run)["checkpoints"][0], printed_json("show", run)
    for found in (listed, shown):
        assert (found["metrics"], found["tags"], found["damage"]) == (metrics, ["release"], None)
    assert re.search(r"^\* +50 .* accuracy 0.5, val_loss 0.01, bleu nan +release", call("ls", run).stdout, re.MULTILINE)
    lines = [line.rstrip() for line in call("show", run).stdout.splitlines()]
    for line in ("tags        release", "  val_loss: 0.01", "  bleu: nan"):
        assert line in lines
    assert not any(line.startswith("damage") for line in lines)


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
