"""A picture of `bench/speculation.py --json`: speed-up and tokens a target pass by kind of task.

`python bench/speculation.py --json > speculation.jsonl && python bench/plot_speculation.py speculation.jsonl out.png`
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLOUR = "#1f6feb"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.results.read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(8, 3.2), constrained_layout=True)
    bars = axes.bar(range(len(rows)), [row["speed_up"] for row in rows], 0.6, color=COLOUR)
    axes.bar_label(bars, [f"{row['speed_up']:.2f}x" for row in rows], fontsize=8, padding=2)
    axes.axhline(1, color="black", linewidth=0.8)
    labels = [f"{row['group']}\n{row['acceptance_length']:.2f}" for row in rows]
    axes.set_xticks(range(len(rows)), labels, fontsize=7)
    axes.set_xlabel("task, and tokens a target pass")
    axes.set_ylabel("speed-up, one stream")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(arguments.picture, dpi=160)


if __name__ == "__main__":
    main()
