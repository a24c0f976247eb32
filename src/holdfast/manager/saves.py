"""Turn a call of `save` into a save. The caller's arguments enter on all ranks; the handle of a save leaves.

Knows what a manager stores with every checkpoint; the save itself is the saver's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError, RunInUseError, StorageError, UsageError
from holdfast.manager.annotating import Annotator
from holdfast.manager.arguments import (
    check_epoch,
    checked_links,
    checked_part,
    encoded,
    encoded_config,
    encoded_metrics,
    plain_step,
    refuse_cut_ties,
)
from holdfast.manager.assets import AssetsArgument, check_apart, checked_assets, named_assets
from holdfast.manager.open_run import OpenRun
from holdfast.manager.restores import Resume
from holdfast.manager.results import SaveHandle
from holdfast.ondisk.codec import Json
from holdfast.ondisk.manifest import Ranking, UserMetadata
from holdfast.ondisk.paths import check_step
from holdfast.runs.link_names import LinkTemplate
from holdfast.runs.retention import KeepPolicy
from holdfast.runs.selector import check_tag
from holdfast.saving.request import SaveRequest

logger = logging.getLogger("holdfast")

__all__ = ["SaveArguments", "Saves", "Stored"]


@dataclass(frozen=True, slots=True)
class Stored:
    """What a manager stores with every checkpoint: the encoded configuration, the assets by name, the links that lead
    to it, and the metrics by which `best` is ranked."""

    config: Json
    assets: Mapping[str, Path | bytes]
    links: bool | LinkTemplate
    ranking: Ranking

    @classmethod
    def checked(cls, config: Any, assets: AssetsArgument, links: object, keep: KeepPolicy | None) -> Stored:
        """Return what is stored, from a manager's arguments."""
        ranking = keep.metrics if keep is not None else ()
        return cls(encoded_config(config), checked_assets(assets), checked_links(links), ranking)


@dataclass(frozen=True, kw_only=True)
class SaveArguments:
    """What the caller of one save passes, unchecked: the arguments of `CheckpointManager.save`. `SaveContext` has them,
    too. What becomes a field of the manifest is encoded in `Saves`."""

    metrics: Mapping[str, Any] | None = None
    progress: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] | None = None
    guards: Mapping[str, Any] | None = None
    tag: str | None = None
    epoch: int | None = None
    assets: AssetsArgument | None = None
    resave: bool = False
    components: Sequence[str] | None = None


