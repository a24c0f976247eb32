"""A stand-in for Megatron-Bridge, which does not install here: its contexts, its factory, its look for checkpoints and
its training loop, as far as a checkpoint manager meets them. Each part does what the part of this name does there.
"""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MANAGER = "holdfast.integrations.megatron_bridge.MegatronBridgeManager"
BATCH = 4

# Where a manager finds the class of a callback's argument.
sys.modules["megatron.bridge.training.callbacks"] = sys.modules[__name__]


@dataclass
class TrainState:
    step: int = 0
    consumed_train_samples: int = 0
    skipped_train_samples: int = 0
    consumed_valid_samples: int = 0
    floating_point_operations_so_far: int = 0
    do_train: bool = False
    do_valid: bool = False
    do_test: bool = False


@dataclass(kw_only=True)
class CheckpointConfig:
    save: str | None = None
    save_interval: int | None = None
    most_recent_k: int | None = -1
    load: str | None = None
    ckpt_step: int | None = None
    finetune: bool = False
    pretrained_checkpoint: str | None = None
    async_save: bool = False
    save_optim: bool = True
    load_optim: bool = True
    save_rng: bool = True
    load_rng: bool = True
    exit_on_missing_checkpoint: bool = False
    non_persistent_save_interval: int | None = None
    also_save_hf_checkpoint: bool = False
    load_main_params_from_ckpt: bool = False
    dist_ckpt_optim_fully_reshardable: bool = False
    custom_manager_class: str | None = MANAGER


@dataclass(kw_only=True)
class ModelConfig:
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1


@dataclass(kw_only=True)
class OptimizerConfig:
    use_distributed_optimizer: bool = False
    lr: float = 0.05


@dataclass(kw_only=True)
class DistConfig:
    use_torch_fsdp2: bool = False


@dataclass(kw_only=True)
class ConfigContainer:
    checkpoint: CheckpointConfig
    train_iters: int = 8
    exit_interval: int | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    dist: DistConfig = field(default_factory=DistConfig)


@dataclass
class GlobalState:
    cfg: ConfigContainer
    train_state: TrainState = field(default_factory=TrainState)


@dataclass
class CheckpointSaveContext:
    state: GlobalState
    model: list[Any]
    optimizer: Any
    opt_param_scheduler: Any
    num_floating_point_operations_so_far: int
    train_data_iterator: Any = None
    non_persistent_ckpt: bool = False
    pg_collection: Any = None
    module_name: str | None = None


@dataclass
class CheckpointLoadContext:
    state: GlobalState
    model: list[Any]
    optimizer: Any
    opt_param_scheduler: Any
    strict: bool = True
    skip_load_to_model_and_opt: bool = False


@runtime_checkable
class CheckpointManager(Protocol):
    def __init__(self, checkpoint_config: CheckpointConfig) -> None: ...
    def save(self, ctx: CheckpointSaveContext, callback_manager: Any) -> None: ...
    def load(self, ctx: CheckpointLoadContext) -> tuple[int, int]: ...
    def finalize_async_saves(self, state: GlobalState, blocking: bool = False, terminate: bool = False) -> None: ...


@dataclass
class CallbackManager:
    called: list[tuple[str, int]] = field(default_factory=list)
    user_state: dict[str, Any] = field(default_factory=dict)

    def has_callbacks(self, event_name: str) -> bool:
        return event_name == "on_checkpoint_save"

    def fire(self, event_name: str, context: CallbackContext) -> None:
        self.called.append((event_name, context.state.train_state.step))


@dataclass
class CallbackContext:
    state: GlobalState
    model: list[Any]
    user_state: dict[str, Any]
    optimizer: Any = None


def create_checkpoint_manager(config: CheckpointConfig) -> Any:
    assert config.custom_manager_class is not None
    module, _, name = config.custom_manager_class.rpartition(".")
    manager = getattr(importlib.import_module(module), name)(config)
    if not isinstance(manager, CheckpointManager):
        raise TypeError("does not implement the CheckpointManager protocol")
    inspect.signature(manager.save).bind(None, None)
    return manager


def checkpoint_exists(place: str | None) -> bool:
    """Bridge calls `load` only where one of its own files is."""
    markers = ("run_config.yaml", "train_state.pt", "metadata.json", ".metadata", "latest_train_state.pt")
    names = (*markers, "latest_checkpointed_iteration.txt")
    return place is not None and any(os.path.isfile(os.path.join(place, name)) for name in names)


