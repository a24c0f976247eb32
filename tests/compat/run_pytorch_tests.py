"""Run PyTorch's own checkpoint tests, once with its file system storage and once with Holdfast's in its place.

    python tests/compat/run_pytorch_tests.py PYTORCH/test/distributed/checkpoint [FILE ...] [-k EXPRESSION]

A torch wheel has no tests: take them from PyTorch's sources of the installed version. They need `expecttest` and
`zstandard`. Prints one line per test that uses the storage, `FILE | TEST | stock | holdfast | options`, and the counts.
A test uses the storage when it builds a `FileSystemWriter` or a `FileSystemReader`, also through `checkpoint_id=`.

Everything runs on a copy, on the CPU with gloo: what asks for GPUs is taken out, and ranks are forked, which saves them
the import of torch. Options that Holdfast's classes refuse are left out, as the error advises, and listed. A test that
fails with PyTorch's storage, too, says nothing about Holdfast's.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping

WORDS = ("FileSystemWriter", "FileSystemReader", "checkpoint_id")

# How the tests ask for a GPU of each rank, and what they ask for instead.
ON_CPU = (
    (r'f"cpu:gloo,\{self\.device_type\}:\{curr_backend\}"', '"gloo"'),
    (r"\{device_type\}:[0-9]", "cpu"),
    (r"rank:\{r\}/\{device_type\}:\{r\}", "rank:{r}/cpu"),
    (r'f"\{device_type\}:\{dist\.get_rank\(\)\}"', '"cpu"'),
    (r"\.to\(self\.rank\)", '.to("cpu")'),
    (r"return min\((\d), torch\.[a-z_.]*device_count\(\)\)", r"return \1"),
    (r"return min\(torch\.[a-z_.]*device_count\(\), (\d)\)", r"return \1"),
)

# Imported by every Python process of the tests, also by the ranks that they start.
SITE = """
import functools
import os
import sys
import uuid

import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp
import torch.multiprocessing
import torch.testing._internal.common_distributed as common
from torch.distributed.checkpoint import _fsspec_filesystem, _storage_utils, filesystem, format_utils, hf_storage

get_context = torch.multiprocessing.get_context
begin_fsdp = fsdp.FullyShardedDataParallel.__init__


def context_of(kind=None):
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return get_context("fork" if kind == "spawn" and caller.startswith("torch.testing") else kind)


@functools.wraps(begin_fsdp)
def begin_on_cpu(self, *args, **options):
    begin_fsdp(self, *args, **{"device_id": torch.device("cpu"), **options})


torch.multiprocessing.get_context = context_of
fsdp.FullyShardedDataParallel.__init__ = begin_on_cpu
for name in ("skip_if_lt_x_gpu", "requires_accelerator_dist_backend", "requires_nccl"):
    if hasattr(common, name):
        setattr(common, name, lambda *args, **options: lambda test: test)


def mark(text):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0].partition("::")[2]
    with open(os.path.join(os.environ["MARKS_OF_STORAGE"], uuid.uuid4().hex), "w") as file:
        file.write(test + "\\n" + text)


def marked(kind):
    begin = kind.__init__

    @functools.wraps(begin)
    def __init__(self, *args, **options):
        if type(self) is kind:
            mark("used")
        begin(self, *args, **options)

    kind.__init__ = __init__


def in_place(name, kind, refused):
    def __init__(self, path, *args, **options):
        for option in refused & set(options):
            mark(option)
            del options[option]
        kind.__init__(self, path, **options)

    made = type(name, (kind,), {"__init__": __init__})
    for module in (dcp, filesystem, _storage_utils, format_utils):
        if hasattr(module, name):
            setattr(module, name, made)


if os.environ["STORAGE_OF_TESTS"] == "stock":
    marked(filesystem.FileSystemWriter)
    marked(filesystem.FileSystemReader)
else:
    from holdfast.formats.dcp import HoldfastReader, HoldfastWriter
    from holdfast.formats.dcp.options import NO_OPTION

    in_place("FileSystemWriter", HoldfastWriter, set(NO_OPTION))
    in_place("FileSystemReader", HoldfastReader, set(NO_OPTION))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="PyTorch's test/distributed/checkpoint")
    parser.add_argument("files", nargs="*", help="test files in it; when left out, all that name the storage")
    parser.add_argument("-k", default="", help="as for pytest")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one file")
    parsed = parser.parse_args()
    counts = [0, 0, 0]
    with tempfile.TemporaryDirectory() as scratch:
        copied = pathlib.Path(scratch, "checkpoint")
        shutil.copytree(parsed.folder, copied)
        for file in [copied / name for name in parsed.files] or _files_with_storage(copied):
            _put_on_cpu(file)
            for row in _compare(file, parsed.timeout, parsed.k):
                print(" | ".join((str(file.relative_to(copied)), *row)), flush=True)
                counts = [counts[0] + 1, counts[1] + (row[1] == "passed"), counts[2] + (row[2] == "passed")]
    print("{} tests use the storage: {} pass with PyTorch's, {} with Holdfast's".format(*counts))
    return 0


def _files_with_storage(folder: pathlib.Path) -> list[pathlib.Path]:
    return [file for file in sorted(folder.rglob("test_*.py")) if any(word in file.read_text() for word in WORDS)]


def _put_on_cpu(file: pathlib.Path) -> None:
    text = file.read_text()
    for pattern, replacement in ON_CPU:
        text = re.sub(pattern, replacement, text)
    file.write_text(text)


def _compare(file: pathlib.Path, timeout_seconds: float, choose: str) -> list[tuple[str, str, str, str]]:
    """Return of each test that uses the storage its name, how it ended with either, and the options left out."""
    stock, marks = _run(file, "stock", timeout_seconds, choose)
    users = sorted(name for name in stock if "used" in marks.get(name, ()))
    ours, dropped = _run(file, "holdfast", timeout_seconds, choose) if users else ({}, {})
    return [
        (name, stock[name], ours.get(name, "no result"), ", ".join(sorted(dropped.get(name, ())))) for name in users
    ]


def _run(
    file: pathlib.Path, storage: str, timeout_seconds: float, choose: str
) -> tuple[Mapping[str, str], Mapping[str, set[str]]]:
    """Return how each test of a file ended, as far as the time went, and what was marked for it."""
    with tempfile.TemporaryDirectory() as scratch:
        site, marks, log = (pathlib.Path(scratch, name) for name in ("site", "marks", "log"))
        site.mkdir()
        marks.mkdir()
        (site / "sitecustomize.py").write_text(SITE)
        paths = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
        set_up = {
            "PYTHONPATH": paths,
            "MARKS_OF_STORAGE": str(marks),
            "STORAGE_OF_TESTS": storage,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(file), "-k", choose]
        if not _ends(command, log, {**os.environ, **set_up}, timeout_seconds):
            print(f"{file.name}, {storage}: not done within {timeout_seconds:g} s", flush=True)
        ended = re.findall(r"\.py::(\S+) (PASSED|FAILED|SKIPPED)", log.read_text())
        return {name: outcome.lower() for name, outcome in ended}, _read_marks(marks)


def _ends(command: list[str], log: pathlib.Path, environment: Mapping[str, str], timeout_seconds: float) -> bool:
    """Run a command in the folder of its log; when the time is over, kill it and the ranks that it started."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=log.parent, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return False
    return True


def _read_marks(marks: pathlib.Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in marks.iterdir():
        test, _, text = path.read_text().partition("\n")
        found.setdefault(test, set()).add(text)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
