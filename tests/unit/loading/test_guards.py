"""Guards that differ are an error, shown so that the difference can be seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import holdfast


@pytest.mark.parametrize(
    ("saved", "live", "said"),
    [
        (1, 2, "1 in the checkpoint, 2 now"),
        ((1, (2, 3)), [1, [2, 3]], "tuple([1, tuple([2, 3])]) in the checkpoint, [1, [2, 3]] now"),
        ({"a": (1,)}, {"a": [1]}, "{'a': tuple([1])} in the checkpoint, {'a': [1]} now"),
        (1, "1", "1 in the checkpoint, '1' now"),
        (numpy.float32(1), 1.0, "numpy <f4 1.0 in the checkpoint, 1.0 now"),
        ([0] * 100 + [1], [0] * 100 + [2], "... 0, 0, 0, 1] in the checkpoint, ... 0, 0, 0, 2] now"),
        (["a" * 200], ["a" * 200, 1], "...aaaaaaaaa'] in the checkpoint, ...aaaaaaaaa', 1] now"),
        ("b" * 200, "c" * 200, f"{'b' * 77}... in the checkpoint, {'c' * 77}... now"),
    ],
    ids=["values", "tuple", "tuple inside", "text", "numpy", "far inside", "longer", "long"],
)
def test_a_guard_that_differs_is_shown_so_that_it_does(tmp_path: Path, saved: Any, live: Any, said: str) -> None:
    components = {"model": torch.nn.Linear(4, 2)}
    with holdfast.CheckpointManager(tmp_path, components) as manager:
        manager.save(1, guards={"b": saved})
        with pytest.raises(holdfast.GuardMismatchError) as caught:
            manager.restore(guards={"b": live})
    assert f"guards differ: b: {said}; restore with" in str(caught.value)


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        (numpy.zeros(3), numpy.ones(3)),
        (numpy.datetime64("2024-01-01"), numpy.datetime64("2024-01-02")),
        (b"abc", b"abd"),
        ("x" * 79 + "a", "x" * 79 + "b"),
    ],
    ids=["arrays", "dates", "bytes", "at the edge"],
)
def test_guards_that_differ_never_look_alike(tmp_path: Path, saved: Any, live: Any) -> None:
    components = {"model": torch.nn.Linear(4, 2)}
    with holdfast.CheckpointManager(tmp_path, components) as manager:
        manager.save(1, guards={"b": saved})
        with pytest.raises(holdfast.GuardMismatchError) as caught:
            manager.restore(guards={"b": live})
    old, new = caught.value.guards["b"]
    assert old != new
    assert max(len(old), len(new)) <= 80
