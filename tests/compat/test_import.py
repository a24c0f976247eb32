"""Checkpoints that other tools wrote, imported and resumed: stock DCP, torch.save, Lightning, the transformers Trainer.

Each training that goes on from an imported checkpoint is compared, bit for bit, with one that goes on without Holdfast.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app
from holdfast.formats.exporting.export import export
from holdfast.formats.own import OwnSource
from holdfast.formats.source import TensorEntry
from holdfast.testing import values
from tests.ranks import run_ranks
from tests.sizes import if_deep

VOCABULARY, WIDTH, LENGTH, ROWS = 13, 12, 6, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up = nn.Linear(WIDTH, 29)
        self.down = nn.Linear(29, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = hidden + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return hidden + self.down(torch.relu(self.up(hidden)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.position(torch.arange(LENGTH))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Training:
    """A GPT with AdamW in two groups and a scheduler, on one process or sharded over all ranks."""

    def __init__(self, rank: int = 0, size: int = 1, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.rank, self.size = rank, size
        self.model: nn.Module = GPT()
        if size > 1:
            mesh = init_device_mesh("cpu", (size,))
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        decayed = [one for one in self.model.parameters() if one.dim() > 1]
        others = [one for one in self.model.parameters() if one.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def run(self, first: int, end: int) -> list[float]:
        losses = []
        for step in range(first, end):
            generator = torch.Generator().manual_seed(step)
            batch = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)[self.rank :: self.size]
            logits = self.model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    @property
    def components(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def bits(self) -> dict[str, bytes]:
        """Return every tensor of model and optimizer, whole, as bytes. All ranks call it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        found = {
            **model,
            **{f"{name}/{key}": one for name, state in optimizer["state"].items() for key, one in state.items()},
        }
        return {name: _bytes(value) for name, value in found.items()}


