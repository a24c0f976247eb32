"""Let `validate`, `test` and `predict` load weights of a Holdfast checkpoint by `ckpt_path`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import holdfast
from holdfast.integrations.lightning.framework import CheckpointIO, lightning

__all__ = ["ReadingIO", "two_sources"]


class ReadingIO(CheckpointIO):
    """Loads the weights of a Holdfast checkpoint for `validate`, `test` and `predict` with `ckpt_path`; everything else
    is as the wrapped `CheckpointIO` does it. `fit` with a path that this callback resumes already is an error."""

    def __init__(self, wrapped: Any, callback: Any, trainer: Any) -> None:
        self.wrapped = wrapped
        self._callback = callback
        self._trainer = trainer

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.wrapped.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> Any:
        if self._trainer.state.fn == "fit" and self._callback.resume != "never" and not self._trainer.fast_dev_run:
            raise two_sources(path, self._callback.run)
        if not (Path(path).is_dir() and (Path(path) / "manifest.json").exists()):
            return self.wrapped.load_checkpoint(path, *args, **options)
        if self._trainer.state.fn == "fit":
            raise holdfast.UsageError(
                "fit cannot resume from a Holdfast checkpoint by ckpt_path",
                file=str(path),
                advice="pass HoldfastCheckpoint(run, selector=...) and no ckpt_path",
            )
        module = self._trainer.lightning_module
        holdfast.load_weights(module, path, component="model", strict=bool(module.strict_loading))
        return {"state_dict": module.state_dict(), "pytorch-lightning_version": lightning.__version__}

    def remove_checkpoint(self, path: Any) -> None:
        self.wrapped.remove_checkpoint(path)

    def teardown(self) -> None:
        self.wrapped.teardown()


def two_sources(path: Any, run: Any) -> holdfast.UsageError:
    return holdfast.UsageError(
        f"fit was called with ckpt_path={str(path)!r}, and HoldfastCheckpoint resumes from its run by itself",
        run=str(run),
        advice="leave ckpt_path out; to resume another checkpoint pass HoldfastCheckpoint(..., selector=...), to take "
        "over a .ckpt file of Lightning call holdfast.import_checkpoint(file, run) first, and to start from ckpt_path "
        "all the same pass resume='never'",
    )
