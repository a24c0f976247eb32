"""`holdfast prune` on real runs: what goes, what stays, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.cli.output import size_text
from holdfast.runs.catalog import Catalog
from holdfast.runs.readers import reading
from holdfast.storage.local.local import LocalStorage
from tests.unit.cli.scene import call, components, files, printed_json, process, steps, training

pytestmark = pytest.mark.slow

# Clears the screen, sets the title, rings, recolours (also with a C1 byte), goes back, forges a line, turns the text.
HOSTILE = "\x1b[2J\x1b]0;pwned\x07[red]x[/red]\r\nfreed 9 TiB\x9b31m\u202eevil"


@pytest.fixture
def run(run_of_five: Path) -> Path:
    return run_of_five


def committed(run: Path) -> dict[str, bytes]:
    """Everything of the checkpoints, without the signs of life that a training leaves."""
    return {name: data for name, data in files(run).items() if name.startswith("step-")}


def attempt(run: Path, step: int, size_bytes: int) -> Path:
    """An attempt whose writer has died: it is no process that there is."""
    with subprocess.Popen([sys.executable, "-c", _ATTEMPT, str(run), str(step)], stdout=subprocess.PIPE) as died:
        died.communicate(timeout=300)
    folder = run / f"step-{step:09d}"
    (folder / "rank-00000.safetensors").write_bytes(b"x" * size_bytes)
    return folder


_ATTEMPT = """
import sys
from holdfast.runs.catalog import Catalog
from holdfast.storage.local.local import LocalStorage
Catalog(LocalStorage(sys.argv[1])).attempts.claim(int(sys.argv[2]), 1)
"""


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
    found = printed_json("prune", run, "--keep-last", 4)
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
    planned = printed_json("prune", run, *words.split())
    assert [one["step"] for one in planned["checkpoints"] if one["keep"]] == kept
    assert steps(run) == [50, 40, 30, 20, 10]
    done = printed_json("prune", run, *words.split(), "--yes")
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
        assert printed_json("prune", run, "--keep-last", 1)["planned_bytes"] > 0
    assert steps(run) == [100, 90, 80, 70, 60]


def test_prune_of_a_run_without_a_sound_manifest_is_damage_and_deletes_nothing(run: Path, tmp_path: Path) -> None:
    for manifest in run.glob("step-*/manifest.json"):
        manifest.write_text("garbage")
    before = files(run)
    result = call("prune", run, "--keep-last", 1, "--yes")
    assert (result.exit_code, result.stdout, files(run)) == (1, "", before)
    (tmp_path / "empty").mkdir()
    assert call("prune", tmp_path / "empty", "--keep-last", 1, "--yes").exit_code == 2


def test_a_folder_whose_manifest_is_damaged_is_named_and_stays(run: Path) -> None:
    (run / "step-000000010" / "manifest.json").write_text("garbage")
    result = call("prune", run, "--keep-last", 1, "--yes")
    assert result.exit_code == 0
    assert "note: step-000000010 is rejected: the content is no manifest" in result.stderr
    assert sorted(path.name for path in run.glob("step-*")) == ["step-000000010", "step-000000050"]


def test_what_somebody_reads_stays(run: Path) -> None:
    with reading(LocalStorage(str(run)), "step-000000010"):
        found = printed_json("prune", run, "--keep-last", 1, "--yes")
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
    assert printed_json("prune", run, "--keep-last", 5)["attempts"] == [
        {"folder": folder.name, "size_bytes": size, "cleared": False}
    ]
    assert folder.exists()
    done = printed_json("prune", run, "--keep-last", 5, "--yes")
    assert (done["planned_bytes"], done["freed_bytes"]) == (size, size)
    assert done["attempts"] == [{"folder": folder.name, "size_bytes": size, "cleared": True}]
    assert not folder.exists()


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
    assert [one["damage"] for one in printed_json("ls", run)["checkpoints"]] == [damage, None, None, None, None]
    meant = f"{run}@50"
    assert printed_json("show", meant)["damage"] == damage
    assert f"damage      {damage}" in [line.rstrip() for line in call("show", meant).stdout.splitlines()]
    assert call("verify", meant).exit_code == 1
    assert printed_json("show", run)["step"] == 40


def test_prune_keeps_what_a_restore_found_damaged_aside(run: Path) -> None:
    damage = damaged_by_a_restore(run)
    found = printed_json("prune", run, "--keep-last", 1, "--yes")
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
    assert printed_json("ls", run)["attempts"] == listed
    assert call("show", run / "step-000000060").exit_code == 2


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
