"""The instructions of pickles, protocols 0 to 5, by their byte. Each changes the machine that it is given."""

from __future__ import annotations

import codecs
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from holdfast.errors import CorruptCheckpointError, UnsafeContentError
from holdfast.formats.torch_files import pickle_codes as codes
from holdfast.formats.torch_files.pickle_machine import ADVICE, Machine, Record, cheap_key

__all__ = ["OPERATIONS"]

_Operation = Callable[[Machine], None]
OPERATIONS: list[_Operation | None] = [None] * 256


def _operation(*codes: bytes) -> Callable[[_Operation], _Operation]:
    def register(function: _Operation) -> _Operation:
        for code in codes:
            OPERATIONS[code[0]] = function
        return function

    return register


def _operations_of_values() -> None:
    """Register what pushes a value that stands in the data."""
    u1, u2, u4, u8 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
    i4, f8 = struct.Struct("<i"), struct.Struct(">d")

    def constant(value: Any) -> _Operation:
        return lambda machine: machine.stack.append(value)

    def number(form: struct.Struct) -> _Operation:
        return lambda machine: machine.stack.append(machine.number(form))

    def sized(form: struct.Struct, decode: Callable[[bytes], Any]) -> _Operation:
        return lambda machine: machine.stack.append(decode(machine.read(machine.number(form))))

    def line(decode: Callable[[bytes], Any]) -> _Operation:
        return lambda machine: machine.stack.append(decode(machine.line()))

    def long_of(data: bytes) -> int:
        return int.from_bytes(data, "little", signed=True)

    for code, value in ((codes.NONE, None), (codes.NEWTRUE, True), (codes.NEWFALSE, False), (b")", ())):
        _operation(code)(constant(value))
    for code, form in ((codes.BININT, i4), (codes.BININT1, u1), (codes.BININT2, u2), (codes.BINFLOAT, f8)):
        _operation(code)(number(form))
    for code, form in ((codes.SHORT_BINUNICODE, u1), (codes.BINUNICODE, u4), (codes.BINUNICODE8, u8)):
        _operation(code)(sized(form, lambda data: data.decode("utf-8", "surrogatepass")))
    for code, form in ((codes.SHORT_BINBYTES, u1), (codes.BINBYTES, u4), (codes.BINBYTES8, u8)):
        _operation(code)(sized(form, bytes))
    for code, form in ((codes.LONG1, u1), (codes.LONG4, u4)):
        _operation(code)(sized(form, long_of))
    for code, form in ((codes.SHORT_BINSTRING, u1), (codes.BINSTRING, u4)):
        _operation(code)(sized(form, _text_of_python_2))
    _operation(codes.BYTEARRAY8)(sized(u8, bytearray))
    _operation(codes.INT)(line(lambda text: {b"00": False, b"01": True}[text] if text in (b"00", b"01") else int(text)))
    _operation(codes.LONG)(line(lambda text: int(text.removesuffix(b"L"))))
    _operation(codes.FLOAT)(line(float))
    _operation(codes.UNICODE)(line(lambda text: text.decode("raw-unicode-escape", "surrogatepass")))
    _operation(codes.STRING)(line(_quoted_text))


def _text_of_python_2(data: bytes) -> str | bytes:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


def _quoted_text(text: bytes) -> str | bytes:
    if len(text) < 2 or text[0] != text[-1] or text[:1] not in (b"'", b'"'):
        raise CorruptCheckpointError("a string of the pickle has no quotes")
    return _text_of_python_2(codecs.escape_decode(text[1:-1])[0])


_operations_of_values()


@_operation(codes.PROTO)
def _protocol(machine: Machine) -> None:
    machine.protocol = machine.read(1)[0]
    if machine.protocol > codes.HIGHEST_PROTOCOL:
        raise CorruptCheckpointError(f"there is no pickle protocol {machine.protocol}")


@_operation(codes.FRAME)
def _frame(machine: Machine) -> None:
    machine.read(8)


@_operation(codes.MARK)
def _mark(machine: Machine) -> None:
    machine.containers_left -= 1
    if machine.containers_left < 0:
        raise CorruptCheckpointError("the pickle has more containers than real data of its size")
    machine.marks.append(machine.stack)
    machine.stack = []


