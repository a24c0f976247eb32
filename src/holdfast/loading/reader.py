"""List and read what a committed checkpoint holds, without live objects. A checkpoint enters; values and bytes leave.

    reader = CheckpointReader(resolve("runs/tiny"))
    for leaf in reader.leaves:
        print(leaf.name, leaf.dtype, leaf.shape)
    reader.values("trainer")                                    # plain Python values
    reader.array("model.layers.0.weight")                       # a numpy array
    reader.tensor("model.layers.0.weight", Box((0, 0), (1, 8))) # a torch tensor: one row, eight columns

A checkpoint consists of *trees* and *leaves*. A tree has the values of one component (`model`), or of one scope of it
(`loader@rank-00001`): nested dicts, lists and plain values, in which a tensor stands as a reference. A leaf is a whole
tensor, whatever number of ranks wrote it; its name is the name of its tree and its path there.

Nothing is read before it is asked for, and no more than is asked for. torch is imported only where a tensor is made.
The reader holds no claim on the checkpoint: a caller that reads for long while a training prunes the run holds one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from holdfast.errors import CorruptCheckpointError, StateMismatchError, UsageError
from holdfast.loading.arrays import read_box
from holdfast.loading.files import DAMAGE, check_files, check_sizes, parse_values, read_values, reference_of
from holdfast.loading.requests import Request
from holdfast.loading.strategy import Verify, check_verify
from holdfast.ondisk import paths
from holdfast.ondisk.codec import Json, Subclass, decode, plain, subclass_of
from holdfast.ondisk.manifest import TensorRecord, TreeRecord
from holdfast.ondisk.regions import Box, boxes_within, whole
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.report import Problem

if TYPE_CHECKING:
    import numpy
    import torch

__all__ = ["CheckpointReader", "Leaf"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of a checkpoint. `record` is its entry in the manifest, with the chunks that it is stored in."""

    record: TensorRecord

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def dtype(self) -> str:
        """Return the name of the element type as torch spells it, such as `bfloat16`."""
        return self.record.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.record.shape

    @property
    def size_bytes(self) -> int:
        return self.record.size_bytes

    @property
    def tree(self) -> str:
        """Return the name of the tree that refers to this leaf."""
        return self.name.partition(".")[0]

    @property
    def component(self) -> str:
        return self.tree.partition("@")[0]

    @property
    def path(self) -> str:
        """Return the place in its tree, such as `layers.0.weight`; empty when the component is one tensor."""
        return self.name.partition(".")[2]

    def boxes(self, limit_bytes: int) -> Iterator[Box]:
        """Yield boxes that make up the leaf, in the order of its elements, none larger than the limit: to stream a leaf
        that is larger than the memory."""
        return boxes_within(whole(self.shape), self.record.item_bytes, limit_bytes)