def _bytes(tensor: torch.Tensor) -> bytes:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return bytes(full.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def resume(rank: int, size: int, run: str, end: int) -> tuple[int, dict[str, bytes], list[float]]:
    training = Training(rank, size, seed=99)
    with holdfast.CheckpointManager(run, training.components, mode="sync") as manager:
        start = manager.restore()
        bits = training.bits()
        return start.next_step, bits, training.run(start.next_step, end)


# Stock DCP


def save_with_dcp(rank: int, size: int, folder: str, steps: int, flat: bool) -> None:
    training = Training(rank, size)
    training.run(0, steps)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(training.model, training.optimizer, options=options)
    state = {"model": model, "optim": optimizer, "scheduler": training.scheduler.state_dict(), "epoch": 4}
    dcp.save(state, checkpoint_id=folder)


def continue_with_dcp(rank: int, size: int, folder: str, first: int, end: int, flat: bool) -> Any:
    training = Training(rank, size, seed=55)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(training.model, training.optimizer, options=options)
    state = {"model": model, "optim": optimizer, "scheduler": training.scheduler.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        training.model, training.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options
    )
    training.scheduler.load_state_dict(state["scheduler"])
    return training.bits(), training.run(first, end)


@pytest.mark.parametrize("flat", [True, *if_deep(False)], ids=["flattened", *if_deep("nested")])
def test_what_stock_dcp_saved_on_2_ranks_goes_on_exactly_on_4(tmp_path: Path, flat: bool) -> None:
    folder, run = str(tmp_path / "dcp"), str(tmp_path / "run")
    values(run_ranks(2, save_with_dcp, 2, folder, 3, flat))
    checkpoint = holdfast.import_checkpoint(folder, run, step=2)
    assert checkpoint.extra["import"]["components"] == {
        "model": "model",
        "optimizer": "optim",
        "scheduler": "scheduler",
    }
    assert checkpoint.progress == {"epoch": 4}
    control = values(run_ranks(4, continue_with_dcp, 4, folder, 3, 6, flat))
    resumed = values(run_ranks(4, resume, 4, run, 6))
    assert [one[0] for one in resumed] == [3] * 4
    assert [one[1] for one in resumed] == [one[0] for one in control]
    assert [one[2] for one in resumed] == [one[1] for one in control]


class AppState:
    """What DCP's tutorial saves: one object around model and optimizer."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.training.model, self.training.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_the_app_of_dcps_tutorial_is_resumed(tmp_path: Path) -> None:
    control = Training()
    control.run(0, 2)
    dcp.save({"app": AppState(control)}, checkpoint_id=tmp_path / "dcp")
    (tmp_path / "dcp" / "meta.pt").write_bytes(b"of another program")
    checkpoint = holdfast.import_checkpoint(tmp_path / "dcp", tmp_path / "run", step=1)
    assert checkpoint.extra["import"]["components"] == {"model": "app.model", "optimizer": "app.optim"}
    assert checkpoint.extra["import"]["left"] == ["meta.pt: not part of the DCP checkpoint"]
    training = Training(seed=9)
    components = {name: training.components[name] for name in ("model", "optimizer")}
    with holdfast.CheckpointManager(tmp_path / "run", components, mode="sync") as manager:
        manager.restore()
    assert training.bits() == control.bits()


# torch.save


def test_what_torch_save_wrote_is_resumed_exactly(tmp_path: Path) -> None:
    control = Training()
    control.run(0, 3)
    saved = {name: component.state_dict() for name, component in control.components.items()}
    torch.save({**saved, "step": 3, "args": {"width": WIDTH}}, tmp_path / "last.pt")
    bits, expected = control.bits(), control.run(3, 6)
    checkpoint = holdfast.import_checkpoint(tmp_path / "last.pt", tmp_path / "run", step=2)
    assert checkpoint.config == {"width": WIDTH}
    assert resume(0, 1, str(tmp_path / "run"), 6) == (3, bits, expected)


def test_a_pickle_of_code_is_refused_and_nothing_is_committed(tmp_path: Path) -> None:
    torch.save({"model": GPT().state_dict(), "hook": print}, tmp_path / "last.pt")
    with pytest.raises(holdfast.UnsafeContentError, match="print"):
        holdfast.import_checkpoint(tmp_path / "last.pt", tmp_path / "run", step=0)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", [[torch.ones(2)], 5], ids=["list", "number"])
def test_a_file_that_holds_no_state_by_name_is_refused(tmp_path: Path, value: Any) -> None:
    torch.save(value, tmp_path / "last.pt")
    with pytest.raises(holdfast.HoldfastError, match=r"last\.pt: the source has no model"):
        holdfast.import_checkpoint(tmp_path / "last.pt", tmp_path / "run", step=0)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_the_command_line_imports_and_reports(tmp_path: Path, arguments: list[str]) -> None:
    training = Training()
    training.run(0, 1)
    tree = {
        "net": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "history": {"loss": [1.0]},
    }
    torch.save(tree, tmp_path / "last.pt")
    names = tmp_path / "names.txt"
    order = [*training.optimizer.param_groups[0]["params"], *training.optimizer.param_groups[1]["params"]]
    by_parameter = {id(one): name for name, one in training.model.named_parameters()}
    names.write_text("\n".join(by_parameter[id(one)] for one in order) + "\n")
    line = ["import", str(tmp_path / "last.pt"), str(tmp_path / "run"), "--step", "7", "--skip", "history"]
    done = CliRunner().invoke(app, [*line, "--component", "net=gpt", "--parameters", str(names), *arguments])
    assert done.exit_code == 0, done.output
    if arguments:
        report = json.loads(done.stdout)
        assert (report["step"], report["next_step"]) == (7, 8)
        assert report["components"] == {"gpt": "net", "optimizer": "optimizer"}
        assert report["left"] == ["history: left out by skip="]
    else:
        assert "committed step 7: " in done.stdout
        assert "  gpt: from net\n" in done.stdout
        assert "note: left: history: left out by skip=" in done.stderr
    assert holdfast.verify(tmp_path / "run").ok


def test_the_command_line_says_what_is_missing(tmp_path: Path) -> None:
    torch.save({"model": GPT().state_dict(), "step": 5}, tmp_path / "last.pt")
    done = CliRunner().invoke(app, ["import", str(tmp_path / "last.pt"), str(tmp_path / "run")])
    assert done.exit_code == 2
    assert "it has step=5" in done.stderr
    for wrong in (["--component", "net"], ["--parameters", str(tmp_path / "nothing.txt")]):
        done = CliRunner().invoke(app, ["import", str(tmp_path / "last.pt"), str(tmp_path / "run"), *wrong])
        assert done.exit_code == 2
        assert wrong[1] in done.stderr


# Lightning


def test_a_checkpoint_of_lightning_is_resumed_exactly(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    losses: list[float] = []
    rows = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(1))

    class Net(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = self.layers(batch).square().mean()
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    torch.manual_seed(0)
    net = Net(width=8)
    trainer = lightning.Trainer(
        max_steps=3,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(net, torch.utils.data.DataLoader(rows[:3], batch_size=None))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    optimizer, schedule = trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler
    checkpoint = holdfast.import_checkpoint(tmp_path / "last.ckpt", tmp_path / "run")
    assert checkpoint.step == 2
    assert checkpoint.config == {"width": 8}
    assert checkpoint.progress["global_step"] == 3

    def train(net: nn.Module, optimizer: Any, schedule: Any, first: int) -> list[float]:
        found = []
        for batch in rows[first:]:
            loss = net.layers(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            found.append(loss.item())
        return found

    other = Net()
    built = other.configure_optimizers()
    own = {"model": other, "optimizer": built["optimizer"], "scheduler": built["lr_scheduler"]["scheduler"]}
    with holdfast.CheckpointManager(tmp_path / "run", own, mode="sync") as manager:
        start = manager.restore()
    assert start.next_step == 3
    assert train(other, own["optimizer"], own["scheduler"], start.next_step) == train(net, optimizer, schedule, 3)


# The Trainer of transformers


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Callable[[], Any]]:
    """A checkpoint folder of the Trainer after three steps, and a function that makes the same Trainer anew."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    output = tmp_path_factory.mktemp("trainer")

    def make() -> Any:
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=16,
            tie_word_embeddings=False,
        )
        rows = torch.randint(0, VOCABULARY, (24, LENGTH), generator=torch.Generator().manual_seed(2))
        arguments = transformers.TrainingArguments(
            output_dir=str(output),
            max_steps=3,
            save_steps=3,
            per_device_train_batch_size=2,
            learning_rate=0.01,
            weight_decay=0.1,
            warmup_steps=2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_steps=1,
        )
        model = transformers.LlamaForCausalLM(config)
        data = [{"input_ids": row, "labels": row} for row in rows]
        return transformers.Trainer(model=model, args=arguments, train_dataset=data)

    torch.manual_seed(0)
    make().train()
    return output / "checkpoint-3", make


