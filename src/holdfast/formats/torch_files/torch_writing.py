"""Write files that `torch.load(weights_only=True, mmap=True)` reads. A tree and the bytes of its tensors enter.

The same tree gives the same bytes. No more than one piece of a tensor is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from holdfast.formats.exporting.export import ExportItem
from holdfast.formats.torch_files.pickle_writing import Pickler
from holdfast.formats.torch_files.zip_file import ALIGNMENT_BYTES, ZipWriter

__all__ = ["write_torch"]

# The folder in the zip file. torch takes the name of the file; a fixed one makes the bytes independent of it.
_FOLDER = "archive"


def write_torch(stream: BinaryIO, tree: Any, pieces: Callable[[ExportItem], Iterator[memoryview]]) -> None:
    """Write a tree with an `ExportItem` in the place of each tensor as a file of `torch.save`.

    stream: where to write; it can seek, and need not stand at its start. pieces: what yields the bytes of a tensor.
    Items of the same entry share one storage. A value that `weights_only=True` would refuse is a UsageError.
    """
    pickler = Pickler()
    pickle = pickler.dump(tree)
    archive = ZipWriter(stream)
    for name, text in (
        ("data.pkl", pickle),
        (".format_version", b"1"),
        (".storage_alignment", str(ALIGNMENT_BYTES).encode()),
        ("byteorder", b"little"),
    ):
        archive.add(f"{_FOLDER}/{name}", len(text), [text])
    for key, item in enumerate(pickler.storages):
        archive.add(f"{_FOLDER}/data/{key}", item.size_bytes, pieces(item))
    archive.add(f"{_FOLDER}/version", 2, [b"3\n"])
    archive.finish()
