"""The store of torch.distributed when it fails now and then, cannot compare, or is gone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore

from holdfast.errors import RankError
from holdfast.ranks.torch_store import TorchStore


class FlakyStore:
    """A store of torch's whose `compare_set` fails now and then, or is not there at all."""

    def __init__(self, failures: list[Exception]) -> None:
        self.inner, self.failures, self.calls = HashStore(), failures, list[str]()

    def clone(self) -> FlakyStore:
        return self

    def set(self, key: str, value: bytes) -> None:
        self.inner.set(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.calls.append("compare_set")
        if self.failures:
            raise self.failures.pop(0)
        return bytes(self.inner.compare_set(key, expected, desired))

    def check(self, keys: list[str]) -> bool:
        self.calls.append("check")
        return bool(self.inner.check(keys))

    def get(self, key: str) -> bytes:
        return bytes(self.inner.get(key))


def test_a_store_that_fails_once_is_asked_the_fast_way_again(caplog: pytest.LogCaptureFixture) -> None:
    flaky = FlakyStore([DistNetworkError("the connection was reset"), RuntimeError("once more")])
    store = TorchStore(flaky)
    store.set("a", b"1")
    assert [store.get("a") for _ in range(5)] == [b"1"] * 5
    assert store.get("b") is None
    assert flaky.calls == ["compare_set", "check", "compare_set", "check", *["compare_set"] * 4]
    assert caplog.text.count("the connection was reset") == 1
    assert "once more" not in caplog.text, "it is said once"


def test_a_store_that_cannot_compare_is_asked_once_and_that_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    flaky = FlakyStore([NotImplementedError("Not implemented.")])
    store = TorchStore(flaky)
    store.set("a", b"1")
    caplog.set_level(logging.INFO, "holdfast")
    assert [store.get("a") for _ in range(3)] == [b"1"] * 3
    assert flaky.calls == ["compare_set", *["check"] * 3]
    assert caplog.text.count("cannot compare") == 1


def test_a_store_that_is_gone_is_an_error_and_no_missing_value() -> None:
    def refuse(keys: list[str]) -> bool:
        raise DistNetworkError("still")

    flaky: Any = FlakyStore([DistNetworkError("the connection was reset")])
    flaky.check = refuse
    store = TorchStore(flaky)
    with pytest.raises(RankError, match="cannot be reached: still"):
        store.get("a")
