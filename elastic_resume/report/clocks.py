"""Clocks of nodes that jump or differ, set right.

A wall clock may jump, so each event has CLOCK_BOOTTIME (`b`) beside the wall time (`t`). Within one boot,
CLOCK_BOOTTIME gives the intervals. The boot's wall time is the median of `t - b` (`zeros`, `level`).

Boots of different machines are laid side by side by what must have happened at once (`straighten`).
All nodes of a generation hear of it within milliseconds, and no rank ends a step before all have begun to add
up its gradients: so the marks that nodes leave of the same round or step are simultaneous, and a node whose
marks lie elsewhere, twice in a row, has another clock than most. Its events are moved by the difference, from
there on; a clock that jumps while a job runs is followed.

A process writes one line after the other: where time falls between two of them, or a month goes by, its
node's clock was set there. That parts the log into *stretches*. After such a place the other nodes are
believed; a stretch without a mark that others share is joined to its neighbours, as if no time had passed.

Pure. What is below `VISIBLE_S` is left alone: steps and machines are not that exact, and causes do not hang
on it (`causes`).
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elastic_resume.events import Event, booted, time_of
from elastic_resume.report.text import seconds

VISIBLE_S = 1.0
_ALIKE_S = 0.5  # two differences of one clock
_SILENT_S = 30 * 86400.0  # longer no process that lives says nothing; a clock that begins in 1970 does


@dataclass(frozen=True)
class Clock:
    """A node's clock is ``ahead_s`` seconds before that of most others (negative: behind).

    ``t``: the first mark that shows it, on the clock of the others. ``jumped``: it had been right before.
    ``alone``: only the node's own log shows it, and it is the rest of that log which it is ahead of.
    """

    node: str
    ahead_s: float
    t: float
    jumped: bool
    alone: bool = False

    @property
    def text(self) -> str:
        """Whose clock was off, as a sentence."""
        how = "jumped, and was" if self.jumped else "was"
        off = f"{seconds(abs(self.ahead_s))} {'ahead of' if self.ahead_s > 0 else 'behind'}"
        whom = "the rest of its own log" if self.alone else "the others'"
        return f"the clock of {self.node} {how} {off} {whom}"


def zeros(events: Iterable[Event]) -> dict[str, float]:
    """Return the wall time of each boot, in Unix seconds: the median of `t - b` of its events.

    If a boot has fault events, only they count: the fault injector's own clock does not jump.
    """
    found: dict[str, list[float]] = defaultdict(list)
    of_faults: dict[str, list[float]] = defaultdict(list)
    for event in events:
        t, since = time_of(event), booted(event)
        if t is not None and since is not None:
            (of_faults if event.get("event") == "fault" else found)[since[0]].append(t - since[1])
    return {boot: statistics.median_low(values) for boot, values in {**found, **of_faults}.items()}


def level(events: Iterable[Event], began: Mapping[str, float]) -> tuple[list[Event], tuple[Clock, ...]]:
    """Return the events with times from CLOCK_BOOTTIME, and the clocks that had jumped.

    ``began``: the wall time of each boot, see `zeros`. Events without a boot keep their times. The events of
    a node in one boot are sorted by CLOCK_BOOTTIME.
    """
    made: list[Event] = []
    told: list[tuple[str, Clock]] = []  # each with its boot
    nodes: dict[str, set[str]] = defaultdict(set)  # by boot
    off: dict[tuple[str, str], float] = {}  # each node's clock in each boot, at its last event
    for event in _in_order(list(events)):
        t, since, node = time_of(event), booted(event), event.get("node")
        if t is None or since is None or since[0] not in began:
            made.append(event)
            continue
        boot, straight = since[0], round(since[1] + began[since[0]], 3)
        made.append({**event, "t": straight})
        if not isinstance(node, str) or event.get("event") == "fault":
            continue
        nodes[boot].add(node)
        ahead, before = t - straight, off.get((node, boot))
        if abs(ahead - (before or 0.0)) > VISIBLE_S and abs(ahead) > VISIBLE_S:
            told.append((boot, Clock(node, round(ahead, 3), straight, jumped=before is not None)))
        off[node, boot] = ahead
    return made, tuple(replace(one, alone=len(nodes[boot]) < 2) for boot, one in told)


def _in_order(events: Sequence[Event]) -> list[Event]:
    """Sort the events of each node and boot, within the places that these have among all."""
    places: dict[tuple[str, str], list[int]] = defaultdict(list)
    seconds_of: dict[int, float] = {}
    for place, event in enumerate(events):
        since = booted(event)
        if since is not None:
            places[repr(event.get("node")), since[0]].append(place)
            seconds_of[place] = since[1]
    made = list(events)
    for here in places.values():
        for place, source in zip(here, sorted(here, key=seconds_of.__getitem__), strict=True):
            made[place] = events[source]
    return made


@dataclass(frozen=True)
class _Change:
    """From the event ``index`` on a node's clock is ``ahead`` of the true time; ``t`` is its first there."""

    index: int
    ahead: float
    t: float
    jumped: bool


