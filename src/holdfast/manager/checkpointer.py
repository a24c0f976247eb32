"""Save plain state dicts without a manager: nested dicts of tensors and values enter, committed checkpoints leave.

The building block under the manager. What PyTorch's `dcp.async_save` takes, this takes, objects with a state of their
own on top included; `dcp.load` with a `HoldfastReader` reads it back under the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, get_args

import msgspec

from holdfast.errors import ClosedError, UsageError
from holdfast.loading.resolve import Location
from holdfast.manager.arguments import (
    Introduction,
    agree_on_run,
    check_limit,
    check_timeout,
    checked_observers,
    encoded,
    encoded_metrics,
    one_of,
    plain_step,
)
from holdfast.manager.results import SaveHandle
from holdfast.ondisk.codec import encode
from holdfast.ondisk.manifest import STATE_DICT_NOTE, UserMetadata
from holdfast.ondisk.paths import check_component_name, check_step
from holdfast.ranks.base import DEFAULT_TIMEOUT_SECONDS
from holdfast.ranks.torch_store import torch_ranks
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.events import EventLog, Observer
from holdfast.runs.selector import check_tag
from holdfast.saving.pipeline import Saver
from holdfast.saving.plan import Replicas
from holdfast.saving.request import SaveRequest
from holdfast.saving.stage import ChosenMode
from holdfast.state.budget import machine_name, note_ranks_here
from holdfast.state.wrappers import United
from holdfast.storage.base import Storage
from holdfast.storage.registry import storage_for

__all__ = ["AsyncCheckpointer"]

_LOOSE = "state"


class AsyncCheckpointer:
    """Saves state dicts, one save at a time, while the training goes on.

    run, mode, process_group, storage, timeout, staging_limit_bytes, on_event: as for `CheckpointManager`. Every rank
    calls the same methods in the same order. DTensors are saved as the one tensor that they are parts of; of plain
    tensors and values that several ranks have, the first one's count, and what only some ranks have is stored, too, as
    in PyTorch's own checkpoints. A name on several meshes is an error, unless `replicas="trust"` declares them
    replicas.

    In the pinned modes it is unknown which optimizer changes a tensor of a plain state dict, so everything is copied in
    the order of the training's own stream, by way of clones where the device has room for them.
    """

    def __init__(
        self,
        run: Location,
        *,
        mode: ChosenMode = "auto",
        process_group: Any = None,
        storage: Storage | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        staging_limit_bytes: int | None = None,
        on_event: Observer | None = None,
        replicas: Replicas = "compare",
    ) -> None:
        check_timeout(timeout)
        ranks = torch_ranks(process_group, timeout_seconds=timeout)
        self._closed = False
        self._ranks = ranks

        def introduce() -> Introduction:
            one_of("mode", mode, get_args(ChosenMode))
            one_of("replicas", replicas, get_args(Replicas))
            check_limit(staging_limit_bytes)
            self._events = EventLog(checked_observers(on_event, ()))
            self._catalog = Catalog(storage_for(run, storage))
            return self._catalog.storage.url, mode, ["state"], replicas, machine_name()

        counts = ranks.decide("open", introduce, agree_on_run, sends=Introduction, returns=tuple[int, ...])
        note_ranks_here(counts[ranks.rank])
        self._saver = Saver(
            self._catalog,
            ranks,
            mode=mode,
            staging_limit_bytes=staging_limit_bytes,
            timeout_seconds=timeout,
            events=self._events,
            replicas=replicas,
        )

    def save(
        self,
        step: int,
        state_dict: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        progress: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        tag: str | None = None,
        resave: bool = False,
        wait: bool = False,
    ) -> SaveHandle:
        """Save a state dict as the checkpoint of `step`. Returns when its tensors may be changed again, as the mode
        says; `wait` returns when the checkpoint is committed. Raises what failed before, once. A step that this
        checkpointer has committed is not written again; with `resave` it is, as a later checkpoint of the same step.

        In place of an object with `state_dict` and `load_state_dict` that is a value of the state dict itself, such as
        a model, what its `state_dict()` gives now is saved, as in PyTorch."""
        self._check_open()
        step = plain_step(step)

        def request() -> SaveRequest:
            components, note = self._components(step, state_dict)
            return SaveRequest(
                step=check_step(step),
                components=components,
                metadata=UserMetadata(
                    metrics=encoded_metrics(metrics),
                    progress=encoded("progress", progress),
                    extra={
                        **encoded("extra", extra),
                        STATE_DICT_NOTE: encode(note, path=STATE_DICT_NOTE, on_tensor=None),
                    },
                    tags=() if tag is None else (check_tag(tag),),
                ),
                resave=resave,
            )

        handle = SaveHandle(self._saver.save(step, request), self._catalog)
        if wait:
            handle.wait()
        return handle

    def continue_from(self, checkpoint: Checkpoint) -> None:
        """Let the next save go back to a checkpoint of this run, from which the caller has taken its state. Call it on
        all ranks. Without it the saves of a checkpointer are a line by themselves, for `KeepLast` among others."""
        self._check_open()
        if not isinstance(checkpoint, Checkpoint) or checkpoint.storage.url != self._catalog.storage.url:
            raise UsageError(
                f"{checkpoint!r:.200} is not a checkpoint of the run {self._catalog.storage.url}",
                advice="give what resolve() returns for this run",
            )
        self._saver.wait()
        self._saver.lineage.continue_from(checkpoint, self._catalog)

    @property
    def is_pending(self) -> bool:
        """Return whether a save is under way."""
        return self._saver.is_pending

    def poll(self) -> None:
        """Raise what failed, once; never wait."""
        self._check_open()
        self._saver.poll()

    def wait(self) -> None:
        """Return when every save is committed; raise what failed, once."""
        self._check_open()
        self._saver.wait()

    def wait_for_staging(self) -> None:
        """Make the device wait for the copies of a save that still read. Call it before changing tensors by other means
        than a step of their optimizer."""
        self._saver.wait_for_staging()

    def close(self) -> None:
        """Finish what is pending and give everything back. Idempotent."""
        if not self._closed:
            self._closed = True
            self._saver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._saver.close_after(error)

    def __repr__(self) -> str:
        return f"AsyncCheckpointer({self._catalog.storage.url!r})"

    def _components(self, step: int, state_dict: Mapping[str, Any]) -> tuple[dict[str, United], dict[str, Any]]:
        """Return the state dict as components, and the note by which a reader finds the keys of PyTorch's flattened
        spelling. Every rank may have other keys: where a key is stored is the same on all of them."""
        plain: dict[str, Any] = {}

        def layout_here() -> _Layout:
            plain.update(_plain_state(state_dict))
            return _layout_of(plain)

        layout = self._ranks.decide(f"keys of step {step}", layout_here, _union, sends=_Layout, returns=_Layout)
        return {name: United(_Plain(state)) for name, state in _laid_out(plain, layout).items()}, layout.note()

    def _check_open(self) -> None:
        self._saver.require_own_process()
        if self._closed:
            raise ClosedError("the checkpointer was closed", run=self._catalog.storage.url, advice="build a new one")


class _Plain:
    """A state dict as a component."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise UsageError("a plain state dict takes no state")


