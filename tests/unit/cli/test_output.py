"""What reaches the terminal: nothing that a checkpoint can forge, nothing folded in a pipe."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from holdfast.cli.output import visible
from tests.unit.cli.scene import ENVIRONMENT, call, manifest_of, process, rewrite

# Clears the screen, sets the title, rings, recolours (also with a C1 byte), goes back, forges a line, turns the text.
HOSTILE = "\x1b[2J\x1b]0;pwned\x07[red]x[/red]\r\nsound: 9 checkpoints\x9b31m\u202eevil"


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
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=300)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")
