"""How a command names what it works on, and what it prints where that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.cli.scene import call


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
