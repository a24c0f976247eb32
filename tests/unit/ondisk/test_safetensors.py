"""A tensor file's frame: what is laid out is read back, by us and by safetensors, and bytes that lie are refused."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from typing import Any

import pytest
import safetensors
from hypothesis import example, given, settings, strategies as st

from holdfast.errors import CorruptCheckpointError, HoldfastError
from holdfast.ondisk.dtypes import ELEMENT_TYPES, element_type
from holdfast.ondisk.manifest import BLOCK_BYTES
from holdfast.ondisk.regions import Box
from holdfast.ondisk.safetensors import ALIGNMENT, FramedChunk, frame, header_length, parse_header

steady = settings(derandomize=True, deadline=None, max_examples=200)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
BOXES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=4).map(
    lambda pairs: Box(tuple(offset for offset, _ in pairs), tuple(size for _, size in pairs))
)
FILES = st.lists(
    st.builds(FramedChunk.of, TEXTS, st.sampled_from(sorted(ELEMENT_TYPES)), BOXES),
    max_size=12,
    unique_by=lambda chunk: chunk.leaf,
).filter(lambda chunks: all(chunk.leaf != "__metadata__" for chunk in chunks))


def headed(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def one_entry(**changes: Any) -> bytes:
    return headed(json.dumps({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changes}}).encode())


@given(chunks=FILES)
@steady
def test_what_was_laid_out_is_read_back_from_the_header(chunks: list[FramedChunk]) -> None:
    laid = frame(chunks, BLOCK_BYTES)
    assert header_length(laid.header[:8], laid.size_bytes) == len(laid.header)
    entries = parse_header(laid.header, laid.size_bytes)
    assert sorted(entries) == sorted(chunk.leaf for chunk in chunks)
    for chunk, start in zip(laid.chunks, laid.starts, strict=True):
        entry, kind = entries[chunk.leaf], element_type(chunk.kind.name)
        assert (entry.code, entry.shape) == (kind.code, kind.stored_shape(chunk.box.sizes))
        assert (entry.start, entry.end) == (start, start + chunk.size_bytes)


@given(chunks=FILES)
@steady
def test_data_starts_on_a_page_has_no_holes_and_every_element_is_aligned(chunks: list[FramedChunk]) -> None:
    laid = frame(chunks, BLOCK_BYTES)
    assert len(laid.header) % ALIGNMENT == 0
    position = len(laid.header)
    for chunk, start in zip(laid.chunks, laid.starts, strict=True):
        assert start == position
        assert start % element_type(chunk.kind.name).alignment == 0
        position += chunk.size_bytes
    assert laid.size_bytes == position
    assert sorted(chunk.leaf for chunk in laid.chunks) == sorted(chunk.leaf for chunk in chunks)


@given(chunks=FILES)
@steady
def test_the_safetensors_library_reads_every_chunk_with_its_bytes(chunks: list[FramedChunk]) -> None:
    laid = frame(chunks, BLOCK_BYTES)
    data = bytearray(laid.header)
    contents = {}
    for number, chunk in enumerate(laid.chunks):
        contents[chunk.leaf] = bytes([number + 1]) * chunk.size_bytes
        data += contents[chunk.leaf]
    found = dict(safetensors.deserialize(bytes(data)))
    assert sorted(found) == sorted(contents)
    for chunk in laid.chunks:
        entry = found[chunk.leaf]
        assert bytes(entry["data"]) == contents[chunk.leaf]
        assert tuple(entry["shape"]) == element_type(chunk.kind.name).stored_shape(chunk.box.sizes)


@given(chunks=FILES)
@steady
def test_the_note_for_pytorchs_own_reader_names_every_key(chunks: list[FramedChunk]) -> None:
    laid = frame(chunks, BLOCK_BYTES)
    note = json.loads(laid.header[8:])["__metadata__"]
    offsets = json.loads(note["DCP_SHARDING_INFO"])
    assert sorted(offsets) == sorted(chunk.leaf for chunk in chunks)
    for chunk in chunks:
        assert offsets[chunk.leaf]["saved_offsets"] == list(
            element_type(chunk.kind.name).stored_offsets(chunk.box.offsets)
        )


@given(first=st.binary(max_size=16), size=st.integers(0, 2**40))
@example(first=b"\xff" * 8, size=2**40)
@example(first=b"\0" * 8, size=7)
@example(first=struct.pack("<Q", 200_000_000), size=2**40)
@steady
def test_a_headers_length_is_within_the_file_or_refused(first: bytes, size: int) -> None:
    try:
        length = header_length(first, size)
    except CorruptCheckpointError:
        return
    assert 8 <= length <= size


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.guarantee("G9")
@given(
    header=st.binary(max_size=200)
    | st.binary(max_size=200).map(headed)
    | JSON.map(json.dumps).map(str.encode).map(headed),
    size=st.integers(0, 10_000),
)
@example(header=headed(b"[" * 1_000_000), size=1_000_008)
@example(header=headed(b'{"a":' * 1_000_000), size=5_000_008)
@example(header=headed(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5_000 + b'],"data_offsets":[0,4]}}'), size=10_000)
@example(header=headed(b'{"\xff":1}'), size=100)
@example(header=headed(b'{"a":{"dtype":"\xed\xa0\x80","shape":[],"data_offsets":[0,4]}}'), size=100)
@steady
def test_any_bytes_are_a_header_or_refused(header: bytes, size: int) -> None:
    try:
        entries = parse_header(header, size)
    except HoldfastError:
        return
    for entry in entries.values():
        assert len(header) <= entry.start <= entry.end <= size


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize(
    "lie",
    [
        {"shape": [2, 4]},
        {"shape": [-2, -3]},
        {"shape": [2**62, 2**62]},
        {"shape": [0, 2**62]},
        {"shape": [2**64]},
        {"shape": [1] * 66},
        {"shape": [2.0, 3]},
        {"shape": "23"},
        {"data_offsets": [0, 23]},
        {"data_offsets": [24, 48]},
        {"data_offsets": [-24, 0]},
        {"data_offsets": [24, 0]},
        {"data_offsets": [0, 24, 0]},
        {"data_offsets": [2**63, 2**63 + 24]},
        {"dtype": "F33"},
        {"dtype": "f32"},
        {"dtype": None},
    ],
)
def test_a_header_that_lies_about_sizes_or_places_is_refused(lie: dict[str, Any]) -> None:
    honest = one_entry()
    assert parse_header(honest, len(honest) + 24)["a"].end == len(honest) + 24
    header = one_entry(**lie)
    with pytest.raises(CorruptCheckpointError):
        parse_header(header, len(header) + 24)


def test_a_header_is_not_believed_about_a_file_that_is_shorter() -> None:
    header = one_entry()
    for size in range(len(header), len(header) + 24):
        with pytest.raises(CorruptCheckpointError):
            parse_header(header, size)


@pytest.mark.guarantee("G9")
def test_a_megabyte_of_sizes_is_refused_before_it_is_multiplied() -> None:
    sizes = b"9223372036854775807," * 50_000
    header = headed(b'{"a":{"dtype":"F32","shape":[' + sizes + b'1],"data_offsets":[0,4]}}')
    begin = time.process_time()
    with pytest.raises(CorruptCheckpointError):
        parse_header(header, len(header) + 4)
    # Their product has three million bits and took 18 s.
    assert time.process_time() - begin < 5


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize(
    "text",
    [
        b'{"a":' + b"[" * 300_000,
        b'{"' + b"a" * 1_000_000 + b'":1}',
        b'{"a":{"dtype":"' + b"F" * 1_000_000 + b'","shape":[],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,18446744073709551616]}}',
        b"{" + b",".join(b'"%d":{"dtype":"F32","shape":[],"data_offsets":[0,4]}' % n for n in range(10_000)) + b"}",
    ],
    ids=["nested", "long name", "long type", "huge", "many"],
)
def test_a_hostile_header_takes_memory_in_proportion_to_its_size(text: bytes) -> None:
    header = headed(text)
    tracemalloc.start()
    try:
        parse_header(header, len(header) + 4)
    except HoldfastError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 20 * len(header) + 100_000


def test_every_element_type_fills_its_size() -> None:
    for name, kind in ELEMENT_TYPES.items():
        assert element_type(name) is kind
        assert kind.item_bytes == kind.alignment * (kind.extra or 1)
    with pytest.raises(HoldfastError):
        element_type("float7")
