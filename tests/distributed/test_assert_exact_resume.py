"""The check of a user's own training passes where resuming is exact, and names what differs first where it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import UsageError
from holdfast.testing import assert_exact_resume
from tests.distributed import exact_trainings as trainings


def difference(train: Callable[..., Any], *, ranks: int = 1) -> str:
    """What the check says of a training that is stopped after two of five steps."""
    with pytest.raises(AssertionError) as caught:
        assert_exact_resume(train, until=5, stops=[2], ranks=ranks, start="forkserver")
    return str(caught.value)


def test_a_training_that_resumes_exactly_passes_and_its_runs_are_kept_on_request(tmp_path: Path) -> None:
    assert_exact_resume(trainings.train_exactly, until=6, stops=[1, 4], folder=tmp_path)
    for run in ("uninterrupted", "resumed"):
        assert [found.step for found in holdfast.checkpoints(tmp_path / run)] == [5, 4, 3, 2, 1, 0]
    with pytest.raises(UsageError, match="exists already"):
        assert_exact_resume(trainings.train_exactly, until=6, stops=[1], folder=tmp_path)


def test_a_missing_random_state_is_named_by_the_first_weights_that_differ() -> None:
    text = difference(trainings.train_without_random_state)
    assert text.startswith("resuming is not exact: after the stop at step 1, step 2 differs first")
    assert "component 'model': tensor 'model.0.bias' (float32 [4]) has other bytes" in text
    assert "returned by train, rank 0: " in text
    assert "no component holds the random state" in text


def test_a_forgotten_scheduler_is_named_by_the_learning_rate_that_it_sets() -> None:
    text = difference(trainings.train_without_scheduler)
    assert text.startswith("resuming is not exact: after the stop at step 1, step 2 differs first")
    assert "component 'optimizer': value 'param_groups.0.lr' is 0.01" in text
    assert "no component holds" not in text


def test_a_loader_that_starts_at_the_front_is_named_by_step_and_component() -> None:
    text = difference(trainings.train_from_the_front_of_the_data)
    assert text.startswith("resuming is not exact: after the stop at step 1, step 2 differs first")
    assert text.splitlines()[1].strip() == "component 'loader': value 'position' is 12 uninterrupted, 4 resumed"
    assert "tensor 'model.0.bias'" in text


def test_a_training_that_does_not_repeat_itself_is_not_blamed_on_the_resume() -> None:
    text = difference(trainings.train_without_seed)
    assert text.startswith("the training does not repeat itself: two starts from the front differ at step 0")


def test_a_training_that_restores_nothing_is_named_as_such() -> None:
    text = difference(trainings.train_without_restore)
    assert "the start after the stop at step 1 did not continue from that checkpoint" in text
    assert "call restore()" in text


def test_a_training_that_skips_a_step_is_noticed() -> None:
    assert "step 3 differs first" in difference(trainings.train_and_skip_a_step)


def test_ranks_resume_exactly_and_a_rank_that_does_not_is_named() -> None:
    assert_exact_resume(trainings.train_on_ranks, until=4, stops=[2], ranks=2, start="forkserver")
    text = difference(trainings.train_on_ranks_without_random_state, ranks=2)
    assert "after the stop at step 1, step 2 differs first" in text
    assert "component 'model': tensor 'model.0.bias'" in text
    assert "returned by train, rank 1: " in text


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"stops": []}, "stops=\\[\\]"),
        ({"stops": [0]}, "stops=\\[0\\]"),
        ({"stops": [3, 2]}, "grow"),
        ({"stops": [5]}, "below until"),
        ({"ranks": 0}, "ranks=0"),
        ({"start": "fork"}, "start='fork'"),
        ({"train": lambda run, until: None}, "top level of a module"),
        ({"train": trainings.train_and_save_nothing}, "saved no checkpoint"),
    ],
)
def test_what_cannot_be_checked_is_a_usage_error(changed: dict[str, Any], words: str) -> None:
    arguments = {"train": trainings.train_exactly, "until": 5, "stops": [2], "start": "forkserver", **changed}
    with pytest.raises(UsageError, match=words):
        assert_exact_resume(arguments.pop("train"), **arguments)
