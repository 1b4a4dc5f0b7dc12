"""A picture of `bench/speculation.py --json`: speed-up and acceptance length by kind of task.

`python bench/speculation.py --json > speculation.jsonl && python bench/plot_speculation.py speculation.jsonl out.png`
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

OFF, ON = "#9aa5b1", "#1f6feb"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.results.read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(8, 3.6), constrained_layout=True)
    places = range(len(rows))
    axes.bar([x - 0.2 for x in places], [row["tokens_per_second_off"] for row in rows], 0.4, color=OFF, label="off")
    bars = axes.bar([x + 0.2 for x in places], [row["tokens_per_second_on"] for row in rows], 0.4, color=ON, label="on")
    axes.bar_label(bars, [f"{row['speed_up']:.2f}x" for row in rows], fontsize=8, padding=2)
    labels = [f"{row['group']}\n{row['acceptance_length']:.2f} tokens a step" for row in rows]
    axes.set_xticks(list(places), labels, fontsize=7)
    axes.set_ylabel("tokens/s, one stream")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="speculation", frameon=False)
    figure.savefig(arguments.picture, dpi=160)


if __name__ == "__main__":
    main()
