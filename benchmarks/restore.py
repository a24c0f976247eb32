"""How long does a verified restore take? Holdfast, its peers, and a bare read of the same bytes, in the same run.

Warm, the files are in the page cache for everybody; cold, they are not, which is checked before each read. "All live"
overwrites a model and an optimizer that have trained, and were saved before unless it says otherwise. "Restarted" is
what a restarted run has: the model is there, the optimizer has no state yet. Peers load into memory of their own and
copy from there, where they have no way to load into live tensors. Of many small tensors the CPU seconds count.
"""

from __future__ import annotations

import argparse
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import holdfast
import raw
from measure import (
    Bar,
    Contender,
    arguments,
    at_least,
    at_most,
    bars_table,
    fastest,
    interleave,
    median,
    numbers_of,
    ratio,
    table,
    times,
    write_results,
)
from processes import give_back_memory
from states import State, gpt_state, many_state

MINE, RESTARTED = "holdfast, verified, all live", "holdfast, verified, restarted"
NOT_SAVED = "holdfast, verified, all live, no save before"
QUICK = "holdfast, quick, all live"
SAFETENSORS = "safetensors + copy"
DIGESTED = "raw read and digest, 2 threads"
CHECKED = "raw O_DIRECT read, digest and copy, 4 + 2 threads"


@dataclass(frozen=True)
class Files:
    """The state as each contender has it on the disk."""

    run: Path
    torch: Path
    safetensors: Path
    dcp: Path

    @classmethod
    def of(cls, state: State, folder: Path, *, reuse: bool = False) -> Files:
        folder.mkdir(parents=True, exist_ok=True)
        found = cls(folder / "run", folder / "state.pt", folder / "state.safetensors", folder / "dcp")
        if reuse and found.run.exists():
            return found
        with holdfast.CheckpointManager(found.run, state.components, mode="sync") as manager:
            manager.save(0)
        torch.save(dict(state.tensors), found.torch)
        save_file(dict(state.tensors), found.safetensors)
        dcp.save(dict(state.tensors), checkpoint_id=found.dcp, no_dist=True)
        return found


# The ways to load. Each returns what is timed.


def mine(files: Files, state: State, verify: str) -> Callable[[int], object]:
    """By a manager that has saved nothing."""
    manager = holdfast.CheckpointManager(files.run, state.components, mode="sync", verify=verify)
    return lambda number: manager.restore()


def mine_after_a_save(files: Files, state: State) -> Callable[[int], object]:
    """By the manager of a training that saves to a run of its own."""
    manager = holdfast.CheckpointManager(files.run.with_name("own"), state.components, mode="async")
    manager.save(0, resave=True).wait()
    return lambda number: manager.restore(files.run)


class Restarted:
    """A manager over the live model and an optimizer without state, new for each round."""

    def __init__(self, files: Files, state: State) -> None:
        self.files = files
        self.model = state.components["model"]

    def prepare(self) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self.manager = holdfast.CheckpointManager(self.files.run, {"model": self.model, "optimizer": optimizer})

    def restore(self, number: int) -> None:
        self.manager.restore()


def with_torch(files: Files, state: State) -> Callable[[int], object]:
    return lambda number: copy_all(torch.load(files.torch), state)


def with_safetensors(files: Files, state: State) -> Callable[[int], object]:
    return lambda number: copy_all(load_file(files.safetensors), state)


def with_dcp(files: Files, state: State) -> Callable[[int], object]:
    return lambda number: dcp.load(dict(state.tensors), checkpoint_id=files.dcp, no_dist=True)


def with_fastsafetensors(files: Files, state: State) -> Callable[[int], object]:
    def load(number: int) -> None:
        from fastsafetensors import fastsafe_open

        with fastsafe_open([str(files.safetensors)], nogds=True, device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                state.tensors[name].copy_(opened.get_tensor(name))

    return load


def with_runai(files: Files, state: State) -> Callable[[int], object]:
    def load(number: int) -> None:
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(files.safetensors))
            for name, tensor in streamer.get_tensors():
                state.tensors[name].copy_(tensor)

    return load


def copy_all(found: dict[str, torch.Tensor], state: State) -> None:
    for name, tensor in found.items():
        state.tensors[name].copy_(tensor)


# The questions


def contenders(files: Files, state: State, *, cold: bool) -> list[Contender]:
    """Everybody, with the files that it reads brought into the page cache, or out of it, before each round."""

    def before(path: Path, more: Callable[[], object] = lambda: None) -> Callable[[int], object]:
        def prepare(number: int) -> None:
            more()
            (raw.cool if cold else raw.warm)(raw.files_of(path))

        return prepare

    ours, saved = before(files.run), before(files.safetensors)
    found = raw_cold(files, ours) if cold else raw_warm(files, ours, saved)
    if "optimizer" in state.components:
        restarted = Restarted(files, state)
        found.append(Contender(RESTARTED, restarted.restore, before(files.run, restarted.prepare), "holdfast"))
    return [
        *found,
        Contender(MINE, mine_after_a_save(files, state), ours, "holdfast"),
        Contender(NOT_SAVED, mine(files, state, "full"), ours, "holdfast"),
        Contender(QUICK, mine(files, state, "quick"), ours, "holdfast"),
        Contender("torch.load + copy", with_torch(files, state), before(files.torch)),
        Contender(SAFETENSORS, with_safetensors(files, state), saved),
        Contender("dcp.load, all live", with_dcp(files, state), before(files.dcp)),
        Contender("fastsafetensors + copy", with_fastsafetensors(files, state), saved),
        Contender("runai-model-streamer + copy", with_runai(files, state), saved),
    ]


