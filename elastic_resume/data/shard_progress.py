"""Assign the shards of an epoch to the loaders' workers, and track how far each worker has read.

A lane is one worker of one rank's loader. A deal assigns each shard to one lane, and a lane reads its shards
one after the other. So the progress after a deal is two numbers for each lane: its finished shards, and the
samples that were read of the next one. A world with the same lanes continues with the same deal, and reads
the same batches. Any other world deals the remaining shards anew, begun shards first.

Shards are named by their place in the epoch's order, which depends on (seed, epoch) only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Entry = tuple[int, int]  # a shard's place in the order, and the samples that were read before the deal
LaneReport = tuple[int, int, int]  # worker, finished shards, samples read of the next one


@dataclass(frozen=True)
class ShardProgress:
    """The progress of all lanes in one epoch.

    Attributes:
        shards: number of shards.
        epoch: number of the epoch.
        finished: a bit for each place whose shard was finished before the deal.
        begun: shards that were begun before the deal and not finished.
        lanes: (finished shards of the lane, samples read of its next one); empty before the first deal.
            Lane ``worker * ranks + rank`` is that of a rank's worker, so that a few shards spread over all
            ranks before a rank gets a second one.
        turns: the worker of each rank whose batch is next.

    """

    shards: int
    epoch: int = 0
    finished: int = 0
    begun: tuple[Entry, ...] = ()
    lanes: tuple[tuple[int, int], ...] = ()
    turns: tuple[int, ...] = ()

    def deal(self) -> list[list[Entry]]:
        """Return the shards of each lane."""
        known = {place for place, _ in self.begun}
        finished = f"{self.finished:b}"[::-1].ljust(self.shards, "0")
        fresh = [(place, 0) for place in range(self.shards) if finished[place] == "0" and place not in known]
        left = [*self.begun, *fresh]
        return [left[lane :: len(self.lanes)] for lane in range(len(self.lanes))]

    def without_lanes(self) -> ShardProgress:
        """Return the same progress without lanes, as ``finished`` and ``begun`` shards only."""
        bits = list(f"{self.finished:b}"[::-1].ljust(self.shards, "0"))
        read = dict(self.begun)
        for entries, (done, samples) in zip(self.deal(), self.lanes, strict=True):
            for place, _ in entries[:done]:
                bits[place] = "1"
                read.pop(place, None)
            if samples:
                read[entries[done][0]] = samples
        finished = int("".join(reversed(bits)), 2)
        return ShardProgress(self.shards, self.epoch, finished, tuple(sorted(read.items())))

    def for_world(self, ranks: int, workers: int) -> ShardProgress:
        """Return the progress for ``ranks * workers`` lanes, dealt again if their number differs."""
        if (len(self.turns), len(self.lanes)) == (ranks, ranks * workers):
            return self
        return replace(self.without_lanes(), lanes=((0, 0),) * (ranks * workers), turns=(0,) * ranks)

    def after(self, reports: Sequence[tuple[int, Sequence[LaneReport]]]) -> ShardProgress:
        """Return the progress after each rank has reported its next worker and its lanes."""
        lanes = list(self.lanes)
        for rank, (_, lane_reports) in enumerate(reports):
            for worker, done, samples in lane_reports:
                lanes[worker * len(self.turns) + rank] = done, samples
        return replace(self, lanes=tuple(lanes), turns=tuple(turn for turn, _ in reports))

    def to_state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint. Most finished shards precede all others in the order."""
        first = (~self.finished & (self.finished + 1)).bit_length() - 1
        return {
            "epoch": self.epoch,
            "finished": [first, self.finished >> first],
            "begun": _to_text(self.begun),
            "lanes": _to_text(self.lanes),
            "turns": list(self.turns),
        }

    @staticmethod
    def parse(state: Mapping[str, Any], shards: int) -> ShardProgress:
        """Parse the result of `to_state`."""
        first, others = state["finished"]
        return ShardProgress(
            shards,
            state["epoch"],
            finished=others << first | (1 << first) - 1,
            begun=_parse_pairs(state["begun"]),
            lanes=_parse_pairs(state["lanes"]),
            turns=tuple(state["turns"]),
        )


def _to_text(pairs: Sequence[Entry]) -> str:
    """Return pairs as one text: a checkpoint stores it much faster than as many numbers."""
    return " ".join(f"{first}:{second}" for first, second in pairs)


def _parse_pairs(text: str) -> tuple[Entry, ...]:
    """Parse the result of `_to_text`."""
    pairs = (pair.split(":") for pair in text.split())
    return tuple((int(first), int(second)) for first, second in pairs)
