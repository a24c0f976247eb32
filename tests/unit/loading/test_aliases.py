"""Targets that share memory: which of them belong together, which are read, and what is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import StateMismatchError
from holdfast.loading.aliases import refuse_conflicts
from holdfast.loading.requests import Request
from holdfast.ondisk.manifest import ChunkRecord, TensorRecord
from holdfast.ondisk.regions import Box, whole
from holdfast.runs.checkpoint import Checkpoint


def saved(folder: Path, **tensors: torch.Tensor) -> Checkpoint:
    with holdfast.CheckpointManager(folder, {"d": dict(tensors)}, rng=False, mode="sync") as manager:
        manager.save(0)
    return holdfast.resolve(folder)


def requests(checkpoint: Checkpoint, **targets: torch.Tensor) -> list[Request]:
    leaves = {leaf.name: leaf for leaf in checkpoint.manifest.tensors}
    return [
        Request(leaves[f"d.{name}"], whole(leaves[f"d.{name}"].shape), target, fresh=False)
        for name, target in targets.items()
    ]


class Unreadable:
    """Stands for a checkpoint of which nothing may be read."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


UNREADABLE: Any = Unreadable()


def unread(name: str, target: torch.Tensor, digest: str = "", **changes: Any) -> Request:
    """Return a request for a tensor whose content is known by its digest alone."""
    shape = tuple(target.shape)
    chunk = ChunkRecord(file="f", start=0, offsets=(0,) * len(shape), sizes=shape, digests=(digest or name,))
    fields = {"dtype": "float32", "shape": shape, "chunks": (chunk,), **changes}
    return Request(TensorRecord(name=name, **fields), whole(shape), target, fresh=False)


def test_neighbours_in_one_storage_are_not_read() -> None:
    flat = torch.zeros(12)
    refuse_conflicts(UNREADABLE, [unread("a", flat[:5]), unread("b", flat[5:5]), unread("c", flat[5:])], checked=True)


def test_empty_targets_and_targets_without_memory_are_not_read() -> None:
    flat, meta = torch.zeros(12), torch.zeros(3, device="meta")
    wanted = [unread("a", flat), unread("b", flat[3:3]), unread("c", meta), unread("d", meta)]
    refuse_conflicts(UNREADABLE, wanted, checked=True)


def test_one_view_with_one_content_is_not_read() -> None:
    flat = torch.zeros(3, 4)
    same = [unread("a", flat, "digest"), unread("b", flat.detach(), "digest"), unread("c", flat.view(3, 4), "digest")]
    refuse_conflicts(UNREADABLE, same, checked=True)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: unread("b", x, "other"),
        lambda x: unread("b", x, "digest", dtype="int32"),
        lambda x: unread("b", x.t(), "digest"),
        lambda x: unread("b", x.view(torch.int32), "digest"),
        lambda x: Request(unread("b", x, "digest").leaf, Box((4, 0), (4, 4)), x, fresh=False),
    ],
    ids=["digest", "type", "strides", "type of the view", "box"],
)
def test_any_other_pair_is_read(other: Callable[[torch.Tensor], Request]) -> None:
    square = torch.zeros(4, 4)
    with pytest.raises(AssertionError, match="was asked for"):
        refuse_conflicts(UNREADABLE, [unread("a", square, "digest"), other(square)], checked=True)


@pytest.mark.parametrize("checked", [True, False])
def test_two_contents_for_one_memory_are_refused_and_nothing_changes(tmp_path: Path, checked: bool) -> None:
    checkpoint = saved(tmp_path, a=torch.ones(3), b=torch.zeros(3), c=torch.zeros(3))
    x = torch.full((3,), 7.0)
    with pytest.raises(StateMismatchError, match=r"d\.a and d\.b share memory now, and differed when saved") as caught:
        refuse_conflicts(checkpoint, requests(checkpoint, c=torch.zeros(3), a=x, b=x), checked=checked)
    assert caught.value.step == 0
    assert "skip=" in str(caught.value)
    assert torch.equal(x, torch.full((3,), 7.0))


def test_the_pair_that_differs_is_named(tmp_path: Path) -> None:
    content = torch.arange(8.0)
    checkpoint = saved(tmp_path, all=content, left=content[:4].clone(), right=torch.zeros(4))
    x = torch.zeros(8)
    with pytest.raises(StateMismatchError, match=r"d\.all and d\.right share"):
        refuse_conflicts(checkpoint, requests(checkpoint, left=x[:4], all=x, right=x[4:]), checked=True)


def test_one_leaf_for_two_views_that_cannot_both_hold_it_is_refused(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, a=torch.arange(4.0).view(2, 2))
    x = torch.zeros(2, 2)
    wanted = [*requests(checkpoint, a=x), *requests(checkpoint, a=x.t())]
    with pytest.raises(StateMismatchError, match=r"d\.a goes to live memory that overlaps itself now"):
        refuse_conflicts(checkpoint, wanted, checked=True)