class CheckpointReader:
    """Lists and reads the leaves and values of one checkpoint.

    verify: "full" checks the digest of every byte that is read, "quick" and "off" check none; `check` compares
    the sizes of files with "quick" and does nothing with "off". Damage is a CorruptCheckpointError that names the file,
    the leaf and the byte range; memory that was to be filled must not be used then. A storage that cannot be read now
    is a StorageError.
    """

    def __init__(self, checkpoint: Checkpoint, *, verify: Verify = "full") -> None:
        self.checkpoint = checkpoint
        self.verify: Verify = check_verify(verify)
        self._parsed: dict[str, dict[str, Json]] = {}

    # What there is

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """Return every tensor of the checkpoint, in the order of the manifest."""
        return tuple(map(Leaf, self.checkpoint.manifest.tensors))

    @property
    def trees(self) -> tuple[TreeRecord, ...]:
        """Return every tree: its component and scope, its kind ("module", "optimizer" or "values"), and its class."""
        return self.checkpoint.manifest.trees

    def leaf(self, name: str) -> Leaf:
        """Return the leaf of this name."""
        try:
            return self._leaves[name]
        except KeyError:
            raise UsageError("the checkpoint has no such tensor", step=self.checkpoint.step, leaf=name) from None

    def tree(self, name: str) -> TreeRecord:
        """Return the tree of this name."""
        try:
            return self._trees[name]
        except KeyError:
            known = ", ".join(sorted(self._trees))
            raise UsageError(
                f"the checkpoint has no values of '{name}'", step=self.checkpoint.step, advice=f"its trees are {known}"
            ) from None

    # Values

    def values(self, tree: str) -> Any:
        """Return the values of a tree as they were saved, with a `Leaf` in the place of each tensor and of each array
        that is stored as a tensor. No tensor is read. A class that was registered when it was saved must be so now."""
        record = self.tree(tree)
        try:
            stored = _arrays_as_tensors(self.stored_values(tree))
        except RecursionError:
            raise CorruptCheckpointError("the values are nested too deep", file=record.file) from None
        named = partial(self.leaf_of, record)
        return decode(stored, path=tree, tensor=named, subclass=lambda place, form: _named(form, named))

    def readable_values(self, tree: str) -> Json:
        """Return the values of a tree as JSON for people. Needs no registered class, and loses types on the way."""
        return plain(self.stored_values(tree))

    def stored_values(self, tree: str) -> Json:
        """Return the values of a tree as they are stored, encoded by the codec. Their file is read once."""
        record = self.tree(tree)
        try:
            if record.file not in self._parsed:
                data = read_values(self.checkpoint, record.file, checked=self._checked)
                self._parsed[record.file] = parse_values(data, record.file)
            if tree not in self._parsed[record.file]:
                raise CorruptCheckpointError(f"the file has no values of '{tree}'", file=record.file)
        except DAMAGE as error:
            self._refuse([Problem(record.file, error.problem)])
        except CorruptCheckpointError as error:
            raise error.at(run=self.checkpoint.storage.url, step=self.checkpoint.step) from None
        return self._parsed[record.file][tree]

    def leaf_of(self, tree: TreeRecord, reference: str) -> Leaf:
        """Return the leaf that the values of a tree refer to."""
        name = paths.leaf_name(tree.name, reference)
        if name not in self._leaves:
            raise CorruptCheckpointError("the values name a tensor that is not listed", leaf=name, file=tree.file)
        return self._leaves[name]

    # Bytes, without torch

    def array(self, leaf: str, box: Box | None = None) -> numpy.ndarray[Any, Any]:
        """Return a leaf, or a box of it, as a new numpy array. numpy lacks some types of torch, such as bfloat16."""
        import numpy

        found = self.leaf(leaf)
        try:
            dtype = numpy.dtype(found.dtype)
        except TypeError:
            raise UsageError(
                f"numpy has no type for {found.dtype}",
                leaf=leaf,
                advice="read it with tensor(), or its bytes with read_into()",
            ) from None
        request = self.request(found, box)
        self._require_files(found)
        array = numpy.empty(request.box.sizes, dtype)
        self.read_into(leaf, array.reshape(-1).view(numpy.uint8), box)
        return array

    def read_into(self, leaf: str, memory: Any, box: Box | None = None) -> None:
        """Fill memory with the bytes of a leaf, or of a box of it, row by row. The memory is anything that has
        the buffer protocol, is writable and contiguous, and has exactly as many bytes."""
        found = self.leaf(leaf)
        request = self.request(found, box)
        size = request.box.volume * found.record.item_bytes
        with memoryview(memory) as view:
            if view.readonly or not view.c_contiguous or view.nbytes != size:
                raise UsageError(
                    f"the memory must be writable, contiguous and of {size} bytes; it has {view.nbytes}", leaf=leaf
                )
            if size:
                with view.cast("B") as target:
                    request = Request(found.record, request.box, target, fresh=False)
                    self._refuse(read_box(self.checkpoint, request, checked=self._checked))

    # Tensors

    def tensor(self, leaf: str, box: Box | None = None, *, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return a leaf, or a box of it, as a new tensor."""
        import torch

        from holdfast.state.tensors import torch_dtype

        found = self.leaf(leaf)
        request = self.request(found, box)
        self._require_files(found)
        target = torch.empty(request.box.sizes, dtype=torch_dtype(found.dtype), device=device)
        self.fill([self.request(found, box, target, fresh=True)])
        return target

    def decoded(self, tree: TreeRecord, stored: Json, path: str) -> Any:
        """Return stored values, all of a tree's or a part of them at `path`, with each tensor read into a new one."""
        return decode(
            stored,
            path=path,
            tensor=lambda reference: self.tensor(self.leaf_of(tree, reference).name),
            subclass=partial(self._subclass, tree),
        )

    def request(
        self, leaf: Leaf, box: Box | None = None, target: torch.Tensor | None = None, *, fresh: bool = False
    ) -> Request:
        """Return the request to fill a tensor, on any device, with a leaf or a box of it. `check` needs no target.
        `fresh`: the tensor is new, and may hold bytes that are not checked yet until `fill` returns."""
        box = whole(leaf.shape) if box is None else Box(*box)
        if not box.within(leaf.shape):
            raise UsageError(f"{box} is no part of a tensor of shape {list(leaf.shape)}", leaf=leaf.name)
        return Request(leaf.record, box, target, fresh)

    def fill(self, requests: Sequence[Request], on_bytes: Callable[[int], None] = lambda count: None) -> None:
        """Fill the targets of all requests, in several threads. `on_bytes` gets the number of further bytes that are
        there, from any thread."""
        from holdfast.loading.read import read

        self._refuse(read(self.checkpoint, requests, checked=self._checked, on_bytes=on_bytes))

    def check(self, requests: Sequence[Request]) -> None:
        """Raise the damage that `fill` would meet, as far as `verify` looks for it. Changes nothing."""
        if self.verify == "quick":
            self._refuse(check_sizes(self.checkpoint, requests))
        elif self.verify == "full":
            from holdfast.loading.read import check_bytes

            self._refuse(check_bytes(self.checkpoint, requests))

    def _subclass(self, tree: TreeRecord, place: str, saved: Subclass) -> torch.Tensor:
        """Return a new tensor of a wrapper subclass that the program knows."""
        from holdfast.state.tensors import tensor_class, unflattened

        kind = tensor_class(saved.name)
        if kind is None:
            raise StateMismatchError(
                f"the checkpoint has a tensor of class '{saved.name}', which is not registered",
                leaf=place,
                advice="register its class with holdfast.register_type, or restore it with a CheckpointManager",
            )
        inner: dict[str, torch.Tensor] = {}
        for name, value in saved.tensors.items():
            nested = subclass_of(value)
            inner[name] = (
                self.tensor(self.leaf_of(tree, reference_of(value) or "").name)
                if nested is None
                else self._subclass(tree, f"{place}.{name}", nested)
            )
        return unflattened(kind, inner, decode(saved.context, path=place, tensor=None), saved, place, None)

    def _require_files(self, leaf: Leaf) -> None:
        """Raise if the files of a leaf are not as large as the manifest has it, before memory is taken for it."""
        found = check_files(self.checkpoint, {chunk.file for chunk in leaf.record.chunks})
        self._refuse([Problem(problem.file, problem.what, leaf.name) for problem in found])

    def _refuse(self, problems: Sequence[Problem]) -> None:
        if problems:
            first = problems[0]
            raise CorruptCheckpointError(
                first.what,
                run=self.checkpoint.storage.url,
                step=self.checkpoint.step,
                file=first.file,
                leaf=first.leaf,
                byte_range=first.byte_range,
                problems=[str(problem) for problem in problems[1:]],
                advice="load another checkpoint",
            )

    @property
    def _checked(self) -> bool:
        return self.verify == "full"

    @cached_property
    def _leaves(self) -> dict[str, Leaf]:
        return {leaf.name: leaf for leaf in self.leaves}

    @cached_property
    def _trees(self) -> dict[str, TreeRecord]:
        return {tree.name: tree for tree in self.trees}


def _arrays_as_tensors(stored: Json) -> Json:
    """Return stored values with a reference to a tensor in the place of each array that is stored as one."""
    if isinstance(stored, list):
        return [_arrays_as_tensors(value) for value in stored]
    if not isinstance(stored, dict):
        return stored
    array = stored.get("$ndarray")
    if isinstance(array, dict) and "tensor" in array:
        return {"$tensor": array["tensor"]}
    return {key: _arrays_as_tensors(value) for key, value in stored.items()}


def _named(form: Subclass, leaf_of: Callable[[str], Leaf]) -> Subclass:
    """Return the stored form of a tensor of a wrapper subclass with its leaves in the place of references to them."""
    tensors: dict[str, Any] = {}
    for name, value in form.tensors.items():
        nested = subclass_of(value)
        tensors[name] = leaf_of(reference_of(value) or "") if nested is None else _named(nested, leaf_of)
    return form._replace(tensors=tensors)
