"""The commit record: what is written is read back, and nothing that somebody changed or made up gets through."""

from __future__ import annotations

import copy
import gc
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings, strategies as st

from holdfast.errors import (
    CorruptCheckpointError,
    HoldfastError,
    UnsafeContentError,
    UnsupportedFormatError,
    UsageError,
)
from holdfast.ondisk import paths
from holdfast.ondisk.dtypes import ELEMENT_TYPES, element_type
from holdfast.ondisk.manifest import (
    FORMAT,
    MAX_SEQUENCE,
    MAX_VALUES_BYTES,
    ChunkRecord,
    FileRecord,
    Manifest,
    MeshRecord,
    TensorRecord,
    TreeRecord,
    decode_manifest,
    digest_of,
    encode_manifest,
)
from holdfast.ondisk.regions import Box

steady = settings(derandomize=True, deadline=None, max_examples=150)

BLOCK_BYTES = 4096
DIGEST = "0123456789abcdef" * 4


def chunk(file: str, start: int, offsets: tuple[int, ...], sizes: tuple[int, ...], item_bytes: int) -> ChunkRecord:
    blocks = -(-Box(offsets, sizes).volume * item_bytes // BLOCK_BYTES)
    return ChunkRecord(file=file, start=start, offsets=offsets, sizes=sizes, digests=(DIGEST,) * blocks)


def small() -> Manifest:
    """Two tensors in three chunks in two files, and values."""
    first, second = paths.tensor_file(0), paths.tensor_file(1)
    return Manifest(
        run_id="run",
        folder="step-000000500",
        step=500,
        sequence=3,
        parent=DIGEST,
        created="2025-01-02T03:04:05.000006+00:00",
        world_size=2,
        meshes=(MeshRecord(shape=(2,), dimensions=("dp",)),),
        block_bytes=BLOCK_BYTES,
        files=(
            FileRecord(name=first, size_bytes=4096 + 6000 + 8, digest=DIGEST, header_bytes=4096),
            FileRecord(name=second, size_bytes=4096 + 6000, digest=DIGEST, header_bytes=4096),
            FileRecord(name="shared.json", size_bytes=20, digest=DIGEST),
        ),
        tensors=(
            TensorRecord(
                name="model.weight",
                dtype="float32",
                shape=(30, 100),
                chunks=(chunk(first, 4096, (0, 0), (15, 100), 4), chunk(second, 4096, (15, 0), (15, 100), 4)),
                sharded=True,
            ),
            TensorRecord(name="model.count", dtype="int64", shape=(), chunks=(chunk(first, 10096, (), (), 8),)),
        ),
        trees=(TreeRecord(component="model", kind="module", file="shared.json"),),
        metrics={"loss": 0.5},
        progress={"tokens": 7},
        extra={},
        config={"lr": 0.1},
        guards={},
        tags=("release",),
        versions={"holdfast": "1"},
    )


def signed(body: Any) -> bytes:
    """What a forger writes: any content, with the right digest over it."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b'{"holdfast_format":1,"digest":"%s","manifest":%s}\n' % (digest_of(raw).encode(), raw)


def forged(change: Callable[[dict[str, Any]], object]) -> bytes:
    body = msgspec.to_builtins(small())
    change(body := json.loads(json.dumps(body)))
    return signed(body)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Sound manifests of tensors that are cut along their first dimension, one file per piece."""
    world = draw(st.integers(1, 3))
    names = draw(st.lists(TEXTS.map("model.".__add__), unique=True, max_size=4))
    ends = [4096] * world
    tensors = []
    for name in names:
        dtype = draw(st.sampled_from(sorted(ELEMENT_TYPES)))
        rows, columns = draw(st.integers(0, 40)), draw(st.integers(0, 40))
        cuts = sorted({0, *draw(st.lists(st.integers(0, rows), max_size=world - 1))} - {rows}) or [0]
        chunks = []
        for rank, (begin, end) in enumerate(zip(cuts, [*cuts[1:], rows], strict=True)):
            if columns == 0 and rank:
                break
            sizes = (rows if columns == 0 else end - begin, columns)
            piece = chunk(paths.tensor_file(rank), ends[rank], (begin, 0), sizes, element_type(dtype).item_bytes)
            ends[rank] += piece.box.volume * element_type(dtype).item_bytes
            chunks.append(piece)
        tensors.append(TensorRecord(name=name, dtype=dtype, shape=(rows, columns), chunks=tuple(chunks)))
    files = [
        FileRecord(name=paths.tensor_file(rank), size_bytes=end, digest=DIGEST, header_bytes=4096)
        for rank, end in enumerate(ends)
    ]
    step = draw(st.integers(0, paths.MAX_STEP))
    return msgspec.structs.replace(
        small(),
        step=step,
        folder=paths.folder_name(step, draw(st.integers(1, 99))),
        sequence=draw(st.integers(0, MAX_SEQUENCE)),
        parent=draw(st.none() | st.just(DIGEST)),
        files=(
            *files,
            FileRecord(name="shared.json", size_bytes=draw(st.integers(0, MAX_VALUES_BYTES)), digest=DIGEST),
        ),
        tensors=tuple(tensors),
        metrics=draw(st.dictionaries(TEXTS, VALUES, max_size=3)),
        extra=draw(st.dictionaries(TEXTS, VALUES, max_size=3)),
        config=draw(VALUES),
        tags=tuple(draw(st.lists(TEXTS, max_size=2))),
    )


@given(manifest=manifests())
@example(manifest=small())
@steady
def test_what_is_written_is_read_back(manifest: Manifest) -> None:
    data, digest = encode_manifest(manifest)
    assert decode_manifest(data) == (manifest, digest)
    assert encode_manifest(decode_manifest(data)[0]) == (data, digest)


@given(one=VALUES, other=VALUES)
@steady
def test_two_checkpoints_that_differ_have_two_identities(one: Any, other: Any) -> None:
    identities = [encode_manifest(msgspec.structs.replace(small(), config=value))[1] for value in (one, other)]
    same = msgspec.json.encode(one, order="sorted") == msgspec.json.encode(other, order="sorted")
    assert (identities[0] == identities[1]) == same


@pytest.mark.guarantee("G3")
def test_every_change_of_a_single_byte_is_refused() -> None:
    data, _ = encode_manifest(small())
    accepted = []
    for index in range(len(data)):
        changed = bytearray(data)
        for flip in (1, 2, 4, 8, 16, 32, 64, 128, 0xFF, 0x20 ^ 0x0A):
            changed[index] = data[index] ^ flip
            try:
                decode_manifest(bytes(changed))
            except HoldfastError:
                continue
            accepted.append((index, flip))
    # The line's end is white space, and stays white space when it becomes a blank: it says nothing.
    assert accepted == [(len(data) - 1, 0x20 ^ 0x0A)]


@pytest.mark.guarantee("G3")
def test_every_truncation_is_refused() -> None:
    data, _ = encode_manifest(small())
    for length in range(len(data) - 1):
        with pytest.raises(CorruptCheckpointError):
            decode_manifest(data[:length])


@pytest.mark.guarantee("G9")
@given(data=st.binary(max_size=300))
@example(data=b"")
@example(data=b"null")
@example(data=b"{}")
@example(data=b'{"holdfast_format":1}')
@example(data=b'{"holdfast_format":' + b"9" * 5_000 + b"}")
@example(data=b'{"holdfast_format":true}')
@example(data=b'\xff\xfe{"holdfast_format":1}')
@example(data=b'{"holdfast_format":1,"digest":"\xff"}')
@example(data=b"[" * 1_000_000)
@example(data=b'{"a":' * 1_000_000)
@steady
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(HoldfastError):
        decode_manifest(data)


FIELDS = sorted(Manifest.__struct_fields__)


@pytest.mark.guarantee("G9")
@given(body=VALUES | st.dictionaries(st.sampled_from(FIELDS), VALUES))
@steady
def test_any_signed_content_that_is_no_manifest_is_refused(body: Any) -> None:
    with pytest.raises(HoldfastError):
        decode_manifest(signed(body))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


ODD = (
    None,
    True,
    -1,
    0,
    2**62,
    2**64,
    10**40,
    0.5,
    "",
    "x",
    "../x",
    "\ud800",
    [],
    [[]],
    [0],
    {},
    {"$type": {"name": "x"}},
)


@pytest.mark.guarantee("G9")
def test_an_odd_value_at_any_place_is_refused_or_means_no_harm() -> None:
    body = json.loads(msgspec.json.encode(small()))
    free = {"run_id", "metrics", "progress", "extra", "config", "guards", "tags", "versions", "meshes"}
    free |= {"sequence", "world_size", "parent", "epoch"}
    # What a reader finds out by itself: another file, name, kind or type than the one that is there.
    found_out = {"name", "component", "size_bytes", "digest", "kind", "scope", "sharded", "type", "model"}
    for path in places(body)[1:]:
        for odd in ODD:
            changed = copy.deepcopy(body)
            spot = changed
            for key in path[:-1]:
                spot = spot[key]
            if spot[path[-1]] == odd and type(spot[path[-1]]) is type(odd):
                continue
            spot[path[-1]] = odd
            try:
                decode_manifest(signed(changed))
            except HoldfastError:
                continue
            assert path[0] in free or path[-1] in found_out or (path, odd) == (("trees",), []), (path, odd)


def at(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        spot: Any = body
        for key in path[:-1]:
            spot = spot[key]
        spot[path[-1]] = to

    return change


def both(*changes: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda body: [change(body) for change in changes]


def rename(old: str, new: str) -> Callable[[dict[str, Any]], object]:
    """A file under another name, wherever it is named."""

    def change(body: dict[str, Any]) -> None:
        text = json.dumps(body).replace(json.dumps(old), json.dumps(new))
        body.update(json.loads(text))

    return change


def again(*path: Any) -> Callable[[dict[str, Any]], object]:
    """One entry of a list, listed twice."""

    def change(body: dict[str, Any]) -> None:
        spot: Any = body
        for key in path:
            spot = spot[key]
        spot.append(copy.deepcopy(spot[0]))

    return change


EMPTY = {"name": "model.none", "dtype": "float32", "chunks": []}

CORRUPT: dict[str, Callable[[dict[str, Any]], object]] = {
    "chunks that overlap in the tensor": at("tensors", 0, "chunks", 1, "offsets", to=[14, 0]),
    "chunks that leave the tensor": at("tensors", 0, "chunks", 1, "offsets", to=[16, 0]),
    "a chunk that is lost": at("tensors", 0, "chunks", to=[]),
    "a chunk that is there twice": again("tensors", 0, "chunks"),
    "chunks that overlap in the file": at("tensors", 1, "chunks", 0, "start", to=10088),
    "a chunk in the header": at("tensors", 1, "chunks", 0, "start", to=8),
    "a chunk behind the end": at("tensors", 1, "chunks", 0, "start", to=10104),
    "a chunk far behind the end": at("tensors", 1, "chunks", 0, "start", to=2**63 - 1),
    "a hole between chunks": both(
        at("files", 0, "size_bytes", to=10112), at("tensors", 1, "chunks", 0, "start", to=10104)
    ),
    "bytes that no chunk owns": at("files", 0, "size_bytes", to=10105),
    "a tensor file without a chunk": lambda body: body["files"].append(
        {"name": "rank-00009.safetensors", "size_bytes": 5000, "digest": DIGEST, "header_bytes": 4096}
    ),
    "a chunk in a file that is not listed": at("tensors", 1, "chunks", 0, "file", to="rank-00007.safetensors"),
    "a chunk in a file of values": both(
        at("tensors", 1, "chunks", 0, "file", to="shared.json"),
        at("tensors", 1, "chunks", 0, "start", to=0),
        at("files", 2, "size_bytes", to=8),
        at("files", 0, "size_bytes", to=10096),
    ),
    "too few digests": at("tensors", 0, "chunks", 0, "digests", to=[DIGEST]),
    "too many digests": at("tensors", 0, "chunks", 0, "digests", to=[DIGEST] * 3),
    "digests of a scalar gone": at("tensors", 1, "chunks", 0, "digests", to=[]),
    "a short digest": at("tensors", 1, "chunks", 0, "digests", to=[DIGEST[1:]]),
    "a digest in capitals": at("tensors", 1, "chunks", 0, "digests", to=[DIGEST.upper()]),
    "a digest with a line's end": at("tensors", 1, "chunks", 0, "digests", to=[DIGEST + "\n"]),
    "a huge shape": at("tensors", 0, "shape", to=[2**62, 2**62]),
    "a huge shape and a huge chunk": both(
        at("tensors", 0, "shape", to=[2**62, 2**62]),
        at("tensors", 0, "chunks", to=[]),
        again("tensors", 1, "chunks"),
    ),
    "an empty tensor with huge sizes": lambda body: body["tensors"].append({**EMPTY, "shape": [0, 2**62, 2**62]}),
    "a size over 63 bits": at("tensors", 0, "shape", to=[2**63, 1]),
    "a negative size": at("tensors", 0, "shape", to=[-30, -100]),
    "a negative offset": at("tensors", 0, "chunks", 0, "offsets", to=[-1, 0]),
    "a negative start": at("tensors", 0, "chunks", 0, "start", to=-4096),
    "a negative file": at("files", 0, "size_bytes", to=-1),
    "a negative header": at("files", 0, "header_bytes", to=-1),
    "a negative step": at("step", to=-1),
    "sixty-five dimensions": lambda body: body["tensors"].append({**EMPTY, "shape": [0] * 65}),
    "a scalar with dimensions": at("tensors", 1, "chunks", 0, "sizes", to=[1]),
    "a scalar with an offset": at("tensors", 1, "chunks", 0, "offsets", to=[0]),
    "fewer dimensions than the tensor": at("tensors", 0, "chunks", 0, "sizes", to=[1500]),
    "a header larger than its file": at("files", 1, "header_bytes", to=2**40),
    "a file that is listed twice": again("files"),
    "a tensor that is listed twice": again("tensors"),
    "values that are listed twice": again("trees"),
    "values in a file that is not listed": at("trees", 0, "file", to="other.json"),
    "values in a tensor file": at("trees", 0, "file", to="rank-00000.safetensors"),
    "a component with a path for a name": at("trees", 0, "component", to="../model"),
    "a component with a dot": at("trees", 0, "component", to="a.b"),
    "a scope with a path": at("trees", 0, "scope", to="rank-00000/.."),
    "a scope with other digits": at("trees", 0, "scope", to="rank-\u0660\u0660\u0660\u0660\u0660"),
    "another step than the folder's": at("step", to=501),
    "a folder elsewhere": at("folder", to="../step-000000500"),
    "a folder that is none": at("folder", to="latest"),
    "a folder with a second spelling": at("folder", to="step-0000000500"),
    "blocks of no bytes": at("block_bytes", to=0),
    "blocks of one byte": at("block_bytes", to=1),
    "blocks of all bytes": at("block_bytes", to=2**63 - 1),
    "a time that is none": at("created", to="yesterday"),
    "a name of a megabyte": at("tensors", 0, "name", to="x" * 1_000_000),
    "a text for a number": at("step", to="500"),
    "a fraction for a number": at("step", to=500.5),
    "no files": lambda body: body.pop("files"),
    "no tensors": lambda body: body.pop("tensors"),
    "deep nesting": lambda body: body.update(tensors=json.loads("[" * 900 + "]" * 900)),
}


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("attack", CORRUPT)
def test_a_right_digest_does_not_make_hostile_content_right(attack: str) -> None:
    data = forged(CORRUPT[attack])
    tracemalloc.start()
    with pytest.raises(CorruptCheckpointError) as caught:
        decode_manifest(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(str(caught.value)) < 10_000
    assert peak < 20 * len(data) + 200_000


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../x",
        "../../etc/passwd",
        "/etc/passwd",
        "a/../../x",
        "a//b",
        "a/./b",
        "",
        "a\\..\\b",
        "a\0b",
        ".tmp-1",
        "a\n",
    ],
)
@pytest.mark.parametrize("file", ["rank-00000.safetensors", "shared.json"])
def test_a_file_name_that_leads_out_is_refused_as_unsafe(name: str, file: str) -> None:
    with pytest.raises(UnsafeContentError):
        decode_manifest(forged(rename(file, name)))


@pytest.mark.parametrize("name", ["a b.json", "assets/x/y.json", "~", "..x", "%2e%2e", "é.json"])
def test_a_file_name_that_is_only_unusual_is_read(name: str) -> None:
    assert decode_manifest(forged(rename("shared.json", name)))[0].files[2].name == name


def test_an_unknown_type_or_a_newer_format_says_that_a_newer_version_is_needed() -> None:
    with pytest.raises(UnsupportedFormatError, match="newer version"):
        decode_manifest(forged(at("tensors", 0, "dtype", to="float7")))
    data, _ = encode_manifest(small())
    newer = data.replace(b'"holdfast_format":1', b'"holdfast_format":%d' % (FORMAT + 1))
    with pytest.raises(UnsupportedFormatError, match="newer version"):
        decode_manifest(newer)
    # Of a newer format nothing but its number is known.
    with pytest.raises(UnsupportedFormatError):
        decode_manifest(b'{"holdfast_format":2,"something":{"else":[]}}')
    for number in (b"0", b"-1"):
        with pytest.raises(CorruptCheckpointError):
            decode_manifest(data.replace(b'"holdfast_format":1', b'"holdfast_format":' + number))


def test_a_field_that_a_later_version_adds_is_passed_over() -> None:
    assert decode_manifest(forged(at("invented", to={"later": 1})))[0].step == 500


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("field", [b'"config":', b'"tensors":', b'"metrics":{"x":', b'"unknown":'])
def test_a_million_levels_are_refused_and_take_no_more_memory_than_their_bytes(opening: bytes, field: bytes) -> None:
    body = b"{" + field + opening * 1_000_000
    for data in (body, signed(body), b'{"holdfast_format":1,"digest":"","manifest":' + body):
        tracemalloc.start()
        with pytest.raises(CorruptCheckpointError):
            decode_manifest(data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 3 * len(data)


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("field", ["sizes", "offsets"])
def test_a_chunk_with_a_hundred_thousand_dimensions_is_refused_before_they_are_multiplied(field: str) -> None:
    data = forged(at("tensors", 0, "chunks", 0, field, to=[2**62] * 100_000))
    begin = time.process_time()
    with pytest.raises(CorruptCheckpointError):
        decode_manifest(data)
    assert time.process_time() - begin < 5


@pytest.mark.guarantee("G9")
def test_a_file_that_claims_to_be_huge_costs_nothing_to_list() -> None:
    data = forged(at("files", 2, "size_bytes", to=MAX_VALUES_BYTES))
    tracemalloc.start()
    manifest, _ = decode_manifest(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert manifest.size_bytes > MAX_VALUES_BYTES
    assert peak < 20 * len(data) + 100_000


def test_a_value_that_is_no_text_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no text"):
        encode_manifest(msgspec.structs.replace(small(), config={"a\ud800b": 1}))


def test_records_of_tensors_are_not_tracked_by_the_garbage_collector() -> None:
    """There may be hundreds of thousands of them, and they can be in no cycle."""
    chunk = ChunkRecord(file="f", start=0, offsets=(0,), sizes=(1,), digests=("0" * 64,))
    tensor = TensorRecord(name="t", dtype="float32", shape=(1,), chunks=(chunk,))
    assert not gc.is_tracked(chunk)
    assert not gc.is_tracked(tensor)
