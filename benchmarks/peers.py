"""Save and load one tensor with each checkpoint library, by its own documented calls. Used by `comparison`.

A library is imported when its calls are made, so that only those that are installed are needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol


class Peer(Protocol):
    """Save and load one tensor by a library's own calls."""

    packages: tuple[str, ...]

    def save(self, folder: Path, elements: int) -> None: ...

    def load(self, folder: Path, elements: int) -> Any: ...


def numbers(elements: int) -> Any:
    import torch

    return torch.randn(elements, generator=torch.Generator().manual_seed(7))


def holder(elements: int) -> Any:
    """Make a module with one trained weight, and one buffer that no training changes: the one that is compared."""
    import torch

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.register_buffer("numbers", torch.zeros(elements))

        def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
            return {"loss": self.layer(x).pow(2).mean()}

    return Holder()


class TorchSave:
    """`torch.save` and `torch.load` with their defaults."""

    packages = ("torch",)

    def save(self, folder: Path, elements: int) -> None:
        import torch

        folder.mkdir()
        torch.save({"numbers": numbers(elements)}, folder / "state.pt")

    def load(self, folder: Path, elements: int) -> Any:
        import torch

        return torch.load(folder / "state.pt")["numbers"]


class DCP:
    """`torch.distributed.checkpoint`; `asynchronous` as it comes, in a thread of the trainer."""

    packages = ("torch",)

    def save(self, folder: Path, elements: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save({"numbers": numbers(elements)}, checkpoint_id=folder, no_dist=True)

    def save_async(self, folder: Path, elements: int) -> None:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        dcp.async_save({"numbers": numbers(elements)}, checkpoint_id=folder)

    def save_on_two(self, folder: Path, elements: int) -> None:
        import torch.multiprocessing

        torch.multiprocessing.spawn(save_half, (folder, elements), nprocs=2)

    def load(self, folder: Path, elements: int) -> Any:
        import torch
        import torch.distributed.checkpoint as dcp

        state = {"numbers": torch.zeros(elements)}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        return state["numbers"]


def save_half(rank: int, folder: Path, elements: int) -> None:
    """Save one tensor that two ranks hold halves of."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    store = dist.FileStore(str(folder.parent / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    half = distribute_tensor(numbers(elements), init_device_mesh("cpu", (2,)), [Shard(0)])
    dcp.save({"numbers": half}, checkpoint_id=folder)
    dist.destroy_process_group()


class Lightning:
    """`Trainer.save_checkpoint`, and `Trainer.fit(ckpt_path=)` to resume."""

    packages = ("lightning",)

    def trainer(self, folder: Path, steps: int, plugins: Any = None) -> Any:
        import lightning

        return lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder.parent,
            plugins=plugins,
        )

    def module(self, elements: int) -> Any:
        import lightning
        import torch

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.inner = holder(elements)

            def training_step(self, batch: Any, index: int) -> Any:
                return self.inner(batch)["loss"]

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.inner.layer.parameters())

        return Module()

    def data(self) -> Any:
        import torch

        return torch.utils.data.DataLoader(torch.ones(4, 1))

    def save_with(self, folder: Path, elements: int, plugins: Any) -> None:
        trainer, module = self.trainer(folder, 1, plugins), self.module(elements)
        trainer.fit(module, self.data())
        module.inner.numbers.copy_(numbers(elements))
        folder.mkdir()
        trainer.save_checkpoint(folder / "last.ckpt")

    def save(self, folder: Path, elements: int) -> None:
        self.save_with(folder, elements, None)

    def save_async(self, folder: Path, elements: int) -> None:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO

        self.save_with(folder, elements, [AsyncCheckpointIO()])

    def load(self, folder: Path, elements: int) -> Any:
        module = self.module(elements)
        self.trainer(folder, 2).fit(module, self.data(), ckpt_path=folder / "last.ckpt")
        return module.inner.numbers


class HFTrainer:
    """`transformers.Trainer`: a checkpoint of its own, and `train(resume_from_checkpoint=)`."""

    packages = ("transformers",)

    def trainer(self, folder: Path, elements: int, steps: int, fill: bool) -> Any:
        import torch
        import transformers

        model = holder(elements)
        if fill:
            model.numbers.copy_(numbers(elements))
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            save_strategy="steps" if fill else "no",
            save_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        data = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 64
        return transformers.Trainer(model=model, args=arguments, train_dataset=data)

    def save(self, folder: Path, elements: int) -> None:
        self.trainer(folder, elements, 1, True).train()

    def load(self, folder: Path, elements: int) -> Any:
        trainer = self.trainer(folder, elements, 1, False)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
        return trainer.model.numbers


class Accelerate:
    """`Accelerator.save_state` and `load_state`."""

    packages = ("accelerate",)

    def prepared(self, elements: int) -> tuple[Any, Any]:
        import accelerate
        import torch

        accelerator = accelerate.Accelerator(cpu=True)
        model = holder(elements)
        optimizer = torch.optim.AdamW(model.layer.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        model, *_ = accelerator.prepare(model, optimizer, scheduler)
        # Any further object with a state, as its documentation has it for learning rate schedules and the like.
        accelerator.register_for_checkpointing(torch.nn.Linear(1, 1))
        return accelerator, model

    def save(self, folder: Path, elements: int) -> None:
        accelerator, model = self.prepared(elements)
        model.numbers.copy_(numbers(elements))
        accelerator.save_state(str(folder))

    def load(self, folder: Path, elements: int) -> Any:
        accelerator, model = self.prepared(elements)
        accelerator.load_state(str(folder))
        return model.numbers


class Orbax:
    """`StandardCheckpointer`, for JAX arrays; it saves in the background as it comes."""

    packages = ("orbax-checkpoint", "jax")

    def tree(self, elements: int) -> Any:
        import jax.numpy

        return {"numbers": jax.numpy.asarray(numbers(elements).numpy())}

    def save(self, folder: Path, elements: int) -> None:
        import orbax.checkpoint

        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder, self.tree(elements))

    def save_async(self, folder: Path, elements: int) -> None:
        import orbax.checkpoint

        orbax.checkpoint.StandardCheckpointer().save(folder, self.tree(elements))

    def save_on_two(self, folder: Path, elements: int) -> None:
        """Save an array that two devices of one process hold halves of."""
        import jax
        import orbax.checkpoint

        jax.config.update("jax_num_cpu_devices", 2)
        mesh = jax.sharding.Mesh(jax.devices(), ("x",))
        halves = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder, {"numbers": jax.device_put(self.tree(elements)["numbers"], halves)})

    def load(self, folder: Path, elements: int) -> Any:
        import jax.numpy
        import numpy
        import orbax.checkpoint
        import torch

        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            like = {"numbers": jax.numpy.zeros(elements)}
            return torch.from_numpy(numpy.array(checkpointer.restore(folder, like)["numbers"]))


class Holdfast:
    """`CheckpointManager` with its defaults."""

    packages = ("holdfast",)

    def saved(self, folder: Path, elements: int) -> Any:
        import holdfast

        model = holder(elements)
        model.numbers.copy_(numbers(elements))
        manager = holdfast.CheckpointManager(folder, {"model": model})
        return manager.save(0)

    def save(self, folder: Path, elements: int) -> None:
        self.saved(folder, elements).wait()

    def save_async(self, folder: Path, elements: int) -> None:
        self.saved(folder, elements)

    def load(self, folder: Path, elements: int) -> Any:
        import holdfast

        model = holder(elements)
        with holdfast.CheckpointManager(folder, {"model": model}, resume="required") as manager:
            manager.restore()
        return model.numbers


PEERS: dict[str, Peer] = {
    "torch.save": TorchSave(),
    "PyTorch DCP": DCP(),
    "Lightning": Lightning(),
    "HF Trainer": HFTrainer(),
    "Accelerate": Accelerate(),
    "Orbax": Orbax(),
    "Holdfast": Holdfast(),
}
