"""Tensors are recognised by all that a save relies on; each attribute that differs makes them other tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from holdfast.state.signatures import Signature


class Wrapper(torch.Tensor):
    """A subclass without anything of its own."""


def dense() -> torch.Tensor:
    return torch.randn(4, 6)


OTHERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "no tensor": lambda one: one.tolist(),
    "another class": lambda one: torch.nn.Parameter(one),
    "a subclass": lambda one: one.as_subclass(Wrapper),
    "another type of elements": lambda one: one.double(),
    "another type of as many bytes": lambda one: one.view(torch.int32),
    "another shape of as many elements": lambda one: one.view(6, 4),
    "another number of dimensions": lambda one: one.view(24),
    "another device": lambda one: one.to("meta"),
    "another order in memory": lambda one: torch.randn(6, 4).t(),
    "another stride": lambda one: torch.randn(8, 6)[::2],
    "expanded": lambda one: torch.randn(4, 1).expand(4, 6),
    "negated": torch._neg_view,
    "sparse": lambda one: one.to_sparse(),
    "sparse rows": lambda one: one.to_sparse_csr(),
    "nested": lambda one: torch.nested.nested_tensor([one]),
    "of another library": lambda one: one.to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("count", [1, 3000])
def test_a_tensor_that_is_another_one_is_noticed(other: str, count: int) -> None:
    tensors = [dense() for _ in range(count)]
    signature = Signature(tensors)
    for index in {0, count // 2, count - 1}:
        changed: list[Any] = list(tensors)
        changed[index] = OTHERS[other](tensors[index].clone())
        assert signature.addresses_of(changed) is None
    assert signature.addresses_of(tensors) is not None


def change_data(one: torch.Tensor, data: torch.Tensor) -> None:
    one.data = data


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "type by data": lambda one: change_data(one, one.data.half()),
    "type of as many bytes by data": lambda one: change_data(one, one.data.view(torch.int32)),
    "shape by data": lambda one: change_data(one, one.data.view(24)),
    "size": lambda one: one.resize_(2, 3),
    "strides": lambda one: one.as_strided_((4, 6), (1, 4)),
    "shape": lambda one: one.t_(),
    "memory of another shape": lambda one: one.set_(torch.randn(3)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("change", CHANGES)
def test_the_same_object_that_was_changed_in_place_is_noticed(change: str) -> None:
    tensors = [dense() for _ in range(3)]
    signature = Signature(tensors)
    CHANGES[change](tensors[1])
    assert signature.addresses_of(tensors) is None


def test_the_order_counts_and_the_number() -> None:
    tensors = [torch.randn(3), torch.randn(4)]
    signature = Signature(tensors)
    assert signature.addresses_of(tensors[::-1]) is None
    assert signature.addresses_of(tensors[:1]) is None
    assert signature.addresses_of([*tensors, torch.randn(4)]) is None
    assert Signature([]).addresses_of([]) == []


def test_content_memory_and_gradients_may_differ() -> None:
    tensors = [dense() for _ in range(3)]
    signature = Signature(tensors)
    others = [dense().requires_grad_() for _ in range(3)]
    for _ in range(2):
        assert signature.addresses_of(others) == [one.data_ptr() for one in others]
        assert signature.addresses_of(tensors) == [one.data_ptr() for one in tensors]
    with torch.inference_mode():
        assert signature.addresses_of([dense() for _ in range(3)]) is not None


@pytest.mark.guarantee("G2")
def test_tensors_that_share_their_memory_must_share_it_again_in_the_same_way() -> None:
    wave, other = torch.randn(3, dtype=torch.complex64), torch.randn(3, dtype=torch.complex64)
    signature = Signature([wave, other, wave])
    assert signature.addresses_of([other, wave, other]) is not None
    assert signature.addresses_of([wave, other, wave.clone()]) is None
    assert signature.addresses_of([wave, wave, other]) is None
    assert signature.addresses_of([wave, other, wave.conj()]) is None
    apart = Signature([wave, other])
    assert apart.addresses_of([wave, wave]) is None
    assert apart.addresses_of([wave.clone(), other]) is not None


def test_tensors_without_memory_share_none() -> None:
    signature = Signature([torch.empty(0), torch.empty(0)])
    assert signature.addresses_of([torch.empty(0), torch.empty(0)]) == [0, 0]


@pytest.mark.guarantee("G2")
def test_only_what_lies_in_host_memory_as_in_a_file_has_an_address() -> None:
    plain = torch.randn(4)
    tensors = [
        plain,
        torch.randn(2, 3).t(),
        torch._neg_view(torch.randn(3)),
        torch.randn(3, dtype=torch.complex64),
        torch.empty(3, device="meta"),
    ]
    signature = Signature(tensors)
    assert signature.addresses_of(tensors) == [plain.data_ptr(), 0, 0, 0, 0]
    assert signature.devices == {torch.device("cpu"), torch.device("meta")}
    # Of complex numbers it is not known whether they are conjugated, so torch copies them.
    assert signature.addresses_of([*tensors[:3], tensors[3].conj(), tensors[4]]) is not None


@pytest.mark.guarantee("G2")
def test_a_view_of_other_strides_is_noticed() -> None:
    signature = Signature([torch.randn(3, 4).t()])
    assert signature.addresses_of([torch.randn(3, 4).t()]) == [0]
    assert signature.addresses_of([torch.randn(4, 1).expand(4, 3)]) is None
