"""Real file systems in image files: record what a training makes them write, and mount them as a power cut leaves them.

A directory for a recording enters; logs of writes, flushes and marks leave, and from them mounted images. Needs root,
loop devices, FUSE and the file systems' mkfs. Knows nothing of checkpoints.

What a disk guarantees is taken at its word and no further: what was written before a completed flush is there; of what
was written after it, any subset may be, and of one write any subset of its sectors.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.crash import block_log
from tests.crash.block_log import FLUSH, MARK, WRITE, Entry

_MEBIBYTE = 1 << 20
_CHUNK_BYTES = 1 << 16
# What a disk writes whole or not at all. File systems count on it: half a superblock could not be mounted.
_SECTOR_BYTES = 4096
_EXIT_SECONDS = 30.0
READ_ONLY = 1
_DETACH = 2


@dataclass(frozen=True)
class FileSystem:
    """A kind of file system, and how an empty one is made and mounted."""

    name: str
    size_bytes: int
    make: tuple[str, ...]
    options: str = ""


FILE_SYSTEMS = {
    "ext4": FileSystem("ext4", 32 * _MEBIBYTE, ("mkfs.ext4", "-q", "-F", "-b", "4096")),
    "xfs": FileSystem("xfs", 64 * _MEBIBYTE, ("mkfs.xfs", "-q", "-f", "-l", "size=6m")),
    # nodiscard: the images are logged by their writes, and a discard is none.
    "btrfs": FileSystem("btrfs", 128 * _MEBIBYTE, ("mkfs.btrfs", "-q", "-f"), "nodiscard"),
}


@cache
def why_not(kind: FileSystem) -> str:
    """Return what is missing here for images of this kind, or an empty text."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if shutil.which(kind.make[0], path=_SYSTEM_PATH) is None:
        package = {"mkfs.ext4": "e2fsprogs", "mkfs.xfs": "xfsprogs", "mkfs.btrfs": "btrfs-progs"}[kind.make[0]]
        return f"{kind.make[0]} is not installed: apt-get install {package}"
    for device in ("/dev/fuse", "/dev/loop-control"):
        if not os.path.exists(device):
            return f"there is no {device}"
    return _why_no_mount(kind)


