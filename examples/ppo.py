"""Train a policy with PPO: two models, two optimizers, and a rollout that an interruption must not waste.

    python examples/ppo.py runs/ppo

The policy writes sequences of tokens and is rewarded for counting upwards; a KL penalty keeps it close to a frozen copy
of the first policy. A rollout is expensive, so several epochs of minibatches are made of each. What this example shows:

- A checkpoint may fall in the middle of an epoch over one rollout. The rollout, the order of its minibatches and the
  position in it are a component, so a resume goes on with the next minibatch, and samples nothing again.
- One checkpoint holds policy, value model, both optimizers and the frozen reference, all of the same update.
- Counters (rollouts, episodes, the adaptive KL coefficient) are `progress`, and come back exactly.
- Each checkpoint has a link whose name carries its reward, such as `ppo--reward=0.54-step=75-episodes=320`.
- In the end the best policy becomes `RUN/policy.nemo`: one file, from which `holdfast.build_model` makes the model.

Run the same line again after a crash, a kill or a reboot: every later update is the one that an undisturbed run makes.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import holdfast

LENGTH = 8  # tokens in an episode
EPISODES_PER_ROLLOUT, EPISODES_PER_MINIBATCH, EPOCHS_PER_ROLLOUT = 32, 8, 2
CLIP, VALUE_CLIP_NORM, KL_TARGET, KL_COEFFICIENT = 0.2, 1.0, 1.0, 0.02
CONFIG: dict[str, Any] = {"target": "ppo.Policy", "policy": {"tokens": 8, "width": 24}}


class Policy(nn.Module):
    """Give the logits of the next token for every place of a batch of sequences."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.body = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, tokens)

    def forward(self, sequences: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(sequences))[0])

    def log_probabilities(self, sequences: Tensor) -> Tensor:
        """Return how probable each token of the sequences is after those in front of it."""
        every = functional.log_softmax(self(sequences[:, :-1]), dim=-1)
        return every.gather(-1, sequences[:, 1:, None]).squeeze(-1)


