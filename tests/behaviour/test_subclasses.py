"""Tensors of wrapper subclasses are stored as their inner tensors, and come back as what they were."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils._pytree import tree_map

import holdfast
from holdfast import CheckpointManager
from holdfast.errors import CorruptCheckpointError, GuardMismatchError, StateMismatchError, UsageError
from holdfast.ondisk.codec import decode, encode


class Rounding(enum.Enum):
    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


@dataclasses.dataclass
class Block:
    """A class of the context that nobody registered."""

    size: int
    rounding: Rounding = Rounding.NEAREST


class Scaled(torch.Tensor):
    """Codes of eight bits with a scale for each row. Knows how to be detached, moved and copied, and no arithmetic."""

    codes: torch.Tensor
    scale: torch.Tensor
    block: Any

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, block: Any) -> Scaled:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)
        made.codes, made.scale, made.block = codes, scale, block
        return made  # type: ignore[no-any-return]

    @classmethod
    def random(cls, rows: int = 4, columns: int = 3, block: Any = None) -> Scaled:
        codes = torch.randint(-128, 127, (rows, columns), dtype=torch.int8)
        return cls(codes, torch.randn(rows), block or Block(32))

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"block": self.block, "device": self.codes.device}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["codes"], inner["scale"], context["block"])

    def parts(self) -> tuple[Any, ...]:
        return self.codes.tolist(), self.scale.tolist(), self.block

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default):
            one = args[0]
            return cls(func(one.codes), func(one.scale), one.block)
        if func is torch.ops.aten._to_copy.default:
            one = args[0]
            return cls(one.codes.clone(), one.scale.clone(), one.block)
        if func is torch.ops.aten.view.default:
            return cls(func(args[0].codes, args[1]), args[0].scale, args[0].block)
        return cls.copy(func, args, kwargs or {})

    @classmethod
    def copy(cls, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.copy_.default:
            args[0].codes.copy_(args[1].codes)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        raise NotImplementedError(str(func))


class Uncopied(Scaled):
    """One that does not even know how to be copied."""

    @classmethod
    def copy(cls, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError(str(func))


class Pair(torch.Tensor):
    """A subclass around another one and a plain tensor."""

    @staticmethod
    def __new__(cls, one: torch.Tensor, other: torch.Tensor) -> Pair:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, one.shape, dtype=one.dtype)
        made.one, made.other = one, other
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["one", "other"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Pair:
        return cls(inner["one"], inner["other"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(func(args[0].one), func(args[0].other))
        args = tree_map(lambda value: value.other if isinstance(value, Pair) else value, args)
        return func(*args, **(kwargs or {}))


def model_with(tensor: torch.Tensor) -> Any:
    model: Any = nn.Linear(3, 4)
    model.weight = nn.Parameter(tensor, requires_grad=False)
    return model


def manager_of(run: Path, state: dict[str, Any], mode: Any = "sync") -> CheckpointManager:
    return CheckpointManager(run, state, rng=False, mode=mode)


def leaves(run: Path) -> dict[str, str]:
    return {leaf.name: leaf.dtype for leaf in holdfast.resolve(run).manifest.tensors}


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", [Scaled, Uncopied])
def test_a_weight_of_a_subclass_comes_back_into_the_live_tensor(tmp_path: Path, kind: type[Scaled], mode: Any) -> None:
    model, second = model_with(kind.random()), model_with(kind.random())
    with manager_of(tmp_path, {"model": model}, mode) as manager:
        manager.save(0)
        model.weight.codes.add_(1)
        manager.save(1, wait=True)
    assert leaves(tmp_path) == {"model.weight.codes": "int8", "model.weight.scale": "float32", "model.bias": "float32"}
    weight, codes = second.weight, second.weight.codes
    with manager_of(tmp_path, {"model": second}) as manager:
        manager.restore()
        assert second.weight is weight
        assert second.weight.codes.data_ptr() == codes.data_ptr()
        assert second.weight.parts() == model.weight.parts()
        manager.restore(0)
        assert torch.equal(second.weight.codes, model.weight.codes - 1)


def test_a_subclass_inside_of_another_comes_back(tmp_path: Path) -> None:
    def model() -> Any:
        return model_with(Pair(Scaled.random(), torch.randn(4, 3)))

    first, second = model(), model()
    with manager_of(tmp_path, {"model": first}) as manager:
        manager.save(0, wait=True)
    assert {"model.weight.one.codes", "model.weight.one.scale", "model.weight.other"} < leaves(tmp_path).keys()
    with manager_of(tmp_path, {"model": second}) as manager:
        manager.restore()
    assert second.weight.one.parts() == first.weight.one.parts()
    assert torch.equal(second.weight.other, first.weight.other)


def test_tied_weights_of_a_subclass_are_stored_once(tmp_path: Path) -> None:
    def model() -> Any:
        tied = nn.Module()
        tied.one, tied.other = model_with(Scaled.random()), model_with(Scaled.random())
        tied.other.weight = tied.one.weight
        return tied

    first, second = model(), model()
    with manager_of(tmp_path, {"model": first}) as manager:
        manager.save(0, wait=True)
    assert "model.other.weight.codes" not in leaves(tmp_path)
    with manager_of(tmp_path, {"model": second}) as manager:
        manager.restore()
    assert second.other.weight.parts() == first.one.weight.parts()


@pytest.mark.guarantee("G7")
def test_weights_of_a_subclass_that_differed_do_not_go_into_one(tmp_path: Path) -> None:
    def model() -> Any:
        pair = nn.Module()
        pair.one, pair.other = model_with(Scaled.random()), model_with(Scaled.random())
        return pair

    with manager_of(tmp_path, {"model": model()}) as manager:
        manager.save(0, wait=True)
    tied = model()
    tied.other.weight = tied.one.weight
    with (
        manager_of(tmp_path, {"model": tied}) as manager,
        pytest.raises(StateMismatchError, match=r"weight\.codes: is tied to model\.other\.weight\.codes now"),
    ):
        manager.restore()


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize(
    ("now", "message"),
    [
        (lambda: Uncopied.random(), r"Scaled' float32.* in the checkpoint, '.*Uncopied'"),
        (lambda: Scaled.random(block=Block(64)), r"Block.*32.* in the checkpoint, .*Block.*64.* now"),
        (lambda: Scaled.random(block=Block(32, Rounding.STOCHASTIC)), r"NEAREST.* in the checkpoint, .*STOCHASTIC"),
        (lambda: torch.randn(4, 3), r"model\.weight: was '.*Scaled'"),
    ],
)
def test_another_class_or_context_is_a_mismatch_that_names_both(tmp_path: Path, now: Any, message: str) -> None:
    with manager_of(tmp_path, {"model": model_with(Scaled.random())}) as manager:
        manager.save(0, wait=True)
    second = model_with(now())
    bias = second.bias.detach().clone()
    with manager_of(tmp_path, {"model": second}) as manager, pytest.raises(StateMismatchError, match=message):
        manager.restore()
    assert torch.equal(second.bias, bias)


@pytest.mark.guarantee("G7")
def test_a_plain_tensor_does_not_go_into_a_subclass(tmp_path: Path) -> None:
    with manager_of(tmp_path, {"model": model_with(torch.randn(4, 3))}) as manager:
        manager.save(0, wait=True)
    with (
        manager_of(tmp_path, {"model": model_with(Scaled.random())}) as manager,
        pytest.raises(StateMismatchError, match=r"model\.weight: another value in the checkpoint, '.*Scaled'"),
    ):
        manager.restore()


class Optimizer8(torch.optim.Optimizer):
    """Keeps its moments in a subclass."""

    kind: type[Scaled] = Scaled

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "moment" not in state:
                    state["moment"] = self.kind.random(block=32)
                state["moment"].codes.add_(1)
                state["step"] = torch.tensor(1.0)


class Registered(Scaled):
    """Known to Holdfast by its name."""


holdfast.register_type(Registered, "scaled-8bit")


class RegisteredOptimizer8(Optimizer8):
    kind = Registered


def parts_of(kind: type[Optimizer8]) -> tuple[nn.Module, Optimizer8, dict[str, Any]]:
    # Of another type than the moments: PyTorch would cast these to it.
    model = nn.Linear(3, 4, bias=False, dtype=torch.bfloat16)
    optimizer = kind(model.parameters())
    return model, optimizer, {"model": model, "optimizer": optimizer}


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", [Optimizer8, RegisteredOptimizer8])
def test_optimizer_state_of_a_subclass_fills_the_live_one(tmp_path: Path, kind: type[Optimizer8], mode: Any) -> None:
    model, optimizer, state = parts_of(kind)
    optimizer.step()
    with manager_of(tmp_path, state, mode) as manager:
        manager.save(0, wait=True)
    second, its_optimizer, state = parts_of(kind)
    its_optimizer.step()
    moment = its_optimizer.state[second.weight]["moment"]
    with manager_of(tmp_path, state) as manager:
        manager.restore()
    assert its_optimizer.state[second.weight]["moment"] is moment
    assert moment.parts() == optimizer.state[model.weight]["moment"].parts()


@pytest.mark.guarantee("G8")
def test_a_registered_class_is_made_anew_in_an_optimizer_that_has_not_stepped(tmp_path: Path) -> None:
    model, optimizer, state = parts_of(RegisteredOptimizer8)
    optimizer.step()
    with manager_of(tmp_path, state) as manager:
        manager.save(0, wait=True)
    second, its_optimizer, state = parts_of(RegisteredOptimizer8)
    with manager_of(tmp_path, state) as manager:
        manager.restore()
    moment = its_optimizer.state[second.weight]["moment"]
    assert type(moment) is Registered
    assert moment.parts() == optimizer.state[model.weight]["moment"].parts()
    its_optimizer.step()


@pytest.mark.guarantee("G9")
def test_a_class_that_nobody_registered_is_not_made_from_its_name(tmp_path: Path) -> None:
    _, optimizer, state = parts_of(Optimizer8)
    optimizer.step()
    with manager_of(tmp_path, state) as manager:
        manager.save(0, wait=True)
    second, _, state = parts_of(Optimizer8)
    weight = second.weight.detach().clone()
    with (
        manager_of(tmp_path, state) as manager,
        pytest.raises(StateMismatchError, match=r"state\.weight\.moment.*Scaled'.*not registered.*register_type"),
    ):
        manager.restore()
    assert torch.equal(second.weight, weight)


def test_a_value_of_a_component_may_be_of_a_subclass(tmp_path: Path) -> None:
    class Holder:
        def __init__(self) -> None:
            self.tensor = Scaled.random()

        def state_dict(self) -> dict[str, Any]:
            return {"list": [self.tensor]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.tensor = state["list"][0]

    first, second = Holder(), Holder()
    with manager_of(tmp_path, {"model": nn.Linear(1, 1), "holder": first}) as manager:
        manager.save(0, wait=True)
    before = second.tensor
    with manager_of(tmp_path, {"model": nn.Linear(1, 1), "holder": second}) as manager:
        manager.restore()
    assert second.tensor is not before
    assert type(second.tensor) is Scaled
    assert second.tensor.parts() == first.tensor.parts()


def test_a_frozen_base_of_a_subclass_is_known_by_its_content(tmp_path: Path) -> None:
    def adapter(codes: int) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(model_with(Scaled.random()), nn.Linear(4, 2))
        model[0].weight.codes.fill_(codes)
        model[0].requires_grad_(False)
        return model

    with manager_of(tmp_path, {"model": holdfast.Trainable(adapter(1))}) as manager:
        manager.save(0, wait=True)
    assert set(leaves(tmp_path)) == {"model.1.weight", "model.1.bias"}
    with manager_of(tmp_path, {"model": holdfast.Trainable(adapter(1))}) as manager:
        assert manager.restore().step == 0
    with (
        manager_of(tmp_path, {"model": holdfast.Trainable(adapter(2))}) as manager,
        pytest.raises(GuardMismatchError, match="frozen:model"),
    ):
        manager.restore()


class Opaque(torch.Tensor):
    """A subclass that says nothing of what it is made of."""


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (lambda: torch.zeros(4, 3).as_subclass(Opaque), r"model\.mask.*Opaque.*__tensor_flatten__"),
        (lambda: Scaled.random(block=print), r"model\.mask\.context\.block.*builtin_function"),
    ],
)
def test_what_cannot_be_taken_apart_is_refused(tmp_path: Path, tensor: Any, message: str) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("mask", tensor())
    with pytest.raises(UsageError, match=message), manager_of(tmp_path / "run", {"model": model}) as manager:
        manager.save(0, wait=True)
    assert not (tmp_path / "run").exists()


def test_a_device_in_a_context_has_no_index() -> None:
    from holdfast.state.tensors import flattened

    stored: Any = encode(Scaled.random(), path="x", on_tensor=lambda path, tensor: path, flatten=flattened)
    assert stored["$subclass"]["context"]["device"] == {"$device": "cpu"}


def test_a_plain_state_dict_with_a_registered_subclass_is_read_by_pytorchs_own_api(tmp_path: Path) -> None:
    weights = {"model": {"weight": Registered.random(block=32), "bias": torch.randn(2)}}
    with holdfast.AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(0, weights)
    target: Any = {"model": {"weight": Registered.random(block=32), "bias": torch.zeros(2)}}
    dcp.load(target, storage_reader=holdfast.HoldfastReader(tmp_path), no_dist=True)
    assert target["model"]["weight"].parts() == weights["model"]["weight"].parts()  # type: ignore[attr-defined]
    with holdfast.AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": {"weight": Scaled.random()}})
    with pytest.raises(CheckpointException, match=r"Scaled', which is not registered"):
        dcp.load({"model": {"weight": Scaled.random()}}, storage_reader=holdfast.HoldfastReader(tmp_path), no_dist=True)


SOUND: dict[str, Any] = {
    "name": "scaled-8bit",
    "dtype": "float32",
    "shape": [4, 3],
    "stride": [3, 1],
    "shards": 1,
    "context": {"block": 32, "device": {"$device": "cpu"}},
    "tensors": {"codes": {"$tensor": "x.codes"}, "scale": {"$tensor": "x.scale"}},
}


def deep(depth: int) -> Any:
    value: Any = None
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize(
    "change",
    [
        {"name": 3},
        {"dtype": "float32; import os"},
        {"shape": [4, -3]},
        {"shape": [4]},
        {"stride": "no"},
        {"shards": None},
        {"tensors": [1]},
        {"tensors": {"codes": 3}},
        {"tensors": {"codes": {"$list": []}}},
        {"context": deep(3_000)},
        {"more": 1},
    ],
)
def test_a_malformed_subclass_is_damage(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode({"$subclass": {**SOUND, **change}}, path="x", tensor=str, subclass=lambda place, record: record)


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("name", ["scaled-8bit", "torch.Tensor"])
def test_a_tensor_class_does_not_stand_for_a_value(name: str) -> None:
    with pytest.raises((CorruptCheckpointError, StateMismatchError)):
        decode({"$type": {"name": name, "fields": {}}}, path="x", tensor=None)
    with pytest.raises(CorruptCheckpointError, match="stands where none can be stored"):
        decode({"$subclass": SOUND}, path="x", tensor=None)


# Real ones


def test_int8_weights_and_8_bit_moments_of_torchao_come_back(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from torchao.optim import AdamW8bit
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def parts() -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 128))
        quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: name == "0")
        return {"model": model, "optimizer": AdamW8bit(model[1].parameters())}

    def step(state: dict[str, Any], seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        state["model"](torch.randn(4, 64)).pow(2).sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        return state["model"](torch.ones(1, 64)).detach()

    first = parts()
    with manager_of(tmp_path, first, "async") as manager:
        step(first, 1)
        manager.save(0)
        step(first, 2)
        manager.save(1, wait=True)
    expected = step(first, 3)
    for stepped in (False, True):
        second = parts()
        if stepped:
            step(second, 9)
        with manager_of(tmp_path, second) as manager:
            manager.restore()
        moment = second["optimizer"].state[second["model"][1].weight]["exp_avg"]
        assert type(moment).__name__ == "OptimState8bit"
        assert torch.equal(step(second, 3), expected)
