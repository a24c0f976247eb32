"""What Holdfast must know of a torch tensor: its type's name, the pieces of it that this rank holds, their memory."""

from __future__ import annotations

import base64
import ctypes
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import UninitializedTensorMixin

from holdfast.errors import HoldfastError, StateMismatchError, UsageError
from holdfast.ondisk.codec import Flattened, Subclass, encode, registered_tensor, subclass_of
from holdfast.ondisk.dtypes import ELEMENT_TYPES
from holdfast.ondisk.manifest import MeshRecord
from holdfast.ondisk.regions import Box, Cut, strides_of, whole

if sys.byteorder != "little":
    raise ImportError("Holdfast stores tensors as they lie in memory, which its format wants little end first")

_TORCH_DTYPES = {name: getattr(torch, name) for name in ELEMENT_TYPES if hasattr(torch, name)}
_DTYPE_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


MAX_INLINE_BYTES = 1 << 20
# What is copied from a device at a time, where a tensor cannot be read in its own memory.
HOST_PIECE_BYTES = 32 << 20


def inline_text(path: str, tensor: torch.Tensor) -> str:
    """Return a small tensor as a text that holds all of it: `data:DTYPE:SHAPE:BASE64`. `tensor_of_text` reads it."""
    check_storable(tensor, component="", leaf=path)
    if isinstance(tensor, DTensor) or tensor.nbytes > MAX_INLINE_BYTES:
        what = "a DTensor" if isinstance(tensor, DTensor) else f"a tensor of {tensor.nbytes:,} bytes"
        raise UsageError(
            f"{what} cannot be stored in place",
            leaf=path,
            advice=f"tensors up to {MAX_INLINE_BYTES:,} bytes can; make a larger one a component, such as a dict",
        )
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    shape = ",".join(map(str, dense.shape))
    return f"data:{dtype_name(dense)}:{shape}:{base64.b64encode(bytes(memory_of(dense))).decode()}"


def torch_dtype(name: str) -> torch.dtype:
    try:
        return _TORCH_DTYPES[name]
    except KeyError:
        raise UsageError(f"this version of torch ({torch.__version__}) has no type '{name}'") from None


def dtype_name(tensor: torch.Tensor) -> str:
    return _DTYPE_NAMES[tensor.dtype]


def flattened(tensor: torch.Tensor) -> Flattened | None:
    """Take a tensor of a wrapper subclass apart; None for one that is stored as it is, or cannot be stored at all.

    The inner tensors are the live ones. Those of a DTensor whose local part is of such a class are DTensors themselves,
    cut as the whole is.
    """
    if type(tensor) in PLAIN_TYPES:
        return None
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    kind = type(local)
    if not _is_wrapper(kind) or not all(type(length) is int for length in tensor.shape):
        return None
    names, context = local.__tensor_flatten__()
    inner = {name: getattr(local, name).detach() for name in names}
    if not isinstance(tensor, DTensor):
        return Flattened(kind, inner, context)
    shards = even_shards(tensor)
    if shards is None or any(one.dim() == 0 for one in inner.values()):
        return None
    return Flattened(kind, {name: cut_like(tensor, one) for name, one in inner.items()}, context, shards)


def _is_wrapper(kind: type) -> bool:
    """Return whether a class declares its inner tensors. A pending result of a collective counts as a plain tensor."""
    if kind in PLAIN_TYPES or issubclass(kind, DTensor | AsyncCollectiveTensor):
        return False
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def even_shards(tensor: DTensor) -> int | None:
    """Return the number of equal pieces along the first dimension; None when the tensor is cut in any other way."""
    shards = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if type(placement) is Shard and placement.dim == 0:
            shards *= size
        elif not placement.is_replicate():
            return None
    local = tensor._local_tensor
    return shards if local.dim() > 0 and local.shape[0] * shards == tensor.shape[0] else None


def cut_like(tensor: DTensor, inner: torch.Tensor) -> DTensor:
    """Return an inner tensor of one rank as a piece of a whole that lies on the mesh as the outer tensor does."""
    return DTensor.from_local(inner, tensor.device_mesh, tensor.placements, run_check=False)


