"""Train what a recipe names, and evaluate it in pieces that survive a crash.

    python examples/recipe/run.py examples/recipe/spirals.yaml
    python examples/recipe/run.py examples/recipe/transfer.yaml

A recipe is a YAML file (`pip install pyyaml`). It names its model, optimizer, scheduler, data and metrics; `parts.py`
has them, `registry.py` finds them. What this example shows:

- The components come from a registry, and the manager takes whatever it built: another optimizer is another line in the
  recipe. A checkpoint that does not fit is refused, with the names that differ.
- An evaluation is a component. While it goes on, only that component is saved, again and again, under the same step:
  `save(step, resave=True, components=("evaluation",))`. After a crash in its middle it goes on with the next batch.
- A recipe may start from a checkpoint of another one; what is renamed, left out or missing stands in the recipe, as a
  `holdfast.LoadStrategy`, and what came of it is reported.
- The results of an evaluation are metrics of its checkpoint: the best one is kept, and `best:accuracy` names it.

Run the same line again after a crash, a kill or a reboot.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import parts
import torch
import yaml
from registry import build
from torch import Tensor, nn

import holdfast

EVALUATION = "evaluation"
NEEDED = {"model", "optimizer", "scheduler", "data", "metrics", "training", "checkpoint"}
TRAINING = {"steps", "evaluate_every", "save_evaluation_every"}


class Evaluation:
    """An evaluation that is under way, or none. Its state is the position in the data and the metrics so far."""

    def __init__(self, metrics: Mapping[str, parts.Mean]) -> None:
        self.metrics = dict(metrics)
        self.step: int | None = None  # the step that is evaluated
        self.done = 0  # batches

    def begin(self, step: int) -> None:
        self.step, self.done = step, 0
        for metric in self.metrics.values():
            metric.reset()

    def update(self, logits: Tensor, labels: Tensor) -> None:
        for metric in self.metrics.values():
            metric.update(logits, labels)
        self.done += 1

    def end(self) -> dict[str, float]:
        """Return the results; from here on no evaluation is under way."""
        self.step = None
        return {name: metric.result() for name, metric in self.metrics.items()}

    def state_dict(self) -> dict[str, Any]:
        metrics = {name: metric.state_dict() for name, metric in self.metrics.items()}
        return {"step": self.step, "done": self.done, "metrics": metrics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state["metrics"]) != set(self.metrics):
            stored, named = sorted(state["metrics"]), sorted(self.metrics)
            raise ValueError(f"the checkpoint has an evaluation of {stored}, and the recipe names {named}")
        self.step, self.done = state["step"], state["done"]
        for name, metric in self.metrics.items():
            metric.load_state_dict(state["metrics"][name])


class Training:
    """One start of a recipe."""

    def __init__(self, recipe: dict[str, Any]) -> None:
        self.recipe = recipe
        self.options = recipe["training"]
        torch.manual_seed(0)
        self.model = build("model", recipe["model"])
        self.optimizer = build("optimizer", recipe["optimizer"], self.model)
        self.scheduler = build("scheduler", recipe["scheduler"], self.optimizer, self.options["steps"])
        self.data = build("data", recipe["data"])
        self.evaluation = Evaluation({name: build("metric", {"name": name}) for name in recipe["metrics"]})

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.data.loader,
            EVALUATION: self.evaluation,
        }

    def run(self) -> None:
        settings = holdfast.CheckpointConfig.from_dict(self.recipe["checkpoint"])
        built = holdfast.create_checkpoint_manager(settings, state=self.state, config_to_store=self.recipe)
        with built.manager as self.manager:
            start = self.restore()
            if self.evaluation.step is not None:
                self.evaluate()  # the rest of it
            self.train(start.next_step)

    def restore(self) -> holdfast.RestoreResult:
        """Resume this run or, if it has no checkpoint, start from what the recipe names under `load`."""
        load = self.recipe.get("load")
        if load is None or self.manager.should_load():
            start = self.manager.restore()
            report(resumed_from=start.step, evaluated=self.evaluation.done)
        else:
            start = self.manager.restore(load["source"], strategy=holdfast.LoadStrategy.from_dict(load["strategy"]))
            report(loaded=list(start.restored), renamed=len(start.renamed), missing=list(start.missing))
        return start

    def train(self, first: int) -> None:
        batches = self.data.batches()
        last, every = self.options["steps"] - 1, self.options["evaluate_every"]
        for step in range(first, last + 1):
            points, labels = next(batches)
            loss = nn.functional.cross_entropy(self.model(points), labels)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            report(step=step, loss=loss.item())
            if step == last or (step > 0 and step % every == 0):
                self.evaluation.begin(step)
                # The whole state, with an evaluation that has begun: a crash from here on repeats no step.
                self.manager.save(step, progress={"samples": (step + 1) * len(points)})
                self.evaluate()

    def evaluate(self) -> None:
        """Evaluate from where the evaluation is. Nothing else of the state changes, the random numbers included: only
        under this condition may the saves leave the rest as it is."""
        step = self.evaluation.step
        self.model.eval()
        for points, labels in self.data.evaluation_batches[self.evaluation.done :]:
            with torch.no_grad():
                self.evaluation.update(self.model(points), labels)
            if self.evaluation.done % self.options["save_evaluation_every"] == 0:
                self.manager.save(step, resave=True, components=(EVALUATION,))
            report(evaluating=step, batches=self.evaluation.done)
        self.model.train()
        results = self.evaluation.end()
        self.manager.save(step, resave=True, components=(EVALUATION,), metrics=results)
        report(evaluated=step, **results)


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the recipe of a file. An unknown key is an error: `laod` must not mean a training from scratch."""
    recipe = yaml.safe_load(path.read_text())
    for place, entry, wanted, optional in (
        ("the recipe", recipe, NEEDED, {"load"}),
        ("training", recipe.get("training", {}), TRAINING, set()),
        ("load", recipe.get("load", {"source": None, "strategy": None}), {"source", "strategy"}, set()),
    ):
        if unknown := set(entry) - wanted - optional:
            raise SystemExit(
                f"{path}: {place} has no key '{min(unknown)}'; it has {', '.join(sorted(wanted | optional))}"
            )
        if missing := wanted - set(entry):
            raise SystemExit(f"{path}: {place} needs '{min(missing)}'")
    return recipe


def report(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    recipe = read_recipe(parser.parse_args().recipe)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    Training(recipe).run()


if __name__ == "__main__":
    main()
