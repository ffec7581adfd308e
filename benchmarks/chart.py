"""Draw the recovery times that `benchmarks/recovery.py --json` measured, for light and for dark pages.

    cd benchmarks
    python recovery.py --only ours,tuned,torchft --kills 5 --give-up 30 --json ../docs/_static/recovery.json
    python chart.py ../docs/_static/recovery.json ../docs/_static

A bar is a median and each dot is one kill. A cross means that no kill was survived. Needs
`pip install 'elastic-resume[bench]'`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

# Narrow enough for the text to be readable on a phone.
WIDTH_INCHES, HEIGHT_INCHES = 4.6, 5.4
ROWS = {"worker": "Kill a worker", "node": "Kill a node", "host": "Kill the node that hosts the rendezvous"}
NAMES = {"ours": "elastic_resume", "torchft": "torchft", "tuned": "torchrun, tuned"}
NEVER = {"torchft": "no step while its lighthouse is away", "tuned": "never: all agents end"}
# Contrast of text to a white or a nearly black page is at least 4.5.
THEMES = {
    "light": {
        "ours": "#0969da",
        "other": "#afb8c1",
        "text": "#1f2328",
        "dim": "#59636e",
        "failed": "#cf222e",
    },
    "dark": {"ours": "#4493f8", "other": "#545d68", "text": "#f0f6fc", "dim": "#9198a1", "failed": "#f85149"},
}


def draw(result: dict[str, Any], theme: dict[str, str]) -> Figure:
    """Draw one group of bars for each kind of kill, one bar for each system."""
    rows = {(row["killed"], row["system"]): row for row in result["rows"]}
    longest = max(row["step"]["worst"] or 0.0 for row in result["rows"])
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES))
    axes = figure.subplots()
    y, ticks = 0.0, {}
    for killed, title in ROWS.items():
        axes.text(0, y, title, va="center", size=10.5, weight="bold", color=theme["text"])
        for system, name in NAMES.items():
            y += 1
            ticks[y] = name
            row, color = rows[killed, system], theme["ours" if system == "ours" else "other"]
            seconds = [incident["step"] for incident in row["incidents"] if incident["step"] is not None]
            if seconds:
                median = row["step"]["median"]
                axes.barh(y, median, 0.75, color=color)
                axes.plot(seconds, [y] * len(seconds), "o", ms=3, color=theme["text"], alpha=0.55)
                axes.text(longest * 1.24, y, f"{median:.1f} s", ha="right", va="center", color=theme["text"])
            else:
                axes.plot([0.15], [y], "x", ms=6, mew=2, color=theme["failed"])
                axes.text(0.35, y, NEVER[system], va="center", size=9.5, color=theme["text"])
        y += 1.4
    facts = result["machine"]
    axes.set_yticks(list(ticks), list(ticks.values()), size=9.5)
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.25)
    axes.set_xticks(range(0, int(longest) + 1, 2))
    axes.tick_params(length=0, labelcolor=theme["text"])
    figure.supxlabel(
        "seconds from SIGKILL to the next training step\n"
        "bars and figures: median; dots: each kill\n"
        f"three nodes on {facts['cores']} cores ({facts['processor']}), a small DDP model on gloo,\n"
        f"torch {facts['torch'].partition('+')[0]}, torchft {facts['torchft']}; torchrun with tuned timeouts",
        size=9,
        color=theme["dim"],
    )
    axes.spines[:].set_visible(False)
    axes.xaxis.grid(visible=True, color=theme["dim"], alpha=0.2)
    axes.set_axisbelow(True)
    figure.tight_layout()
    return figure


def main() -> None:
    """Write recovery-light.svg and recovery-dark.svg."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="JSON of benchmarks/recovery.py")
    parser.add_argument("directory", type=Path, help="where to write the pictures")
    options = parser.parse_args()
    # The same figures give the same bytes: no date, and no random ids.
    mpl.rcParams["svg.hashsalt"] = "elastic_resume"
    mpl.rcParams["font.family"] = ["DejaVu Sans"]
    for name, theme in THEMES.items():
        figure = draw(json.loads(options.result.read_text()), theme)
        path = options.directory / f"recovery-{name}.svg"
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
