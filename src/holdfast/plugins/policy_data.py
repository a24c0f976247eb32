"""Turn policies into plain data and back: `{"every_steps": 500}` is `Every(steps=500)`. Knows neither torch nor the
manager."""

from __future__ import annotations

import datetime
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from decimal import Decimal
from typing import Any, NamedTuple

from holdfast.errors import UsageError
from holdfast.manager.triggers import At, Every, OnLastStep, OnSignal, TimeLimit, Trigger
from holdfast.plugins.config_values import (
    BOOLEAN,
    COUNT,
    DURATION,
    MINUTES,
    SIGNALS,
    STEPS,
    TEXT,
    TIME_LIMIT,
    Wanted,
    check_keys,
    check_value,
    one_of,
    shown,
)
from holdfast.runs.retention import KeepAll, KeepBest, KeepEvery, KeepLast, KeepPolicy, KeepTagged

__all__ = ["KEEP_KEYS", "PLACES", "SAVE_KEYS", "keep_policy", "made", "plain_keep", "plain_save", "save_policy"]


def save_policy(value: Any) -> Trigger | None:
    """Return the trigger that a value of `save` describes."""
    trigger: Trigger | None = _build_policy("save", value, Trigger, SAVE_KEYS)
    return trigger


def keep_policy(value: Any) -> KeepPolicy | None:
    """Return the policy that a value of `keep` describes."""
    policy: KeepPolicy | None = _build_policy("keep", value, KeepPolicy, KEEP_KEYS)
    return policy


def plain_save(trigger: Trigger | None) -> Any:
    """Return plain data that makes an equal trigger; the trigger itself where a part is of a class of the caller's."""
    return _plain_policy(trigger, _spell_trigger, Trigger, SAVE_KEYS)


def plain_keep(policy: KeepPolicy | None) -> Any:
    """Return plain data that makes an equal policy; the policy itself where a part is of a class of the caller's."""
    return _plain_policy(policy, _spell_keep, KeepPolicy, KEEP_KEYS)


class _Part(NamedTuple):
    """A key of `save` or `keep`: what it takes, and the policy that it makes; None for a choice that is off."""

    wanted: Wanted
    build: Callable[[Any], Any]


_BEST = Wanted(
    "{metric, n, mode}, or a list of these",
    lambda value: isinstance(value, Mapping) or (isinstance(value, list | tuple) and len(value) > 0),
)
SAVE_KEYS = {
    "every_steps": _Part(COUNT, lambda steps: Every(steps=steps)),
    "every_epochs": _Part(COUNT, lambda epochs: Every(epochs=epochs)),
    "every_minutes": _Part(MINUTES, lambda minutes: Every(minutes=minutes)),
    "at": _Part(STEPS, lambda steps: At(steps)),
    "on_signal": _Part(SIGNALS, lambda names: OnSignal(*([names] if isinstance(names, str) else names))),
    "time_limit": _Part(TIME_LIMIT, lambda limit: _time_limit(limit)),
    "on_last_step": _Part(COUNT, OnLastStep),
}
KEEP_KEYS = {
    "last": _Part(COUNT, KeepLast),
    "best": _Part(_BEST, lambda best: _keep_best(best)),
    "every_steps": _Part(COUNT, lambda steps: KeepEvery(steps=steps)),
    "every_minutes": _Part(MINUTES, lambda minutes: KeepEvery(minutes=minutes)),
    "tagged": _Part(BOOLEAN, lambda on: KeepTagged() if on else None),
    "all": _Part(BOOLEAN, lambda on: KeepAll() if on else None),
}
# A text of seconds alone has nine digits at most.
_DAYS_FROM_SECONDS = 10**9
_RANKING = {"metric": TEXT, "n": COUNT, "mode": one_of(("min", "max"))}
_LIMIT = {"limit": DURATION, "before_end": DURATION}
PLACES = {"save": SAVE_KEYS, "keep": KEEP_KEYS}


def _build_policy(name: str, value: Any, kind: type, parts: Mapping[str, _Part]) -> Any:
    """Return the policy that plain data describes; a policy, or None, as it is."""
    if value is None or isinstance(value, kind):
        return value
    if isinstance(value, list | tuple):
        several = [_build_policy(f"{name}[{index}]", inner, kind, parts) for index, inner in enumerate(value)]
        return _joined(name, [policy for policy in several if policy is not None], parts)
    if not isinstance(value, Mapping):
        raise UsageError(
            f"'{name}' takes a policy, a mapping of {', '.join(parts)}, or a list of these, not {shown(value)}"
        )
    check_keys(name, value, parts, PLACES)
    built = [_built(f"{name}.{key}", parts[key], inner) for key, inner in value.items()]
    return _joined(name, [policy for policy in built if policy is not None], parts)


