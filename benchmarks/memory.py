"""How much memory does an asynchronous save take besides the state, and how much a restore?

Each contender runs in a process of its own. From outside, the proportional set size of that process and of all it
started is summed while it saves three times, or loads twice into live tensors; memory that they share is counted once.
What counts is the most that was seen, less what was there before the contender was set up. Shared memory, which is
where a trainer hands its state to a writer, is also counted by itself, that of the whole machine: nothing else may run.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import restore
import savers
from measure import Bar, Number, arguments, at_most, bars_table, reason, write_results
from processes import family, give_back_memory, marked_environment, memory_bytes, shared_memory_bytes
from states import State, gpt_state

SAVES = 3
LOADS = 2
SAMPLE_SECONDS = 0.02


@dataclass
class Growth:
    """Bytes of one contender: of the state, on top of it at most, and on top of it at the end."""

    name: str
    state_bytes: int = 0
    peak_bytes: int = 0
    shared_bytes: int = 0
    kept_bytes: int = 0
    samples: int = 0
    skipped: str = ""

    def share(self, amount: int) -> Number:
        return amount / self.state_bytes if self.state_bytes and not self.skipped else None


def watch(name: str, command: Sequence[str]) -> Growth:
    """Start the contender in a process of its own and look at it until it is done."""
    growth = Growth(name)
    mark, environment = marked_environment()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, __file__, *command], env=environment, **pipes) as process:
        sampler = Sampler(process.pid, mark)
        for line in process.stdout:
            note = json.loads(line)
            if note["event"] == "ready":
                growth.state_bytes = note["state_bytes"]
                sampler.start()
                print("go", file=process.stdin, flush=True)
            elif note["event"] == "done":
                growth.kept_bytes = sampler.stop()
                print("end", file=process.stdin, flush=True)
            elif note["event"] == "skipped":
                growth.skipped = note["reason"]
        sampler.stop()
    growth.peak_bytes, growth.shared_bytes, growth.samples = sampler.peak, sampler.shared, sampler.samples
    print(f"  {growth}", flush=True)
    return growth


@dataclass
class Sampler:
    """The growth of a family of processes from `start` on."""

    pid: int
    mark: str
    base: int = 0
    shared_base: int = 0
    peak: int = 0
    shared: int = 0
    last: int = 0
    samples: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def start(self) -> None:
        pids = family(self.pid, self.mark)
        self.base, self.shared_base = memory_bytes(pids), shared_memory_bytes()
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()

    def stop(self) -> int:
        """Look once more, and return what that shows."""
        self.ended.set()
        if self.thread is not None:
            self.thread.join()
            self._look()
            self.thread = None
        return self.last

    def _sample(self) -> None:
        while not self.ended.is_set():
            self._look()
            time.sleep(SAMPLE_SECONDS)

    def _look(self) -> None:
        pids = family(self.pid, self.mark)
        self.last = memory_bytes(pids) - self.base
        self.peak = max(self.peak, self.last)
        self.shared = max(self.shared, shared_memory_bytes() - self.shared_base)
        self.samples += 1


# In the process of a contender


def be_watched(state: State, act: Callable[[], object], close: Callable[[], object]) -> None:
    """Wait to be looked at, and do it."""
    give_back_memory()
    say(event="ready", state_bytes=state.size_bytes)
    sys.stdin.readline()
    try:
        act()
    except Exception as error:  # a peer that does not run here is left out and said to be
        say(event="skipped", reason=reason(error))
        return
    say(event="done")
    sys.stdin.readline()
    close()


def save_watched(factory: savers.Factory, folder: Path, small: bool) -> None:
    state = gpt_state(small)
    saver = factory(folder, state)

    def act() -> None:
        saver.open()
        for number in range(SAVES):
            saver.clear()
            pending = saver.save(number)
            savers.wait_until_staged(pending)
            pending.finish()

    be_watched(state, act, saver.close)


def load_watched(name: str, folder: Path, small: bool) -> None:
    """Load twice; the files are made by the first process that needs them."""
    state = gpt_state(small)
    files = restore.Files.of(state, folder, reuse=True)

    def act() -> None:
        load = LOADERS[name](files, state)
        for number in range(LOADS):
            load(number)

    be_watched(state, act, lambda: None)


LOADERS: dict[str, Callable[[restore.Files, State], Callable[[int], object]]] = {
    restore.MINE: lambda files, state: restore.mine(files, state, "full"),
    "torch.load + copy": restore.with_torch,
    restore.SAFETENSORS: restore.with_safetensors,
    "dcp.load, all live": restore.with_dcp,
    "fastsafetensors + copy": restore.with_fastsafetensors,
    "runai-model-streamer + copy": restore.with_runai,
}


def say(**note: object) -> None:
    print(json.dumps(note), flush=True)


# In the process that looks


def table(growths: Sequence[Growth]) -> str:
    lines = [
        "| what | most, parts of the state | GB | of it shared memory, parts | kept at the end, GB | samples |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for one in growths:
        if one.skipped:
            lines.append(f"| {one.name} | skipped: {one.skipped} | | | | |")
            continue
        share, peak, kept = one.peak_bytes / one.state_bytes, one.peak_bytes / 1e9, one.kept_bytes / 1e9
        shared = one.shared_bytes / one.state_bytes
        lines.append(f"| {one.name} | {share:.2f} | {peak:.2f} | {shared:.3f} | {kept:.2f} | {one.samples} |")
    return "\n".join(lines) + "\n"


def bars(saving: Growth, loading: Growth) -> list[Bar]:
    return [
        at_most("arena of an asynchronous save", saving.share(saving.shared_bytes), 1.01, "of the rank's state", "x"),
        at_most("all extra memory during it", saving.share(saving.peak_bytes), 1.1, "of the rank's state", "x"),
        at_most("extra memory during a restore", loading.share(loading.peak_bytes), 1.1, "of the rank's state", "x"),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--one", type=int, help="be the saver of this number, watched by another process")
    parser.add_argument("--load", default="", help="be the loader of this name, watched by another process")
    given = parser.parse_args()
    factories = [*savers.ours(given.mode), *savers.reusing_async_peers()]
    if given.one is not None:
        save_watched(factories[given.one], given.folder, given.small)
        return
    if given.load:
        load_watched(given.load, given.folder, given.small)
        return
    command = [str(given.folder), "1", "--mode", given.mode, *["--small"] * given.small]
    empty = State("", {}, {})
    names = [factory(given.folder, empty).name for factory in factories]
    saving = [watch(name, [*command, "--one", str(index)]) for index, name in enumerate(names)]
    loading = [watch(name, [*command, "--load", name]) for name in LOADERS]
    text = (
        f"## Memory on top of the state\n\n{bars_table(bars(saving[0], loading[0]))}\n"
        f"### During {SAVES} saves\n\n{table(saving)}\n### During {LOADS} loads into live tensors\n\n{table(loading)}"
    )
    numbers = {"saves": [asdict(one) for one in saving], "loads": [asdict(one) for one in loading]}
    write_results("memory", text, numbers, given.results)
    shutil.rmtree(given.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
