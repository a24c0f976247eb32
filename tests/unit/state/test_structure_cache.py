"""A state of known structure is taken without walking through it; anything new about it is seen."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import numpy
import pytest
import torch

import holdfast
from holdfast.errors import UsageError
from holdfast.state.rng import RNGState
from holdfast.state.state_dicts import tree_of
from holdfast.state.structure_cache import remember
from holdfast.testing import MemoryStorage


class Holder:
    """Whatever nested state it is given."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def same(one: Any, other: Any) -> bool:
    """Whether two nested states are equal, types, keys and their order included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return one.dtype == other.dtype and numpy.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def first_state() -> dict[str, Any]:
    tied, wave, cube = torch.randn(4), torch.randn(3, dtype=torch.complex64), torch.randn(2, 2, 2)
    return {
        "weights": {"a": torch.randn(3, 2), "b": torch.randn(5), "tied": tied, "again": tied},
        "moments": {"a": {"step": torch.tensor(1.0), "exp": torch.randn(3, 2)}, "b": {"exp": torch.randn(5)}},
        "rate": 0.1,
        "groups": [{"lr": 0.1, "names": ["a", "b"]}],
        "single": torch.randn(2),
        "waves": {"a": wave, "b": wave},
        "listed": [torch.randn(3), {"names": ["x", "y"], "a": torch.randn(2), "rate": 1}, torch.randn(4), 5],
        "named": {"names": ["x", "y"], "a": torch.randn(2)},
        "array": numpy.arange(400.0),
        "arrays": {"a": numpy.arange(300.0), "b": {"c": numpy.arange(500, dtype=numpy.uint32)}},
        "numbers": (1, 2, [3, 4]),
        "cubes": {"a": cube.transpose(0, 1), "b": cube.transpose(0, 1)},
    }


def untie(state: Any) -> None:
    state["weights"]["again"] = state["weights"]["tied"].clone()


def tie_others(state: Any) -> None:
    untie(state)
    state["weights"]["b"] = torch.randn(4)
    state["weights"]["a"] = state["weights"]["b"]


def swap_keys(state: Any) -> None:
    state["weights"] = dict(reversed(list(state["weights"].items())))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "other content": lambda state: state["weights"]["a"].normal_(),
    "another tensor in its place": lambda state: state["weights"].update(a=torch.randn(3, 2)),
    "another value": lambda state: state.update(rate=0.2),
    "a value deep in a list": lambda state: state["groups"][0].update(lr=0.3),
    "a new key": lambda state: state["weights"].update(c=torch.randn(2)),
    "a key less": lambda state: state["moments"]["a"].pop("step"),
    "keys in another order": swap_keys,
    "another shape": lambda state: state["weights"].update(a=torch.randn(2, 3)),
    "another type": lambda state: state["weights"].update(b=torch.randn(5).bfloat16()),
    "a tensor that became a value": lambda state: state.update(single=7),
    "a value that became a tensor": lambda state: state.update(rate=torch.randn(3)),
    "a tensor inside of a list": lambda state: state["groups"].append(torch.randn(2)),
    "a dict that became another kind": lambda state: state.update(weights=OrderedDict(state["weights"])),
    "tied tensors that are untied": untie,
    "other tensors tied": tie_others,
    "a view of another layout": lambda state: state["weights"].update(a=torch.randn(2, 3).t()),
    "one of two tied tensors conjugated": lambda state: state["waves"].update(b=state["waves"]["a"].conj()),
    "one of two tied tensors negated": lambda state: state["waves"].update(b=torch._neg_view(state["waves"]["a"])),
    "one of two tied views turned": lambda state: state["cubes"].update(b=state["cubes"]["a"].transpose(1, 2)),
    "other texts": lambda state: state["named"].update(names=["x", "z"]),
    "more texts": lambda state: state["named"]["names"].append("z"),
    "texts that became numbers": lambda state: state["named"].update(names=[1, 2]),
    "texts that became a tuple": lambda state: state["named"].update(names=("x", "y")),
    "texts and a tensor": lambda state: state["named"].update(names=["x", torch.ones(1)]),
    "texts in a list": lambda state: state["listed"][1].update(names=["z"]),
    "another value in a list": lambda state: state["listed"].__setitem__(3, "five"),
    "another tensor in a list": lambda state: state["listed"].__setitem__(0, torch.randn(3)),
    "another shape in a list": lambda state: state["listed"].__setitem__(0, torch.randn(3, 1)),
    "a tensor in a list that became a value": lambda state: state["listed"].__setitem__(0, 3),
    "a longer list": lambda state: state["listed"].append(torch.randn(1)),
    "a shorter list": lambda state: state["listed"].pop(),
    "a list that became a tuple": lambda state: state.update(listed=tuple(state["listed"])),
    "a value in a list that became a tensor": lambda state: state["listed"].__setitem__(3, torch.ones(1)),
    "other content of an array": lambda state: state["array"].__setitem__(3, 7),
    "another array": lambda state: state["arrays"].update(a=numpy.ones(300)),
    "another shape of an array": lambda state: state.update(array=numpy.ones((20, 20))),
    "another type of an array": lambda state: state.update(array=numpy.ones(400, dtype=numpy.int64)),
    "another order of bytes in an array": lambda state: state.update(array=numpy.ones(400, dtype=">f8")),
    "a small array": lambda state: state.update(array=numpy.ones(3)),
    "an array that became a tensor": lambda state: state.update(array=torch.ones(400, dtype=torch.float64)),
    "a tensor that became an array": lambda state: state.update(single=numpy.ones(2, dtype=numpy.float32)),
    "an array in a dict that became a tensor": lambda state: state["arrays"].update(
        a=torch.ones(300, dtype=torch.float64)
    ),
    "two arrays of one memory": lambda state: state["arrays"].update(a=state["array"][:300]),
    "larger numbers": lambda state: state.update(numbers=(1 << 80, -(1 << 70), [True, 4])),
    "an empty dict": lambda state: state.update(moments={}),
    "no tensor any more": lambda state: state.update(weights={"a": 1}, moments={}, single=None),
}


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_state_that_changed_between_two_saves_is_saved_as_it_is(change: str, mode: Any) -> None:
    storage, state = MemoryStorage(), first_state()
    with holdfast.CheckpointManager("run", {"h": Holder(state)}, storage=storage, mode=mode, rng=False) as manager:
        manager.save(0)
        CHANGES[change](state)
        manager.save(1, wait=True)
        manager.save(2, wait=True)
        for step in (1, 2):
            found = Holder()
            with holdfast.CheckpointManager("run", {"h": found}, storage=storage, rng=False) as reader:
                reader.restore(step)
            assert same(found.state, state), step


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_changes_is_saved_as_it_is(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    storage, holder = MemoryStorage(), Holder(first_state())
    with holdfast.CheckpointManager("run", {"h": holder}, storage=storage, mode="async", rng=False) as manager:
        for step in range(25):
            name = draw.choice(list(CHANGES))
            try:
                CHANGES[name](holder.state)
            except (KeyError, IndexError, AttributeError, TypeError):
                holder.state = first_state()
            manager.save(step, wait=True)
            found = Holder()
            with holdfast.CheckpointManager("run", {"h": found}, storage=storage, rng=False) as reader:
                reader.restore(step)
            assert same(found.state, holder.state), (step, name)


def test_what_has_the_same_structure_is_recognised_and_what_has_not_is_not() -> None:
    state = first_state()
    remembered = remember(tree_of("h", Holder(), state, None), state)
    assert remembered is not None
    assert remembered.recognise(state) is not None
    known = {
        "other content",
        "another tensor in its place",
        "another value",
        "a value deep in a list",
        "other texts",
        "more texts",
        "texts that became numbers",
        "texts that became a tuple",
        "texts in a list",
        "another value in a list",
        "another tensor in a list",
        "other content of an array",
        "another array",
        "larger numbers",
    }
    for name, change in CHANGES.items():
        state = first_state()
        change(state)
        assert (remembered.recognise(state) is not None) == (name in known), name


def test_a_buffer_that_became_an_expanded_one_is_refused_as_at_the_first_save() -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("b", torch.randn(3, 4).t())
    with holdfast.CheckpointManager("run", {"model": model}, storage=MemoryStorage(), rng=False) as manager:
        manager.save(0, wait=True)
        model.b = torch.randn(4, 1).expand(4, 3)
        with pytest.raises(UsageError, match="share memory"):
            manager.save(1, wait=True)


def test_a_random_state_is_recognised() -> None:
    rng = RNGState()
    state = rng.state_dict()
    remembered = remember(tree_of("rng", rng, state, "rank-00000"), state)
    assert remembered is not None
    random.random()
    numpy.random.standard_normal()
    torch.rand(1)
    state = rng.state_dict()
    found, fresh = remembered.recognise(state), tree_of("rng", rng, state, "rank-00000")
    assert found is not None
    assert msgspec.json.encode(found.tree.values) == msgspec.json.encode(fresh.values)
    assert list(found.tree.tensors) == list(fresh.tensors)
    assert all(torch.equal(one, fresh.tensors[path]) for path, one in found.tree.tensors.items())


def test_what_is_recognised_has_the_values_that_a_walk_finds_in_their_order() -> None:
    state = first_state()
    remembered = remember(tree_of("h", Holder(), state, None), state)
    assert remembered is not None
    for change in ("another value", "other texts", "texts in a list", "another value in a list", "larger numbers"):
        CHANGES[change](state)
        found = remembered.recognise(state)
        assert found is not None
        assert msgspec.json.encode(found.tree.values) == msgspec.json.encode(tree_of("h", Holder(), state, None).values)
