"""A checkpoint engine for DeepSpeed: what `engine.save_checkpoint` writes per rank and file becomes one checkpoint.

    engine, *_ = deepspeed.initialize(model=model, config=config)
    checkpoints = attach(engine, keep=holdfast.KeepLast(3))
    engine.load_checkpoint("out", tag=checkpoints.newest_tag("out"))
    checkpoints.restore_rng()

The states that DeepSpeed hands over file by file enter, unevenly across ranks; one committed checkpoint of the run
`out/holdfast` leaves, and back. The step is DeepSpeed's `global_steps`. In the place of each file lies a short text,
because DeepSpeed looks for files by their names. Written for DeepSpeed 0.19.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch.distributed as dist

import holdfast

try:
    import deepspeed
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.pipe.module import PipelineModule
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
except ImportError as error:
    raise ImportError(
        f"holdfast.integrations.deepspeed needs DeepSpeed 0.19, which cannot be imported: {error}; "
        "install it with: pip install 'deepspeed==0.19.*'"
    ) from error

__all__ = ["HoldfastCheckpointEngine", "attach"]

logger = logging.getLogger("holdfast")

# The name of the run inside of the folder that `save_checkpoint` is given.
_RUN_FOLDER = "holdfast"
# Where a checkpoint has the tag that DeepSpeed gave it.
_NOTE = "deepspeed"
_PLACEHOLDER = (
    "This file stands for a part of a Holdfast checkpoint, in the folder 'holdfast' beside the folder of this file. "
    "DeepSpeed loads it after holdfast.integrations.deepspeed.attach(engine).\n"
)


def attach(
    engine: Any, *, keep: Any = None, rng: bool = True, verify: Any = "full", timeout: float = 600.0
) -> HoldfastCheckpointEngine:
    """Let `save_checkpoint` and `load_checkpoint` of a DeepSpeed engine go through Holdfast. Call it on all ranks.

    keep: the retention, such as `KeepLast(3)`. rng: store the random state of every rank, for `restore_rng`. verify:
    how deep a load checks. timeout: seconds to wait for the other ranks.
    """
    checkpoints = HoldfastCheckpointEngine(engine, keep=keep, rng=rng, verify=verify, timeout=timeout)
    engine.checkpoint_engine = checkpoints
    return checkpoints


class HoldfastCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """DeepSpeed's checkpoint engine over Holdfast. `attach` makes one.

    `save` collects what DeepSpeed hands over; `commit` saves it as one checkpoint on all ranks, and returns once that
    is committed. `load` returns the content of one file as it was saved. Nothing is pickled or unpickled. A checkpoint
    is loaded by as many ranks as saved it: what DeepSpeed cuts for them is not cut anew.
    """

    def __init__(self, engine: Any, *, keep: Any, rng: bool, verify: Any, timeout: float) -> None:
        _check_version()
        _check_engine(engine)
        super().__init__()
        self.name = "HoldfastCheckpointEngine"
        self._engine, self._replaced = engine, engine.checkpoint_engine
        self._keep, self._rng, self._verify, self._timeout = keep, rng, verify, timeout
        self._files: dict[str, Any] = {}
        self._problem: holdfast.HoldfastError | None = None
        self._folder: Path | None = None
        self._open: tuple[Path, holdfast.AsyncCheckpointer] | None = None
        # What was loaded last; what the next save goes back to, and what the open checkpointer takes that to be.
        self._loaded: holdfast.Checkpoint | None = None
        self._head: holdfast.Checkpoint | None = None
        self._followed: holdfast.Checkpoint | None = None
        # A load reads on this rank alone: DeepSpeed loads other files on every rank.
        self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True, backend="gloo")

    # What DeepSpeed calls

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin the checkpoint of a tag."""
        self._files, self._problem = {}, None
        self._folder = Path(info.save_dir) / info.tag

    def save(self, state_dict: Any, path: str) -> None:
        """Take the content of one file. What is wrong with it is raised by `commit`, on all ranks: the others would
        wait for this one otherwise."""
        try:
            name = self._name_in_folder(path)
            self._files[name] = _storable(state_dict)
            _put_placeholder(Path(path))
        except holdfast.HoldfastError as error:
            self._problem = self._problem or error
        except OSError as error:
            self._problem = self._problem or holdfast.StorageError(str(error), file=str(path))

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Save what was collected as one checkpoint, on all ranks, and return once it is committed."""
        files, self._files = self._files, {}
        state: dict[str, Any] = {**files, _rng_name(): holdfast.get_rng_state() if self._rng else {}}
        if self._problem is not None:
            state["refused"] = _Refused(self._problem)
        run = Path(info.save_dir) / _RUN_FOLDER
        note = {"tag": info.tag, "version": deepspeed.__version__}
        handle = self._checkpointer(run).save(self._engine.global_steps, state, extra={_NOTE: note}, resave=True)
        self._head = self._followed = handle.wait()
        self._prune(run)
        return True

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the content of one file, with its tensors on the CPU."""
        file = Path(path)
        if not _is_placeholder(file):
            raise holdfast.UsageError(
                f"{file} was not written through Holdfast",
                advice="load it with DeepSpeed's own engine, before attach() or after detach(), and save it again",
            )
        checkpoint = _newest(file.parent.parent / _RUN_FOLDER, file.parent.name)
        if checkpoint is None:
            raise holdfast.CheckpointNotFoundError(
                f"no checkpoint with the tag '{file.parent.name}' is committed",
                run=str(file.parent.parent / _RUN_FOLDER),
                advice="load the newest one: tag=checkpoints.newest_tag(folder)",
            )
        _check_ranks(checkpoint)
        self._loaded = self._head = checkpoint
        return _live(self._read(checkpoint, file.stem))

    def preserves_storage_sharing(self) -> bool:
        """Return False: a tensor that is a part of a larger one is stored by itself, so DeepSpeed need not clone it."""
        return False

    # What the user calls

    def newest_tag(self, folder: str | os.PathLike[str]) -> str | None:
        """Return the tag of the newest committed checkpoint, None where there is none, as rank 0 finds it.

        DeepSpeed's file `latest` is written after the commit and can be one checkpoint behind it after a crash.
        """
        answer: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                found = _newest(Path(folder) / _RUN_FOLDER, None)
                answer[0] = None if found is None else found.extra[_NOTE]["tag"]
            except holdfast.HoldfastError as error:
                answer[1] = error
        dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise answer[1]
        return answer[0]  # type: ignore[no-any-return]

    def restore_rng(self) -> bool:
        """Set the random state that the checkpoint of the last `load_checkpoint` has for this rank. Return whether
        there was one. Call it right before the first step: whatever draws random numbers earlier would shift them."""
        if self._loaded is None:
            return False
        state = self._read(self._loaded, _rng_name())
        if state:
            holdfast.set_rng_state(state)
        return bool(state)

    def detach(self) -> None:
        """Give the run back, and the DeepSpeed engine the checkpoint engine that it had before. Call it on all
        ranks."""
        self._close()
        if self._engine.checkpoint_engine is self:
            self._engine.checkpoint_engine = self._replaced

    # Parts

    def _name_in_folder(self, path: str) -> str:
        """Return the name of the component that stores a file of the checkpoint that is being saved."""
        file = Path(path)
        if file.parent != self._folder:
            raise holdfast.UsageError(
                f"{file} is not a file of the checkpoint '{self._folder}'",
                advice="for files beside checkpoints, such as those of save_16bit_model, call detach() first",
            )
        return file.stem

    def _checkpointer(self, run: Path) -> holdfast.AsyncCheckpointer:
        """Return the open checkpointer of a run. It holds the run: another training cannot save to it."""
        if self._open is None or self._open[0] != run:
            self._close()
            self._open = run, holdfast.AsyncCheckpointer(run, mode="sync", timeout=self._timeout)
        checkpointer = self._open[1]
        if self._head is not None and self._head != self._followed and Path(self._head.path).parent == run.absolute():
            checkpointer.continue_from(self._head)
        return checkpointer

    def _close(self) -> None:
        if self._open is not None:
            (_, checkpointer), self._open, self._followed = self._open, None, None
            checkpointer.close()

    def _prune(self, run: Path) -> None:
        """Remove what the retention does not keep. A failure is no reason to stop: the checkpoint is committed."""
        if self._keep is None:
            return
        self._close()
        if dist.get_rank() == 0:
            try:
                holdfast.prune(run, self._keep)
            except holdfast.HoldfastError as error:
                logger.warning("removing old checkpoints failed and will be retried after the next save: %s", error)

    def _read(self, checkpoint: holdfast.Checkpoint, name: str) -> Any:
        """Return what one component of a checkpoint holds, read by this rank alone."""
        received = _Received()
        manager = holdfast.CheckpointManager(
            Path(checkpoint.path).parent,
            {name: received},
            rng=False,
            verify=self._verify,
            process_group=self._alone,
            timeout=self._timeout,
        )
        with manager:
            manager.restore(checkpoint.path, strategy=holdfast.LoadStrategy(only=[name], progress=False))
        return received.state


