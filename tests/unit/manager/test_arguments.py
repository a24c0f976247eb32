"""What a user may pass and gets back: plain dicts, steps of any integer type, configs of any kind, more components."""

from __future__ import annotations

import argparse
import enum
import functools
import json
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, strategies as st

import holdfast
from holdfast import CheckpointConfig, LoadStrategy, TimeLimit
from holdfast.errors import StateMismatchError, UsageError
from holdfast.manager.arguments import agree_on_run
from holdfast.manager.triggers import Trigger, Wish


def model(seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(2, 2)


def manager_of(run: Path, state: dict[str, Any] | None = None, **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, {"model": model(), **(state or {})}, mode="sync", **options)


# What comes back


def test_progress_metrics_and_extra_of_a_restore_are_plain_dicts(tmp_path: Path) -> None:
    said = {"progress": {"epoch": 1}, "metrics": {"loss": 0.5}, "extra": {"note": ["a", {"b": 1}]}}
    with manager_of(tmp_path) as manager:
        fresh = manager.restore()
        manager.save(1, **said)
        result = manager.restore()
    for name, value in said.items():
        for one, expected in ((result, value), (fresh, {})):
            assert type(getattr(one, name)) is dict
            assert json.loads(json.dumps(getattr(one, name))) == expected
    result.progress["epoch"] = 7
    assert result.checkpoint is not None
    assert result.checkpoint.progress == {"epoch": 1}


# Steps


STEPS = [numpy.int64(3), numpy.uint8(3), torch.tensor(3), torch.tensor(3, dtype=torch.int32)]


@pytest.mark.parametrize("step", STEPS, ids=repr)
def test_a_step_is_anything_that_is_an_integer(tmp_path: Path, step: Any) -> None:
    with manager_of(tmp_path, save=holdfast.At(step)) as manager:
        assert manager.should_save(step)
        assert not manager.step(step, metrics={"loss": 1.0})
        assert manager.save(step).wait().step == 3
        assert manager.report(step, {"loss": 2.0})
        assert manager.peek(step).step == 3  # type: ignore[union-attr]
        result = manager.restore(step)
        manager.tag(step, "mine")
    assert type(result.step) is int
    assert holdfast.resolve(tmp_path, step).tags == ("mine",)
    assert type(holdfast.SaveContext(step=step).step) is int
    assert holdfast.LoadContext(selector=step, source=tmp_path).where == f"{tmp_path}@3"
    with holdfast.AsyncCheckpointer(tmp_path / "plain", mode="sync") as checkpointer:
        assert checkpointer.save(step, {"weight": torch.zeros(1)}).wait().step == 3


@pytest.mark.parametrize("step", [3.0, "3", True, torch.tensor(3.0), torch.tensor(True), numpy.bool_(True), None])
def test_what_is_no_integer_is_no_step(tmp_path: Path, step: Any) -> None:
    with manager_of(tmp_path) as manager, pytest.raises(UsageError, match="a step is an int"):
        manager.save(step)


# The configuration to store


@dataclass
class Inner:
    width: int = 3


@dataclass
class Settings:
    rate: float = 0.5
    inner: Inner = field(default_factory=Inner)
    layers: tuple[Inner, ...] = (Inner(4),)


class Foreign(Mapping[str, Any]):
    """A mapping that is no dict, as configuration libraries have them."""

    def __init__(self, **values: Any) -> None:
        self.values_ = values

    def __getitem__(self, key: str) -> Any:
        return self.values_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


class WithToDict:
    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "tiny", "inner": Inner(2)}


class Method(str, enum.Enum):  # noqa: UP042 - as libraries still write it
    LORA = "LORA"


class Level(enum.IntEnum):
    HIGH = 3


class Colour(enum.Enum):
    RED = "red"


