"""The commit record: everything that a checkpoint consists of, as versioned JSON with a digest of itself.

Records enter and bytes leave, or bytes enter and checked records leave. Opens nothing, knows no torch. Bytes that come
from a disk are not trusted: sizes, counts and places are checked here, once, so that no reader has to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from blake3 import blake3

from holdfast.errors import CorruptCheckpointError, HoldfastError, SaveFailedError, UnsupportedFormatError, UsageError
from holdfast.ondisk import paths
from holdfast.ondisk.decoding import from_json
from holdfast.ondisk.dtypes import ELEMENT_TYPES, MAX_TENSOR_BYTES, element_type
from holdfast.ondisk.regions import MAX_DIMENSIONS, Box, cover_exactly

FORMAT = 1
BLOCK_BYTES = 1 << 20
"""The size of a block in a large checkpoint; see `block_bytes_for`."""
MAX_MANIFEST_BYTES = 1 << 30
MAX_VALUES_BYTES = 4 << 30
SEGMENT_CHARACTERS = 16
MAX_SEQUENCE = 2**53 - 1
"""Far above what any run gets to: a higher number was made up, and must not take the numbers after it away."""
_MIN_BLOCK_BYTES = 1 << 12
_MAX_BLOCK_BYTES = 1 << 30
_SMALLEST_CHOSEN = 64 << 10
_BLOCKS_PER_RANK = 8192
_BLOCKS_IN_ALL = 1 << 20

RankingMode = Literal["min", "max"]
Ranking = tuple[tuple[str, RankingMode], ...]
"""Metrics, each with which of its values is the best; `best` alone means the first of them."""

STATE_DICT_NOTE = "dcp"
"""The key in `extra` that records how PyTorch's keys are found again in a plain state dict. No user can give it."""

IMPORT_NOTE = "import"
"""The key in `extra` under which an imported checkpoint states what of its source was taken and what was left."""
IMPORTED_FROM = "imported_from"
"""The key in `versions` of an imported checkpoint: the layout that its source had. No save has it."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Sequence = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)]
Sizes = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Segment = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{16})?\Z")]


class ChunkRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One chunk of a tensor: its box in the whole, its place in a file, and a digest per block of its bytes."""

    file: str
    start: Count
    offsets: Sizes
    sizes: Sizes
    digests: tuple[Digest, ...]

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One tensor leaf, whole: its type, its shape and the chunks that make it up. `sharded`: it was one of a mesh."""

    name: str
    dtype: str
    shape: Sizes
    chunks: tuple[ChunkRecord, ...]
    sharded: bool = False

    @property
    def item_bytes(self) -> int:
        return element_type(self.dtype).item_bytes

    @property
    def size_bytes(self) -> int:
        return sum(chunk.box.volume for chunk in self.chunks) * self.item_bytes


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One file. A tensor file's digest runs over its header and its chunks' block digests; any other file's, over its
    bytes. `header_bytes` is 0 for a file that is no tensor file."""

    name: str
    size_bytes: Count
    digest: Digest
    header_bytes: Count = 0


class TreeRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One component's values, or those of one scope of it, and the file that holds them. `type` is the class of an
    optimizer or of an object with a state of its own: to another class the state may mean nothing. `model` is the
    component that had all parameters of an optimizer."""

    component: str
    kind: str
    file: str
    scope: str = ""
    type: str = ""
    model: str = ""

    @property
    def name(self) -> str:
        return paths.tree_name(self.component, self.scope)


class MeshRecord(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A device mesh that some leaf was sharded over."""

    shape: tuple[Count, ...]
    dimensions: tuple[str, ...] = ()


class UserMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller of a save states about a checkpoint. The body of its manifest has each of these fields, under the
    same name; a save hands them from its arguments to the manifest as this one record. Values that may hold more than
    JSON can express are encoded by the codec."""

    metrics: dict[str, Any] = {}
    progress: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    config: Any = None
    guards: dict[str, Any] = {}
    tags: tuple[str, ...] = ()
    epoch: int | None = None
    ranking: Ranking = ()


class Body(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A committed checkpoint, but for its tensors. Values that may hold more than JSON can say (`metrics` ... `guards`)
    are encoded by the codec.

    line: the sequence numbers of all that this one goes back to, also those that were removed, as ranges.
    segments: the segment of each of these ranges; `segment` is that of this checkpoint. See `holdfast.runs.lineage`.
    epoch: how many epochs were done, where the training reported it.
    ranking: the metrics that the training keeps the best by, each with how it ranks; `best` means the first of them.
    """

    run_id: str
    folder: str
    step: Count
    sequence: Sequence
    parent: Digest | None
    created: str
    world_size: Count
    meshes: tuple[MeshRecord, ...]
    block_bytes: Count
    files: tuple[FileRecord, ...]
    trees: tuple[TreeRecord, ...]
    metrics: dict[str, Any]
    progress: dict[str, Any]
    extra: dict[str, Any]
    config: Any
    guards: dict[str, Any]
    tags: tuple[str, ...]
    versions: dict[str, str]
    line: tuple[tuple[Count, Count], ...] = ()
    segments: tuple[Segment, ...] = ()
    segment: Segment = ""
    epoch: Count | None = None
    ranking: Ranking = ()

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class Manifest(Body, frozen=True, kw_only=True, gc=False):
    """A committed checkpoint. `line` are the sequence numbers of all that it goes back to; see `Body`."""

    tensors: tuple[TensorRecord, ...]


