"""The random state of a restore that is set later: once, exactly, and never forgotten silently."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import holdfast


def opened(run: Path, state: dict[str, Any] | None = None, **options: Any) -> holdfast.CheckpointManager:
    components = {"model": torch.nn.Linear(2, 2), **(state or {})}
    return holdfast.CheckpointManager(run, components, mode="sync", **options)


def drawn() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.random()), torch.rand(()).item()


def saved(run: Path, steps: int = 1, **options: Any) -> list[tuple[float, float, float]]:
    """Save some steps, and return what the training draws after each."""
    numbers = []
    with opened(run, **options) as manager:
        for step in range(steps):
            manager.save(step)
            numbers.append(drawn())
    return numbers


def seed(number: int) -> None:
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def test_what_is_drawn_before_it_is_set_makes_no_difference(tmp_path: Path) -> None:
    (expected,) = saved(tmp_path)
    seed(7)
    with opened(tmp_path) as manager:
        result = manager.restore(rng="later")
        assert (result.deferred, result.restored) == (("rng",), ("model",))
        assert drawn() != expected, "the restore must not have set it"
        assert manager.restore_rng() is True
        assert drawn() == expected
        assert manager.save(1).wait().step == 1


def test_the_random_state_of_the_process_is_left_alone_until_then(tmp_path: Path) -> None:
    saved(tmp_path)
    with opened(tmp_path) as manager:
        seed(7)
        expected = drawn()
        seed(7)
        manager.restore(rng="later")
        assert drawn() == expected
        manager.restore_rng()


def test_it_is_set_once(tmp_path: Path) -> None:
    saved(tmp_path)
    with opened(tmp_path) as manager:
        manager.restore(rng="later")
        assert manager.restore_rng() is True
        after = drawn()
        assert manager.restore_rng() is False
        assert drawn() != after, "the second call must not have set it again"


def test_there_is_nothing_to_set_after_a_fresh_start_or_a_restore_without_it(tmp_path: Path) -> None:
    with opened(tmp_path) as manager:
        assert manager.restore_rng() is False
        assert manager.restore(rng="later").deferred == ()
        assert manager.restore_rng() is False
        manager.save(0)
        result = manager.restore()
        assert (result.deferred, result.restored) == ((), ("model", "rng"))
        assert manager.restore_rng() is False
        assert manager.restore(rng="later", strategy=holdfast.LoadStrategy(skip=("rng",))).deferred == ()
        assert manager.restore_rng() is False
        manager.save(1)
    with opened(tmp_path, rng=False) as manager:
        assert manager.restore(rng="later").deferred == ()
        assert manager.restore_rng() is False
        manager.save(2)


def test_a_training_that_goes_on_without_it_is_refused(tmp_path: Path) -> None:
    (expected,) = saved(tmp_path)
    with opened(tmp_path, save=holdfast.Every(steps=2)) as manager:
        manager.restore(rng="later")
        for go_on in (lambda: manager.save(1), lambda: manager.step(1), lambda: manager.save(0)):
            with pytest.raises(holdfast.UsageError, match=r"random state of step 0 .* call restore_rng\(\)"):
                go_on()
        assert [found.step for found in manager.checkpoints()] == [0]
        assert manager.restore_rng()
        assert drawn() == expected
        manager.step(2)
        assert [found.step for found in manager.checkpoints()] == [2, 0]


def test_a_manager_that_is_closed_before_it_was_set_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path)
    caplog.set_level(logging.WARNING, logger="holdfast")

    def fail_before_the_first_step() -> None:
        with opened(tmp_path) as manager:
            manager.restore(rng="later")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_before_the_first_step()
    with opened(tmp_path) as manager:
        manager.restore(rng="later")
        manager.restore_rng()
    assert not caplog.text
    with opened(tmp_path) as manager:
        manager.restore(rng="later")
    assert "random state of step 0, restored with rng='later', was never set" in caplog.text


def test_a_later_restore_replaces_what_was_not_set(tmp_path: Path) -> None:
    first, second = saved(tmp_path, 2)
    with opened(tmp_path) as manager:
        manager.restore(rng="later")
        manager.restore(0, rng="later")
        assert manager.restore_rng()
        assert drawn() == first
        manager.restore(0, rng="later")
        manager.restore(1)
        assert drawn() == second
        assert manager.restore_rng() is False
        manager.restore(0, rng="later")
        with pytest.raises(holdfast.CheckpointNotFoundError):
            manager.restore(17)
        assert manager.restore_rng(), "a restore that changed nothing leaves it"
        assert drawn() == first
    with opened(tmp_path, resume="never") as manager:
        manager.restore(0, rng="later")
        manager.restore()
        assert manager.restore_rng() is False, "a fresh start has none"


@pytest.mark.parametrize("wrapper", [holdfast.RNGState, lambda: holdfast.PerRank(holdfast.RNGState())])
def test_a_random_state_of_the_caller_s_own_is_deferred_too(tmp_path: Path, wrapper: Any) -> None:
    (expected,) = saved(tmp_path, state={"dice": wrapper()}, rng=False)
    with opened(tmp_path, {"dice": wrapper()}, rng=False) as manager:
        assert manager.restore(rng="later").deferred == ("dice",)
        drawn()
        assert manager.restore_rng()
        assert drawn() == expected


def test_its_damage_is_found_by_the_restore(tmp_path: Path) -> None:
    first, _ = saved(tmp_path, 2)
    newest = holdfast.resolve(tmp_path)
    leaf = next(tensor for tensor in newest.manifest.tensors if tensor.name.startswith("rng"))
    with (Path(newest.path) / leaf.chunks[0].file).open("r+b") as file:
        file.seek(leaf.chunks[0].start)
        byte = file.read(1)
        file.seek(leaf.chunks[0].start)
        file.write(bytes([byte[0] ^ 1]))
    with opened(tmp_path) as manager:
        assert manager.restore(rng="later").step == 0
        assert manager.restore_rng()
        assert drawn() == first


class OtherState(holdfast.RNGState):
    """What is saved is no random state."""

    def state_dict(self) -> dict[str, Any]:
        return {"dice": 6}


def test_what_is_no_random_state_is_refused_by_the_restore(tmp_path: Path) -> None:
    saved(tmp_path, state={"dice": OtherState()})
    model = torch.nn.Linear(2, 2)
    before = model.weight.clone()
    with holdfast.CheckpointManager(tmp_path, {"model": model, "dice": holdfast.RNGState()}, mode="sync") as manager:
        with pytest.raises(holdfast.StateMismatchError, match="this is no random state"):
            manager.restore(rng="later")
        assert manager.restore_rng() is False
    assert torch.equal(model.weight, before)


def test_another_word_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as manager, pytest.raises(holdfast.UsageError, match=r"rng='soon'.*'now', 'later'"):
        manager.restore(rng="soon")  # type: ignore[arg-type]
