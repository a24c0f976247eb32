"""What stands for the globals of a torch file takes any arguments, and does no work with them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from holdfast.errors import CorruptCheckpointError
from holdfast.formats.torch_files.pickle_machine import Global, Record, Refused
from holdfast.formats.torch_files.pickles import load_plain
from holdfast.formats.torch_files.stand_ins import plain_globals, plain_record

ARGUMENTS: list[tuple[Any, ...]] = [
    (),
    (1,),
    (-1,),
    (1 << 40,),
    ("text",),
    (b"bytes",),
    (None,),
    ([],),
    ([[]],),
    ({},),
    ((1, 2),),
    (Record("thing"),),
    (Global("builtins", "int", int),),
    (1, 2),
    ("a", "b"),
    (Record("numpy dtype", ("O8",)), b"12345678"),
    (range(1 << 60),),
    ([1], 1 << 40),
    ("cuda", 1, 2),
    (1, 2, 3),
    (1, 2, 3, 4, 5),
]


def callables() -> list[tuple[str, str]]:
    return [key for key, target in plain_globals().items() if callable(target)]


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("name", callables(), ids=".".join)
def test_any_arguments_give_a_value_or_damage(name: tuple[str, str]) -> None:
    for arguments in ARGUMENTS:
        try:
            load_plain(
                f"c{name[0]}\n{name[1]}\n".encode() + b"Q.",
                allowed=plain_globals(),
                persistent=lambda found, arguments=arguments: found.target(*arguments),
                name="file",
            )
        except CorruptCheckpointError:
            continue


def test_nothing_that_does_work_is_in_the_list() -> None:
    forbidden = {"eval", "exec", "getattr", "setattr", "__import__", "open", "compile", "map", "type", "object"}
    assert not forbidden & {name for module, name in plain_globals() if module == "builtins"}
    modules = {module for module, _ in plain_globals()}
    assert not modules & {"os", "posix", "subprocess", "sys", "importlib", "functools", "operator", "copyreg", "pickle"}


def test_names_that_are_refused_have_advice() -> None:
    refused = [target for target in plain_globals().values() if isinstance(target, Refused)]
    assert refused
    assert all(target.advice for target in refused)


def test_a_numpy_type_of_objects_is_refused() -> None:
    for kind in ("O", "O8", "V8", "M8", "<f4,<f4", "f4" * 100, 3):
        record = Record("numpy dtype", (kind, False, True))
        record.state = (3, "<", None, None, None, -1, -1, 0)
        with pytest.raises(CorruptCheckpointError, match="no type of numbers or text"):
            plain_record(record, lambda value: value)
    record = Record("numpy dtype", ("f4", False, True))
    record.state = (3, "<", None, ("a",), {"a": 1}, -1, -1, 0)
    with pytest.raises(CorruptCheckpointError, match="with fields"):
        plain_record(record, lambda value: value)


def test_a_set_of_the_old_protocol_is_read_and_is_no_bomb() -> None:
    value = {1, "a", (1, (2,)), frozenset((3,))}
    assert load_plain(pickle.dumps(value, 2), allowed=plain_globals(), persistent=None, name="f") == value
    doubled = b"K\x01" + b"".join(b"q%c0h%ch%c\x86" % (n, n, n) for n in range(60))
    data = b"c__builtin__\nset\n(](" + doubled + b"etR."
    with pytest.raises(CorruptCheckpointError, match="too large"):
        load_plain(data, allowed=plain_globals(), persistent=None, name="f")
