"""What to take from a checkpoint and what to do where it does not fit. A value: checked when made, never changed."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

from holdfast.errors import UsageError
from holdfast.loading.renaming import Rename, frozen_rename, is_by_component, plain_rename, rename_in_words
from holdfast.ondisk.paths import check_component_name

Verify = Literal["full", "quick", "off"]
"""How deep a load checks: the digest of every byte that it needs, the sizes of files, or nothing."""

MODULES = "<modules>"
OPTIMIZERS = "<optimizers>"
_KINDS = {MODULES: "module", OPTIMIZERS: "optimizer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStrategy:
    """How to restore.

    only, skip: names of components to restore, or to leave as they are. At most one of them names a component.
    exclude: globs over leaf names, such as `model.head.*`; these leaves stay as they are. A glob with `param_groups` in
        it, such as `optimizer.param_groups*`, keeps the live options of an optimizer's groups.
    strict: a leaf that only one side has, another number of an optimizer's groups, other names of their options,
        another class or a value of a dict in another form is an error; otherwise a leaf of one side is listed and left
        as it is, and any other difference is listed as accepted.
    on_missing: a component that the checkpoint does not have is an "error", or "skip" lists it and goes on.
    on_world_change: what happens to per-rank state when the number of ranks is another one: "error"; "skip" leaves the
        live state; "adapt" hands all old ranks' states to the component's `load_world_state(states, index, count)`,
        once no rank's `check_world_state`, where the component has one, has refused them.
    on_guard_mismatch: "error", or "warn" to log it and go on.
    progress: take the step and the counters along; without them the run starts at step 0.
    rename: how names of the models' leaves in the checkpoint become names of the live ones, without the component in
        front: a mapping of names, with `*` for any part, pairs of a regular expression and its replacement, or a
        function; None in place of a new name drops a leaf. For single models a mapping of components to these. The
        state of an optimizer follows the names of its parameters; `exclude` is about the new names.
    cast: a tensor of float64, float32, float16 or bfloat16 may be another one of these in the checkpoint; it is
        converted while it is read.
    """

    only: Sequence[str] | None = None
    skip: Sequence[str] = ()
    exclude: Sequence[str] = ()
    strict: bool = True
    on_missing: Literal["error", "skip"] = "error"
    on_world_change: Literal["error", "skip", "adapt"] = "error"
    on_guard_mismatch: Literal["error", "warn"] = "error"
    progress: bool = True
    rename: Rename | Mapping[str, Rename] | None = None
    cast: bool = False

    def __post_init__(self) -> None:
        for name in ("only", "skip", "exclude"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        for name, allowed in (
            ("on_missing", ("error", "skip")),
            ("on_world_change", ("error", "skip", "adapt")),
            ("on_guard_mismatch", ("error", "warn")),
            ("strict", (True, False)),
            ("progress", (True, False)),
            ("cast", (True, False)),
        ):
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name}={getattr(self, name)!r}", advice=f"use one of {allowed}")
        object.__setattr__(self, "rename", frozen_rename(self.rename))
        self._check_names()

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        texts = (f"{name}={rename_in_words(one) if name == 'rename' else repr(one)}" for name, one in values.items())
        return f"LoadStrategy({', '.join(texts)})"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return a strategy of plain data, such as that of a file. What is no field of it is an error."""
        if not isinstance(data, Mapping):
            raise UsageError(f"a load strategy is a mapping of fields to values, not {data!r:.100}")
        known = [field.name for field in fields(cls)]
        unknown = [name for name in data if name not in known]
        if unknown:
            raise UsageError(f"a load strategy has no {unknown[0]!r:.100}", advice=f"it has {', '.join(known)}")
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that `from_dict` makes an equal strategy of. A rename by a function has none."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        lists = {name: list(value) for name, value in plain.items() if isinstance(value, tuple)}
        return {**plain, **lists, "rename": plain_rename(self.rename)}

    @classmethod
    def weights_only(cls, **changes: object) -> Self:
        """Return a strategy for the models alone, and a run that starts at step 0."""
        return cls(**{"only": (MODULES,), "progress": False, **changes})  # type: ignore[arg-type]

    @classmethod
    def warm_start(cls, **changes: object) -> Self:
        """Return a strategy for models and optimizers; schedulers, loaders, random state and the step stay new."""
        return cls(**{"only": (MODULES, OPTIMIZERS), "progress": False, **changes})  # type: ignore[arg-type]

    def takes(self, component: str, kind: str) -> bool:
        """Return whether a component of this name and kind is to be restored."""
        if component in self.skip:
            return False
        return self.only is None or component in self.only or any(_KINDS.get(name) == kind for name in self.only)

    def named(self) -> list[str]:
        """Return the components that were named one by one: they must exist."""
        return [name for name in (*(self.only or ()), *self.skip) if name not in _KINDS]

    def renaming(self, model: str) -> Rename | None:
        """Return the rule for the leaves of one model; None where they keep their names."""
        rename: Any = self.rename
        rule: Rename | None = rename.get(model) if is_by_component(rename) else rename
        return rule

    def renamed_components(self) -> list[str]:
        """Return the models that `rename` names one by one."""
        return list(self.rename) if is_by_component(self.rename) else []  # type: ignore[arg-type]

    def excluding(self, leaf: str) -> str | None:
        """Return the first glob that excludes a leaf, or None."""
        return next((glob for glob, pattern in _compiled(tuple(self.exclude)) if pattern.match(leaf)), None)

    def keeping_options(self, group: str) -> str | None:
        """Return the first glob that keeps the live options of an optimizer's group, such as
        `optimizer.param_groups.0`. One that is meant for tensors, such as `optimizer.*`, does not."""
        found = (glob for glob, pattern in _compiled(tuple(self.exclude)) if pattern.match(group))
        return next((glob for glob in found if "param_groups" in glob), None)

    def _check_names(self) -> None:
        if self.only is not None and not self.only:
            raise UsageError("only=() restores nothing", advice="leave it out, or name components")
        both = sorted(set(self.only or ()) & set(self.skip))
        if both:
            raise UsageError(f"{', '.join(both)}: named in only= and in skip=", advice="name it in one of them")
        for name in (*self.named(), *self.renamed_components()):
            check_component_name(name)


def check_verify(verify: str) -> Verify:
    """Return the depth, or raise a UsageError for any other text."""
    if verify not in get_args(Verify):
        raise UsageError(f"verify={verify!r}", advice="use 'full', 'quick' or 'off'")
    return verify  # type: ignore[return-value]


@functools.lru_cache(maxsize=64)
def _compiled(globs: tuple[str, ...]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Return the globs as patterns, compiled once: a restore asks about every leaf."""
    return tuple((glob, re.compile(fnmatch.translate(glob))) for glob in globs)


def _texts(name: str, value: object) -> tuple[str, ...] | None:
    if value is None and name == "only":
        return None
    if isinstance(value, str) or not isinstance(value, Sequence | set | frozenset):
        raise UsageError(f"{name}={value!r}", advice=f"{name} takes a list of texts")
    if not all(isinstance(text, str) and text for text in value):
        raise UsageError(f"{name}={value!r}", advice=f"{name} takes a list of texts that are not empty")
    return tuple(value)
