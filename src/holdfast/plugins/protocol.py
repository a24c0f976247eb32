"""Make the checkpoint manager that a config names: a config enters, an object that meets the protocol leaves.

A framework calls the seven methods of `CheckpointManagerProtocol`, each with one context. The config names the class
that implements them. The built-in class is made in the same way as any other, and uses only the public methods of
`CheckpointManager`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from holdfast.errors import CheckpointNotFoundError, StateMismatchError, UsageError
from holdfast.loading.strategy import MODULES, OPTIMIZERS, LoadStrategy
from holdfast.manager.assets import AssetsArgument
from holdfast.manager.functions import resolve
from holdfast.manager.manager import CheckpointManager
from holdfast.manager.results import RestoreResult, SaveHandle
from holdfast.plugins.class_loading import Call, check_class, named_class
from holdfast.plugins.config import CheckpointConfig
from holdfast.plugins.config_values import shown
from holdfast.plugins.contexts import LoadContext, SaveContext
from holdfast.runs.events import Event
from holdfast.state.names import kind_of
from holdfast.state.wrappers import Trainable
from holdfast.storage.base import Storage

__all__ = [
    "CheckpointConfig",
    "CheckpointManagerProtocol",
    "HoldfastManager",
    "LoadContext",
    "SaveContext",
    "SaveHandleProtocol",
    "create_checkpoint_manager",
]


class SaveHandleProtocol(Protocol):
    """The result of a save. `SaveHandle` is one."""

    step: int

    def done(self) -> bool:
        """Return whether the save has ended, committed or failed."""

    def wait(self) -> Any:
        """Wait for the commit and return the checkpoint, or raise the error of the save."""


@runtime_checkable
class CheckpointManagerProtocol(Protocol):
    """The methods that a framework calls, each of them on all ranks, in the same order."""

    @abstractmethod
    def save(self, context: SaveContext, /) -> SaveHandleProtocol:
        """Save the state after the context's step was done. After `terminate` this is a `ClosedError`."""

    @abstractmethod
    def load(self, context: LoadContext, /) -> RestoreResult:
        """Load what the context's purpose needs: a resume, a warm start, an adapter, weights for inference."""

    @abstractmethod
    def should_save(self, context: SaveContext, /) -> bool:
        """Return whether to save at the context's step. Changes nothing."""

    @abstractmethod
    def should_load(self, context: LoadContext, /) -> bool:
        """Return whether `load` has something to load, or to report as missing. Changes nothing."""

    @abstractmethod
    def load_weights(self, context: LoadContext, /) -> RestoreResult:
        """Load models alone, whatever else the purpose would take."""

    @abstractmethod
    def read_config(self, context: LoadContext, /) -> Any:
        """Return the configuration that is stored with the selected checkpoint. Loads nothing."""

    @abstractmethod
    def finalize_async_saves(self, *, blocking: bool = True, terminate: bool = False) -> None:
        """Note what was committed and raise what failed, once: without waiting, or when nothing is under way any more.
        `terminate` waits too, and then closes. May be called any number of times, also after that."""


