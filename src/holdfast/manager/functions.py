"""Building blocks for those who need no manager: look at a run, verify it, take and give back state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.errors import CheckpointNotFoundError, UsageError
from holdfast.loading import resolve as resolving
from holdfast.loading.resolve import Location
from holdfast.runs import doctor, verify as verifying
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.claims import Claim
from holdfast.runs.cleanup import Housekeeper
from holdfast.runs.doctor import Finding
from holdfast.runs.lease import Lease, holder
from holdfast.runs.readers import reading
from holdfast.runs.report import Report
from holdfast.runs.retention import Decision, KeepPolicy
from holdfast.runs.selection import first_names, metric_names
from holdfast.runs.selector import Selector
from holdfast.runs.verify import Depth
from holdfast.saving.current import finish_saves


def resolve(run: Location, selector: str | int = "latest") -> Checkpoint:
    """Return the checkpoint that is meant: a run and a selector, or the path of a checkpoint, a manifest or a link."""
    return resolving.resolve(run, selector)


def peek(run: Location, selector: str | int = "latest") -> Checkpoint | None:
    """Return the checkpoint that is meant, or None where `latest` finds nothing. Loads nothing. A save of this process
    to the run that is pending is waited for: it is what `latest` means."""
    catalog, chosen = resolving.locate(run, selector)
    finish_saves(catalog.storage)
    if chosen.kind == "latest" and not catalog.holds_something():
        return None
    return catalog.find(chosen)


def is_restart(run: Location) -> bool:
    """Return whether the run has a checkpoint to resume from. A damaged one counts: such a run must not start
    fresh."""
    catalog, _ = resolving.locate(run)
    return catalog.holds_something()


def checkpoints(run: Location) -> list[Checkpoint]:
    """Return the run's committed checkpoints, the latest first. Loads nothing."""
    catalog, _ = resolving.locate(run)
    return list(catalog.scan().checkpoints)


def verify(
    run: Location,
    selector: str | int = "latest",
    depth: Depth = "full",
    *,
    on_bytes: Callable[[int], None] | None = None,
) -> Report:
    """Check a checkpoint against its manifest and name every damage: file, leaf and byte range."""
    meant = resolving.resolve(run, selector)
    with reading(meant.storage, meant.folder):
        # Again: from here on no process removes it, and before one may have.
        found = Catalog(meant.storage).find(Selector("folder", name=meant.folder))
        return verifying.verify(found, depth, on_bytes=on_bytes)


def retention(run: Location, keep: KeepPolicy) -> list[Decision]:
    """Return what a policy would keep of a run and what it would remove, each with its reasons. Does nothing."""
    keep, catalog = _checked(keep), _whole_run(run)
    _require_metrics(keep, catalog)
    return Housekeeper(catalog, keep=keep).plan()


def prune(run: Location, keep: KeepPolicy) -> list[Decision]:
    """Remove what a policy does not keep, and what abandoned attempts left. Gives what was decided.

    A run that is being trained is a RunInUseError: its own manager prunes it.
    """
    keep, catalog = _checked(keep), _whole_run(run)
    _require_metrics(keep, catalog)
    lease = Lease.acquire(catalog.storage, from_this_process=False, close_attempts=catalog.attempts.close_older)
    try:
        # The links are the training's own, and stay as far as they lead anywhere.
        return Housekeeper(catalog, keep=keep, links=False, may_write=lease.require).clean_up()
    finally:
        lease.release()


def unlock(run: Location, *, force: bool = False) -> Claim | None:
    """Free a run whose writer has ended, and return the claim of that writer, if there was one.

    A process that holds the run and lives is a `RunInUseError`; for one that cannot be seen from here this waits
    for a heartbeat, for the timeout in its claim, at most two minutes. `force` takes the run from a live process: its
    saves fail from then on.
    """
    catalog = _existing_run(run)
    found = holder(catalog.storage)
    if found is not None:
        # To take it and to give it back: what the last holder had begun is closed, so that it cannot commit.
        close = catalog.attempts.close_older
        Lease.acquire(catalog.storage, from_this_process=False, force=force, close_attempts=close).release()
    return found


def examine(run: Location) -> list[Finding]:
    """Return what is damaged, unfinished or left over in a run: records, attempts, marks of readers, links. Changes
    nothing, and reads no tensors; `verify` does."""
    return doctor.examine(_existing_run(run))


def mend(run: Location) -> list[Finding]:
    """Mend the records of a run as far as that is safe, and return every finding, with what was mended. No checkpoint
    is changed. A run that is being trained is a `RunInUseError`."""
    return doctor.mend(_existing_run(run))


def _existing_run(run: Location) -> Catalog:
    catalog, chosen = resolving.locate(run)
    if chosen.kind != "latest":
        raise UsageError(f"'{chosen}' names one checkpoint", advice="give the run alone")
    if not catalog.storage.entries(""):
        raise CheckpointNotFoundError("there is no run", run=catalog.storage.url, advice="check the path")
    return catalog


def _whole_run(run: Location) -> Catalog:
    catalog, chosen = resolving.locate(run)
    if chosen.kind != "latest":
        raise UsageError(f"'{chosen}' names one checkpoint", advice="give the run alone: a policy is about all of it")
    if not catalog.holds_something():
        raise CheckpointNotFoundError("there is no checkpoint", run=catalog.storage.url)
    return catalog


def _checked(keep: object) -> KeepPolicy:
    if not isinstance(keep, KeepPolicy):
        raise UsageError(f"keep={keep!r:.100}", advice="give a policy such as KeepLast(3), or several with |")
    return keep


def _require_metrics(keep: KeepPolicy, catalog: Catalog) -> None:
    """Raise for a metric that no checkpoint has. A manager only warns of it, as it may be reported later. Here the name
    is misspelled, and the checkpoints that should be kept as the best would be deleted."""
    if not keep.metrics:
        return
    known = metric_names([found for found in catalog.scan().checkpoints if not found.damage])
    for metric, _ in keep.metrics:
        if metric not in known:
            raise UsageError(
                f"no checkpoint has the metric '{metric}'",
                run=catalog.storage.url,
                advice=f"there are: {first_names(known) or 'none'}",
            )


def build_train_state(components: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of every component as nested dicts, tensors still the live ones, in the form that is stored."""
    from holdfast.state.names import random_state_last
    from holdfast.state.state_dicts import component_state

    taken = {name: component_state(name, one, components) for name, one in random_state_last(components)}
    return {name: taken[name] for name in components}


def restore_train_state(components: Mapping[str, Any], train_state: Mapping[str, Any]) -> None:
    """Give state that `build_train_state` took back to the components, all of it or, on a mismatch, none of it."""
    from holdfast.state.state_dicts import restore_state

    restore_state(components, train_state)
