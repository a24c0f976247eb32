"""Turn a training checkpoint of another tool into a Holdfast checkpoint. A source and a run enter; a checkpoint leaves.

Tensors are streamed from the source's files to the run, so that no more than a few pieces of one are in memory. The
parts of the source are found by the other modules of this package.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.errors import KeyMissingError, SaveUncertainError, StorageError, UsageError
from holdfast.formats.attempt import Attempt, begin, facts_of, finish
from holdfast.formats.importing.accelerate_folder import is_accelerate_folder, take_accelerate_folder
from holdfast.formats.importing.lightning import is_lightning, take_lightning
from holdfast.formats.importing.models import Given, Parameters
from holdfast.formats.importing.plain import OTHER, Request, take_apart
from holdfast.formats.importing.records import Training
from holdfast.formats.importing.storing import Stored, stored_parts
from holdfast.formats.importing.trainer_folder import is_trainer_folder, take_trainer_folder
from holdfast.formats.own import is_own_location
from holdfast.formats.registry import open_source
from holdfast.formats.source import Source
from holdfast.loading.resolve import Location
from holdfast.ondisk import paths
from holdfast.ondisk.codec import encode
from holdfast.ondisk.files import PlainFile
from holdfast.ondisk.manifest import BLOCK_BYTES, IMPORT_NOTE, IMPORTED_FROM, UserMetadata
from holdfast.runs.assets import Asset
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.progress import Progress
from holdfast.saving.commit import commit
from holdfast.saving.facts import Listing
from holdfast.saving.files import streamed_files, values_file
from holdfast.saving.messages import Receipt
from holdfast.saving.outcome import discard_files
from holdfast.saving.write import write
from holdfast.storage.registry import open_storage

logger = logging.getLogger("holdfast")

__all__ = ["import_checkpoint", "import_source"]

_ROOM_FOR_RECORDS_BYTES = 1 << 20


def import_checkpoint(
    source: str | os.PathLike[str],
    run: Location,
    *,
    step: int | None = None,
    parameters: Parameters | Mapping[str, Parameters] | None = None,
    components: Mapping[str, str] | None = None,
    skip: Collection[str] = (),
) -> Checkpoint:
    """Commit a training checkpoint of another tool to a run, so that a manager with this run resumes from it.

    Arguments:
        source: a folder of DCP, a file of `torch.save`, a Lightning `.ckpt`, a checkpoint folder of the `transformers`
            Trainer, a folder of Accelerate's `save_state`, or weights alone.
        run: the run, new or not. The checkpoint continues the latest one.
        step: the last step that the checkpoint has done; the manager goes on with the one after it. It may be left out
            where the source counts the steps that are done, as Lightning and the Trainer do: of `n` steps that are
            done, the last is `n - 1`.
        parameters: how the parameters of an optimizer are called whose state goes by number, where the source leaves a
            doubt, as weights that are sorted by name do: the model, or the names in the order of the optimizer. Where
            several models of the source are alike, the component of the one that is meant, or a pair of it and the
            model or the names. For several optimizers, a mapping by component. With the model or without anything,
            the optimizer must have the parameters of each group in the order of the model, unless its groups have
            `param_names`.
        components: the component that a part becomes, by its path in the source. `optim` and similar usual names
            become `model`, `optimizer`, `scheduler`, `loader` without it; any other keeps its own.
        skip: parts of the source to leave out, by their path.

    What was taken, changed and left stands in `Checkpoint.extra["import"]`, and in the log.
    """
    request = Request(dict(components or {}), _checked_skip(skip), _by_component(parameters))
    number = None if step is None else paths.check_step(step)
    if is_own_location(source):
        raise UsageError(
            "the source is a Holdfast run or checkpoint, or a URL",
            file=str(source),
            advice="a manager restores from a checkpoint of Holdfast as it is; other sources are local files, folders",
        )
    path = Path(os.path.expanduser(os.fspath(source)))
    with ExitStack() as closing:
        if is_trainer_folder(path):
            training = take_trainer_folder(path, request, open_source, closing)
        elif is_accelerate_folder(path):
            training = take_accelerate_folder(path, request, open_source, closing)
        else:
            opened = closing.enter_context(open_source(path))
            taken = _take(opened, request)
            training = replace(taken, left=(*taken.left, *_files_beside(path, opened)))
        return _store(training, Catalog(open_storage(run)), number, str(path))


def import_source(source: Source, run: Location, *, step: int | None = None, **options: Any) -> Checkpoint:
    """Commit a source that is open already; `options` are those of `import_checkpoint`. The source stays open."""
    request = Request(
        dict(options.get("components") or {}),
        _checked_skip(options.get("skip", ())),
        _by_component(options.get("parameters")),
    )
    number = None if step is None else paths.check_step(step)
    return _store(_take(source, request), Catalog(open_storage(run)), number, source.location)


def _files_beside(path: Path, source: Source) -> list[str]:
    """Return the files in a folder of DCP that are no part of it, such as those of the program that saved it."""
    if source.format != "dcp" or not path.is_dir():
        return []
    own = {name.partition("/")[0] for name in source.assets}
    names = sorted(entry.name for entry in path.iterdir())
    return [
        f"{name}: not part of the DCP checkpoint"
        for name in names
        if name != ".metadata" and not name.endswith(".distcp") and name not in own
    ]


def _take(source: Source, request: Request) -> Training:
    return take_lightning(source, request) if is_lightning(source.tree) else take_apart(source, request)


def _checked_skip(skip: Collection[str]) -> tuple[str, ...]:
    if isinstance(skip, str):
        raise UsageError(f"skip={skip!r}", advice=f"give a list of parts: skip=({skip!r},)")
    return tuple(skip)


def _by_component(parameters: Parameters | Mapping[str, Parameters] | None) -> dict[str, Given]:
    if parameters is None:
        return {}
    given = parameters if isinstance(parameters, Mapping) else {"": parameters}
    return {component: Given.of(one) for component, one in given.items()}


def _step_of(training: Training, given: int | None, location: str) -> int:
    """Return the last step that is done. A count of steps done is one more; other numbers are not understood as one."""
    if given is not None:
        return given
    if training.steps_done is not None and training.steps_done > 0:
        return paths.check_step(training.steps_done - 1)
    stated = {key: value for key, value in training.progress.items() if "step" in key}
    said = f"; it has {', '.join(f'{key}={value!r}' for key, value in stated.items())}" if stated else ""
    raise UsageError(
        f"the source does not state which step was the last that is done{said:.200}",
        file=location,
        advice="give step=: the manager goes on with the step after it",
    )


def _store(training: Training, catalog: Catalog, given: int | None, location: str) -> Checkpoint:
    """Write and commit. An error or an interrupt before there is a manifest leaves no file of the attempt."""
    if all(part.component == OTHER for part in training.parts):
        raise UsageError(
            "the source has no model, no optimizer and no other state by name",
            file=location,
            advice="import what a training saved as a dict of state dicts",
        )
    step = _step_of(training, given, location)
    stored = stored_parts(training.parts)
    metadata = _metadata(training, location)
    plain = [values_file(paths.SHARED_VALUES, stored.values), *_asset_files(training.assets)]
    size_bytes = stored.size_bytes + sum(file.size_bytes for file in plain)
    _require_room(catalog, size_bytes)
    attempt = begin(catalog, step, training.ranks)
    try:
        with _discarding(attempt, catalog) as created:
            receipt = _write(attempt, stored, plain, size_bytes, catalog, created)
            receipts = [receipt, *(Receipt((), ()) for _ in range(training.ranks - 1))]
            facts = facts_of(attempt, metadata, {IMPORTED_FROM: training.layout})
            checkpoint = commit(facts, Listing(stored.leaves, stored.trees), receipts, catalog)
        finish(checkpoint)
    finally:
        attempt.lease.release()
    _log(training, step)
    return checkpoint


@contextmanager
def _discarding(attempt: Attempt, catalog: Catalog) -> Iterator[list[str]]:
    """Remove the files that the block lists, and the attempt, if it fails and no manifest can name them."""
    created: list[str] = []
    try:
        yield created
    except SaveUncertainError:
        raise
    except BaseException:
        if _has_no_manifest(attempt, catalog):
            discard_files([*created, paths.ATTEMPT], attempt.folder, catalog)
        raise


def _has_no_manifest(attempt: Attempt, catalog: Catalog) -> bool:
    """Return whether it is certain that there is none. One that was taken back counts: a power cut may bring it back,
    and then everything that it names must be there. An interrupt may come right after the commit."""
    try:
        catalog.storage.open(paths.key(attempt.folder, paths.MANIFEST)).close()
    except KeyMissingError:
        return True
    except Exception as error:
        logger.debug("the files of %s stay, its manifest cannot be looked for: %s", attempt.folder, error)
    return False


def _write(
    attempt: Attempt,
    stored: Stored,
    plain: Sequence[PlainFile],
    size_bytes: int,
    catalog: Catalog,
    created: list[str],
) -> Receipt:
    """Write all files, and add the name of each to `created` as soon as it is there."""
    files = streamed_files(stored.sources, rank=0, block_bytes=BLOCK_BYTES)
    with Progress(f"importing step {attempt.step}", size_bytes) as progress:
        return write(attempt.folder, files, plain, catalog.storage, on_bytes=progress.add, on_created=created.append)


def _metadata(training: Training, location: str) -> UserMetadata:
    note = {
        "source": location,
        "layout": training.layout,
        "components": {paths.tree_name(part.component, part.scope): part.origin for part in training.parts},
        "changes": list(training.changes),
        "left": list(training.left),
    }
    return UserMetadata(
        progress={
            key: encode(value, path=f"progress.{key}", on_tensor=None) for key, value in training.progress.items()
        },
        extra={IMPORT_NOTE: encode(note, path=IMPORT_NOTE, on_tensor=None)},
        config=encode(training.config, path="config", on_tensor=None),
        epoch=training.epochs_done,
    )


def _asset_files(assets: Mapping[str, Asset]) -> list[PlainFile]:
    return [
        PlainFile(paths.safe_relative(f"{paths.ASSETS}/{name}"), asset.size_bytes, partial(_pieces_of, asset))
        for name, asset in sorted(assets.items())
    ]


def _pieces_of(asset: Asset) -> Iterator[memoryview]:
    return map(memoryview, asset.pieces())


def _require_room(catalog: Catalog, size_bytes: int) -> None:
    free = catalog.storage.free_bytes()
    needed = size_bytes + _ROOM_FOR_RECORDS_BYTES
    if free is not None and free < needed:
        raise StorageError(
            f"the checkpoint needs {needed / 2**20:,.1f} MiB and {free / 2**20:,.1f} MiB are free",
            errno=errno.ENOSPC,
            run=catalog.storage.url,
            advice="make room, or import to another disk",
        )


def _log(training: Training, step: int) -> None:
    parts = ", ".join(f"{paths.tree_name(part.component, part.scope)} from {part.origin}" for part in training.parts)
    logger.info("imported step %d (%s): %s; training goes on with step %d", step, training.layout, parts, step + 1)
    for text in training.changes:
        logger.info("changed: %s", text)
    for text in training.left:
        logger.info("left: %s", text)
