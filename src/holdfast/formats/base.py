"""What a format is: how its files are recognised, opened and written. A custom format is one such class.

A package registers a format with an entry point of the group `holdfast.formats`: its name is the format's, its value a
`Format` class.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from holdfast.errors import UnsupportedFormatError
from holdfast.formats.source import Source

if TYPE_CHECKING:
    from holdfast.formats.exporting.export import ExportJob

__all__ = ["Format"]


class Format:
    """One format of checkpoints. Override `detects` and `open` to read it, `write` to export to it, or all of them.

    name: how users call it, as in `export(..., format="safetensors")`. is_folder: whether what is written is a folder.
    weights_only: it holds the tensors of one component and no other values. takes_adapters: it holds what a `Trainable`
    model stores, which is useless without the base.
    """

    name: ClassVar[str] = ""
    is_folder: ClassVar[bool] = False
    weights_only: ClassVar[bool] = False
    takes_adapters: ClassVar[bool] = False

    def detects(self, path: Path) -> bool:
        """Return whether the file or folder is of this format, from its content and not from its name. Never raises for
        content that it does not understand."""
        return False

    def open(self, path: Path) -> Source:
        """Open a file or folder that `detects` has recognised."""
        raise UnsupportedFormatError(f"the format '{self.name}' cannot be read")

    def prepare(self, job: ExportJob) -> ExportJob:
        """Return the job as this format writes it, with its own names for tensors, or raise what it cannot hold. Called
        before anything is written."""
        return job

    def write(self, job: ExportJob, target: Path) -> None:
        """Write the tensors of a job to a path that does not exist yet, a file or, with `is_folder`, a folder.

        The caller gives a temporary path, syncs what was written and moves it to its name: an error leaves nothing.
        """
        raise UnsupportedFormatError(f"the format '{self.name}' cannot be written")
