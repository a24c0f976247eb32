"""What Holdfast tests itself with, for your tests: storages that crash, fail for a moment, fill up and lose power, and
real ranks.

The names are loaded when they are first used: only `run_ranks` and `assert_exact_resume` bring torch, only
`StorageContract` brings pytest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.testing.contract.storage import StorageContract
    from holdfast.testing.exact_resume import assert_exact_resume
    from holdfast.testing.hostile import HostileRun, hostile_runs
    from holdfast.testing.power import PowerLossDisk, PowerLossStorage
    from holdfast.testing.processes import Outcome, run_ranks, values
    from holdfast.testing.simulation import simulate_ranks
    from holdfast.testing.storages import (
        CrashingStorage,
        FlakyStorage,
        FullStorage,
        MemoryStorage,
        SimulatedCrash,
        SlowStorage,
    )

__all__ = [
    "CrashingStorage",
    "FlakyStorage",
    "FullStorage",
    "HostileRun",
    "MemoryStorage",
    "Outcome",
    "PowerLossDisk",
    "PowerLossStorage",
    "SimulatedCrash",
    "SlowStorage",
    "StorageContract",
    "assert_exact_resume",
    "hostile_runs",
    "run_ranks",
    "simulate_ranks",
    "values",
]

_MODULES = {
    "CrashingStorage": "storages",
    "FlakyStorage": "storages",
    "FullStorage": "storages",
    "HostileRun": "hostile",
    "MemoryStorage": "storages",
    "Outcome": "processes",
    "PowerLossDisk": "power",
    "PowerLossStorage": "power",
    "SimulatedCrash": "storages",
    "SlowStorage": "storages",
    "StorageContract": "contract",
    "assert_exact_resume": "exact_resume",
    "hostile_runs": "hostile",
    "run_ranks": "processes",
    "simulate_ranks": "simulation",
    "values": "processes",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