class _Layout(msgspec.Struct, frozen=True, array_like=True):
    """Where the keys of a state dict are stored. A dict is a component; the front of a dotted key is one;
    every other key goes into one more, `loose`, which is "" where no other key is."""

    own: tuple[str, ...]
    flat: tuple[str, ...]
    loose: str

    def note(self) -> dict[str, Any]:
        return {"loose": self.loose or None, "flat": list(self.flat)}


def _plain_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(state_dict, Mapping) or not all(isinstance(key, str) for key in state_dict):
        raise UsageError(f"a state dict is a mapping with texts as keys, not {state_dict!r:.100}")
    if not state_dict:
        raise UsageError("the state dict is empty")
    return {key: value.state_dict() if _is_stateful(value) else value for key, value in state_dict.items()}


def _layout_of(plain: Mapping[str, Any]) -> _Layout:
    own = {key for key, value in plain.items() if _is_component(key) and isinstance(value, Mapping)}
    dotted = {key: front for key in plain.keys() - own if (front := _front_of(key)) is not None}
    loose = _LOOSE if len(own) + len(dotted) < len(plain) else ""
    return _Layout(tuple(sorted(own)), tuple(sorted(set(dotted.values()) - own)), loose)


def _union(layouts: list[_Layout]) -> _Layout:
    own = {name for layout in layouts for name in layout.own}
    flat = {name for layout in layouts for name in layout.flat} - own
    name, number = _LOOSE, 2
    while name in own or name in flat:
        name, number = f"{_LOOSE}_{number}", number + 1
    loose = name if any(layout.loose for layout in layouts) else ""
    return _Layout(tuple(sorted(own)), tuple(sorted(flat)), loose)


def _laid_out(plain: Mapping[str, Any], layout: _Layout) -> dict[str, dict[str, Any]]:
    """Return the states of the components."""
    states = {key: dict(value) for key, value in plain.items() if key in layout.own and isinstance(value, Mapping)}
    for key, value in plain.items():
        if key in states:
            continue
        front = _front_of(key)
        if front is not None:
            states.setdefault(front, {})[key[len(front) + 1 :]] = value
        else:
            states.setdefault(layout.loose, {})[key] = value
    return states


def _front_of(key: str) -> str | None:
    """Return the part of a dotted key before its first dot, where that can name a component."""
    front, _, rest = key.partition(".")
    return front if rest and _is_component(front) else None


def _is_stateful(value: Any) -> bool:
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, type) and all(map(callable, methods))


def _is_component(name: str) -> bool:
    try:
        check_component_name(name)
    except UsageError:
        return False
    return True
