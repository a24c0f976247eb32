"""The load by itself: the phases that it reports, and its agreements."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.loading.pipeline import load
from holdfast.loading.records import LoadRequest
from holdfast.loading.strategy import LoadStrategy
from holdfast.ondisk.codec import encode
from holdfast.ranks.base import Ranks
from holdfast.ranks.single import Alone
from holdfast.runs.catalog import Catalog
from holdfast.runs.selector import parse_selector
from holdfast.storage.registry import open_storage
from holdfast.testing import simulate_ranks
from tests.counting import calls


class Slow:
    """Takes its time where it takes its state back."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def state_dict(self) -> dict[str, Any]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        time.sleep(self.seconds)


def request(components: dict[str, Any], **guards: Any) -> LoadRequest:
    encoded = {name: encode(value, path=name, on_tensor=None) for name, value in guards.items()}
    return LoadRequest(parse_selector("latest"), components, LoadStrategy(), encoded)


@pytest.mark.parametrize("verify", ["full", "quick", "off"])
def test_a_restore_says_how_long_each_part_took(tmp_path: Path, verify: Any) -> None:
    components = {"model": torch.nn.Linear(4, 2), "slow": Slow(0.05)}
    with holdfast.CheckpointManager(tmp_path, components) as manager:
        manager.save(1)
    catalog = Catalog(open_storage(tmp_path))
    begin = time.monotonic()
    loaded = load(replace(request(components), verify=verify), catalog, Alone())
    seconds = time.monotonic() - begin
    assert loaded is not None
    assert list(loaded.phases) == ["resolve", "fit", "read", "restore"]
    assert all(phase > 0 for phase in loaded.phases.values())
    assert loaded.phases["restore"] >= 0.05
    assert sum(loaded.phases.values()) <= seconds


def test_the_phases_of_a_restore_that_passed_over_a_damaged_one_are_of_both(tmp_path: Path) -> None:
    components = {"model": torch.nn.Linear(4, 2)}
    with holdfast.CheckpointManager(tmp_path, components) as manager:
        manager.save(1)
        manager.save(2)
    damaged = next(tmp_path.glob("step-*2/*.safetensors"))
    data = damaged.read_bytes()
    header_bytes = 8 + int.from_bytes(data[:8], "little")
    damaged.write_bytes(data[:header_bytes] + bytes(255 - byte for byte in data[header_bytes:]))
    loaded = load(request(components), Catalog(open_storage(tmp_path)), Alone())
    assert loaded is not None
    assert loaded.checkpoint.step == 1
    assert list(loaded.phases) == ["resolve", "fit", "read", "restore"]


def test_the_event_of_a_restore_has_its_phases(tmp_path: Path) -> None:
    events: list[holdfast.Event] = []
    with holdfast.CheckpointManager(tmp_path, {"model": torch.nn.Linear(1, 1)}, on_event=events.append) as manager:
        manager.save(1)
        manager.restore()
    assert events[-1].kind == "restored"
    assert list(events[-1].phases) == ["wait", "resolve", "fit", "read", "restore"]
    assert 0 < sum(events[-1].phases.values()) <= events[-1].seconds


class Counted:
    """Ranks that note the label of each agreement."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.labels: list[str] = []

    def decide(self, label: str, *arguments: Any, **options: Any) -> Any:
        self.labels.append(label)
        return self._ranks.decide(label, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)


def test_a_restore_makes_five_agreements(tmp_path: Path) -> None:
    """Each one waits for the slowest rank: a further one needs a reason."""
    with holdfast.CheckpointManager(tmp_path, {"model": torch.nn.Linear(4, 2)}, rng=False) as manager:
        manager.save(1)

    def restore(ranks: Ranks) -> list[str]:
        counted: Any = Counted(ranks)
        load(request({"model": torch.nn.Linear(4, 2)}), Catalog(open_storage(tmp_path)), counted)
        return list(counted.labels)

    found = simulate_ranks(2, restore)
    assert found == [["resolve", "fit", "check", "restore values", "restore tensors"]] * 2


def test_each_further_candidate_takes_three_agreements(tmp_path: Path) -> None:
    """The claim of it, the match and, where the match found no damage, the check."""
    with holdfast.CheckpointManager(tmp_path, {"model": torch.nn.Linear(4, 2)}, rng=False, mode="sync") as manager:
        manager.save(1)
        manager.save(2)
    (newest,) = tmp_path.glob("step-000000002*/*.safetensors")
    newest.unlink()

    def restore(ranks: Ranks) -> list[str]:
        counted: Any = Counted(ranks)
        load(request({"model": torch.nn.Linear(4, 2)}), Catalog(open_storage(tmp_path)), counted)
        return list(counted.labels)

    found = simulate_ranks(2, restore)
    again = ["claim the next candidate", "fit", "check"]
    assert found == [["resolve", "fit", "check", *again, "restore values", "restore tensors"]] * 2


class Many:
    """Very many small tensors."""

    def __init__(self, count: int) -> None:
        self.tensors = {f"t{index:05d}": torch.randn(9) for index in range(count)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        torch._foreach_copy_([self.tensors[name] for name in state], list(state.values()))


def test_a_small_tensor_adds_few_calls_to_a_restore(tmp_path: Path) -> None:
    counts = []
    for count in (100, 300):
        with holdfast.CheckpointManager(tmp_path / str(count), {"many": Many(count)}, mode="sync") as manager:
            manager.save(1)
            manager.restore()
            counts.append(calls(manager.restore))
    assert (counts[1] - counts[0]) / 200 <= 44