class Saves:
    """Makes the saves of one manager."""

    def __init__(self, run: OpenRun, stored: Stored, annotator: Annotator, *, resume: Resume) -> None:
        self._may_be_new_line = resume != "never" and run.ranks.rank == 0
        self._run = run
        self._stored = stored
        self._annotator = annotator

    def save(self, step: int, given: SaveArguments) -> SaveHandle:
        """Save on all ranks. A step that the line of the run has is not written; its checkpoint is annotated."""
        step = plain_step(step)
        if given.components is not None:
            return self._save_part(step, given)
        self._warn_of_new_line()
        pending = self._run.saver.save(step, lambda: self._request(step, given))
        self._run.pace.note_save()
        metrics = encoded_metrics(given.metrics) if pending.skipped else {}
        if pending.skipped and not self._annotator.add_to_committed(pending, metrics=metrics, tag=given.tag or ""):
            # Its checkpoint was removed since the leader found it, as by retention.
            pending = self._run.saver.save(step, lambda: self._request(step, replace(given, resave=True)))
        if pending.skipped and (given.progress or given.extra or given.guards) and self._run.ranks.rank == 0:
            logger.warning("step %d was committed before; its progress, extra and guards stay as they are", step)
        if pending.skipped and given.assets and self._run.ranks.rank == 0:
            logger.warning(
                "step %d was committed before, and its assets stay as they are: those of this save are not stored; "
                "resave=True stores them, in a later checkpoint of the step",
                step,
            )
        return SaveHandle(pending, self._run.catalog)

    def _save_part(self, step: int, given: SaveArguments) -> SaveHandle:
        """Save some components anew, as a later checkpoint of the step."""
        # In one order: that of a set is another one in each process.
        listed = sorted(map(repr, given.components)) if isinstance(given.components, Iterable) else ()
        names = f"components {', '.join(listed)}"
        pending = self._run.saver.save_part(step, names, lambda: self._part_request(step, given))
        return SaveHandle(pending, self._run.catalog)

    def _warn_of_new_line(self) -> None:
        """Warn once when a training that has not restored saves to a run with checkpoints: `restore()` was forgotten,
        most likely, and the next one will continue what is saved now."""
        if not self._may_be_new_line:
            return
        self._may_be_new_line = False
        if self._run.saver.lineage.own is not None:
            return
        try:
            found = self._run.catalog.scan().checkpoints
        except StorageError:
            return  # the save meets the same error, and raises it
        if found:
            logger.warning(
                "the run has checkpoints, the latest of step %d, and this training has not restored any: it starts "
                "from the beginning, and `latest` will be what it saves; call restore() first, or pass resume='never'",
                found[0].step,
            )

    def save_and_stop(self, step: int, reasons: Sequence[str], given: SaveArguments) -> None:
        """Save the last step of the training and wait for the commit. Retry once: there is no later save."""
        if self._run.ranks.rank == 0:
            logger.warning("saving step %d and stopping: %s", step, ", ".join(reasons))
        try:
            self.save(step, given).wait()
        except (RunInUseError, UsageError):
            raise
        except HoldfastError as error:
            # It may be the failure of the save before this one, which no call has raised yet.
            logger.error("%s; trying once more", error)
            self._run.pace.note_failure()
            try:
                self.save(step, given).wait()
            except HoldfastError:
                self._run.pace.note_failure()
                raise

    def _request(self, step: int, given: SaveArguments) -> SaveRequest:
        self._run.deferred_rng.require_set()
        self._run.reports.settle()
        epoch = check_epoch(given.epoch) if given.epoch is not None else self._run.pace.epoch
        names = tuple(named_assets(given.assets))
        return SaveRequest(
            step=check_step(step),
            components=self._run.components.live,
            pipeline_stage=self._run.components.pipeline_stage,
            metadata=self._metadata(given, epoch, self._run.components.carried_guards()),
            assets=self._assets(given),
            asset_names=names,
            links=self._stored.links is not False,
            resave=given.resave,
            carried=self._run.components.carried(),
        )

    def _part_request(self, step: int, given: SaveArguments) -> SaveRequest:
        """Return the request for the components that the caller names. What is not given anew is the parent's: its
        assets, its epoch, and the guards of what is carried on."""
        names = checked_part(given.components, resave=given.resave)
        refuse_cut_ties(names, self._run.components.live)
        asset_names = tuple(named_assets(given.assets))
        self._run.reports.settle()
        return SaveRequest(
            step=check_step(step),
            components=self._run.components.live,
            pipeline_stage=self._run.components.pipeline_stage,
            metadata=self._metadata(given, check_epoch(given.epoch), {}),
            assets={name: content for name, content in self._assets(given).items() if name in asset_names},
            asset_names=asset_names,
            links=self._stored.links is not False,
            resave=True,
            only=names,
        )

    def _metadata(self, given: SaveArguments, epoch: int | None, guards: Mapping[str, Any]) -> UserMetadata:
        return UserMetadata(
            metrics=encoded_metrics(given.metrics),
            progress=encoded("progress", given.progress),
            extra=encoded("extra", given.extra),
            config=self._stored.config,
            guards={**encoded("guards", given.guards), **guards},
            tags=() if given.tag is None else (check_tag(given.tag),),
            epoch=epoch,
            ranking=self._stored.ranking,
        )

    def _assets(self, given: SaveArguments) -> Mapping[str, Path | bytes]:
        """Return the assets of the manager and of this save, on rank 0. One that the manager has cannot be replaced."""
        if self._run.ranks.rank != 0:
            return {}
        own, more = self._stored.assets, checked_assets(given.assets)
        for name in more:
            if name in own:
                raise UsageError(
                    f"the save gives the asset '{name}', and the manager stores one of that name with every checkpoint",
                    advice="give one of them another name",
                )
        check_apart({**own, **more})
        return {**own, **more}