@holdfast.register_type
class Kept(enum.StrEnum):
    YES = "yes"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Settings(), {"rate": 0.5, "inner": {"width": 3}, "layers": ({"width": 4},)}),
        (argparse.Namespace(rate=0.5, inner=Inner()), {"rate": 0.5, "inner": {"width": 3}}),
        (Foreign(a=Foreign(b=1), c=[Inner()]), {"a": {"b": 1}, "c": [{"width": 3}]}),
        (WithToDict(), {"model_type": "tiny", "inner": {"width": 2}}),
        ({"plain": 1}, {"plain": 1}),
        (None, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_config_may_be_of_any_usual_kind_and_comes_back_as_plain_data(
    tmp_path: Path, config: Any, expected: Any
) -> None:
    with manager_of(tmp_path, config=config) as manager:
        manager.save(1)
    assert holdfast.resolve(tmp_path).config == expected


def test_a_member_of_a_str_or_int_enum_in_a_config_comes_back_as_its_plain_value(tmp_path: Path) -> None:
    with manager_of(tmp_path, config={"kind": Method.LORA, Method.LORA: [Level.HIGH], "own": Kept.YES}) as manager:
        manager.save(1)
    found = holdfast.resolve(tmp_path).config
    assert found == {"kind": "LORA", "LORA": [3], "own": Kept.YES}
    # Members are equal to their values, so the types are compared as well.
    assert {type(found["kind"]), *map(type, found)} == {str}
    assert (type(found["LORA"][0]), type(found["own"])) == (int, Kept)


def test_a_member_of_an_enum_that_is_neither_text_nor_a_number_is_refused_in_a_config(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Colour"):
        manager_of(tmp_path, config={"colour": Colour.RED})


def test_a_config_that_contains_itself_is_an_error(tmp_path: Path) -> None:
    config: dict[str, Any] = {}
    config["again"] = config
    with pytest.raises(UsageError, match="nested"):
        manager_of(tmp_path, config=config)


# Extra values


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.int16).reshape(2, 3),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.zeros(0, 3),
        torch.randn(4, 4).t(),
        torch.tensor([True, False]),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{list(tensor.shape)}",
)
def test_extra_takes_small_tensors(tmp_path: Path, tensor: torch.Tensor) -> None:
    with manager_of(tmp_path) as manager:
        manager.save(1, extra={"threshold": tensor, "nested": [{"again": tensor}]})
        found = manager.restore().extra
    for one in (found["threshold"], found["nested"][0]["again"]):
        assert type(one) is torch.Tensor
        assert one.dtype == tensor.dtype
        assert torch.equal(one, tensor.detach())


def test_a_tensor_that_is_too_large_for_extra_is_an_error_that_says_where_it_belongs(tmp_path: Path) -> None:
    with manager_of(tmp_path) as manager, pytest.raises(UsageError, match=r"extra\.table.*component"):
        manager.save(1, extra={"table": torch.zeros(1 << 20)})


# Components


def test_a_dict_is_a_component_and_is_restored_in_place(tmp_path: Path) -> None:
    counts = {"tokens": 5, "table": torch.arange(3), "nested": {"a": [1, (2,)]}}
    with manager_of(tmp_path, {"counts": counts}) as manager:
        manager.save(1)
        counts.update(tokens=0, table=torch.zeros(3, dtype=torch.int64), nested={})
        same = counts
        manager.restore()
    assert counts is same
    assert counts["tokens"] == 5
    assert torch.equal(counts["table"], torch.arange(3))  # type: ignore[arg-type]
    assert counts["nested"] == {"a": [1, (2,)]}


def test_a_dict_that_is_empty_takes_whatever_was_saved(tmp_path: Path) -> None:
    with manager_of(tmp_path, {"counts": {"a": 1, 2: "b"}}) as manager:
        manager.save(1)
    counts: dict[Any, Any] = {}
    with manager_of(tmp_path, {"counts": counts}) as manager:
        manager.restore()
    assert counts == {"a": 1, 2: "b"}


def test_keys_that_only_one_side_of_a_dict_has_are_a_mismatch(tmp_path: Path) -> None:
    with manager_of(tmp_path, {"counts": {"a": 1, "b": 2}}) as manager:
        manager.save(1)
    counts = {"b": 0, "c": 0}
    with manager_of(tmp_path, {"counts": counts}) as manager:
        with pytest.raises(StateMismatchError) as caught:
            manager.restore()
        assert caught.value.missing == ("counts.c",)
        assert caught.value.unexpected == ("counts.a",)
        assert counts == {"b": 0, "c": 0}
        manager.restore(strategy=LoadStrategy(strict=False))
    assert counts == {"b": 2, "c": 0}


def test_a_dict_may_be_attached_late(tmp_path: Path) -> None:
    with manager_of(tmp_path, {"counts": {"a": 1}}) as manager:
        manager.save(1)
    counts = {"a": 0}
    with manager_of(tmp_path) as manager:
        manager.restore()
        assert manager.attach("counts", counts)
    assert counts == {"a": 1}


