"""Only the very classes of a framework are seen through; what merely looks like them is taken as it is.

The wrappers of the real frameworks are in tests/integrations/test_framework_wrappers.py.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from holdfast.errors import StateMismatchError, UsageError
from holdfast.state.framework_wrappers import (
    is_loader_adapter,
    load_loader_adapter,
    loader_adapter_state,
    loader_inside,
    object_inside,
    refuse_same_object,
)


class AcceleratedScheduler:
    """A stand-in, which counts only where the framework's module has it."""

    def __init__(self, inner: Any) -> None:
        self.scheduler = inner

    def state_dict(self) -> dict[str, Any]:
        return {}


class DataLoaderAdapter:
    """A stand-in for a prepared loader."""

    def __init__(self, inner: Any) -> None:
        self.base_dataloader = inner
        self.iteration = 2
        self.dl_state_dict: dict[str, Any] = {"position": 5}
        self.loaded: Any = None
        self.gradient_state = SimpleNamespace(dataloader_references=[None, self])

    def state_dict(self) -> dict[str, Any]:
        return self.dl_state_dict

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in (("accelerate.scheduler", AcceleratedScheduler), ("accelerate.data_loader", DataLoaderAdapter)):
        module = ModuleType(name)
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(kind, "__module__", name)


def test_a_class_that_only_has_the_name_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = AcceleratedScheduler("inner")
    assert object_inside(wrapper) is wrapper
    monkeypatch.setattr(AcceleratedScheduler, "__module__", "accelerate.scheduler")
    monkeypatch.delitem(sys.modules, "accelerate.scheduler", raising=False)
    assert object_inside(wrapper) is wrapper
    monkeypatch.setitem(sys.modules, "accelerate.scheduler", ModuleType("accelerate.scheduler"))
    assert object_inside(wrapper) is wrapper


@pytest.mark.usefixtures("framework")
def test_wrappers_are_seen_through_to_the_innermost_object() -> None:
    inner = object()
    assert object_inside(AcceleratedScheduler(AcceleratedScheduler(inner))) is inner


@pytest.mark.usefixtures("framework")
def test_a_subclass_with_a_state_of_its_own_is_taken_as_it_is() -> None:
    class WithState(AcceleratedScheduler):
        def state_dict(self) -> dict[str, Any]:
            return {"more": 1}

    class Without(AcceleratedScheduler):
        pass

    own = WithState("inner")
    assert object_inside(own) is own
    assert object_inside(Without("inner")) == "inner"


@pytest.mark.usefixtures("framework")
def test_a_version_without_the_attribute_is_an_error() -> None:
    wrapper = AcceleratedScheduler("inner")
    del wrapper.scheduler
    with pytest.raises(UsageError, match="has no 'scheduler'"):
        object_inside(wrapper)


@pytest.mark.usefixtures("framework")
def test_the_epoch_of_a_loader_is_the_next_one_once_its_last_batch_is_handed_out() -> None:
    adapter = DataLoaderAdapter("inner")
    assert is_loader_adapter(adapter)
    assert loader_inside(adapter) == "inner"
    assert loader_adapter_state(adapter) == {"position": 5, "_accelerate_iteration": 2}
    adapter.dl_state_dict = {"_iterator_finished": True}
    assert loader_adapter_state(adapter)["_accelerate_iteration"] == 3
    adapter.gradient_state.dataloader_references = [None]  # the epoch has ended, and is counted
    assert loader_adapter_state(adapter)["_accelerate_iteration"] == 2


@pytest.mark.usefixtures("framework")
def test_the_loader_inside_gets_the_position_alone() -> None:
    adapter = DataLoaderAdapter("inner")
    load_loader_adapter(adapter, {"position": 7, "_accelerate_iteration": 4})
    assert adapter.loaded == adapter.dl_state_dict == {"position": 7}
    assert adapter.iteration == 4
    with pytest.raises(StateMismatchError, match="cannot take list"):
        load_loader_adapter(adapter, [7])


@pytest.mark.usefixtures("framework")
def test_one_object_in_two_wrappers_is_refused() -> None:
    inner = object()
    refuse_same_object({"a": AcceleratedScheduler(inner), "b": object()})
    with pytest.raises(UsageError, match="the same object as 'a'"):
        refuse_same_object({"a": AcceleratedScheduler(inner), "b": AcceleratedScheduler(inner)})
