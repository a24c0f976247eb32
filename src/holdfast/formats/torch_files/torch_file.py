"""Files of `torch.save` as sources of weights, and how they are written. A file enters; its tree leaves, without data.

Both forms are read: the zip file that torch writes since 1.6, and the older one with a magic number. Nothing in the
file is run: see `pickles`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from holdfast.errors import CorruptCheckpointError, HoldfastError, UnsafeContentError, UnsupportedFormatError
from holdfast.formats.base import Format
from holdfast.formats.binary import BinaryFile
from holdfast.formats.source import Source
from holdfast.formats.torch_files.pickle_machine import Global, Truncated
from holdfast.formats.torch_files.pickles import MAX_PICKLE_BYTES, load_first, load_plain
from holdfast.formats.torch_files.stand_ins import plain_globals
from holdfast.formats.torch_files.stored_tree import Storage, StoredTensor, finished_tree
from holdfast.formats.torch_files.torch_writing import write_torch
from holdfast.formats.torch_files.zip_file import first_name, is_zip, zip_members
from holdfast.ondisk.dtypes import ELEMENT_TYPES

if TYPE_CHECKING:
    from holdfast.formats.exporting.export import ExportJob

__all__ = ["TorchFormat", "TorchSource", "is_torch", "read_torch", "write_torch"]

_PICKLE = "data.pkl"
_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
# The same number as every protocol writes it after its own mark.
_MAGIC_BYTES = _MAGIC_NUMBER.to_bytes(10, "little")
_LEGACY_VERSION = 1001
_FIRST_READ_BYTES = 1 << 20
_MAX_LEGACY_BYTES = 128 << 20
_STORAGE_TYPES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}


def is_torch(file: BinaryFile) -> bool:
    """Return whether a file is one of `torch.save`, from its content."""
    if is_zip(file):
        # torch writes the pickle first: a file that was cut off is damaged, not unknown.
        if first_name(file).rpartition("/")[2] == _PICKLE:
            return True
        try:
            return _archive_prefix(zip_members(file), file) is not None
        except HoldfastError:
            return False
    return _MAGIC_BYTES in file.read(0, min(file.size_bytes, 32))


def read_torch(file: BinaryFile) -> Any:
    """Return the value in a file of `torch.save`, with a `TensorEntry` in the place of each tensor.

    Only the pickle is read. Two tensors that are the same elements of the same storage are one entry. Code, classes and
    tensors that are not dense are an UnsafeContentError that names them.
    """
    return _read_zip(file) if is_zip(file) else _read_legacy(file)


def _read_zip(file: BinaryFile) -> Any:
    members = zip_members(file)
    prefix = _archive_prefix(members, file)
    if prefix is None:
        raise UnsupportedFormatError("the zip file is none of torch.save: it has no data.pkl", file=file.name)
    if f"{prefix}constants.pkl" in members:
        raise UnsupportedFormatError(
            "this is a TorchScript program, which is code", file=file.name, advice="save the state dict of the model"
        )
    order = members.get(f"{prefix}byteorder")
    if order is not None and order.read(0, min(order.size_bytes, 8)) != b"little":
        raise UnsupportedFormatError("the numbers in the file have the big end first", file=file.name)
    storages: dict[str, Storage] = {}

    def persistent(identity: Any) -> Storage:
        named = _identity(identity)
        if named.view is not None:
            raise CorruptCheckpointError("a storage is a view of another one")
        if named.key not in storages:
            part = members.get(f"{prefix}data/{named.key}")
            if part is None:
                raise CorruptCheckpointError(f"the storage '{named.key[:100]}' is not in the file")
            storages[named.key] = Storage(named.key, named.dtype, part)
        if storages[named.key].dtype != named.dtype:
            return Storage(named.key, named.dtype, storages[named.key].file)
        return storages[named.key]

    pickled = members[prefix + _PICKLE]
    if pickled.size_bytes > MAX_PICKLE_BYTES:
        raise CorruptCheckpointError(f"a pickle of {pickled.size_bytes} bytes is none of a checkpoint", file=file.name)
    data = pickled.read(0, pickled.size_bytes)
    value = load_plain(data, allowed=_torch_globals(), persistent=persistent, name=file.name)
    return finished_tree(value, file.name)


def _archive_prefix(members: Mapping[str, BinaryFile], file: BinaryFile) -> str | None:
    """Return the folder in which everything of the file is, with a slash; None where there is no pickle of a state."""
    found = [name for name in members if name == _PICKLE or (name.endswith(f"/{_PICKLE}") and name.count("/") == 1)]
    if len(found) > 1:
        raise UnsafeContentError("the zip file has two values in it", file=file.name)
    return found[0].removesuffix(_PICKLE) if found else None


def _read_legacy(file: BinaryFile) -> Any:
    """Read the form without a zip file: five pickles one after the other, then the storages."""
    limit = min(file.size_bytes, _MAX_LEGACY_BYTES)
    size = min(limit, _FIRST_READ_BYTES)
    while True:
        try:
            return _legacy_tree(file, file.read(0, size))
        except Truncated as error:
            # How long the pickles are stands nowhere.
            if error.needed_bytes > limit:
                raise CorruptCheckpointError(error.problem, file=file.name) from None
            size = min(max(4 * size, error.needed_bytes), limit)


def _legacy_tree(file: BinaryFile, data: bytes) -> Any:
    nothing: dict[tuple[str, str], Any] = {}
    head, position = [], 0
    for _ in range(3):
        value, position = load_first(data, position, allowed=nothing, persistent=None, name=file.name)
        head.append(value)
    if head[0] != _MAGIC_NUMBER or head[1] != _LEGACY_VERSION or type(head[2]) is not dict:
        raise UnsupportedFormatError("this is no file of torch.save", file=file.name)
    if head[2].get("little_endian") is not True:
        raise UnsupportedFormatError("the numbers in the file have the big end first", file=file.name)
    storages: dict[str, Storage] = {}

    def persistent(identity: Any) -> Storage:
        named = _identity(identity)
        if named.view is not None:
            raise UnsupportedFormatError("the file is of a version of torch before 0.4", advice="save it again")
        return storages.setdefault(named.key, Storage(named.key, named.dtype, None))

    value, position = load_first(data, position, allowed=_torch_globals(), persistent=persistent, name=file.name)
    keys, position = load_first(data, position, allowed=nothing, persistent=None, name=file.name)
    _locate(file, keys, position, storages)
    return finished_tree(value, file.name)


def _locate(file: BinaryFile, keys: Any, position: int, storages: dict[str, Storage]) -> None:
    """Set where each storage lies: in the order of the keys, each after the number of its elements."""
    if type(keys) is not list or not all(type(key) is str for key in keys) or sorted(keys) != sorted(storages):
        raise CorruptCheckpointError("the storages of the file are not those that its tensors have", file=file.name)
    for key in keys:
        (count,) = struct.unpack("<q", file.read(position, 8))
        if count < 0:
            raise CorruptCheckpointError(f"the storage '{key[:100]}' has {count} elements", file=file.name)
        size_bytes = count * ELEMENT_TYPES[storages[key].dtype].item_bytes
        storages[key].file = file.part(position + 8, size_bytes, f"storage {key[:100]}")
        position += 8 + size_bytes


class _Identity(NamedTuple):
    """What the pickle says of a storage."""

    dtype: str
    key: str
    view: Any


def _identity(identity: Any) -> _Identity:
    """Return the parts of a persistent id: `("storage", type, key, location, elements)`, and a view in the old form."""
    if type(identity) is not tuple or len(identity) not in (5, 6) or identity[0] != "storage":
        raise CorruptCheckpointError("the pickle refers to something that is no storage")
    _, kind, key, _, count = identity[:5]
    if type(kind) is not StorageType or type(key) is not str or type(count) is not int:
        raise CorruptCheckpointError("the pickle refers to something that is no storage")
    return _Identity(kind.dtype, key, identity[5] if len(identity) == 6 else None)


@dataclass(frozen=True, slots=True)
class StorageType:
    """Stands for one of torch's classes of storages."""

    dtype: str


