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
from holdfast.errors import KeyMissingError
from holdfast.loading.strategy import Verify
from holdfast.manager.triggers import At, Every, OnLastStep, OnSignal, TimeLimit
from holdfast.plugins import config as configuration
from holdfast.plugins.config import CheckpointConfig
from holdfast.runs.link_names import LinkTemplate
from holdfast.runs.retention import KeepAll, KeepBest, KeepEvery, KeepLast, KeepTagged
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
    with pytest.raises(holdfast.UsageError, match=r"run\.toml: it is no text in UTF-8"):
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


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("every_steps", "500", "'save.every_steps' takes a whole number above 0, not '500' (str)"),
        ("every_steps", 0, "'save.every_steps' takes a whole number above 0, not 0 (int)"),
        ("every_epochs", 1.5, "'save.every_epochs' takes a whole number above 0, not 1.5 (float)"),
        ("every_minutes", -1, "'save.every_minutes' takes a positive number of minutes, not -1 (int)"),
        ("at", 5, "'save.at' takes a list of steps, not 5 (int)"),
        ("at", [-1], "'save.at' takes a list of steps, not [-1] (list)"),
        ("at", [True], "'save.at' takes a list of steps"),
        ("at", [], "'save.at': At() names no step"),
        ("on_signal", [], "'save.on_signal' takes the name of a signal, or a list of names, not [] (list)"),
        ("on_signal", 15, "'save.on_signal' takes the name of a signal, or a list of names, not 15 (int)"),
        ("on_signal", ["SIGTREM"], "'save.on_signal': "),
        ("time_limit", "soon", "'save.time_limit': TimeLimit(limit='soon') is no time that passes"),
        ("time_limit", ["01:00:00"], "'save.time_limit' takes a text such as '03:50:00', '3h50m' or '90s', {limit, be"),
        ("time_limit", 230, "not 230 (int); write seconds as '90s', and a time in quotes: YAML reads 3:50 as the numb"),
        ("time_limit", "3:50", "'save.time_limit': TimeLimit(limit='3:50') is no time that passes; write '03:50:00'"),
        ("time_limit", {}, "'save.time_limit' has nothing in it; give limit or before_end, or true"),
        (
            "time_limit",
            {"limit": 230},
            "'save.time_limit.limit' takes a text such as '03:50:00', '3h50m' or '90s', not",
        ),
        ("time_limit", {"limit": "1h", "before_end": True}, "'save.time_limit.before_end' takes a text such as"),
        ("time_limit", {"limit": "1h", "befor_end": "5m"}, "did you mean 'save.time_limit.before_end'?"),
        ("time_limit", {"limit": "1h", "before_end": "soon"}, "'save.time_limit': TimeLimit(before_end='soon') is no"),
        ("on_last_step", 0, "'save.on_last_step' takes a whole number above 0, not 0 (int)"),
    ],
)
def test_a_wrong_value_of_save_is_named(key: str, value: Any, expected: str) -> None:
    assert expected in message(save={key: value})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("last", 0, "'keep.last' takes a whole number above 0, not 0 (int)"),
        ("last", -1, "'keep.last' takes a whole number above 0, not -1 (int)"),
        ("best", "val_loss", "'keep.best' takes {metric, n, mode}, or a list of these, not 'val_loss' (str)"),
        ("best", [], "'keep.best' takes {metric, n, mode}, or a list of these, not [] (list)"),
        ("best", ["val_loss"], "'keep.best[0]' takes {metric, n, mode}, not 'val_loss' (str)"),
        ("best", {"n": 2}, "'keep.best' has no 'metric'"),
        ("best", {"metric": ""}, "'keep.best.metric' takes a text, not '' (str)"),
        ("best", {"metric": "x", "n": 0}, "'keep.best.n' takes a whole number above 0, not 0 (int)"),
        ("best", {"metric": "x", "mode": "low"}, "'keep.best.mode' takes one of 'min', 'max', not 'low' (str)"),
        ("every_steps", True, "'keep.every_steps' takes a whole number above 0, not True (bool)"),
        ("every_minutes", "60", "'keep.every_minutes' takes a positive number of minutes, not '60' (str)"),
        ("tagged", 1, "'keep.tagged' takes true or false, not 1 (int)"),
        ("all", None, "'keep.all' takes true or false, not None (NoneType)"),
    ],
)
def test_a_wrong_value_of_keep_is_named(key: str, value: Any, expected: str) -> None:
    assert expected in message(keep={key: value})