class ManifestHead(Body, frozen=True, kw_only=True, gc=False):
    """A manifest whose tensors are still the text that they came as: enough to list a run of thousands."""

    tensors: msgspec.Raw

    def opened(self) -> Manifest:
        """Return the whole manifest. What is wrong with the tensors is raised here."""
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name != "tensors"}
        try:
            tensors = from_json(self.tensors, tuple[TensorRecord, ...])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise CorruptCheckpointError(f"the content is no manifest: {error}") from None
        manifest = Manifest(**values, tensors=tensors)
        check_manifest(manifest)
        return manifest


class _Envelope(msgspec.Struct, frozen=True, kw_only=True):
    holdfast_format: int
    digest: str = ""
    manifest: msgspec.Raw = msgspec.Raw(b"null")


class _Abandonment(msgspec.Struct, frozen=True, kw_only=True):
    at: str = ""


class _AbandonedEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    abandoned: _Abandonment


_ABANDONED = b'{"holdfast_format":%d,"abandoned":' % FORMAT


def encode_abandoned(why: dict[str, Any]) -> bytes:
    """Return what is put in a manifest's place so that an attempt can never be committed any more."""
    return _ABANDONED + msgspec.json.encode(why) + b"}\n"


def is_abandoned(data: bytes | bytearray) -> bool:
    return data.startswith(_ABANDONED)


def abandoned_at(data: bytes | bytearray) -> str:
    """Return the time that such a word states; empty where it states none that can be decoded."""
    try:
        return from_json(data, _AbandonedEnvelope).abandoned.at
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return ""


def block_bytes_for(sizes: Collection[int]) -> int:
    """Return the size of a block for a checkpoint in which each rank writes so many bytes of tensors.

    A rank that needs a part of a chunk reads whole blocks: small ones cost fewer bytes on another number of ranks, and
    more digests in the manifest, which every rank reads whole: 67 bytes for each block of all ranks.
    """
    wanted = max(-(-max(sizes, default=0) // _BLOCKS_PER_RANK), -(-sum(sizes) // _BLOCKS_IN_ALL), 1)
    return min(max(1 << (wanted - 1).bit_length(), _SMALLEST_CHOSEN), BLOCK_BYTES)


def digest_of(data: bytes | bytearray | memoryview) -> str:
    return blake3(data).hexdigest()


def tensor_file_digest(header: bytes, block_digests: Iterable[str]) -> str:
    """Return the digest of a tensor file: over the header and then each block's digest, in the order of the file.

    Every byte of the file enters it, and none has to be digested twice to have it.
    """
    state = blake3(header)
    state.update(bytes.fromhex("".join(block_digests)))
    return state.hexdigest()


def encode_manifest(manifest: Manifest) -> tuple[bytes, str]:
    """Return the bytes of `manifest.json` and the digest that is the checkpoint's identity."""
    try:
        body = msgspec.json.encode(manifest, order="deterministic")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"a name or a value is no text: {ascii(error.object)[:200]}", advice="give it another name or value"
        ) from None
    digest = digest_of(body)
    return b'{"holdfast_format":%d,"digest":"%s","manifest":%s}\n' % (FORMAT, digest.encode(), body), digest


def decode_manifest(data: bytes | bytearray) -> tuple[Manifest, str]:
    """Check bytes that claim to be a manifest, and give the record and its digest."""
    head, digest = decode_head(data)
    return head.opened(), digest


def decode_head(data: bytes | bytearray) -> tuple[ManifestHead, str]:
    """Return the manifest without decoding its tensors. The digest shows that they are what was committed."""
    try:
        envelope = from_json(data, _Envelope)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"the content is no manifest: {error}") from None
    if envelope.holdfast_format > FORMAT:
        raise UnsupportedFormatError(
            f"written in format {envelope.holdfast_format}; this version reads formats up to {FORMAT}",
            advice="use a newer version of Holdfast",
        )
    if envelope.holdfast_format < 1:
        raise CorruptCheckpointError(f"there is no format {envelope.holdfast_format}")
    # Where they lie in `data`, which the tensors' text keeps: a copy would double what a large manifest takes.
    if digest_of(memoryview(envelope.manifest)) != envelope.digest:
        raise CorruptCheckpointError("the content does not have the digest that the manifest states")
    try:
        head = from_json(envelope.manifest, ManifestHead)
        check_body(head)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"the content is no manifest: {error}") from None
    require_known_types(head.tensors)
    return head, envelope.digest


