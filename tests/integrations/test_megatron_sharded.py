"""The manager for Megatron-Bridge with megatron-core's own models and its distributed optimizer, cut over ranks.

megatron-core's optimizers ask for CUDA in a few places that have nothing to do with checkpoints. A mode of PyTorch's
answers them with the CPU, so that the real classes run here; gradients are made up, because the attention needs more.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

pytest.importorskip("megatron.core", reason="megatron-core is not installed; `make frameworks` has it")

from megatron.core import optimizer as optimizers, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

import holdfast
from holdfast.testing import values
from tests.integrations import bridge
from tests.integrations.test_megatron_bridge import same
from tests.ranks import run_ranks

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


class OnTheCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


class Adam(torch.optim.Optimizer):
    """Counts its steps in the groups, as the fused Adam of Transformer Engine does. PyTorch's own has them in the
    state, and megatron-core loses them there."""

    def __init__(self, params: Any, lr: float, weight_decay: float, betas: Any, eps: float, adam_w_mode: bool) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in (one for one in group["params"] if one.grad is not None):
                state = self.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(parameter))
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                rate = group["lr"] / (1 - first ** group["step"])
                scale = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
                parameter.addcdiv_(state["exp_avg"], scale, value=-rate)


class Training:
    """A GPT with the distributed optimizer, in the hands of the manager that Bridge's config names."""

    def __init__(
        self,
        run: Path,
        tensor_parallel: int,
        *,
        seed: int,
        layers: int = 2,
        **checkpoint: Any,
    ) -> None:
        self.cfg = bridge.config(run, **checkpoint)
        self.cfg.model.tensor_model_parallel_size = tensor_parallel
        self.cfg.optimizer.use_distributed_optimizer = True
        torch.manual_seed(seed)
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=16,
            num_attention_heads=2,
            gated_linear_unit=True,
            use_cpu_initialization=True,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            tensor_model_parallel_size=tensor_parallel,
        )
        self.model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=8)
        self.wrapped = DistributedDataParallel(
            config, DistributedDataParallelConfig(use_distributed_optimizer=True), self.model
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=True),
            [self.wrapped],
            use_gloo_process_groups=False,
        )
        self.scheduler = bridge.OptimizerParamScheduler(self.optimizer, 0.01)
        self.made = bridge.Setup(
            bridge.GlobalState(self.cfg),
            [self.wrapped],
            self.optimizer,
            self.scheduler,
            bridge.create_checkpoint_manager(self.cfg.checkpoint),
            None,
        )
        self.state = self.made.state.train_state

    def train(self, iterations: int, *, save: bool = True) -> Training:
        for _ in range(iterations):
            self.wrapped.zero_grad_buffer()
            for index, parameter in enumerate(self.model.parameters()):
                # Some of it is drawn from the random state, which so counts.
                noise = torch.rand(())
                dist.broadcast(noise, 0)
                draw = torch.Generator().manual_seed(self.state.step * 100 + index)
                parameter.main_grad.copy_(torch.randn(parameter.shape, generator=draw) + noise)
            self.optimizer.step()
            self.scheduler.step(increment=4)
            self.state.step += 1
            self.state.consumed_train_samples += 4
            if save:
                self.made.manager.save(self.made.save_context(), self.made.callbacks)
        return self

    def load(self, **options: Any) -> tuple[int, int]:
        found: tuple[int, int] = self.made.manager.load(self.made.load_context(**options))
        return found

    def contents(self) -> dict[str, Any]:
        inner = [one.optimizer for one in self.optimizer.chained_optimizers]
        groups = [group for one in inner for group in one.param_groups]
        states = [one.state[parameter] for one in inner for group in one.param_groups for parameter in group["params"]]
        return {
            "weights": {name: one.detach().clone() for name, one in self.model.named_parameters()},
            "moments": [{key: torch.as_tensor(one).clone() for key, one in state.items()} for state in states],
            "options": [{key: one for key, one in group.items() if key != "params"} for group in groups],
            "samples": self.scheduler.num_steps,
            "consumed": self.state.consumed_train_samples,
        }


def begin(tensor_parallel: int) -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    OnTheCpu().__enter__()
    optimizers.Adam = distrib_optimizer.Adam = Adam
    optimizers.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    parallel_state.initialize_model_parallel(tensor_parallel)


