"""Draw the recovery times that `benchmarks/recovery.py --json` measured, for light and for dark pages.

    cd benchmarks
    python recovery.py --only ours,tuned,torchft --kills 5 --give-up 30 --json ../docs/_static/recovery.json
    python chart.py ../docs/_static/recovery.json ../docs/_static

    python recovery.py --setup 20 --only in-process,ours,tuned,torchft --rows worker,node --kills 10 \
        --json ../docs/_static/recovery-slow.json
    python chart.py ../docs/_static/recovery-slow.json ../docs/_static

A bar is a median and each dot is one kill. The pale bar is the second standstill, when the lost worker's
successor comes in later. A cross means that no kill was survived. From a script that starts slowly come the
two timelines of a killed worker too, each of the kill with the median time. Needs
`pip install '.[bench]'`.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

# Narrow enough for the text to be readable on a phone.
WIDTH_INCHES = 4.6
LINE_INCHES, GROUP_INCHES, CAPTION_INCHES = 0.27, 0.5, 1.5
TIMELINE_INCHES = (7.2, 4.4)
BEFORE_S = 2.0  # a timeline shows, before the kill
ROWS = {"worker": "Kill a worker", "node": "Kill a node", "host": "Kill the node that hosts the rendezvous"}
NAMES = {
    "in-process": "in-process",
    "ours": "elastic_resume",
    "torchft": "torchft",
    "torchrun": "torchrun",
    "tuned": "torchrun, tuned",
}
NEVER = {"torchft": "no step while its lighthouse is away", "tuned": "never: all agents end"}
# Contrast of text to a white or a nearly black page is at least 4.5.
THEMES = {
    "light": {
        "ours": "#0969da",
        "other": "#afb8c1",
        "text": "#1f2328",
        "dim": "#59636e",
        "failed": "#cf222e",
        "start": "#d4a72c",
    },
    "dark": {
        "ours": "#4493f8",
        "other": "#545d68",
        "text": "#f0f6fc",
        "dim": "#9198a1",
        "failed": "#f85149",
        "start": "#bb8009",
    },
}
# Of a worker's life: colour, first and last mark, name in the legend.
PHASES = (
    ("start", "born", "built", "imports, and the work above er.resume()"),
    ("other", "built", "step", "resumes"),
    ("ours", "step", "end", "trains"),
)


class Result:
    """What `recovery.py --json` wrote."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.rows = {(row["killed"], row["system"]): row for row in result["rows"]}
        killed, systems = {key[0] for key in self.rows}, {key[1] for key in self.rows}
        self.kills = {name: title for name, title in ROWS.items() if name in killed}
        self.names = {name: title for name, title in NAMES.items() if name in systems}
        if len({"in-process", "ours"} & systems) == 2:
            self.names |= {"ours": "elastic_resume\nrestart", "in-process": "elastic_resume\nin-process"}
        self.setup_s, facts = result.get("setup_s", 0.0), result["machine"]
        self.set_up = (
            f"three nodes on {facts['cores']} cores ({facts['processor']}),\na small DDP model on gloo"
            + f", {self.setup_s:.0f} s of work above er.resume()" * bool(self.setup_s)
            + ",\nand another process takes one core" * result.get("busy_core", False)
        )
        self.versions = (
            f"torch {facts['torch'].partition('+')[0]}"
            + f", torchft {facts.get('torchft')}" * ("torchft" in systems)
            + "; torchrun with tuned timeouts" * ("tuned" in systems)
        )


def seconds(row: dict[str, Any], figure: str, which: str) -> float:
    """Return a figure of a row; 0 where nothing was measured."""
    return row.get(figure, {}).get(which) or 0.0


def draw_bars(result: Result, theme: dict[str, str]) -> Figure:
    """Draw one group of bars for each kind of kill, one bar for each system."""
    longest = max(
        seconds(row, "step", "worst") + seconds(row, "entry", "worst") for row in result.rows.values()
    )
    has_entry = any(seconds(row, "entry", "worst") for row in result.rows.values())
    line_inches = LINE_INCHES * max(1 + name.count("\n") for name in result.names.values())
    height = CAPTION_INCHES + len(result.kills) * (GROUP_INCHES + line_inches * len(result.names))
    figure = Figure(figsize=(WIDTH_INCHES, height))
    axes = figure.subplots()
    axes.set_xlim(0, longest * (1.6 if has_entry else 1.3))
    y, ticks = 0.0, {}
    for killed, title in result.kills.items():
        axes.text(0, y, title, va="center", size=10.5, weight="bold", color=theme["text"])
        for system, name in result.names.items():
            y += 1
            ticks[y] = name
            draw_bar(axes, y, result.rows[killed, system], longest, theme)
        y += 1.4
    axes.set_yticks(list(ticks), list(ticks.values()), size=9.5)
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    finish(axes, theme)
    entry = "pale: the pause when the lost worker's successor comes in\n" if has_entry else ""
    caption = "seconds from SIGKILL to the next training step\nbars and figures: median; dots: each kill\n"
    caption += f"{entry}{result.set_up},\n{result.versions}"
    figure.supxlabel(caption, size=9, color=theme["dim"])
    figure.tight_layout()
    return figure