class _TypedTensor(msgspec.Struct, frozen=True):
    dtype: str


_UNKNOWN_TYPE = re.compile(rb'"dtype"\s*:\s*"(?!(?:%s)")' % "|".join(ELEMENT_TYPES).encode())


def require_known_types(tensors: msgspec.Raw) -> None:
    """Refuse a tensor of an unknown element type, as a newer format is refused: before the checkpoint is chosen.

    The text is searched, which takes a fraction of the time of decoding it; only where that finds something are the
    types decoded. Tensors that cannot be decoded are damage, which is found when they are opened.
    """
    if _UNKNOWN_TYPE.search(memoryview(tensors)) is None:
        return
    try:
        typed = from_json(tensors, tuple[_TypedTensor, ...])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return
    for tensor in typed:
        element_type(tensor.dtype)


def require_readable(manifest: Manifest, data: bytes, *, tensors: bool = True) -> None:
    """Raise a SaveFailedError if a reader would refuse this manifest, whose bytes are `data`. To be called before it is
    created: what no reader takes must not become a checkpoint.

    Without `tensors` they are taken on trust, as by `check_manifest`.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise SaveFailedError(
            f"the manifest has {len(data):,} bytes, and no reader takes more than {MAX_MANIFEST_BYTES:,}",
            step=manifest.step,
            advice="store less in metrics=, progress=, extra=, guards= and config=, or make it a component, which "
            "has a file of its own",
        )
    try:
        check_manifest(manifest, tensors=tensors)
        # By the reader itself, types and limits included; the tensors, which may be many, were checked as they are.
        decode_head(encode_manifest(msgspec.structs.replace(manifest, tensors=()))[0])
    except HoldfastError as error:
        raise SaveFailedError(f"the manifest would be one that no reader takes: {error}", step=manifest.step) from error


def check_manifest(manifest: Manifest, *, tensors: bool = True) -> None:
    """Check everything that a reader relies on. A manifest with a right digest can still be forged.

    Without `tensors` they are taken on trust: by a writer that has checked the very same ones for the save before.
    """
    files = check_body(manifest)
    if tensors:
        _check_tensors(manifest, files)


def check_body(manifest: Body) -> dict[str, FileRecord]:
    """Check everything but the tensors; return the files by their names."""
    named = paths.parse_folder(manifest.folder)
    if named is None or named.step != manifest.step:
        raise CorruptCheckpointError(f"{manifest.folder[:200]!r} is no name of a checkpoint of step {manifest.step}")
    _check_created(manifest.created)
    _check_line(manifest)
    if not _MIN_BLOCK_BYTES <= manifest.block_bytes <= _MAX_BLOCK_BYTES:
        raise CorruptCheckpointError(f"blocks of {manifest.block_bytes} bytes are outside of the limits")
    files = {file.name: file for file in manifest.files}
    if len(files) != len(manifest.files):
        raise CorruptCheckpointError("a file is listed twice")
    for file in manifest.files:
        paths.safe_relative(file.name)
        if file.header_bytes > file.size_bytes:
            raise CorruptCheckpointError(f"{file.name} has a header larger than itself")
    _check_trees(manifest.trees, files)
    return files


def _check_line(manifest: Body) -> None:
    last = -1
    for first, end in manifest.line:
        if not last < first <= end < manifest.sequence:
            raise CorruptCheckpointError("the line that it goes back to does not ascend")
        last = end
    if manifest.segments and len(manifest.segments) != len(manifest.line):
        raise CorruptCheckpointError("the line that it goes back to has not one segment for each range")


def _check_created(created: str) -> None:
    try:
        datetime.fromisoformat(created)
    except ValueError:
        raise CorruptCheckpointError(f"{created[:200]!r} is no date and time") from None


_SCOPE = re.compile(r"(?:(?:rank|stage)-[0-9]{5,9})?", re.ASCII)


def _check_trees(trees: Iterable[TreeRecord], files: Mapping[str, FileRecord]) -> None:
    seen = set()
    for tree in trees:
        try:
            paths.check_component_name(tree.component)
        except HoldfastError as error:
            raise CorruptCheckpointError(error.problem[:400]) from None
        if _SCOPE.fullmatch(tree.scope) is None:
            raise CorruptCheckpointError(f"{tree.scope[:200]!r} is no scope", component=tree.component)
        if tree.name in seen:
            raise CorruptCheckpointError(f"the values of '{tree.name}' are listed twice")
        file = files.get(tree.file)
        if file is None or file.header_bytes:
            raise CorruptCheckpointError(
                f"the values of '{tree.name}' lie in {tree.file[:200]!r}, which is not listed as a file of values"
            )
        if file.size_bytes > MAX_VALUES_BYTES:
            raise CorruptCheckpointError(
                f"the values of '{tree.name}' have {file.size_bytes:,} bytes, and at most {MAX_VALUES_BYTES:,} are read"
            )
        seen.add(tree.name)


def _check_tensors(manifest: Manifest, files: Mapping[str, FileRecord]) -> None:
    seen = set()
    used: dict[str, list[tuple[int, int, str]]] = {file.name: [] for file in manifest.files if file.header_bytes}
    block_bytes = manifest.block_bytes
    # There may be very many tensors, so what is asked of each is asked once.
    for tensor in manifest.tensors:
        name, shape, chunks = tensor.name, tensor.shape, tensor.chunks
        if name in seen:
            raise CorruptCheckpointError("a tensor is listed twice", leaf=name)
        seen.add(name)
        if len(name) > paths.MAX_NAME_CHARACTERS:
            raise CorruptCheckpointError("a name is over the limit", leaf=name[:200])
        if len(shape) > MAX_DIMENSIONS:
            raise CorruptCheckpointError(f"{len(shape)} dimensions are over the limit", leaf=name)
        item_bytes = element_type(tensor.dtype).item_bytes
        # An empty tensor can state any sizes beside its zero, and torch counts its strides in 64 bits.
        if math.prod(shape if 0 not in shape else _ones(shape)) * item_bytes > MAX_TENSOR_BYTES:
            raise CorruptCheckpointError(f"no tensor has the shape {list(shape)}", leaf=name)
        for chunk in chunks:
            size = _check_chunk(name, chunk, item_bytes, block_bytes, files)
            used[chunk.file].append((chunk.start, chunk.start + size, name))
        if len(chunks) == 1 and _is_whole(chunks[0], shape):
            continue
        wrong = cover_exactly([chunk.box for chunk in chunks], shape)
        if wrong is not None:
            raise CorruptCheckpointError(wrong, leaf=name)
    for name, ranges in used.items():
        _check_ranges(files[name], sorted(ranges))


def _ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(size, 1) for size in shape)


def _is_whole(chunk: ChunkRecord, shape: tuple[int, ...]) -> bool:
    return chunk.sizes == shape and len(chunk.offsets) == len(shape) and not any(chunk.offsets)


def _check_chunk(
    leaf: str, chunk: ChunkRecord, item_bytes: int, block_bytes: int, files: Mapping[str, FileRecord]
) -> int:
    size = math.prod(chunk.sizes) * item_bytes
    file = files.get(chunk.file)
    if file is None or not file.header_bytes:
        problem = f"a chunk lies in {chunk.file[:200]!r}, which is not listed as a tensor file"
        raise CorruptCheckpointError(problem, leaf=leaf)
    if chunk.start < file.header_bytes or chunk.start + size > file.size_bytes:
        raise CorruptCheckpointError(f"a chunk lies outside of {chunk.file}", leaf=leaf)
    if len(chunk.digests) != -(-size // block_bytes):
        raise CorruptCheckpointError("a chunk's number of digests does not fit its size", leaf=leaf)
    return size


def _check_ranges(file: FileRecord, ranges: list[tuple[int, int, str]]) -> None:
    """Raise unless a tensor file is its header and its chunks, back to back: every byte is in exactly one digest."""
    if not file.header_bytes:
        raise CorruptCheckpointError(f"{file.name} holds tensors and has no header")
    position = file.header_bytes
    for start, end, leaf in ranges:
        if start != position:
            raise CorruptCheckpointError(f"the chunks of {file.name} do not lie back to back", leaf=leaf)
        position = end
    if position != file.size_bytes:
        raise CorruptCheckpointError(f"{file.name} has bytes that belong to no tensor")
