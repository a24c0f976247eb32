"""How much memory does an asynchronous save take besides the state?

Each contender runs in a process of its own. From outside, the proportional set size of that process and of all it
started is summed while it saves three times; memory that they share is counted once. What counts is the most that was
seen, less what was there before the contender was set up.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import savers
from measure import arguments, at_most, bars_table, write_results
from processes import family, give_back_memory, marked_environment, memory_bytes
from states import gpt_state

SAVES = 3
SAMPLE_SECONDS = 0.02


@dataclass
class Growth:
    """Bytes of one contender: of the state, on top of it at most, and on top of it at the end."""

    name: str
    state_bytes: int = 0
    peak_bytes: int = 0
    kept_bytes: int = 0
    samples: int = 0
    skipped: str = ""


def watch(index: int, name: str, folder: Path, mode: str, small: bool) -> Growth:
    """Start the contender in a process of its own and look at it until it has saved."""
    command = [sys.executable, __file__, str(folder), "1", "--one", str(index), "--mode", mode]
    growth = Growth(name)
    mark, environment = marked_environment()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command + ["--small"] * small, env=environment, **pipes) as process:
        sampler = Sampler(process.pid, mark)
        for line in process.stdout:
            note = json.loads(line)
            if note["event"] == "ready":
                growth.state_bytes = note["state_bytes"]
                sampler.start()
                print("go", file=process.stdin, flush=True)
            elif note["event"] == "saved":
                growth.kept_bytes = sampler.stop()
                print("end", file=process.stdin, flush=True)
            elif note["event"] == "skipped":
                growth.skipped = note["reason"]
        sampler.stop()
    growth.peak_bytes, growth.samples = sampler.peak, sampler.samples
    return growth


@dataclass
class Sampler:
    """The growth of a family of processes from `start` on."""

    pid: int
    mark: str
    base: int = 0
    peak: int = 0
    last: int = 0
    samples: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def start(self) -> None:
        self.base = memory_bytes(family(self.pid, self.mark))
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()

    def stop(self) -> int:
        self.ended.set()
        if self.thread is not None:
            self.thread.join()
        return self.last

    def _sample(self) -> None:
        while not self.ended.is_set():
            self.last = memory_bytes(family(self.pid, self.mark)) - self.base
            self.peak = max(self.peak, self.last)
            self.samples += 1
            time.sleep(SAMPLE_SECONDS)


def be_watched(factory: savers.Factory, folder: Path, small: bool) -> None:
    """The contender's own process: make the state, wait to be looked at, save."""
    state = gpt_state(small)
    saver = factory(folder, state)
    give_back_memory()
    say(event="ready", state_bytes=state.size_bytes)
    sys.stdin.readline()
    try:
        saver.open()
        for number in range(SAVES):
            saver.clear()
            pending = saver.save(number)
            savers.wait_until_staged(pending)
            pending.finish()
    except Exception as error:  # a peer that does not run here is left out and said to be
        say(event="skipped", reason=savers.reason(error))
        return
    say(event="saved")
    sys.stdin.readline()
    saver.close()


def say(**note: object) -> None:
    print(json.dumps(note), flush=True)


def table(growths: Sequence[Growth]) -> str:
    lines = [
        "| what | most, parts of the state | GB | kept between saves, GB | samples |",
        "|---|---:|---:|---:|---:|",
    ]
    for one in growths:
        if one.skipped:
            lines.append(f"| {one.name} | skipped: {one.skipped} | | | |")
            continue
        share, peak, kept = one.peak_bytes / one.state_bytes, one.peak_bytes / 1e9, one.kept_bytes / 1e9
        lines.append(f"| {one.name} | {share:.2f} | {peak:.2f} | {kept:.2f} | {one.samples} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--one", type=int, help="be the contender of this number, watched by another process")
    given = parser.parse_args()
    factories = [*savers.ours(given.mode), *savers.async_peers()]
    if given.one is not None:
        be_watched(factories[given.one], given.folder, given.small)
        return
    growths = []
    empty = savers.State("", {}, {})
    for index, factory in enumerate(factories):
        growths.append(watch(index, factory(given.folder, empty).name, given.folder, given.mode, given.small))
        print(f"  {growths[-1]}", flush=True)
    mine = growths[0]
    share = mine.peak_bytes / mine.state_bytes if mine.state_bytes and not mine.skipped else None
    bar = at_most("extra memory during an asynchronous save", share, 1.1, "of the rank's state", unit="x")
    text = f"## Memory on top of the state during {SAVES} saves\n\n{bars_table([bar])}\n{table(growths)}"
    write_results("memory", text, {one.name: asdict(one) for one in growths}, given.results)


if __name__ == "__main__":
    main()
