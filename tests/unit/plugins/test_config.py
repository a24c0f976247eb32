"""The config of a manager: what it takes, from where, and what it says of a mistake."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest

import holdfast
from holdfast.loading.strategy import Verify
from holdfast.manager.triggers import Every, OnSignal, TimeLimit
from holdfast.plugins import config as configuration
from holdfast.plugins.config import CheckpointConfig
from holdfast.runs.link_names import LinkTemplate
from holdfast.runs.retention import KeepBest, KeepLast
from holdfast.saving.plan import Replicas
from holdfast.saving.stage import ChosenMode

YAML = """
run: runs/tiny
save:
  every_steps: 500
  every_minutes: 10
  on_signal: [SIGTERM, SIGUSR1]
  time_limit: 13:50:00
keep:
  last: 3
  best: {metric: val_loss, n: 2}
timeout: 60
"""

TOML = """
run = "runs/tiny"
timeout = 60

[save]
every_steps = 500
every_minutes = 10
on_signal = ["SIGTERM", "SIGUSR1"]
time_limit = 13:50:00

[keep]
last = 3
best = {metric = "val_loss", n = 2}
"""

MEANT = CheckpointConfig(
    run="runs/tiny",
    save=Every(steps=500) | Every(minutes=10) | OnSignal("SIGTERM", "SIGUSR1") | TimeLimit("13:50:00"),
    keep=KeepLast(3) | KeepBest("val_loss", 2),
    timeout=60,
)


@dataclass(frozen=True, kw_only=True)
class UploadConfig(CheckpointConfig):
    upload_to: str
    retries: int = 3
    headers: dict[str, str] = field(default_factory=dict)
    derived: str = field(default="", init=False)


def message(**values: Any) -> str:
    with pytest.raises(holdfast.UsageError) as caught:
        CheckpointConfig.from_dict(values)
    return str(caught.value)


# Where it comes from


def test_a_config_without_anything_is_that_of_the_built_in_manager() -> None:
    config = CheckpointConfig()
    assert config == CheckpointConfig.from_dict({}) == CheckpointConfig.from_yaml("") == CheckpointConfig.from_toml("")
    assert (config.manager_class, config.run, config.save, config.keep) == (None, None, None, None)


def test_a_dict_yaml_and_toml_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(YAML)
    (tmp_path / "run.toml").write_text(TOML)
    for config in (
        CheckpointConfig.from_yaml(YAML),
        CheckpointConfig.from_yaml(tmp_path / "run.yaml"),
        CheckpointConfig.from_yaml(str(tmp_path / "run.yaml")),
        CheckpointConfig.from_file(tmp_path / "run.yaml"),
        CheckpointConfig.from_toml(TOML),
        CheckpointConfig.from_toml(tmp_path / "run.toml"),
        CheckpointConfig.from_file(str(tmp_path / "run.toml")),
    ):
        assert config == MEANT


def test_one_line_of_yaml_is_no_path() -> None:
    assert CheckpointConfig.from_yaml("run: odd.yaml").run == "odd.yaml"


def test_the_defaults_are_those_of_the_manager() -> None:
    assert get_args(ChosenMode) == configuration.MODES
    assert get_args(Verify) == configuration.VERIFIES
    assert get_args(Replicas) == configuration.REPLICAS
    manager = inspect.signature(holdfast.CheckpointManager).parameters
    names = ("save", "keep", "mode", "resume", "verify", "timeout", "staging_limit_bytes", "rng", "links", "replicas")
    for name in names:
        assert manager[name].default == getattr(CheckpointConfig(), name), name


def test_a_config_is_read_without_torch() -> None:
    code = "import sys, holdfast.plugins.config; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_config_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CheckpointConfig().run = "elsewhere"  # type: ignore[misc]


# Keys


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"tiemout": 5}, "'tiemout' is no key of a checkpoint config; did you mean 'timeout'?"),
        ({"every_steps": 5}, "'every_steps' is no key of a checkpoint config; did you mean 'save.every_steps'?"),
        ({"best": {}}, "'best' is no key of a checkpoint config; did you mean 'keep.best'?"),
        ({"save": {"every_step": 5}}, "did you mean 'save.every_steps'?"),
        ({"keep": {"lst": 5}}, "'keep.lst' is no key of a checkpoint config; did you mean 'keep.last'?"),
        ({"keep": {"best": {"metrc": "x"}}}, "'keep.best.metrc' is no key"),
        ({"keep": {"best": [{"metric": "x"}, {"metrc": "x"}]}}, "did you mean 'keep.best[1].metric'?"),
        ({"save": {1: 5}}, "'save.1' is no key of a checkpoint config; use one of save.every_steps, "),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(values: dict[str, Any], expected: str) -> None:
    assert expected in message(**values)


def test_a_key_that_is_like_none_gets_the_list() -> None:
    text = message(qqq=1)
    assert all(field.name in text for field in dataclasses.fields(CheckpointConfig))


@pytest.mark.parametrize("data", [None, [], "run", 5])
def test_what_is_no_mapping_is_refused(data: Any) -> None:
    with pytest.raises(holdfast.UsageError, match="a checkpoint config is a mapping of keys to values, not"):
        CheckpointConfig.from_dict(data)


# Values


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("manager_class", 5, "'manager_class' takes a text such as 'package.module.Class', not 5 (int)"),
        ("run", 5, "'run' takes a path or a URL, not 5 (int)"),
        ("run", "", "'run' takes a path or a URL, not '' (str)"),
        ("mode", "asinc", "'mode' takes one of 'auto', 'sync', 'async', 'async_pinned', 'async_device', not 'asinc'"),
        ("resume", True, "'resume' takes one of 'auto', 'required', 'never', not True (bool)"),
        ("replicas", "ignore", "'replicas' takes one of 'compare', 'trust', not 'ignore' (str)"),
        ("verify", "on", "'verify' takes one of 'full', 'quick', 'off', not 'on' (str)"),
        ("verify", False, 'YAML reads off as False; write "off", in quotes'),
        ("timeout", "soon", "'timeout' takes a positive number of seconds, not 'soon' (str)"),
        ("timeout", 0, "'timeout' takes a positive number of seconds, not 0 (int)"),
        ("timeout", True, "not True (bool)"),
        ("timeout", float("nan"), "not nan (float)"),
        ("staging_limit_bytes", -1, "'staging_limit_bytes' takes a number of bytes, or nothing for no limit, not -1"),
        ("staging_limit_bytes", 1.5, "not 1.5 (float)"),
        ("rng", "yes", "'rng' takes true or false, not 'yes' (str)"),
        ("links", 1, "'links' takes true, false, or a template such as '{name}-{step}', not 1 (int)"),
        ("links", "{", "'links': the template '{'"),
        ("allowed_packages", "mycompany", "'allowed_packages' takes a list of packages such as ['mycompany'], not"),
        ("allowed_packages", ["my company"], "'allowed_packages' takes a list of packages"),
        ("save", "every_steps", "'save' takes a policy, a mapping of every_steps, "),
        ("save", KeepLast(3), "'save' takes a policy"),
        ("keep", Every(steps=3), "'keep' takes a policy"),
        ("keep", [3], "'keep[0]' takes a policy"),
        ("save", {}, "'save' has nothing in it; leave it out"),
        ("keep", {"tagged": False, "all": False}, "'keep' has nothing in it; leave it out"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_wanted(key: str, value: Any, expected: str) -> None:
    assert expected in message(**{key: value})


def test_a_value_that_is_huge_is_shown_in_short() -> None:
    # Ten lists of ten lists, ten deep: YAML says this in ten lines, and writing it out would take all memory.
    bomb: Any = "x"
    for _ in range(10):
        bomb = [bomb] * 10
    assert len(message(run=bomb)) < 1000


def test_a_template_for_links_is_checked_here() -> None:
    assert CheckpointConfig(links="{name}-{step}").links == LinkTemplate("{name}-{step}")
    assert CheckpointConfig(links=False).links is False


def test_what_the_caller_passed_is_not_changed() -> None:
    data = {"save": {"at": [1]}, "keep": {"best": {"metric": "x"}}, "allowed_packages": ["mycompany"]}
    config = CheckpointConfig.from_dict(data)
    assert data == {"save": {"at": [1]}, "keep": {"best": {"metric": "x"}}, "allowed_packages": ["mycompany"]}
    assert config.allowed_packages == ("mycompany",)


# Subclasses


def test_a_subclass_has_its_own_fields_from_everywhere(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('run = "r"\nupload_to = "there"\nheaders = {a = "b"}\n')
    config = UploadConfig.from_file(tmp_path / "run.toml")
    assert type(config) is UploadConfig
    assert (config.run, config.upload_to, config.retries, config.headers) == ("r", "there", 3, {"a": "b"})
    assert type(UploadConfig.from_yaml("upload_to: there")) is UploadConfig
    assert UploadConfig.from_dict({"upload_to": "there", "keep": {"last": 2}}).keep == KeepLast(2)


def test_a_field_of_a_subclass_that_has_no_default_is_asked_for() -> None:
    with pytest.raises(holdfast.UsageError, match="the checkpoint config has no 'upload_to'; UploadConfig needs it"):
        UploadConfig.from_dict({"run": "r"})


def test_the_keys_of_a_subclass_are_among_the_nearest() -> None:
    with pytest.raises(holdfast.UsageError, match="did you mean 'upload_to'"):
        UploadConfig.from_dict({"upload_too": "there"})
    with pytest.raises(holdfast.UsageError, match="'derived' is no key"):
        UploadConfig.from_dict({"upload_to": "there", "derived": "x"})