@lru_cache(maxsize=1)
def _torch_globals() -> Mapping[tuple[str, str], Any]:
    """Return what a file of torch.save may refer to: tensors, storages and plain values."""
    from holdfast.state.devices.registry import ACCELERATORS

    made = dict(plain_globals())
    # Files of older versions name the storages of a device by a class in its module.
    for module in ("torch", "torch.storage", *(f"torch.{kind.type}" for kind in ACCELERATORS)):
        for prefix, dtype in _STORAGE_TYPES.items():
            made[module, f"{prefix}Storage"] = StorageType(dtype)
        made[module, "UntypedStorage"] = StorageType("uint8")
    made["torch._utils", "_rebuild_tensor"] = _tensor
    made["torch._utils", "_rebuild_tensor_v2"] = _tensor
    made["torch._utils", "_rebuild_tensor_v3"] = _tensor_of_dtype
    made["torch._utils", "_rebuild_parameter"] = _parameter
    made["torch._utils", "_rebuild_parameter_with_state"] = _parameter
    made["torch._tensor", "_rebuild_from_type_v2"] = _tensor_of_class
    made["torch", "Tensor"] = _refuse_call
    made["torch.nn.parameter", "Parameter"] = _refuse_call
    return made


def _tensor(*arguments: Any) -> StoredTensor:
    if len(arguments) not in (4, 5, 6, 7):
        raise CorruptCheckpointError("a tensor of the pickle has parts that are not known")
    _refuse_marks(arguments[6] if len(arguments) == 7 else None)
    return StoredTensor.of(*arguments[:4])