def draw_bar(axes: Axes, y: float, row: dict[str, Any], longest: float, theme: dict[str, str]) -> None:
    """Draw the median time to the next step, behind it the pause at the entry, and each kill."""
    system = row["system"]
    color = theme["ours" if system in ("ours", "in-process") else "other"]
    kills = [incident["step"] for incident in row["incidents"] if incident["step"] is not None]
    if not kills:
        axes.plot([longest * 0.02], [y], "x", ms=6, mew=2, color=theme["failed"])
        axes.text(longest * 0.05, y, NEVER.get(system, "never"), va="center", size=9.5, color=theme["text"])
        return
    step, entry = seconds(row, "step", "median"), seconds(row, "entry", "median")
    axes.barh(y, entry, 0.75, left=step, color=color, alpha=0.4)
    axes.barh(y, step, 0.75, color=color)
    axes.plot(kills, [y] * len(kills), "o", ms=3, color=theme["text"], alpha=0.55)
    text = f"{step:.1f} + {entry:.1f} s" if entry else f"{step:.1f} s"
    axes.text(axes.get_xlim()[1] * 0.99, y, text, ha="right", va="center", color=theme["text"])


def draw_timelines(result: Result, theme: dict[str, str]) -> Figure:
    """Draw what the workers do after one of them was killed: with a restart, and in-process."""
    figure = Figure(figsize=TIMELINE_INCHES, layout="constrained")
    kills = [drawn_kill(result.rows["worker", system]) for system in ("ours", "in-process")]
    end = 2.0 + max(life["step"] for kill in kills for life in kill["timeline"])
    for axes, name, kill in zip(
        figure.subplots(2, sharex=True), ("Restart", "In-process"), kills, strict=True
    ):
        title = f"{name}: the next step after {kill['step']:.1f} s"
        title += f", and {kill['entry']:.1f} s when the new worker comes in" if kill["entry"] else ""
        axes.set_title(title, loc="left", size=10.5, weight="bold", color=theme["text"])
        nodes = sorted({life["node"] for life in kill["timeline"]}, key=lambda node: node != kill["killed"])
        for y, node in enumerate(nodes):
            lives = [life for life in kill["timeline"] if life["node"] == node]
            draw_lives(axes, y, sorted(lives, key=lambda life: life["step"]), end, theme)
        axes.plot([0.0], [0.0], "X", ms=8, color=theme["failed"], mec=theme["text"], mew=0.5)
        axes.set_yticks(range(len(nodes)), ["killed", *["survivor"] * (len(nodes) - 1)], size=9.5)
        axes.invert_yaxis()
        axes.set_xlim(-BEFORE_S, end)
        finish(axes, theme)
    handles = [Patch(color=theme[color], label=text) for color, _, _, text in PHASES]
    figure.legend(handles=handles, loc="outside upper left", ncols=3, frameon=False, labelcolor=theme["text"])
    axes.set_xlabel(f"seconds since SIGKILL\n{result.set_up}", size=9, color=theme["dim"])
    return figure


def drawn_kill(row: dict[str, Any]) -> dict[str, Any]:
    """Return the kill whose timeline was kept."""
    return next(incident for incident in row["incidents"] if incident["timeline"])


def draw_lives(axes: Axes, y: int, lives: list[dict[str, Any]], end: float, theme: dict[str, str]) -> None:
    """Draw one worker's lives; the last one goes on until the end."""
    for life, following in itertools.zip_longest(lives, lives[1:]):
        spans = [(theme[color], life[first], life[last]) for color, first, last, _ in PHASES]
        if following is None:
            spans[-1] = (theme["ours"], life["step"], end)
        elif following["pid"] == life["pid"]:
            spans.append((theme["other"], life["end"], following["born"]))
        for color, start, stop in spans:
            if stop > start:
                axes.barh(y, stop - start, 0.6, left=start, color=color, ec=color, lw=0.6)  # no seams


def finish(axes: Axes, theme: dict[str, str]) -> None:
    """Leave out the frame, and draw the grid behind the bars."""
    axes.tick_params(length=0, labelcolor=theme["text"])
    axes.spines[:].set_visible(False)
    axes.xaxis.grid(visible=True, color=theme["dim"], alpha=0.2)
    axes.set_axisbelow(True)


def main() -> None:
    """Write RESULT-light.svg and RESULT-dark.svg, and the timelines if both were measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="JSON of benchmarks/recovery.py")
    parser.add_argument("directory", type=Path, help="where to write the pictures")
    options = parser.parse_args()
    # The same figures give the same bytes: no date, and no random ids.
    mpl.rcParams["svg.hashsalt"] = "elastic_resume"
    mpl.rcParams["font.family"] = ["DejaVu Sans"]
    result = Result(json.loads(options.result.read_text()))
    pictures = {options.result.stem: draw_bars}
    if result.setup_s and {("worker", "ours"), ("worker", "in-process")} <= result.rows.keys():
        pictures[f"{options.result.stem}-timelines"] = draw_timelines
    for (name, draw), (theme, colors) in itertools.product(pictures.items(), THEMES.items()):
        path = options.directory / f"{name}-{theme}.svg"
        draw(result, colors).savefig(path, format="svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
