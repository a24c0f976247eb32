"""Report committed checkpoints to Ray Train, without copying them.

Handles of saves and metrics enter; `ray.train.report` gets the folder of each checkpoint once it is committed. Needs
Ray Train 2.50 or later, and a `storage_path` on a file system that all workers share.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast import CheckpointManager, KeepAll, SaveHandle, UsageError

try:
    import ray.train
    from ray.train import CheckpointUploadMode
except ImportError as missing:
    raise ImportError(
        "holdfast.integrations.ray needs Ray Train 2.50 or later: pip install 'ray[train]>=2.50'"
    ) from missing

__all__ = ["RayReporter", "run_folder"]


def run_folder(name: str = "holdfast") -> Path:
    """Return where the run of this Ray training lies: a folder in the experiment's own, the same on all workers.

    Ray accepts checkpoints only from below its experiment's folder, `storage_path/name` of the `RunConfig`. Call it in
    the training function.
    """
    if not name or Path(name).name != name:
        raise UsageError(f"name={name!r:.100}", advice="give the name of a folder, without slashes")
    storage = ray.train.get_context().get_storage()
    kind = getattr(storage.storage_filesystem, "type_name", "unknown")
    if kind != "local":
        raise UsageError(
            f"the storage of this Ray run is of the kind '{kind}'",
            advice="give RunConfig(storage_path=...) a folder on a file system that all workers share",
        )
    return Path(storage.experiment_fs_path) / name


class RayReporter:
    """Reports the checkpoints of a manager to Ray Train, each as soon as it is certain that it is committed.

    All workers call `report` for the same saves. `ray.train.report` waits for all workers, so the report of a save is
    made when the next one is given, by which time it is committed anyway, or by `flush`, which waits for it. Used as a
    context manager it flushes at the end.

    Ray is the one that removes checkpoints here: `CheckpointConfig(num_to_keep=...)`. A manager whose `keep=` removes
    them, too, is refused: Ray does not start again when one that it lists is gone.
    """

    def __init__(self, manager: CheckpointManager) -> None:
        context = ray.train.get_context()
        self._is_leader = context.get_world_rank() == 0
        if not isinstance(manager.keep, KeepAll | None):
            raise UsageError(
                f"keep={manager.keep!r} of the manager removes checkpoints that Ray Train lists",
                advice="leave keep= out, and give RunConfig a CheckpointConfig(num_to_keep=...)",
            )
        self._root = Path(context.get_storage().experiment_fs_path)
        self._waiting: tuple[SaveHandle, dict[str, Any]] | None = None

    def report(self, handle: SaveHandle, metrics: Mapping[str, Any], *, wait: bool = False) -> None:
        """Report a save of the manager with its metrics, and the one before it now. `wait` reports this one now, too.

        A save that failed raises its error here, on all workers, and is not reported.
        """
        if not isinstance(handle, SaveHandle):
            raise UsageError(f"handle={handle!r:.100}", advice="give what manager.save() returned")
        if not isinstance(metrics, Mapping):
            raise UsageError(f"metrics={metrics!r:.100}", advice="give a mapping of values by name")
        self.flush()
        self._waiting = handle, dict(metrics)
        if wait:
            self.flush()

    def flush(self) -> None:
        """Wait for the last save and report it."""
        if self._waiting is None:
            return
        (handle, metrics), self._waiting = self._waiting, None
        path = Path(handle.wait().path)
        if self._root not in path.parents:
            raise UsageError(
                f"the checkpoint {path} is not below the folder of the Ray experiment, {self._root}",
                advice="give the manager holdfast.integrations.ray.run_folder() as its run",
            )
        checkpoint = ray.train.Checkpoint.from_directory(str(path)) if self._is_leader else None
        ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.flush()