class HoldfastManager:
    """The built-in manager behind the protocol: `CheckpointManager`, built from a config.

    state, process_group, pipeline_stage, storage, on_event, assets: as for `CheckpointManager`.
    config_to_store: the run's own configuration, which `read_config` gives back.

    `manager` is the `CheckpointManager` itself, for what the protocol does not have.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        state: Mapping[str, Any],
        process_group: Any = None,
        pipeline_stage: int | None = None,
        storage: Storage | None = None,
        on_event: Callable[[Event], None] | None = None,
        config_to_store: Any = None,
        assets: AssetsArgument = (),
    ) -> None:
        run = config.run if config.run is not None else storage
        if run is None:
            raise UsageError("the checkpoint config has no 'run'", advice="give the run's folder or URL, or storage=")
        self.config = config
        self._run = run
        self._shared: dict[str, Any] = {
            "process_group": process_group,
            "pipeline_stage": pipeline_stage,
            "storage": storage,
            "resume": config.resume,
            "verify": config.verify,
            "timeout": config.timeout,
            "on_event": on_event,
        }
        self.manager = CheckpointManager(
            self._run,
            state,
            save=config.save,
            keep=config.keep,
            mode=config.mode,
            rng=config.rng,
            links=config.links,
            config=config_to_store,
            assets=assets,
            staging_limit_bytes=config.staging_limit_bytes,
            replicas=config.replicas,
            **self._shared,
        )
        self._state = dict(state)
        self._terminated = False

    def save(self, context: SaveContext) -> SaveHandle:
        """Save the manager's components. The context's `state`, when there is one, must be them."""
        self._check_own(context.state)
        return self.manager.save(context.step, wait=context.wait, **context.arguments)

    def should_save(self, context: SaveContext) -> bool:
        """Return whether the config's `save` asks for a save at this step."""
        return self.manager.should_save(context.step, epoch=context.epoch, metrics=context.metrics)

    @property
    def should_stop(self) -> bool:
        """Return whether a signal or a time limit asks to stop, as of the last `should_save`. Not in the protocol."""
        return self.manager.should_stop

    def load(self, context: LoadContext) -> RestoreResult:
        """Load by the context's purpose. Only a resume may find nothing, and is a fresh start then."""
        kinds = (MODULES, OPTIMIZERS) if context.purpose == "warm_start" else (MODULES,)
        return self._load(context, kinds)

    def should_load(self, context: LoadContext) -> bool:
        """Return whether a resume would find a checkpoint. True for everything that is asked for by name or for another
        purpose: if it is missing, `load` raises, where a False would start from scratch silently."""
        if context.is_explicit or context.purpose != "resume":
            return True
        return self.manager.should_load()

    def load_weights(self, context: LoadContext) -> RestoreResult:
        """Load the models alone. A resume needs more than them, so that purpose is refused."""
        if context.purpose == "resume":
            raise UsageError(
                "load_weights with purpose='resume'",
                advice="load() resumes; for weights use 'warm_start', 'adapter' or 'inference'",
            )
        return self._load(context, (MODULES,))

    def read_config(self, context: LoadContext) -> Any:
        """Return the configuration that is stored with the selected checkpoint."""
        if context.source is not None:
            return resolve(context.source, context.selector).config
        # What is under way may be the latest, which is asked for.
        if not self._terminated:
            self.manager.wait()
        checkpoint = self.manager.peek(context.selector)
        if checkpoint is None:
            raise CheckpointNotFoundError(
                "there is no checkpoint to read a config from",
                run=str(self._run),
                advice="check the path, or name another run with source=",
            )
        return checkpoint.config

    def finalize_async_saves(self, *, blocking: bool = True, terminate: bool = False) -> None:
        """Poll, wait, or close. A closed manager has nothing left to finalise."""
        if self._terminated:
            return
        if terminate:
            self._terminated = True
            self.manager.close()
        elif blocking:
            self.manager.wait()
        else:
            self.manager.poll()

    def attach(self, name: str, component: Any) -> bool:
        """Add a component that did not exist yet, as `CheckpointManager.attach` does."""
        attached = self.manager.attach(name, component)
        self._state[name] = component
        return attached

    def __repr__(self) -> str:
        return f"HoldfastManager({self.manager!r})"

    def _load(self, context: LoadContext, kinds: tuple[str, ...]) -> RestoreResult:
        state = self._state if context.state is None else context.state
        if context.purpose == "resume":
            self._check_known(state)
            return self._restore_own(state, context, context.own_strategy or LoadStrategy())
        strategy = _strategy(context, state, kinds)
        restore = self._restore_own if self._owns(state) else self._restore_others
        result = restore(state, context, strategy)
        _check_something_was_loaded(context, result, run=str(self._run))
        return result

    def _restore_own(self, state: Mapping[str, Any], context: LoadContext, strategy: LoadStrategy) -> RestoreResult:
        left_out = [name for name in self._state if name not in state]
        strategy = replace(strategy, skip=tuple(dict.fromkeys([*strategy.skip, *left_out])))
        return self.manager.restore(context.where, strategy=strategy, guards=context.guards)

    def _restore_others(self, state: Mapping[str, Any], context: LoadContext, strategy: LoadStrategy) -> RestoreResult:
        """Load into objects that are not the training's own, such as a copy of the model for an evaluation."""
        # What is under way may be the latest, which is asked for.
        self.manager.wait()
        with CheckpointManager(self._run, state, mode="sync", rng=False, links=False, **self._shared) as loader:
            return loader.restore(context.where, strategy=strategy, guards=context.guards)

    def _owns(self, state: Mapping[str, Any]) -> bool:
        return all(self._state.get(name) is component for name, component in state.items())

    def _check_known(self, state: Mapping[str, Any] | None) -> None:
        """Refuse components that the manager was not built with: a resume and a save are of its own."""
        for name, component in (state or {}).items():
            if name not in self._state:
                raise UsageError(
                    "the manager was not built with this component",
                    component=name,
                    advice=f"its components are {', '.join(self._state)}",
                )
            if self._state[name] is not component:
                raise UsageError(
                    "this is another object than the one that the manager was built with",
                    component=name,
                    advice="pass the same object, or build a new manager",
                )

    def _check_own(self, state: Mapping[str, Any] | None) -> None:
        self._check_known(state)
        absent = [] if state is None else [name for name in self._state if name not in state]
        if absent:
            raise UsageError(
                f"the context's state lacks {', '.join(absent)}", advice="a save is of all components of the manager"
            )


