"""G12: what an older version wrote can be read. The runs beside this file were written once, and never again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import holdfast
from tests.compat.make_golden import Values, golden_parts, golden_values

FORMATS = sorted((Path(__file__).parent / "golden").glob("format-*"))


@pytest.mark.guarantee("G12")
@pytest.mark.parametrize("run", FORMATS, ids=lambda path: path.name)
def test_a_checkpoint_of_every_format_is_read_bit_for_bit(run: Path) -> None:
    assert holdfast.verify(run).ok
    checkpoint = holdfast.resolve(run, "golden")
    assert (checkpoint.step, checkpoint.metrics, checkpoint.progress) == (7, {"loss": 0.25}, {"tokens": 2**60})
    assert (checkpoint.extra, checkpoint.config) == ({"note": "golden"}, {"width": 3})
    values = Values()
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    components = {"model": model, "optimizer": optimizer, "values": values}
    with holdfast.CheckpointManager(run, components, rng=False) as manager:
        assert manager.restore().step == 7
    expected = golden_parts()
    for one, other in zip(model.parameters(), expected["model"].parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(optimizer.state[one]["momentum_buffer"], -other)
    assert optimizer.param_groups[0]["lr"] == 0.5
    wanted = golden_values()
    assert values.state.keys() == wanted.keys()
    for name, value in wanted.items():
        assert same(values.state[name], value), name


def test_every_format_up_to_the_newest_has_its_golden_run() -> None:
    from holdfast.ondisk.manifest import FORMAT

    assert [path.name for path in FORMATS] == [f"format-{number}" for number in range(1, FORMAT + 1)]


def same(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(other, numpy.ndarray):
        return one.dtype == other.dtype and numpy.array_equal(one, other)
    return type(one) is type(other) and bool(one == other)
