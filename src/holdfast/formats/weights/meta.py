"""Models without memory: build one whose parameters take none, and give memory to one on the meta device."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedTensorMixin

from holdfast.errors import StateMismatchError
from holdfast.state.names import clean_name
from holdfast.state.tensors import is_sharded

__all__ = ["check_memory", "give_memory", "parameters_on_meta"]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put each parameter that a module of this thread registers meanwhile on the meta device.

    Buffers are made as always: what is not stored with the weights, such as tables of frequencies, is then right.
    """
    thread = threading.get_ident()

    def without_memory(
        module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None
    ) -> torch.nn.Parameter | None:
        if threading.get_ident() != thread or parameter is None or parameter.is_meta:
            return None  # as it is: also a parameter that is tied to one that was registered before
        if isinstance(parameter, UninitializedTensorMixin):
            return None
        made: torch.nn.Parameter = torch.nn.Parameter(
            parameter.detach().to("meta"), requires_grad=parameter.requires_grad
        )
        vars(made).update(vars(parameter))
        return made

    hook = register_module_parameter_registration_hook(without_memory)
    try:
        yield
    finally:
        hook.remove()


def give_memory(module: torch.nn.Module, device: torch.device | str) -> None:
    """Give memory to every tensor of a module on the meta device: on `device`, or, when it is sharded, on its mesh.

    Tied parameters stay tied. `check_memory` comes first: memory that nothing fills has no meaning.
    """
    tensors = (*module.parameters(), *module.buffers())
    if not any(tensor.is_meta for tensor in tensors):
        return
    owners: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None and parameter.is_meta:
                owners.setdefault(id(parameter), []).append((part, key))
    made: dict[int, torch.Tensor] = {}

    def with_memory(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        where = tensor.device_mesh.device_type if is_sharded(tensor) else device
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty_like(tensor, device=where)
        return made[id(tensor)]

    # Through the module itself: FSDP keeps references to its parameters, and renews them here.
    module._apply(with_memory)
    for places in owners.values():
        first, key = places[0]
        for part, other in places[1:]:
            if part._parameters[other] is not first._parameters[key]:
                part._parameters[other] = first._parameters[key]


def check_memory(module: torch.nn.Module, filled: Collection[str], tied: Collection[str]) -> None:
    """Raise for a tensor on the meta device that no weights are loaded into: it would be memory as it happens to be.
    `filled` and `tied` are the names of the model that get content."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for raw, tensor in named:
        name = clean_name(module, raw)
        if tensor.is_meta and name not in filled and name not in tied and not _is_unstored(module, raw):
            raise StateMismatchError(
                "the tensor is on the meta device, and no weights are loaded into it",
                leaf=name,
                advice="load all weights of such a model, or give it memory, and this tensor its values, before "
                "load_weights(); nothing was changed",
            )
    _refuse_lost_buffers(module)


def _is_unstored(module: torch.nn.Module, raw: str) -> bool:
    path, _, name = raw.rpartition(".")
    return name in module.get_submodule(path)._non_persistent_buffers_set


def _refuse_lost_buffers(module: torch.nn.Module) -> None:
    for path, part in module.named_modules():
        for name in part._non_persistent_buffers_set:
            buffer = part._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                raise StateMismatchError(
                    "the buffer is on the meta device and is not stored with weights, so nothing can fill it",
                    leaf=f"{path}.{name}" if path else name,
                    advice="build the model with holdfast.build_model(), or give it memory and its buffers their "
                    "values before load_weights(); nothing was changed",
                )
