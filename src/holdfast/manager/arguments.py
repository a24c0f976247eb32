"""Check what a caller passes to a manager or a save, and encode it. Arguments enter; checked values leave. Those of a
save are values that a manifest can hold."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from enum import Enum
from functools import partial
from typing import Any, TypeVar, get_args

import numpy
import torch

from holdfast.errors import UsageError
from holdfast.loading.strategy import LoadStrategy, Verify
from holdfast.manager.triggers import Trigger
from holdfast.ondisk.codec import MAX_DEPTH, Json, encode, is_registered
from holdfast.ondisk.manifest import STATE_DICT_NOTE
from holdfast.ondisk.paths import as_integer, check_component_name
from holdfast.ranks.base import Ranks
from holdfast.runs.events import Observer
from holdfast.runs.link_names import LinkTemplate
from holdfast.runs.retention import KeepPolicy
from holdfast.saving.plan import Replicas
from holdfast.saving.stage import ChosenMode
from holdfast.state.names import cuts_of, kind_of, refuse_flat_parameters, refuse_same_objects, unwrap
from holdfast.state.rng import RNGState
from holdfast.state.state_dicts import check_components
from holdfast.state.tensors import inline_text
from holdfast.state.wrappers import Sharded, check_covers

__all__ = [
    "RNG",
    "Introduction",
    "agree_on",
    "agree_on_run",
    "check_epoch",
    "check_limit",
    "check_metrics",
    "check_options",
    "check_policies",
    "check_stage",
    "check_timeout",
    "checked_components",
    "checked_links",
    "checked_observers",
    "checked_part",
    "encoded",
    "encoded_config",
    "encoded_metrics",
    "on_every_rank",
    "one_of",
    "plain_step",
    "refuse_cut_ties",
    "reported_metrics",
    "wanted_guards",
]

RNG = "rng"
"""The component of the random state."""

Value = TypeVar("Value")


def check_timeout(timeout: object) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise UsageError(f"timeout={timeout!r}", advice="give a positive number of seconds")


def check_epoch(epoch: object) -> int | None:
    number = None if epoch is None else as_integer(epoch)
    if epoch is not None and (number is None or number < 0):
        raise UsageError(f"epoch={epoch!r:.40}", advice="give the number of epochs that are done, an int from 0 on")
    return number


def checked_part(components: object, *, resave: bool) -> tuple[str, ...]:
    """Return the names of the components that a save stores anew. Whether they are there is checked on all ranks."""
    if isinstance(components, str) or not isinstance(components, Sequence | Set):
        raise UsageError(
            f"components={components!r:.100}", advice='give the names of components, such as components=("evaluation",)'
        )
    names = tuple(components)
    if not names:
        raise UsageError(
            "components= names no component", advice="name those to store anew, or leave it out to save all of them"
        )
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise UsageError(f"components= has {wrong[0]!r:.100}, which is no name", advice="give the names as texts")
    if resave is not True:
        raise UsageError(
            "components= is given without resave=True",
            advice="a first save of a step has all components; pass resave=True to store some of them anew",
        )
    return tuple(dict.fromkeys(names))


def refuse_cut_ties(names: Sequence[str], components: Mapping[str, Any]) -> None:
    """Refuse to store a model anew without another one that has a parameter or buffer in common with it: they would
    come back with two different values for one tensor."""
    owners: dict[int, tuple[str, str]] = {}
    for component, path, tensor in _tensors_of(names, components):
        owners[id(tensor)] = component, path
    for component, path, tensor in _tensors_of([name for name in components if name not in names], components):
        if id(tensor) in owners:
            named, own_path = owners[id(tensor)]
            raise UsageError(
                f"components= names '{named}', and its '{own_path}' is the same tensor as '{path}' of '{component}'",
                advice=f"name '{component}', too",
            )


def _tensors_of(names: Sequence[str], components: Mapping[str, Any]) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name in names:
        module = unwrap(components.get(name))
        if isinstance(module, torch.nn.Module):
            for path, tensor in (
                *module.named_parameters(remove_duplicate=False),
                *module.named_buffers(remove_duplicate=False),
            ):
                yield name, path, tensor


def plain_step(step: Any) -> Any:
    """Return a step as an int where it is one. What is not is refused later, on all ranks."""
    number = as_integer(step)
    return step if number is None else number


def encoded_config(config: Any) -> Json:
    """Return the stored form of a configuration: of a dataclass, a namespace, any mapping or sequence, or an object
    with `to_dict`, its content; of a member of an enum that is a str or an int, that."""
    return encode(_plain_config(config, 0), path="config", on_tensor=None)


def _plain_config(value: Any, depth: int) -> Any:
    value = _plain_member(value)
    # Deeper than the codec goes: that is where a config that contains itself is refused.
    if depth > MAX_DEPTH + 1 or isinstance(value, str | bytes | torch.Tensor | numpy.ndarray | type):
        return value
    inner = partial(_plain_config, depth=depth + 1)
    if type(value) in (OrderedDict, defaultdict):
        return value
    if isinstance(value, Mapping):
        return {_plain_member(key): inner(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(inner, value))
    if isinstance(value, argparse.Namespace):
        return {key: inner(item) for key, item in vars(value).items()}
    if is_registered(type(value)):
        return value
    if dataclasses.is_dataclass(value):
        return {part.name: inner(getattr(value, part.name)) for part in dataclasses.fields(value)}
    if callable(getattr(value, "to_dict", None)):
        return inner(value.to_dict())
    if isinstance(value, Sequence) and not isinstance(value, tuple | range):
        return [inner(item) for item in value]
    return value


def _plain_member(value: Any) -> Any:
    """Return the str or int that a member of an enum is, and any other value, or a member of a registered enum, as it
    is."""
    if not isinstance(value, Enum) or is_registered(type(value)):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    return int(value) if isinstance(value, int) else value


def check_limit(limit: object) -> None:
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise UsageError(f"staging_limit_bytes={limit!r}", advice="give a number of bytes, or None for no limit")


def checked_observers(on_event: object, observers: object) -> list[Observer]:
    """Return the functions that get events: `on_event`, where it is given, and then the others."""
    if not isinstance(observers, list | tuple):
        raise UsageError(f"observers={observers!r:.100}", advice="give a list of functions that take an event")
    named = [("on_event", on_event)] if on_event is not None else []
    named += [(f"observers[{index}]", observer) for index, observer in enumerate(observers)]
    for name, observer in named:
        if not callable(observer):
            raise UsageError(f"{name}={observer!r:.100}", advice="give a function that takes an event")
    return [observer for _, observer in named]  # type: ignore[misc]


def encoded(name: str, values: Mapping[str, Any] | None) -> dict[str, Json]:
    if values is None:
        return {}
    _check_keys(name, values)
    if name == "extra" and STATE_DICT_NOTE in values:
        raise UsageError(
            f"extra has the key '{STATE_DICT_NOTE}', under which Holdfast notes how a plain state dict was laid out",
            advice="use another key",
        )
    in_place = inline_text if name == "extra" else None
    # Counters are numbers of Python's when they come back, so that `json.dumps` takes them.
    plain = _plain_counter if name == "progress" else lambda value: value
    return {
        key: encode(plain(value), path=f"{name}.{key}", on_tensor=in_place, in_state=False)
        for key, value in values.items()
    }


def _plain_counter(value: Any) -> Any:
    return value.item() if isinstance(value, numpy.bool_ | numpy.integer | numpy.float32 | numpy.float64) else value


def _check_keys(name: str, values: object) -> None:
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise UsageError(f"{name} is a mapping with texts as keys, not {values!r:.100}")
    for key in values:
        try:
            key.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{name} has the key {key!r:.100}, which is no valid Unicode text") from None


def encoded_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Json]:
    check_metrics(metrics)
    return encoded("metrics", {name: _number(value) for name, value in (metrics or {}).items()})


def check_metrics(metrics: object) -> None:
    """Refuse what is no number. A tensor is asked for its type, never for its value, which a GPU may not have yet."""
    if metrics is None:
        return
    if not isinstance(metrics, Mapping):
        raise UsageError(f"metrics is a mapping of numbers by name, not {metrics!r:.100}")
    _check_keys("metrics", metrics)
    for name, value in metrics.items():
        if not _is_number(value):
            raise UsageError(
                f"the metric {name!r} is {_described(value)}, not a number", advice="use extra= for other values"
            )


def _is_number(value: Any) -> bool:
    """Return whether a metric is a number, or a tensor or array of one: a loss is often still a tensor."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and not value.is_meta
    return isinstance(_number(value), int | float)


