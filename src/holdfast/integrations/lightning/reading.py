"""Let `validate`, `test` and `predict` load weights of a Holdfast checkpoint by `ckpt_path`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import holdfast
from holdfast.integrations.lightning.framework import CheckpointIO, lightning
from holdfast.integrations.lightning.state import split_state

__all__ = ["ReadingIO", "two_sources"]


class ReadingIO(CheckpointIO):  # type: ignore[misc]
    """Loads the weights of a Holdfast checkpoint for `validate`, `test` and `predict` with `ckpt_path`; everything else
    is as the wrapped `CheckpointIO` does it. `fit` with a path that this callback resumes already is an error."""

    def __init__(self, wrapped: Any, run: Any, trainer: Any) -> None:
        self.wrapped = wrapped
        self._run = run
        self._trainer = trainer

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.wrapped.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> Any:
        folder = _checkpoint_folder(path)
        if folder is None:
            try:
                return self.wrapped.load_checkpoint(path, *args, **options)
            except IsADirectoryError:
                raise holdfast.UsageError(
                    f"ckpt_path={str(path)!r} is a folder, and neither a checkpoint nor a run that has one",
                    advice="give the folder of a run or of a checkpoint, 'best', 'last', or a file of Lightning",
                ) from None
        if self._trainer.state.fn == "fit":
            raise two_sources(path, self._run)
        return _read(folder, self._trainer.lightning_module)

    def remove_checkpoint(self, path: Any) -> None:
        self.wrapped.remove_checkpoint(path)

    def teardown(self) -> None:
        self.wrapped.teardown()


def _checkpoint_folder(path: Any) -> Path | None:
    """Return the folder of the checkpoint at a path, of the latest one where it is a run; None where it is neither."""
    folder = Path(path)
    if not folder.is_dir() or (folder / "manifest.json").exists():
        return folder if folder.is_dir() else None
    try:
        found = holdfast.checkpoints(folder)
    except holdfast.CheckpointNotFoundError:
        return None
    return Path(found[0].path) if found else None


class _Kept:
    """A component that keeps what it is given."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def _read(folder: Path, module: Any) -> dict[str, Any]:
    """Fill the module, on all ranks, and return a dict as a file of Lightning has it, without the progress of loops."""
    kept = _Kept()
    components = {"model": module, "lightning": holdfast.Shared(kept)}
    strategy = holdfast.LoadStrategy(
        only=("model", "lightning"), strict=bool(module.strict_loading), on_missing="skip", progress=False
    )
    with holdfast.CheckpointManager(folder.parent, components, rng=False) as manager:
        manager.restore(folder.name, strategy=strategy)
    own, checkpoint = split_state(kept.state)
    checkpoint.pop("loops", None)
    checkpoint.setdefault("pytorch-lightning_version", lightning.__version__)
    return {**checkpoint, "state_dict": module.state_dict(), **own.get("changed", {})}


def two_sources(path: Any, run: Any) -> holdfast.UsageError:
    return holdfast.UsageError(
        f"fit was called with ckpt_path={str(path)!r}, and HoldfastCheckpoint resumes from its run by itself",
        run=str(run),
        advice="leave ckpt_path out; to resume another checkpoint pass HoldfastCheckpoint(..., selector=...), to take "
        "over a .ckpt file of Lightning call holdfast.import_checkpoint(file, run) first, and to start from ckpt_path "
        "all the same pass resume='never'",
    )
