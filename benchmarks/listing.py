"""How long does it take to list a run of thousands of checkpoints? Real ones, on a disk; Holdfast alone.

A catalog that has read the run before, and one that has not, as a new process has: in both cases the page cache has the
files.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch

import holdfast
from holdfast.runs.catalog import Catalog
from holdfast.storage.registry import open_storage
from measure import arguments, at_most, bars_table, median, show, span, write_results

CHECKPOINTS = 2_000
SMALL_CHECKPOINTS = 50
LAYERS = 20
BAR_SECONDS = 0.5


@dataclass
class Listing:
    """One way to list, and the seconds of each round."""

    name: str
    act: Callable[[], int]
    seconds: list[float] = field(default_factory=list)

    def take(self, *, counts: bool) -> None:
        begin = time.perf_counter()
        self.act()
        if counts:
            self.seconds.append(time.perf_counter() - begin)


def make_run(run: str, count: int) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(LAYERS)])
    with holdfast.CheckpointManager(run, {"model": model}, mode="sync", rng=False, links=False) as manager:
        for step in range(count):
            manager.save(step, metrics={"loss": 1 / (step + 1)})


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(rounds=7)
    given = parser.parse_args()
    run = str(given.folder / "run")
    count = SMALL_CHECKPOINTS if given.small else CHECKPOINTS
    make_run(run, count)
    known = Catalog(open_storage(run))
    listings = [
        Listing("a catalog that has read it before", lambda: len(known.scan().checkpoints)),
        Listing("a catalog that has not", lambda: len(holdfast.checkpoints(run))),
    ]
    for number in range(given.rounds + 1):
        for listing in listings:
            listing.take(counts=number > 0)
    bars = [at_most(f"to list {count:,} checkpoints, {one.name}", median(one.seconds), BAR_SECONDS) for one in listings]
    lines = ["| what | median s | min-max s |", "|---|---:|---:|"]
    lines += [f"| {one.name} | {show(median(one.seconds))} | {span(one.seconds)} |" for one in listings]
    text = f"## Listing a run of {count:,} checkpoints\n\n{bars_table(bars)}\n" + "\n".join(lines) + "\n"
    numbers = {one.name: {key: value for key, value in asdict(one).items() if key == "seconds"} for one in listings}
    write_results("listing", text, numbers, given.results)
    shutil.rmtree(given.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