def _number(value: Any) -> Any:
    one_element = isinstance(value, torch.Tensor | numpy.generic | numpy.ndarray) and math.prod(value.shape) == 1
    return value.item() if one_element else value


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype} on {value.device}"
    return f"{value!r:.100}"


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name}={value!r}", advice=f"use one of {', '.join(map(repr, allowed))}")


def reported_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored form of metrics that are reported after a save. None at all is an error."""
    numbers = encoded_metrics(metrics)
    if not numbers:
        raise UsageError(f"metrics={metrics!r:.100} has no metric", advice="give numbers by name")
    return numbers


def check_policies(save: object, keep: object) -> None:
    """Refuse what is no trigger or no policy."""
    if save is not None and not isinstance(save, Trigger):
        raise UsageError(f"save={save!r:.100}", advice="give a trigger such as Every(steps=500), or several with |")
    if keep is not None and not isinstance(keep, KeepPolicy):
        raise UsageError(f"keep={keep!r:.100}", advice="give a policy such as KeepLast(3), or several with |")


def checked_links(links: object) -> bool | LinkTemplate:
    """Return whether there are links, or the template of those of each checkpoint."""
    if isinstance(links, bool | LinkTemplate):
        return links
    if isinstance(links, str):
        return LinkTemplate(links)
    raise UsageError(f"links={links!r:.100}", advice="give True, False, or a template such as '{name}-{step}'")


def wanted_guards(strategy: object, guards: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the stored form of the guards of a restore. Refuses what is no strategy."""
    if not isinstance(strategy, LoadStrategy):
        raise UsageError(f"strategy={strategy!r:.100}", advice="give a holdfast.LoadStrategy")
    return encoded("guards", guards)