def create_checkpoint_manager(
    config: CheckpointConfig,
    *,
    state: Mapping[str, Any],
    process_group: Any = None,
    pipeline_stage: int | None = None,
    storage: Storage | None = None,
    on_event: Callable[[Event], None] | None = None,
    config_to_store: Any = None,
    assets: AssetsArgument = (),
    allowed_packages: Sequence[str] | None = None,
) -> CheckpointManagerProtocol:
    """Return the manager that the config names, or the built-in one, as `manager_class(config, state=..., ...)`.

    The config reaches the class as it is. The other arguments are those of `HoldfastManager`, and go to every class.
    allowed_packages: the packages that a config may name a class of; None allows any.

    A name that cannot be one is a ValueError, a module that is not there an ImportError, a class that is not there an
    AttributeError, and a class that does not meet the protocol a TypeError, before any object is made.
    """
    if not isinstance(config, CheckpointConfig):
        raise UsageError(
            f"config is {shown(config)}", advice="give a CheckpointConfig; CheckpointConfig.from_dict makes one"
        )
    arguments = {
        "state": state,
        "process_group": process_group,
        "pipeline_stage": pipeline_stage,
        "storage": storage,
        "on_event": on_event,
        "config_to_store": config_to_store,
        "assets": assets,
    }
    manager_class: Any = HoldfastManager
    if config.manager_class is not None:
        manager_class = named_class(config.manager_class, allowed_packages, config.allowed_packages)
    check_class(manager_class, CALLS, tuple(arguments))
    manager = manager_class(config, **arguments)
    if not isinstance(manager, CheckpointManagerProtocol):
        raise TypeError(f"'{config.manager_class}' made {shown(manager)}, which is no checkpoint manager")
    return manager


# How the protocol's methods are called, besides `self`.
CALLS = {
    "save": Call("context"),
    "load": Call("context"),
    "should_save": Call("context"),
    "should_load": Call("context"),
    "load_weights": Call("context"),
    "read_config": Call("context"),
    "finalize_async_saves": Call(keywords=("blocking", "terminate")),
}


# What to load


def _strategy(context: LoadContext, state: Mapping[str, Any], kinds: tuple[str, ...]) -> LoadStrategy:
    """Return the strategy of the context, or that of its purpose, for components of these kinds."""
    strategy = context.own_strategy
    if strategy is None:
        if context.purpose == "adapter":
            return LoadStrategy(only=kinds, progress=False, strict=_is_all_trainable(state), on_missing="skip")
        return LoadStrategy(only=kinds, progress=False)
    if strategy.only is None:
        return replace(strategy, only=kinds)
    if kinds == (MODULES,):
        _check_weights_alone(strategy.only, state)
    return strategy


def _is_all_trainable(state: Mapping[str, Any]) -> bool:
    """Return whether every model declares which leaves are its adapter's. Otherwise those that both sides have are."""
    models = [component for name, component in state.items() if kind_of(name, component) == "module"]
    return all(isinstance(model, Trainable) for model in models)


def _check_weights_alone(only: Sequence[str], state: Mapping[str, Any]) -> None:
    for name in only:
        if name == OPTIMIZERS or (name in state and kind_of(name, state[name]) != "module"):
            raise UsageError(
                f"weights are asked for, and the strategy takes {name!r}",
                advice="leave it out, or load with purpose='warm_start'",
            )


def _check_something_was_loaded(context: LoadContext, result: RestoreResult, *, run: str) -> None:
    """Raise if no weights were loaded: the caller would train or serve weights that were never loaded. Nothing has
    changed if this raises."""
    if result.checkpoint is None:
        raise CheckpointNotFoundError(
            f"there is no checkpoint to load for purpose='{context.purpose}'",
            run=run,
            advice="name one with selector= or source=; the latest of a run with resume='never' is not loaded",
        )
    names = [tensor.name for tensor in result.checkpoint.manifest.tensors]
    leaves = {name for name in names if _component(name) in result.restored}
    if not result.restored or (leaves and leaves <= set(result.skipped)):
        raise StateMismatchError(
            f"no leaf of the checkpoint has a place for purpose='{context.purpose}'",
            step=result.checkpoint.step,
            unexpected=names,
            advice="compare the names of the components and of their leaves",
        )


def _component(leaf: str) -> str:
    """Return the component in front of a leaf's name, without the pipeline stage that it may belong to."""
    return leaf.partition(".")[0].partition("@")[0]
