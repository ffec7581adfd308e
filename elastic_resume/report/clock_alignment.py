"""One time axis for the events of several machines whose wall clocks jump or differ.

Each event has CLOCK_BOOTTIME (`b`) and the boot it counts from beside the wall clock (`t`). Within a boot `b`
gives every duration. Boots of different machines are laid side by side by the generations they share: all
nodes of a world see its start within milliseconds. A boot that shares none keeps its wall clock.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elastic_resume.events import Event, get_boot_time, get_count, get_seconds
from elastic_resume.report.formatting import format_seconds

MIN_REPORTED_OFFSET_S = 1.0


@dataclass(frozen=True)
class ClockOffset:
    """A node's wall clock that was off by more than `VISIBLE_S`, from ``t`` on; ``ahead_s`` is the most."""

    node: str
    ahead_s: float
    t: float

    @property
    def text(self) -> str:
        """Describe the difference in a sentence without a full stop."""
        off = "ahead" if self.ahead_s > 0 else "behind"
        return f"the clock of {self.node} was up to {format_seconds(abs(self.ahead_s))} {off}"


def align_events(
    events: Iterable[Event], boot_times: Mapping[str, float]
) -> tuple[list[Event], tuple[ClockOffset, ...]]:
    """Return the events with times from CLOCK_BOOTTIME, and the wall clocks that were off.

    ``zeros``: the time at which each boot began, see `boot_times`. Events without a boot keep their times.
    """
    aligned: list[Event] = []
    off: dict[str, ClockOffset] = {}
    for event in events:
        t, since, node = get_seconds(event), get_boot_time(event), event.get("node")
        if t is None or since is None or since[0] not in boot_times:
            aligned.append(event)
            continue
        true = round(boot_times[since[0]] + since[1], 3)
        aligned.append({**event, "t": true})
        ahead = round(t - true, 3)
        if isinstance(node, str) and event.get("event") != "fault" and abs(ahead) > MIN_REPORTED_OFFSET_S:
            known = off.setdefault(node, ClockOffset(node, ahead, true))
            if abs(ahead) > abs(known.ahead_s):
                off[node] = ClockOffset(node, ahead, known.t)
    return aligned, tuple(sorted(off.values(), key=lambda clock: clock.t))


def estimate_boot_times(events: Iterable[Event]) -> dict[str, float]:
    """Return when each boot began, in Unix seconds on an axis common to all of them.

    Boots that share a generation, directly or through others, keep their distances; the median of their wall
    clocks places them.
    """
    walls: dict[str, list[float]] = defaultdict(list)
    starts: dict[str, dict[int, float]] = defaultdict(dict)  # seconds since each boot, by generation
    for event in events:
        t, since = get_seconds(event), get_boot_time(event)
        if t is None or since is None:
            continue
        boot, b = since
        walls[boot].append(t - b)
        generation = get_count(event, "generation")
        if event.get("event") == "round" and generation is not None:
            starts[boot].setdefault(generation, b)
    wall = {boot: statistics.median_low(values) for boot, values in walls.items()}
    zeros: dict[str, float] = {}
    for seed in sorted(wall, key=lambda boot: (-len(starts[boot]), boot)):
        if seed in zeros:
            continue
        joined = _place_boots(
            seed, wall[seed], {boot: own for boot, own in starts.items() if boot not in zeros}
        )
        shift = statistics.median_low(wall[boot] - zero for boot, zero in joined.items())
        zeros |= {boot: zero + shift for boot, zero in joined.items()}
    return zeros


def _place_boots(seed: str, zero: float, starts: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Place the boots that share generations with ``seed``, those that share with these, and so on."""
    placed, new = {seed: zero}, [seed]
    times: dict[int, float] = {}  # when each generation began
    while new:
        for boot in new:
            for generation, b in starts.get(boot, {}).items():
                times.setdefault(generation, placed[boot] + b)
        shared = {
            boot: [times[generation] - b for generation, b in own.items() if generation in times]
            for boot, own in starts.items()
            if boot not in placed
        }
        new = [boot for boot, found in shared.items() if found]
        placed |= {boot: statistics.median_low(shared[boot]) for boot in new}
    return placed
