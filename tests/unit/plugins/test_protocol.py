"""Managers that a framework injects: what the protocol asks of them, what is refused, and the built-in one."""

from __future__ import annotations

import functools
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.manager.triggers import Every
from holdfast.plugins.class_loading import check_class
from holdfast.plugins.config import CheckpointConfig
from holdfast.plugins.contexts import LoadContext, SaveContext
from holdfast.plugins.protocol import CALLS, CheckpointManagerProtocol, HoldfastManager, create_checkpoint_manager
from holdfast.runs.retention import KeepLast
from holdfast.testing import FullStorage, MemoryStorage, SlowStorage

METHODS = ("save", "load", "should_save", "should_load", "load_weights", "read_config")
HERE = __name__


class Counter:
    """A component of the plainest kind."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


def parts(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    counter = Counter()
    counter.value = seed
    return {"model": model, "optimizer": optimizer, "counter": counter}


def weights(state: Mapping[str, Any]) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in state["model"].parameters()])


def moments(state: Mapping[str, Any]) -> torch.Tensor:
    return torch.cat([state["optimizer"].state[one]["exp_avg"].flatten() for one in state["model"].parameters()])


def built_in(run: Path | None, state: Mapping[str, Any], **values: Any) -> HoldfastManager:
    keywords = {name: values.pop(name) for name in ("storage", "config_to_store", "on_event") if name in values}
    config = CheckpointConfig(run=run, mode=values.pop("mode", "sync"), **values)
    manager = create_checkpoint_manager(config, state=state, **keywords)
    assert isinstance(manager, HoldfastManager)
    opened.append(manager)
    return manager


opened: list[HoldfastManager] = []


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Every manager comes to its end, whatever became of its test."""
    yield
    while opened:
        opened.pop().finalize_async_saves(terminate=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of the state of seed 1 with the steps 10 and 20."""
    manager = built_in(tmp_path / "run", parts(1), config_to_store={"width": 4})
    manager.save(SaveContext(step=10, metrics={"loss": 0.1}, progress={"tokens": 10}, tag="first"))
    manager.save(SaveContext(step=20, metrics={"loss": 0.2}, progress={"tokens": 20}, guards={"vocabulary": 7}))
    manager.finalize_async_saves(terminate=True)
    return tmp_path / "run"


# Managers of one's own


@dataclass(frozen=True, kw_only=True)
class OwnConfig(CheckpointConfig):
    colour: str = "blue"


class Recording:
    """Does nothing, and keeps what it was called with."""

    def __init__(self, config: CheckpointConfig, **arguments: Any) -> None:
        self.config, self.arguments = config, arguments
        self.calls: list[tuple[str, Any]] = []

    def save(self, context: SaveContext) -> Any:
        self.calls.append(("save", context))
        return context.step

    def load(self, context: LoadContext) -> Any:
        self.calls.append(("load", context))

    def should_save(self, context: SaveContext) -> bool:
        self.calls.append(("should_save", context))
        return True

    def should_load(self, context: LoadContext) -> bool:
        self.calls.append(("should_load", context))
        return True

    def load_weights(self, context: LoadContext) -> Any:
        self.calls.append(("load_weights", context))

    def read_config(self, context: LoadContext) -> Any:
        self.calls.append(("read_config", context))

    def finalize_async_saves(self, *, blocking: bool = True, terminate: bool = False) -> None:
        self.calls.append(("finalize_async_saves", (blocking, terminate)))


def create(name: str, state: Mapping[str, Any] | None = None, **keywords: Any) -> Any:
    return create_checkpoint_manager(CheckpointConfig(manager_class=name), state=state or {}, **keywords)


@pytest.fixture
def admit(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Builds a manager of a class by its name, as a config would."""

    def build(manager_class: Any) -> Any:
        monkeypatch.setattr(sys.modules[HERE], "Candidate", manager_class, raising=False)
        return create(f"{HERE}.Candidate")

    return build


def with_method(name: str, method: Any) -> type:
    return type("Odd", (Recording,), {name: method, "__module__": "acme"})


def test_the_config_reaches_the_manager_as_it_is_and_so_does_the_rest() -> None:
    config = OwnConfig(manager_class=f"{HERE}.Recording", colour="green")
    arguments: dict[str, Any] = {
        "state": {"model": object()},
        "process_group": object(),
        "pipeline_stage": 3,
        "storage": object(),
        "on_event": print,
        "config_to_store": {"lr": 0.1},
        "assets": ("tokenizer.json",),
    }
    manager = create_checkpoint_manager(config, **arguments)
    assert type(manager) is Recording
    assert manager.config is config
    assert manager.arguments.keys() == arguments.keys()
    assert all(manager.arguments[name] is arguments[name] for name in arguments)


@pytest.mark.parametrize("purpose", ["resume", "warm_start", "adapter", "inference"])
def test_every_way_to_load_arrives_at_the_injected_manager(purpose: Any) -> None:
    manager = create(f"{HERE}.Recording")
    context = LoadContext(purpose=purpose, state={"model": object()}, source="runs/base@best:loss")
    assert manager.should_load(context)
    for method in ("load", "load_weights", "read_config"):
        getattr(manager, method)(context)
    assert [name for name, _ in manager.calls] == ["should_load", "load", "load_weights", "read_config"]
    assert all(given is context for _, given in manager.calls)


def test_saves_and_their_end_arrive_at_the_injected_manager() -> None:
    manager = create(f"{HERE}.Recording")
    context = SaveContext(step=7)
    assert manager.should_save(context)
    assert manager.save(context) == 7
    for flags in ({}, {"blocking": False}, {"terminate": True}, {"blocking": False, "terminate": True}):
        manager.finalize_async_saves(**flags)
    assert manager.calls[:2] == [("should_save", context), ("save", context)]
    assert [flags for _, flags in manager.calls[2:]] == [(True, False), (False, False), (True, True), (False, True)]


def test_the_protocol_is_one_that_can_be_asked_for() -> None:
    assert isinstance(create(f"{HERE}.Recording"), CheckpointManagerProtocol)
    assert issubclass(HoldfastManager, CheckpointManagerProtocol)
    assert not isinstance(object(), CheckpointManagerProtocol)


# Names


@pytest.mark.parametrize(
    "name", ["", "Manager", ".Manager", "acme.", "acme..Manager", "acme:Manager", "acme.1st", "a b.C", "acme/x.C", "."]
)
def test_a_name_that_cannot_be_one_is_a_value_error(name: str) -> None:
    with pytest.raises(ValueError, match=r"is no name of a class; write it as package\.module\.Class") as caught:
        create(name)
    assert isinstance(caught.value, holdfast.UsageError)


@pytest.mark.parametrize(
    ("name", "missing"),
    [("nowhere_at_all.Manager", "nowhere_at_all"), ("holdfast.nowhere.Manager", "holdfast.nowhere")],
)
def test_a_module_that_is_not_there_is_an_import_error(name: str, missing: str) -> None:
    with pytest.raises(ImportError, match=f"there is no module '{missing}'; install its package") as caught:
        create(name)
    assert caught.value.name == missing


def test_a_class_inside_of_a_module_is_no_package() -> None:
    with pytest.raises(ImportError, match=r"there is no module 'holdfast\.plugins\.HoldfastManager'"):
        create("holdfast.plugins.HoldfastManager.Inner")


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ("import nowhere_at_all", ModuleNotFoundError, "No module named 'nowhere_at_all'"),
        ("from os import nothing_like_it", ImportError, "cannot import name 'nothing_like_it'"),
        ("1 / 0", ZeroDivisionError, "division by zero"),
        ("def", SyntaxError, "invalid syntax"),
        ("raise AttributeError('from inside')", AttributeError, "from inside"),
    ],
)
def test_what_a_module_raises_while_it_is_imported_comes_out_with_its_place(
    body: str, kind: type[Exception], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_broken.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(kind, match=text) as caught:
        create("acme_broken.Manager")
    assert type(caught.value) is kind
    assert "'acme_broken' was imported for manager_class='acme_broken.Manager'" in caught.value.__notes__[0]


def test_a_class_that_is_not_there_is_an_attribute_error_that_names_the_nearest() -> None:
    with pytest.raises(AttributeError, match="has no class 'HoldfastManger'; did you mean 'HoldfastManager'"):
        create("holdfast.plugins.HoldfastManger")
    with pytest.raises(AttributeError, match=r"module 'holdfast\.plugins' has no class 'Qqq'; check the name"):
        create("holdfast.plugins.Qqq")


@pytest.mark.parametrize("value", [len, "text", lambda config, **arguments: None, Recording(CheckpointConfig())])
def test_what_is_no_class_is_a_type_error(value: Any, admit: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"Candidate' is .*, not a class"):
        admit(value)


@pytest.mark.parametrize("config", [None, {"manager_class": None}, "run", Recording])
def test_what_is_no_config_is_refused(config: Any) -> None:
    with pytest.raises(holdfast.UsageError, match=r"CheckpointConfig\.from_dict makes one"):
        create_checkpoint_manager(config, state={})


# Packages that are allowed


def test_a_package_that_is_not_allowed_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "acme_evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Manager: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        holdfast.UnsafeContentError,
        match=r"'acme_evil\.Manager' is not in allowed_packages=\[mycompany, holdfast\]; nothing was imported",
    ):
        create("acme_evil.Manager", allowed_packages=("mycompany", "holdfast"))
    assert not marker.exists()
    assert "acme_evil" not in sys.modules