def train_llama(model: nn.Module, optimizer: Any, schedule: Any, steps: int) -> list[float]:
    losses = []
    model.train()
    for step in range(steps):
        rows = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def test_a_checkpoint_of_the_trainer_is_resumed_exactly(
    tmp_path: Path, trained: tuple[Path, Callable[[], Any]]
) -> None:
    folder, make = trained
    with pytest.raises(holdfast.UsageError, match="do not stand in the order of the model"):
        holdfast.import_checkpoint(folder, tmp_path / "run")
    checkpoint = holdfast.import_checkpoint(folder, tmp_path / "run", parameters=make().model)
    note = checkpoint.extra["import"]
    assert checkpoint.step == 2
    assert checkpoint.progress["global_step"] == 3
    assert checkpoint.config["hidden_size"] == 16
    assert "generation_config.json" in checkpoint.assets
    assert set(note["components"]) == {"model", "optimizer", "scheduler", "trainer_state", "rng@rank-00000"}
    assert note["left"] == ["training_args.bin: a pickle of code objects, which is never opened"]
    expected = control_of(folder, make)
    trainer = make()
    trainer.create_optimizer_and_scheduler(num_training_steps=3)
    components = {"model": trainer.model, "optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
    with holdfast.CheckpointManager(tmp_path / "run", components, mode="sync") as manager:
        assert manager.restore().next_step == 3
    drawn = torch.rand(3).tolist()
    losses = train_llama(trainer.model, trainer.optimizer, trainer.lr_scheduler, 3)
    assert (drawn, losses) == expected


def control_of(folder: Path, make: Callable[[], Any]) -> tuple[list[float], list[float]]:
    """Go on from the folder with torch and transformers alone."""
    trainer = make()
    trainer.create_optimizer_and_scheduler(num_training_steps=3)
    model = type(trainer.model).from_pretrained(folder)
    trainer.model.load_state_dict(model.state_dict())
    trainer.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    trainer.lr_scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))
    torch.set_rng_state(torch.load(folder / "rng_state.pth", weights_only=False)["cpu"])
    drawn = torch.rand(3).tolist()
    return drawn, train_llama(trainer.model, trainer.optimizer, trainer.lr_scheduler, 3)