def check_options(
    *, mode: object, resume: object, verify: object, replicas: object, save: object, keep: object
) -> None:
    """Refuse what is not among the words that an option takes, and what is no policy."""
    one_of("mode", mode, get_args(ChosenMode))
    one_of("resume", resume, ("auto", "required", "never"))
    one_of("verify", verify, get_args(Verify))
    one_of("replicas", replicas, get_args(Replicas))
    check_policies(save, keep)


def check_stage(stage: object) -> None:
    """Refuse what is no number of a pipeline stage."""
    if stage is not None and (isinstance(stage, bool) or not isinstance(stage, int) or stage < 0):
        raise UsageError(f"pipeline_stage={stage!r}", advice="give the stage's number, from 0 on")


def checked_components(state: Mapping[str, Any], rng: bool) -> dict[str, Any]:
    """Return the components by name, with the random state where `rng` asks for it."""
    if not isinstance(state, Mapping):
        raise UsageError(f"state is a mapping of components by name, not a {type(state).__name__}")
    if not state:
        raise UsageError("state is empty", advice="pass at least the model: {'model': model}")
    components = {check_component_name(name): component for name, component in state.items()}
    if rng and not any(isinstance(component, RNGState) for component in components.values()):
        if RNG in components:
            raise UsageError(f"'{RNG}' is taken by the random state", advice="rename the component, or pass rng=False")
        components[RNG] = RNGState()
    for name, component in components.items():
        kind_of(name, component)
        refuse_flat_parameters(name, component)
        if isinstance(component, Sharded):
            cuts_of(name, components)
    check_covers(components)
    refuse_same_objects(components)
    check_components(components, components)
    return components


def agree_on(label: str, words: list[str]) -> None:
    for rank, word in enumerate(words):
        if word != words[0]:
            raise UsageError(f"the ranks disagree in {label}: {words[0]} on rank 0 and {word} on rank {rank}")


Introduction = tuple[str, str, list[str], str, str]
"""What a rank sends when a run is opened: the run, the mode, its components' names, what it does with replicas, and its
machine."""


def agree_on_run(words: list[Introduction]) -> tuple[int, ...]:
    """Return for each rank how many of the ranks are on its machine. Raise where they do not fit together."""
    # Pipeline ranks may hold different components. What a name stands for may not differ, and the plan checks that.
    if not all(names for _, _, names, *_ in words):
        raise UsageError("some ranks have no component at all")
    # Ranks that write to different folders would commit a checkpoint of which a part lies elsewhere.
    run = words[0][0]
    agree_on("mode", [mode for _, mode, *_ in words])
    agree_on("replicas", [replicas for *_, replicas, _ in words])
    for rank, (other, *_) in enumerate(words):
        if other != run:
            raise UsageError(
                f"the ranks have different runs: {run} on rank 0 and {other} on rank {rank}",
                advice="give every rank the same run, and build managers in the same order on every rank",
            )
    machines = [machine for *_, machine in words]
    return tuple(map(machines.count, machines))


def on_every_rank(ranks: Ranks, label: str, work: Callable[[], Value], *, same: str = "") -> Value:
    """Do a rank's own work. An error on one rank is raised on all of them, and so is a `same` that differs."""
    done: list[Value] = []

    def mine() -> str:
        done.append(work())
        return same

    ranks.decide(label, mine, partial(agree_on, label), sends=str, returns=None)
    return done[0]
