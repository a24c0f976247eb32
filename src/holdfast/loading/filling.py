"""Check and read what this rank needs of a checkpoint, in two steps. Requests enter; damage, then filled tensors,
leave.

The first step changes no live tensor: it fills new memory, and side buffers where there is memory for them, and only
checks the rest. The second one fills the live tensors, after every rank knows that its part is sound.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from holdfast.errors import CorruptCheckpointError, HoldfastError, StorageError
from holdfast.loading.aliases import refuse_conflicts
from holdfast.loading.files import check_sizes
from holdfast.loading.match import Place
from holdfast.loading.read import check_bytes, past_cache_test, read
from holdfast.loading.requests import Request, size_of
from holdfast.loading.side_buffers import SideBuffers, SpareMemory, room_on
from holdfast.loading.strategy import Verify
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.progress import Progress
from holdfast.runs.report import Problem

__all__ = ["Filling"]

logger = logging.getLogger("holdfast")

_OVERWRITTEN = "live tensors may have been overwritten in part"
_ADVICE = "restore again before you go on"


class Filling:
    """The memory of one rank that is filled from one checkpoint. `copied` are requests for live tensors that nothing is
    read into: a dict copies new memory to them. `spare_memory`, `limit_bytes`: as of `LoadRequest`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        requests: Sequence[Request],
        verify: Verify,
        place: Place,
        copied: Sequence[Request] = (),
        spare_memory: SpareMemory = lambda: None,
        limit_bytes: int | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._fresh = [request for request in requests if request.fresh]
        self._live = [request for request in requests if not request.fresh]
        self._copied = copied
        self._verify = verify
        self._place = place
        self._spare_memory = spare_memory
        self._limit_bytes = limit_bytes
        self._side_buffers = SideBuffers()

    def check(self) -> tuple[str, ...]:
        """Fill new memory, and return the damage in what this rank needs. The live tensors stay as they are.

        Live tensors that share memory, and cannot all get what was saved for them, are an error.
        """
        refuse_conflicts(self._checkpoint, [*self._live, *self._copied], checked=self._verify == "full")
        if self._verify != "full":
            problems = check_sizes(self._checkpoint, self._live) if self._verify == "quick" else []
            return _texts(problems + self._read(self._fresh, checked=False))
        self._side_buffers = SideBuffers.of(
            self._live, self._room_on, self._spare_memory, takes_new=past_cache_test(self._checkpoint, self._place.size)
        )
        problems = self._read([*self._fresh, *self._side_buffers.requests], checked=True)
        with self._progress("checking", self._side_buffers.rest) as progress:
            problems += check_bytes(self._checkpoint, self._side_buffers.rest, on_bytes=progress.add)
        if problems:
            self._side_buffers.drop()
        return _texts(problems)

    def fill_live(self) -> None:
        """Fill the live tensors: from their side buffers, or by reading, and checking, once more."""
        checked = self._verify == "full"
        try:
            problems = self._read(self._side_buffers.rest if checked else self._live, checked=checked)
            if not problems:
                self._side_buffers.fill()
        except StorageError as error:
            raise error.changed(
                problem=f"{error.problem}, and {_OVERWRITTEN}",
                advice=f"check the mount, the file server or the disk, and {_ADVICE}",
            ) from error
        except HoldfastError as error:
            raise error.changed(
                problem=f"{error.problem}, and {_OVERWRITTEN}",
                advice=f"{error.advice}; {_ADVICE}" if error.advice else _ADVICE,
            ) from error
        except Exception as error:
            raise HoldfastError(
                f"the restore failed, and {_OVERWRITTEN}: {type(error).__name__}: {error}",
                run=self._checkpoint.storage.url,
                step=self._checkpoint.step,
                advice=_ADVICE,
            ) from error
        except BaseException as error:
            # An interrupt goes on as it is, with a note for the code that catches it.
            logger.warning(
                "the restore of step %d was interrupted, and %s; %s", self._checkpoint.step, _OVERWRITTEN, _ADVICE
            )
            error.add_note(f"{_OVERWRITTEN}; {_ADVICE}")
            raise
        if problems:
            raise CorruptCheckpointError(
                f"the checkpoint changed while it was restored, and {_OVERWRITTEN}",
                run=self._checkpoint.storage.url,
                step=self._checkpoint.step,
                problems=[str(problem) for problem in problems],
                advice="restore another one before you go on",
            )

    def _room_on(self, device: torch.device) -> int:
        if device.type != "cpu":
            return room_on(device)
        room_bytes = room_on(device, sum(request.target.nbytes for request in self._fresh if request.target.is_cpu))
        return room_bytes if self._limit_bytes is None else min(room_bytes, self._limit_bytes)

    def _read(self, requests: Sequence[Request], *, checked: bool) -> list[Problem]:
        with self._progress("restoring", requests) as progress:
            readers = self._place.size
            return read(self._checkpoint, requests, checked=checked, readers=readers, on_bytes=progress.add)

    def _progress(self, doing: str, requests: Sequence[Request]) -> Progress:
        return Progress(f"{doing} step {self._checkpoint.step}", size_of(requests), shown=self._place.rank == 0)


def _texts(problems: Sequence[Problem]) -> tuple[str, ...]:
    return tuple(str(problem) for problem in problems)
