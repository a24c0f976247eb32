"""`holdfast ls` on real runs: what it lists, in which order, and its exit codes."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.cli.scene import ENVIRONMENT, call, call_json, manifest_of, process, rewrite


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
