"""Write the run that `test_golden.py` reads. Run once per format version; what it wrote is never changed."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch

import holdfast


class Values:
    """A component with one of everything that is worth remembering."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self.state = state or {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def golden_values() -> dict[str, Any]:
    return {
        "int": 2**80 + 1,
        "float": 0.1,
        "inf": float("inf"),
        "tuple": (1, (2.5, None), "ä"),
        "keys": {1: "a", (2, 3): "b", None: "c"},
        "set": {3, 1, 2},
        "bytes": b"\x00\xff",
        "time": datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
        "array": numpy.arange(6, dtype=numpy.int16).reshape(2, 3),
        "long": numpy.arange(400, dtype=numpy.float64),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "tensor": torch.arange(5, dtype=torch.float16),
        "empty": torch.empty(0, 3),
        "truth": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j], dtype=torch.complex128),
    }


def golden_parts() -> dict[str, Any]:
    """A model and an optimizer whose numbers follow from arithmetic that does not change between versions."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 4)
            optimizer.state[parameter]["momentum_buffer"] = -parameter.detach().clone()
    return {"model": model, "optimizer": optimizer}


if __name__ == "__main__":
    components = {**golden_parts(), "values": Values(golden_values())}
    with holdfast.CheckpointManager(Path(sys.argv[1]), components, rng=False, config={"width": 3}) as manager:
        manager.save(7, metrics={"loss": 0.25}, progress={"tokens": 2**60}, extra={"note": "golden"}, tag="golden")