def _square(x: torch.Tensor) -> torch.Tensor:
    return x[:9].view(3, 3)


VIEWS: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]] = {
    "a part": [lambda x: x, lambda x: x[:10], lambda x: x[7:]],
    "interleaved": [lambda x: x[::2], lambda x: x[1::2]],
    "transposed": [_square, lambda x: _square(x).t()],
    "columns": [lambda x: _square(x)[:, :2], lambda x: _square(x)[:, 1:]],
    "another type": [lambda x: x, lambda x: x.view(torch.uint8)[3:5], lambda x: x.view(torch.complex64)],
    "conjugate": [lambda x: x.view(torch.complex64), lambda x: x.view(torch.complex64).conj()],
    "negative": [lambda x: x.view(torch.complex64).imag, lambda x: x.view(torch.complex64).conj().imag],
    "a scalar": [lambda x: x, lambda x: x[3]],
}


@pytest.mark.parametrize("views", VIEWS.values(), ids=VIEWS)
def test_views_with_consistent_content_pass_and_no_target_changes(
    tmp_path: Path, views: list[Callable[[torch.Tensor], torch.Tensor]]
) -> None:
    content = torch.randn(12)
    content[5] = float("nan")
    names = "abc"[: len(views)]
    checkpoint = saved(
        tmp_path, **{name: view(content).resolve_neg().clone() for name, view in zip(names, views, strict=True)}
    )
    live = torch.zeros(12)
    wanted = requests(checkpoint, **{name: view(live) for name, view in zip(names, views, strict=True)})
    refuse_conflicts(checkpoint, wanted, checked=True)
    assert torch.equal(live, torch.zeros(12))


@pytest.mark.parametrize("name", [name for name in VIEWS if name != "interleaved"])
def test_views_with_other_content_are_refused(tmp_path: Path, name: str) -> None:
    views, live = VIEWS[name], torch.zeros(12)
    contents = [view(torch.arange(12.0) + 100 * place) for place, view in enumerate(views)]
    names = "abc"[: len(views)]
    checkpoint = saved(
        tmp_path, **{name: content.resolve_neg().clone() for name, content in zip(names, contents, strict=True)}
    )
    wanted = requests(checkpoint, **{name: view(live) for name, view in zip(names, views, strict=True)})
    with pytest.raises(StateMismatchError, match="share memory now"):
        refuse_conflicts(checkpoint, wanted, checked=True)


def test_zeros_of_two_signs_are_not_the_same(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, a=torch.tensor([0.0]), b=torch.tensor([-0.0]))
    x = torch.zeros(1)
    with pytest.raises(StateMismatchError, match=r"d\.a and d\.b"):
        refuse_conflicts(checkpoint, requests(checkpoint, a=x, b=x), checked=True)


def test_a_content_that_is_converted_on_its_way_counts_as_what_it_becomes(tmp_path: Path) -> None:
    half = torch.tensor([1.0, 2.5]).half()
    checkpoint = saved(tmp_path, a=half, b=half.float())
    x = torch.zeros(2)
    refuse_conflicts(checkpoint, requests(checkpoint, a=x, b=x), checked=True)


def test_tensors_of_inference_mode_are_looked_at_too(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, a=torch.ones(3), b=torch.zeros(3))
    with torch.inference_mode():
        x = torch.zeros(3)
    refuse_conflicts(checkpoint, requests(checkpoint, a=x), checked=True)
    with pytest.raises(StateMismatchError, match=r"d\.a and d\.b"):
        refuse_conflicts(checkpoint, requests(checkpoint, a=x, b=x), checked=True)


def test_two_storages_over_one_memory_are_found(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, a=torch.ones(3), b=torch.zeros(3))
    array = torch.zeros(5).numpy()
    targets = {"a": torch.from_numpy(array[:3]), "b": torch.from_numpy(array[2:])}
    with pytest.raises(StateMismatchError, match=r"d\.a and d\.b"):
        refuse_conflicts(checkpoint, requests(checkpoint, **targets), checked=True)


def test_damage_is_left_to_the_check_of_all_bytes(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, a=torch.ones(3), b=torch.zeros(3))
    file = next(tmp_path.glob("step-*/*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    x = torch.zeros(3)
    refuse_conflicts(checkpoint, requests(checkpoint, a=x, b=x), checked=True)


def test_very_many_targets_that_share_nothing_take_no_time() -> None:
    wanted = [unread(str(number), torch.empty(7)) for number in range(20_000)]
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        refuse_conflicts(UNREADABLE, wanted, checked=True)
        seconds.append(time.perf_counter() - start)
    # About 0.015 on an idle machine; a test must pass on a busy one, too.
    assert min(seconds) < 0.1
