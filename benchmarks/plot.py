"""One picture of the tables: saves and restores against the bare machine and the peers, the CPU and the GPU apart.

A dashed line is the fastest limit of its panel. Axes are logarithmic where the slowest takes more than
thirty times as long as the fastest.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from measure import RESULTS

COLOURS = {"holdfast": "#1b7f5c", "peer": "#8a97a6", "limit": "#d8b24a"}
PANELS = 4
LOGARITHMIC_FROM = 30

Bars = dict[str, tuple[str, float]]
Row = tuple[str, dict[str, Bars]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    folder = parser.parse_args().results
    found = (cpu_saves(folder), cpu_more(folder), gpu(folder))
    rows = [(title, {key: part for key, part in panels.items() if part}) for title, panels in found]
    rows = [(title, panels) for title, panels in rows if panels]
    if not rows:
        raise SystemExit(f"there are no results to draw in {folder}; run the benchmarks first")
    # Text stays text: the picture is small, and a reader can search it.
    plt.rcParams.update({"svg.fonttype": "none", "font.size": 8, "svg.hashsalt": "holdfast"})
    figure = plt.figure(figsize=(6.2 * PANELS, 3.8 * len(rows)), layout="constrained")
    for part, (title, panels) in zip(figure.subfigures(len(rows), squeeze=False).flat, rows, strict=True):
        part.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        axes = part.subplots(1, PANELS)
        for axis, (meaning, series) in zip(axes, panels.items(), strict=False):
            draw(axis, meaning, series)
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
    figure.savefig(folder / "saves.svg", metadata={"Date": None})


def cpu_saves(folder: Path) -> Row:
    saves, sync = load(folder / "async-save.json").get("gpt", {}), load(folder / "sync-save.json").get("gpt", {})
    return "CPU, a GPT with AdamW, saves", {
        "asynchronous save: time in the call": calls(saves),
        "asynchronous save: from save() to committed": bars(saves, "durable"),
        "synchronous save: until durable": bars(sync, "durable"),
        "training time lost per save": bars(load(folder / "lost-time.json").get("losses", {}), "lost"),
    }


def cpu_more(folder: Path) -> Row:
    restores = load(folder / "restore.json")
    each_step = load(folder / "tiny.json").get("each step", {})
    return "CPU, restores, first saves and a tiny model", {
        "restore, files in the page cache": bars(restores.get("warm", {}), "seconds"),
        "restore, files not in the page cache": bars(restores.get("cold", {}), "seconds"),
        "first save of a process: time in the call": bars(load(folder / "first-save.json"), "call"),
        "200 small tensors: from save() to committed": bars(each_step, "durable"),
    }


def gpu(folder: Path) -> Row:
    found, restores = load(folder / "gpu-save.json"), load(folder / "gpu-restore.json").get("readings", {})
    losses = found.get("losses", {})
    title = f"GPU, {found['size_bytes'] / 2**30:.1f} GiB" if found else "GPU"
    return title, {
        "asynchronous save: time in the call": calls(losses),
        "from save() to committed": bars(losses, "durable"),
        "training time lost per save": bars(losses, "lost"),
        "restore": bars({name: {"role": role_of(name), **one} for name, one in restores.items()}, "seconds"),
    }


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def role_of(name: str) -> str:
    return {"raw": "limit", "holdfast": "holdfast"}.get(name.replace(",", " ").split()[0], "peer")


def calls(records: dict[str, Any]) -> Bars:
    """Without the bare disk, which nobody would wait for in a call."""
    return bars({name: one for name, one in records.items() if one["role"] != "limit" or not one["durable"]}, "call")


def bars(records: dict[str, Any], key: str) -> Bars:
    """Median by name, with the role that colours it."""
    return {name: (one["role"], statistics.median(one[key])) for name, one in records.items() if one[key]}


def draw(axis: Any, title: str, series: Bars) -> None:
    names = list(series)[::-1]
    values = [max(series[name][1], 0.0) for name in names]
    drawn = axis.barh(names, values, color=[COLOURS[series[name][0]] for name in names])
    axis.bar_label(drawn, [label(series[name][1]) for name in names], padding=2)
    limits = [value for role, value in series.values() if role == "limit"]
    if limits:
        axis.axvline(min(limits), color=COLOURS["limit"], linestyle="--", linewidth=1)
    axis.set_title(title, loc="left", fontsize=9)
    if min(values) > 0 and max(values) > LOGARITHMIC_FROM * min(values):
        axis.set_xscale("log")
    axis.margins(x=0.18)
    axis.set_xlabel("seconds, median")
    axis.spines[["top", "right"]].set_visible(False)


def label(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if abs(seconds) < 0.1 else f"{seconds:.2f} s"


if __name__ == "__main__":
    main()