class ValueModel(nn.Module):
    """Give the expected return at every place of a batch of sequences."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.body = Policy(tokens, width)
        self.head = nn.Linear(tokens, 1)

    def forward(self, sequences: Tensor) -> Tensor:
        return self.head(self.body(sequences)).squeeze(-1)


class Rollout:
    """The experience of one rollout, and how far the updates over it are.

    It is a component of the state because it has `state_dict` and `load_state_dict`.
    """

    def __init__(self) -> None:
        self.experience: dict[str, Tensor] = {}
        self.order = torch.empty(0, EPISODES_PER_MINIBATCH, dtype=torch.int64)
        self.position = 0

    @property
    def is_used_up(self) -> bool:
        return self.position == len(self.order)

    def fill(self, experience: dict[str, Tensor]) -> None:
        """Take new experience, and draw the order of the minibatches of all epochs over it."""
        epochs = [torch.randperm(EPISODES_PER_ROLLOUT) for _ in range(EPOCHS_PER_ROLLOUT)]
        self.experience = experience
        self.order = torch.cat(epochs).view(-1, EPISODES_PER_MINIBATCH)
        self.position = 0

    def next_minibatch(self) -> dict[str, Tensor]:
        chosen = self.order[self.position]
        self.position += 1
        return {name: tensor[chosen] for name, tensor in self.experience.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"experience": self.experience, "order": self.order, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.experience, self.order, self.position = state["experience"], state["order"], state["position"]


def rewards_of(sequences: Tensor, tokens: int) -> Tensor:
    """Return the share of the tokens of each sequence that are one more than the token before."""
    return (sequences[:, 1:] == (sequences[:, :-1] + 1) % tokens).float().mean(1)


@torch.no_grad()
def collect(policy: Policy, reference: Policy, value_model: ValueModel, kl_coefficient: float) -> dict[str, Tensor]:
    """Let the policy write, and judge what it wrote: the experience of one rollout."""
    tokens = policy.head.out_features
    sequences = torch.randint(tokens, (EPISODES_PER_ROLLOUT, 1))  # the prompts
    for _ in range(LENGTH):
        following = torch.distributions.Categorical(logits=policy(sequences)[:, -1]).sample()
        sequences = torch.cat([sequences, following[:, None]], dim=1)
    log_probabilities = policy.log_probabilities(sequences)
    kl = log_probabilities - reference.log_probabilities(sequences)
    rewards = -kl_coefficient * kl
    rewards[:, -1] += rewards_of(sequences, tokens)
    returns = rewards.flip(1).cumsum(1).flip(1)
    advantages = returns - value_model(sequences)[:, :-1]
    return {
        "sequences": sequences,
        "log_probabilities": log_probabilities,
        "returns": returns,
        "advantages": (advantages - advantages.mean()) / (advantages.std() + 1e-6),
        "kl": kl,
    }


def adapted(kl_coefficient: float, kl: float) -> float:
    """Return the KL coefficient for the next rollout: larger where the policy went too far, smaller where it may."""
    if kl > 1.5 * KL_TARGET:
        return kl_coefficient * 1.2
    if kl < KL_TARGET / 1.5:
        return kl_coefficient / 1.2
    return kl_coefficient


def update(
    policy: Policy,
    value_model: ValueModel,
    policy_optimizer: torch.optim.Optimizer,
    value_optimizer: torch.optim.Optimizer,
    minibatch: dict[str, Tensor],
) -> tuple[float, float]:
    """Make one step of both optimizers; return the losses of the policy and of the value model."""
    ratio = (policy.log_probabilities(minibatch["sequences"]) - minibatch["log_probabilities"]).exp()
    gains = ratio * minibatch["advantages"], ratio.clamp(1 - CLIP, 1 + CLIP) * minibatch["advantages"]
    policy_loss = -torch.minimum(*gains).mean()
    policy_loss.backward()
    policy_optimizer.step()
    policy_optimizer.zero_grad()

    value_loss = functional.mse_loss(value_model(minibatch["sequences"])[:, :-1], minibatch["returns"])
    value_loss.backward()
    nn.utils.clip_grad_norm_(value_model.parameters(), VALUE_CLIP_NORM)
    value_optimizer.step()
    value_optimizer.zero_grad()
    return policy_loss.item(), value_loss.item()


def train(run: str, updates: int, every: int) -> bool:
    """Train until `updates` are done; return whether they are, or a signal asked to stop before."""
    torch.manual_seed(0)
    policy, value_model = Policy(**CONFIG["policy"]), ValueModel(**CONFIG["policy"])
    reference = copy.deepcopy(policy).requires_grad_(False)
    policy_optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01)
    value_optimizer = torch.optim.AdamW(value_model.parameters(), lr=0.02)
    rollout = Rollout()

    state = {
        "policy": policy,
        "value_model": value_model,
        "policy_optimizer": policy_optimizer,
        "value_optimizer": value_optimizer,
        "reference": reference,
        "rollout": rollout,
    }
    with holdfast.CheckpointManager(
        run,
        state,
        save=holdfast.Every(steps=every) | holdfast.OnLastStep(updates) | holdfast.OnSignal("SIGTERM"),
        keep=holdfast.KeepLast(2) | holdfast.KeepBest("reward", 2, mode="max"),
        links="{name}--reward={reward:.2f}-step={step}-episodes={episodes}",
        config=CONFIG,
    ) as manager:
        start = manager.restore()
        counters = {"rollouts": 0, "episodes": 0, "kl_coefficient": KL_COEFFICIENT, **start.progress}
        report(resumed_from=start.step, minibatches_left=len(rollout.order) - rollout.position, **counters)
        # One loop over updates, not three nested ones over rollouts, epochs and minibatches: where a resume goes on is
        # then a position in the rollout, and not a place in the code.
        for step in range(start.next_step, updates):
            if rollout.is_used_up:
                rollout.fill(collect(policy, reference, value_model, counters["kl_coefficient"]))
                counters["rollouts"] += 1
                counters["episodes"] += EPISODES_PER_ROLLOUT
                counters["kl_coefficient"] = adapted(counters["kl_coefficient"], rollout.experience["kl"].mean().item())
            minibatch = rollout.next_minibatch()
            losses = update(policy, value_model, policy_optimizer, value_optimizer, minibatch)
            reward = rewards_of(rollout.experience["sequences"], policy.head.out_features).mean().item()
            report(step=step, reward=reward, losses=losses, **counters)
            if manager.step(step, metrics={"reward": reward}, progress=counters):
                return step == updates - 1
    return True


def deploy(run: str) -> None:
    """Write the best policy as an archive, and read it back as a server would: from this one file."""
    archive = Path(run) / "policy.nemo"
    if not archive.exists():  # of a run that was complete before
        holdfast.export(f"{run}@best:reward:max", archive, format="nemo", only="policy")
    policy, _ = holdfast.build_model(archive, lambda config: Policy(**config["policy"]))
    sequences = torch.arange(policy.head.out_features)[:, None]
    with torch.no_grad():
        for _ in range(LENGTH):
            sequences = torch.cat([sequences, policy(sequences)[:, -1:].argmax(-1)], dim=1)
    report(archive=archive.name, greedy_reward=rewards_of(sequences, policy.head.out_features).mean().item())


def report(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="folder of the checkpoints")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--every", type=int, default=5, help="updates from one checkpoint to the next")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    if train(options.run, options.updates, options.every):
        deploy(options.run)


if __name__ == "__main__":
    main()
