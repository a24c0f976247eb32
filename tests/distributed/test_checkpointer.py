"""Plain state dicts of several ranks: what only some of them have, and what they have under the same key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from tests.distributed.scenes import Play, run_scenes

TIMEOUT_SECONDS = 200.0
MODES = ("sync", "async")


def full(value: float) -> torch.Tensor:
    return torch.full((2,), value)


def save(folder: Path, step: int, state: dict[str, Any], mode: Any = "sync") -> None:
    with holdfast.AsyncCheckpointer(folder, mode=mode, timeout=TIMEOUT_SECONDS) as checkpointer:
        checkpointer.save(step, state, wait=True)


def keys_of(folder: Path, step: int | None = None) -> list[str]:
    reader = holdfast.HoldfastReader(folder) if step is None else holdfast.HoldfastReader(folder, step)
    return sorted(reader.read_metadata().state_dict_metadata)


def layers_of_each_rank(rank: int) -> dict[str, Any]:
    """Nested, flat and plain keys of one rank alone, next to keys of both."""
    return {
        "model": {f"layers.{rank}.weight": full(rank + 1.0), "norm": full(5.0 + rank), "depth": {f"of_{rank}": rank}},
        f"flat.{rank}": full(10.0 + rank),
        f"front_{rank}.weight": full(20.0 + rank),
        f"seen_by_{rank}": rank,
        f"nested_{rank}": {"t": full(30.0 + rank)},
        "list": [full(40.0 + rank)] * 1 + [full(50.0)] * rank,
        "epoch": 3 + rank,
    }


def union_of_keys(rank: int, folder: Path) -> Any:
    found = {}
    for mode in MODES:
        save(folder / mode, 1, layers_of_each_rank(rank), mode)
        wanted: dict[str, Any] = {
            "model": {f"layers.{one}.weight": full(0.0) for one in (0, 1)},
            "epoch": 0,
            "list": [full(0.0), full(0.0)],
        }
        wanted["model"].update({"norm": full(0.0), "depth": {"of_0": -1, "of_1": -1}})
        for one in (0, 1):
            wanted[f"flat.{one}"] = full(0.0)
            wanted[f"front_{one}.weight"] = full(0.0)
            wanted[f"seen_by_{one}"] = -1
            wanted[f"nested_{one}"] = {"t": full(0.0)}
        dcp.load(wanted, storage_reader=holdfast.HoldfastReader(folder / mode), no_dist=True)
        found[mode] = wanted, keys_of(folder / mode), holdfast.verify(folder / mode).ok
    dcp.save(layers_of_each_rank(rank), checkpoint_id=folder / "stock")
    return found, sorted(dcp.FileSystemReader(folder / "stock").read_metadata().state_dict_metadata)


def a_dict_that_is_called_as_the_rest_is(rank: int, folder: Path) -> Any:
    """One rank has a dict 'state', and both have keys for which Holdfast would choose that name."""
    save(folder, 1, {"count": 1} | ({"state": {"x": full(1.0)}} if rank else {"only": full(2.0)}))
    return keys_of(folder)


def keys_that_change(rank: int, folder: Path) -> Any:
    with holdfast.AsyncCheckpointer(folder, timeout=TIMEOUT_SECONDS) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"m": {"w": full(1.0), f"k{step if rank else 0}": rank}}).wait()
    return [keys_of(folder, step) for step in (1, 2, 3)]


def tied_on_one_rank(rank: int, folder: Path) -> Any:
    """What rank 0 stores under another name is not stored a second time as rank 1 has it."""
    tied = full(1.0)
    save(folder, 1, {"m": {"a": tied, "b": tied, "c": 7} if rank == 0 else {"b": full(2.0), "c": full(3.0)}})
    wanted: dict[str, Any] = {"m": {"a": full(0.0), "b": full(0.0), "c": 0}}
    dcp.load(wanted, storage_reader=holdfast.HoldfastReader(folder), no_dist=True)
    return wanted, [record.name for record in holdfast.resolve(folder).manifest.tensors]


SCENES = [union_of_keys, a_dict_that_is_called_as_the_rest_is, keys_that_change, tied_on_one_rank]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Play:
    return run_scenes(2, SCENES, tmp_path_factory.mktemp("two"))


@pytest.mark.guarantee("G2")
def test_what_only_one_rank_has_is_stored_and_of_the_rest_the_first_ranks_counts(two: Play) -> None:
    for found, stock in two("union_of_keys"):
        for mode in MODES:
            state, keys, sound = found[mode]
            assert sound
            assert keys == stock
            assert [state["model"][f"layers.{one}.weight"].tolist() for one in (0, 1)] == [[1.0] * 2, [2.0] * 2]
            assert [state[f"flat.{one}"].tolist() for one in (0, 1)] == [[10.0] * 2, [11.0] * 2]
            assert [state[f"front_{one}.weight"].tolist() for one in (0, 1)] == [[20.0] * 2, [21.0] * 2]
            assert [state[f"nested_{one}"]["t"].tolist() for one in (0, 1)] == [[30.0] * 2, [31.0] * 2]
            assert [tensor.tolist() for tensor in state["list"]] == [[40.0] * 2, [50.0] * 2]
            assert (state["seen_by_0"], state["seen_by_1"], state["epoch"]) == (0, 1, 3)
            assert state["model"]["depth"] == {"of_0": 0, "of_1": 1}
            assert state["model"]["norm"].tolist() == [5.0, 5.0]


def test_ranks_agree_on_a_place_for_keys_that_are_no_component(two: Play) -> None:
    assert two("a_dict_that_is_called_as_the_rest_is") == [["count", "only", "state.x"]] * 2


def test_keys_that_one_rank_changes_from_save_to_save_are_stored_each_time(two: Play) -> None:
    assert two("keys_that_change") == [[["m.k0", f"m.k{step}", "m.w"] for step in (1, 2, 3)]] * 2


def test_what_the_first_rank_has_under_a_key_is_all_that_is_stored_for_it(two: Play) -> None:
    for state, leaves in two("tied_on_one_rank"):
        assert [state["m"]["a"].tolist(), state["m"]["b"].tolist(), state["m"]["c"]] == [[1.0] * 2, [1.0] * 2, 7]
        assert leaves == ["m.a"]