def plain_parts(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors that hold a tensor's content, with what each adds to its name: itself, or its inner ones."""
    flat = flattened(tensor)
    if flat is None:
        yield "", tensor
        return
    for name, inner in flat.tensors.items():
        for suffix, part in plain_parts(inner):
            yield f".{name}{suffix}", part


def tensor_class(name: str) -> type | None:
    """Return the class of tensors that a checkpoint names, if the program knows it already: a registered one, or one of
    torchao that is loaded. Nothing is imported."""
    registered = registered_tensor(name)
    if registered is not None or name.partition(".")[0] != "torchao":
        return registered
    ahead: list[type] = [torch.Tensor]
    while ahead:
        kind = ahead.pop()
        if f"{kind.__module__}.{kind.__qualname__}" == name and _is_wrapper(kind):
            return kind
        ahead += type.__subclasses__(kind)
    return None


def is_same_form(one: Subclass, other: Subclass) -> bool:
    """Return whether two tensors of a wrapper subclass are of one kind, so that one can be filled from the other."""
    return one._replace(stride=(), shards=1, tensors={}) == other._replace(stride=(), shards=1, tensors={}) and (
        one.tensors.keys() == other.tensors.keys()
    )


def stored_form(tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> Subclass:
    """Return the stored form of a live tensor of a wrapper subclass, with its inner tensors by their path."""

    def note(path: str, inner: torch.Tensor) -> str:
        tensors[path] = inner
        return path

    form = subclass_of(encode(tensor, path="live", on_tensor=note, flatten=flattened))
    if form is None:
        raise HoldfastError(f"a tensor of type '{type(tensor).__qualname__}' cannot be taken apart")
    return form


def unflattened(
    kind: Any,
    inner: dict[str, torch.Tensor],
    context: object,
    saved: Subclass,
    place: str,
    like: torch.Tensor | None,
) -> torch.Tensor:
    """Put a tensor together, and make sure that it is what was saved: its class decides what it makes of the parts."""
    local = like.to_local() if is_sharded(like) else None
    shape = saved.shape if local is None else tuple(local.shape)
    stride = saved.stride if local is None else tuple(local.stride())
    try:
        tensor: torch.Tensor = kind.__tensor_unflatten__(inner, context, torch.Size(shape), stride)
        if is_sharded(like):
            tensor = DTensor.from_local(
                tensor,
                like.device_mesh,
                like.placements,
                run_check=False,
                shape=torch.Size(saved.shape),
                stride=saved.stride,
            )
        same = is_same_form(stored_form(tensor, {}), saved)
    except HoldfastError:
        raise
    except Exception as error:
        raise StateMismatchError(
            f"a '{saved.name}' could not be made from what was saved: {type(error).__name__}: {error}", leaf=place
        ) from error
    if not same:
        raise StateMismatchError(f"a '{saved.name}' that is made from what was saved is not what was saved", leaf=place)
    return tensor


def check_storable(tensor: torch.Tensor, *, component: str, leaf: str) -> None:
    """Refuse, before any file is touched, a tensor whose bytes are not all of it."""
    plain = type(tensor) in PLAIN_TYPES and tensor.is_cpu and not tensor.is_nested
    if plain and tensor.dtype in _DTYPE_NAMES and tensor.layout is torch.strided:
        return  # nearly all are such, and there may be very many
    problem = _why_not_storable(tensor)
    if problem is not None:
        raise UsageError(f"{problem[0]} cannot be stored", component=component, leaf=leaf, advice=problem[1])


def has_host_memory(value: object) -> bool:
    """Return whether a value is a tensor in host memory, of a kind that always has some."""
    return type(value) in PLAIN_TYPES and value.is_cpu  # type: ignore[attr-defined]


def require_memory(tensor: torch.Tensor, *, component: str, leaf: str) -> None:
    """Refuse a live tensor that a restore cannot fill, because it has no memory yet."""
    if isinstance(tensor, UninitializedTensorMixin):
        raise StateMismatchError(
            "the parameter has no shape yet, so nothing can be restored into it",
            component=component,
            leaf=leaf,
            advice="run the lazy module once before the restore; no live object was changed",
        )
    if tensor.device.type == "meta":
        raise StateMismatchError(
            "the tensor is on the meta device and has no memory to restore into",
            component=component,
            leaf=leaf,
            advice="give the model memory before the restore, such as with model.to_empty(device=...), and build the "
            "optimizer after that; no live object was changed",
        )


def _why_not_storable(tensor: torch.Tensor) -> tuple[str, str] | None:
    kind = type(tensor)
    if isinstance(tensor, UninitializedTensorMixin):
        return "a parameter that has no shape yet", "run the lazy module once before the first save"
    if kind not in PLAIN_TYPES and not isinstance(tensor, DTensor):
        advice = "turn it into a plain tensor or a DTensor, or give it __tensor_flatten__ and __tensor_unflatten__"
        return f"a tensor of type '{kind.__module__}.{kind.__qualname__}'", advice
    if isinstance(tensor, DTensor) and _is_wrapper(type(tensor._local_tensor)):
        local = type(tensor._local_tensor)
        return f"a DTensor of '{local.__module__}.{local.__qualname__}', {_why_not_joined(tensor)},", (
            "shard it into equal pieces along dimension 0 only, and keep no scalar tensor in it"
        )
    if tensor.is_nested:
        return "a nested tensor", "store its values and offsets"
    if tensor.dtype not in _DTYPE_NAMES:
        return f"a tensor of {tensor.dtype}", "turn it into one of the types in docs/format.md"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}", "turn it into a dense tensor"
    if tensor.device.type == "meta":
        return "a tensor on the meta device, which has no data,", "materialise the model first"
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        return "a DTensor with a partial placement", "reduce it first, with .redistribute()"
    return None


def _why_not_joined(tensor: DTensor) -> str:
    """Return why the inner tensors of the shards cannot be joined to whole ones: only their first dimension is known to
    be that of the outer tensor, and only where each rank has the same share of it."""
    local = tensor._local_tensor
    for placement in tensor.placements:
        if not placement.is_replicate() and not (type(placement) is Shard and placement.dim == 0):
            return f"sharded as {placement!r}"
    scalars = [name for name in local.__tensor_flatten__()[0] if getattr(local, name).dim() == 0]
    if scalars:
        return f"of which the inner tensor '{scalars[0]}' is a scalar"
    placed = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    shards = math.prod(size for size, placement in placed if not placement.is_replicate())
    return f"of length {tensor.shape[0] if tensor.dim() else 0} in {shards} unequal shards"


def address(tensor: torch.Tensor) -> int:
    """Return where the tensor's memory on this rank begins; 0 when it has none."""
    if type(tensor) not in PLAIN_TYPES:
        flat = flattened(tensor)
        if flat is not None:
            return next((address(inner) for inner in flat.tensors.values()), 0)
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
    return int(tensor.data_ptr())


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same memory seen in the same way, as tied parameters are."""
    if type(one) in PLAIN_TYPES and type(other) in PLAIN_TYPES:
        return one.shape == other.shape and one.dtype == other.dtype and _is_same_view(one, other)
    if isinstance(one, DTensor) != isinstance(other, DTensor) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat, beside = flattened(one), flattened(other)
    if flat is not None and beside is not None:
        return flat.tensors.keys() == beside.tensors.keys() and all(
            is_same_memory(inner, beside.tensors[name]) for name, inner in flat.tensors.items()
        )
    if flat is not None or beside is not None:
        return False
    if isinstance(one, DTensor):
        one, other = one.to_local(), other.to_local()
    return _is_same_view(one, other)


def _is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(
        one.data_ptr() == other.data_ptr()
        and one.device == other.device
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


def local_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that hold this rank's part of a tensor: several for one of a wrapper subclass."""
    if type(tensor) in PLAIN_TYPES:
        return [tensor.detach()]
    flat = flattened(tensor)
    if flat is not None:
        return [part for inner in flat.tensors.values() for part in local_parts(inner)]
    return [(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()]


def shares_elements(tensor: torch.Tensor) -> bool:
    """Return whether several elements are one in memory, as `expand` makes them: such a tensor can only be read."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True))


def is_sharded(tensor: torch.Tensor | None) -> TypeGuard[DTensor]:
    """Return whether the tensor is one of a mesh, of which this rank may hold only a part."""
    return isinstance(tensor, DTensor)


def any_sharded(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether any of very many tensors is sharded, without checking each."""
    return any(issubclass(kind, DTensor) for kind in set(map(type, tensors)))


def whole_shape(tensor: torch.Tensor, cut: Cut | None = None) -> tuple[int, ...]:
    """Return the shape of the whole tensor of which this rank may hold a piece."""
    return tuple(tensor.shape) if cut is None else cut.shape


def held_piece(tensor: torch.Tensor, *, leaf: str, cut: Cut | None = None) -> tuple[Box, torch.Tensor]:
    """Return the piece of a tensor that this rank holds, and its place in the whole. The cut is PyTorch's own, or, for
    a plain tensor, the one that was declared."""
    if cut is not None:
        return cut.box, tensor.detach()
    if not isinstance(tensor, DTensor):
        bare = type(tensor) is torch.Tensor and not tensor.requires_grad
        return whole(tuple(tensor.shape)), tensor if bare else tensor.detach()
    chunks = tensor.__create_chunk_list__()
    local = tensor.to_local().detach()
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.shape):
        if local.numel() == 0:
            # A rank that got nothing of an uneven cut; torch marks it with special shapes.
            return Box((0,) * tensor.dim(), (0,) * tensor.dim()), local
        raise UsageError(
            f"the local part has shape {list(local.shape)}, which is no single box of the whole", leaf=leaf
        )
    return Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes)), local


