"""The configuration of a manager, as a value: plain data, YAML or TOML enter, a checked `CheckpointConfig` leaves.

Knows the policies; knows neither torch nor the manager.
"""

from __future__ import annotations

import copy
import datetime
import difflib
import functools
import operator
import os
import reprlib
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from holdfast.errors import KeyMissingError, StorageError, UsageError
from holdfast.manager.triggers import At, Every, OnLastStep, OnSignal, TimeLimit, Trigger
from holdfast.runs.link_names import LinkTemplate
from holdfast.runs.retention import KeepAll, KeepBest, KeepEvery, KeepLast, KeepPolicy, KeepTagged

__all__ = ["CheckpointConfig", "is_dotted_name", "nearest", "shown"]

MODES = ("auto", "sync", "async", "async_pinned", "async_device")
RESUMES = ("auto", "required", "never")
VERIFIES = ("full", "quick", "off")
REPLICAS = ("compare", "trust")
_YAML_SUFFIXES = (".yaml", ".yml")
_TOML_SUFFIXES = (".toml",)
_YAML_TAG = "tag:yaml.org,2002:"

# A few lines of YAML can stand for a list that fills all memory when it is written out.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxother, _SHORT.maxstring = 2, 80, 80


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What a checkpoint manager is built from. Checked when it is made, never changed, and free to be subclassed.

    manager_class: the class to build, as "package.module.Class"; None takes the built-in one.
    run: the folder or URL of the run.
    save, keep: policies, or plain data that says the same, such as `{"every_steps": 500}` and `{"last": 3}`; they are
        policies once the config is made.
    mode, resume, verify, timeout, staging_limit_bytes, rng, links, replicas: as for `CheckpointManager`.
    allowed_packages: the packages that `manager_class` may come from; None allows any. It can narrow what the program
        allows, and cannot widen it.

    A subclass adds fields of its own, and calls `super().__post_init__()` where it has a `__post_init__`.
    """

    manager_class: str | None = None
    run: str | os.PathLike[str] | None = None
    save: Any = None
    keep: Any = None
    mode: Literal["auto", "sync", "async", "async_pinned", "async_device"] = "auto"
    resume: Literal["auto", "required", "never"] = "auto"
    verify: Literal["full", "quick", "off"] = "full"
    timeout: float = 600.0
    staging_limit_bytes: int | None = None
    rng: bool = True
    links: bool | str | LinkTemplate = True
    replicas: Literal["compare", "trust"] = "compare"
    allowed_packages: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name, wanted in _FIELDS.items():
            _check(name, getattr(self, name), wanted)
        if self.allowed_packages is not None:
            object.__setattr__(self, "allowed_packages", tuple(self.allowed_packages))
        if isinstance(self.links, str):
            object.__setattr__(self, "links", _made("links", LinkTemplate, self.links))
        object.__setattr__(self, "save", _policy("save", self.save, Trigger, SAVE_KEYS))
        object.__setattr__(self, "keep", _policy("keep", self.keep, KeepPolicy, KEEP_KEYS))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """A config from plain data. What is no key of this class is an error that names the nearest one."""
        if not isinstance(data, Mapping):
            raise UsageError(f"a checkpoint config is a mapping of keys to values, not {shown(data)}")
        keys = [field for field in fields(cls) if field.init]
        _check_keys("", data, [field.name for field in keys])
        for field in keys:
            if field.name not in data and field.default is MISSING and field.default_factory is MISSING:
                raise UsageError(f"the checkpoint config has no '{field.name}'", advice=f"{cls.__name__} needs it")
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that `from_dict` makes an equal config of, fields of a subclass included. A policy of a
        class of your own stays a policy, and so does a `TimeLimit` of another job's end."""
        data = {field.name: copy.deepcopy(getattr(self, field.name)) for field in fields(self) if field.init}
        data["run"] = None if self.run is None else os.fspath(self.run)
        data["links"] = self.links.template if isinstance(self.links, LinkTemplate) else self.links
        data["allowed_packages"] = None if self.allowed_packages is None else list(self.allowed_packages)
        data["save"] = _plain_policy(self.save, _plain_trigger, Trigger, SAVE_KEYS)
        data["keep"] = _plain_policy(self.keep, _plain_keep, KeepPolicy, KEEP_KEYS)
        return data

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """A config from a YAML or TOML file, by its suffix."""
        suffix = Path(path).suffix
        if suffix in _YAML_SUFFIXES:
            return cls.from_yaml(Path(path))
        if suffix in _TOML_SUFFIXES:
            return cls.from_toml(Path(path))
        raise UsageError(
            f"'{suffix}' is no suffix of a config", file=os.fspath(path), advice="use .yaml, .yml or .toml"
        )

    @classmethod
    def from_yaml(cls, source: str | os.PathLike[str]) -> Self:
        """A config from YAML: a path, or the text itself. A text is a path when it is one line that ends in a suffix of
        YAML. Needs PyYAML."""
        return cls._from_text(source, _YAML_SUFFIXES, _parse_yaml)

    @classmethod
    def from_toml(cls, source: str | os.PathLike[str]) -> Self:
        """A config from TOML: a path, or the text itself. A text is a path when it is one line that ends in .toml."""
        return cls._from_text(source, _TOML_SUFFIXES, tomllib.loads)

    @classmethod
    def _from_text(cls, source: str | os.PathLike[str], suffixes: tuple[str, ...], parse: Callable[[str], Any]) -> Self:
        if isinstance(source, str) and not _is_path(source, suffixes):
            return cls.from_dict(_parsed(source, parse))
        file = os.fspath(source)
        try:
            return cls.from_dict(_parsed(_read(file), parse))
        except UsageError as error:
            raise error.at(file=file) from None