@dataclass
class _Stretch:
    """Part of a node's log within which no line shows that its clock was set. Times are the clock's own."""

    index: int  # of its first event
    first: float
    last: float
    count: int = 0


_Changes = dict[str, list[_Change]]


def straighten(events: Iterable[Event]) -> tuple[list[Event], tuple[Clock, ...]]:
    """Give the events with times that can be compared, and whose clock was off.

    Events of a node are expected in the order in which it wrote them, as far as that is known.
    """
    listed = list(events)
    stretches = _stretches(listed)
    changes, shared = _by_marks(listed, stretches)
    if changes:
        listed = _moved(listed, changes)
        stretches = _stretches(listed)
    rest = {node: _joined(parts, shared.get(node, ())) for node, parts in stretches.items() if len(parts) > 1}
    told = [
        Clock(node, round(one.ahead, 3), round(one.t - one.ahead, 3), one.jumped, alone)
        for of_nodes, alone in ((changes, False), (rest, True))
        for node, found in of_nodes.items()
        for one in found
        if abs(one.ahead) > VISIBLE_S
    ]
    return _moved(listed, rest) if rest else listed, tuple(sorted(told, key=lambda clock: clock.t))


def _moved(listed: Sequence[Event], changes: _Changes) -> list[Event]:
    left = {node: list(found) for node, found in changes.items()}
    ahead_of: dict[str, float] = {}
    moved = []
    for index, event in enumerate(listed):
        node = event.get("node")
        if not isinstance(node, str) or node not in left or event.get("event") == "fault":
            moved.append(event)
            continue
        while left[node] and left[node][0].index <= index:
            ahead_of[node] = left[node].pop(0).ahead
        off, t = ahead_of.get(node, 0.0), time_of(event)
        moved.append({**event, "t": round(t - off, 3)} if off and t is not None else event)
    return moved


# ---- what a node's own log tells -----------------------------------------------------------------------


def _stretches(events: Sequence[Event]) -> dict[str, list[_Stretch]]:
    """Each node's log, parted where its clock was set.

    Lines of different processes may be late (a disk refused them), those of one keep their order.
    """
    found: dict[str, list[_Stretch]] = defaultdict(list)
    newest: dict[str, dict[object, float]] = defaultdict(dict)
    for index, event in enumerate(events):
        t, node, pid = time_of(event), event.get("node"), event.get("pid")
        if t is None or not isinstance(node, str) or type(pid) is not int or event.get("event") == "fault":
            continue
        here, is_new = newest[node], event.get("event") == "agent-start"
        before = max(here.values(), default=t) if is_new else here.get(pid, t)
        was_set = t < before - VISIBLE_S
        if not is_new and t > before + _SILENT_S:  # and nobody else of that agent's life spoke meanwhile
            was_set = t > max(here.values()) + _SILENT_S
        if was_set or not found[node]:
            found[node].append(_Stretch(index, t, t))
        if was_set or is_new:
            here.clear()
        here[pid] = t
        one = found[node][-1]
        one.first, one.last, one.count = min(one.first, t), max(one.last, t), one.count + 1
    return found


