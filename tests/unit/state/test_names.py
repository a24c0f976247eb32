"""The names of parameters are remembered, and found anew whenever the model is not what it was."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from holdfast import CheckpointManager
from holdfast.errors import UsageError
from holdfast.state.names import cuts_of, optimizer_names, parameter_names
from holdfast.testing import MemoryStorage


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)


def swap_parts(model: Pair) -> None:
    model.first, model.second = model.second, model.first


def swap_parameters(model: Pair) -> None:
    model.first.weight, model.second.weight = model.second.weight, model.first.weight


def replace_a_parameter(model: Pair) -> None:
    model.first.weight = nn.Parameter(torch.ones(2, 2))


def rename_a_part(model: Pair) -> None:
    model._modules["third"] = model._modules.pop("second")


def rename_a_parameter(model: Pair) -> None:
    model.second._parameters["kernel"] = model.second._parameters.pop("weight")


def add_a_part(model: Pair) -> None:
    model.second.inner = nn.Linear(1, 1)


def tie(model: Pair) -> None:
    model.second.weight = model.first.weight


def leave_out_a_part(model: Pair) -> None:
    model.second = None  # type: ignore[assignment]


CHANGES = [
    swap_parts,
    swap_parameters,
    replace_a_parameter,
    rename_a_part,
    rename_a_parameter,
    add_a_part,
    tie,
    leave_out_a_part,
]


def names_from_scratch(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_has_its_new_names(change: Callable[[Pair], None]) -> None:
    model = Pair()
    before = parameter_names(model)
    assert before == names_from_scratch(model)
    change(model)
    assert parameter_names(model) == names_from_scratch(model)
    assert parameter_names(model) != before


def test_names_of_a_model_that_stayed_are_not_found_twice() -> None:
    model = Pair()
    assert parameter_names(model) is parameter_names(model)


class Trained(Pair):
    """Names what is trained, and nothing else."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return (pair for pair in super().named_parameters(*args, **kwargs) if pair[1].requires_grad)


class Hiding(Pair):
    """Has parts that it names or not."""

    hidden = True

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        found = super().named_modules(*args, **kwargs)
        return (pair for pair in found if not self.hidden or pair[1] is not self.second)


def test_a_model_that_names_its_parameters_in_its_own_way_is_asked_each_time() -> None:
    model = Trained()
    model.second.weight.requires_grad_(False)
    assert list(parameter_names(model).values()) == ["first.weight"]
    model.second.weight.requires_grad_(True)
    assert list(parameter_names(model).values()) == ["first.weight", "second.weight"]


def test_a_part_that_names_its_parts_in_its_own_way_is_asked_each_time() -> None:
    part = Hiding()
    model = nn.Sequential(part)
    assert list(parameter_names(model).values()) == ["0.first.weight"]
    part.hidden = False
    assert list(parameter_names(model).values()) == ["0.first.weight", "0.second.weight"]


def test_a_method_that_was_put_onto_a_model_counts() -> None:
    model = Pair()
    assert len(parameter_names(model)) == 2
    model.named_parameters = lambda: iter([("only", model.first.weight)])  # type: ignore[method-assign]
    assert list(parameter_names(model).values()) == ["only"]


@pytest.mark.parametrize("make", [torch.jit.script, nn.Identity, lambda part: nn.Sequential(torch.jit.script(part))])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_parts_are_saved_and_restored(make: Any) -> None:
    storage = MemoryStorage()
    model = make(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9) if list(model.parameters()) else None
    state = {"model": model} | ({"optimizer": optimizer} if optimizer else {})
    with CheckpointManager("run", state, storage=storage) as manager:
        manager.save(1, wait=True)
        wanted = [parameter.clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        manager.restore()
    assert all(map(torch.equal, wanted, model.parameters()))


def test_fsdp_of_the_first_kind_is_refused_at_once() -> None:
    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapped)
    with pytest.raises(UsageError, match=r"component 'model': .*FSDP1.*fully_shard"):
        CheckpointManager("run", {"model": nn.Sequential(wrapped)}, storage=MemoryStorage())


def test_an_optimizer_over_swapped_parameters_follows_them() -> None:
    model = Pair()
    optimizer = torch.optim.SGD(model.parameters())
    components = {"model": model, "optimizer": optimizer}
    assert optimizer_names(optimizer, components, "optimizer") == ["first.weight", "second.weight"]
    swap_parameters(model)
    assert optimizer_names(optimizer, components, "optimizer") == ["second.weight", "first.weight"]


def test_a_part_that_takes_the_place_of_another_is_noticed_though_the_parts_are_the_same() -> None:
    model = Pair()
    model.third = model.second
    model.second = model.first
    before = parameter_names(model)
    model.second = model.third
    assert parameter_names(model) == names_from_scratch(model) != before


class Watched(dict[str, Any]):
    """Components that count how often all of them are gone through."""

    passes = 0

    def items(self) -> Any:
        self.passes += 1
        return super().items()


def test_the_shards_of_a_component_that_is_no_optimizer_are_found_without_a_pass_over_all_components() -> None:
    model = nn.Linear(2, 2)
    components = Watched(model=model, optimizer=torch.optim.SGD(model.parameters()))
    assert cuts_of("model", components) == {}
    assert components.passes == 0
    assert cuts_of("optimizer", components) == {}
    assert components.passes == 1