# What a value may be


class _Wanted(NamedTuple):
    """What a key takes, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]


def _check(key: str, value: Any, wanted: _Wanted) -> None:
    if wanted.fits(value):
        return
    advice = ""
    if value is False and "'off'" in wanted.words:
        advice = 'YAML reads off as False; write "off", in quotes'
    if wanted in (_DURATION, _TIME_LIMIT) and _is_number(value):
        advice = "write seconds as '90s', and a time in quotes: YAML reads 3:50 as the number 230"
    raise UsageError(f"'{key}' takes {wanted.words}, not {shown(value)}", advice=advice)


def shown(value: Any) -> str:
    """A value and its type, for a message. Short whatever the value is: a config may hold anything."""
    return f"{_SHORT.repr(value)} ({type(value).__name__})"


def is_dotted_name(text: Any) -> bool:
    return isinstance(text, str) and all(part.isidentifier() for part in text.split("."))


def _is_path_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, str | os.PathLike) and os.fspath(value) != "")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_limit(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple | set | frozenset) and all(fits(item) for item in value)


def _one_of(choices: tuple[str, ...]) -> _Wanted:
    return _Wanted(f"one of {', '.join(map(repr, choices))}", lambda value: isinstance(value, str) and value in choices)


_TEXT = _Wanted("a text", lambda value: isinstance(value, str) and value != "")
_COUNT = _Wanted("a whole number above 0", _is_count)
_BOOLEAN = _Wanted("true or false", lambda value: isinstance(value, bool))
_MINUTES = _Wanted("a positive number of minutes", lambda value: _is_number(value) and value > 0)
_STEPS = _Wanted(
    "a list of steps",
    lambda value: _is_list(value, lambda step: isinstance(step, int) and not isinstance(step, bool) and step >= 0),
)
_SIGNALS = _Wanted(
    "the name of a signal, or a list of names",
    lambda value: _is_list([value] if isinstance(value, str) else value, _TEXT.fits) and len(value) > 0,
)
# No number: many readers of YAML take 3:50 for a number of the base 60, and a run would end after 230 seconds.
_DURATION = _Wanted(
    "a text such as '03:50:00', '3h50m' or '90s'", lambda value: isinstance(value, datetime.time) or _TEXT.fits(value)
)
_TIME_LIMIT = _Wanted(
    f"{_DURATION.words}, {{limit, before_end}}, or true for the job's own end",
    lambda value: isinstance(value, bool | Mapping) or _DURATION.fits(value),
)
_BEST = _Wanted(
    "{metric, n, mode}, or a list of these",
    lambda value: isinstance(value, Mapping) or (isinstance(value, list | tuple) and len(value) > 0),
)

_FIELDS = {
    "manager_class": _Wanted(
        "a text such as 'package.module.Class'", lambda value: value is None or isinstance(value, str)
    ),
    "run": _Wanted("a path or a URL", _is_path_or_none),
    "mode": _one_of(MODES),
    "resume": _one_of(RESUMES),
    "verify": _one_of(VERIFIES),
    "replicas": _one_of(REPLICAS),
    "timeout": _Wanted("a positive number of seconds", lambda value: _is_number(value) and value > 0),
    "staging_limit_bytes": _Wanted("a number of bytes, or nothing for no limit", _is_limit),
    "rng": _BOOLEAN,
    "links": _Wanted(
        "true, false, or a template such as '{name}-{step}'",
        lambda value: isinstance(value, bool | str | LinkTemplate),
    ),
    "allowed_packages": _Wanted(
        "a list of packages such as ['mycompany']", lambda value: value is None or _is_list(value, is_dotted_name)
    ),
}


# Policies as plain data


class _Part(NamedTuple):
    """A key of `save` or `keep`: what it takes, and the policy that it makes; None for a choice that is off."""

    wanted: _Wanted
    build: Callable[[Any], Any]


SAVE_KEYS = {
    "every_steps": _Part(_COUNT, lambda steps: Every(steps=steps)),
    "every_epochs": _Part(_COUNT, lambda epochs: Every(epochs=epochs)),
    "every_minutes": _Part(_MINUTES, lambda minutes: Every(minutes=minutes)),
    "at": _Part(_STEPS, lambda steps: At(steps)),
    "on_signal": _Part(_SIGNALS, lambda names: OnSignal(*([names] if isinstance(names, str) else names))),
    "time_limit": _Part(_TIME_LIMIT, lambda limit: _time_limit(limit)),
    "on_last_step": _Part(_COUNT, OnLastStep),
}
KEEP_KEYS = {
    "last": _Part(_COUNT, KeepLast),
    "best": _Part(_BEST, lambda best: _keep_best(best)),
    "every_steps": _Part(_COUNT, lambda steps: KeepEvery(steps=steps)),
    "every_minutes": _Part(_MINUTES, lambda minutes: KeepEvery(minutes=minutes)),
    "tagged": _Part(_BOOLEAN, lambda on: KeepTagged() if on else None),
    "all": _Part(_BOOLEAN, lambda on: KeepAll() if on else None),
}
# A text of seconds alone has nine digits at most.
_DAYS_FROM_SECONDS = 10**9
_RANKING = {"metric": _TEXT, "n": _COUNT, "mode": _one_of(("min", "max"))}
_LIMIT = {"limit": _DURATION, "before_end": _DURATION}
_PLACES = {"save": SAVE_KEYS, "keep": KEEP_KEYS}


def _policy(name: str, value: Any, kind: type, parts: Mapping[str, _Part]) -> Any:
    """The policy that plain data says; a policy, or nothing, as it is."""
    if value is None or isinstance(value, kind):
        return value
    if isinstance(value, list | tuple):
        several = [_policy(f"{name}[{index}]", inner, kind, parts) for index, inner in enumerate(value)]
        return _joined(name, [policy for policy in several if policy is not None], parts)
    if not isinstance(value, Mapping):
        raise UsageError(
            f"'{name}' takes a policy, a mapping of {', '.join(parts)}, or a list of these, not {shown(value)}"
        )
    _check_keys(name, value, parts)
    built = [_built(f"{name}.{key}", parts[key], inner) for key, inner in value.items()]
    return _joined(name, [policy for policy in built if policy is not None], parts)


def _joined(name: str, chosen: Sequence[Any], parts: Iterable[str]) -> Any:
    # An empty `keep` is no wish to keep nothing, and an empty `save` none to save never.
    if not chosen:
        raise UsageError(f"'{name}' has nothing in it", advice=f"leave it out, or give one of {', '.join(parts)}")
    return functools.reduce(operator.or_, chosen)


def _built(path: str, part: _Part, value: Any) -> Any:
    _check(path, value, part.wanted)
    return _made(path, part.build, value)


def _made(path: str, build: Callable[[Any], Any], value: Any) -> Any:
    """What is built from a value; what is wrong with it is said with the key in front."""
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
    _check_keys(path, ranking, _RANKING)
    for key, value in ranking.items():
        _check(f"{path}.{key}", value, _RANKING[key])
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
    _check_keys(path, limit, _LIMIT)
    for key, value in limit.items():
        _check(f"{path}.{key}", value, _LIMIT[key])
    return TimeLimit(**{key: _duration(value) for key, value in limit.items()})


def _duration(value: str | datetime.time) -> str:
    # TOML reads 03:50:00 as a time of the day.
    return value.isoformat() if isinstance(value, datetime.time) else value


# Plain data of policies


def _plain_policy(policy: Any, spell: Callable[[Any], tuple[str, Any]], kind: type, parts: Mapping[str, _Part]) -> Any:
    """Return the plain data that makes this very policy: a mapping, or a list of mappings where one of them cannot hold
    all parts in their order. The policy itself where a part is of a class of the caller's."""
    if policy is None:
        return None
    spelled = [spell(part) for part in policy.parts()]
    for data in (_as_mapping(spelled), [{key: value} for key, value in spelled]):
        try:
            if _policy("policy", data, kind, parts) == policy:
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