def test_allowed_are_packages_and_what_is_in_them() -> None:
    package = HERE.partition(".")[0]
    for allowed in ([package], [HERE], ["other", package], None):
        assert type(create(f"{HERE}.Recording", allowed_packages=allowed)) is Recording
    for refused in ([], [package[:-1]], [f"{package}_"], [f"{HERE}.Recording"], [f"{HERE}x"]):
        with pytest.raises(holdfast.UnsafeContentError):
            create(f"{HERE}.Recording", allowed_packages=refused)


def test_a_config_can_narrow_what_is_allowed_and_not_widen_it() -> None:
    package = HERE.partition(".")[0]

    def build(by_config: list[str] | None, by_program: list[str] | None) -> Any:
        config = CheckpointConfig(manager_class=f"{HERE}.Recording", allowed_packages=by_config)
        return create_checkpoint_manager(config, state={}, allowed_packages=by_program)

    for by_config, by_program in ((None, [package]), ([package], None), ([package], [package, "other"])):
        assert type(build(by_config, by_program)) is Recording
    for by_config, by_program in (([package], ["other"]), (["other"], [package]), (["other"], None)):
        with pytest.raises(holdfast.UnsafeContentError, match=r"not in allowed_packages=\[other\]"):
            build(by_config, by_program)


def test_the_built_in_manager_needs_no_permission(tmp_path: Path) -> None:
    config = CheckpointConfig(run=tmp_path, allowed_packages=[])
    manager = create_checkpoint_manager(config, state=parts(), allowed_packages=())
    assert type(manager) is HoldfastManager


@pytest.mark.parametrize("packages", ["mycompany", ["my company"], [5]])
def test_a_list_of_packages_that_is_none_is_refused(packages: Any) -> None:
    with pytest.raises(holdfast.UsageError, match="give a list of packages such as"):
        create(f"{HERE}.Recording", allowed_packages=packages)


