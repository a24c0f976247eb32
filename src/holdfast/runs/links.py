"""The links of a run, for people: `latest`, `best` and one for each checkpoint after a template. No code reads them.

Checkpoints enter; the links of the storage are changed. A storage without links is left alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from holdfast.errors import HoldfastError, KeyMissingError, StorageError, UsageError
from holdfast.ondisk import paths
from holdfast.ondisk.manifest import Ranking
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint, numbers_of
from holdfast.runs.link_names import LinkTemplate
from holdfast.runs.selection import best_of
from holdfast.storage.base import Storage, features_of

logger = logging.getLogger("holdfast")

__all__ = ["Links", "point_latest"]

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._=+-]")


class Links:
    """The links of one run. `template`: the names of the links to single checkpoints, None for no such links.
    `ranking`: the metrics that `best` links go by, the first one for `best` itself."""

    def __init__(self, catalog: Catalog, *, template: LinkTemplate | None, ranking: Ranking) -> None:
        self._catalog = catalog
        self._template = template
        self._ranking = ranking
        self._bests: dict[str, Checkpoint] | None = None

    def update(self, kept: Sequence[Checkpoint]) -> None:
        """Create or move the links to these checkpoints, the latest first; remove outdated ones of the same kinds."""
        links = features_of(self._catalog.storage).links
        if links is None:
            return
        self._bests = None
        sound = [checkpoint for checkpoint in kept if not checkpoint.damage]
        bests = self._best(sound)
        wanted = self._wanted(kept, sound, bests)
        try:
            present = links.targets()
            if sound and self._is_new(present.get(paths.LATEST_LINK, ""), kept, sound[0].sequence):
                del wanted[paths.LATEST_LINK]
            for name, target in wanted.items():
                if present.get(name) != target:
                    links.point(name, target)
            for name, target in present.items():
                if name not in wanted and self._is_own(name, target):
                    links.remove(name)
        except StorageError as error:
            logger.warning("the links could not be moved: %s", error)
            return
        self._bests = bests

    def add(self, added: Sequence[Checkpoint], removed: Sequence[Checkpoint]) -> bool:
        """Move the links after checkpoints were added that are later than all others and sound. Return False where all
        that stay have to be known for that. `latest` was moved by the commit."""
        links = features_of(self._catalog.storage).links
        if links is None:
            return True
        known, self._bests = self._bests, None
        if known is None or self._template is not None or any(found in removed for found in known.values()):
            return False
        bests = self._best([*known.values(), *added])
        before = self._best_links(known)
        try:
            for name, target in self._best_links(bests).items():
                if before.get(name) != target:
                    links.point(name, target)
        except StorageError as error:
            logger.warning("the links could not be moved: %s", error)
            return False
        self._bests = bests
        return True

    def remove_dangling(self, closed: Container[str], removed: Container[str]) -> None:
        """Remove links to folders that hold no checkpoint any more, whatever template named them. `closed`: the folders
        of closed attempts; `removed`: those of checkpoints without a manifest, whose bytes may still be there. Not
        before these are gone: until then a link may be a user's."""
        links = features_of(self._catalog.storage).links
        if links is None:
            return
        try:
            for name, target in links.targets().items():
                if paths.parse_folder(name) is not None:
                    continue  # a person put it in the place of a checkpoint
                if paths.parse_folder(target) is None:
                    continue
                if target in removed or self._catalog.is_gone(target, closed):
                    links.remove(name)
        except StorageError as error:
            logger.warning("links that lead nowhere could not be removed: %s", error)

    def _is_new(self, folder: str, kept: Sequence[Checkpoint], sequence: int) -> bool:
        """Return whether a folder holds a checkpoint that was committed after these were listed, by a save that has
        moved `latest` since. sequence: that of the newest sound one among them."""
        if paths.parse_folder(folder) is None or any(found.folder == folder for found in kept):
            return False
        try:
            return self._catalog.read_head(folder).sequence > sequence
        except KeyMissingError:
            return False
        except StorageError:
            return True  # it cannot be read now, and may be: the next cleanup decides
        except HoldfastError:
            return False

    def _wanted(
        self, kept: Sequence[Checkpoint], sound: Sequence[Checkpoint], bests: Mapping[str, Checkpoint]
    ) -> dict[str, str]:
        """Return the names of the links that there shall be, each with its folder. `bests`: by metric."""
        wanted = {paths.LATEST_LINK: sound[0].folder} if sound else {}
        wanted |= self._best_links(bests)
        if self._template is not None:
            wanted |= _named(kept, self._template)
        return wanted

    def _best(self, sound: Sequence[Checkpoint]) -> dict[str, Checkpoint]:
        """Return the best checkpoint by each metric that there is one for."""
        bests = {metric: best_of(sound, metric, mode) for metric, mode in self._ranking}
        return {metric: best for metric, best in bests.items() if best is not None}

    def _best_links(self, bests: Mapping[str, Checkpoint]) -> dict[str, str]:
        """Return `best`, and one link for each metric when there are several, each with its folder."""
        wanted: dict[str, str] = {}
        for metric, best in bests.items():
            wanted.setdefault(paths.BEST_LINK, best.folder)
            if len(self._ranking) > 1:
                wanted[f"{paths.BEST_LINK}-{_NOT_IN_A_NAME.sub('_', metric)}"] = best.folder
        return wanted

    def _is_own(self, name: str, target: str) -> bool:
        """Return whether a link is one that this class makes: of those that lead to a checkpoint only they may go."""
        if paths.parse_folder(target) is None or paths.parse_folder(name) is not None:
            return False
        if name == paths.BEST_LINK or name.startswith(f"{paths.BEST_LINK}-"):
            return True
        return self._template is not None and _matches(self._template, name)


def point_latest(storage: Storage, folder: str) -> None:
    """Move the link `latest` where the storage has links."""
    links = features_of(storage).links
    if links is None:
        return
    try:
        links.point(paths.LATEST_LINK, folder)
    except Exception as error:
        logger.warning("committed, but the link 'latest' could not be moved: %s", error)


def _named(kept: Sequence[Checkpoint], template: LinkTemplate) -> dict[str, str]:
    """Return the links after a template. Where two checkpoints have one name, it leads to the later one."""
    found: dict[str, str] = {}
    for checkpoint in reversed(kept):
        try:
            found[template.format(_values(checkpoint))] = checkpoint.folder
        except (UsageError, HoldfastError) as error:
            logger.debug("no link for step %d: %s", checkpoint.step, error)
    return found


def _matches(template: LinkTemplate, name: str) -> bool:
    try:
        return template.parse(name) is not None
    except UsageError:
        return True  # it can be read in more than one way


def _values(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a link's name may contain: the numbers of a checkpoint, its step and the name of its run."""
    name = checkpoint.storage.url.rstrip("/").rpartition("/")[2]
    return {
        **numbers_of(checkpoint.progress),
        **numbers_of(checkpoint.metrics),
        "step": checkpoint.step,
        "sequence": checkpoint.sequence,
        "name": name,
    }
