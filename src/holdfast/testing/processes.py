"""Run a function on real ranks, each in a new process, and return how each of them ended. Knows torch.distributed.

    outcomes = run_ranks(4, save_and_restore, "/tmp/run")
    assert values(outcomes) == [...]

The rendezvous store lives in the calling process, as it does under torchrun: it outlives any rank, and its port is
chosen by the system. Nothing here waits longer than the given time.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, Literal, TypeAlias

from holdfast.errors import UsageError

__all__ = ["Outcome", "descendants", "run_ranks", "values"]

_HOST = "127.0.0.1"
_SAFE_PATH = "PYTHONSAFEPATH"
# How long a process may take to end after it was killed; only a broken machine needs more.
_REAP_SECONDS = 10.0
StartMethod: TypeAlias = Literal["spawn", "forkserver"]
# What nearly every rank imports, sooner or later; the last one is imported by the first step of any optimizer. Nothing
# of Holdfast: a process that is forked must not share with others what it knows of itself.
_PRELOADED = [
    "numpy",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
]


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    `value` is what the function returned, `error` what it raised, with `traceback_text`. A rank that was killed has
    neither, and a negative `exit_code`, as `subprocess` writes them. A rank that was still running when the time was
    over was killed, and has `timed_out` and a `TimeoutError`.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    traceback_text: str = ""
    exit_code: int | None = None
    timed_out: bool = False

    def unwrap(self) -> Any:
        """Return the value; raise a `RuntimeError` with the rank's own traceback when there is none."""
        if self.error is not None:
            raise RuntimeError(f"rank {self.rank}: {self.error!r}\n{self.traceback_text}") from self.error
        if self.exit_code != 0:
            raise RuntimeError(f"rank {self.rank} ended without an answer, exit code {self.exit_code}")
        return self.value


def run_ranks(
    n: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = 120.0,
    backend: str | None = "gloo",
    start: StartMethod = "spawn",
) -> list[Outcome]:
    """Call `function(rank, *args)` in `n` new processes, and return how each ended, in the order of the ranks.

    The function must be picklable, so at the top level of a module, and what it returns too. Each process has the
    environment that torchrun gives, one torch thread, and a process group of `backend`; with `backend=None` it has no
    process group and torch is not imported for it.

    `start="forkserver"` takes a tenth of the processor time: the processes are forked from one server, which imports
    torch once. They differ from new interpreters in this: they have one seed for the hashes of text, so sets have the
    same order on all ranks; and what libraries read from the environment when they are loaded (`LD_PRELOAD`) is what it
    was when the server was started, at the first such call.

    In the rank, `multiprocessing` and the workers of a `DataLoader` start their processes by "forkserver", too, unless
    told otherwise. A rank that is killed at the time limit takes the processes that it has started with it.
    """
    if start not in ("spawn", "forkserver"):
        raise UsageError(f"start={start!r}", advice="choose 'spawn' or 'forkserver'; 'fork' would copy held locks")
    deadline = time.monotonic() + timeout_seconds
    call = pickle.dumps((function, args))
    with _rendezvous(n, backend) as environment:
        ranks = [_start(rank, n, environment, backend, call, start) for rank in range(n)]
        try:
            _wait_for_all(ranks, deadline)
        finally:
            for rank in ranks:
                rank.end()
    return [rank.outcome(timeout_seconds) for rank in ranks]


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """Return the value of each rank, or raise the error of the first rank without one."""
    return [outcome.unwrap() for outcome in outcomes]


