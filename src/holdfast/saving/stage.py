"""Copy a rank's part of a save into the arena, where it lies as its files will. Knows torch.

Host memory is copied in the call. Device memory is copied into page-locked memory while the training goes on
(`staging.device_copy`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch

from holdfast.errors import HoldfastError
from holdfast.ondisk.files import PlainFile
from holdfast.saving.files import FileLayout
from holdfast.saving.staging.arena import PAGE_BYTES, Arena
from holdfast.saving.staging.chunks import Chunk, Placement, Sources, copy_all, copyable
from holdfast.saving.staging.device_copy import DeviceCopier, Staging
from holdfast.saving.staging.host_copy import Move, move_all, move_small
from holdfast.saving.writer import messages as images
from holdfast.saving.writer.messages import Image, PlainImage
from holdfast.state.budget import own_processors
from holdfast.state.devices import ACCELERATORS, Accelerators
from holdfast.state.tensors import torch_dtype

Mode = Literal["sync", "async", "async_pinned", "async_device"]
ChosenMode = Literal["auto", "sync", "async", "async_pinned", "async_device"]

_SLACK_BYTES = 1 << 20
# What the header of a file takes for each tensor, at most of most.
_HEADER_BYTES = 384
# Of an arena that was made before its size was known, this part may be too much.
_TOO_MUCH = 0.005


def arena_bytes(files: Iterable[FileLayout]) -> int:
    """Return the room that the tensor files of a rank take in an arena."""
    return sum(_aligned(file.frame.size_bytes) for file in files)


class Stager:
    """The arena of one rank and the copies into it."""

    def __init__(self, accelerators: Accelerators = ACCELERATORS) -> None:
        self._accelerators = accelerators
        self._arena: Arena | None = None
        self._files: Sequence[FileLayout] = ()
        self._images: tuple[Image, ...] = ()
        self._tensor_bytes = 0
        self._is_reserved = False
        self._placement: Placement | None = None
        self._copier = DeviceCopier(accelerators)

    @property
    def held_bytes(self) -> int:
        """Return how much memory the arena takes now; its pages may be missing in part before the first save."""
        return self._arena.taken_bytes if self._arena is not None else 0

    def spare_memory(self) -> memoryview | None:
        """Return the memory of the arena, as far as its pages are there, for a use that ends before the next save."""
        if self._arena is None:
            return None
        # The headers of the files are in it, and are written again with the next layout.
        self._forget_placement()
        return self._arena.memory[: max(self._arena.taken_bytes - PAGE_BYTES, 0)]

    def arrange(self, files: Sequence[FileLayout], plain: Sequence[PlainFile]) -> tuple[Arena, tuple[Image, ...]]:
        """Return the arena with a place for these files; it is grown, or laid out anew, only when it must be."""
        plain_bytes = sum(_aligned(file.size_bytes) for file in plain)
        if files is not self._files:
            self._images = tuple(_images(files))
            self._tensor_bytes = arena_bytes(files)
            self._forget_placement()
        needed = self._tensor_bytes + plain_bytes
        # A little more than is needed: the values that are no tensors grow now and then.
        wanted = _aligned(needed + plain_bytes // 4 + _SLACK_BYTES)
        if self._arena is not None and self._arena.size_bytes >= needed:
            self._finish_reserved(self._arena, wanted)
        else:
            self.close()
            self._arena = Arena.make(wanted)
        if self._placement is None:
            with torch.inference_mode(False):
                self._placement = _place(files, self._images, self._arena)
        self._files = files
        return self._arena, self._images

    def is_short_of(self, size_bytes: int, tensors: int) -> bool:
        """Return whether a state of that size has no room in the arena, which no save has used so far."""
        return self._arena is None or self._arena.size_bytes < size_bytes + _header_bytes(tensors)

    def reserve(self, size_bytes: int, tensors: int, limit_bytes: int) -> bool:
        """Make an arena without its pages for a state of about that size, in the place of one that is too small. Return
        whether the limit allows it; where it does not, there is none."""
        wanted = _aligned(size_bytes + _header_bytes(tensors) + 2 * _SLACK_BYTES)
        if wanted > limit_bytes:
            self.drop_reserved()
            return False
        self.close()
        self._arena = Arena.reserve(wanted)
        self._is_reserved = True
        return True

    @property
    def missing_bytes(self) -> int:
        """Return how much memory the arena will take besides what it takes now."""
        return self._arena.missing_bytes if self._arena is not None else 0

    def take_more(self) -> bool:
        """Take some more pages of the reserved arena. Return whether more are missing then."""
        return self._arena is not None and self._arena.take_more()

    def page_lock(self, devices: Iterable[torch.device]) -> None:
        """Page-lock the reserved arena for copies from these devices, once all of its pages are there. Called in a
        thread of its own, of which it sets the current device."""
        used = self._accelerators.among(devices)
        if self._arena is not None and used:
            # A new thread begins at the first device, and any call there takes memory of that
            for device, accelerator in used.items():
                accelerator.set_device(device)
            self._copier.page_lock(self._arena, used)

    def drop_reserved(self) -> None:
        """Release an arena that no save has used: the first one is not staged."""
        if self._is_reserved:
            self.close()

    def stage_plain(self, plain: Sequence[PlainFile]) -> tuple[PlainImage, ...]:
        """Copy the files that are no tensor files."""
        arena = self._require_placement().arena
        images, position = [], self._tensor_bytes
        for file in plain:
            end = position
            for piece in file.pieces():
                arena.memory[end : end + len(piece)] = piece
                end += len(piece)
            images.append(PlainImage(file.name, position, end - position))
            position = _aligned(end)
        return tuple(images)

    def stage(self, sources: Sources, mode: Mode, optimizers: Sequence[torch.optim.Optimizer]) -> Staging:
        """Copy what is in host memory, and start the copies of devices. The optimizers wait for the copies of what they
        own before they change it."""
        placement = self._require_placement()
        staging = Staging(placement.arena, self._tensor_bytes)
        # What is made here is filled later, and not in the inference mode that the caller may be in.
        with torch.inference_mode(False), torch.no_grad():
            if self._accelerators.among(sources.devices):
                tensors = placement.sources(sources.tensors)
                self._copier.start(tensors, placement, optimizers, staging, clones=mode == "async_device")
            else:
                self._copy(sources, placement)
        return staging

    def wait_for_staging(self) -> None:
        """Make the current stream of every device wait for the copies that still read. The CPU goes on at once."""
        self._copier.wait_for_staging()

    def finish_in_own_thread(self, staging: Staging) -> None:
        """Return when the arena holds everything. Called in a thread that was started for it, of which this sets the
        current device."""
        self._copier.set_devices()
        staging.finish_beside_training()

    def cancel(self) -> None:
        """Give up what is being staged: the save has failed."""
        self._copier.cancel()

    def close(self) -> None:
        """Release the memory."""
        self._forget_placement()
        arena, self._arena = self._arena, None
        self._is_reserved = False
        if arena is not None:
            self._copier.release(arena)
            arena.close()

    def close_in_own_thread(self) -> None:
        """Release the memory in a thread that was started for it, of which this sets the current device."""
        self._copier.set_devices()
        self.close()

    def _finish_reserved(self, arena: Arena, wanted: int) -> None:
        """Take what is missing of an arena that was reserved, and give back what is too much."""
        if not self._is_reserved:
            return
        self._is_reserved = False
        if arena.size_bytes > wanted + _TOO_MUCH * wanted:
            self._copier.release(arena)
            arena.shrink(wanted)
        try:
            arena.take_rest()
        except BaseException:
            # An arena of which pages are missing must not be found by the next save.
            self.close()
            raise

    def _require_placement(self) -> Placement:
        if self._placement is None:
            raise HoldfastError("there is no arena yet")
        return self._placement

    def _forget_placement(self) -> None:
        self._placement = None
        self._copier.forget_placement()

    def _copy(self, sources: Sources, placement: Placement) -> None:
        """Copy the bytes of small tensors one after the other, those of large ones by several threads; torch copies
        what does not lie in memory as it does in a file."""
        arena, small = placement.arena, placement.small
        addresses = [sources.addresses[part] for part in placement.order]
        if 0 in addresses:
            others = [index for index, address in enumerate(addresses) if not address]
            tensors = [copyable(sources.tensors[placement.order[index]]) for index in others]
            copy_all([placement.views[index] for index in others], tensors)
            small = [index for index in small if addresses[index]]
        move_small(*([column[index] for index in small] for column in (placement.targets, addresses, placement.sizes)))
        moves = [
            Move(placement.targets[index], addresses[index], placement.sizes[index])
            for index in placement.large
            if addresses[index]
        ]

        def note(address: int) -> None:
            arena.staged = address - arena.address

        move_all(moves, threads=_copying_threads(), on_progress=note)
        arena.staged = self._tensor_bytes


def _place(files: Sequence[FileLayout], images: Sequence[Image], arena: Arena) -> Placement:
    """Put the headers in their places, and a tensor over the place of each chunk that is not empty."""
    placement = Placement(arena)
    for file, image in zip(files, images, strict=True):
        arena.memory[image.start : image.start + image.header_bytes] = file.frame.header
        for part, framed, place in zip(file.parts, file.frame.chunks, image.chunks, strict=True):
            if place.size_bytes:
                start = image.start + place.start
                end = start + place.size_bytes
                placement.add(part, Chunk(start, end, torch_dtype(framed.kind.name), framed.box.sizes))
    return placement


def _copying_threads() -> int:
    """Return this rank's share of the cores, or torch's number of threads if that is more: the training stands still
    meanwhile."""
    return max(own_processors(), int(torch.get_num_threads()))


def _header_bytes(tensors: int) -> int:
    return tensors * _HEADER_BYTES


def _images(files: Sequence[FileLayout]) -> Iterator[Image]:
    start = 0
    for file in files:
        frame = file.frame
        places = tuple(
            images.Place(chunk.leaf, begin, chunk.size_bytes, chunk.box.offsets, chunk.box.sizes)
            for chunk, begin in zip(frame.chunks, frame.starts, strict=True)
        )
        yield Image(file.name, start, frame.size_bytes, len(frame.header), places, frame.block_bytes)
        start += _aligned(frame.size_bytes)


def _aligned(count: int) -> int:
    return -(-count // PAGE_BYTES) * PAGE_BYTES
