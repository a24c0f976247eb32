"""Serve disk images over FUSE and log every block write and flush in order. Bytes enter; a log leaves. Knows no files
inside of the images.

Started as a process of its own, so that nobody who waits for the images can hold it up:

    python block_log.py MOUNT LOG IMAGE...

`MOUNT/0`, `MOUNT/1`, ... are the images. What is written to `MOUNT/0.marks` goes into the same log, between the writes
and flushes of image 0 that came before and after it: so the log says what had reached the disk when a program got that
far. The protocol is the kernel's own (`include/uapi/linux/fuse.h`): the few requests that a loop device makes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

WRITE, FLUSH, MARK = 1, 2, 3
_RECORD = struct.Struct("<BBQI")


@dataclass(frozen=True)
class Entry:
    """One line of the log: a write or a flush of an image, or a mark."""

    kind: int
    image: int
    offset: int = 0
    data: bytes = b""


def read_log(path: Path) -> Iterator[Entry]:
    """Return the entries in the order in which they reached the server."""
    log, position = path.read_bytes(), 0
    while position < len(log):
        kind, image, offset, size_bytes = _RECORD.unpack_from(log, position)
        position += _RECORD.size
        yield Entry(kind, image, offset, log[position : position + size_bytes])
        position += size_bytes


_REQUEST = struct.Struct("<IIQQIIIHH")
_REPLY = struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<6Q10I")
_READ_OR_WRITE = struct.Struct("<QQIIQII")
_MAX_WRITE_BYTES = 1 << 20
_KEPT_SECONDS = 3600
_FORGET, _INTERRUPT, _BATCH_FORGET = 2, 36, 42


class Server:
    """Answer the kernel's requests, one after the other, until the mount is gone."""

    def __init__(self, device: int, log: int, images: list[int]) -> None:
        self._device = device
        self._log = log
        self._images = images
        self._requests: dict[int, Callable[[int, memoryview], bytes]] = {
            1: self._lookup,
            3: self._attributes_of,
            4: self._attributes_of,
            14: self._open,
            15: self._read,
            16: self._write,
            18: self._nothing,
            20: self._flush,
            25: self._nothing,
            26: self._init,
            27: self._open,
            29: self._nothing,
        }

    def serve(self) -> None:
        buffer = bytearray(_MAX_WRITE_BYTES + (1 << 16))
        while True:
            try:
                size_bytes = os.readv(self._device, [buffer])
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.ENOENT, errno.EINTR):
                    continue
                raise
            self._answer(memoryview(buffer)[:size_bytes])

    def _answer(self, request: memoryview) -> None:
        _, operation, unique, node, *_ = _REQUEST.unpack_from(request)
        if operation in (_FORGET, _INTERRUPT, _BATCH_FORGET):
            return
        code, body = 0, b""
        handler = self._requests.get(operation)
        try:
            if handler is None:
                raise OSError(errno.ENOSYS, "not served")
            body = handler(node, request[_REQUEST.size :])
        except OSError as error:
            code = -(error.errno or errno.EIO)
        os.write(self._device, _REPLY.pack(_REPLY.size + len(body), code, unique) + body)

    def _init(self, node: int, body: memoryview) -> bytes:
        minor = min(struct.unpack_from("<II", body)[1], 31)
        flags = 1 | 1 << 5 | 1 << 22  # asynchronous reads, large writes, the number of pages below
        answer = struct.pack("<IIIIHHIIHH", 7, minor, 0, flags, 64, 48, _MAX_WRITE_BYTES, 1, _MAX_WRITE_BYTES >> 12, 0)
        return answer.ljust(64, b"\0")

    def _lookup(self, node: int, body: memoryview) -> bytes:
        name = bytes(body).rstrip(b"\0").decode()
        numbers = range(len(self._images))
        names = [*map(str, numbers), *(f"{number}.marks" for number in numbers)]
        if name not in names:
            raise OSError(errno.ENOENT, name)
        child = names.index(name) + 2
        return struct.pack("<QQQQII", child, 0, _KEPT_SECONDS, _KEPT_SECONDS, 0, 0) + self._attributes(child)

    def _attributes_of(self, node: int, body: memoryview) -> bytes:
        return struct.pack("<QII", _KEPT_SECONDS, 0, 0) + self._attributes(node)

    def _attributes(self, node: int) -> bytes:
        mode = stat.S_IFDIR | 0o755 if node == 1 else stat.S_IFREG | 0o600
        size_bytes = os.fstat(self._images[node - 2]).st_size if 2 <= node < 2 + len(self._images) else 0
        return _ATTRIBUTES.pack(node, size_bytes, size_bytes >> 9, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def _open(self, node: int, body: memoryview) -> bytes:
        return struct.pack("<QII", 0, 1 if node > 1 else 0, 0)  # 1: past the page cache

    def _read(self, node: int, body: memoryview) -> bytes:
        _, offset, size_bytes, *_ = _READ_OR_WRITE.unpack_from(body)
        return os.pread(self._images[node - 2], size_bytes, offset)

    def _write(self, node: int, body: memoryview) -> bytes:
        _, offset, size_bytes, *_ = _READ_OR_WRITE.unpack_from(body)
        data = body[_READ_OR_WRITE.size :][:size_bytes]
        image = node - 2
        if image < len(self._images):
            os.pwrite(self._images[image], data, offset)
            self._note(WRITE, image, offset, data)
        else:
            self._note(MARK, image - len(self._images), 0, data)
        return struct.pack("<II", size_bytes, 0)

    def _flush(self, node: int, body: memoryview) -> bytes:
        if node - 2 < len(self._images):
            self._note(FLUSH, node - 2, 0, memoryview(b""))
        return b""

    def _nothing(self, node: int, body: memoryview) -> bytes:
        return b""

    def _note(self, kind: int, image: int, offset: int, data: memoryview) -> None:
        os.write(self._log, _RECORD.pack(kind, image, offset, len(data)) + data)


def main(mount: str, log: str, *images: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"block-log", os.fsencode(mount), b"fuse", 0, options) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mounting a FUSE file system: {os.strerror(code)}")
    print("ready", flush=True)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    Server(device, written, [os.open(image, os.O_RDWR | os.O_CLOEXEC) for image in images]).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
