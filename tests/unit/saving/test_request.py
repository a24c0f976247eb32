"""What the caller of a save states, and what of it the ranks compare."""

from __future__ import annotations

import inspect

from holdfast.manager.manager import CheckpointManager
from holdfast.ondisk.manifest import Body, UserMetadata
from holdfast.saving.request import COMPARED_ARGUMENTS, argument_digests


def digests(metadata: UserMetadata) -> dict[str, str]:
    return dict(zip(COMPARED_ARGUMENTS, argument_digests(metadata), strict=True))


def test_the_manifest_has_every_field_of_the_metadata() -> None:
    assert set(UserMetadata.__struct_fields__) <= set(Body.__struct_fields__)


def test_every_field_of_the_metadata_that_a_save_is_given_is_compared() -> None:
    given_to_the_manager = {"config", "ranking"}
    assert set(COMPARED_ARGUMENTS.values()) == set(UserMetadata.__struct_fields__) - given_to_the_manager


def test_what_is_compared_has_the_name_of_its_argument() -> None:
    assert COMPARED_ARGUMENTS.keys() <= inspect.signature(CheckpointManager.save).parameters.keys()


def test_an_argument_that_was_not_given_has_no_digest() -> None:
    assert set(argument_digests(UserMetadata())) == {""}
    assert digests(UserMetadata(epoch=0))["epoch"], "epoch 0 was given"


def test_of_metrics_the_names_are_compared_and_of_the_others_the_values() -> None:
    one = digests(UserMetadata(metrics={"loss": 1.0}, progress={"seen": 1}))
    other = digests(UserMetadata(metrics={"loss": 2.0}, progress={"seen": 2}))
    assert [name for name in one if one[name] != other[name]] == ["progress"]
    assert one["metrics"] != digests(UserMetadata(metrics={"accuracy": 1.0}))["metrics"]
