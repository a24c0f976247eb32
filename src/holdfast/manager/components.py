"""Hold a manager's components: those that take part in every save and restore, and the state of those that are attached
later. Live objects and a restored checkpoint enter; what a save or a restore works on leaves.

Knows the checkpoint that was restored last; knows neither the saver nor the cleanup.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from holdfast.errors import UsageError
from holdfast.loading.carrying import bound_to_ranks, carried_guards, carry
from holdfast.loading.pipeline import load
from holdfast.loading.records import Loaded, LoadRequest, NothingToLoad
from holdfast.loading.strategy import LoadStrategy, Verify
from holdfast.manager.arguments import check_stage, checked_components, on_every_rank
from holdfast.ondisk.paths import check_component_name
from holdfast.ranks.base import Ranks
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.readers import reading
from holdfast.runs.selector import Selector
from holdfast.state.names import cuts_of, follow_models, kind_of, refuse_flat_parameters, refuse_same_objects, unwrap
from holdfast.state.state_dicts import check_components
from holdfast.state.trees import CarriedTree
from holdfast.state.wrappers import Sharded, check_covers

logger = logging.getLogger("holdfast")

__all__ = ["Components"]


class Components:
    """The components of one manager.

    `live`: the objects by name. `needed`: the digests of checkpoints of the manager's own run that `attach` may still
    read, and that must not be removed.
    """

    def __init__(
        self,
        live: Mapping[str, Any],
        catalog: Catalog,
        ranks: Ranks,
        pipeline_stage: int | None,
        verify: Verify,
    ) -> None:
        self.live = follow_models(live, pipeline_stage=pipeline_stage)
        self.pipeline_stage = pipeline_stage
        self.needed: set[str | None] = set()
        self._catalog = catalog
        self._ranks = ranks
        self._verify: Verify = verify
        self._source: tuple[Catalog, Checkpoint] | None = None
        self._strategy = LoadStrategy()
        self._awaited: tuple[str, ...] = ()
        self._not_carried: frozenset[str] = frozenset()
        self._carried: tuple[CarriedTree, ...] | None = ()
        self._reading = ExitStack()
        weakref.finalize(self, self._reading.close)

    @classmethod
    def checked(
        cls,
        state: Mapping[str, Any],
        rng: bool,
        catalog: Catalog,
        ranks: Ranks,
        pipeline_stage: int | None,
        verify: Verify,
    ) -> Components:
        """Return the components of a manager's arguments, with the random state where `rng` asks for it."""
        check_stage(pipeline_stage)
        return cls(checked_components(state, rng), catalog, ranks, pipeline_stage, verify)

    def while_held(self) -> Callable[[], Mapping[str, Any] | None]:
        """Return a function that returns the live objects, or None once nothing holds this object any more."""
        weak = weakref.ref(self)

        def live() -> Mapping[str, Any] | None:
            held = weak()
            return held.live if held is not None else None

        return live

    def note_restored(self, catalog: Catalog, loaded: Loaded, strategy: LoadStrategy) -> None:
        """Keep the state of components that are not attached yet: in the source, and in every save until they are."""
        checkpoint, names = loaded.checkpoint, loaded.unclaimed
        self._source, self._strategy = (catalog, checkpoint), strategy
        lost = bound_to_ranks(checkpoint, names, self._ranks.size)
        if lost and self._ranks.rank == 0:
            logger.warning(
                "saves before attach() will not have the state of %s: the checkpoint of step %d has it for each of %d "
                "ranks, and there are %d now",
                ", ".join(lost),
                checkpoint.step,
                checkpoint.world_size,
                self._ranks.size,
            )
        self._awaited = tuple(names)
        self._carried = None if set(names) - set(lost) else ()
        self._not_carried = frozenset(lost)
        self._protect_source()

    def attach(
        self,
        name: str,
        component: Any,
        spare_memory: Callable[[], memoryview | None],
        limit_bytes: int | None,
    ) -> bool:
        """Add a component. Return whether the restored checkpoint had its state, which it has then taken.
        `spare_memory`, `limit_bytes`: as of `LoadRequest`."""
        kind = on_every_rank(self._ranks, "attach", lambda: self._check_new(name, component), same=repr(name))
        components = follow_models({**self.live, name: component}, pipeline_stage=self.pipeline_stage)
        loaded = self._load_one(name, kind, components, spare_memory, limit_bytes)
        self.live = components
        self._note_attached(name)
        return isinstance(loaded, Loaded) and name in loaded.restored

    def carried(self) -> tuple[CarriedTree, ...]:
        """Return this rank's share of the state that is carried on. Read at the first save that needs it, and kept:
        most components are attached before any save."""
        if self._carried is None and self._source is not None:
            checkpoint = self._source[1]
            names = self._carried_names()
            ranks = self._ranks
            checked = self._verify == "full"
            self._carried = carry(checkpoint, names, rank=ranks.rank, size=ranks.size, checked=checked)
            if ranks.rank == 0:
                logger.info(
                    "saves carry on the state of %s as step %d had it, until they are attached",
                    ", ".join(names),
                    checkpoint.step,
                )
        return self._carried or ()

    def carried_guards(self) -> dict[str, Any]:
        """Return the fingerprints of the frozen bases of what is carried on."""
        return {} if self._source is None else carried_guards(self._source[1], self._carried_names())

    def close(self) -> None:
        """Let the checkpoint of another run that `attach` may have wanted be removed."""
        self._reading.close()

    def _load_one(
        self,
        name: str,
        kind: str,
        components: Mapping[str, Any],
        spare_memory: Callable[[], memoryview | None],
        limit_bytes: int | None,
    ) -> Loaded | NothingToLoad:
        if self._source is None or not self._strategy.takes(name, kind):
            return NothingToLoad()
        catalog, checkpoint = self._source
        if not any(tree.component == name for tree in checkpoint.manifest.trees):
            return NothingToLoad()
        request = LoadRequest(
            Selector("folder", name=checkpoint.folder),
            components,
            replace(self._strategy, only=(name,), skip=()),
            pipeline_stage=self.pipeline_stage,
            verify=self._verify,
            globs_must_match=False,
            spare_memory=spare_memory,
            limit_bytes=limit_bytes,
        )
        return load(request, catalog, self._ranks)

    def _check_new(self, name: str, component: Any) -> str:
        check_component_name(name)
        if name in self.live:
            raise UsageError(f"there is a component '{name}' already")
        components = {**self.live, name: component}
        check_covers(components)
        refuse_same_objects(components)
        refuse_flat_parameters(name, component)
        if isinstance(component, Sharded):
            cuts_of(name, components)
        check_components([name], follow_models(components, pipeline_stage=self.pipeline_stage))
        kind_of(name, component)
        return kind_of(name, unwrap(component))

    def _note_attached(self, name: str) -> None:
        self._awaited = tuple(other for other in self._awaited if other != name)
        if self._carried is not None:
            self._carried = tuple(one for one in self._carried if one.tree.component != name)
        if not self._awaited:
            self._protect_source()

    def _protect_source(self) -> None:
        """Keep the checkpoint, in this run or in another one, as long as `attach` may want it."""
        self.needed.clear()
        self._reading.close()
        if self._source is None or not self._awaited:
            return
        catalog, checkpoint = self._source
        if catalog is self._catalog:
            self.needed.add(checkpoint.digest)
        elif self._ranks.rank == 0:
            self._reading.enter_context(reading(catalog.storage, checkpoint.folder))

    def _carried_names(self) -> Sequence[str]:
        return [name for name in self._awaited if name not in self._not_carried]