def _plain_trigger(trigger: Any) -> tuple[str, Any]:
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
    """Return a text that says a duration exactly."""
    whole = int(seconds)
    if whole != seconds:
        return f"{Decimal(repr(seconds)):f}s"
    return f"{whole}s" if whole < _DAYS_FROM_SECONDS else f"{whole // 86400}d{whole % 86400}s"


def _plain_keep(policy: Any) -> tuple[str, Any]:
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


# Keys


def _check_keys(path: str, data: Mapping[Any, Any], valid: Iterable[str]) -> None:
    names = list(valid)
    for key in data:
        if not isinstance(key, str) or key not in names:
            raise _unknown(f"{path}." if path else "", key, names)


def _unknown(front: str, key: Any, names: Sequence[str]) -> UsageError:
    problem = f"'{front}{key!s:.80}' is no key of a checkpoint config"
    near = nearest(str(key), names)
    if near is not None:
        return UsageError(problem, advice=f"did you mean '{front}{near}'?")
    elsewhere = [f"{place}.{key}" for place, parts in _PLACES.items() if key in parts]
    if elsewhere:
        return UsageError(problem, advice=f"did you mean '{elsewhere[0]}'?")
    return UsageError(problem, advice=f"use one of {', '.join(front + name for name in names)}")


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that was most likely meant, if any is near."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), None)


