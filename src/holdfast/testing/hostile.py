"""Runs with hostile records: a sound run enters, copies of it with one record damaged leave. Knows no torch.

The checkpoints of every copy are sound: only the records around them are not. A reader of runs must return
the newest checkpoint, or raise its own error, in bounded time.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Collection, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.errors import UsageError
from holdfast.ondisk import paths
from holdfast.ondisk.decoding import encode_record
from holdfast.runs.process_identity import this_process

__all__ = ["HostileRun", "hostile_runs"]

RECORDS = ("run", "note", "claim", "heartbeat", "reader", "attempt", "committed attempt", "receipt", "name", "place")

_HUGE = 12345678901234567890
_SPARSE_BYTES = 1 << 30
_DEEP = 100_000


class HostileRun(NamedTuple):
    """A run with one damaged record: what was done, to which kind of record, and the folder of the run."""

    description: str
    record: str
    path: Path


def hostile_runs(
    run: str | os.PathLike[str],
    scratch: str | os.PathLike[str],
    *,
    records: Collection[str] = RECORDS,
    bit_stride: int = 1,
) -> Iterator[HostileRun]:
    """Yield copies of a run below the folder `scratch`, each with one record damaged in another way.

    records: the kinds to damage, of the records around checkpoints: "run" (`run.json`), "note", "claim" and
    "heartbeat" (of a writer), "reader" (the mark of one), "attempt" (`attempt.json` of an attempt), "committed attempt"
    (that of a checkpoint), "receipt", "name": foreign names, and "place": the folders `lease` and `readers` replaced by
    something that is no folder. What the run lacks is added first.

    Each record is truncated, emptied, replaced (by other JSON, by no JSON, by a folder, a link, a FIFO, a socket, a
    sparse file of 1 GiB) and has every `bit_stride`-th of its bits flipped. A copy is removed when the next one is
    asked for.

    The claim is that of a process of this machine that has ended, so the next writer takes over at once; with
    its claim damaged it is unknown, and Holdfast watches for its heartbeat for a minute.
    """
    if unknown := set(records) - set(RECORDS):
        raise UsageError(f"records={sorted(unknown)!r}", advice=f"choose from {', '.join(RECORDS)}")
    if bit_stride < 1:
        raise UsageError(f"bit_stride={bit_stride}", advice="1 flips every bit, 100 every hundredth")
    scratch = Path(scratch)
    whole = scratch / "whole"
    shutil.copytree(run, whole, symlinks=True)
    present = _complete(whole)
    try:
        for kind, key in present.items():
            if kind not in records:
                continue
            size_bytes = (whole / key).stat().st_size
            for name, damage in {**_DAMAGES, **_flips(size_bytes, bit_stride)}.items():
                target = scratch / "run"
                shutil.copytree(whole, target, symlinks=True)
                damage(target / key)
                yield HostileRun(f"{kind} ({key}): {name}", kind, target)
                shutil.rmtree(target)
        for name, key in _NAMES.items() if "name" in records else ():
            target = scratch / "run"
            shutil.copytree(whole, target, symlinks=True)
            _written(target / key, b"{}\n")
            yield HostileRun(f"a name: {name} ({key})", "name", target)
            shutil.rmtree(target)
        for folder, name in product(_FOLDERS, _PLACES) if "place" in records else ():
            target = scratch / "run"
            shutil.copytree(whole, target, symlinks=True)
            shutil.rmtree(target / folder)
            _PLACES[name](target / folder)
            yield HostileRun(f"a place: {folder} is {name}", "place", target)
            shutil.rmtree(target)
    finally:
        shutil.rmtree(whole, ignore_errors=True)
        shutil.rmtree(scratch / "run", ignore_errors=True)


def _complete(run: Path) -> dict[str, str]:
    """Add what the run lacks, and return the key of one record of each kind."""
    folders = sorted(path.name for path in run.iterdir() if (path / paths.MANIFEST).is_file())
    if not folders:
        raise UsageError(f"{run} has no checkpoint", advice="save one first")
    newest = folders[-1]
    parsed = paths.parse_folder(newest)
    attempt = paths.folder_name(parsed.step + 1 if parsed is not None else 1, 999)
    shutil.copytree(run / newest, run / attempt)
    (run / attempt / paths.MANIFEST).unlink()
    here = this_process()
    # No system gives such a number to a process, so it counts as ended.
    gone = {"host": here.host, "machine": here.machine, "process": 2**31 - 1, "birth": 1}
    claim = {"holder": gone, "started": "2026-01-01T00:00:00+00:00", "timeout_seconds": 60.0, "token": "0" * 32}
    digest = json.loads((run / newest / paths.MANIFEST).read_bytes())["digest"]
    note = {"checkpoint": digest, "created": "2026-01-01T00:00:00+00:00", "tag": "hostile"}
    number = 1 + max([0, *(int(path.name[:9]) for path in (run / paths.LEASE).glob("?????????.json"))])
    records: dict[str, tuple[str, bytes]] = {
        "note": (f"{paths.NOTES}/{newest}--000900.json", encode_record(note)),
        "claim": (f"{paths.LEASE}/{number:09d}.json", encode_record(claim)),
        "heartbeat": (f"{paths.LEASE}/{number:09d}.beat-000000001", b"2026-01-01T00:00:00+00:00\n"),
        "reader": (f"{paths.READERS}/{newest}--hostile.json", encode_record(claim)),
        "receipt": (f"{attempt}/{paths.receipt_file(1)}", encode_record({"token": "", "receipt": [[], []]})),
    }
    for key, data in records.values():
        _written(run / key, data)
    return {
        "run": paths.RUN_KEY,
        "attempt": f"{attempt}/{paths.ATTEMPT}",
        "committed attempt": f"{newest}/{paths.ATTEMPT}",
        **{kind: key for kind, (key, _) in records.items()},
    }


def _written(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


# What is done to a record


def _flips(size_bytes: int, stride: int) -> dict[str, Callable[[Path], None]]:
    return {f"bit {bit} flipped": _flip(bit) for bit in range(0, size_bytes * 8, stride)}


def _flip(bit: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)

    return flip


def _changed(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return rewrite


def _each_value(value: Any) -> Callable[[bytes], bytes]:
    """Yield copies with one value of a JSON object replaced, without the digest; of other content, all."""

    def change(data: bytes) -> bytes:
        try:
            fields = json.loads(data)
        except ValueError:
            return json.dumps(value).encode()
        return json.dumps({key: value for key in fields if key != "digest"}).encode()

    return change


def _huge_numbers(data: bytes) -> bytes:
    """Yield copies with one number of a JSON object replaced by one of 20 digits, without the digest."""

    def grown(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: grown(inner) for key, inner in value.items() if key != "digest"}
        return _HUGE if isinstance(value, int | float) else value

    try:
        return json.dumps(grown(json.loads(data))).encode()
    except ValueError:
        return str(_HUGE).encode()


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def _make_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, _SPARSE_BYTES)


def _make_socket(path: Path) -> None:
    # By a path relative to its folder: the address of a socket may have a hundred characters.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


_DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": _changed(lambda data: b""),
    "cut in half": _changed(lambda data: data[: len(data) // 2]),
    "without its end": _changed(lambda data: data[:-2]),
    "zeros": _changed(lambda data: bytes(len(data))),
    "invalid UTF-8": _changed(lambda data: data.replace(b'"', b'"\xff\xfe', 1) if b'"' in data else b"\xff\xfe"),
    "no JSON": _changed(lambda data: b"what is this\n"),
    "deep JSON": _changed(lambda data: b"[" * _DEEP),
    "a deep value": _changed(lambda data: b'{"claim":' + b"[" * _DEEP + b"]" * _DEEP + b"}"),
    "an array": _changed(lambda data: b"[]\n"),
    "an empty object": _changed(lambda data: b"{}\n"),
    "lists for values": _changed(_each_value([])),
    "null for values": _changed(_each_value(None)),
    "20-digit numbers": _changed(_huge_numbers),
    "20-digit values": _changed(_each_value(_HUGE)),
    "NUL in text": _changed(_each_value("\0")),
    "gone": Path.unlink,
    "a folder": _replaced(Path.mkdir),
    "a FIFO": _replaced(os.mkfifo),
    "a link to /dev/zero": _replaced(lambda path: path.symlink_to("/dev/zero")),
    "a link to itself": _replaced(lambda path: path.symlink_to(path.name)),
    "a socket": _replaced(_make_socket),
    "a sparse file of 1 GiB": _replaced(_make_sparse),
}

_FOLDERS = (paths.LEASE, paths.READERS)
_PLACES: dict[str, Callable[[Path], object]] = {
    "an empty file": Path.touch,
    "a file": lambda path: path.write_bytes(b"what is this\n"),
    "a FIFO": os.mkfifo,
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a link to a folder": lambda path: path.symlink_to(paths.NOTES),
    "a socket": _make_socket,
}

_NAMES = {
    "a claim with a 20-digit number": f"{paths.LEASE}/{_HUGE}.json",
    "a claim with a 19-digit number": f"{paths.LEASE}/{10**19 - 1}.json",
    "a claim with the highest 15-digit number": f"{paths.LEASE}/{10**15 - 1}.json",
    "a claim with the one below": f"{paths.LEASE}/{10**15 - 2}.json",
    "a folder with a claim's highest number": f"{paths.LEASE}/{10**15 - 1}.json/inside",
    "a heartbeat that is no count": f"{paths.LEASE}/000000001.beat-²",
    "a floor above all steps": f"{paths.LEASE}/000000001.floor-{2**63 - 1}.999999999",
    "a note with an 18-digit number": f"{paths.NOTES}/step-000000001--{10**18 - 1}.json",
    "an attempt with the highest number": f"step-000000001.999999999/{paths.ATTEMPT}",
    "a step above all": f"step-{2**63 - 1}/{paths.ATTEMPT}",
}
