"""One picture of the tables: time in the call, to committed, and training time lost, the CPU and the GPU apart."""

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
COLUMNS = (("call", "time in the call"), ("durable", "from save() to committed"), ("lost", "training time lost"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    folder = parser.parse_args().results
    rows = [row for row in (cpu_row(folder), gpu_row(folder)) if row is not None]
    if not rows:
        raise SystemExit(f"there are no results to draw in {folder}; run the benchmarks first")
    # Text stays text: the picture is small, and a reader can search it.
    plt.rcParams.update({"svg.fonttype": "none", "font.size": 8, "svg.hashsalt": "holdfast"})
    figure = plt.figure(figsize=(17, 3.8 * len(rows)), layout="constrained")
    for part, (title, series) in zip(figure.subfigures(len(rows), squeeze=False).flat, rows, strict=True):
        part.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        for axis, (key, meaning) in zip(part.subplots(1, len(COLUMNS)), COLUMNS, strict=True):
            draw(axis, meaning, series[key])
    figure.savefig(folder / "saves.svg", metadata={"Date": None})


Bars = dict[str, tuple[str, float]]
Row = tuple[str, dict[str, Bars]]


def cpu_row(folder: Path) -> Row | None:
    saves, losses = load(folder / "async-save.json").get("gpt"), load(folder / "lost-time.json").get("losses", {})
    if not saves:
        return None
    return "CPU, a GPT with AdamW", {
        "call": calls(saves),
        "durable": bars(saves, "durable"),
        "lost": bars(losses, "lost"),
    }


def gpu_row(folder: Path) -> Row | None:
    found = load(folder / "gpu-save.json")
    losses = found.get("losses")
    if not losses:
        return None
    return f"GPU, {found['size_bytes'] / 2**30:.1f} GiB", {
        "call": calls(losses),
        "durable": bars(losses, "durable"),
        "lost": bars(losses, "lost"),
    }


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


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
    axis.set_title(title, loc="left", fontsize=9)
    axis.margins(x=0.18)
    axis.set_xlabel("seconds, median")
    axis.spines[["top", "right"]].set_visible(False)


def label(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if abs(seconds) < 0.1 else f"{seconds:.2f} s"


if __name__ == "__main__":
    main()
