"""The checkpoint manager: the one class most users build. Live objects enter; committed checkpoints and restored runs
leave. All it does itself is to check arguments and keep the line of checkpoints; the chains do the rest."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal, Self, TypeVar, get_args

from holdfast.catalog import Catalog, Checkpoint
from holdfast.components import RNGState
from holdfast.errors import CheckpointNotFoundError, ClosedError, UsageError
from holdfast.handle import SaveHandle
from holdfast.leading import SaveRequest
from holdfast.loading import Loaded, LoadRequest, Verify, load
from holdfast.naming import kind_of
from holdfast.ranks import on_leader, torch_ranks
from holdfast.records.codec import encode
from holdfast.records.events import Event
from holdfast.records.layout import check_component_name, check_step
from holdfast.records.selector import Selector, check_tag, parse_selector
from holdfast.records.strategy import LoadStrategy
from holdfast.requests import (
    agree_on,
    agree_on_run,
    check_callable,
    check_limit,
    check_timeout,
    encoded,
    encoded_metrics,
    one_of,
)
from holdfast.saving import Saver
from holdfast.stages.resolve import Location, locate
from holdfast.staging import ChosenMode
from holdfast.storage.base import Storage
from holdfast.storage.registry import open_storage
from holdfast.survivors import wait_for_survivors

logger = logging.getLogger("holdfast")

_DEFAULT_TIMEOUT_SECONDS = 600.0
_RNG = "rng"

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """What a restore did. `resumed` is False for a fresh run, whose `next_step` is 0.

    `restored` are the components that took state, `missing` what the checkpoint did not have, `skipped` what was left
    as it is, each with the reason, and `passed_over` the folders that were no sound checkpoint, each with the reason.
    """

    resumed: bool
    step: int | None = None
    next_step: int = 0
    progress: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    metrics: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    config: Any = None
    checkpoint: Checkpoint | None = None
    restored: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()


class CheckpointManager:
    """Saves and restores the state of a training run.

    run: the folder or URL that holds the run's checkpoints.
    state: the components by name: models, optimizers, schedulers, loaders, anything with `state_dict` and
        `load_state_dict`. `PerRank`, `Shared` and `Trainable` say more about one.
    mode: when `save` returns. "sync": when the checkpoint is committed. "async": when the state is copied to memory of
        its own, from which a writer process saves it. "async_pinned": at once, while a GPU's copies are under way; the
        next step of the optimizers in `state` waits for them on the device. "async_device": the same from a clone on
        the GPU, where its memory allows. "auto" takes the best asynchronous one for the devices that hold the state.
    rng: keep the random state of every rank, as the component "rng".
    config: the run's configuration, stored with every checkpoint. assets: files and folders stored with it.
    resume: "auto" starts fresh when there is nothing to restore, "required" makes that an error, "never" always starts
        fresh.
    process_group: the ranks that save together, all by default. pipeline_stage: this rank's stage, when the stages'
        names collide.
    storage: the door to the bytes, when it is not the run's own path or URL.
    verify: "full" checks every byte that is restored, "quick" sizes and the manifest, "off" the manifest alone.
    timeout: seconds to wait for the other ranks, or for a disk that stands still, before a call fails on all ranks.
    staging_limit_bytes: the memory that copies of a rank's state may take. A save that needs more is written in pieces
        before `save` returns.
    on_event: a function that gets an `Event` when a save or a restore started, was staged, written, committed, failed,
        was restored. It is called in the thread where that happens, and what it raises is logged.

    Every method that saves or restores is called on all ranks, in the same order. All of them return the same or raise
    the same.
    """

    def __init__(
        self,
        run: Location,
        state: Mapping[str, Any],
        *,
        mode: ChosenMode = "auto",
        rng: bool = True,
        config: Any = None,
        assets: Sequence[str | os.PathLike[str]] = (),
        resume: Literal["auto", "required", "never"] = "auto",
        process_group: Any = None,
        pipeline_stage: int | None = None,
        storage: Storage | None = None,
        verify: Verify = "full",
        timeout: float = _DEFAULT_TIMEOUT_SECONDS,
        staging_limit_bytes: int | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        check_timeout(timeout)
        self._ranks = torch_ranks(process_group, timeout_seconds=timeout)
        self._timeout_seconds = timeout
        self._resume = resume
        self._pipeline_stage = pipeline_stage
        self._verify: Verify = verify
        self._source: tuple[Catalog, Checkpoint] | None = None
        self._strategy = LoadStrategy()
        self._closed = False

        def introduce() -> tuple[str, str, list[str]]:
            one_of("mode", mode, get_args(ChosenMode))
            one_of("resume", resume, ("auto", "required", "never"))
            one_of("verify", verify, ("full", "quick", "off"))
            _check_stage(pipeline_stage)
            check_limit(staging_limit_bytes)
            check_callable("on_event", on_event)
            self._components = _checked_components(state, rng)
            self._config = encode(config, path="config", on_tensor=None)
            self._assets = _checked_assets(assets) if self._ranks.rank == 0 else ()
            self._catalog = Catalog(storage if storage is not None else open_storage(run))
            return self._catalog.storage.url, mode, sorted(self._components)

        # Construction agrees once, so that what is wrong on one rank is known to all here and not at the first save.
        self._ranks.decide("open", introduce, agree_on_run, sends=tuple[str, str, list[str]], returns=None)
        self._saver = Saver(
            self._catalog,
            self._ranks,
            mode=mode,
            staging_limit_bytes=staging_limit_bytes,
            timeout_seconds=timeout,
            on_event=on_event,
        )

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, Any] | None = None,
        progress: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        guards: Mapping[str, Any] | None = None,
        tag: str | None = None,
        wait: bool = False,
    ) -> SaveHandle:
        """Save the state after `step` was done. A step that this line of the run has committed is not written again.

        One save is under way at a time: this waits for the one before it. If that failed, and nobody has heard of it,
        its error is raised here and nothing is saved; the next save works. `wait` returns only when the checkpoint is
        committed, which in sync mode is always so.
        """
        self._check_open()

        def request() -> SaveRequest:
            return SaveRequest(
                step=check_step(step),
                components=self._components,
                pipeline_stage=self._pipeline_stage,
                metrics=encoded_metrics(metrics),
                progress=encoded("progress", progress),
                extra=encoded("extra", extra),
                config=self._config,
                guards=encoded("guards", guards),
                tags=() if tag is None else (check_tag(tag),),
                assets=self._assets,
            )

        pending = self._saver.save(step, request)
        if pending.skipped and (tag or metrics or progress or extra or guards) and self._ranks.rank == 0:
            logger.warning("step %d was committed before; what this save says besides is not kept", step)
        handle = SaveHandle(pending, self._catalog)
        if wait:
            handle.wait()
        return handle

    def restore(
        self,
        selector: str | int | os.PathLike[str] = "latest",
        *,
        strategy: LoadStrategy | None = None,
        guards: Mapping[str, Any] | None = None,
    ) -> RestoreResult:
        """Restore the run, or start fresh where there is nothing and nothing was asked for by name.

        `selector` is a selector of this run, or the path of another run or checkpoint, as `RUN`, `RUN@SELECTOR`, a
        folder, a manifest or a link.
        """
        self._check_open()
        self._saver.drain()
        started = time.monotonic()
        strategy = strategy if strategy is not None else LoadStrategy()
        wanted = self._on_all("restore", lambda: encoded("guards", guards), same=repr(_checked_strategy(strategy)))
        on_leader(self._ranks, "look for writers", self._wait_for_survivors, returns=None)
        catalog, chosen, explicit = self._locate_together(selector)
        if self._resume == "never" and not explicit:
            return RestoreResult(resumed=False)
        request = LoadRequest(chosen, self._components, strategy, wanted, self._pipeline_stage, self._verify)
        loaded = load(request, catalog, self._ranks)
        if loaded is None:
            if self._resume == "required" or explicit:
                raise CheckpointNotFoundError(
                    "there is no checkpoint to resume from",
                    run=catalog.storage.url,
                    advice="check the path, or use resume='auto' to start fresh",
                )
            return RestoreResult(resumed=False)
        self._source, self._strategy = (catalog, loaded.checkpoint), strategy
        self._tell_restored(loaded.checkpoint, time.monotonic() - started)
        return self._resumed(loaded, strategy, own_run=catalog is self._catalog)

    def attach(self, name: str, component: Any) -> bool:
        """Add a component that did not exist yet. If the restored checkpoint has its state, it gets it now: True."""
        self._check_open()
        kind = self._on_all("attach", lambda: self._check_new(name, component), same=repr(name))
        components = {**self._components, name: component}
        loaded = None
        if self._source is not None and self._strategy.takes(name, kind):
            catalog, checkpoint = self._source
            if any(tree.component == name for tree in checkpoint.manifest.trees):
                strategy = replace(self._strategy, only=(name,), skip=(), exclude=())
                selector = Selector("folder", name=checkpoint.folder)
                request = LoadRequest(
                    selector, components, strategy, pipeline_stage=self._pipeline_stage, verify=self._verify
                )
                loaded = load(request, catalog, self._ranks)
        self._components = components
        return loaded is not None and name in loaded.restored

    def should_load(self) -> bool:
        """Whether `restore()` would find a checkpoint, by the leader's word."""
        self._check_open()
        if self._resume == "never":
            return False
        self._saver.drain()
        return on_leader(self._ranks, "should_load", self._look, returns=bool)

    def _look(self) -> bool:
        self._wait_for_survivors()
        return self._catalog.holds_something()

    def _wait_for_survivors(self) -> None:
        # Half of the time that the others wait for the leader's word.
        wait_for_survivors(self._catalog, self._timeout_seconds / 2)

    def checkpoints(self) -> list[Checkpoint]:
        """The run's committed checkpoints, the latest first."""
        return list(self._catalog.scan().checkpoints)

    def peek(self, selector: str | int = "latest") -> Checkpoint | None:
        """A checkpoint without loading it; None when `latest` finds nothing."""
        catalog, chosen, explicit = self._locate(selector)
        if not explicit and not catalog.holds_something():
            return None
        return catalog.find(chosen)

    @property
    def is_pending(self) -> bool:
        """Whether a save is under way."""
        return self._saver.is_pending

    @property
    def events(self) -> tuple[Event, ...]:
        """What happened on this rank, the latest last: the most recent 256 events."""
        return tuple(self._saver.events)

    def poll(self) -> None:
        """Raise what failed, once; never waits. With several ranks one may hear of it some calls before another."""
        self._check_open()
        self._saver.poll()

    def wait(self) -> None:
        """Return when every save is committed; raise what failed, once."""
        self._check_open()
        self._saver.wait()

    def before_update(self) -> None:
        """Call it before changing weights in any other way than by the `step` of an optimizer in the state, such as in
        place: the device then waits for the copies of a save that still read them. Costs nothing when none do."""
        self._saver.before_update()

    def close(self) -> None:
        """Finish what is pending, end the writer process and give its memory back; raise what failed, once.
        Idempotent."""
        if not self._closed:
            self._closed = True
            self._saver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._closed:
            self._closed = True
            self._saver.close_after(error)

    def __repr__(self) -> str:
        names = ", ".join(self._components)
        return f"CheckpointManager({self._catalog.storage.url!r}, [{names}], {self._ranks!r})"

    def _locate(self, selector: str | int | os.PathLike[str]) -> tuple[Catalog, Selector, bool]:
        """Which checkpoint of which run; `explicit` when anything but this run's latest was asked for."""
        if _is_path(selector):
            catalog, chosen = locate(selector)  # type: ignore[arg-type]
            same_run = catalog.storage.url == self._catalog.storage.url
            return self._catalog if same_run else catalog, chosen, True
        _, chosen = locate(self._catalog.storage, selector)  # type: ignore[arg-type]
        return self._catalog, chosen, chosen.kind != "latest"

    def _locate_together(self, selector: str | int | os.PathLike[str]) -> tuple[Catalog, Selector, bool]:
        """The same by the leader's word: what a path is depends on the files that a rank sees."""
        if not _is_path(selector):
            return self._on_all("selector of restore", lambda: self._locate(selector))

        def locate_on_leader() -> tuple[str, str]:
            catalog, chosen, _ = self._locate(selector)
            return "" if catalog is self._catalog else catalog.storage.url, str(chosen)

        url, chosen = on_leader(self._ranks, "path of restore", locate_on_leader, returns=tuple[str, str])
        return Catalog(open_storage(url)) if url else self._catalog, parse_selector(chosen), True

    def _on_all(self, label: str, work: Callable[[], Value], *, same: str = "") -> Value:
        """Each rank does its own, and an error on one is the error of all; so is a `same` that is not the same."""
        done: list[Value] = []

        def mine() -> str:
            done.append(work())
            return same

        self._ranks.decide(label, mine, partial(agree_on, label), sends=str, returns=None)
        return done[0]

    def _check_new(self, name: str, component: Any) -> str:
        check_component_name(name)
        if name in self._components:
            raise UsageError(f"there is a component '{name}' already")
        return kind_of(name, component)

    def _tell_restored(self, checkpoint: Checkpoint, seconds: float) -> None:
        self._saver.tell(
            Event(
                "restored",
                checkpoint.step,
                self._ranks.rank,
                seconds,
                size_bytes=checkpoint.size_bytes,
                path=checkpoint.path,
            )
        )

    def _resumed(self, loaded: Loaded, strategy: LoadStrategy, *, own_run: bool) -> RestoreResult:
        checkpoint = loaded.checkpoint
        passed_over = tuple(str(skipped) for skipped in loaded.passed_over)
        parts: dict[str, Any] = {
            "checkpoint": checkpoint,
            "restored": loaded.restored,
            "missing": loaded.missing,
            "skipped": loaded.skipped,
            "passed_over": passed_over,
            "config": checkpoint.config,
        }
        if not strategy.progress:
            return RestoreResult(resumed=False, **parts)
        if own_run:
            self._saver.head = checkpoint.digest
        if self._ranks.rank == 0:
            logger.info("resumed from step %d (%s)", checkpoint.step, checkpoint.path)
        return RestoreResult(
            resumed=True,
            step=checkpoint.step,
            next_step=checkpoint.step + 1,
            progress=checkpoint.progress,
            metrics=checkpoint.metrics,
            extra=checkpoint.extra,
            **parts,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the manager was closed", run=self._catalog.storage.url, advice="build a new one")


def _checked_strategy(strategy: object) -> LoadStrategy:
    if not isinstance(strategy, LoadStrategy):
        raise UsageError(f"strategy={strategy!r:.100}", advice="give a holdfast.LoadStrategy")
    return strategy


def _check_stage(stage: object) -> None:
    if stage is not None and (isinstance(stage, bool) or not isinstance(stage, int) or stage < 0):
        raise UsageError(f"pipeline_stage={stage!r}", advice="give the stage's number, from 0 on")


def _checked_components(state: Mapping[str, Any], rng: bool) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise UsageError(f"state is a mapping of components by name, not a {type(state).__name__}")
    if not state:
        raise UsageError("state is empty", advice="pass at least the model: {'model': model}")
    components = {check_component_name(name): component for name, component in state.items()}
    if rng and not any(isinstance(component, RNGState) for component in components.values()):
        if _RNG in components:
            raise UsageError(f"'{_RNG}' is taken by the random state", advice="rename the component, or pass rng=False")
        components[_RNG] = RNGState()
    for name, component in components.items():
        kind_of(name, component)
    return components


def _checked_assets(assets: Sequence[str | os.PathLike[str]]) -> tuple[Path, ...]:
    if isinstance(assets, str | os.PathLike):
        raise UsageError("assets takes a list of paths")
    paths = tuple(Path(asset).resolve() for asset in assets)
    for path in paths:
        if not path.exists():
            raise UsageError(f"the asset {path} is not there")
    if len({path.name for path in paths}) != len(paths):
        raise UsageError("two assets have the same name")
    return paths


def _is_path(selector: str | int | os.PathLike[str]) -> bool:
    if not isinstance(selector, str):
        return isinstance(selector, os.PathLike)
    return "@" in selector or ("/" in selector and not selector.startswith("best:"))