@_operation(codes.POP)
def _pop(machine: Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()


@_operation(codes.POP_MARK)
def _pop_to_mark(machine: Machine) -> None:
    machine.pop_mark()


@_operation(codes.DUP)
def _duplicate(machine: Machine) -> None:
    machine.stack.append(machine.top())


@_operation(codes.EMPTY_DICT)
def _empty_dict(machine: Machine) -> None:
    machine.made({})


@_operation(codes.EMPTY_LIST)
def _empty_list(machine: Machine) -> None:
    machine.made([])


@_operation(codes.EMPTY_SET)
def _empty_set(machine: Machine) -> None:
    machine.made(set(), weight=4)


@_operation(codes.TUPLE1, codes.TUPLE2, codes.TUPLE3)
def _short_tuple(machine: Machine) -> None:
    count = machine.data[machine.position - 1] - codes.TUPLE1[0] + 1
    if len(machine.stack) < count:
        raise CorruptCheckpointError("the pickle takes values that are not there")
    items = tuple(machine.stack[-count:])
    del machine.stack[-count:]
    machine.made(items)


@_operation(codes.TUPLE)
def _tuple(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.made(tuple(items))


@_operation(codes.LIST)
def _list(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.made(items)


@_operation(codes.DICT)
def _dict(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.made({})
    _set_items(machine.stack[-1], items)


@_operation(codes.FROZENSET)
def _frozenset(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.made(frozenset(map(cheap_key, items)), weight=4)


@_operation(codes.APPEND)
def _append(machine: Machine) -> None:
    item = machine.pop()
    _extend(machine.top(), [item])


@_operation(codes.APPENDS)
def _appends(machine: Machine) -> None:
    items = machine.pop_mark()
    _extend(machine.top(), items)


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) not in (list, deque):
        raise CorruptCheckpointError(f"the pickle appends to a {type(target).__name__}")
    target.extend(items)


@_operation(codes.SETITEM)
def _set_item(machine: Machine) -> None:
    value = machine.pop()
    key = machine.pop()
    _set_items(machine.top(), [key, value])


@_operation(codes.SETITEMS)
def _set_many(machine: Machine) -> None:
    items = machine.pop_mark()
    _set_items(machine.top(), items)


def _set_items(target: Any, items: list[Any]) -> None:
    if isinstance(target, Record):
        target = target.items
    if type(target) not in (dict, OrderedDict, defaultdict, Counter) or len(items) % 2:
        raise CorruptCheckpointError(f"the pickle sets {len(items)} items of a {type(target).__name__}")
    for place in range(0, len(items), 2):
        target[cheap_key(items[place])] = items[place + 1]


@_operation(codes.ADDITEMS)
def _add_items(machine: Machine) -> None:
    items = machine.pop_mark()
    target = machine.top()
    if type(target) is not set:
        raise CorruptCheckpointError(f"the pickle adds to a {type(target).__name__}")
    target.update(map(cheap_key, items))


@_operation(codes.GET)
def _get_line(machine: Machine) -> None:
    machine.stack.append(machine.memo[int(machine.line())])


@_operation(codes.BINGET)
def _get(machine: Machine) -> None:
    machine.stack.append(machine.memo[machine.read(1)[0]])


@_operation(codes.LONG_BINGET)
def _get_long(machine: Machine) -> None:
    machine.stack.append(machine.memo[int.from_bytes(machine.read(4), "little")])


@_operation(codes.PUT)
def _put_line(machine: Machine) -> None:
    machine.memo[int(machine.line())] = machine.top()


@_operation(codes.BINPUT)
def _put(machine: Machine) -> None:
    machine.memo[machine.read(1)[0]] = machine.top()


@_operation(codes.LONG_BINPUT)
def _put_long(machine: Machine) -> None:
    machine.memo[int.from_bytes(machine.read(4), "little")] = machine.top()


@_operation(codes.MEMOIZE)
def _memoize(machine: Machine) -> None:
    machine.memo[len(machine.memo)] = machine.top()


@_operation(codes.GLOBAL)
def _global(machine: Machine) -> None:
    module = machine.line().decode()
    machine.stack.append(machine.find(module, machine.line().decode()))


@_operation(codes.STACK_GLOBAL)
def _stack_global(machine: Machine) -> None:
    name, module = machine.pop(), machine.pop()
    if type(name) is not str or type(module) is not str:
        raise CorruptCheckpointError("the name of a global is no text")
    machine.stack.append(machine.find(module, name))


@_operation(codes.REDUCE, codes.NEWOBJ)
def _reduce(machine: Machine) -> None:
    arguments = machine.pop()
    machine.call(machine.pop(), arguments)


@_operation(codes.INST)
def _instance(machine: Machine) -> None:
    module = machine.line().decode()
    function = machine.find(module, machine.line().decode())
    machine.call(function, tuple(machine.pop_mark()))


@_operation(codes.OBJ)
def _object(machine: Machine) -> None:
    function, *arguments = machine.pop_mark() or [None]
    machine.call(function, tuple(arguments))


@_operation(codes.BUILD)
def _build(machine: Machine) -> None:
    state = machine.pop()
    target = machine.top()
    if type(target) is OrderedDict and type(state) is dict:
        # Modules keep the versions of their parts in an attribute of the state dict.
        if type(state.get("_metadata")) in (dict, OrderedDict):
            target._metadata = state["_metadata"]  # type: ignore[attr-defined]
    elif isinstance(target, Record) and target.state is None:
        target.state = state
    else:
        raise CorruptCheckpointError(f"the pickle sets the state of a {type(target).__name__}")


@_operation(codes.BINPERSID)
def _persistent(machine: Machine) -> None:
    if machine.persistent is None:
        raise CorruptCheckpointError("the pickle refers to something outside of it")
    machine.stack.append(machine.persistent(machine.pop()))


@_operation(codes.EXT1, codes.EXT2, codes.EXT4, codes.NEXT_BUFFER, codes.READONLY_BUFFER, codes.PERSID)
def _outside(machine: Machine) -> None:
    code = machine.data[machine.position - 1]
    raise UnsafeContentError(
        f"the pickle takes something from outside of the file (instruction {code:#04x})", advice=ADVICE
    )


@_operation(codes.NEWOBJ_EX)
def _new_with_keywords(machine: Machine) -> None:
    keywords, arguments = machine.pop(), machine.pop()
    if keywords:
        raise CorruptCheckpointError("the pickle makes an object with named arguments")
    machine.call(machine.pop(), arguments)