# Signatures


@pytest.mark.parametrize("name", [*METHODS, "finalize_async_saves"])
def test_a_method_that_is_missing_is_named(name: str, admit: Callable[[Any], Any]) -> None:
    methods = {key: value for key, value in vars(Recording).items() if key != name and key != "__dict__"}
    with pytest.raises(TypeError, match=rf"has no method '{name}'; write def {name}\(self, "):
        admit(type("Odd", (), methods))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("method", "problem"),
    [
        (lambda: None, "too many positional arguments"),
        (lambda self: None, "too many positional arguments"),
        (lambda self, context, more: None, "missing a required argument: 'more'"),
        (lambda self, *, context: None, "too many positional arguments"),
        (lambda self, context, *, more: None, "missing a required( keyword-only)? argument: 'more'"),
        (staticmethod(lambda: None), "too many positional arguments"),
        (staticmethod(lambda self, context: None), "missing a required argument"),
        (classmethod(lambda cls: None), "too many positional arguments"),
        (functools.partialmethod(lambda self, first, context: None, 1, 2), "too many positional arguments"),
    ],
)
def test_a_method_that_cannot_be_called_is_named(
    name: str, method: Any, problem: str, admit: Callable[[Any], Any]
) -> None:
    with pytest.raises(
        TypeError, match=rf"acme\.Odd\.{name} cannot be called with one context: {problem}.*; write def"
    ):
        admit(with_method(name, method))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "method",
    [
        lambda self, ctx: None,
        lambda self, context, more=None: None,
        lambda self, context, *, more=None, **others: None,
        lambda self, *contexts: None,
        lambda *arguments: None,
        lambda *arguments, **keywords: None,
        staticmethod(lambda context: None),
        staticmethod(lambda *arguments: None),
        classmethod(lambda cls, context: None),
        functools.partialmethod(lambda self, first, context: None, 1),
        functools.partial(lambda context: None),
        functools.wraps(lambda self, context: None)(lambda *arguments: None),
    ],
)
def test_a_method_that_can_be_called_is_taken(name: str, method: Any, admit: Callable[[Any], Any]) -> None:
    manager = admit(with_method(name, method))
    getattr(manager, name)(SaveContext(step=1))


async def asynchronous(self: Any, context: Any) -> None: ...


async def asynchronous_generator(self: Any, context: Any) -> Any:
    yield context


def generator(self: Any, context: Any) -> Any:
    yield context


async def asynchronous_finalize(self: Any, *, blocking: bool = True, terminate: bool = False) -> None: ...


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "method", [asynchronous, asynchronous_generator, generator, staticmethod(asynchronous), classmethod(asynchronous)]
)
def test_a_method_that_would_do_nothing_when_it_is_called_is_named(
    name: str, method: Any, admit: Callable[[Any], Any]
) -> None:
    with pytest.raises(TypeError, match=rf"acme\.Odd\.{name} is async or a generator, and would do nothing"):
        admit(with_method(name, method))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("value", [None, 5, "text", property(lambda self: None)])
def test_an_attribute_that_is_no_method_is_named(name: str, value: Any, admit: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=rf"acme\.Odd\.{name} is .*, not a method; write def {name}\(self, context\)"):
        admit(with_method(name, value))


@pytest.mark.parametrize(
    "method",
    [
        lambda self: None,
        lambda self, blocking: None,
        lambda self, *, blocking: None,
        lambda self, *, terminate: None,
        lambda self, blocking, terminate, /: None,
        lambda self, context, *, blocking, terminate: None,
        lambda self, *, blocking, terminate, more: None,
        staticmethod(lambda blocking: None),
        asynchronous_finalize,
        None,
    ],
)
def test_an_end_of_saves_that_cannot_be_called_is_named(method: Any, admit: Callable[[Any], Any]) -> None:
    with pytest.raises(
        TypeError, match=r"finalize_async_saves.*write def finalize_async_saves\(self, \*, blocking, ter"
    ):
        admit(with_method("finalize_async_saves", method))


@pytest.mark.parametrize(
    "method",
    [
        lambda self, blocking=True, terminate=False: None,
        lambda self, *, blocking, terminate, more=None: None,
        lambda self, **flags: None,
        staticmethod(lambda *, blocking, terminate: None),
    ],
)
def test_an_end_of_saves_that_can_be_called_is_taken(method: Any, admit: Callable[[Any], Any]) -> None:
    admit(with_method("finalize_async_saves", method)).finalize_async_saves(blocking=False, terminate=True)


def test_what_has_no_signature_to_look_at_is_taken(admit: Callable[[Any], Any]) -> None:
    assert isinstance(admit(with_method("read_config", vars(dict)["update"])), Recording)
    methods = {name: vars(Recording)[name] for name in (*METHODS, "finalize_async_saves")}
    check_class(type("Odd", (dict,), methods), CALLS, ("state",))


class WithoutState(Recording):
    def __init__(self, config: Any, *, process_group: Any = None) -> None: ...


class WithoutConfig(Recording):
    def __init__(self, **arguments: Any) -> None: ...


class WithMore(Recording):
    def __init__(self, config: Any, bucket: str, **arguments: Any) -> None: ...


@pytest.mark.parametrize(
    ("manager_class", "problem"),
    [
        (WithoutState, "got an unexpected keyword argument 'state'"),
        (WithoutConfig, "too many positional arguments"),
        (WithMore, "missing a required argument: 'bucket'"),
    ],
)
def test_a_constructor_that_cannot_be_called_is_named(
    manager_class: Any, problem: str, admit: Callable[[Any], Any]
) -> None:
    with pytest.raises(TypeError, match=f"{manager_class.__name__} cannot be built with a config and .*: {problem}"):
        admit(manager_class)


