"""The channel between a trainer and its writer: messages over a socket pair, some with a file handle.

Messages arrive in the order in which they were sent. `receive` returns None once the other side is gone.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.ondisk.decoding import json_decoder

__all__ = ["Channel"]

_LENGTH = struct.Struct("<Q")
_READ_BYTES = 1 << 20
_LOOK_MILLISECONDS = 250


class Channel:
    """One end of the channel. `receives` is the type of the incoming messages."""

    def __init__(self, end: socket.socket, receives: Any) -> None:
        self._socket = end
        self._decoder = json_decoder(receives)
        self._buffer = bytearray()
        self._handles: list[int] = []
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any, handle: int | None = None) -> None:
        """Send a message. Raises `OSError` when the other side is gone."""
        data = msgspec.json.encode(message)
        frame = _LENGTH.pack(len(data)) + data
        with self._lock:
            sent = 0
            if handle is not None:
                sent = socket.send_fds(self._socket, [frame], [handle])
            self._socket.sendall(memoryview(frame)[sent:])

    def receive(self, gone: Callable[[], bool]) -> Any | None:
        """Return the next message, or None when the other side is gone. `gone` tells so while its end is still open."""
        # Not `select`, which cannot wait for a descriptor above 1,023.
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        while True:
            message = self._complete()
            if message is not None:
                return message
            if not readable.poll(_LOOK_MILLISECONDS):
                if gone():
                    return None
                continue
            if not self._read():
                return None

    def take_handle(self) -> int:
        """Return the handle that came with the message."""
        return self._handles.pop(0)

    def close(self) -> None:
        self._socket.close()
        while self._handles:
            os.close(self._handles.pop())

    def _complete(self) -> Any | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        data = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return self._decoder.decode(data)

    def _read(self) -> bool:
        space = socket.CMSG_SPACE(array.array("i").itemsize)
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_READ_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            return False
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                handles = array.array("i")
                handles.frombytes(content[: len(content) - len(content) % handles.itemsize])
                self._handles += list(handles)
        self._buffer += data
        return bool(data)
