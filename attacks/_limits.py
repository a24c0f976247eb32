"""Run Holdfast and stock tools on hostile files in processes of their own, with limits on memory, files and time."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Refusal", "refused_in_a_process", "stock_fails"]

ROOT = Path(__file__).parents[1]
MEMORY_BYTES = 512 << 20
"""How much memory a process may take beyond what it has after its imports."""
FILE_BYTES = 256 << 20
"""The longest file that a process may write."""
PROCESSOR_SECONDS = 60
STOCK_PROCESSOR_SECONDS = 10
"""A stock tool that works as long on a small file is harmed."""


class Refusal(NamedTuple):
    """The error of Holdfast: its type and its message."""

    type: str
    message: str


def refused_in_a_process(name: str, path: Path, **environment: str) -> Refusal:
    """Return how Holdfast refuses an attack, in a process that may take but so much memory."""
    answer = _ask(kind="refused", name=name, path=str(path), environment=environment)
    if answer["error"]:
        raise AssertionError(f"the attack '{name}' was not refused: {answer['error']}")
    return Refusal(answer["type"], answer["message"])


def stock_fails(code: str, *arguments: object, imports: str = "") -> str:
    """Run code of a stock tool within the limits and return the error that it ends with, empty if there is none.

    The code finds the arguments in `sys.argv`. `imports` are run before the limits apply. A tool that the system killed
    has the error `killed by signal N`.
    """
    return _ask(kind="stock", code=code, imports=imports, arguments=[*map(str, arguments)], environment={})["error"]


def _ask(**request: Any) -> dict[str, str]:
    seconds = STOCK_PROCESSOR_SECONDS if request["kind"] == "stock" else PROCESSOR_SECONDS
    limits = {"memory_bytes": MEMORY_BYTES, "file_bytes": FILE_BYTES, "processor_seconds": seconds}
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps({**request, "limits": limits}) + "\n")
    server.stdin.flush()
    line = server.stdout.readline()
    if not line:
        raise RuntimeError(f"the process that runs the attacks ended with {server.wait()}")
    answer: dict[str, str] = json.loads(line)
    return answer


@functools.cache
def _server() -> subprocess.Popen[str]:
    # One arena of malloc: with one for each thread the limit on the address space would count what nobody uses.
    settings = {**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "attacks._server"],
        cwd=ROOT,
        env=settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def end() -> None:
        assert server.stdin is not None
        server.stdin.close()
        server.wait()

    atexit.register(end)
    return server