def test_the_time_limit_of_the_job_needs_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert "'save.time_limit': TimeLimit() has no limit" in message(save={"time_limit": True})
    monkeypatch.setenv("SLURM_JOB_END_TIME", "2000000000")
    assert CheckpointConfig(save={"time_limit": True}).save == TimeLimit()
    early = CheckpointConfig.from_toml("save.time_limit.before_end = 00:10:00")
    assert early.save == CheckpointConfig(save={"time_limit": {"before_end": "10m"}}).save == TimeLimit(before_end=600)
    assert CheckpointConfig(save={"time_limit": False, "every_steps": 5}).save == Every(steps=5)


def test_a_value_that_is_huge_is_shown_in_short() -> None:
    # Ten lists of ten lists, ten deep: YAML says this in ten lines, and writing it out would take all memory.
    bomb: Any = "x"
    for _ in range(10):
        bomb = [bomb] * 10
    assert len(message(run=bomb)) < 1000


@pytest.mark.parametrize(
    ("data", "policy"),
    [
        ({"every_steps": 500}, Every(steps=500)),
        ({"every_epochs": 2}, Every(epochs=2)),
        ({"every_minutes": 0.5}, Every(minutes=0.5)),
        ({"at": [1, 2]}, At(1, 2)),
        ({"on_signal": ["SIGTERM", "SIGINT"]}, OnSignal("SIGTERM", "SIGINT")),
        ({"on_signal": "SIGTERM"}, OnSignal("SIGTERM")),
        ({"time_limit": "03:50:00"}, TimeLimit("03:50:00")),
        ({"time_limit": "90s"}, TimeLimit(90)),
        ({"time_limit": {"limit": "03:50:00"}}, TimeLimit("03:50:00")),
        ({"time_limit": {"limit": "3h50m", "before_end": "10m"}}, TimeLimit("03:50:00", before_end="00:10:00")),
        ({"on_last_step": 1000}, OnLastStep(1000)),
        ({"every_steps": 5, "at": [7], "on_last_step": 9}, Every(steps=5) | At(7) | OnLastStep(9)),
    ],
)
def test_save_as_plain_data_is_the_policy_it_says(data: dict[str, Any], policy: Any) -> None:
    assert CheckpointConfig(save=data).save == CheckpointConfig(save=policy).save == policy


@pytest.mark.parametrize(
    ("data", "policy"),
    [
        ({"last": 3}, KeepLast(3)),
        ({"best": {"metric": "loss"}}, KeepBest("loss")),
        ({"best": {"metric": "accuracy", "n": 2, "mode": "max"}}, KeepBest("accuracy", 2, "max")),
        ({"best": [{"metric": "a"}, {"metric": "b", "n": 4}]}, KeepBest("a") | KeepBest("b", 4)),
        ({"every_steps": 10}, KeepEvery(steps=10)),
        ({"every_minutes": 60}, KeepEvery(minutes=60)),
        ({"tagged": True}, KeepTagged()),
        ({"all": True}, KeepAll()),
        ({"last": 1, "tagged": False}, KeepLast(1)),
        ({"last": 1, "best": {"metric": "a"}, "tagged": True}, KeepLast(1) | KeepBest("a") | KeepTagged()),
    ],
)
def test_keep_as_plain_data_is_the_policy_it_says(data: dict[str, Any], policy: Any) -> None:
    assert CheckpointConfig(keep=data).keep == CheckpointConfig(keep=policy).keep == policy


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