def _joined(parts: Sequence[_Stretch], shared: Sequence[int]) -> list[_Change]:
    """Stretches without a mark among those ``shared`` are moved to where their neighbours end, or begin.

    Where none has such a mark, the longest is right.
    """
    begins = [one.index for one in parts]
    anchors = {_place(begins, index) for index in shared}
    anchors = anchors or {max(range(len(parts)), key=lambda place: parts[place].count)}
    ahead = dict.fromkeys(anchors, 0.0)
    for place in range(min(anchors) - 1, -1, -1):
        ahead[place] = ahead[place + 1] + parts[place].last - parts[place + 1].first
    for place in range(min(anchors) + 1, len(parts)):
        if place not in anchors:
            ahead[place] = ahead[place - 1] + parts[place].first - parts[place - 1].last
    return [
        _Change(one.index, ahead[place], one.first, jumped=place > min(anchors))
        for place, one in enumerate(parts)
    ]


def _place(begins: Sequence[int], index: int) -> int:
    """In which stretch an event is."""
    return max(0, bisect.bisect_right(begins, index) - 1)


# ---- what the others tell ------------------------------------------------------------------------------


def _by_marks(
    events: Sequence[Event], stretches: Mapping[str, Sequence[_Stretch]]
) -> tuple[_Changes, dict[str, list[int]]]:
    """Changes of each node's clock by the marks that it shares with others, and where those are."""
    begins = {node: [one.index for one in parts] for node, parts in stretches.items()}
    marks: dict[tuple[int, int], dict[str, tuple[int, float]]] = defaultdict(dict)
    for index, event in enumerate(events):
        key, t, node = _key(event), time_of(event), event.get("node")
        if key is not None and t is not None and isinstance(node, str):
            marks[key].setdefault(node, (index, t))
    ahead: dict[str, float] = {}  # of each node whose marks have been seen
    suspected: dict[str, tuple[int, float, float]] = {}
    changes: _Changes = defaultdict(list)
    marked: dict[str, int] = {}  # the stretch of the last one
    shared: dict[str, list[int]] = defaultdict(list)
    for key in sorted(marks):
        here = marks[key]
        if len(here) < 2:
            continue
        place = {node: _place(begins.get(node, []), index) for node, (index, _) in here.items()}
        was_set = {node for node in here if marked.get(node, place[node]) != place[node]}
        believed = [node for node in here if node not in was_set] or list(here)
        corrected = sorted(here[node][1] - ahead.get(node, 0.0) for node in believed)
        most = corrected[(len(corrected) - 1) // 2]
        for node, (index, t) in here.items():
            new = t - most
            marked[node] = place[node]
            shared[node].append(index)
            if abs(new - ahead.get(node, 0.0)) <= VISIBLE_S:
                ahead.setdefault(node, 0.0)
                suspected.pop(node, None)
            elif node in was_set:
                one = stretches[node][place[node]]
                changes[node].append(_Change(one.index, new, one.first, jumped=True))
                ahead[node] = new
            elif node in suspected and abs(suspected[node][1] - new) <= _ALIKE_S:
                first, _, since = suspected.pop(node)
                jumped = node in ahead
                began = stretches[node][place[node]].index if stretches.get(node) else 0
                changes[node].append(_Change(first if jumped else began, new, since, jumped))
                ahead[node] = new
            else:
                suspected[node] = (index, new, t)
    return changes, shared


def _key(event: Event) -> tuple[int, int] | None:
    """What an event marks, if that happens on all nodes at once; a round before its steps."""
    generation, step = event.get("generation"), event.get("step")
    if type(generation) is not int:
        return None
    if event.get("event") == "round":
        return (generation, -1)
    return (generation, step) if event.get("event") == "step" and type(step) is int else None
