"""Every way to save that is measured: the bare machine, Holdfast, and its peers, behind one small face.

A saver's `save` is what a training loop would call. What it returns says when the state may change again, and waits
until the result is durable: peers that do not sync their files and folders get it done for them, inside their time.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import holdfast
import raw
from states import State

warnings.filterwarnings("ignore", message="torch.distributed is disabled")
warnings.filterwarnings("ignore", message="TypedStorage is deprecated")


@dataclass(frozen=True)
class Pending:
    """A save under way. `wait` is None where nothing is written; `path` is what has to be synced when it is there."""

    wait: Callable[[], object] | None
    is_staged: Callable[[], bool] = lambda: True
    path: Path | None = None

    @property
    def writes(self) -> bool:
        return self.wait is not None

    def finish(self) -> None:
        """Return when the result is durable, for one that saves alone."""
        if self.wait is not None:
            self.wait()
        if self.path is not None:
            sync_tree(self.path)


class Saver:
    """One way to save one state into one folder."""

    role = "peer"
    staged_on_return = True
    warms_up = True  # whether its first save makes something that later ones use again

    def __init__(self, name: str, folder: Path, state: State) -> None:
        self.name = name
        self.folder = folder
        self.state = state

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def save(self, number: int) -> Pending:
        raise NotImplementedError

    def hold(self) -> AbstractContextManager[object]:
        """What the optimizer's step has to be wrapped in, for those that copy behind the training's back."""
        return nullcontext()

    def clear(self) -> None:
        """Delete what was saved before; never timed."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def path(self, number: int) -> Path:
        return self.folder / f"save-{number}"


Factory = Callable[[Path, State], Saver]


def named(kind: Callable[..., Saver], name: str, **options: Any) -> Factory:
    def build(folder: Path, state: State) -> Saver:
        slug = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
        return kind(name, folder / slug, state, **options)

    return build


# The bare machine