def first(rank: int, scratch: Path) -> dict[str, Any]:
    """Two ranks, tensor parallel: train, resume and go on; then the same, to be loaded by one rank."""
    begin(2)
    whole = Training(scratch / "near", 2, seed=0).train(2)
    whole.train(2)
    resumed = Training(scratch / "near", 2, seed=9, ckpt_step=2)
    loaded = resumed.load()
    resumed.train(2, save=False)
    wide = Training(scratch / "wide", 2, seed=0, dist_ckpt_optim_fully_reshardable=True, most_recent_k=1).train(3)
    other = Training(scratch / "near", 2, seed=9, layers=3)
    try:
        other.load()
        problem = "none"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    return {
        "loaded": loaded,
        "whole": whole.contents(),
        "resumed": resumed.contents(),
        "wide": wide.contents(),
        "called": whole.made.callbacks.called,
        "problem": problem,
    }


def between(rank: int, scratch: Path) -> dict[str, Any]:
    """One rank, which loads what two saved."""
    begin(1)
    joined = Training(scratch / "wide", 1, seed=5, dist_ckpt_optim_fully_reshardable=True, save=str(scratch / "joined"))
    loaded = joined.load()
    joined.made.manager.save(joined.made.save_context(), None)
    weights = Training(scratch / "near", 1, seed=5, load_optim=False)
    try:
        Training(scratch / "near", 1, seed=5).load()
        problem = "none"
    except holdfast.StateMismatchError as error:
        problem = str(error)
    return {"loaded": loaded, "problem": problem, "weights alone": weights.load()}


def last(rank: int, scratch: Path) -> dict[str, Any]:
    """Two ranks again; then as two data parallel ranks, over which the optimizer alone is cut."""
    begin(2)
    cut = Training(scratch / "joined", 2, seed=6, load_rng=False)
    loaded = cut.load()
    fallen_back = Training(scratch / "near", 2, seed=6).load()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1)
    whole = Training(scratch / "data", 1, seed=0).train(2)
    whole.train(1, save=False)
    resumed = Training(scratch / "data", 1, seed=7)
    resumed.load()
    resumed.train(1, save=False)
    tuned = Training(scratch / "tuned", 1, seed=8, load=None, pretrained_checkpoint=str(scratch / "data"))
    return {
        "cut": cut.contents(),
        "loaded": loaded,
        "fallen back": fallen_back,
        "whole": whole.contents(),
        "resumed": resumed.contents(),
        "tuned": (tuned.load(), tuned.contents()["moments"]),
    }


@dataclass(frozen=True)
class Played:
    scratch: Path
    first: list[dict[str, Any]]
    between: dict[str, Any]
    last: list[dict[str, Any]]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    scratch = tmp_path_factory.mktemp("cut")
    started = values(run_ranks(2, first, scratch))
    [one] = values(run_ranks(1, between, scratch))
    damaged = scratch / "near" / "step-000000004" / "rank-00001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    return Played(scratch, started, one, values(run_ranks(2, last, scratch)))


def test_tensor_parallel_ranks_with_the_distributed_optimizer_resume_bit_equal(played: Played) -> None:
    for found in played.first:
        assert found["loaded"] == (2, 0)
        assert same(found["resumed"], found["whole"])
    assert [one.step for one in holdfast.checkpoints(played.scratch / "near")] == [4, 3, 2, 1]
    assert holdfast.resolve(played.scratch / "near", 3).world_size == 2
    assert (played.scratch / "near" / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert [len(found["called"]) for found in played.first] == [4, 4]


def test_data_parallel_ranks_with_the_distributed_optimizer_resume_bit_equal(played: Played) -> None:
    for found in played.last:
        assert same(found["resumed"], found["whole"])


def test_a_distributed_optimizer_that_is_saved_reshardable_goes_from_two_ranks_to_one_and_back(played: Played) -> None:
    assert played.between["loaded"] == (3, 0)
    for started, ended in zip(played.first, played.last, strict=True):
        assert ended["loaded"] == (3, 0)
        assert same(ended["cut"], started["wide"])
    assert [one.step for one in holdfast.checkpoints(played.scratch / "wide")] == [3]


def test_an_optimizer_that_is_laid_out_for_other_ranks_is_refused_and_the_weights_are_not(played: Played) -> None:
    assert "dist_ckpt_optim_fully_reshardable" in played.between["problem"]
    assert played.between["weights alone"] == (4, 0)


def test_a_model_of_other_layers_is_refused(played: Played) -> None:
    assert all("Error" in found["problem"] or "Exception" in found["problem"] for found in played.first)


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(played: Played) -> None:
    assert [found["fallen back"] for found in played.last] == [(3, 0), (3, 0)]


def test_pretrained_weights_start_at_iteration_0_with_a_new_optimizer(played: Played) -> None:
    for found in played.last:
        loaded, moments = found["tuned"]
        assert loaded == (0, 0)
        assert not any(moments)