def descendants(process: int) -> list[int]:
    """Return the ids of all processes that a process has started, and that these have, as far as they still run."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it may end meanwhile
            # Not /proc/PID/task/TID/children: a child of a thread that ends at this moment may be in none of them.
            state, parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(name))
    found = [process]
    for one in found:
        found += children.get(one, [])
    return found[1:]


class _Rank:
    """One process from the side of its parent."""

    def __init__(self, rank: int, process: BaseProcess, answers: Connection) -> None:
        self.rank = rank
        self.process = process
        self.answers = answers
        self._answer: bytes | None = None
        self._timed_out = False
        # An answer can be larger than the pipe holds, so it is read before the process can end: both are waited for.
        self.pending: list[Any] = [answers, process.sentinel]

    def take(self, ready: list[Any]) -> None:
        """Take note of what is ready, the answer or the end; what has ended is not waited for again."""
        if self.process.sentinel in ready and self.process.sentinel in self.pending:
            self.pending.remove(self.process.sentinel)
        if self.answers in ready and self.answers in self.pending:
            self._listen()

    def _listen(self) -> None:
        try:
            self._answer = self.answers.recv_bytes()
        except (EOFError, OSError):
            self.pending.remove(self.answers)

    def end(self) -> None:
        """Kill what still runs, by its own process id, and free what is held."""
        if self.process.sentinel in self.pending:
            self._timed_out = True
            for process in [self.process.pid or 0, *descendants(self.process.pid or 0)]:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        self.process.join(_REAP_SECONDS)
        self.answers.close()

    def outcome(self, timeout_seconds: float) -> Outcome:
        code = self.process.exitcode
        if self._timed_out:
            error = TimeoutError(f"still running after {timeout_seconds:g} s, and killed")
            return Outcome(self.rank, error=error, exit_code=code, timed_out=True)
        if self._answer is None:
            return Outcome(self.rank, exit_code=code)
        try:
            value, error, text = pickle.loads(self._answer)
        except Exception as problem:
            return Outcome(self.rank, error=problem, traceback_text=traceback.format_exc(), exit_code=code)
        return Outcome(self.rank, value, error, text, code)


@contextmanager
def _rendezvous(n: int, backend: str | None) -> Iterator[dict[str, str]]:
    if backend is None:
        yield {"MASTER_ADDR": _HOST, "MASTER_PORT": str(_free_port())}
        return
    from torch.distributed import TCPStore

    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    # The variable of torchrun that makes every rank, also rank 0, a client of a store that is there already.
    yield {"MASTER_ADDR": _HOST, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    del store


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _start(
    rank: int, n: int, environment: dict[str, str], backend: str | None, call: bytes, start: StartMethod
) -> _Rank:
    context = _context(start)
    answers, answering = context.Pipe(duplex=False)
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
    threads = {"OMP_NUM_THREADS": "1"}
    outputs = _Outputs() if start == "forkserver" else None
    surroundings = _Surroundings({**os.environ, **environment, **own, **threads}, outputs)
    process = context.Process(
        target=_be_rank,
        args=(rank, surroundings, backend, call, answering),
        name=f"rank-{rank}",
        daemon=False,
    )
    with _without_current_folder():
        process.start()
    # Ours must go, or the pipe would never end when the rank is killed.
    answering.close()
    return _Rank(rank, process, answers)


@contextmanager
def _without_current_folder() -> Iterator[None]:
    """Start interpreters without the current folder on their import path, which `python -c` puts first: a json.py there
    would run in them before they have the path of this process. multiprocessing takes no options for them."""
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        _restore_variable(before)


def _restore_variable(value: str | None) -> None:
    if value is None:
        os.environ.pop(_SAFE_PATH, None)
    else:
        os.environ[_SAFE_PATH] = value


def _wait_for_all(ranks: list[_Rank], deadline: float) -> None:
    while pending := [source for rank in ranks for source in rank.pending]:
        left_seconds = deadline - time.monotonic()
        if left_seconds <= 0:
            return
        ready = wait(pending, left_seconds)
        for rank in ranks:
            rank.take(ready)


def _context(start: StartMethod) -> SpawnContext | ForkServerContext:
    if start == "spawn":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


class _Outputs:
    """Standard output and error of the process that pickles this, for one that did not inherit them."""

    def __getstate__(self) -> list[Any]:
        return [DupFd(1), DupFd(2)]

    def __setstate__(self, handles: list[Any]) -> None:
        self._handles = handles

    def take(self) -> None:
        for number, handle in enumerate(self._handles, 1):
            own = handle.detach()
            os.dup2(own, number)
            os.close(own)


@dataclass(frozen=True)
class _Surroundings:
    """What a rank has from the process that starts it. A forked one has its server's, so these take their place."""

    environment: dict[str, str]
    outputs: _Outputs | None

    def take(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        if self.outputs is None:
            return
        self.outputs.take()
        import numpy
        import torch

        numpy.random.seed()  # as a new interpreter does; Python's own generator is seeded after every fork
        torch.set_num_threads(1)  # OMP_NUM_THREADS came after torch


def _be_rank(rank: int, surroundings: _Surroundings, backend: str | None, call: bytes, answering: Connection) -> None:
    """Run one rank. The function is unpickled here, after the environment is set: its module may look at it."""
    surroundings.take()
    # A child that Python 3.11 forks while another thread holds the lock of the list of threads waits for ever, and the
    # threads of gloo take that lock after a collective. The server of this method has one thread. It ends with its
    # rank, however that ends: a worker of a loader notices that its parent is gone.
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload(["torch", "holdfast.testing.tied"])
    try:
        answer = pickle.dumps((_call(rank, backend, call), None, ""))
    except BaseException as error:
        answer = _failure(error)
    answering.send_bytes(answer)
    answering.close()
    if backend is not None:
        # The answer is given; to take a process group down beside others that do the same sometimes aborts in torch.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _call(rank: int, backend: str | None, call: bytes) -> Any:
    if backend is None:
        function, args = pickle.loads(call)
        return function(rank, *args)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(backend)
    function, args = pickle.loads(call)
    return function(rank, *args)


def _failure(error: BaseException) -> bytes:
    text = traceback.format_exc()
    try:
        answer = pickle.dumps((None, error, text))
        pickle.loads(answer)
    except Exception:
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), text))
    return answer