# mkfs, losetup: an ordinary PATH may lack their folders.
_SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _why_no_mount(kind: FileSystem) -> str:
    """Try it once: a container may have the devices and not the right to use them."""
    with scratch() as folder:
        try:
            with recording([kind], folder):
                return ""
        except (OSError, subprocess.CalledProcessError) as error:
            detail = getattr(error, "stderr", "") or error
            return f"an image of {kind.name} cannot be mounted: {detail}".strip()


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory if there is some: the disk under the images is a log, so no real one has to be waited for."""
    shared = Path("/dev/shm")
    base = shared if os.access(shared, os.W_OK) else Path("/tmp")
    folder = base / f"holdfast-images-{os.getpid()}-{random.getrandbits(32):08x}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def make_image(kind: FileSystem, path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(kind.size_bytes)
    _run(*kind.make, str(path))
    return path


@contextmanager
def loop_device(image: Path, *options: str) -> Iterator[str]:
    device = _run("losetup", *options, "--find", "--show", str(image)).strip()
    try:
        yield device
    finally:
        _run("losetup", "--detach", device)


@contextmanager
def mounted(kind: FileSystem, device: str, folder: Path, *, flags: int = 0) -> Iterator[Path]:
    """The device mounted on a folder. Mounting recovers a journal, as it does after a power cut, also read-only."""
    _call("mount", device.encode(), os.fsencode(folder), kind.name.encode(), flags, kind.options.encode() or None)
    try:
        yield folder
    finally:
        _unmount(folder)


def _unmount(folder: Path) -> None:
    try:
        _call("umount2", os.fsencode(folder), 0)
    except OSError:
        # Somebody still uses it, which is an error; but what failed here must not stay mounted.
        _call("umount2", os.fsencode(folder), _DETACH)
        raise


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


_libc = ctypes.CDLL(None, use_errno=True)


def _run(*command: str) -> str:
    # The other three let mkfs.xfs make file systems below 300 MB, as the tests of XFS itself need them.
    environment = {**os.environ, "PATH": _SYSTEM_PATH, "TEST_DIR": "1", "TEST_DEV": "1", "QA_CHECK_FS": "1"}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


@dataclass
class Recording:
    """Images in the state in which they were made, and all that was written to them afterwards."""

    kinds: Sequence[FileSystem]
    folder: Path
    log: list[Entry] = field(default_factory=list)

    def mount(self, kind: FileSystem) -> Path:
        return self.folder / kind.name

    def marks(self, kind: FileSystem) -> Path:
        """Where a training writes what it was told; see `block_log`."""
        return self.folder / "fuse" / f"{self.kinds.index(kind)}.marks"

    def empty(self, kind: FileSystem) -> Path:
        return self.folder / f"{kind.name}.empty"

    def log_of(self, kind: FileSystem) -> list[Entry]:
        """The writes, flushes and marks of one image, in order."""
        image = self.kinds.index(kind)
        return [entry for entry in self.log if entry.image == image]


@contextmanager
def recording(kinds: Sequence[FileSystem], folder: Path) -> Iterator[Recording]:
    """Mount a new image of each kind, and log what is written to it inside of `with`, but not the unmounting."""
    recorded = Recording(kinds, folder)
    for kind in kinds:
        shutil.copyfile(make_image(kind, recorded.empty(kind)), folder / f"{kind.name}.live")
    with _served(recorded) as images, ExitStack() as stack:
        for kind, image in zip(kinds, images, strict=True):
            device = stack.enter_context(loop_device(image, "--direct-io=on"))
            recorded.mount(kind).mkdir()
            stack.enter_context(mounted(kind, device, recorded.mount(kind)))
        yield recorded
        recorded.log = list(block_log.read_log(folder / "log"))


@contextmanager
def _served(recorded: Recording) -> Iterator[list[Path]]:
    mount = recorded.folder / "fuse"
    mount.mkdir()
    live = [str(recorded.folder / f"{kind.name}.live") for kind in recorded.kinds]
    command = [sys.executable, block_log.__file__, str(mount), str(recorded.folder / "log"), *live]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        if server.stdout.readline() != "ready\n":
            raise OSError("the FUSE server of the images did not start")
        try:
            yield [mount / str(number) for number in range(len(live))]
        finally:
            _unmount(mount)
            server.wait(_EXIT_SECONDS)


@dataclass(frozen=True)
class Cut:
    """One power cut: how much of the log had happened, and which of the unflushed writes reached the disk.

    choice 0: all of them. 1: none. From 2 on: chosen at random for each write, and for some of them for each sector.
    """

    position: int
    choice: int

    def pick(self, unflushed: Sequence[Entry]) -> Iterator[Entry]:
        chooser = random.Random(f"{self.position}/{self.choice}")
        for number, entry in enumerate(unflushed):
            last = number == len(unflushed) - 1
            if self.choice == 0 or (self.choice > 1 and chooser.random() < 0.6):
                yield from _torn(entry, chooser) if self.choice and (last or chooser.random() < 0.2) else [entry]


def _torn(entry: Entry, chooser: random.Random) -> Iterator[Entry]:
    """Some sectors of a write: those up to a point, or any."""
    first, last = entry.offset // _SECTOR_BYTES, (entry.offset + len(entry.data) - 1) // _SECTOR_BYTES
    end = chooser.randrange(first, last + 2)
    front = chooser.random() < 0.5
    for sector in range(first, last + 1):
        if sector < end if front else chooser.random() < 0.5:
            start = max(sector * _SECTOR_BYTES, entry.offset)
            part = entry.data[start - entry.offset : (sector + 1) * _SECTOR_BYTES - entry.offset]
            yield Entry(WRITE, entry.image, start, part)


class Disk:
    """An image that is set to the state after any cut, and mounted again. Cuts must come in the order of the log."""

    def __init__(self, kind: FileSystem, empty: Path, log: Sequence[Entry], work: Path) -> None:
        self._kind = kind
        self._log = log
        self._work = work
        self._base = bytearray(empty.read_bytes())
        self._full = {
            start
            for start in range(0, len(self._base), _CHUNK_BYTES)
            if self._base.count(0, start, start + _CHUNK_BYTES) < _CHUNK_BYTES
        }
        self._flushed = 0
        work.mkdir()
        (work / "mounted").mkdir()
        with (work / "image").open("wb") as file:
            file.truncate(len(self._base))

    @contextmanager
    def attached(self) -> Iterator[str]:
        with loop_device(self._work / "image") as device:
            yield device

    @contextmanager
    def after(self, cut: Cut, device: str, *, flags: int = READ_ONLY) -> Iterator[tuple[Path, list[str]]]:
        """The file system as it is found after the cut, and the marks that were made before it."""
        self._write_state(cut)
        marks = [entry.data.decode() for entry in self._log[: cut.position] if entry.kind == MARK]
        with mounted(self._kind, device, self._work / "mounted", flags=flags) as folder:
            yield folder, marks

    def _write_state(self, cut: Cut) -> None:
        flushed = max((at + 1 for at in range(cut.position) if self._log[at].kind == FLUSH), default=0)
        assert flushed >= self._flushed, "cuts must come in the order of the log"
        for entry in self._log[self._flushed : flushed]:
            self._put(entry)
        self._flushed = flushed
        with (self._work / "image").open("r+b", buffering=0) as file:
            view = memoryview(self._base)
            for start in sorted(self._full | set(_chunks_in(file.fileno()))):
                os.pwrite(file.fileno(), view[start : start + _CHUNK_BYTES], start)
            for entry in cut.pick([entry for entry in self._log[flushed : cut.position] if entry.kind == WRITE]):
                os.pwrite(file.fileno(), entry.data, entry.offset)

    def _put(self, entry: Entry) -> None:
        if entry.kind == WRITE:
            self._base[entry.offset : entry.offset + len(entry.data)] = entry.data
            first = entry.offset - entry.offset % _CHUNK_BYTES
            self._full.update(range(first, entry.offset + len(entry.data), _CHUNK_BYTES))


def _chunks_in(file: int) -> Iterator[int]:
    """The chunks of a sparse file that are not holes: what was written to them must be written over."""
    end = 0
    while True:
        try:
            start = os.lseek(file, end, os.SEEK_DATA)
        except OSError:
            return
        end = os.lseek(file, start, os.SEEK_HOLE)
        yield from range(start - start % _CHUNK_BYTES, end, _CHUNK_BYTES)


def cuts(log: Sequence[Entry], count: int) -> list[Cut]:
    """At least `count` cuts, spread evenly over the writes and marks of a log, each once or with several choices.

    A cut right after a flush is the same for every choice, so cuts are made where something is unflushed, and at marks.
    """
    places = []
    unflushed = 0
    for position, entry in enumerate(log, 1):
        unflushed = 0 if entry.kind == FLUSH else unflushed + (entry.kind == WRITE)
        if entry.kind == MARK or unflushed:
            places.append((position, bool(unflushed)))
    wanted = [Cut(position, choice) for position, open_ in places for choice in ((0, 1, 2, 3, 4) if open_ else (0,))]
    if len(wanted) <= count:
        return wanted
    chosen = set(random.Random(count).sample(range(len(wanted)), count))
    return [cut for number, cut in enumerate(wanted) if number in chosen]
