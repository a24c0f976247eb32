"""Encode and decode lists, dicts, sets and their relatives. Knows nothing of what is in them."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

from holdfast.errors import CorruptCheckpointError
from holdfast.ondisk.codec.decoder import Decoder, TagDecoder, expect, expect_keys, shown
from holdfast.ondisk.codec.encoder import Encoder, Handler, unstorable
from holdfast.ondisk.codec.forms import Json
from holdfast.ondisk.codec.places import Place, corrupt, is_unicode

_INTEGERS = frozenset({int})
# What JSON has as a number here; `scalars` encodes larger ones.
_LOWEST, _HIGHEST = -0x8000000000000000, 0x7FFFFFFFFFFFFFFF
_FACTORIES: dict[str, type] = {cls.__name__: cls for cls in (bool, dict, float, int, list, set, str)}


def _encode_list(encoder: Encoder, value: list[Any], parent: Place, key: object) -> Json:
    return _items(encoder, value, encoder.enter(parent, key))


def _items(encoder: Encoder, value: list[Any] | tuple[Any, ...], here: Place) -> list[Json]:
    # Such as the hundreds of numbers of a random state, at each save.
    if value and _INTEGERS.issuperset(map(type, value)) and min(value) >= _LOWEST and max(value) <= _HIGHEST:
        return list(value)
    return encoder.items(value, here)


def _encode_dict(encoder: Encoder, value: dict[Any, Any], parent: Place, key: object) -> Json:
    here = encoder.enter(parent, key)
    for name in value:
        if type(name) is not str or name[:1] == "$" or not (name.isascii() or is_unicode(name)):
            return {"$dict": encoder.pairs(value, here)}
    handlers = encoder.handlers
    return {name: handlers[type(item)](encoder, item, here, name) for name, item in value.items()}


def _encode_ordered_dict(encoder: Encoder, value: OrderedDict[Any, Any], parent: Place, key: object) -> Json:
    here = encoder.enter(parent, key)
    stored: dict[str, Json] = {"items": encoder.pairs(value, here)}
    for name, attribute in vars(value).items():
        if name != "_metadata":
            raise unstorable(encoder, value, parent, key, f" with its attribute {name!r}")
        # torch's state dicts carry the versions of their modules here, and load_state_dict asks for them.
        stored["metadata"] = encoder.handlers[type(attribute)](encoder, attribute, here, name)
    return {"$ordereddict": stored}


def _encode_counter(encoder: Encoder, value: Counter[Any], parent: Place, key: object) -> Json:
    for name in vars(value):
        raise unstorable(encoder, value, parent, key, f" with its attribute {name!r}")
    return {"$counter": encoder.pairs(value, encoder.enter(parent, key))}


def _encode_default_dict(encoder: Encoder, value: defaultdict[Any, Any], parent: Place, key: object) -> Json:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if factory is not None and _FACTORIES.get(str(name)) is not factory:
        reason = f" with the factory {factory!r} (possible are {', '.join(_FACTORIES)})"
        raise unstorable(encoder, value, parent, key, reason)
    return {"$defaultdict": {"factory": name, "items": encoder.pairs(value, encoder.enter(parent, key))}}


def _encode_deque(encoder: Encoder, value: deque[Any], parent: Place, key: object) -> Json:
    return {"$deque": {"items": encoder.items(value, encoder.enter(parent, key)), "maxlen": value.maxlen}}


def _encode_tuple(encoder: Encoder, value: tuple[Any, ...], parent: Place, key: object) -> Json:
    return {"$tuple": _items(encoder, value, encoder.enter(parent, key))}


def _encode_set(encoder: Encoder, value: set[Any], parent: Place, key: object) -> Json:
    return {"$set": encoder.elements(value, encoder.enter(parent, key))}


def _encode_frozenset(encoder: Encoder, value: frozenset[Any], parent: Place, key: object) -> Json:
    return {"$frozenset": encoder.elements(value, encoder.enter(parent, key))}


def _unhashable(error: Exception, parent: Place, key: object) -> CorruptCheckpointError:
    return corrupt(f"a key or an element cannot be hashed ({type(error).__name__})", parent, key)


def _mapping(pairs: list[tuple[Any, Any]], parent: Place, key: object) -> dict[Any, Any]:
    try:
        result = dict(pairs)
    except Exception as error:  # a registered class can define __hash__ or __eq__
        raise _unhashable(error, parent, key) from error
    if len(result) != len(pairs):
        raise corrupt("a dict has the same key twice", parent, key)
    return result


def _decode_dict(decoder: Decoder, value: Any, parent: Place, key: object) -> dict[Any, Any]:
    return _mapping(decoder.pairs(value, decoder.enter(parent, key)), parent, key)


def _decode_ordered_dict(decoder: Decoder, value: Any, parent: Place, key: object) -> OrderedDict[Any, Any]:
    record = expect_keys(value, {"items"}, parent, key, optional="metadata")
    here = decoder.enter(parent, key)
    result = OrderedDict(_mapping(decoder.pairs(record["items"], here), parent, key))
    if "metadata" in record:
        vars(result)["_metadata"] = decoder.decode(record["metadata"], here, "_metadata")
    return result


def _decode_counter(decoder: Decoder, value: Any, parent: Place, key: object) -> Counter[Any]:
    return Counter(_decode_dict(decoder, value, parent, key))


def _decode_default_dict(decoder: Decoder, value: Any, parent: Place, key: object) -> defaultdict[Any, Any]:
    record = expect_keys(value, {"factory", "items"}, parent, key)
    name = record["factory"]
    if name is not None and expect(name, str, parent, key) not in _FACTORIES:
        raise corrupt(f"a defaultdict has the unknown factory {shown(name)}", parent, key)
    factory = None if name is None else _FACTORIES[name]
    return defaultdict(factory, _decode_dict(decoder, record["items"], parent, key))


def _decode_deque(decoder: Decoder, value: Any, parent: Place, key: object) -> deque[Any]:
    record = expect_keys(value, {"items", "maxlen"}, parent, key)
    items, maxlen = expect(record["items"], list, parent, key), record["maxlen"]
    if maxlen is not None and not len(items) <= expect(maxlen, int, parent, key) <= sys.maxsize:
        raise corrupt(f"a deque of at most {shown(maxlen)} entries has {len(items)}", parent, key)
    return deque(decoder.items(items, decoder.enter(parent, key)), maxlen)


def _decode_tuple(decoder: Decoder, value: Any, parent: Place, key: object) -> tuple[Any, ...]:
    return tuple(decoder.items(expect(value, list, parent, key), decoder.enter(parent, key)))


def _decode_set(decoder: Decoder, value: Any, parent: Place, key: object) -> set[Any]:
    here, items = decoder.enter(parent, key), expect(value, list, parent, key)
    elements = decoder.for_keys().items(items, here)
    try:
        result = set(elements)
    except Exception as error:  # as for the keys of a dict
        raise _unhashable(error, parent, key) from error
    if len(result) != len(elements):
        raise corrupt("a set has the same element twice", parent, key)
    return result


def _decode_frozenset(decoder: Decoder, value: Any, parent: Place, key: object) -> frozenset[Any]:
    return frozenset(_decode_set(decoder, value, parent, key))


ENCODERS: dict[type, Handler] = {
    list: _encode_list,
    dict: _encode_dict,
    OrderedDict: _encode_ordered_dict,
    Counter: _encode_counter,
    defaultdict: _encode_default_dict,
    deque: _encode_deque,
    tuple: _encode_tuple,
    set: _encode_set,
    frozenset: _encode_frozenset,
}
DECODERS: dict[str, TagDecoder] = {
    "$dict": _decode_dict,
    "$ordereddict": _decode_ordered_dict,
    "$counter": _decode_counter,
    "$defaultdict": _decode_default_dict,
    "$deque": _decode_deque,
    "$tuple": _decode_tuple,
    "$set": _decode_set,
    "$frozenset": _decode_frozenset,
}
