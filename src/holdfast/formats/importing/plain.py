"""Take a dict of a training apart, as `torch.save` and `dcp.save` have it: models, optimizers, and all the rest.

A tree enters; the parts of the new checkpoint leave. Every value of the tree is in one of them, in the progress, or in
the configuration.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import UsageError
from holdfast.formats.importing.models import Given, Model
from holdfast.formats.importing.optimizers import named_state
from holdfast.formats.importing.parts import (
    CONFIG_NAMES,
    is_model_state,
    is_optimizer_state,
    is_plain,
    own_values,
    usual_component,
    without_wrappers,
)
from holdfast.formats.importing.random_state import as_random_state
from holdfast.formats.importing.records import Part, Training
from holdfast.formats.source import Source, TensorEntry, tensors_of
from holdfast.formats.weights.selection import MODEL_NAMES
from holdfast.ondisk.paths import check_component_name, rank_scope
from holdfast.state.trees import TreeKind

__all__ = ["OTHER", "Request", "Taker", "take_apart"]

_MAX_CONTAINERS = 4
# Formats that keep the order of a state dict. Safetensors and DCP sort tensors, by name, by size or by rank.
_IN_ORDER = frozenset({"torch"})
OTHER = "other"
"""The component of values that are neither a dict nor a plain number or text."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asks of an import: other names of components by the path in the source, parts to leave out, and how
    the parameters of optimizers are named, by component; empty for every one of them."""

    components: Mapping[str, str] = field(default_factory=dict)
    skip: Collection[str] = ()
    parameters: Mapping[str, Given] = field(default_factory=dict)


def take_apart(source: Source, request: Request) -> Training:
    """Take apart what a training saved as one dict."""
    taker = Taker(request)
    tree = source.tree
    if is_model_state(tree):
        taker.add_model("model", tree, source)
    elif is_optimizer_state(tree):
        taker.add_optimizer("optimizer", tree, source)
    else:
        _visit(tree, "", 0, taker, source)
    return taker.training(source.format, config=source.config, assets=source.assets)


def _visit(tree: Mapping[Any, Any], path: str, depth: int, taker: Taker, source: Source) -> None:
    """Take each part of a dict; one that holds models or optimizers is only around them, as `app` in DCP's examples."""
    candidates = [key for key, value in tree.items() if is_model_state(value) and as_random_state(value) is None]
    for key, value in tree.items():
        where = f"{path}{key}"
        if taker.skips(where):
            continue
        random_state = as_random_state(value)
        if is_optimizer_state(value):
            taker.add_optimizer(where, value, source)
        elif key in candidates:
            taker.add_model(where, value, source, is_certain=str(key) in MODEL_NAMES or len(candidates) == 1)
        elif random_state is not None:
            taker.add_values(where, random_state, source, scope=rank_scope(0))
        elif str(key) in CONFIG_NAMES and isinstance(value, Mapping) and not tensors_of(value):
            taker.set_config(where, value)
        elif isinstance(value, Mapping) and depth < _MAX_CONTAINERS and _holds_parts(value, depth):
            _visit(value, f"{where}.", depth + 1, taker, source)
        elif isinstance(value, Mapping):
            taker.add_values(where, value, source)
        elif is_plain(value):
            taker.progress[where] = value
        else:
            taker.add_other(where, value, source)


def _holds_parts(value: Mapping[Any, Any], depth: int) -> bool:
    """Return whether an optimizer, or a model by its usual name, is inside of a dict."""
    for key, inner in value.items():
        if is_optimizer_state(inner) or (str(key) in MODEL_NAMES and is_model_state(inner)):
            return True
        if isinstance(inner, Mapping) and depth < _MAX_CONTAINERS and _holds_parts(inner, depth + 1):
            return True
    return False


@dataclass(slots=True)
class _Found:
    component: str
    origin: str
    value: Any
    source: Source
    scope: str = ""


