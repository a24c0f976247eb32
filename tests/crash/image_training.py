"""A training on a file system that is recorded, in real processes; and what must hold on every disk after a power cut.

The marks say what the training was told, in the order in which it was: `committed RUN STEP` once a save had returned as
committed, `tagged RUN STEP` once a tag had been set. A run's name ends with the number of its ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

import holdfast
from holdfast.loading.pipeline import load
from holdfast.loading.records import LoadRequest
from holdfast.loading.resolve import locate
from holdfast.loading.strategy import LoadStrategy
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.selector import Selector
from tests.crash.runs import Part, Place, components

STEPS = (1, 2, 3, 4)
TAGGED = 2
KEPT = 2
MODES = ("sync", "async")


def train(rank: int, size: int, places: Sequence[tuple[str, str]]) -> None:
    """Save in both modes into a run on each mount, with retention and a tag, and mark what returned."""
    for mount, marks in places:
        for mode in MODES:
            _train(Path(mount) / f"{mode}-{size}", mode, rank, Path(marks))


def _train(run: Path, mode: Any, rank: int, marks: Path) -> None:
    live = _state(0, rank)
    with holdfast.CheckpointManager(run, live, mode=mode, keep=holdfast.KeepLast(KEPT), rng=False) as manager:
        for step in STEPS:
            _become(live, _state(step, rank))
            handle = manager.save(step)
            _become(live, _state(-77, rank))
            handle.wait()
            _mark(marks, f"committed {run.name} {step}")
            if step == TAGGED:
                manager.tag(step, "kept")
                _mark(marks, f"tagged {run.name} {step}")


def _state(step: int, rank: int) -> dict[str, Any]:
    """State that says which step and rank it is of. One tensor is streamed past the page cache, by several writes."""
    large = Part(step)
    large.tensor = torch.full((300_000,), float(step))
    return {**components(step, rank), "large": large}


def _become(live: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for name, part in other.items():
        _inner(live[name]).become(_inner(part))


def _inner(part: Any) -> Part:
    return getattr(part, "component", part)


def _mark(marks: Path, text: str) -> None:
    handle = os.open(marks, os.O_WRONLY)
    os.write(handle, text.encode())
    os.close(handle)


class Judge:
    """Say what is wrong with disks after power cuts. Runs whose every byte was judged before are not judged again."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], list[str]] = {}

    def violations(self, mounted: Path, marks: Sequence[str]) -> list[str]:
        """Of every run, what was marked must be there, whole, and the newest must be what a restart resumes from."""
        told: dict[str, dict[str, list[int]]] = {}
        for what, run, step in map(str.split, marks):
            told.setdefault(run, {}).setdefault(what, []).append(int(step))
        runs = {path.name for path in mounted.iterdir() if path.name != "lost+found"} | told.keys()
        return [text for run in sorted(runs) for text in self._judged(mounted / run, told.get(run, {}))]

    def _judged(self, run: Path, told: Mapping[str, Sequence[int]]) -> list[str]:
        if not run.is_dir():
            return [f"{run.name} is gone, and step {told['committed'][-1]} was committed"] if told else []
        case = (_content(run), f"{run.name} {told}")
        if case not in self._known:
            self._known[case] = _wrong(run, told)
        return self._known[case]


def go_on(mounted: Path) -> list[str]:
    """Resume every run of one process as a restart would, save once more, and return what is wrong then."""
    wrong = []
    for run in sorted(path for path in mounted.iterdir() if path.name.endswith("-1")):
        live = _state(-1, 0)
        with holdfast.CheckpointManager(run, live, mode="sync", keep=holdfast.KeepLast(KEPT), rng=False) as manager:
            step = manager.restore().next_step
            _become(live, _state(step, 0))
            manager.save(step)
        wrong += _wrong(run, {"committed": [step]})
    return wrong


def _content(run: Path) -> str:
    """A digest of every name and byte of a run."""
    digest = blake3()
    for folder, folders, files in os.walk(run):
        folders.sort()
        for name in sorted(files):
            path = Path(folder, name)
            content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
            digest.update(f"{path.relative_to(run)} {len(content)} ".encode() + content)
        digest.update("".join(f"{name}/" for name in folders).encode())
    return digest.hexdigest()


def _wrong(run: Path, told: Mapping[str, Sequence[int]]) -> list[str]:
    committed, tagged = told.get("committed", ()), told.get("tagged", ())
    catalog, _ = locate(run)
    scan = catalog.scan()
    wrong = [f"{run.name}: damaged: {skipped}" for skipped in scan.damaged]
    found = {checkpoint.step: checkpoint for checkpoint in scan.checkpoints}
    # Retention removes an old one only after a newer one is committed, whether the training was told of that or not.
    needed = {*sorted({*committed, *found})[-KEPT:], *tagged}
    wrong += [f"{run.name}: step {step} was committed and is gone" for step in sorted(needed - found.keys())]
    untagged = [step for step in tagged if step in found and "kept" not in found[step].tags]
    wrong += [f"{run.name}: the tag of step {step} is gone" for step in untagged]
    for checkpoint in scan.checkpoints:
        report = holdfast.verify(run, checkpoint.step)
        wrong += [f"{run.name}: step {checkpoint.step}: {problem}" for problem in report.problems]
    if not wrong and found:
        wrong += _wrongly_restored(catalog, run.name, found[max(found)])
    return wrong


def _wrongly_restored(catalog: Catalog, run: str, newest: Checkpoint) -> list[str]:
    wrong = []
    size = int(run.rpartition("-")[2])
    for rank in range(size):
        live, expected = _state(-1, rank), _state(newest.step, rank)
        try:
            loaded = load(LoadRequest(Selector("latest"), live, LoadStrategy()), catalog, Place(rank, size))
        except Exception as error:
            return [f"{run}: step {newest.step} cannot be restored: {error}"]
        if loaded is None or loaded.checkpoint.step != newest.step:
            wrong.append(f"{run}: another checkpoint than step {newest.step} was restored")
        elif any(_inner(live[name]) != _inner(expected[name]) for name in live):
            wrong.append(f"{run}: step {newest.step}, rank {rank} is not what was saved")
    return wrong
