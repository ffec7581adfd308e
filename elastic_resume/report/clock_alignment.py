"""Put the events of several machines on one time axis, although wall clocks jump or differ.

Each event has CLOCK_BOOTTIME (``b``) and its boot beside the wall clock (``t``). Within a boot, ``b``
gives every duration. Boots of different machines are aligned by the generations they share: all nodes see
the start of a generation within milliseconds. A boot that shares none keeps its wall clock.
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
    """A node's wall clock that was off by more than `MIN_REPORTED_OFFSET_S`, since ``t``.

    ``ahead_s`` is the greatest offset.
    """

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

    ``boot_times`` is the time of each boot, see `estimate_boot_times`. Events without a boot keep their
    times.
    """
    aligned: list[Event] = []
    offsets: dict[str, ClockOffset] = {}
    for event in events:
        t, boot_time, node = get_seconds(event), get_boot_time(event), event.get("node")
        if t is None or boot_time is None or boot_time[0] not in boot_times:
            aligned.append(event)
            continue
        aligned_t = round(boot_times[boot_time[0]] + boot_time[1], 3)
        aligned.append({**event, "t": aligned_t})
        ahead_s = round(t - aligned_t, 3)
        if isinstance(node, str) and event.get("event") != "fault" and abs(ahead_s) > MIN_REPORTED_OFFSET_S:
            known = offsets.setdefault(node, ClockOffset(node, ahead_s, aligned_t))
            if abs(ahead_s) > abs(known.ahead_s):
                offsets[node] = ClockOffset(node, ahead_s, known.t)
    return aligned, tuple(sorted(offsets.values(), key=lambda clock: clock.t))


def estimate_boot_times(events: Iterable[Event]) -> dict[str, float]:
    """Return the time of each boot in Unix seconds, on one common axis.

    Boots that share a generation, directly or through others, are placed relative to one another. The
    median of their wall clocks then places the group.
    """
    wall_estimates: dict[str, list[float]] = defaultdict(list)
    starts: dict[str, dict[int, float]] = defaultdict(dict)  # seconds boot_time each boot, by generation
    for event in events:
        t, boot_time = get_seconds(event), get_boot_time(event)
        if t is None or boot_time is None:
            continue
        boot, b = boot_time
        wall_estimates[boot].append(t - b)
        generation = get_count(event, "generation")
        if event.get("event") == "round" and generation is not None:
            starts[boot].setdefault(generation, b)
    median_walls = {boot: statistics.median_low(values) for boot, values in wall_estimates.items()}
    boot_times: dict[str, float] = {}
    for seed in sorted(median_walls, key=lambda boot: (-len(starts[boot]), boot)):
        if seed in boot_times:
            continue
        placed = _place_boots(
            seed,
            median_walls[seed],
            {boot: generation_starts for boot, generation_starts in starts.items() if boot not in boot_times},
        )
        shift = statistics.median_low(median_walls[boot] - zero for boot, zero in placed.items())
        boot_times |= {boot: zero + shift for boot, zero in placed.items()}
    return boot_times


def _place_boots(seed: str, zero: float, starts: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Place the boots that share generations with ``seed``, then those that share with these, and so on."""
    placed, newly_placed = {seed: zero}, [seed]
    times: dict[int, float] = {}  # when each generation began
    while newly_placed:
        for boot in newly_placed:
            for generation, b in starts.get(boot, {}).items():
                times.setdefault(generation, placed[boot] + b)
        estimates = {
            boot: [
                times[generation] - b for generation, b in generation_starts.items() if generation in times
            ]
            for boot, generation_starts in starts.items()
            if boot not in placed
        }
        newly_placed = [boot for boot, times_of_boot in estimates.items() if times_of_boot]
        placed |= {boot: statistics.median_low(estimates[boot]) for boot in newly_placed}
    return placed