def _tensor_of_dtype(*arguments: Any) -> StoredTensor:
    """Return a tensor of a type that has no class of storages: the storage is bytes, the type stands beside it."""
    import torch

    if len(arguments) not in (7, 8) or type(arguments[6]) is not torch.dtype:
        raise CorruptCheckpointError("a tensor of the pickle has parts that are not known")
    _refuse_marks(arguments[7] if len(arguments) == 8 else None)
    return StoredTensor.of(*arguments[:4], dtype=str(arguments[6]).removeprefix("torch."))


def _refuse_marks(marks: Any) -> None:
    """Raise for a tensor whose stored elements are not its values: torch marks a view as conjugated or negated and
    leaves the elements as they are."""
    if marks is None:
        return
    if (
        type(marks) is not dict
        or not marks.keys() <= {"conj", "neg"}
        or not all(type(m) is bool for m in marks.values())
    ):
        raise CorruptCheckpointError("a tensor of the pickle has parts that are not known")
    if any(marks.values()):
        raise UnsupportedFormatError(
            "a tensor is a conjugated or negated view, whose values are not what is stored",
            advice="save it again with tensor.resolve_conj().resolve_neg() in its place",
        )


def _parameter(*arguments: Any) -> StoredTensor:
    if len(arguments) not in (3, 4) or type(arguments[0]) is not StoredTensor:
        raise CorruptCheckpointError("a parameter of the pickle is made from what is no tensor")
    return arguments[0]


def _tensor_of_class(*arguments: Any) -> StoredTensor:
    """Return a tensor that had attributes. They are not kept: no code of the file's class could use them."""
    if len(arguments) != 4 or not isinstance(arguments[0], Global) or type(arguments[2]) is not tuple:
        raise CorruptCheckpointError("a tensor of the pickle has no form that is known")
    if arguments[0].target not in (_tensor, _tensor_of_dtype, _parameter):
        raise CorruptCheckpointError("a tensor of the pickle has no form that is known")
    made: StoredTensor = arguments[0].target(*arguments[2])
    return made


def _refuse_call(*arguments: Any) -> Any:
    raise CorruptCheckpointError("a tensor of the pickle has no form that is known")


class TorchSource(Source):
    """The value in one file of `torch.save`."""

    format: ClassVar[str] = "torch"

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._file = BinaryFile.open(path)
        try:
            tree = read_torch(self._file)
        except BaseException:
            self._file.close()
            raise
        self._tree: Mapping[str, Any] = tree if isinstance(tree, Mapping) else {"value": tree}

    @property
    def tree(self) -> Mapping[str, Any]:
        return self._tree

    def close(self) -> None:
        self._file.close()


class TorchFormat(Format):
    """A file of `torch.save`: `.pt`, `.pth`, `.bin`, `.ckpt`. What is written loads with `weights_only=True`."""

    name: ClassVar[str] = "torch"

    def detects(self, path: Path) -> bool:
        if not path.is_file():
            return False
        try:
            with BinaryFile.open(path) as file:
                return is_torch(file)
        except HoldfastError:
            return False

    def open(self, path: Path) -> Source:
        return TorchSource(path)

    def write(self, job: ExportJob, target: Path) -> None:
        with target.open("xb") as stream:
            write_torch(stream, job.tree, job.pieces)
