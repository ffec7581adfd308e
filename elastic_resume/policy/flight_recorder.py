"""Read torch's flight recorder, and find the collective that others wait in and one rank has not started.

The recorder numbers the collectives of each process group and backend. All ranks of a group call the same
ones in the same order, so a number means the same call on each of them.

The format is that of ``torch/csrc/distributed/c10d/FlightRecorder.hpp`` in
https://github.com/pytorch/pytorch, which ``torch/distributed/flight_recorder/components/types.py`` reads too.
A process has several recorders: one for each backend, and perhaps more for NCCL.

A dump comes from the script's process, so it may hold anything: an unreadable entry is left out.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from elastic_resume.units import to_printable

MAX_COLLECTIVES = 16  # limit of one rank's pending collectives, oldest first, and of its last ones
MAX_TEXT_CHARS = 100
MAX_NUMBER = 1 << 53
_STARTED, _COMPLETED, _RETIRED = "started", "completed", "retired"
_SIZES_DIFFER = ("scatter", "all_to_all")  # calls whose ranks may give tensors of different sizes


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that a rank has called.

    ``ranks`` are those of a group that is not the default one, if known: groups made by one split have the
    same name. ``state``: with TORCH_NCCL_ENABLE_TIMING=1, NCCL's is "started" when the kernel runs.
    """

    number: int
    name: str
    group: str = ""
    backend: str = ""
    ranks: str = ""
    sizes: str = ""
    is_p2p: bool = False
    state: str = ""

    @property
    def sequence(self) -> tuple[str, str, str, bool]:
        """Return the key of the sequence in which its number counts."""
        return self.backend, self.group, self.ranks, self.is_p2p

    @property
    def call(self) -> tuple[tuple[str, str, str, bool], int, str, str]:
        """Return what is equal on all ranks that take part in it."""
        return self.sequence, self.number, self.name, self.sizes


@dataclass(frozen=True)
class RecordedCollectives:
    """The ``pending`` collectives of one rank, oldest first, and its ``last`` one of each group."""

    pending: tuple[Collective, ...] = ()
    last: tuple[Collective, ...] = ()

    @property
    def newest(self) -> Collective | None:
        """Return the last one of torch's default group, else of the group used last."""
        default = (item for item in self.last if item.group.endswith("(default_pg)"))
        return next(default, self.last[-1] if self.last else None)

    def lacks(self, collective: Collective) -> bool:
        """Return whether this rank uses the group and has not started ``collective``."""
        own = next((item for item in self.last if item.sequence == collective.sequence), None)
        if own is not None and own.number < collective.number:
            return True
        called = [item.state for item in self.pending if item.call == collective.call]
        return collective.state == _STARTED and bool(called) and _STARTED not in called


def find_missing(
    own: RecordedCollectives, pending_by_rank: Mapping[int, Collective]
) -> tuple[Collective, tuple[int, ...]] | None:
    """Find the collective that this rank has not started and most others wait in, and these ranks."""
    lacked = {rank: item for rank, item in pending_by_rank.items() if own.lacks(item)}
    if not lacked:
        return None
    call, _ = Counter(item.call for item in lacked.values()).most_common(1)[0]
    ranks = tuple(rank for rank, item in lacked.items() if item.call == call)
    return lacked[ranks[0]], ranks


def parse_dumps(dumps: object) -> RecordedCollectives | None:
    """Parse one rank's dumps, one for each recorder; None if no recorder has an entry."""
    found = [item for dump in dumps.values() for item in _parse_dump(dump)] if isinstance(dumps, dict) else []
    found.sort(key=itemgetter(0))
    pending: dict[tuple[str, str, str, bool], list[tuple[int, Collective]]] = {}
    last: dict[tuple[str, str, str, bool], Collective] = {}
    for called_at_ns, item in found:
        last.pop(item.sequence, None)
        last[item.sequence] = item
        if item.state == _COMPLETED:
            # NCCL retires only the whole of a coalesced call, never its parts, which were recorded before.
            pending.pop(item.sequence, None)
        elif item.state != _RETIRED:
            pending.setdefault(item.sequence, []).append((called_at_ns, item))
    oldest = sorted((pair for pairs in pending.values() for pair in pairs), key=itemgetter(0))
    of_groups = [item for item in last.values() if not item.is_p2p]
    recorded = RecordedCollectives(
        tuple(item for _, item in oldest[:MAX_COLLECTIVES]), tuple(of_groups[-MAX_COLLECTIVES:])
    )
    return recorded if found else None


def _parse_dump(dump: object) -> Iterator[tuple[int, Collective]]:
    entries, groups = (dump.get("entries"), dump.get("pg_config")) if isinstance(dump, dict) else (None, None)
    for entry in entries if isinstance(entries, list) else ():
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
            yield _parse_entry(entry, groups if isinstance(groups, dict) else {})


def _parse_entry(entry: Mapping[str, Any], groups: Mapping[str, Any]) -> tuple[int, Collective]:
    """Return when the collective was called, in nanoseconds, and the collective."""
    backend, _, name = entry["profiling_name"].rpartition(":")
    group, description = entry["process_group"]
    config = groups.get(group) if description != "default_pg" else None
    texts = (
        name,
        group if description in {"", "undefined"} else f"{group} ({description})",
        backend,
        config.get("ranks", "") if isinstance(config, dict) else "",
        "" if name.startswith(_SIZES_DIFFER) else entry.get("input_sizes", ""),
        # gloo's stay "scheduled" when they are retired
        _RETIRED if entry["retired"] and entry["state"] != _COMPLETED else entry["state"],
    )
    name, group, backend, ranks, sizes, state = (to_printable(str(text), MAX_TEXT_CHARS) for text in texts)
    is_p2p = bool(entry.get("is_p2p"))
    number = int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"])
    if not 0 <= number < MAX_NUMBER:
        raise ValueError("a number that torch has not set")
    return int(entry["time_created_ns"]), Collective(
        number, name, group, backend, ranks, sizes, is_p2p, state
    )