def _joined(name: str, chosen: Sequence[Any], parts: Iterable[str]) -> Any:
    # An empty `keep` is no wish to keep nothing, and an empty `save` none to save never.
    if not chosen:
        raise UsageError(f"'{name}' has nothing in it", advice=f"leave it out, or give one of {', '.join(parts)}")
    return functools.reduce(operator.or_, chosen)


def _built(path: str, part: _Part, value: Any) -> Any:
    check_value(path, value, part.wanted)
    return made(path, part.build, value)


def made(path: str, build: Callable[[Any], Any], value: Any) -> Any:
    """Return what is built from a value. An error of it has the key in front."""
    try:
        return build(value)
    except UsageError as error:
        if error.problem.startswith(f"'{path}"):
            raise
        raise UsageError(f"'{path}': {error.problem}", advice=error.advice) from None


def _keep_best(best: Any) -> Any:
    if isinstance(best, Mapping):
        return _one_ranking("keep.best", best)
    rankings = [_one_ranking(f"keep.best[{place}]", ranking) for place, ranking in enumerate(best)]
    return functools.reduce(operator.or_, rankings)


def _one_ranking(path: str, ranking: Any) -> KeepBest:
    if not isinstance(ranking, Mapping):
        raise UsageError(f"'{path}' takes {{metric, n, mode}}, not {shown(ranking)}")
    check_keys(path, ranking, _RANKING, PLACES)
    for key, value in ranking.items():
        check_value(f"{path}.{key}", value, _RANKING[key])
    if "metric" not in ranking:
        raise UsageError(f"'{path}' has no 'metric'", advice="name the metric to rank by, such as val_loss")
    return KeepBest(**ranking)


def _time_limit(limit: Any) -> TimeLimit | None:
    if isinstance(limit, bool):
        return TimeLimit() if limit else None
    if not isinstance(limit, Mapping):
        return TimeLimit(_duration(limit))
    path = "save.time_limit"
    if not limit:
        raise UsageError(f"'{path}' has nothing in it", advice=f"give {' or '.join(_LIMIT)}, or true")
    check_keys(path, limit, _LIMIT, PLACES)
    for key, value in limit.items():
        check_value(f"{path}.{key}", value, _LIMIT[key])
    return TimeLimit(**{key: _duration(value) for key, value in limit.items()})


def _duration(value: str | datetime.time) -> str:
    # TOML reads 03:50:00 as a time of the day.
    return value.isoformat() if isinstance(value, datetime.time) else value


def _plain_policy(policy: Any, spell: Callable[[Any], tuple[str, Any]], kind: type, parts: Mapping[str, _Part]) -> Any:
    """Return the plain data that makes this very policy: a mapping, or a list of mappings where one of them cannot hold
    all parts in their order. The policy itself where a part is of a class of the caller's."""
    if policy is None:
        return None
    spelled = [spell(part) for part in policy.parts()]
    for data in (_as_mapping(spelled), [{key: value} for key, value in spelled]):
        try:
            if _build_policy("policy", data, kind, parts) == policy:
                return data
        except UsageError:
            continue
    return policy


def _as_mapping(spelled: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return one mapping of all parts; of several with one key it has the last, except of rankings."""
    data: dict[str, Any] = {}
    for key, value in spelled:
        if key == "best" and "best" in data:
            data["best"] = [*(data["best"] if isinstance(data["best"], list) else [data["best"]]), value]
        else:
            data[key] = value
    return data


def _spell_trigger(trigger: Any) -> tuple[str, Any]:
    match trigger:
        case Every():
            return next((f"every_{name}", value) for name, value in _fields_of(trigger).items() if value is not None)
        case At():
            return "at", sorted(trigger.steps)
        case OnSignal():
            return "on_signal", list(trigger.names)
        case OnLastStep():
            return "on_last_step", trigger.total
        case TimeLimit():
            texts = {"limit": trigger.limit_seconds, "before_end": trigger.before_end_seconds}
            return "time_limit", {name: _in_seconds(value) for name, value in texts.items() if value is not None}
    return "", None


def _in_seconds(seconds: float) -> str:
    """Return the exact text of a duration."""
    whole = int(seconds)
    if whole != seconds:
        return f"{Decimal(repr(seconds)):f}s"
    return f"{whole}s" if whole < _DAYS_FROM_SECONDS else f"{whole // 86400}d{whole % 86400}s"


def _spell_keep(policy: Any) -> tuple[str, Any]:
    match policy:
        case KeepLast():
            return "last", policy.n
        case KeepBest():
            return "best", {"metric": policy.metric, "n": policy.n, "mode": policy.mode}
        case KeepEvery():
            return next((f"every_{name}", value) for name, value in _fields_of(policy).items() if value is not None)
        case KeepTagged():
            return "tagged", True
        case KeepAll():
            return "all", True
    return "", None


def _fields_of(policy: Any) -> dict[str, Any]:
    return {field.name: getattr(policy, field.name) for field in fields(policy)}
