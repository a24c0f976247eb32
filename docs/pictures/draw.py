"""Draw the pictures of the README: the demo's losses, the training time lost per save, the packages and their order.

    make demo
    .venv/bin/python docs/pictures/draw.py demo-out

Without the demo's folder the first picture is left as it is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LOST_TIME = ROOT / "benchmarks" / "results" / "lost-time.json"
GREEN, GREY, INK = "#1b7f4d", "#9aa5b1", "#222222"
# Text becomes outlines, so that no reader's fonts can clip it; the same input gives the same bytes.
STYLE = {"svg.fonttype": "path", "svg.hashsalt": "holdfast", "font.size": 10, "savefig.facecolor": "white"}
METADATA = {"Date": None}

WHAT_IT_DOES = {
    "cli": "the command line",
    "integrations": "other people's loops",
    "plugins": "managers named in a config",
    "testing": "fakes and contracts for users",
    "formats": "other people's files",
    "data": "loaders that resume",
    "manager": "CheckpointManager and functions",
    "saving": "capture, plan, files, stage, write, commit",
    "loading": "resolve, match, read, restore",
    "state": "live objects and named tensors",
    "runs": "checkpoints, lease, retention",
    "storage": "the only way to durable bytes",
    "ranks": "the only way to other processes",
    "ondisk": "the format: bytes and values",
    "errors": "the exceptions",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("demo", nargs="?", type=Path, help="the folder that `make demo` left")
    parser.add_argument("--to", type=Path, default=HERE, help="where the pictures go")
    given = parser.parse_args()
    pyplot.rcParams.update(STYLE)
    if given.demo is not None:
        draw_losses(given.demo, given.to / "losses.svg")
    draw_lost_time(json.loads(LOST_TIME.read_text()), given.to / "lost-time.svg")
    draw_packages(given.to / "packages.svg")


def draw_losses(out: Path, target: Path) -> None:
    """Draw the losses that the demo logged, as the demo itself draws them."""
    sys.path.insert(0, str(ROOT / "examples"))
    import demo

    logs = {path.stem: demo.read_losses(path) for path in sorted((out / "losses").glob("*.jsonl"))}
    missing = {"undisturbed", "killed", "resumed"} - set(logs)
    if missing:
        raise SystemExit(f"{out / 'losses'} has no losses of {', '.join(sorted(missing))}; run `make demo` first")
    reference, killed, resumed = (logs.pop(name) for name in ("undisturbed", "killed", "resumed"))
    plan = demo.QUICK if reference.last_step + 1 == demo.QUICK.steps else demo.FULL
    branches = {demo.ranks_text(count): logs[f"ranks-{count}"] for count in plan.branch_ranks}
    demo.draw(target, plan, reference, killed, resumed, branches)


def draw_lost_time(results: dict[str, Any], target: Path) -> None:
    """Draw one bar for each library: the median of the training time that one save costs, call and slower steps."""
    losses = [one for one in results["losses"].values() if one["lost"]]
    losses.sort(key=lambda one: statistics.median(one["lost"]), reverse=True)
    medians = [statistics.median(one["lost"]) for one in losses]
    colours = [GREEN if one["role"] == "holdfast" else GREY for one in losses]
    figure, axes = pyplot.subplots(figsize=(9.5, 3.6), layout="constrained")
    bars = axes.barh([one["name"].replace(", ", ",\n", 1) for one in losses], medians, color=colours)
    spans = [f"{median:.2f} s" for median in medians]
    axes.bar_label(bars, spans, padding=4)
    axes.set_title(
        "Training time lost per save of 1.5 GB: the call, and slower steps after it", loc="left", weight="bold"
    )
    axes.set_xlabel(
        f"seconds, median of {len(losses[0]['lost'])} saves of each in turns on two CPU cores; less is better"
    )
    axes.tick_params(axis="y", labelsize=8)
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, metadata=METADATA)
    pyplot.close(figure)


def draw_packages(target: Path) -> None:
    """Draw the packages in the order of `TIERS`, which the import test keeps, with an arrow for who may import whom."""
    sys.path.insert(0, str(ROOT))
    from tests.architecture.test_imports import TIERS

    rows = [[name for name in WHAT_IT_DOES if name in tier] for tier in TIERS]
    left_out = set().union(*TIERS) - set(WHAT_IT_DOES) - {"_version"}
    if left_out:
        raise SystemExit(f"give {', '.join(sorted(left_out))} a line in WHAT_IT_DOES of {Path(__file__).name}")
    figure, axes = pyplot.subplots(figsize=(9.5, 4.8), layout="constrained")
    axes.set(xlim=(-0.75, 12), ylim=(1.0 - len(rows), 0.95))
    axes.axis("off")
    for number, row in enumerate(rows):
        width = 12 / len(row)
        for place, name in enumerate(row):
            draw_package(axes, place * width, -number, width, name)
    arrow = FancyArrowPatch((-0.4, 0.8), (-0.4, 1.1 - len(rows)), arrowstyle="-|>", mutation_scale=16, color=GREY)
    axes.add_patch(arrow)
    axes.text(-0.65, 1 - len(rows) / 2, "imports go down only", rotation=90, ha="center", va="center", color=INK)
    figure.savefig(target, metadata=METADATA)
    pyplot.close(figure)


def draw_package(axes: Any, left: float, bottom: float, width: float, name: str) -> None:
    pipeline = name in ("saving", "loading")
    box = FancyBboxPatch(
        (left + 0.12, bottom + 0.1),
        width - 0.24,
        0.76,
        boxstyle="round,pad=0,rounding_size=0.12",
        facecolor="#dcefe5" if pipeline else "#eef1f4",
        edgecolor=GREEN if pipeline else GREY,
    )
    axes.add_patch(box)
    middle = left + width / 2
    axes.text(middle, bottom + 0.62, name, ha="center", va="center", weight="bold", color=INK)
    axes.text(middle, bottom + 0.3, WHAT_IT_DOES[name], ha="center", va="center", fontsize=8.5, color=INK)


if __name__ == "__main__":
    main()