class _Received:
    """A component that keeps what it is given."""

    state: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class _Refused:
    """Raises where the ranks compare what they save, so that all of them learn of it."""

    def __init__(self, problem: holdfast.HoldfastError) -> None:
        self._problem = problem

    def state_dict(self) -> dict[str, Any]:
        raise self._problem

    def load_state_dict(self, state: Any) -> None:
        raise self._problem


# Values


@dataclasses.dataclass
class _StoredLossScaler:
    """A loss scaler as its class and its numbers."""

    dynamic: bool
    values: dict[str, Any]


holdfast.register_type(_StoredLossScaler, "holdfast.integrations.deepspeed.LossScaler")
holdfast.register_type(ZeroStageEnum)
holdfast.register_type(fragment_address)


def _storable(value: Any) -> Any:
    """Return a state with each loss scaler as plain values. Containers without one are returned as they are."""
    if type(value) in (LossScaler, DynamicLossScaler):
        return _StoredLossScaler(type(value) is DynamicLossScaler, dict(vars(value)))
    return _mapped(_storable, value)


def _live(value: Any) -> Any:
    """Return a state with each loss scaler as the object that DeepSpeed had."""
    if isinstance(value, _StoredLossScaler):
        kind = DynamicLossScaler if value.dynamic else LossScaler
        scaler = kind.__new__(kind)
        vars(scaler).update(value.values)
        return scaler
    return _mapped(_live, value)


