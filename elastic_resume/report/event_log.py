"""Events of a run, made safe to reason about: typed, in order of time, each with its generation.

Promise: nothing in a log makes this raise. A field of a wrong type counts as absent, an event without a
usable time is left out, and kinds that this version does not know are kept but give no generation.

Does not know what ended a generation (`incidents`), nor where events come from: they are arguments.
Times are of many nodes' clocks; the order of events of different nodes is only as good as those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_resume.events import Event, count_of, time_of

# What tells that a generation was there. A number in any other kind of event proves nothing.
OF_A_GENERATION = frozenset(
    {"resume", "worker-start", "step", "commit", "commit-failed", "busy", "failure", "run-end", "worker-exit"}
)


@dataclass(frozen=True)
class Seen:
    """One event whose common fields are of the right type or None; ``raw`` holds the rest."""

    t: float
    kind: str
    node: str
    generation: int | None
    rank: int | None
    step: int | None
    pid: int | None
    raw: Mapping[str, Any] = field(repr=False)

    def count(self, name: str) -> int | None:
        """Return the field ``name`` if it is a count."""
        return count_of(self.raw, name)

    def seconds(self, name: str) -> float | None:
        """Return the field ``name`` if it is a duration."""
        value = time_of(self.raw, name)
        return value if value is not None and value >= 0 else None

    def text(self, name: str) -> str:
        """Return the field ``name`` if it is text, else nothing."""
        return _text(self.raw, name)

    def names(self, name: str) -> tuple[str, ...]:
        """Return the texts in the list ``name``."""
        value = self.raw.get(name)
        return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()

    @property
    def at_fault(self) -> bool:
        """Of a worker's exit: whether it ended otherwise than well."""
        return bool(self.text("signal") or self.count("exit_code"))


@dataclass(frozen=True)
class Timeline:
    """Everything seen, by time; and the same by generation, by node and by kind."""

    seen: tuple[Seen, ...]
    generations: Mapping[int, tuple[Seen, ...]]
    nodes: Mapping[str, tuple[Seen, ...]]
    kinds: Mapping[str, tuple[Seen, ...]]

    def of_kind(self, *names: str) -> list[Seen]:
        """All events of these kinds, by time."""
        found = [one for name in names for one in self.kinds.get(name, ())]
        return sorted(found, key=lambda one: one.t) if len(names) > 1 else found


def build(events: Iterable[Event]) -> Timeline:
    """Sort ``events`` by time, type their fields and find the generation of each worker's exit."""
    seen = [one for one in map(_parse, events) if one is not None]
    seen.sort(key=lambda one: one.t)  # stable: lines of one file stay in order
    seen = _with_generations(seen)
    by_generation: dict[int, list[Seen]] = defaultdict(list)
    by_node: dict[str, list[Seen]] = defaultdict(list)
    by_kind: dict[str, list[Seen]] = defaultdict(list)
    for one in seen:
        by_node[one.node].append(one)
        by_kind[one.kind].append(one)
        if one.generation is not None and one.kind in OF_A_GENERATION:
            by_generation[one.generation].append(one)
    return Timeline(
        seen=tuple(seen),
        generations={number: tuple(by_generation[number]) for number in sorted(by_generation)},
        nodes={name: tuple(found) for name, found in by_node.items()},
        kinds={name: tuple(found) for name, found in by_kind.items()},
    )


def _with_generations(seen: list[Seen]) -> list[Seen]:
    """A stub does not know its worker's generation, but the process number it saw end."""
    first: dict[tuple[str, int], int] = {}
    for one in seen:
        if one.pid is not None and one.generation is not None:
            first.setdefault((one.node, one.pid), one.generation)
    newest: dict[tuple[str, int], int] = {}  # the kernel uses process numbers again
    complete = []
    for one in seen:
        if one.pid is not None and one.generation is not None:
            newest[one.node, one.pid] = one.generation
        worker = one.count("worker_pid") if one.kind == "worker-exit" else None
        if worker is not None:
            life = (one.node, worker)
            complete.append(replace(one, generation=newest.get(life, first.get(life)), pid=worker))
        else:
            complete.append(one)
    return complete


def _parse(event: Event) -> Seen | None:
    t, kind = time_of(event), event.get("event")
    if t is None or not isinstance(kind, str):
        return None
    return Seen(
        t=t,
        kind=kind,
        node=_text(event, "node"),
        generation=count_of(event, "generation"),
        rank=count_of(event, "rank"),
        step=count_of(event, "step"),
        pid=count_of(event, "pid"),
        raw=event,
    )


def _text(raw: Mapping[str, Any], name: str) -> str:
    value = raw.get(name)
    return value if isinstance(value, str) else ""