class Taker:
    """Collects the parts of one training checkpoint. Optimizers are named last: they need the models."""

    def __init__(self, request: Request) -> None:
        self.progress: dict[str, Any] = {}
        self.changes: list[str] = []
        self.left: list[str] = []
        self._request = request
        self._models: list[tuple[_Found, Model]] = []
        self._optimizers: list[_Found] = []
        self._values: list[_Found] = []
        self._other: list[_Found] = []
        self._config: tuple[str, Any] | None = None
        self._origins: dict[str, str] = {}
        self._unused = set(request.components) | set(request.skip)

    def skips(self, origin: str) -> bool:
        """Return whether the user leaves a part out, and list it then."""
        if origin not in self._request.skip:
            return False
        self._unused.discard(origin)
        self.left.append(f"{origin}: left out by skip=")
        return True

    def add_model(
        self, origin: str, value: Mapping[str, Any], source: Source, component: str = "", is_certain: bool = True
    ) -> None:
        """Add tensors by name. Where it is not certain that they are a model's, they are one's if an optimizer has its
        parameters there, and otherwise plain values, which a restore takes for any kind of object."""
        cleaned = without_wrappers(value)
        changed = sum(old != new for old, new in cleaned.items())
        if changed:
            self.changes.append(f"{origin}: prefixes of wrappers removed from {changed} names")
        found = self._found(origin, {cleaned[name]: inner for name, inner in value.items()}, source, component)
        tensors = {name: inner for name, inner in found.value.items() if isinstance(inner, TensorEntry)}
        is_ordered = source.format in _IN_ORDER
        self._models.append((found, Model(found.component, tensors, cleaned, is_certain, is_ordered)))

    def add_optimizer(self, origin: str, value: Mapping[str, Any], source: Source, component: str = "") -> None:
        self._optimizers.append(self._found(origin, value, source, component))

    def add_values(
        self, origin: str, value: Mapping[Any, Any], source: Source, component: str = "", scope: str = ""
    ) -> None:
        self._values.append(self._found(origin, own_values(value), source, component, scope))

    def add_other(self, origin: str, value: Any, source: Source) -> None:
        self._other.append(_Found(OTHER, origin, own_values(value), source))

    def set_config(self, origin: str, value: Any) -> None:
        """Take the configuration; a second one stays a component."""
        if self._config is not None:
            raise UsageError(
                f"both '{self._config[0]}' and '{origin}' look like the configuration",
                advice=f"leave one of them out: skip=('{origin}',)",
            )
        self._config = origin, own_values(value)

    def training(self, layout: str, **more: Any) -> Training:
        """Return all that was collected."""
        if self._unused:
            raise UsageError(
                f"components= or skip= names {', '.join(map(repr, sorted(self._unused)))}, which is no part of the "
                "source",
                advice=f"there are: {', '.join([*self._origins.values(), *self.progress]) or 'none'}",
            )
        optimizers = self._named_optimizers()
        models = {part.model for part in optimizers} | {
            model.component for _, model in self._models if model.is_certain
        }
        parts: list[Part] = []
        for found, _ in self._models:
            kind: TreeKind = "module" if found.component in models else "values"
            parts.append(Part(found.component, kind, found.value, found.source, found.origin))
        parts += optimizers
        parts += [Part(one.component, "values", one.value, one.source, one.origin, one.scope) for one in self._values]
        parts += self._others()
        if self._config is not None:
            more["config"] = self._config[1]
        return Training(
            layout,
            tuple(parts),
            progress=dict(self.progress),
            changes=tuple(self.changes),
            left=tuple(self.left),
            **more,
        )

    def _named_optimizers(self) -> list[Part]:
        models = sorted((model for _, model in self._models), key=lambda model: not model.is_certain)
        given = self._request.parameters
        unknown = sorted(given.keys() - {"", *(found.component for found in self._optimizers)})
        if unknown:
            raise UsageError(
                f"parameters= names {', '.join(map(repr, unknown))}, which is no optimizer of the source",
                advice=f"there are: {', '.join(found.component for found in self._optimizers) or 'none'}",
            )
        parts = []
        for found in self._optimizers:
            own = given.get(found.component) or given.get("") or Given()
            named = named_state(found.component, found.value, models, own, found.source.location)
            self.changes += named.changes
            part = Part(found.component, "optimizer", named.value, found.source, found.origin, model=named.model)
            parts.append(part)
        return parts

    def _others(self) -> list[Part]:
        if not self._other:
            return []
        component = self._component(OTHER, OTHER)
        first = self._other[0]
        origin = ", ".join(one.origin for one in self._other)
        return [Part(component, "values", {one.origin: one.value for one in self._other}, first.source, origin)]

    def _found(self, origin: str, value: Any, source: Source, component: str, scope: str = "") -> _Found:
        key = origin.rpartition(".")[2] or origin
        return _Found(self._component(origin, component or usual_component(key), scope), origin, value, source, scope)

    def _component(self, origin: str, usual: str, scope: str = "") -> str:
        """Return the component that a part becomes. Two parts of one component are an error: nothing is guessed."""
        self._unused.discard(origin)
        name = self._request.components.get(origin, usual)
        try:
            check_component_name(name)
        except UsageError as error:
            advice = f"name it with components={{{origin!r}: NAME}}, or leave it out with skip=({origin!r},)"
            raise UsageError(f"'{origin}' of the source: {error.problem}", advice=advice) from None
        other = self._origins.setdefault(f"{name}@{scope}", origin)
        if other != origin:
            raise UsageError(
                f"both '{other}' and '{origin}' of the source would become the component '{name}'",
                advice=f"name one of them with components={{{origin!r}: NAME}}, or leave it out with skip=",
            )
        return name
