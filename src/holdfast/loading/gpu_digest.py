"""Digest ranges of device memory where they are. Addresses and sizes enter, BLAKE3 digests leave; knows no files.

A range is a row of chunks of 1 KiB. One launch digests every chunk to a value of 32 bytes, one thread each; then, level
by level, launches join the values in pairs until a range has one. A node's value lies where that of the first chunk
under it lay, so a node without a partner goes up as it is: that is BLAKE3's tree, whose left half is the largest power
of two. The threads of a launch share nothing, so the kernel also runs as plain C++, in any order.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from holdfast.state.devices import ACCELERATORS, Accelerators, DigestKernel

__all__ = ["DeviceDigester"]

logger = logging.getLogger("holdfast")

_CHUNK_BYTES = 1024
_DIGEST_BYTES = 32
# What one group of ranges takes beside the data: 64 MiB for the values of 2 GiB, and 12 MiB for the table at most.
_GROUP_CHUNKS = 2 << 20
_GROUP_RANGES = 1 << 16
# The rows of a group's table, which has a column for each range: its address, its size, its first chunk and, from here
# on, where its nodes of each level end among those of all ranges.
_FIRST_CHUNKS, _NODE_ENDS = 2, 3

Numbers = npt.NDArray[np.int64]


class DeviceDigester:
    """Digests ranges of one device's memory, on the stream that is current there for the calling thread."""

    _kept: ClassVar[dict[torch.device, DeviceDigester | None]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, device: torch.device, launch: DigestKernel, group_chunks: int = _GROUP_CHUNKS) -> None:
        self._device = device
        self._launch = launch
        self._group_chunks = group_chunks

    @classmethod
    def on(cls, device: torch.device, accelerators: Accelerators = ACCELERATORS) -> DeviceDigester | None:
        """Return the device's own, compiled and tried out once per process, or None where it cannot be, with the reason
        in the log at level DEBUG."""
        try:
            accelerator = accelerators.of(device)
            if accelerator is None:
                raise RuntimeError("there is no accelerator for this type of device")
            device = accelerator.with_index(device)
            with cls._lock:
                if device not in cls._kept:
                    cls._kept[device] = None
                    cls._kept[device] = cls._tried(device, accelerator.digest_kernel(device))
                return cls._kept[device]
        except Exception as error:  # whatever it is, the bytes can be digested elsewhere
            logger.debug("%s: no digests on the device: %s", device, error)
            return None

    def digests(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the digest of each range, an address and a size in bytes, in their order, when all are there."""
        if not ranges:
            return []
        tables = list(_tables(ranges, self._group_chunks))
        # All before the first launch: such a copy waits for the stream, so between groups the device would stand idle.
        on_device = [torch.from_numpy(table).to(self._device) for table in tables]
        most_chunks = max(int(table[_NODE_ENDS, -1]) for table in tables)
        values = torch.empty((most_chunks, _DIGEST_BYTES // 4), dtype=torch.int32, device=self._device)
        found = []
        for table, same in zip(tables, on_device, strict=True):
            for level, threads in enumerate(table[_NODE_ENDS:, -1].tolist()):
                self._launch(threads, same, level, values)
            found.append(values.index_select(0, same[_FIRST_CHUNKS]))
        flat = torch.cat(found).cpu().numpy().tobytes()
        return [flat[start : start + _DIGEST_BYTES] for start in range(0, len(flat), _DIGEST_BYTES)]

    @classmethod
    def _tried(cls, device: torch.device, kernel: DigestKernel) -> DeviceDigester:
        digester = cls(device, kernel)
        digester._try_out()
        return digester

    def _try_out(self) -> None:
        """Raise where a digest differs from that of the blake3 package. Leaves torch's random state alone."""
        sizes = [0, 1, 63, 64, 65, 1023, 1024, 1025, 2048, 3072, 5000, 1 << 20, 3 * (1 << 20) + 17]
        data = blake3(b"holdfast").digest(length=max(sizes) + 16)
        memory = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        places = [(start, size) for start in (0, 1, 4, 16) for size in sizes]
        digests = self.digests([(memory.data_ptr() + start, size) for start, size in places])
        for (start, size), digest in zip(places, digests, strict=True):
            if digest != blake3(memoryview(data)[start : start + size]).digest():
                raise RuntimeError(f"the digest of {size} bytes at byte {start} is wrong")


def _tables(ranges: Sequence[tuple[int, int]], group_chunks: int) -> Iterator[Numbers]:
    """Return the table of each group of ranges, as the kernel reads it. A range that is too large is one group."""
    addresses, sizes = np.array(ranges, dtype=np.int64).T
    chunks = np.maximum(-(-sizes // _CHUNK_BYTES), 1)
    ends = chunks.cumsum()
    start = 0
    while start < len(ranges):
        fitting = int(np.searchsorted(ends, ends[start] - chunks[start] + group_chunks, side="right"))
        group = slice(start, max(start + 1, min(fitting, start + _GROUP_RANGES)))
        yield _table(addresses[group], sizes[group], chunks[group])
        start = group.stop


def _table(addresses: Numbers, sizes: Numbers, chunks: Numbers) -> Numbers:
    ends = chunks.cumsum()
    levels = range(int(chunks.max() - 1).bit_length())
    # The last node of a level is the one above the last chunk. One that has no partner needs no thread.
    pair_ends = [((((chunks - 1) >> level) + 1) // 2).cumsum() for level in levels]
    return np.stack([addresses, sizes, ends - chunks, ends, *pair_ends])