def test_a_class_without_a_constructor_cannot_take_a_config(admit: Callable[[Any], Any]) -> None:
    methods = {name: vars(Recording)[name] for name in (*METHODS, "finalize_async_saves")}
    with pytest.raises(TypeError, match="cannot be built with a config"):
        admit(type("Odd", (), methods))


def test_the_protocol_itself_and_what_leaves_it_open_are_refused(admit: Callable[[Any], Any]) -> None:
    class Half(CheckpointManagerProtocol):
        def __init__(self, config: Any, **arguments: Any) -> None: ...

        def save(self, context: SaveContext) -> Any: ...

    class Unfinished(Recording, ABC):
        @abstractmethod
        def upload(self) -> None: ...

    with pytest.raises(TypeError, match="is abstract; write its finalize_async_saves, load, load_weights, read_config"):
        admit(Half)
    with pytest.raises(TypeError, match="is abstract; write its upload"):
        admit(Unfinished)
    with pytest.raises(TypeError, match="is abstract"):
        admit(CheckpointManagerProtocol)


def test_nothing_is_built_from_a_class_that_is_refused(admit: Callable[[Any], Any]) -> None:
    built = []

    class Eager(Recording):
        def __init__(self, config: Any, **arguments: Any) -> None:
            built.append(config)

        save = None  # type: ignore[assignment]

    with pytest.raises(TypeError):
        admit(Eager)
    assert built == []


def test_a_class_that_makes_something_else_is_refused(admit: Callable[[Any], Any]) -> None:
    class Maker(Recording):
        def __new__(cls, config: Any, **arguments: Any) -> Any:
            return [config]

    with pytest.raises(TypeError, match=r"made .*, which is no checkpoint manager"):
        admit(Maker)


def test_what_a_constructor_raises_comes_out(admit: Callable[[Any], Any]) -> None:
    class Failing(Recording):
        def __init__(self, config: Any, **arguments: Any) -> None:
            raise PermissionError("no key for the bucket")

    with pytest.raises(PermissionError, match="no key for the bucket"):
        admit(Failing)