def raw_warm(
    files: Files, prepare: Callable[[int], object], prepare_safetensors: Callable[[int], object]
) -> list[Contender]:
    """Read files into memory in use; nothing is checked and nothing is put in its place."""
    read = raw.files_of(files.run)
    target = raw.huge_pages(max(sum(path.stat().st_size for path in read), files.safetensors.stat().st_size))

    def copy(number: int) -> None:
        raw.copy_mapped(files.safetensors, target, 2)

    return [
        Contender("raw read, 2 threads", lambda number: raw.read_cached(read, target, 2), prepare, "limit"),
        Contender("raw copy of a mapping, 2 threads", copy, prepare_safetensors, "limit"),
        Contender(DIGESTED, lambda number: raw.read_and_digest(read, target, 2), prepare, "limit"),
    ]


def raw_cold(files: Files, prepare: Callable[[int], object]) -> list[Contender]:
    """Read files into buffers that are used again and whose content is not used, or to where the bytes stay."""
    read, buffers = raw.files_of(files.run), [raw.huge_pages(raw.PIECE_BYTES) for _ in range(4)]
    target = raw.huge_pages(len(raw.pieces(read)) * raw.PIECE_BYTES)
    stays = "raw O_DIRECT read to memory as large as the state"
    slots = [raw.huge_pages(4 << 20) for _ in range(16)]
    return [
        Contender("raw O_DIRECT read", lambda number: raw.read_direct(read, buffers[:1]), prepare, "limit"),
        Contender("raw O_DIRECT read, 4 threads", lambda number: raw.read_direct(read, buffers), prepare, "limit"),
        Contender(stays, lambda number: raw.read_direct_to(read, target), prepare, "limit"),
        Contender(CHECKED, lambda number: raw.read_direct_checked(read, slots, target), prepare, "limit"),
    ]


def warm_bars(group: Sequence[Contender]) -> list[Bar]:
    found = {one.name: median(one.seconds) for one in group}
    return [at_most("warm, all live", found[MINE], times(found[SAFETENSORS], 1.8), f"1.8x {SAFETENSORS}, unverified")]


def cold_bars(group: Sequence[Contender]) -> list[Bar]:
    found = {one.name: median(one.seconds) for one in group}
    limit = fastest([one for one in group if one.role == "limit"])
    return [
        at_least(f"cold, {what}: speed", ratio(limit, found[name]), 0.9, "of the faster raw O_DIRECT read")
        for what, name in (("restarted", RESTARTED), ("all live", MINE))
    ]


def many_bars(group: Sequence[Contender]) -> list[Bar]:
    found = {one.name: median(one.cpu_seconds) for one in group}
    what = "20,000 tensors of 4 KiB, warm, all live: CPU seconds"
    return [at_most(what, found[MINE], times(found[SAFETENSORS], 1.2), f"1.2x {SAFETENSORS}")]


def ask(state: State, folder: Path, rounds: int, *, cold: bool) -> list[Contender]:
    group = contenders(Files.of(state, folder, reuse=True), state, cold=cold)
    interleave(group, rounds)
    return group


def warm_question(given: argparse.Namespace) -> tuple[list[Contender], list[Bar], str]:
    state = gpt_state(given.small)
    group = ask(state, given.folder / "gpt", given.rounds, cold=False)
    return group, warm_bars(group), table(f"{state.title}, files in the page cache", group, state.size_bytes)


def cold_question(given: argparse.Namespace) -> tuple[list[Contender], list[Bar], str]:
    state = gpt_state(given.small)
    group = ask(state, given.folder / "gpt", given.rounds, cold=True)
    title = f"{state.title}, files not in the page cache"
    return group, cold_bars(group), table(title, group, state.size_bytes)


def many_question(given: argparse.Namespace) -> tuple[list[Contender], list[Bar], str]:
    state = many_state(given.small)
    group = ask(state, given.folder / "many", given.rounds, cold=False)
    return group, many_bars(group), table(f"{state.title}, files in the page cache", group, state.size_bytes)


QUESTIONS = {"warm": warm_question, "cold": cold_question, "many": many_question}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--questions", nargs="*", default=list(QUESTIONS), choices=list(QUESTIONS))
    given = parser.parse_args()
    logging.disable(logging.INFO)  # a peer logs every load
    bars: list[Bar] = []
    tables: list[str] = []
    numbers: dict[str, Any] = {}
    # Of some questions alone in a file of their own: the tables of all are of one run.
    name = "-".join(["restore", *(given.questions if given.questions != list(QUESTIONS) else ())])
    for key in given.questions:
        print(key, flush=True)
        group, found, text = QUESTIONS[key](given)
        bars += found
        tables.append(text)
        numbers[key] = numbers_of(group)
        del group
        give_back_memory()
    write_results(name, f"## Restore\n\n{bars_table(bars)}\n" + "\n".join(tables), numbers, given.results)
    shutil.rmtree(given.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
