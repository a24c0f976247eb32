"""A connection to torch.distributed's store on which every call ends in bounded time. A store enters; its answers
leave, or a `RankError` when the process that hosts the store is gone or does not answer. Knows nothing of what the
ranks agree on.

A TCPStore waits for the answer to a message without a time limit, so a host that is stopped or cut off would hold every
rank that asks. The socket of the connection is given a limit instead, which costs nothing per call. A connection that
has reached it is given up, because the late answer would be taken for that of the next call; another one is opened on a
worker thread, which ends when the host answers again. Until then every call fails at once.

The thread that answers for the host also looks up the name of each address that connects: a name server that does not
answer holds it, and with it all ranks, for five seconds or more.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import struct
import threading
import time
from datetime import timedelta
from typing import Any

from holdfast.errors import RankError

logger = logging.getLogger("holdfast")

__all__ = ["Connection"]

# The longest limit that is given to a socket; more overflows in the kernel's units.
_LONGEST_SECONDS = 1e6
# A host that has just continued needs a moment to answer; a call waits that long for a connection, not for the limit.
_RECOVERY_SECONDS = 1.0
# A kernel's clock is coarser than Python's.
_CLOCK_TOLERANCE = 0.95


class Connection:
    """A connection of its own to a store, for one thread at a time."""

    def __init__(self, original: Any, timeout_seconds: float) -> None:
        # Kept, because the leader's process may be the one that serves the store, as long as this object lives.
        self._original = original
        self._timeout_seconds = min(timeout_seconds, _LONGEST_SECONDS)
        self._opening: _Opening | None = _Opening(original, self._timeout_seconds)
        self._client: Any = None
        self._lost = ""
        self._take_opened(self._timeout_seconds)

    @property
    def is_open(self) -> bool:
        return self._client is not None

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store. Raise a `RankError` when the connection breaks, because the host is gone, or when
        the host does not answer within the time limit, and at once as long as it has not answered since."""
        if self._client is None:
            self._take_opened(min(_RECOVERY_SECONDS, self._timeout_seconds))
        begin = time.monotonic()
        try:
            return getattr(self._client, method)(*arguments)
        except RuntimeError as error:
            early = time.monotonic() - begin < self._timeout_seconds * _CLOCK_TOLERANCE
            if early and not _is_broken(error):
                raise
            self._lost = _first_line(error) if early else ""
            self._client, self._opening = None, self._opened_anew()
            raise self._no_answer() from error

    def _take_opened(self, seconds: float) -> None:
        opening = self._opening or self._opened_anew()
        self._opening = opening
        if not opening.done.wait(seconds):
            raise self._no_answer()
        self._opening = None
        if opening.error is not None and _is_broken(opening.error):
            self._lost = self._lost or _first_line(opening.error)
            raise self._no_answer() from opening.error
        if opening.error is not None:
            raise opening.error
        self._client, self._lost = opening.client, ""

    def _opened_anew(self) -> _Opening:
        return _Opening(self._original, self._timeout_seconds, is_known=True)

    def _no_answer(self) -> RankError:
        store = f"the store of torch.distributed{_address(self._original)}, which {_host()} hosts,"
        if self._lost:
            return RankError(
                f"{store} cannot be reached: {self._lost}",
                ranks=[0],
                advice="look whether that process has ended; if it has, start the training again",
            )
        return RankError(
            f"{store} did not answer within {self._timeout_seconds:g} s",
            ranks=[0],
            timeout_seconds=self._timeout_seconds,
            advice="look whether that process is stopped, its machine cut off, or its name server slow; calls fail at "
            "once until it answers",
        )


class _Opening:
    """A connection that is being opened on a worker thread: a host that is stopped accepts it and never answers.

    `is_known`: whether there was a connection before. Then a host that refuses one is gone, and torch, which would try
    again for five minutes, is not asked.
    """

    def __init__(self, original: Any, timeout_seconds: float, *, is_known: bool = False) -> None:
        self.done = threading.Event()
        self.client: Any = None
        self.error: Exception | None = None
        self._original = original
        self._timeout_seconds = timeout_seconds
        self._is_known = is_known
        threading.Thread(target=self._open, name="holdfast-connect", daemon=True).start()

    def _open(self) -> None:
        try:
            if self._is_known:
                _require_host(self._original, self._timeout_seconds)
            self.client = _cloned(self._original)
            if self.client is not self._original:
                _limit(self.client, self._timeout_seconds)
        except Exception as error:
            self.error = error
        finally:
            self.done.set()


def _require_host(store: Any, timeout_seconds: float) -> None:
    """Raise, as torch does for a broken connection, if nothing listens where the store is."""
    import torch.distributed as dist

    place = _place(store)
    if place is None:
        return
    try:
        socket.create_connection(place, timeout_seconds).close()
    except OSError as error:
        raise dist.DistNetworkError(str(error)) from error


def _cloned(store: Any) -> Any:
    import torch.distributed as dist

    try:
        # A handle of its own: the original one is locked while the training itself waits on it.
        return store.clone()
    except dist.DistNetworkError:
        raise
    except (AttributeError, NotImplementedError, RuntimeError, dist.DistError) as error:
        logger.info(
            "the store of torch.distributed cannot be cloned, so agreements wait for its other users: %s", error
        )
        return store


def _limit(client: Any, timeout_seconds: float) -> None:
    """Bound every wait of a client, on its socket and in the store itself."""
    import torch.distributed as dist

    inner = getattr(client, "_underlying_non_prefix_store", client)
    if not isinstance(inner, dist.TCPStore):
        return
    client.set_timeout(timedelta(seconds=timeout_seconds))
    # torch names the descriptor here and nowhere else.
    found = re.search(r"client=\w+\(\w+\(fd=(\d+),", repr(inner))
    if found is None:
        logger.warning(
            "the socket of torch.distributed's store was not found: a process that hosts the store and is stopped "
            "holds the other ranks for as long as it is stopped"
        )
        return
    limit = struct.pack("ll", int(timeout_seconds), int(timeout_seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(int(found.group(1)))) as handle:
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _is_broken(error: Exception) -> bool:
    """Return whether the connection failed, and not the request."""
    import torch.distributed as dist

    return isinstance(error, dist.DistNetworkError)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0].strip() or type(error).__name__


def _place(store: Any) -> tuple[str, int] | None:
    """Return the host and the port of a store that has them."""
    inner = getattr(store, "_underlying_non_prefix_store", store)
    host, port = getattr(inner, "host", None), getattr(inner, "port", None)
    return (str(host), int(port)) if host and port else None


def _address(store: Any) -> str:
    place = _place(store)
    return f" at {place[0]}:{place[1]}" if place is not None else ""


def _host() -> str:
    """Return who hosts the store that `init_process_group` makes."""
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return "the agent of torchrun on the first node" if by_agent else "rank 0"