def _mapped(function: Any, value: Any) -> Any:
    if type(value) in (dict, OrderedDict):
        items = {key: function(one) for key, one in value.items()}
        changed = any(items[key] is not one for key, one in value.items())
        return type(value)(items) if changed else value
    if type(value) in (list, tuple):
        found = [function(one) for one in value]
        changed = any(new is not old for new, old in zip(found, value, strict=True))
        return type(value)(found) if changed else value
    return value


def _rng_name() -> str:
    return f"rng_rank_{dist.get_rank():05d}"


# Files


def _put_placeholder(file: Path) -> None:
    if file.exists() and not _is_placeholder(file):
        raise holdfast.UsageError(
            f"{file} exists, and was not written through Holdfast", advice="save to another folder, or with another tag"
        )
    # A name of its own and a rename: a crash never leaves half of a text, which the next save would refuse.
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(_PLACEHOLDER)
    temporary.replace(file)


def _is_placeholder(file: Path) -> bool:
    with file.open("rb") as content:
        return content.read(len(_PLACEHOLDER) + 1) == _PLACEHOLDER.encode()


def _newest(run: Path, tag: str | None) -> holdfast.Checkpoint | None:
    """Return the newest committed checkpoint of a run, or the newest with a tag of DeepSpeed."""
    if not run.exists():
        return None
    for checkpoint in holdfast.checkpoints(run):
        note = checkpoint.extra.get(_NOTE)
        if note is not None and tag in (None, note["tag"]):
            return checkpoint
    return None


# Checks


def _check_ranks(checkpoint: holdfast.Checkpoint) -> None:
    if checkpoint.world_size != dist.get_world_size():
        raise holdfast.StateMismatchError(
            f"the checkpoint was saved by {checkpoint.world_size} ranks, and {dist.get_world_size()} load it",
            step=checkpoint.step,
            advice="load it with as many ranks as saved it: DeepSpeed's states are not resharded",
        )


def _check_version() -> None:
    found = deepspeed.__version__
    if found.split(".")[:2] != ["0", "19"]:
        raise holdfast.UsageError(
            f"DeepSpeed {found} is installed, and this integration is tested with 0.19",
            advice="install DeepSpeed 0.19; the states that its engine saves change between versions",
        )


def _check_engine(engine: Any) -> None:
    """Refuse what would leave a part of the state outside of the checkpoint, or was never tried."""
    if not isinstance(engine, deepspeed.DeepSpeedEngine):
        raise holdfast.UsageError(
            f"attach takes a DeepSpeed engine, not {type(engine).__name__}",
            advice="give it the first of what deepspeed.initialize() returned",
        )
    current = engine.checkpoint_engine
    if type(current) is not TorchCheckpointEngine:
        raise holdfast.UsageError(
            f"the engine saves through {type(current).__name__}",
            advice="call attach() once, and leave 'checkpoint.writer' and 'datastates_ckpt' out of DeepSpeed's config",
        )
    refused = {
        "optimizer state offloaded to NVMe, which DeepSpeed copies by itself": engine.zero_nvme_offload_optimizer(),
        "node-local storage, where no rank sees the whole checkpoint": engine.use_node_local_storage(),
        "universal checkpoints, which DeepSpeed reads by itself": engine.load_universal_checkpoint(),
        "mixtures of experts, with which this integration is not tested": engine.has_moe_layers,
        "pipeline modules, with which this integration is not tested": isinstance(engine.module, PipelineModule),
    }
    found = [what for what, is_used in refused.items() if is_used]
    if found:
        raise holdfast.UsageError(f"the engine uses {found[0]}", advice="use DeepSpeed's own checkpoints for it")
