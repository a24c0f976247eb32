"""Where a configuration is read from, and what is said of a file that is none."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import KeyMissingError
from holdfast.manager.triggers import Every
from holdfast.plugins.config import CheckpointConfig
from holdfast.runs.retention import KeepLast


@pytest.mark.parametrize("name", ["gone.yaml", "gone.toml"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=name) as caught:
        CheckpointConfig.from_file(tmp_path / name)
    assert isinstance(caught.value, KeyMissingError)


def test_a_folder_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "run.toml").mkdir()
    with pytest.raises(holdfast.StorageError, match=r"run\.toml"):
        CheckpointConfig.from_file(tmp_path / "run.toml")


def test_a_file_with_another_suffix_is_refused() -> None:
    with pytest.raises(holdfast.UsageError, match=r"conf/run\.json.*use \.yaml, \.yml or \.toml"):
        CheckpointConfig.from_file("conf/run.json")


@pytest.mark.parametrize(("name", "text"), [("run.yaml", "run: [unclosed"), ("run.toml", "run = ")])
def test_a_file_that_cannot_be_parsed_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(holdfast.UsageError, match=f"{name}: the config is no (YAML|TOML): [^:]+"):
        CheckpointConfig.from_file(tmp_path / name)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(holdfast.UsageError, match=r"run\.toml: the file is no text in UTF-8"):
        CheckpointConfig.from_file(tmp_path / "run.toml")


def test_a_mistake_in_a_file_names_file_and_key(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("save: {evry_steps: 5}")
    with pytest.raises(holdfast.UsageError) as caught:
        CheckpointConfig.from_file(tmp_path / "run.yaml")
    assert caught.value.file == str(tmp_path / "run.yaml")
    assert "'save.evry_steps' is no key of a checkpoint config; did you mean 'save.every_steps'?" in str(caught.value)


def test_without_pyyaml_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match="pip install pyyaml"):
        CheckpointConfig.from_yaml("run: runs/tiny")


@pytest.mark.parametrize("limit", ["3:50", "1:30.5", "-3:50"])
def test_yaml_makes_no_number_of_a_time(limit: str) -> None:
    with pytest.raises(holdfast.UsageError, match=rf"TimeLimit\(limit='{limit}'\) is no time that passes"):
        CheckpointConfig.from_yaml(f"save: {{time_limit: {limit}}}")


def test_yaml_has_its_other_numbers() -> None:
    config = CheckpointConfig.from_yaml("{timeout: 1.5e+2, staging_limit_bytes: 0x10, save: {every_steps: 1_000}}")
    assert (config.timeout, config.staging_limit_bytes, config.save) == (150.0, 16, Every(steps=1000))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("run: a\nmode: sync\nrun: b\n", "'run' stands in line 1 and again in line 3; keep one of them"),
        ("save:\n  every_steps: 5\n  'every_steps': 6\n", "'every_steps' stands in line 2 and again in line 3"),
        ("keep:\n  best:\n  - {metric: a}\n  - {metric: b, n: 1, n: 2}\n", "'n' stands in line 4 and again in line 4"),
    ],
    ids=["on top", "inside", "in a list"],
)
def test_a_key_that_stands_twice_is_refused_with_its_lines(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    for source in (text, tmp_path / "run.yaml"):
        with pytest.raises(holdfast.UsageError) as caught:
            CheckpointConfig.from_yaml(source)
        assert problem in str(caught.value)
    assert str(tmp_path / "run.yaml") in str(caught.value)


def test_a_mapping_of_yaml_may_override_what_it_merges_in(tmp_path: Path) -> None:
    text = """
    keep: &keep {last: 3, all: false}
    extra: {deep: &deep {<<: *keep, last: 4}}
    more: {<<: [*deep, *keep], last: 5}
    """

    @dataclass(frozen=True, kw_only=True)
    class Wide(CheckpointConfig):
        extra: Any
        more: Any

    config = Wide.from_yaml(text)
    assert (config.extra["deep"]["last"], config.more["last"], config.keep) == (4, 5, KeepLast(3))


@pytest.mark.parametrize("text", ["run: 2024-13-45", "run: \x01", "run: " + "[" * 5000])
def test_what_yaml_cannot_make_anything_of_is_no_yaml(text: str) -> None:
    with pytest.raises(holdfast.UsageError, match="the config is no YAML"):
        CheckpointConfig.from_yaml(text)


def test_yaml_runs_no_code(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with pytest.raises(holdfast.UsageError, match="no YAML"):
        CheckpointConfig.from_yaml(f"run: !!python/object/apply:os.mkdir ['{marker}']")
    assert not marker.exists()