# Contexts


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"step": -1}, "a step lies between"),
        ({"step": 1.0}, "a step is an int"),
        ({"step": 1, "state": {}}, "state is empty"),
        ({"step": 1, "state": [1]}, "state is a mapping"),
        ({"step": 1, "state": {"a.b": 1}}, "cannot name a component"),
        ({"step": 1, "epoch": -1}, "epoch=-1"),
        ({"step": 1, "epoch": True}, "epoch=True"),
        ({"step": 1, "metrics": [0.5]}, "metrics is a mapping"),
        ({"step": 1, "metrics": {"a": "x"}}, "the metric 'a' is 'x', not a number; use extra= for other values"),
        ({"step": 1, "metrics": {"a": None}}, "the metric 'a' is None"),
        ({"step": 1, "metrics": {1: 0.5}}, "metrics is a mapping with texts as keys"),
        (
            {"step": 1, "metrics": {"a": torch.ones(2)}},
            r"the metric 'a' is a tensor of shape \[2\] and torch.float32 on",
        ),
        ({"step": 1, "metrics": {"a": torch.ones((), dtype=torch.complex64)}}, "not a number"),
        ({"step": 1, "metrics": {"a": torch.ones((), device="meta")}}, "on meta, not a number"),
        ({"step": 1, "progress": {1: 2}}, "progress is a mapping"),
        ({"step": 1, "extra": "x"}, "extra is a mapping"),
        ({"step": 1, "guards": 5}, "guards is a mapping"),
        ({"step": 1, "tag": "latest"}, "cannot be a tag"),
        ({"step": 1, "wait": 1}, "wait=1"),
    ],
)
def test_a_save_context_that_cannot_work_is_not_made(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(holdfast.UsageError, match=problem):
        SaveContext(**values)


def test_a_save_context_does_not_wait_for_a_loss_that_is_still_on_its_way(tmp_path: Path) -> None:
    class OnItsWay(torch.Tensor):
        def item(self) -> Any:
            raise AssertionError("the device was waited for")

    context = SaveContext(step=1, metrics={"loss": torch.ones(1).as_subclass(OnItsWay), "accuracy": True, "rate": 1})
    assert context.metrics is not None
    with pytest.raises(AssertionError, match="waited for"):
        context.metrics["loss"].item()


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"purpose": "finetune"}, "purpose='finetune'; use one of 'resume', 'warm_start', 'adapter', 'inference'"),
        ({"state": {}}, "state is empty"),
        ({"guards": [1]}, "guards is a mapping"),
        ({"selector": "no such thing"}, "selects no checkpoint"),
        ({"selector": "runs/other@5"}, "selects no checkpoint.*another run is named by source="),
        ({"source": ""}, "source=''"),
        ({"source": 5}, "source=5"),
        ({"source": "runs/a@5", "selector": 6}, "source='runs/a@5' names a checkpoint, and so does selector=6"),
        ({"strategy": "weights"}, "give a holdfast.LoadStrategy"),
        ({"strategy": {"renames": {}}}, "a load strategy has no 'renames'"),
        ({"strategy": {"progress": False}}, "continues at the saved step.*use another purpose"),
        ({"strategy": holdfast.LoadStrategy(progress=False)}, "continues at the saved step.*use another purpose"),
        (
            {"purpose": "warm_start", "strategy": holdfast.LoadStrategy()},
            "purpose='warm_start' starts at step 0, and the strategy has progress=True",
        ),
        ({"purpose": "inference", "strategy": holdfast.LoadStrategy.warm_start()}, "takes weights, and the strategy"),
        ({"purpose": "adapter", "strategy": holdfast.LoadStrategy.warm_start()}, "takes weights, and the strategy"),
        (
            {"state": {"model": 1}, "strategy": holdfast.LoadStrategy(only=["ema"])},
            "the strategy names 'ema', which is not in the context's state",
        ),
    ],
)
def test_a_load_context_that_contradicts_itself_is_not_made(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(holdfast.UsageError, match=problem):
        LoadContext(**values)


def test_contexts_do_not_change() -> None:
    for context in (SaveContext(step=1), LoadContext()):
        with pytest.raises(AttributeError):
            context.state = {}  # type: ignore[misc]


# The built-in manager, through the same door


def test_the_built_in_manager_has_its_name_too(tmp_path: Path) -> None:
    for name in (None, "holdfast.plugins.HoldfastManager"):
        config = CheckpointConfig(manager_class=name, run=tmp_path / "run", mode="sync")
        manager = create_checkpoint_manager(config, state=parts(), allowed_packages=["holdfast"])
        assert type(manager) is HoldfastManager
        assert manager.config is config
        assert repr(manager).startswith("HoldfastManager(CheckpointManager(")
        manager.finalize_async_saves(terminate=True)


def test_a_run_goes_on_through_the_protocol(run: Path) -> None:
    state = parts(2)
    manager = built_in(run, state)
    assert manager.should_load(LoadContext())
    start = manager.load(LoadContext())
    assert (start.resumed, start.next_step, start.progress, start.config) == (True, 21, {"tokens": 20}, {"width": 4})
    assert torch.equal(weights(state), weights(parts(1)))
    assert torch.equal(moments(state), moments(parts(1)))
    assert state["counter"].value == 1
    assert "rng" in start.restored
    handle = manager.save(SaveContext(step=21, state=state, extra={"note": 1}, tag="next", wait=True))
    assert (handle.step, handle.wait().tags, handle.wait().extra) == (21, ("next",), {"note": 1})
    assert manager.save(SaveContext(step=21)).skipped


def test_a_fresh_run_is_one(tmp_path: Path) -> None:
    manager = built_in(tmp_path / "run", parts())
    assert not manager.should_load(LoadContext())
    start = manager.load(LoadContext())
    assert (start.resumed, start.next_step) == (False, 0)


def test_what_was_asked_for_by_name_is_always_to_be_loaded(tmp_path: Path) -> None:
    manager = built_in(tmp_path / "run", parts(), resume="never")
    assert not manager.should_load(LoadContext())
    for context in (LoadContext(selector=5), LoadContext(source=tmp_path / "nowhere")):
        assert manager.should_load(context)
        with pytest.raises(FileNotFoundError):
            manager.load(context)


def test_the_config_decides_when_to_save(tmp_path: Path) -> None:
    manager = built_in(tmp_path / "run", parts(), save={"every_steps": 5}, keep={"last": 1})
    for step in range(1, 12):
        context = SaveContext(step=step, metrics={"loss": 1.0})
        assert manager.should_save(context) is (step % 5 == 0)
        if manager.should_save(context):
            manager.save(context)
    manager.finalize_async_saves(terminate=True)
    assert [found.step for found in holdfast.checkpoints(tmp_path / "run")] == [10]


def test_epochs_are_counted_from_question_to_question(tmp_path: Path) -> None:
    saved = []
    for first in (1, 9):
        manager = built_in(tmp_path / "run", parts(), save={"every_epochs": 1})
        manager.load(LoadContext())
        for step in range(first, first + 8):
            context = SaveContext(step=step, epoch=step // 4)
            if manager.should_save(context) and manager.should_save(context):
                manager.save(context)
                saved.append(step)
        manager.finalize_async_saves(terminate=True)
    assert saved == [4, 8, 12, 16]


def test_epochs_that_are_asked_about_once_each_go_on_after_a_resume(tmp_path: Path) -> None:
    saved = []
    for first in (1, 4):
        manager = built_in(tmp_path / "run", parts(), save={"every_epochs": 1})
        manager.load(LoadContext())
        for epoch in range(first, first + 3):
            context = SaveContext(step=epoch * 10 - 1, epoch=epoch)
            if manager.should_save(context):
                manager.save(context)
                saved.append(epoch)
        manager.finalize_async_saves(terminate=True)
    assert saved == [1, 2, 3, 4, 5, 6]


def test_a_framework_hears_that_it_is_to_stop(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    manager = built_in(tmp_path / "run", parts(), save={"on_signal": "SIGTERM"})
    saved = []
    for step in range(6):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        context = SaveContext(step=step)
        if manager.should_save(context):
            manager.save(context)
            saved.append(step)
        if manager.should_stop:
            break
    manager.finalize_async_saves(terminate=True)
    assert (saved, step) == ([2], 2)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_resume_that_is_required_is_always_to_be_loaded(tmp_path: Path) -> None:
    manager = built_in(tmp_path / "run", parts(), resume="required")
    assert manager.should_load(LoadContext())
    with pytest.raises(holdfast.CheckpointNotFoundError):
        manager.load(LoadContext())


def test_the_config_of_what_is_being_saved_can_be_read(tmp_path: Path) -> None:
    storage = SlowStorage(MemoryStorage(), delay_seconds=0.05)
    config = CheckpointConfig(mode="async")
    manager = create_checkpoint_manager(config, state=parts(), storage=storage, config_to_store={"width": 4})
    manager.save(SaveContext(step=1))
    assert manager.read_config(LoadContext()) == {"width": 4}
    manager.finalize_async_saves(terminate=True)


def test_the_built_in_manager_gets_everything_of_the_config(tmp_path: Path) -> None:
    config = CheckpointConfig(
        run=tmp_path / "run", save=Every(steps=2), keep=KeepLast(1), rng=False, links="my-{step}", mode="sync"
    )
    manager = create_checkpoint_manager(config, state=parts())
    for step in (2, 4):
        assert manager.should_save(SaveContext(step=step))
        assert manager.save(SaveContext(step=step)).wait().step == step
    manager.finalize_async_saves(terminate=True)
    (checkpoint,) = holdfast.checkpoints(tmp_path / "run")
    assert {tree.component for tree in checkpoint.manifest.trees} == {"model", "optimizer", "counter"}
    assert (tmp_path / "run" / "my-4").is_symlink()


def test_a_config_without_a_run_is_refused_unless_there_is_a_storage() -> None:
    with pytest.raises(holdfast.UsageError, match="the checkpoint config has no 'run'"):
        create_checkpoint_manager(CheckpointConfig(), state=parts())
    manager = built_in(None, parts(), storage=MemoryStorage())
    assert manager.save(SaveContext(step=1)).wait().step == 1
    other = parts(5)
    manager.load(LoadContext(purpose="inference", state={"model": other["model"]}))
    assert torch.equal(weights(other), weights(parts()))


def test_a_save_is_of_the_managers_own_components(tmp_path: Path) -> None:
    state = parts()
    manager = built_in(tmp_path / "run", state)
    with pytest.raises(
        holdfast.UsageError,
        match="'ema': the manager was not built with this component; its components are model, optimizer",
    ):
        manager.save(SaveContext(step=1, state={**state, "ema": nn.Linear(1, 1)}))
    with pytest.raises(holdfast.UsageError, match="'model': this is another object"):
        manager.save(SaveContext(step=1, state={**state, "model": nn.Linear(1, 1)}))
    with pytest.raises(holdfast.UsageError, match="the context's state lacks optimizer, counter"):
        manager.save(SaveContext(step=1, state={"model": state["model"]}))
    assert not manager.manager.checkpoints()


def test_a_component_that_comes_later_is_one_of_them(run: Path) -> None:
    state = parts(2)
    counter = state.pop("counter")
    manager = built_in(run, state)
    manager.load(LoadContext())
    assert manager.attach("counter", counter)
    assert counter.value == 1
    assert manager.save(SaveContext(step=30, state={**state, "counter": counter})).wait().step == 30


# The built-in manager: how it ends


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_saves_are_finalised_any_number_of_times(tmp_path: Path, mode: str) -> None:
    manager = built_in(tmp_path / "run", parts(), mode=mode)
    manager.finalize_async_saves(blocking=False)
    handle = manager.save(SaveContext(step=1))
    for _ in range(3):
        manager.finalize_async_saves(blocking=False)
    for _ in range(3):
        manager.finalize_async_saves()
    assert handle.done()
    last = manager.save(SaveContext(step=2))
    manager.finalize_async_saves(blocking=False, terminate=True)
    assert last.done()
    for blocking in (True, False):
        for terminate in (True, False):
            manager.finalize_async_saves(blocking=blocking, terminate=terminate)
    assert [found.step for found in holdfast.checkpoints(tmp_path / "run")] == [2, 1]


def test_after_the_end_everything_but_looking_is_a_closed_error(run: Path) -> None:
    manager = built_in(run, parts(), save=Every(steps=1))
    manager.finalize_async_saves(terminate=True)
    calls: list[Callable[[], Any]] = [
        lambda: manager.save(SaveContext(step=30)),
        lambda: manager.should_save(SaveContext(step=30)),
        lambda: manager.load(LoadContext()),
        lambda: manager.load_weights(LoadContext(purpose="inference", state={"model": parts()["model"]})),
        lambda: manager.should_load(LoadContext()),
    ]
    for call in calls:
        with pytest.raises(holdfast.ClosedError):
            call()
    assert manager.read_config(LoadContext()) == {"width": 4}


def test_a_failure_comes_out_once_where_saves_are_finalised(tmp_path: Path) -> None:
    storage = FullStorage(MemoryStorage(), room_bytes=100)
    manager = built_in(None, parts(), storage=storage)
    with pytest.raises(holdfast.HoldfastError):
        manager.save(SaveContext(step=1))
    manager.finalize_async_saves()
    manager.finalize_async_saves(terminate=True)


# The built-in manager: warm starts, adapters, inference


def test_a_warm_start_takes_models_and_optimizers_from_another_run(run: Path, tmp_path: Path) -> None:
    state = parts(2)
    manager = built_in(tmp_path / "new", state)
    start = manager.load(LoadContext(purpose="warm_start", source=run, selector="best:loss"))
    assert (start.resumed, start.next_step, start.checkpoint and start.checkpoint.step) == (False, 0, 10)
    assert start.restored == ("model", "optimizer")
    assert torch.equal(weights(state), weights(parts(1)))
    assert torch.equal(moments(state), moments(parts(1)))
    assert state["counter"].value == 2


def test_a_strategy_refines_a_purpose(run: Path, tmp_path: Path) -> None:
    state = parts(2)
    manager = built_in(tmp_path / "new", state)
    strategy = holdfast.LoadStrategy(progress=False, exclude=["model.1.*"])
    start = manager.load(LoadContext(purpose="inference", source=run, strategy=strategy))
    assert start.restored == ("model",)
    assert torch.equal(state["model"][0].weight, parts(1)["model"][0].weight)
    assert torch.equal(state["model"][1].weight, parts(2)["model"][1].weight)
    named = holdfast.LoadStrategy(progress=False, only=["counter"])
    assert manager.load(LoadContext(purpose="warm_start", source=run, strategy=named)).restored == ("counter",)


def test_a_strategy_may_be_plain_data_with_a_rename_and_a_cast(run: Path, tmp_path: Path) -> None:
    first, state = parts(1), parts(2)
    model = torch.nn.ModuleDict({"x": state["model"][0], "y": state["model"][1]}).bfloat16()
    manager = built_in(tmp_path / "new", {"model": model})
    data = {"progress": False, "rename": {"0.*": "x.*", "1.*": "y.*"}, "cast": True}
    context = LoadContext(purpose="inference", source=run, strategy=data)
    assert context.strategy == holdfast.LoadStrategy(**data)
    result = manager.load(context)
    assert result.renamed
    assert result.cast
    assert torch.equal(model["x"].weight, first["model"][0].weight.bfloat16())


def test_a_resume_of_a_part_leaves_the_others(run: Path) -> None:
    state = parts(2)
    manager = built_in(run, state)
    start = manager.load(LoadContext(state={"model": state["model"], "counter": state["counter"]}))
    assert (start.resumed, start.restored) == (True, ("model", "counter", "rng"))
    assert torch.equal(moments(state), moments(parts(2)))


def test_a_resume_is_of_the_managers_own_components(run: Path) -> None:
    manager = built_in(run, parts(2))
    with pytest.raises(holdfast.UsageError, match="this is another object"):
        manager.load(LoadContext(state={"model": parts(3)["model"]}))


def test_weights_for_inference_go_into_any_model(run: Path) -> None:
    trained, served = parts(2), parts(3)
    manager = built_in(run, trained, mode="async")
    handle = manager.save(SaveContext(step=30))
    for load in (manager.load, manager.load_weights):
        result = load(LoadContext(purpose="inference", state={"model": served["model"]}))
        assert handle.done(), "what is under way is the latest"
        assert (result.resumed, result.restored) == (False, ("model",))
        assert result.checkpoint is not None
        assert result.checkpoint.step == 30
    assert torch.equal(weights(served), weights(parts(2)))
    result = manager.load(LoadContext(purpose="inference", state={"model": served["model"]}, selector="first"))
    assert torch.equal(weights(served), weights(parts(1)))
    assert torch.equal(weights(trained), weights(parts(2))), "the training's own model is another one"
    manager.finalize_async_saves(terminate=True)


def test_of_several_models_only_the_named_one_is_loaded(tmp_path: Path) -> None:
    def both(seed: int) -> dict[str, Any]:
        return {"model": parts(seed)["model"], "ema": parts(seed + 10)["model"]}

    manager = built_in(tmp_path / "run", both(1))
    manager.save(SaveContext(step=1))
    manager.finalize_async_saves(terminate=True)
    state = both(2)
    manager = built_in(tmp_path / "run", state)
    manager.load(LoadContext(purpose="inference", state={"model": state["model"]}))
    assert torch.equal(weights(state), weights(both(1)))
    assert torch.equal(state["ema"][0].weight, both(2)["ema"][0].weight)


def test_load_weights_takes_models_alone(run: Path, tmp_path: Path) -> None:
    state = parts(2)
    manager = built_in(tmp_path / "new", state)
    for strategy in (None, holdfast.LoadStrategy(progress=False)):
        result = manager.load_weights(LoadContext(purpose="warm_start", source=run, strategy=strategy))
        assert result.restored == ("model",)
    with pytest.raises(holdfast.UsageError, match="load_weights with purpose='resume'"):
        manager.load_weights(LoadContext(source=run))
    for only in (["optimizer"], ["counter"]):
        strategy = holdfast.LoadStrategy(progress=False, only=only)
        with pytest.raises(holdfast.UsageError, match=f"weights are asked for, and the strategy takes '{only[0]}'"):
            manager.load_weights(LoadContext(purpose="warm_start", source=run, strategy=strategy))
    with pytest.raises(holdfast.UsageError, match="weights are asked for, and the strategy takes '<optimizers>'"):
        manager.load_weights(LoadContext(purpose="warm_start", source=run, strategy=holdfast.LoadStrategy.warm_start()))


@pytest.mark.parametrize("purpose", ["warm_start", "adapter", "inference"])
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_weights_that_are_nowhere_are_an_error(tmp_path: Path, purpose: Any, resume: str) -> None:
    manager = built_in(tmp_path / "run", parts(), resume=resume)
    for state in (None, {"model": parts(1)["model"]}):
        context = LoadContext(purpose=purpose, state=state)
        assert manager.should_load(context), "a framework that does not load then goes on without weights"
        with pytest.raises(holdfast.CheckpointNotFoundError):
            manager.load(context)


def test_a_run_that_is_never_resumed_gives_weights_when_they_are_named(run: Path) -> None:
    state = parts(2)
    manager = built_in(run, state, resume="never")
    for model in (state["model"], parts(3)["model"]):
        with pytest.raises(holdfast.CheckpointNotFoundError, match="resume='never' is not loaded"):
            manager.load(LoadContext(purpose="inference", state={"model": model}))
        result = manager.load(LoadContext(purpose="inference", state={"model": model}, selector="first"))
        assert result.restored == ("model",)


def test_guards_hold_for_every_purpose(run: Path) -> None:
    state = parts(2)
    manager = built_in(run, state)
    for purpose in ("resume", "warm_start", "adapter", "inference"):
        with pytest.raises(holdfast.GuardMismatchError):
            manager.load(LoadContext(purpose=purpose, guards={"vocabulary": 8}))  # type: ignore[arg-type]
    assert torch.equal(weights(state), weights(parts(2)))


def test_a_source_may_be_a_folder_without_a_slash(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    state = parts(2)
    manager = built_in(tmp_path / "new", state)
    for context in (
        LoadContext(source="run"),
        LoadContext(source="run@20"),
        LoadContext(source="run", selector=20),
        LoadContext(source=Path("run"), selector="latest"),
        LoadContext(source=run / "step-000000020"),
        LoadContext(source=f"file://{run}", selector="20"),
    ):
        assert manager.load(context).step == 20
        assert manager.read_config(context) == {"width": 4}
    with pytest.raises(holdfast.CheckpointNotFoundError):
        manager.load(LoadContext(source="run", selector=21))


# Adapters


def adapted(seed: int = 0) -> nn.Sequential:
    """A frozen base, the same for every seed, and an adapter of that seed."""
    torch.manual_seed(99)
    base = nn.Linear(3, 4).requires_grad_(False)
    torch.manual_seed(seed)
    return nn.Sequential(base, nn.Linear(4, 2))


@pytest.fixture
def adapter_run(tmp_path: Path) -> Path:
    manager = built_in(tmp_path / "adapter", {"model": holdfast.Trainable(adapted(1))})
    manager.save(SaveContext(step=1))
    manager.finalize_async_saves(terminate=True)
    return tmp_path / "adapter"


@pytest.mark.parametrize("wrap", [holdfast.Trainable, lambda model: model])
@pytest.mark.parametrize("own", [True, False])
def test_an_adapter_goes_onto_its_base(adapter_run: Path, tmp_path: Path, wrap: Any, own: bool) -> None:
    model = adapted(2)
    state = {"model": wrap(model)}
    manager = built_in(tmp_path / "new", state if own else parts())
    result = manager.load(LoadContext(purpose="adapter", state=state, source=adapter_run))
    assert (result.resumed, result.restored) == (False, ("model",))
    assert torch.equal(model[1].weight, adapted(1)[1].weight)
    assert torch.equal(model[0].weight, adapted(2)[0].weight)


def test_an_adapter_does_not_go_onto_another_base(adapter_run: Path, tmp_path: Path) -> None:
    model = adapted(2)
    with torch.no_grad():
        model[0].weight.add_(1)
    manager = built_in(tmp_path / "new", {"model": holdfast.Trainable(model)})
    with pytest.raises(holdfast.GuardMismatchError):
        manager.load(LoadContext(purpose="adapter", source=adapter_run))
    assert torch.equal(model[1].weight, adapted(2)[1].weight)


def test_an_adapter_that_lacks_a_leaf_of_a_trainable_model_is_an_error(adapter_run: Path, tmp_path: Path) -> None:
    model = nn.Sequential(*adapted(2), nn.Linear(2, 2))
    manager = built_in(tmp_path / "new", {"model": holdfast.Trainable(model)})
    with pytest.raises(holdfast.StateMismatchError, match=r"model\.2\.weight"):
        manager.load_weights(LoadContext(purpose="adapter", source=adapter_run))


def test_a_base_goes_under_an_adapter(tmp_path: Path) -> None:
    torch.manual_seed(5)
    base = nn.Sequential(nn.Linear(3, 4))
    built_in(tmp_path / "base", {"model": base}).save(SaveContext(step=1))
    model = adapted(2)
    training = built_in(tmp_path / "new", {"model": holdfast.Trainable(model)})
    result = training.load_weights(LoadContext(purpose="adapter", state={"model": model}, source=tmp_path / "base"))
    assert torch.equal(model[0].weight, base[0].weight)
    assert torch.equal(model[1].weight, adapted(2)[1].weight)
    assert "model.1.weight" in result.missing


@pytest.mark.parametrize("name", ["model", "other"])
def test_an_adapter_of_which_nothing_fits_is_an_error(adapter_run: Path, tmp_path: Path, name: str) -> None:
    strange = nn.ModuleDict({"head": nn.Linear(2, 2)})
    before = strange["head"].weight.clone()
    manager = built_in(tmp_path / "new", {name: strange})
    with pytest.raises(holdfast.StateMismatchError, match=f"'?{name}'? would (stay as it is|be restored)"):
        manager.load(LoadContext(purpose="adapter", source=adapter_run))
    assert torch.equal(strange["head"].weight, before)


def test_weights_for_inference_are_all_of_them(adapter_run: Path, tmp_path: Path) -> None:
    manager = built_in(tmp_path / "new", {"model": adapted(2)})
    with pytest.raises(holdfast.StateMismatchError, match=r"model\.0\.weight"):
        manager.load(LoadContext(purpose="inference", source=adapter_run))


# The stored configuration


def test_the_stored_config_is_read_without_loading(run: Path, tmp_path: Path) -> None:
    state = parts(2)
    for manager, source in ((built_in(run, state), None), (built_in(tmp_path / "new", state), run)):
        for selector in ("latest", "first", 20, "best:loss"):
            assert manager.read_config(LoadContext(source=source, selector=selector)) == {"width": 4}
        with pytest.raises(holdfast.CheckpointNotFoundError):
            manager.read_config(LoadContext(source=source, selector=7))
    assert torch.equal(weights(state), weights(parts(2)))
    with pytest.raises(holdfast.CheckpointNotFoundError, match="there is no checkpoint to read a config from"):
        built_in(tmp_path / "empty", state).read_config(LoadContext())
    with pytest.raises(holdfast.CheckpointNotFoundError):
        built_in(tmp_path / "empty", state).read_config(LoadContext(source=tmp_path / "nowhere"))