# Files


def _is_path(text: str, suffixes: tuple[str, ...]) -> bool:
    return "\n" not in text and ": " not in text and text.endswith(suffixes)


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise KeyMissingError("there is no such config", file=file, advice="check the path") from None
    except OSError as error:
        raise StorageError.of(error, "reading the config", file=file) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"it is no text in UTF-8: {error}", file=file) from None


def _parsed(text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"the config is no TOML: {error}") from None


def _parse_yaml(text: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ImportError("reading a config from YAML needs PyYAML; pip install pyyaml, or write it in TOML") from None
    try:
        loader = _loader_class()(text)
        document = loader.get_single_node()
        _refuse_repeated_keys(document)
        data = None if document is None else loader.construct_document(document)
    except UsageError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"the config is no YAML: {error}") from None
    return {} if data is None else data


@functools.cache
def _loader_class() -> Any:
    """YAML's safe loader, without its numbers of the base 60: 3:50 is the text that stands there."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    def construct_number(loader: Any, node: Any) -> Any:
        if ":" in node.value:
            return loader.construct_yaml_str(node)
        return yaml.SafeLoader.yaml_constructors[node.tag](loader, node)

    for name in ("int", "float"):
        Loader.add_constructor(_YAML_TAG + name, construct_number)
    return Loader


def _refuse_repeated_keys(document: Any) -> None:
    """Of a key that stands twice in one mapping, YAML's loader takes the last without a word."""
    for mapping in _yaml_mappings(document):
        lines: dict[tuple[str, str], int] = {}
        for key, _ in mapping.value:
            # A mapping may merge in several others, each by a key <<.
            if key.id != "scalar" or key.tag == _YAML_TAG + "merge":
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                raise UsageError(
                    f"'{key.value:.80}' stands in line {lines[key.tag, key.value]} and again in line {line}",
                    advice="keep one of them",
                )
            lines[key.tag, key.value] = line


def _yaml_mappings(document: Any) -> Iterator[Any]:
    """All mappings of a document, each once. An alias is the node that it stands for, and may be inside of itself."""
    seen: set[int] = set()
    rest = [document]
    while rest:
        node = rest.pop()
        if id(node) in seen or not isinstance(getattr(node, "value", None), list):
            continue
        seen.add(id(node))
        if node.id == "mapping":
            yield node
        rest += node.value if node.id == "sequence" else [inner for pair in node.value for inner in pair]
