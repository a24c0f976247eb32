"""The body that is read without the tensors is the one that reading everything gives, whatever the text looks like."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from holdfast._version import __version__
from holdfast.errors import CorruptCheckpointError, HoldfastError, UnsupportedFormatError
from holdfast.ondisk import manifest_body
from holdfast.ondisk.manifest import Body, Manifest, decode_head, encode_manifest
from holdfast.ondisk.manifest_body import body_of, decode_body, written_digest
from tests.counting import calls
from tests.unit.ondisk.test_manifest import at, forged, signed, small


def text_of(**changed: Any) -> bytes:
    return encode_manifest(msgspec.structs.replace(small(), **changed))[0]


def read(data: bytes) -> tuple[Body, str] | type[HoldfastError]:
    try:
        return decode_body(data, written_digest(data))
    except HoldfastError as error:
        return type(error)


def read_whole(data: bytes) -> tuple[Body, str] | type[HoldfastError]:
    try:
        head, digest = decode_head(data)
    except HoldfastError as error:
        return type(error)
    return body_of(head), digest


ODD: dict[str, bytes] = {
    "as it is written": text_of(),
    "no tensors": text_of(tensors=(), files=(), trees=()),
    "tensors among the values": text_of(extra={"a": 1, "tensors": [1, 2]}),
    "tensors as a metric": text_of(metrics={"a": 1, "tensors": []}, config={"b": [{"c": 2, "tensors": [{}]}]}),
    "the same bytes as a text": text_of(config=',"tensors":['),
    "text beyond ASCII": text_of(run_id="Läufe", tags=("é", "\u2028")),
    "spaces": signed(json.dumps(msgspec.to_builtins(small()), indent=1).encode()),
    "keys in another order": signed(json.dumps(msgspec.to_builtins(small()), sort_keys=True).encode()),
    "no line end": text_of()[:-1],
    "more behind it": text_of() + b" ",
    "a later key": forged(at("invented", to={"later": 1})),
    "a step of another folder": forged(at("step", to=7)),
    "a number that is none": forged(at("sequence", to="3")),
    "a folder outside": forged(at("folder", to="../x")),
    "nothing": b"",
    "another format": text_of().replace(b'"holdfast_format":1', b'"holdfast_format":2'),
}


@pytest.mark.parametrize("name", ODD)
def test_the_body_is_the_one_of_the_whole(name: str) -> None:
    assert read(ODD[name]) == read_whole(ODD[name])


def test_any_changed_byte_is_damage_and_no_text_as_it_was_written() -> None:
    data = text_of()
    digest = written_digest(data)
    assert digest == encode_manifest(small())[1]
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        assert written_digest(changed) != digest
        assert read(bytes(changed)) in (CorruptCheckpointError, UnsupportedFormatError)
    for size in range(len(data)):
        assert written_digest(data[:size]) == ""


def with_type(version: str) -> bytes:
    tensors = (msgspec.structs.replace(small().tensors[0], dtype="float7"),)
    return text_of(tensors=tensors, versions={"holdfast": version})


@pytest.mark.guarantee("G12")
@pytest.mark.parametrize("version", ["999.0.0", "", "1", "0.0.1rc1", "0.0.1+other", "0.0.-1", "0.0.1\n", "\u0660.0.1"])
def test_an_unknown_type_of_a_version_that_may_be_later_is_refused_in_a_listing(version: str) -> None:
    with pytest.raises(UnsupportedFormatError, match="float7"):
        decode_body(with_type(version), written_digest(with_type(version)))


@pytest.mark.parametrize("version", [__version__, "0.0.1"])
def test_an_unknown_type_under_a_wrong_version_is_refused_when_the_tensors_are_decoded(version: str) -> None:
    data = with_type(version)
    assert decode_body(data, written_digest(data))[0].step == 500
    with pytest.raises(UnsupportedFormatError, match="float7"):
        decode_head(data)


def test_a_body_takes_as_much_work_for_many_tensors_as_for_two() -> None:
    record = small()
    many = tuple(msgspec.structs.replace(record.tensors[0], name=f"tensor {number}") for number in range(500))
    few, more = text_of(), text_of(tensors=many)
    manifest_body.is_of_known_version.cache_clear()
    work = [calls(decode_body, data, written_digest(data)) for data in (few, few, more)]
    assert work[1] == work[2]


def test_a_body_has_every_field_but_the_tensors() -> None:
    body = body_of(small())
    assert {*Manifest.__struct_fields__} - {*body.__struct_fields__} == {"tensors"}
    assert all(getattr(body, name) == getattr(small(), name) for name in body.__struct_fields__)