class CopyEach(Saver):
    """`copy_` of every tensor into memory that is in use already."""

    role = "limit"

    def open(self) -> None:
        pin = any(tensor.is_cuda for tensor in self.state.tensors.values())
        self.pairs = [
            (torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=pin), tensor)
            for tensor in self.state.local.values()
        ]

    def save(self, number: int) -> Pending:
        for target, source in self.pairs:
            target.copy_(source, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return Pending(None)

    def clear(self) -> None:
        pass

    def close(self) -> None:
        self.pairs = []


class CopyFlat(CopyEach):
    """The same number of bytes in one copy."""

    def open(self) -> None:
        source = torch.ones(self.state.size_bytes, dtype=torch.uint8)
        self.pairs = [(torch.zeros_like(source), source)]


class RawWrite(Saver):
    """The same number of bytes past the page cache, made durable: what the disk can do. See `raw` for how."""

    role = "limit"

    def open(self) -> None:
        super().open()
        self.source = raw.random_piece()

    def save(self, number: int) -> Pending:
        raw.write(self.path(number), self.state.size_bytes, self.source)
        return Pending(lambda: None)


# Holdfast


class Holdfast(Saver):
    role = "holdfast"

    def __init__(
        self,
        name: str,
        folder: Path,
        state: State,
        *,
        mode: str,
        on_event: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__(name, folder, state)
        self.mode = mode
        self.options: dict[str, Any] = {} if on_event is None else {"on_event": on_event}
        self.staged_on_return = mode in ("sync", "async")

    def open(self) -> None:
        super().open()
        self.manager = holdfast.CheckpointManager(
            self.folder, self.state.components, mode=self.mode, rng=False, **self.options
        )

    def save(self, number: int) -> Pending:
        handle = self.manager.save(number)
        return Pending(handle.wait, handle.staged)

    def clear(self) -> None:
        for old in self.folder.glob("step-*"):
            shutil.rmtree(old)

    def close(self) -> None:
        self.manager.close()
        super().close()


# Peers that save in the call


class TorchSave(Saver):
    warms_up = False

    def save(self, number: int) -> Pending:
        torch.save(dict(self.state.tensors), self.path(number))
        sync_tree(self.folder)
        return Pending(lambda: None)


class Safetensors(Saver):
    warms_up = False

    def open(self) -> None:
        super().open()
        from safetensors.torch import save_file

        self.write = save_file

    def save(self, number: int) -> Pending:
        self.write(dict(self.state.tensors), self.path(number))
        sync_tree(self.folder)
        return Pending(lambda: None)


class DcpSave(Saver):
    warms_up = False

    def __init__(self, name: str, folder: Path, state: State, *, threads: int) -> None:
        super().__init__(name, folder, state)
        self.threads = threads

    def save(self, number: int) -> Pending:
        writer = dcp.FileSystemWriter(self.path(number), thread_count=self.threads)
        dcp.save(dict(self.state.tensors), storage_writer=writer)
        sync_tree(self.path(number))
        return Pending(lambda: None)


# Peers that save behind the call


class DcpAsync(Saver):
    """`stager` makes the stager that all saves share; None is a new one per save, as it comes."""

    def __init__(
        self,
        name: str,
        folder: Path,
        state: State,
        *,
        stager: Callable[[], Any] | None = None,
        process: bool = False,
        plan_cache: bool = False,
    ) -> None:
        super().__init__(name, folder, state)
        self.make_stager = stager
        self.kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self.plan_cache = plan_cache
        self.warms_up = process or stager is not None
        self.staging: Future[None] | None = None

    def open(self) -> None:
        super().open()
        self.stager = self.make_stager() if self.make_stager else None
        self.staged_on_return = not getattr(getattr(self.stager, "_config", None), "use_async_staging", False)
        self.own_group = self.kind is AsyncCheckpointerType.PROCESS and not dist.is_initialized()
        if self.own_group:
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def save(self, number: int) -> Pending:
        answer = dcp.async_save(
            dict(self.state.tensors),
            checkpoint_id=self.path(number),
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
            planner=DefaultSavePlanner(enable_plan_caching=True) if self.plan_cache else None,
        )
        self.staging = getattr(answer, "staging_completion", None)
        upload = getattr(answer, "upload_completion", answer)
        return Pending(upload.result, self._is_staged, self.path(number))

    def hold(self) -> AbstractContextManager[object]:
        if self.staging is not None:
            self.staging.result()
        return nullcontext()

    def close(self) -> None:
        if isinstance(self.stager, KeptStager):
            self.stager.end()
        if self.own_group:
            dist.destroy_process_group()
        super().close()

    def _is_staged(self) -> bool:
        return self.staging is None or self.staging.done()


class TorchCheckpointing(Saver):
    """With buffered files: its O_DIRECT, which is on as it comes, writes unaligned pieces and fails on ext4."""

    def __init__(self, name: str, folder: Path, state: State, *, async_staging: bool) -> None:
        super().__init__(name, folder, state)
        self.staged_on_return = not async_staging

    def open(self) -> None:
        super().open()
        from torch_checkpointing.checkpoint_manager import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        staging = CheckpointStagerConfig(use_async_staging=not self.staged_on_return)
        save = AsyncCheckpointSaverConfig(staging_config=staging)
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = CheckpointManager(CheckpointManager.Config(save=save, storage_config=storage))

    def save(self, number: int) -> Pending:
        write = self.manager.save(str(self.path(number)), {"state": dict(self.state.tensors)})
        staging = self.manager._staging_future
        return Pending(write.result, lambda: staging is None or staging.done(), self.path(number))

    def hold(self) -> AbstractContextManager[object]:
        return self.manager.lock()

    def close(self) -> None:
        self.manager.close()
        super().close()


class TorchSnapshot(Saver):
    """It returns before it has a copy of tensors in host memory: of 512 MB that were changed right after the call,
    99 % were saved as they became. What it saves is the state of the call only if nothing changes until it is done."""

    staged_on_return = False

    def open(self) -> None:
        super().open()
        import torchsnapshot

        self.library = torchsnapshot

    def save(self, number: int) -> Pending:
        state = {"state": self.library.StateDict(**self.state.tensors)}
        pending = self.library.Snapshot.async_take(str(self.path(number)), state)
        return Pending(pending.wait, pending.done, self.path(number))


class TorchSnapshotTake(TorchSnapshot):
    warms_up = False

    def save(self, number: int) -> Pending:
        self.library.Snapshot.take(str(self.path(number)), {"state": self.library.StateDict(**self.state.tensors)})
        sync_tree(self.path(number))
        return Pending(lambda: None)


class Orbax(Saver):
    """JAX arrays over the same memory: nothing is copied for it, and it saves what the others save."""

    def open(self) -> None:
        super().open()
        import jax
        import orbax.checkpoint

        self.tree = {name: jax.dlpack.from_dlpack(tensor) for name, tensor in self.state.tensors.items()}
        self.checkpointer = orbax.checkpoint.StandardCheckpointer()

    def save(self, number: int) -> Pending:
        self.checkpointer.save(self.path(number).absolute(), self.tree)
        return Pending(self.checkpointer.wait_until_finished, path=self.path(number))

    def close(self) -> None:
        self.checkpointer.close()
        self.tree = {}
        super().close()


# Who takes part

COPY_EACH, COPY_FLAT = "memcpy, tensor by tensor", "memcpy, one flat copy"
RAW_WRITE = "raw O_DIRECT + fsync"
DCP_AS_IT_COMES, DCP_THREADS = "dcp.save, as it comes", "dcp.save, 2 threads"


def limits() -> list[Factory]:
    return [named(CopyEach, COPY_EACH), named(CopyFlat, COPY_FLAT), named(RawWrite, RAW_WRITE)]


def ours(*modes: str) -> list[Factory]:
    return [named(Holdfast, f"holdfast, {mode}", mode=mode) for mode in dict.fromkeys(modes)]


def sync_peers() -> list[Factory]:
    return [
        named(TorchSave, "torch.save + fsync"),
        named(Safetensors, "safetensors + fsync"),
        named(DcpSave, DCP_AS_IT_COMES, threads=1),
        named(DcpSave, DCP_THREADS, threads=2),
        named(TorchSnapshotTake, "torchsnapshot.take"),
    ]


def async_peers() -> list[Factory]:
    return [
        named(DcpAsync, "dcp.async_save, thread, as it comes"),
        named(DcpAsync, "dcp.async_save, thread, reused stager", stager=shared_stager),
        named(DcpAsync, "dcp.async_save, process, as it comes", process=True),
        named(
            DcpAsync,
            "dcp.async_save, process, shared stager, plan cache",
            process=True,
            stager=shared_stager,
            plan_cache=True,
        ),
        named(TorchCheckpointing, "torch-checkpointing, staged behind the call", async_staging=True),
        named(TorchCheckpointing, "torch-checkpointing, staged in the call", async_staging=False),
        named(TorchSnapshot, "torchsnapshot.async_take"),
        named(Orbax, "Orbax, JAX arrays"),
    ]


def reusing_async_peers() -> list[Factory]:
    """Those that keep their buffers and processes between saves, where there is a choice; without JAX."""
    empty = State("", {}, {})
    names = {make: make(Path(), empty).name for make in async_peers()}
    return [make for make, name in names.items() if "as it comes" not in name and "JAX" not in name]


def gpu_peers() -> list[Factory]:
    return [
        named(DcpSave, DCP_AS_IT_COMES, threads=1),
        named(DcpAsync, "dcp.async_save, thread, cached pinned stager", stager=cached_pinned_stager),
        named(
            DcpAsync,
            "dcp.async_save, process, pinned shared stager, staging behind, plan cache",
            process=True,
            stager=everything_stager,
            plan_cache=True,
        ),
        named(TorchCheckpointing, "torch-checkpointing, staged behind the call", async_staging=True),
        named(DcpAsync, "dcp.async_save, thread, as it comes"),
        named(Safetensors, "safetensors + fsync"),
        named(TorchSave, "torch.save + fsync"),
    ]


class KeptStager(DefaultStager):
    """One that `async_save` cannot close: in torch 2.11 it does so after each save, and the next one fails."""

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()


def shared_stager() -> KeptStager:
    """Kept between saves, in shared memory; the other options need a GPU."""
    return KeptStager(StagingOptions(False, True, False, False))


def cached_pinned_stager() -> BlockingAsyncStager:
    return BlockingAsyncStager(cache_staged_state_dict=True)


def everything_stager() -> KeptStager:
    return KeptStager(StagingOptions(True, True, True, True))


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def sync_tree(path: Path) -> None:
    """Every file and folder at and under a path, and the folder that holds it: what survives a power cut."""
    found: Sequence[Path] = [path, *path.rglob("*")] if path.is_dir() else [path]
    for one in (*found, path.parent):
        sync(one)


def wait_until_staged(pending: Pending) -> None:
    while not pending.is_staged():
        time.sleep(0.0005)