def test_the_random_states_of_several_ranks_are_one_per_rank(
    tmp_path: Path, trained: tuple[Path, Callable[[], Any]]
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(trained[0], folder)
    (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
    shutil.copy(folder / "rng_state_0.pth", folder / "rng_state_1.pth")
    model = trained[1]().model
    checkpoint = holdfast.import_checkpoint(folder, tmp_path / "run", parameters=model)
    assert checkpoint.world_size == 2
    assert {"rng@rank-00000", "rng@rank-00001"} <= set(checkpoint.extra["import"]["components"])
    (folder / "rng_state_0.pth").unlink()
    checkpoint = holdfast.import_checkpoint(folder, tmp_path / "other", parameters=model)
    assert checkpoint.world_size == 1
    assert any("rng_state_1.pth" in one for one in checkpoint.extra["import"]["left"])


def test_a_trainers_folder_without_weights_is_refused(tmp_path: Path, trained: tuple[Path, Callable[[], Any]]) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    shutil.copy(trained[0] / "trainer_state.json", folder)
    with pytest.raises(holdfast.UnsupportedFormatError, match="no weights that are known"):
        holdfast.import_checkpoint(folder, tmp_path / "run")


# Out and in again


def save_with_manager(rank: int, size: int, run: str) -> list[float]:
    training = Training(rank, size)
    training.run(0, 3)
    with holdfast.CheckpointManager(run, training.components, mode="sync", rng=False) as manager:
        manager.save(2).wait()
    return training.run(3, 5)


def tensors_of(run: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return every tensor of the latest checkpoint: its type, its shape and its bytes."""
    with OwnSource.resolve(run) as source:
        entries = [TensorEntry(leaf.name, leaf.dtype, leaf.shape, handle=leaf) for leaf in source.reader.leaves]
        return {one.name: (one.dtype, one.shape, b"".join(map(bytes, source.pieces(one)))) for one in entries}


def values_of(run: Path) -> dict[str, Any]:
    with OwnSource.resolve(run) as source:
        reader = source.reader
        return {tree.name: (tree.kind, tree.model, reader.stored_values(tree.name)) for tree in reader.trees}


@pytest.mark.parametrize("size", [2, *if_deep(1, 4)])
def test_a_checkpoint_exported_to_dcp_and_imported_is_the_same(tmp_path: Path, size: int) -> None:
    run, folder, again = tmp_path / "run", tmp_path / "dcp", tmp_path / "again"
    expected = values(run_ranks(size, save_with_manager, size, str(run)))
    export(run, folder, format="dcp", only=["model", "optimizer", "scheduler"])
    holdfast.import_checkpoint(folder, again, step=2)
    assert tensors_of(again) == tensors_of(run)
    assert values_of(again) == values_of(run)
    resumed = values(run_ranks(size, resume, size, str(again), 5))
    assert [one[2] for one in resumed] == expected
