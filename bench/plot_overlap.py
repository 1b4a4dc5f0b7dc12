"""A picture of traces of `sonar bench overlap`: a panel each, the host's and the planner's lane over the device's.

`sonar bench overlap --schedule mtp --trace mtp.json && python bench/plot_overlap.py out.png "title=mtp.json" ...`
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

LANES = ("device", "planner", "host")  # from below
COLOURS = {
    "propose": "#f2a33a",
    "verify": "#1f6feb",
    "ingest": "#2da44e",
    "plan": "#8250df",
    "commit": "#cf222e",
    "load": "#9a6700",
    "fetch": "#57606a",
    "wait": "#e6e8eb",
}
SHOWN_STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path)
    parser.add_argument("traces", nargs="+", metavar="TITLE=FILE", help="one panel each")
    arguments = parser.parse_args()
    num_panels = len(arguments.traces)
    figure, panels = pyplot.subplots(
        num_panels, figsize=(10, 1.9 * num_panels + 0.6), constrained_layout=True, squeeze=False, sharex=True
    )
    for axes, trace in zip(panels[:, 0], arguments.traces, strict=True):
        title, _, path = trace.partition("=")
        draw(axes, title, json.loads(Path(path).read_text())["traceEvents"])
    panels[-1, 0].set_xlabel("milliseconds")
    bars = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(bars, COLOURS, loc="outside upper center", ncols=len(COLOURS), fontsize=8, frameon=False)
    figure.savefig(arguments.picture, dpi=160)


def draw(axes: Axes, title: str, events: list[dict[str, Any]]) -> None:
    """`SHOWN_STEPS` steps from the first kernel of the second traced step on."""
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    first_step = min(span["args"]["step"] for span in spans) + 1
    kernels = [span for span in spans if lanes[span["tid"]] == "device"]
    starts = {
        step: min(k["ts"] for k in kernels if k["args"]["step"] == step)
        for step in range(first_step, first_step + SHOWN_STEPS + 1)
    }
    begin, end = starts[first_step], starts[first_step + SHOWN_STEPS]
    for span in spans:
        if span["ts"] + span["dur"] < begin or span["ts"] > end:
            continue
        left, width = (span["ts"] - begin) / 1e3, span["dur"] / 1e3
        at = LANES.index(lanes[span["tid"]])
        axes.barh(at, width, 0.7, left=left, color=COLOURS[span["name"]], edgecolor="white", linewidth=0.5)
    axes.set_xlim(0, (end - begin) / 1e3)
    axes.set_yticks(range(len(LANES)), LANES)
    axes.set_title(title, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
