"""Pickles of strangers: what every protocol writes is read, nothing is run, and nothing grows beyond its data."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import CorruptCheckpointError, UnsafeContentError
from holdfast.formats.torch_files.pickle_machine import Record, Refused, Truncated
from holdfast.formats.torch_files.pickles import MAX_DEPTH, load_first, load_plain

PLAIN = {
    "numbers": [0, 1, 255, 256, 65536, -1, 2**31, -(2**63), 2**300, -(2**2000)],
    "floats": [0.5, -1e300, float("inf")],
    "text": ["", "x", "é\n'\"\\", "a" * 300, "\ud800"],
    "constants": [None, True, False],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    1: {2: {3: []}},
    (1, "key", (2,)): {},
    "shared": [[1, 2]] * 3,
}


def load(data: bytes, allowed: dict[tuple[str, str], Any] | None = None, persistent: Any = None) -> Any:
    return load_plain(data, allowed=allowed or {}, persistent=persistent, name="file.pkl")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_of_every_protocol_are_read(protocol: int) -> None:
    found = load(pickle.dumps(PLAIN, protocol))
    assert found == PLAIN
    assert str(found) == str(PLAIN)


@pytest.mark.parametrize("protocol", [4, 5])
def test_bytes_and_sets_of_new_protocols_are_read(protocol: int) -> None:
    value = [b"x" * 10, b"y" * 300, {1, 2}, frozenset((3, 4))]
    assert load(pickle.dumps(value, protocol)) == value
    assert load(pickle.dumps(bytearray(b"z"), 5)) == bytearray(b"z")


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_code_is_refused_by_its_name_and_not_run(protocol: int, tmp_path: Path) -> None:
    data = pickle.dumps({"model": Touch(tmp_path / "touched")}, protocol)
    with pytest.raises(UnsafeContentError, match=r"file file\.pkl: the file refers to '(posix|os|nt)\.mkdir'"):
        load(data)
    assert not (tmp_path / "touched").exists()
    pickle.loads(data)
    assert (tmp_path / "touched").exists()


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", r"os\.system"),
        (b"(S'true'\nios\nsystem\n.", r"os\.system"),
        (b"(cos\nsystem\nS'true'\no.", r"os\.system"),
        (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.", r"builtins\.eval"),
        (b"c__builtin__\ngetattr\n.", r"builtins\.getattr"),
        (b"\x80\x02c__builtin__\neval\n.", r"builtins\.eval"),
        (b"\x80\x04\x8c\x05allow\x8c\x08ed.__doc\x93.", r"allow\.ed\.__doc"),
        (b"\x80\x02\x82\x01.", "outside of the file"),
        (b"\x80\x05\x97.", "outside of the file"),
        (b"Pstorage\n.", "outside of the file"),
    ],
)
def test_every_instruction_that_names_something_is_refused(data: bytes, named: str) -> None:
    with pytest.raises(UnsafeContentError, match=named):
        load(data, {("allow", "ed"): list})


def test_a_well_known_global_is_refused_with_advice_of_its_own() -> None:
    with pytest.raises(UnsafeContentError, match=r"'a\.b'.*save it another way"):
        load(b"ca\nb\n.", {("a", "b"): Refused("save it another way")})


def test_only_globals_of_the_table_are_called() -> None:
    assert load(b"ca\nb\n(K\x01K\x02tR.", {("a", "b"): lambda *numbers: sum(numbers)}) == 3
    with pytest.raises(CorruptCheckpointError, match="calls what is no global"):
        load(b"X\x03\x00\x00\x00abc)R.")
    with pytest.raises(CorruptCheckpointError, match="calls what is no global"):
        load(b"ca\nb\n)R)R.", {("a", "b"): lambda: len})


def test_state_is_given_to_records_alone() -> None:
    record = load(b"ca\nb\n)R}X\x01\x00\x00\x00xK\x01sb.", {("a", "b"): Record.named("thing")})
    assert (record.kind, record.arguments, record.state) == ("thing", (), {"x": 1})
    given_twice = b"ca\nb\n)RK\x01b"
    for target in (given_twice, b"ca\nb\n", b"]", b"}", b"K\x01"):
        with pytest.raises(CorruptCheckpointError, match="sets the state of"):
            load(target + b"}X\x08\x00\x00\x00__dict__K\x01sb.", {("a", "b"): Record.named("thing")})


def test_the_metadata_of_a_state_dict_is_kept() -> None:
    state: OrderedDict[str, int] = OrderedDict(a=1)
    state._metadata = OrderedDict(version=2)  # type: ignore[attr-defined]
    found = load(pickle.dumps(state, 2), {("collections", "OrderedDict"): OrderedDict})
    assert found == state
    assert found._metadata == {"version": 2}


def test_persistent_ids_are_asked_for_and_refused_without_a_reader() -> None:
    assert load(b"K\x07Q.", persistent=lambda identity: identity + 1) == 8
    with pytest.raises(CorruptCheckpointError, match="outside of it"):
        load(b"K\x07Q.")


def test_pickles_one_after_the_other_are_read_one_by_one() -> None:
    data = pickle.dumps([1], 2) + pickle.dumps("two", 2)
    first, end = load_first(data, 0, allowed={}, persistent=None, name="f")
    second, last = load_first(data, end, allowed={}, persistent=None, name="f")
    assert (first, second, last) == ([1], "two", len(data))


def test_every_prefix_of_a_pickle_is_truncated() -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(PLAIN, protocol)
        for size in range(len(data)):
            with pytest.raises(Truncated):
                load_first(data[:size], 0, allowed={}, persistent=None, name="f")


def nested(depth: int, code: bytes) -> bytes:
    # A part that is not nested, so that the data is large enough for its containers.
    return b"X" + (8 * depth).to_bytes(4, "little") + b" " * (8 * depth) + b"0" + b")" + code * depth + b"."


BOMBS = {
    "a size of exabytes": b"\x8e" + b"\xff" * 8,
    "a text of gigabytes": b"X\xff\xff\xff\xff",
    "a number of gigabytes": b"\x8b\xff\xff\xff\x7f",
    "a negative number of bytes": b"\x8b\xff\xff\xff\xff",
    "a memo of four billion": b"Nr\xff\xff\xff\xffNj\x00\x00\x00\x00.",
    "nothing but dicts": b"}" * 300_000 + b".",
    "nothing but sets": b"\x8f" * 300_000 + b".",
    "nothing but marks": b"(" * 300_000 + b".",
    "a list that holds itself": b"]q\x00h\x00a.",
    "a deep tuple as a key": b"}" + nested(100_000, b"\x85")[:-1] + b"Ns.",
    "a deep tuple": nested(50_000, b"\x85"),
    "lists that double": b"]K\x01a" + b"".join(b"q%c0](h%ch%ce" % (n, n, n) for n in range(60)) + b".",
    "tuples that double, as a key": b"}K\x01" + b"".join(b"q%c0h%ch%c\x86" % (n, n, n) for n in range(60)) + b"Ns.",
    "a decimal number of a megabyte": b"I" + b"9" * 1_000_000 + b"\n.",
}


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_damage_and_takes_no_more_memory_than_its_size_says(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError):
            load(BOMBS[name])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (64 << 20) + 32 * len(BOMBS[name])


def test_values_nest_as_deep_as_in_other_checkpoints_and_no_deeper() -> None:
    assert load(nested(MAX_DEPTH - 1, b"\x85"))
    with pytest.raises(CorruptCheckpointError, match="nest more than"):
        load(nested(MAX_DEPTH + 1, b"\x85"))


@pytest.mark.parametrize(
    "data",
    [
        b".",
        b"e.",
        b"K",
        b"a.",
        b"]s.",
        b"](K\x01u.",
        b"}(K\x01u.",
        b"}]K\x01s.",
        b"h\x00.",
        b"\x80\x09N.",
        b"\xff.",
        b"0.",
    ],
)
def test_data_that_is_no_pickle_is_damage(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"file\.pkl"):
        load(data)