def test_a_generator_of_torch_goes_on_where_it_was(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    with manager_of(tmp_path, {"generator": generator}) as manager:
        manager.save(1)
        expected = torch.rand(5, generator=generator)
    again = torch.Generator()
    with manager_of(tmp_path, {"generator": again}) as manager:
        manager.restore()
    assert torch.equal(torch.rand(5, generator=again), expected)


@pytest.mark.parametrize("kind", [numpy.random.PCG64, numpy.random.MT19937, numpy.random.Philox])
def test_a_generator_of_numpy_goes_on_where_it_was(tmp_path: Path, kind: Any) -> None:
    generator = numpy.random.Generator(kind(3))
    generator.random(5)
    with manager_of(tmp_path, {"generator": generator}) as manager:
        manager.save(1)
        expected = generator.random(5)
    again = numpy.random.Generator(kind(4))
    with manager_of(tmp_path, {"generator": again}) as manager:
        manager.restore()
    assert again.random(5).tolist() == expected.tolist()


def test_a_generator_of_another_kind_is_refused_before_a_model_changes(tmp_path: Path) -> None:
    with manager_of(tmp_path, {"generator": numpy.random.Generator(numpy.random.PCG64(3))}) as manager:
        manager.save(1)
    for other in (numpy.random.Generator(numpy.random.Philox(4)), torch.Generator()):
        live = model(5)
        before = live.weight.detach().clone()  # type: ignore[union-attr,operator]
        with holdfast.CheckpointManager(tmp_path, {"model": live, "generator": other}, mode="sync") as manager:
            with pytest.raises(StateMismatchError, match="generator"):
                manager.restore()
        assert torch.equal(live.weight, before)  # type: ignore[arg-type]


# Strategies, limits, configurations


def test_skip_in_a_context_may_name_what_only_the_checkpoint_has(tmp_path: Path) -> None:
    with manager_of(tmp_path, {"counts": {"a": 1}}) as manager:
        manager.save(1)
    built = holdfast.create_checkpoint_manager(CheckpointConfig(run=tmp_path), state={"model": model()})
    context = holdfast.LoadContext(strategy=LoadStrategy(skip=("counts",)), state=None)
    assert built.load(context).resumed
    with pytest.raises(UsageError, match="nowhere"):
        built.load(holdfast.LoadContext(strategy=LoadStrategy(skip=("nowhere",))))
    built.finalize_async_saves(terminate=True)


@pytest.mark.parametrize(
    ("text", "seconds"), [("01:02:03:04", 93784), ("1:02:03:04", 93784), ("1-02:03:04", 93784), ("0:00:00:05", 5)]
)
def test_a_time_limit_reads_days_in_front(text: str, seconds: int) -> None:
    assert TimeLimit(text).limit_seconds == seconds


@pytest.mark.parametrize("text", ["1:24:00:00", "1:2:3:4:5", ":01:02:03", "1:02:60:00"])
def test_a_time_limit_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="DD:HH:MM:SS"):
        TimeLimit(text)


@dataclass(frozen=True, kw_only=True)
class OwnConfig(CheckpointConfig):
    bucket: str = ""
    retries: dict[str, int] = field(default_factory=dict)


CONFIGS = [
    {},
    {"run": "runs/a", "mode": "sync", "links": "{name}-{step}", "allowed_packages": ["mine"], "rng": False},
    {"save": {"every_steps": 5, "every_minutes": 2.5, "at": [3, 1], "on_signal": ["SIGTERM", "SIGUSR1"]}},
    {"save": {"time_limit": {"limit": "1-02:00:00", "before_end": "00:10:00"}, "on_last_step": 9, "every_epochs": 2}},
    {"keep": {"last": 3, "best": {"metric": "loss", "n": 2, "mode": "max"}, "every_steps": 10, "tagged": True}},
    {"keep": {"best": [{"metric": "a"}, {"metric": "b", "mode": "max"}], "every_minutes": 30}},
    {"keep": {"all": True}},
]


@pytest.mark.parametrize("data", CONFIGS, ids=str)
def test_a_config_as_a_dict_makes_the_same_config_again(data: dict[str, Any]) -> None:
    config = CheckpointConfig.from_dict(data)
    written = config.to_dict()
    assert CheckpointConfig.from_dict(written) == config
    assert CheckpointConfig.from_dict(json.loads(json.dumps(written))) == config
    own = OwnConfig.from_dict({**data, "bucket": "b", "retries": {"a": 1}})
    assert own.to_dict()["bucket"] == "b"
    assert OwnConfig.from_dict(own.to_dict()) == own
    own.to_dict()["retries"]["a"] = 2
    assert own.retries == {"a": 1}


