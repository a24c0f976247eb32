"""A training under DeepSpeed as a user writes it, and what the tests ask of its engine. Imported by the ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

STEPS = 7


def build(stage: int, *, bf16: bool = False, seed: int = 0) -> Any:
    """Return a new DeepSpeed engine for a small model with dropout, AdamW and a learning rate schedule."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.ops

    # An operator for collectives in shared memory, which would take minutes to compile; without it gloo does them.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    return engine


def step(engine: Any, rank: int) -> Any:
    """Train one step on a batch that the step and the rank give, and return its loss."""
    chance = torch.Generator().manual_seed(100 * engine.global_steps + rank)
    batch = torch.randn(4, 8, generator=chance).to(torch.bfloat16 if engine.bfloat16_enabled() else torch.float32)
    loss = engine(batch).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def train(rank: int, folder: Path, stage: int, bf16: bool, kill_after: int | None) -> dict[str, Any]:
    """Train to the end, saving each second step. Every rank is killed after the given step."""
    import holdfast
    from holdfast.integrations.deepspeed import attach

    # A seed of its own for each start: weights and random numbers must come from the checkpoint.
    engine = build(stage, bf16=bf16, seed=0 if not holdfast.is_restart(folder / "holdfast") else 99)
    torch.manual_seed(7 + rank)
    checkpoints = attach(engine)
    path, client_state = engine.load_checkpoint(str(folder), tag=checkpoints.newest_tag(folder))
    began = engine.global_steps
    assert checkpoints.restore_rng() == (path is not None)
    assert path is None or client_state["note"] == ("step", began)
    losses = {}
    while engine.global_steps < STEPS:
        losses[engine.global_steps] = step(engine, rank)
        if engine.global_steps == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if engine.global_steps % 2 == 0:
            engine.save_checkpoint(str(folder), client_state={"note": ("step", engine.global_steps)})
    engine.save_checkpoint(str(folder / "end"))
    states = {
        file.name: checkpoints.load(str(file)) for file in sorted((folder / "end" / f"global_step{STEPS}").iterdir())
    }
    checkpoints.detach()
    return {"began": began, "losses": losses, "states": plain(states)}


def plain(value: Any) -> Any:
    """Return a tree that `==` compares by type and bit: tensors as their type, form and bytes, objects as their
    fields."""
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return "tensor", str(value.dtype), tuple(value.shape), content
    if isinstance(value, dict):
        return type(value).__name__, [(plain(key), plain(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [plain(one) for one in value]
    if type(value).__module__.startswith("deepspeed.") and hasattr(value, "__dict__") and not isinstance(value, int):
        return type(value).__name__, plain(vars(value))
    return type(value).__name__, repr(value)
