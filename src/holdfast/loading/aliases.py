"""Refuse to fill live tensors that share memory and had different content. Requests for live tensors enter; an error
leaves, or nothing. Changes no live tensor.

Of two fills of one memory the later one would win: the restore would report success, and one of two objects would be
wrong. Only tensors that do share memory cost more than a look at their addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from holdfast.errors import StateMismatchError
from holdfast.loading.read import read
from holdfast.loading.requests import Request
from holdfast.runs.checkpoint import Checkpoint
from holdfast.state.devices import ACCELERATORS
from holdfast.state.tensors import flat_bytes, is_same_memory

__all__ = ["refuse_conflicts"]


def refuse_conflicts(checkpoint: Checkpoint, requests: Sequence[Request], *, checked: bool) -> None:
    """Raise if two targets share memory and would be filled with different content there. Damage is no error here: the
    check of all bytes reports it."""
    if not _may_overlap(requests):
        return
    for group in _overlapping(requests):
        if not _is_one_content(group):
            _compare(checkpoint, group, checked=checked)


def _may_overlap(requests: Sequence[Request]) -> bool:
    """Return False where no two targets overlap, whatever their devices. There may be very many targets: each is asked
    for no more than its address and its size."""
    targets: list[torch.Tensor] = [request.target for request in requests]
    starts = map(torch.Tensor.data_ptr, targets)
    whole = map(torch.Tensor.is_contiguous, targets)
    sizes = [one.nbytes if dense else _reach_bytes(one) for one, dense in zip(targets, whole, strict=True)]
    reached = 0
    for start, size in sorted(zip(starts, sizes, strict=True)):
        if start < reached:
            return True
        reached = start + size
    return False


def _overlapping(requests: Sequence[Request]) -> Iterator[list[Request]]:
    """Yield the requests whose targets overlap, directly or through others, each group in the order of the requests."""
    spaces: dict[tuple[torch.device, int], list[tuple[int, int, int]]] = {}
    for number, request in enumerate(requests):
        start, size = request.target.data_ptr(), _reach_bytes(request.target)
        if start and size:
            spaces.setdefault(_address_space(request.target), []).append((start, start + size, number))
    for ranges in spaces.values():
        for numbers in _joined(sorted(ranges)):
            if len(numbers) > 1:
                yield [requests[number] for number in sorted(numbers)]


def _joined(ranges: Sequence[tuple[int, int, int]]) -> Iterator[list[int]]:
    """Yield the numbers of ranges that overlap, of ranges in the order of their starts."""
    numbers: list[int] = []
    reached = 0
    for start, end, number in ranges:
        if start >= reached:
            yield numbers
            numbers = []
        numbers.append(number)
        reached = max(reached, end)
    yield numbers


def _address_space(target: torch.Tensor) -> tuple[torch.device, int]:
    """Return what two addresses must have in common to be comparable: the device. On one of an unknown kind, where an
    address may be a handle, the storage too."""
    device = target.device
    known = target.is_cpu or ACCELERATORS.of(device) is not None
    return device, 0 if known else target.untyped_storage().data_ptr()


def _reach_bytes(target: torch.Tensor) -> int:
    """Return how many bytes lie between the first and the end of the last element in memory."""
    if target.numel() == 0:
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
    return int((steps + 1) * target.element_size())


def _is_one_content(group: Sequence[Request]) -> bool:
    """Return whether all are the same view of memory and ask for the same content, by what the manifest says."""
    first = group[0]
    content = _content(first)
    return all(is_same_memory(first.target, one.target) and _content(one) == content for one in group[1:])


def _content(request: Request) -> object:
    leaf = request.leaf
    return leaf.dtype, request.box, [(chunk.offsets, chunk.sizes, chunk.digests) for chunk in leaf.chunks]


def _compare(checkpoint: Checkpoint, group: Sequence[Request], *, checked: bool) -> None:
    """Read all of a group beside the live memory, and raise if not all of it can be there at once."""
    wanted = [replace(one, target=_new_memory(one.target), fresh=True) for one in group]
    # More than one reader, because the same bytes are read again for the live tensors: the page cache is to keep them.
    if read(checkpoint, wanted, checked=checked, readers=2):
        return
    images = [_image(one.target, read_one.target) for one, read_one in zip(group, wanted, strict=True)]
    targets = [one.target for one in group]
    lost = _overwritten(targets, images)
    if lost is None:
        return
    later = range(lost + 1, len(group))
    other = next((i for i in later if _overwritten([targets[lost], targets[i]], [images[lost], images[i]]) == 0), lost)
    raise StateMismatchError(
        _problem(group[lost].leaf.name, group[other].leaf.name),
        step=checkpoint.step,
        advice="give each its own memory (for example with .clone()) before you restore, or leave one out with "
        "LoadStrategy(skip=...); no live object was changed",
    )


def _problem(one: str, other: str) -> str:
    """Return what is wrong with two leaves, which are one where names were tied when they were saved."""
    if one == other:
        return f"{one} goes to live memory that overlaps itself now, and cannot hold it"
    return f"{one} and {other} share memory now, and differed when saved"


def _new_memory(target: torch.Tensor) -> torch.Tensor:
    return torch.empty(target.shape, dtype=target.dtype, device=target.device)


def _image(target: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """Return the bytes that a content has in the memory of a target, with one more dimension: those of an element."""
    if target.is_conj():
        content = content.conj_physical()
    if target.is_neg():
        content = content.neg()
    return flat_bytes(content).view(*content.shape, content.element_size())


def _overwritten(targets: Sequence[torch.Tensor], images: Sequence[torch.Tensor]) -> int | None:
    """Fill a copy of the targets' memory in order, and return the number of the first that a later one changed."""
    lowest = min(target.data_ptr() for target in targets)
    end = max(target.data_ptr() + _reach_bytes(target) for target in targets)
    memory = torch.empty(end - lowest, dtype=torch.uint8, device=targets[0].device)
    windows = [_window(memory, target, target.data_ptr() - lowest) for target in targets]
    for window, image in zip(windows, images, strict=True):
        window.copy_(image)
    # Bytes, not values: two zeros may differ, and two that are not a number may be the same.
    pairs = enumerate(zip(windows, images, strict=True))
    return next((number for number, (window, image) in pairs if not torch.equal(window, image)), None)


def _window(memory: torch.Tensor, target: torch.Tensor, offset: int) -> torch.Tensor:
    """Return the bytes of a target's elements in a copy of its memory. As bytes they may begin at any place."""
    item = target.element_size()
    return memory.as_strided((*target.shape, item), (*(stride * item for stride in target.stride()), 1), offset)
