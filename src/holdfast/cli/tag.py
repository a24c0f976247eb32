"""`holdfast tag`: give a checkpoint a tag, or take one back. Writes a note, for which no lease is needed. No torch."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.cli.output import SOUND, cell, print_json, print_note, stdout
from holdfast.cli.sources import find, open_source, print_rejected
from holdfast.errors import CheckpointNotFoundError, UsageError
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint, Scan
from holdfast.runs.selection import choose
from holdfast.runs.selector import Selector, check_tag


def tag(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A run, a checkpoint, a link, or RUN@SELECTOR.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tag.")],
    select: Annotated[str, typer.Option(metavar="SELECTOR", help="Which checkpoint of the run.")] = "latest",
    remove: Annotated[bool, typer.Option("--remove", help="Take the tag back.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")] = False,
) -> int:
    """Give a checkpoint a tag, or take it back.

    A checkpoint with a tag is found as RUN@NAME and is never pruned. The run may be in training meanwhile.

    A tag has letters, digits, '.', '_' and '-', starts with a letter, and is no word that selectors reserve.

    \b
    Examples:
      holdfast tag runs/tiny@500 release
      holdfast tag runs/tiny@best:val_loss good
      holdfast tag runs/tiny@release release --remove

    \b
    Exit codes:
      0  the checkpoint has the tag, or with --remove has it no more
      1  its manifest is damaged
      2  nothing there, a name that cannot be a tag, or no such tag to take back
    """
    change = _untag if remove else _tag
    catalog, selector = open_source(source, select)
    checkpoint, rejected = find(catalog, selector)
    print_rejected(rejected)
    change(catalog, checkpoint, name)
    scan = catalog.scan()
    changed = _again(checkpoint, scan)
    _warn_of_a_later_one(changed, name, scan)
    if json:
        print_json(_as_json(changed))
    else:
        stdout().print(cell(_sentence(changed)), soft_wrap=True)
    return SOUND


def _tag(catalog: Catalog, checkpoint: Checkpoint, name: str) -> None:
    if check_tag(name) not in checkpoint.tags:
        catalog.annotations.add(checkpoint, tag=name)


def _untag(catalog: Catalog, checkpoint: Checkpoint, name: str) -> None:
    if name not in checkpoint.tags:
        raise UsageError(
            f"{checkpoint.folder} has no tag '{name}'",
            run=catalog.storage.url,
            advice=f"its tags are: {', '.join(checkpoint.tags) or 'none'}",
        )
    catalog.annotations.add(checkpoint, untag=name)


def _again(checkpoint: Checkpoint, scan: Scan) -> Checkpoint:
    """Return the checkpoint as it is now. A running training may have removed it before the tag was there."""
    found = next((one for one in scan.checkpoints if one == checkpoint), None)
    if found is None:
        raise CheckpointNotFoundError(f"{checkpoint.folder} was removed meanwhile", run=checkpoint.storage.url)
    return found


def _warn_of_a_later_one(checkpoint: Checkpoint, name: str, scan: Scan) -> None:
    """Print a note if a later checkpoint has the same tag: a tag selects the latest checkpoint that has it."""
    meant = choose(scan, Selector("tag", name=name))
    if name in checkpoint.tags and meant is not None and meant != checkpoint:
        print_note(f"{meant.folder} has the tag '{name}' too, and is the later one: it is what '{name}' selects")


def _as_json(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "path": checkpoint.path,
        "folder": checkpoint.folder,
        "step": checkpoint.step,
        "digest": checkpoint.digest,
        "tags": list(checkpoint.tags),
    }


def _sentence(checkpoint: Checkpoint) -> str:
    tags = ", ".join(checkpoint.tags)
    return f"{checkpoint.folder}: tagged {tags}" if tags else f"{checkpoint.folder}: no tag"