_COUNTS = st.integers(1, 10**6)
_MINUTES = st.floats(1e-3, 1e6)
_DURATIONS = st.one_of(st.integers(1, 10**10), st.floats(1e-6, 1e8))
_TRIGGERS = st.one_of(
    st.builds(lambda n: holdfast.Every(steps=n), _COUNTS),
    st.builds(lambda n: holdfast.Every(epochs=n), _COUNTS),
    st.builds(lambda n: holdfast.Every(minutes=n), _MINUTES),
    st.builds(lambda steps: holdfast.At(steps), st.lists(st.integers(0, 1000), min_size=1, max_size=4)),
    st.builds(holdfast.OnLastStep, _COUNTS),
    st.builds(
        lambda names: holdfast.OnSignal(*names),
        st.lists(st.sampled_from(["SIGTERM", "SIGUSR1", "SIGHUP"]), min_size=1, max_size=3),
    ),
    st.builds(lambda limit, end: holdfast.TimeLimit(limit, before_end=end), _DURATIONS, _DURATIONS),
)
_KEEPS = st.one_of(
    st.builds(holdfast.KeepLast, _COUNTS),
    st.builds(holdfast.KeepBest, st.sampled_from(["loss", "accuracy"]), _COUNTS, mode=st.sampled_from(["min", "max"])),
    st.builds(lambda n: holdfast.KeepEvery(steps=n), _COUNTS),
    st.builds(lambda n: holdfast.KeepEvery(minutes=n), _MINUTES),
    st.builds(holdfast.KeepTagged),
    st.builds(holdfast.KeepAll),
)


@given(
    triggers=st.lists(_TRIGGERS, min_size=1, max_size=6),
    keeps=st.lists(_KEEPS, min_size=1, max_size=6),
)
def test_every_combination_of_policies_is_plain_data_that_makes_it_again(triggers: list[Any], keeps: list[Any]) -> None:
    save, keep = functools.reduce(operator.or_, triggers), functools.reduce(operator.or_, keeps)
    config = CheckpointConfig(save=save, keep=keep)
    again = CheckpointConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert (again.save, again.keep) == (save, keep)


def test_a_policy_that_fits_into_one_mapping_is_one() -> None:
    save = holdfast.Every(steps=5) | holdfast.At(1)
    assert CheckpointConfig(save=save).to_dict()["save"] == {"every_steps": 5, "at": [1]}
    both = save | holdfast.Every(steps=7)
    assert CheckpointConfig(save=both).to_dict()["save"] == [{"every_steps": 5}, {"at": [1]}, {"every_steps": 7}]


def test_a_wrong_key_in_a_list_of_policies_is_named_with_its_place() -> None:
    with pytest.raises(holdfast.UsageError, match=r"'save\[1\].every_step'.*did you mean 'save\[1\].every_steps'"):
        CheckpointConfig.from_dict({"save": [{"every_steps": 5}, {"every_step": 7}]})
    with pytest.raises(holdfast.UsageError, match="'save' has nothing in it"):
        CheckpointConfig.from_dict({"save": []})


class OwnTrigger(Trigger):
    def wish(self, moment: Any) -> Wish:
        return Wish(False, False, ())


def test_a_policy_of_a_class_of_ones_own_stays_a_policy() -> None:
    policy = holdfast.Every(steps=5) | OwnTrigger()
    config = CheckpointConfig(save=policy)
    assert config.to_dict()["save"] is policy
    assert CheckpointConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    "source", ["a\0b", Path("a\0b"), "file:///a%00b", "~a\0b", "a\0b@5", "memory://a\0b", b"a"], ids=repr
)
@pytest.mark.parametrize(
    "call",
    [
        holdfast.is_restart,
        holdfast.peek,
        holdfast.checkpoints,
        holdfast.resolve,
        holdfast.verify,
        holdfast.examine,
        holdfast.mend,
        holdfast.unlock,
        lambda source: holdfast.retention(source, holdfast.KeepLast(1)),
        lambda source: holdfast.prune(source, holdfast.KeepLast(1)),
    ],
)
def test_what_no_file_system_takes_as_a_path_is_an_error_in_words(call: Any, source: Any) -> None:
    with pytest.raises(UsageError, match=r"NUL|path|not a bytes"):
        call(source)


def test_a_manager_refuses_a_path_with_a_nul_in_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no path"):
        holdfast.CheckpointManager("a\0b", {"model": torch.nn.Linear(1, 1)})
    with holdfast.CheckpointManager(tmp_path, {"model": torch.nn.Linear(1, 1)}) as manager:
        for source in ("./a\0b", Path("a\0b")):
            with pytest.raises(UsageError, match="NUL"):
                manager.restore(source)


def test_a_time_limit_by_the_end_of_another_job_stays_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1700000000")
    config = CheckpointConfig(save=holdfast.TimeLimit())
    assert config.to_dict()["save"] == {"time_limit": {"before_end": "300s"}}
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    assert config.to_dict()["save"] is config.save


def test_ranks_that_open_a_run_learn_how_many_are_on_their_machine() -> None:
    words = [("/run", "async", ["model"], "compare", machine) for machine in ("a", "b", "a", "a")]
    assert agree_on_run(words) == (3, 1, 3, 3)
