"""The configuration of a manager, as a value: plain data, YAML or TOML enter, a checked `CheckpointConfig` leaves.

Knows neither torch nor the manager.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from msgspec import Meta

from holdfast.errors import UsageError
from holdfast.loading.strategy import Verify
from holdfast.plugins.config_files import TOML_SUFFIXES, YAML_SUFFIXES, is_path, parse_toml, parse_yaml, read_text
from holdfast.plugins.config_values import (
    BOOLEAN,
    SECONDS,
    Wanted,
    check_keys,
    check_value,
    is_dotted_name,
    of_type,
    one_of,
    shown,
)
from holdfast.plugins.policy_data import PLACES, keep_policy, made, plain_keep, plain_save, save_policy
from holdfast.ranks.base import DEFAULT_TIMEOUT_SECONDS
from holdfast.runs.link_names import LinkTemplate

__all__ = ["CheckpointConfig"]

MODES = ("auto", "sync", "async", "async_pinned", "async_device")
RESUMES = ("auto", "required", "never")
VERIFIES = get_args(Verify)
REPLICAS = ("compare", "trust")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The settings of a checkpoint manager. Checked when it is made, never changed, and free to be subclassed.

    manager_class: the class to build, as "package.module.Class"; None takes the built-in one.
    run: the folder or URL of the run.
    save, keep: policies, or the same as plain data, such as `{"every_steps": 500}` and `{"last": 3}`; they are
        policies once the config is made.
    mode, resume, verify, timeout, staging_limit_bytes, rng, links, replicas: as for `CheckpointManager`.
    allowed_packages: the packages that `manager_class` may come from; None allows any. It can narrow what the program
        allows, and cannot widen it.

    A subclass adds fields, and calls `super().__post_init__()` where it has a `__post_init__`.
    """

    manager_class: str | None = None
    run: str | os.PathLike[str] | None = None
    save: Any = None
    keep: Any = None
    mode: Literal["auto", "sync", "async", "async_pinned", "async_device"] = "auto"
    resume: Literal["auto", "required", "never"] = "auto"
    verify: Verify = "full"
    timeout: float = DEFAULT_TIMEOUT_SECONDS
    staging_limit_bytes: int | None = None
    rng: bool = True
    links: bool | str | LinkTemplate = True
    replicas: Literal["compare", "trust"] = "compare"
    allowed_packages: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name, wanted in _FIELDS.items():
            check_value(name, getattr(self, name), wanted)
        if self.allowed_packages is not None:
            object.__setattr__(self, "allowed_packages", tuple(self.allowed_packages))
        if isinstance(self.links, str):
            object.__setattr__(self, "links", made("links", LinkTemplate, self.links))
        object.__setattr__(self, "save", save_policy(self.save))
        object.__setattr__(self, "keep", keep_policy(self.keep))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return a config of plain data. What is no key of this class is an error that names the nearest one."""
        if not isinstance(data, Mapping):
            raise UsageError(f"a checkpoint config is a mapping of keys to values, not {shown(data)}")
        keys = [field for field in fields(cls) if field.init]
        check_keys("", data, [field.name for field in keys], PLACES)
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
        data["save"] = plain_save(self.save)
        data["keep"] = plain_keep(self.keep)
        return data

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Return a config of a YAML or TOML file, by its suffix."""
        suffix = Path(path).suffix
        if suffix in YAML_SUFFIXES:
            return cls.from_yaml(Path(path))
        if suffix in TOML_SUFFIXES:
            return cls.from_toml(Path(path))
        raise UsageError(
            f"'{suffix}' is no suffix of a config", file=os.fspath(path), advice="use .yaml, .yml or .toml"
        )

    @classmethod
    def from_yaml(cls, source: str | os.PathLike[str]) -> Self:
        """Return a config of YAML: a path, or the text itself. A text is a path when it is one line that ends in a
        suffix of YAML. Needs PyYAML."""
        return cls._from_text(source, YAML_SUFFIXES, parse_yaml)

    @classmethod
    def from_toml(cls, source: str | os.PathLike[str]) -> Self:
        """Return a config of TOML: a path, or the text itself. A text is a path when it is one line that ends in
        .toml."""
        return cls._from_text(source, TOML_SUFFIXES, parse_toml)

    @classmethod
    def _from_text(cls, source: str | os.PathLike[str], suffixes: tuple[str, ...], parse: Callable[[str], Any]) -> Self:
        if isinstance(source, str) and not is_path(source, suffixes):
            return cls.from_dict(parse(source))
        file = os.fspath(source)
        try:
            return cls.from_dict(parse(read_text(file)))
        except UsageError as error:
            raise error.at(file=file) from None


def _is_path_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, str | os.PathLike) and os.fspath(value) != "")


def _is_packages_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, list | tuple | set | frozenset) and all(map(is_dotted_name, value)))


_FIELDS = {
    "manager_class": of_type("a text such as 'package.module.Class'", str | None),
    "run": Wanted("a path or a URL", _is_path_or_none),
    "mode": one_of(MODES),
    "resume": one_of(RESUMES),
    "verify": one_of(VERIFIES),
    "replicas": one_of(REPLICAS),
    "timeout": SECONDS,
    "staging_limit_bytes": of_type("a number of bytes, or nothing for no limit", Annotated[int, Meta(ge=0)] | None),
    "rng": BOOLEAN,
    "links": Wanted(
        "true, false, or a template such as '{name}-{step}'",
        lambda value: isinstance(value, bool | str | LinkTemplate),
    ),
    "allowed_packages": Wanted("a list of packages such as ['mycompany']", _is_packages_or_none),
}
