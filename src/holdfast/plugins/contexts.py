"""The arguments of a checkpoint manager's methods: one value per call, checked when it is made, never changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from holdfast.errors import UsageError
from holdfast.loading.strategy import OPTIMIZERS, LoadStrategy
from holdfast.manager.arguments import check_metrics, checked_part
from holdfast.manager.assets import named_assets
from holdfast.manager.saves import SaveArguments
from holdfast.ondisk.paths import check_component_name, check_step
from holdfast.runs.selector import check_tag, parse_selector

__all__ = ["LoadContext", "Purpose", "SaveContext"]

Purpose = Literal["resume", "warm_start", "adapter", "inference"]


@dataclass(frozen=True, kw_only=True)
class SaveContext(SaveArguments):
    """A step that was done.

    state: the components by name; None stands for those that the manager was built with.
    epoch: for policies that count epochs. What should come back with a resume belongs into `progress`.
    metrics, progress, extra, guards, tag, assets, resave, components, wait: as for `CheckpointManager.save`.
    """

    step: int
    state: Mapping[str, Any] | None = None
    wait: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", check_step(self.step))
        _check_state(self.state)
        check_metrics(self.metrics)
        for name in ("progress", "extra", "guards"):
            _check_values(name, getattr(self, name))
        epoch = self.epoch
        if epoch is not None and (isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0):
            raise UsageError(f"epoch={epoch!r:.100}", advice="give the epoch's number, from 0 on")
        if self.tag is not None:
            check_tag(self.tag)
        named_assets(self.assets)
        for name in ("resave", "wait"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name}={getattr(self, name)!r:.100}", advice="use True or False")
        if self.components is not None:
            checked_part(self.components, resave=self.resave)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `CheckpointManager.save` by name, without the step and `wait`."""
        return {field.name: getattr(self, field.name) for field in fields(SaveArguments)}


@dataclass(frozen=True, kw_only=True)
class LoadContext:
    """What to load, from where, and what for.

    purpose: "resume" goes on where the run was. The others start at step 0: "warm_start" with models and optimizers,
        "adapter" with those leaves of the models that both sides have, "inference" with all leaves of the models.
    state: the components by name; None stands for those that the manager was built with.
    selector: which checkpoint: `latest`, `best:val_loss`, `500`, a tag.
    source: another run or the path of a checkpoint; None is the manager's own run.
    strategy: a `LoadStrategy`, within what the purpose allows, or plain data that makes one, such as
        `{"rename": {"old.*": "new.*"}, "cast": True}`. guards: as for `CheckpointManager.restore`.
    """

    purpose: Purpose = "resume"
    state: Mapping[str, Any] | None = None
    selector: str | int = "latest"
    source: str | os.PathLike[str] | None = None
    strategy: LoadStrategy | Mapping[str, Any] | None = None
    guards: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.purpose not in get_args(Purpose):
            raise UsageError(
                f"purpose={self.purpose!r}", advice=f"use one of {', '.join(map(repr, get_args(Purpose)))}"
            )
        _check_state(self.state)
        _check_values("guards", self.guards)
        self._check_source()
        self._check_strategy()

    @property
    def is_explicit(self) -> bool:
        """Return whether anything but the latest of the manager's own run was asked for."""
        return self.source is not None or parse_selector(self.selector).kind != "latest"

    @property
    def where(self) -> str | int | os.PathLike[str]:
        """Source and selector in one, as `CheckpointManager.restore` takes them."""
        if self.source is None:
            return self.selector
        source = os.fspath(self.source)
        if self.selector != "latest":
            return f"{source}@{self.selector}"
        # A text without a slash would be a tag of the manager's own run.
        return source if "/" in source or "@" in source else Path(source)

    @property
    def own_strategy(self) -> LoadStrategy | None:
        """The strategy as a value, whichever form it was given in."""
        if isinstance(self.strategy, Mapping):
            return LoadStrategy.from_dict(self.strategy)
        if not isinstance(self.strategy, LoadStrategy | None):
            raise UsageError(f"strategy={self.strategy!r:.100}", advice="give a holdfast.LoadStrategy, or its fields")
        return self.strategy

    def _check_source(self) -> None:
        try:
            chosen = parse_selector(self.selector)
            if not isinstance(self.selector, str):
                object.__setattr__(self, "selector", chosen.step)
        except UsageError as error:
            raise UsageError(error.problem, advice=f"{error.advice}; another run is named by source=") from None
        if self.source is None:
            return
        if not isinstance(self.source, str | os.PathLike) or not os.fspath(self.source):
            raise UsageError(f"source={self.source!r:.100}", advice="give the path or URL of a run or a checkpoint")
        name = os.fspath(self.source).rpartition("/")[2]
        if "@" in name and self.selector != "latest":
            raise UsageError(
                f"source={os.fspath(self.source)!r} names a checkpoint, and so does selector={self.selector!r}",
                advice="name it in one of them",
            )

    def _check_strategy(self) -> None:
        strategy = self.own_strategy
        if strategy is None:
            return
        object.__setattr__(self, "strategy", strategy)
        if strategy.progress and self.purpose != "resume":
            raise UsageError(
                f"purpose='{self.purpose}' starts at step 0, and the strategy has progress=True",
                advice="use LoadStrategy(progress=False, ...), or purpose='resume'",
            )
        if not strategy.progress and self.purpose == "resume":
            raise UsageError(
                "purpose='resume' continues at the saved step, and the strategy has progress=False",
                advice="use another purpose, such as 'warm_start'",
            )
        if self.purpose in ("adapter", "inference") and OPTIMIZERS in (strategy.only or ()):
            raise UsageError(
                f"purpose='{self.purpose}' takes weights, and the strategy takes optimizers",
                advice="use LoadStrategy.weights_only(...), or purpose='warm_start'",
            )
        # What `skip` names may be in the checkpoint alone, which is known when it is loaded.
        named = [name for name in strategy.named() if name not in strategy.skip]
        unknown = [] if self.state is None else [name for name in named if name not in self.state]
        if unknown:
            raise UsageError(
                f"the strategy names '{unknown[0]}', which is not in the context's state",
                advice="add it there, or leave state= out",
            )


def _check_state(state: object) -> None:
    if state is None:
        return
    if not isinstance(state, Mapping):
        raise UsageError(f"state is a mapping of components by name, not a {type(state).__name__}")
    if not state:
        raise UsageError("state is empty", advice="leave it out for the components that the manager was built with")
    for name in state:
        check_component_name(name)


def _check_values(name: str, values: object) -> None:
    if values is not None and (not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values)):
        raise UsageError(f"{name} is a mapping with texts as keys, not {values!r:.100}")