def mesh_of(tensor: DTensor) -> MeshRecord:
    mesh = tensor.device_mesh
    return MeshRecord(shape=tuple(mesh.shape), dimensions=tuple(mesh.mesh_dim_names or ()))


def ranks_of(tensor: DTensor) -> tuple[int, ...]:
    """Return the ranks of a tensor's mesh, in ascending order."""
    return tuple(sorted(int(rank) for rank in tensor.device_mesh.mesh.flatten().tolist()))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory. The tensor must outlive the view."""
    return memory_at(tensor.data_ptr(), tensor.nbytes)


def memory_at(address: int, size_bytes: int) -> memoryview:
    """Return the bytes at an address of this process. What they belong to must outlive the view."""
    if size_bytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B")


def is_host_memory(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's own memory holds exactly its bytes, so that they can be read or filled in place."""
    return bool(tensor.is_cpu and is_dense(tensor))


def host_address(tensor: torch.Tensor) -> int:
    """Return where the bytes of a tensor can be read in host memory as they are; 0 where torch has to copy them."""
    if not is_host_memory(tensor):
        return 0
    require_whole_storage(tensor)
    return int(tensor.data_ptr())


def require_whole_storage(tensor: torch.Tensor) -> None:
    """Raise if the storage of a contiguous tensor was made smaller than the tensor: what lies behind it is not its
    own."""
    if tensor._is_zerotensor():
        return  # zeros without memory, which torch itself copies
    storage = tensor.untyped_storage()
    if tensor.numel() and tensor.data_ptr() + tensor.nbytes > storage.data_ptr() + storage.nbytes():
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} needs {tensor.nbytes} bytes of a storage that has only "
            f"{storage.nbytes()}",
            advice="its storage was resized or freed: save when the tensor has its memory",
        )


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's memory, wherever it is, holds exactly its bytes, in order."""
    if not tensor.is_contiguous() or tensor.is_neg():
        return False
    # Asked only of those that can be: the question lets another thread run, which takes a while with very many tensors.
    return not (tensor.dtype.is_complex and tensor.is_conj())


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, on its device, in the order of a file: its own memory if that has this order."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def host_pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in host memory, in order: its own where possible, else copies of `HOST_PIECE_BYTES`.

    A piece is valid until the next one is asked for.
    """
    if is_host_memory(tensor):
        yield memory_of(tensor)
        return
    flat = flat_bytes(tensor)
    if flat.device.type == "cpu":
        yield memory_of(flat)
        return
    buffer = torch.empty(min(HOST_PIECE_BYTES, flat.numel()), dtype=torch.uint8)
    for start in range(0, flat.numel(), HOST_PIECE_BYTES):
        part = buffer[: min(HOST_PIECE_BYTES, flat.numel() - start)]
        part.copy_(flat[start : start + part.numel()])
        yield memory_of(part)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_SLICE = 1 << 21


def fingerprint(local: torch.Tensor, box: Box, shape: tuple[int, ...]) -> int:
    """Return a number for the content of a piece such that the pieces of a tensor have the same sum however it is cut.

    It distinguishes base models; it is no cryptographic digest.
    """
    if local.numel() == 0:
        return 0
    size = local.element_size()
    bits = local.detach().resolve_conj().resolve_neg().contiguous().view(_INTEGERS[size]).reshape(-1)
    places = _global_places(box, shape, local.device)
    if size == 16:
        places = torch.stack((places * 2, places * 2 + 1), dim=-1).reshape(-1)
    total = 0
    for start in range(0, bits.numel(), _SLICE):
        mixed = _mix(bits[start : start + _SLICE].to(torch.int64), places[start : start + _SLICE])
        total += int(mixed.sum().item())
    return total % 2**63


def _global_places(box: Box, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the linear index in the whole tensor of every element of a box."""
    places = torch.zeros((), dtype=torch.int64, device=device)
    for dimension, (offset, size, stride) in enumerate(zip(box.offsets, box.sizes, strides_of(shape), strict=True)):
        along = (torch.arange(offset, offset + size, dtype=torch.int64, device=device)) * stride
        places = places + along.reshape([-1 if d == dimension else 1 for d in range(len(shape))])
    return places.reshape(-1)


def _mix(bits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Scramble content and place together, with the wrapping arithmetic of 64-bit integers."""
    value = bits * -7046029254386353131 + places * -4417276706812531889
    value = (value ^ (value >> 29)) * -4658895280553007687
    value = (value ^ (value >> 32)) * -7723592293110705685
    return (value ^ (value >> 30)) & (2**31 - 1)


def sample_of(tensor: torch.Tensor, count: int = 4096) -> int:
    """Return a fingerprint of some elements, spread over this rank's part of a tensor: cheap, likely to change too."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().reshape(-1)
    some = local[:: max(local.numel() // count, 1)]
    return fingerprint(some, whole(tuple(some.shape)), tuple(some.shape))
