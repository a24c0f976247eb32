"""Errors cross to other ranks as their type and fields, also those of plug-ins; code is never found by a name."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from holdfast import errors
from holdfast.errors import (
    HoldfastError,
    KeyMissingError,
    SaveFailedError,
    StorageError,
    error_from_record,
    error_record,
)
from holdfast.saving.outcome import as_save_error


class BucketError(StorageError):
    """A plug-in's error that takes the fields of its base."""


class ThrottledError(BucketError):
    """One with an argument of its own, passed on as a field."""

    def __init__(self, problem: str, *, retry_seconds: float = 0.0, **where: Any) -> None:
        super().__init__(problem, retry_seconds=retry_seconds, **where)


class QuotaError(BucketError):
    """One whose constructor takes something else than fields."""

    def __init__(self, bucket: str, limit: int) -> None:
        super().__init__(f"the bucket {bucket} is full", errno=28, limit=limit)


class SpeechlessError(StorageError):
    """One whose text needs what did not cross."""

    def __init__(self, client: object) -> None:
        self.client = client
        super().__init__("the client failed")

    def _message(self) -> str:
        return f"{self.client!r} failed"


def crossed(error: BaseException) -> HoldfastError:
    """The error as it arrives on another rank."""
    return error_from_record(msgspec.msgpack.decode(msgspec.msgpack.encode(error_record(error))))


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize(
    "error",
    [
        BucketError("no such bucket", file="a/b", errno=2),
        ThrottledError("too many requests", retry_seconds=2.5, run="s3://x"),
        QuotaError("mine", 7),
        KeyMissingError("it is not there", errno=2),
        SaveFailedError("no", step=3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_arrives_with_its_type_its_fields_and_its_text(error: HoldfastError) -> None:
    for found in (crossed(error), pickle.loads(pickle.dumps(error))):
        assert type(found) is type(error)
        assert found.fields == error.fields
        assert str(found) == str(error)
        assert getattr(found, "errno", None) == getattr(error, "errno", None)


@pytest.mark.parametrize("error", [QuotaError("mine", 7), ThrottledError("slow down", retry_seconds=1.0)])
def test_an_error_with_a_constructor_of_its_own_can_be_given_its_place(error: HoldfastError) -> None:
    placed = as_save_error(error, 12)
    assert type(placed) is type(error)
    assert placed.step == 12
    assert "step 12" in str(placed)
    assert error.problem in str(placed)


def test_an_error_that_cannot_be_rebuilt_arrives_as_its_nearest_base() -> None:
    found = crossed(SpeechlessError(object()))
    assert type(found) is StorageError
    assert "SpeechlessError" in str(found)
    assert "the client failed" in str(found)


_SENDER = """
import sys, msgspec
sys.modules["a_plug_in"] = sys.modules["__main__"]
from holdfast.errors import StorageError, error_record
class Base(StorageError): pass
class FarAway(Base): pass
Base.__module__ = FarAway.__module__ = "a_plug_in"
sys.stdout.buffer.write(msgspec.msgpack.encode(error_record(FarAway("no such bucket", errno=2))))
"""


def test_an_error_of_a_class_that_this_process_has_not_imported_is_its_nearest_known_base() -> None:
    data = subprocess.run([sys.executable, "-c", _SENDER], capture_output=True, check=True, timeout=300).stdout
    found = error_from_record(msgspec.msgpack.decode(data))
    assert type(found) is StorageError
    assert found.problem == "FarAway: no such bucket"
    assert getattr(found, "errno", None) == 2


@pytest.mark.parametrize("name", ["os.system", "json.JSONDecodeError", "antigravity.Error", "", "x"])
def test_no_class_is_found_by_a_name_from_a_record(name: str) -> None:
    before = set(sys.modules)
    record = {"type": name, "types": [name, name], "fields": {"problem": "x"}}
    assert type(error_from_record(record)) is HoldfastError
    assert set(sys.modules) == before


def test_every_error_of_ours_is_known_by_its_name() -> None:
    for name in errors.__all__:
        found = crossed(getattr(errors, name)("x"))
        assert type(found).__name__ == name


@pytest.mark.parametrize("harm", ["\x1b[2J", "\r", "\x07", "\u202e", "\x9b31m", "\ud800"])
def test_no_name_in_a_message_reaches_a_terminal_as_a_control_character(harm: str) -> None:
    places = dict.fromkeys(("run", "component", "leaf", "file"), f"a{harm}b")
    found = [
        HoldfastError(f"a{harm}b", advice=f"a{harm}b", **places),
        errors.CorruptCheckpointError("it", problems=[f"a{harm}b"]),
        errors.StateMismatchError("it", missing=[f"a{harm}b"]),
    ]
    for error in found:
        assert harm not in str(error)
        assert harm.encode("unicode_escape").decode() in str(error)
    assert found[0].file == f"a{harm}b", "programs get the name as it is"


def test_a_name_cannot_forge_a_line_of_a_message_and_lines_of_a_problem_stay() -> None:
    assert str(HoldfastError("first\n\tsecond", file="a\nb")) == "file a\\nb: first\n\tsecond"
    assert "a\\nb" in str(errors.StateMismatchError("it", missing=["a\nb"]))