class OptimizerParamScheduler:
    """Counts samples and sets the learning rate by them, as Megatron's does."""

    def __init__(self, optimizer: torch.optim.Optimizer, lr: float) -> None:
        self.optimizer, self.max_lr, self.num_steps = optimizer, lr, 0

    def step(self, increment: int) -> None:
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.max_lr / (1 + self.num_steps / 100)

    def state_dict(self) -> dict[str, Any]:
        return {"max_lr": self.max_lr, "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = 0
        self.step(increment=state["num_steps"])


class Net(nn.Module):
    """Draws numbers at every step, so that the random state counts, and has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(self.norm(self.up(x)).relu()))


@dataclass
class Setup:
    """What Bridge's setup makes, in its order: manager, model, optimizer, load."""

    state: GlobalState
    model: list[Any]
    optimizer: Any
    scheduler: Any
    manager: Any
    loaded: tuple[int, int] | None
    callbacks: CallbackManager = field(default_factory=CallbackManager)

    def load_context(self, **changes: Any) -> CheckpointLoadContext:
        return CheckpointLoadContext(self.state, self.model, self.optimizer, self.scheduler, **changes)

    def save_context(self, **changes: Any) -> CheckpointSaveContext:
        operations = self.state.train_state.floating_point_operations_so_far
        return CheckpointSaveContext(self.state, self.model, self.optimizer, self.scheduler, operations, **changes)

    def weights(self) -> dict[str, torch.Tensor]:
        model = getattr(self.model[0], "module", self.model[0])
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def build(cfg: ConfigContainer, *, seed: int = 0, chunks: int = 1) -> Setup:
    manager = create_checkpoint_manager(cfg.checkpoint)
    state = GlobalState(cfg)
    torch.manual_seed(seed)
    models: list[Any] = [Net() for _ in range(chunks)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        models = [DistributedDataParallel(model) for model in models]
        torch.manual_seed(seed + dist.get_rank())
    optimizer = torch.optim.AdamW([one for model in models for one in model.parameters()], lr=cfg.optimizer.lr)
    scheduler = OptimizerParamScheduler(optimizer, cfg.optimizer.lr)
    return Setup(state, models, optimizer, scheduler, manager, None)


def setup(cfg: ConfigContainer, *, seed: int = 0) -> Setup:
    made = build(cfg, seed=seed)
    config = cfg.checkpoint
    if checkpoint_exists(config.load) or checkpoint_exists(config.pretrained_checkpoint):
        made.loaded = made.manager.load(made.load_context(skip_load_to_model_and_opt=cfg.dist.use_torch_fsdp2))
    return made


def batch_of(consumed: int) -> torch.Tensor:
    """The data of a number of samples, as an indexed dataset gives it: no iterator has a state."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(consumed * 10 + rank))


def train_step(made: Setup) -> float:
    train_state = made.state.train_state
    loss: torch.Tensor = made.model[0](batch_of(train_state.consumed_train_samples)).pow(2).mean()
    loss.backward()
    made.optimizer.step()
    made.optimizer.zero_grad()
    made.scheduler.step(increment=BATCH)
    train_state.step += 1
    train_state.consumed_train_samples += BATCH
    train_state.floating_point_operations_so_far += 10**18
    return loss.item()


def train(made: Setup, *, kill_at: int | None = None) -> dict[int, float]:
    """The loop: a poll at the top of every iteration, saves by interval and at the end, several finalizations."""
    state, config, losses = made.state, made.state.cfg.checkpoint, {}
    should_exit = False
    while state.train_state.step < state.cfg.train_iters:
        made.manager.finalize_async_saves(state=state, blocking=False)
        loss = train_step(made)
        losses[state.train_state.step] = loss
        should_exit = checkpoint_and_decide_exit(made)
        if state.train_state.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if should_exit:
            break
    step = state.train_state.step
    is_off_interval = config.save_interval is None or (config.save_interval != 0 and step % config.save_interval)
    if not should_exit and config.save and step and is_off_interval:
        made.manager.save(made.save_context(), made.callbacks)
    made.manager.finalize_async_saves(state=state, blocking=True, terminate=True)
    if should_exit:
        made.manager.finalize_async_saves(state=state, blocking=True, terminate=True)
    made.manager.finalize_async_saves(state=state, blocking=True, terminate=True)
    return losses


def checkpoint_and_decide_exit(made: Setup) -> bool:
    state, config, saved = made.state, made.state.cfg.checkpoint, False
    step = state.train_state.step
    if config.save and config.save_interval and step % config.save_interval == 0:
        made.manager.save(made.save_context(), made.callbacks)
        saved = True
    elif config.save and config.non_persistent_save_interval and step % config.non_persistent_save_interval == 0:
        made.manager.save(made.save_context(non_persistent_ckpt=True), made.callbacks)
        saved = True
    if state.cfg.exit_interval and step % state.cfg.exit_interval == 0:
        if config.save and not saved:
            made.manager.save(made.save_context(), made.callbacks)
        return True
    return False


def pretrain(cfg: ConfigContainer, *, seed: int = 0, kill_at: int | None = None) -> tuple[Setup, dict[int, float]]:
    made = setup(cfg, seed=seed)
    return made, train(made, kill_at=kill_at)


def config(
    place: Path | str | None, *, train_iters: int = 8, exit_interval: int | None = None, **checkpoint: Any
) -> Any:
    """The config of a training that saves to a folder, every two iterations, and loads from it."""
    named = {} if place is None else {"save": str(place), "load": str(place)}
    return ConfigContainer(
        checkpoint=CheckpointConfig(**{"save_interval": 2, **named, **checkpoint}),
        train_iters=train_iters,
        exit_interval=exit_interval,
    )
