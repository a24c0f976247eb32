"""Check that a training of yours resumes exactly. A function enters; nothing leaves, or the first difference is raised.

The training runs in new processes, once without a break and once with stops, into two runs. What both saved is compared
leaf by leaf, by the digests and values that the checkpoints hold; so is what the function returned.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any

from holdfast.errors import UsageError
from holdfast.manager.functions import checkpoints
from holdfast.ondisk.codec import Json, plain, typed
from holdfast.ondisk.decoding import from_json
from holdfast.ondisk.manifest import TensorRecord, TreeRecord
from holdfast.runs.checkpoint import Checkpoint
from holdfast.state.rng import RNGState
from holdfast.testing.processes import StartMethod, run_ranks, values

__all__ = ["assert_exact_resume"]

_SHOWN_CHARACTERS = 60
# What is most often the cause comes first: weights differ because something else did.
_ORDER = ("values", "optimizer", "module")


def assert_exact_resume(
    train: Callable[[str, int], Mapping[int, float] | None],
    *,
    until: int,
    stops: Sequence[int],
    ranks: int = 1,
    folder: str | Path | None = None,
    timeout_seconds: float = 300.0,
    start: StartMethod = "spawn",
) -> None:
    """Raise an AssertionError unless a training that is stopped and resumed saves the same as one that is not.

    `train(run, until)` builds everything anew, restores what the run has, trains until `until` steps are done in all,
    saves at its end at least, and closes its manager. It may return a number, such as the loss, for each step that it
    did. It must be at the top level of a module, and is called in new processes: on `ranks` ranks, with a process group
    where there are several. How long a schedule is must not depend on `until`, which is only where a start ends. The
    global generators of Python, NumPy and torch are seeded before the call: alike for the first start of both runs, and
    with another seed for every later one.

    The training is started once with `until`, and in another run once with each of `stops` and then with `until`. The
    error names the first step at which the two runs differ, and of every component that differs the first tensor or
    value: exact to the step where `train` saves every step. `folder` keeps both runs; it must not hold any.

    `start` is that of `run_ranks`: "forkserver" takes less time, and misses what depends on the order of a set.
    """
    _check(train, until, stops, ranks)
    with _folder(folder) as base:
        whole = _Run(base / "uninterrupted", train, ranks, timeout_seconds, start)
        whole.start(until)
        resumed = _Run(base / "resumed", train, ranks, timeout_seconds, start)
        for number, stop in enumerate([*stops, until]):
            resumed.start(stop)
            if number == 0:
                _require_repeatable(whole, resumed)
            else:
                _require_same(whole, resumed)
        _require_same_end(whole, resumed)


def _check(train: object, until: int, stops: Sequence[int], ranks: int) -> None:
    steps = [0, *stops, until]
    if not stops or any(left >= right for left, right in pairwise(steps)):
        raise UsageError(
            f"stops={list(stops)} and until={until}", advice="give stops that grow, the first above 0, all below until"
        )
    if ranks < 1:
        raise UsageError(f"ranks={ranks}", advice="give the number of processes, at least 1")
    found: Any = sys.modules.get(getattr(train, "__module__", ""))
    for name in getattr(train, "__qualname__", "?").split("."):
        found = getattr(found, name, None)
    if found is not train:
        raise UsageError(
            f"train={train!r:.100} cannot be called in a new process", advice="define it at the top level of a module"
        )


@contextmanager
def _folder(folder: str | Path | None) -> Iterator[Path]:
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="holdfast-exact-resume-") as made:
            yield Path(made)
        return
    for name in ("uninterrupted", "resumed"):
        if Path(folder, name).exists():
            raise UsageError(f"'{Path(folder, name)}' exists already", advice="give a folder without earlier runs")
    yield Path(folder)


class _Run:
    """One of the two runs: its starts, what they returned, and what they saved."""

    def __init__(
        self, path: Path, train: Callable[..., Any], ranks: int, timeout_seconds: float, start: StartMethod
    ) -> None:
        self.path = path
        self.saved: dict[int, Checkpoint] = {}
        self.returned: list[dict[int, float]] = [{} for _ in range(ranks)]
        # The newest checkpoint when the latest start began, and the first one that it added.
        self.before: Checkpoint | None = None
        self.first_added: Checkpoint | None = None
        self._starts = 0
        self._train = train
        self._timeout_seconds = timeout_seconds
        self._start_method = start

    def start(self, until: int) -> None:
        ranks = len(self.returned)
        outcomes = run_ranks(
            ranks,
            _train_on,
            self._train,
            str(self.path),
            until,
            self._starts,
            timeout_seconds=self._timeout_seconds,
            backend=None if ranks == 1 else "gloo",
            start=self._start_method,
        )
        for steps, new in zip(self.returned, values(outcomes), strict=True):
            steps.update(_numbers(new))
        self._starts += 1
        self._note_saved(until)

    def _note_saved(self, until: int) -> None:
        self.before = max(self.saved.values(), key=lambda one: one.sequence, default=None)
        found = sorted(checkpoints(self.path), key=lambda one: one.sequence)
        added = [one for one in found if self.before is None or one.sequence > self.before.sequence]
        if not added:
            raise UsageError(
                f"train({str(self.path)!r}, {until}) saved no checkpoint",
                advice="save at the end of every start: the next one resumes from there",
            )
        self.first_added = added[0]
        self.saved = {one.step: one for one in found}


def _train_on(rank: int, train: Callable[[str, int], Any], run: str, until: int, start: int) -> Any:
    """Call the training with known random states. A start that resumes has others than the first one had: what is not
    restored must not be right by chance."""
    import numpy
    import torch

    seed = 1000 * start + rank
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    return train(run, until)


def _numbers(returned: object) -> dict[int, float]:
    if returned is None:
        return {}
    if isinstance(returned, Mapping) and all(
        isinstance(step, int) and isinstance(value, Real) for step, value in returned.items()
    ):
        return {step: float(value) for step, value in returned.items()}
    raise UsageError(
        f"train returned {returned!r:.100}", advice="return None, or a number for each step: {step: loss.item()}"
    )


def _require_repeatable(whole: _Run, resumed: _Run) -> None:
    """Raise if two starts from scratch differ before the first stop: then resuming is not the cause of a difference."""
    step, lines = _first_difference(whole, resumed)
    if lines:
        head = f"the training does not repeat itself: two starts from the front differ at step {step}, before any stop"
        raise AssertionError(_text(head, lines, "seed every generator, and use deterministic algorithms"))


def _require_same(whole: _Run, resumed: _Run) -> None:
    stop, first = resumed.before, resumed.first_added
    if stop is None or first is None:
        raise RuntimeError("the training has not been stopped")
    if first.parent != stop.digest:
        raise AssertionError(
            f"resuming is not exact: the start after the stop at step {stop.step} did not continue from that "
            f"checkpoint: what it saved first, step {first.step}, goes back to "
            f"{'another' if first.parent else 'none'}; call restore() before the first step"
        )
    step, lines = _first_difference(whole, resumed)
    if lines:
        head = f"resuming is not exact: after the stop at step {stop.step}, step {step} differs first"
        raise AssertionError(_text(head, lines, _hint(first)))


def _require_same_end(whole: _Run, resumed: _Run) -> None:
    ends = max(whole.saved), max(resumed.saved)
    if ends[0] != ends[1]:
        raise AssertionError(
            f"resuming is not exact: the uninterrupted run ends with step {ends[0]}, the resumed one with {ends[1]}"
        )
    for rank, (left, right) in enumerate(zip(whole.returned, resumed.returned, strict=True)):
        for step in sorted(left.keys() ^ right.keys()):
            raise AssertionError(
                f"resuming is not exact: of step {step} train returned a number only in the "
                f"{'uninterrupted' if step in left else 'resumed'} run (rank {rank})"
            )


def _hint(checkpoint: Checkpoint) -> str:
    """Return a hint if a checkpoint has no random state: the most common cause, which no leaf can name."""
    if any(record.name.endswith(".torch") for record in checkpoint.manifest.tensors):
        return ""
    return f"no component holds the random state: add a {RNGState.__name__}(), or leave rng=True"


def _text(head: str, lines: Sequence[str], advice: str) -> str:
    return "\n  ".join([head, *lines]) + (f"\n{advice}" if advice else "")


def _first_difference(whole: _Run, resumed: _Run) -> tuple[int, list[str]]:
    """Return the first step at which the runs differ, if both have it, and a line for every component that does."""
    found: dict[int, list[str]] = {}
    for rank, (left, right) in enumerate(zip(whole.returned, resumed.returned, strict=True)):
        for step in sorted(left.keys() & right.keys()):
            if left[step] != right[step] and (left[step] == left[step] or right[step] == right[step]):
                found.setdefault(step, []).append(
                    f"returned by train, rank {rank}: {left[step]!r} uninterrupted, {right[step]!r} resumed"
                )
                break
    for step in sorted(whole.saved.keys() & resumed.saved.keys()):
        lines = _differences(whole.saved[step], resumed.saved[step])
        if lines:
            found[step] = lines + found.get(step, [])
            break
    return (min(found), found[min(found)]) if found else (0, [])


def _differences(left: Checkpoint, right: Checkpoint) -> list[str]:
    """Return a line for every component that differs, with the first tensor or value of it that does."""
    trees = [{tree.name: tree for tree in one.manifest.trees} for one in (left, right)]
    tensors = [_tensors_by_tree(one) for one in (left, right)]
    names = sorted(trees[0].keys() | trees[1].keys(), key=lambda name: _place(trees[0].get(name) or trees[1][name]))
    lines = []
    for name in names:
        if name not in trees[0] or name not in trees[1]:
            lines.append(
                f"component '{name}': only in the {'resumed' if name not in trees[0] else 'uninterrupted'} run"
            )
            continue
        found = [
            *_different_values(_values_of(left, trees[0][name]), _values_of(right, trees[1][name])),
            *_different_tensors(tensors[0].get(name, {}), tensors[1].get(name, {})),
        ]
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            lines.append(f"component '{name}': {found[0]}{more}")
    return lines


def _place(tree: TreeRecord) -> tuple[int, str]:
    return (_ORDER.index(tree.kind) if tree.kind in _ORDER else 0, tree.name)


def _tensors_by_tree(checkpoint: Checkpoint) -> dict[str, dict[str, TensorRecord]]:
    found: dict[str, dict[str, TensorRecord]] = {}
    for record in checkpoint.manifest.tensors:
        found.setdefault(record.name.partition(".")[0], {})[record.name] = record
    return found


def _different_tensors(left: Mapping[str, TensorRecord], right: Mapping[str, TensorRecord]) -> list[str]:
    lines = []
    for name in sorted(left.keys() | right.keys()):
        one, other = left.get(name), right.get(name)
        if one is None or other is None:
            lines.append(f"tensor '{name}' only in the {'resumed' if one is None else 'uninterrupted'} run")
        elif (one.dtype, one.shape) != (other.dtype, other.shape):
            lines.append(f"tensor '{name}' is {_shown(one)} uninterrupted, {_shown(other)} resumed")
        elif _content(one) != _content(other):
            lines.append(f"tensor '{name}' ({_shown(one)}) has other bytes")
    return lines


def _content(record: TensorRecord) -> list[tuple[Any, ...]]:
    return sorted((chunk.offsets, chunk.sizes, chunk.digests) for chunk in record.chunks)


def _shown(record: TensorRecord) -> str:
    return f"{record.dtype} {list(record.shape)}"


def _values_of(checkpoint: Checkpoint, tree: TreeRecord) -> Json:
    size_bytes = next(file.size_bytes for file in checkpoint.manifest.files if file.name == tree.file)
    data = checkpoint.storage.read(checkpoint.key(tree.file), size_bytes)
    value: Json = from_json(data, dict[str, dict[str, Any]])["trees"][tree.name]
    return value


def _different_values(left: Json, right: Json) -> list[str]:
    if left == right:
        return []
    lines = list(_walk(plain(left), plain(right), ""))
    return lines or [
        f"values of other types: {typed(left)!s:.{_SHOWN_CHARACTERS}}, {typed(right)!s:.{_SHOWN_CHARACTERS}}"
    ]


def _walk(left: Any, right: Any, path: str) -> Iterator[str]:
    """Yield the paths at which two values differ, in order."""
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        for key in left:
            yield from _walk(left[key], right[key], f"{path}.{key}" if path else str(key))
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from _walk(one, other, f"{path}.{index}" if path else str(index))
    elif left != right:
        shown = [f"{value!r:.{_SHOWN_CHARACTERS}}" for value in (left, right)]
        yield f"value '{path}' is {shown[0]} uninterrupted, {shown[1]} resumed"
