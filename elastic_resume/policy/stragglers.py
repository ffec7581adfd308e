"""Who is slow: what nodes tell of their ranks' own time of a step in, stragglers out. Pure.

In data-parallel training all ranks take equally long for a step, since the others wait in the all-reduce.
What tells them apart is what a rank does by itself between two steps, waiting for nobody (`worker.own_time`).

A rank is slow when that takes it `TIMES` as long as it takes most ranks, and longer by `LEAST_S` and by
`SHARE` of the whole step; in `LOOKS` looks one after the other, each at a mean of `STEPS` steps or more that
the one before had not. One slow batch, a garbage collection, an evaluation by rank 0 alone are one look. What
most take is the lower median of all ranks: of two the slower one can be named, and where the larger part is
slow that is usual.

A node tells of its slowest rank, and what its others take: so what is told and compared grows with the number
of nodes and not of ranks, and of two slow ranks of a node with many the slower one is named first. While one
is told no other of its node is. It is over too when its node tells nothing any more, and with its generation.

Does not know pulses or boards, nor why a rank is slow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

TIMES = 1.5
LEAST_S = 0.02
"""Below that it is the scheduling of a machine that has more to do than processors."""
SHARE = 0.1
STEPS = 4
"""Sequences of different length make a rank slow for a step or two, and lucky ones make it seem so."""
LOOKS = 6
"""About a second each, or `STEPS` where these take longer. It is over after as many. Of ranks whose batches
differ at random (lognormal, sigma 0.5) nobody was named in 200,000 steps, at 0.7 somebody each 40,000. Of two
ranks on a machine that has more to do than processors one took half as long again in a tenth of the looks."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What one node tells: its slowest rank, what a step takes that by itself, and its other ranks mostly."""

    generation: int
    step: int
    ranks: int
    slowest: int
    own_s: float
    rest_s: float | None = None


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slow, or was; ``rank`` None: a node of several that are. Times are of one step.

    ``steps`` it has been slow for, up to ``step``, and ``cost_s``, that they took longer for it. ``own_s`` is
    the newest, and when it is over the mean.
    """

    node: str
    rank: int | None
    generation: int
    step: int
    own_s: float
    others_s: float
    steps: int
    cost_s: float
    is_over: bool = False


@dataclass(slots=True)
class _Trace:
    """What was seen of one node in this generation. ``looks``: how many in a row differ from what is told."""

    step: int
    at: float
    looks: int = 0
    now: Straggler | None = None
    told: bool = False


class Stragglers:
    """Those of a job, as far as whoever asks hears of it."""

    def __init__(self) -> None:
        self._generation = 0
        self._traces: dict[str, _Trace] = {}

    @property
    def slow(self) -> list[Straggler]:
        """Those that are slow now, by node."""
        return [one.now for _, one in sorted(self._traces.items()) if one.told and one.now is not None]

    def take(self, paces: Mapping[str, Pace], now: float) -> list[Straggler]:
        """Take in what all nodes have told last; give those that have become slow, or are so no more.

        ``now``: seconds of any clock. A new generation begins anew: who has just resumed is not slow, and
        what was told of the one before has ended with it.
        """
        generation = max((one.generation for one in paces.values()), default=self._generation)
        news: list[Straggler | None] = []
        if generation != self._generation:
            news += [_over(one) for one in self.slow]
            self._generation = generation
            self._traces.clear()
        running = {name: one for name, one in paces.items() if one.generation == generation}
        usual_s = usual(running.values())
        news += [self._look(name, one, usual_s, now) for name, one in running.items()]
        news += [_calm(one) for name, one in self._traces.items() if name not in running]  # tells no more
        return [one for one in news if one is not None]

    def _look(self, node: str, pace: Pace, usual_s: float, now: float) -> Straggler | None:
        """Look at one node; what is to be told of it, if anything is."""
        trace = self._traces.setdefault(node, _Trace(pace.step, now))
        steps = pace.step - trace.step
        if steps < STEPS:
            return None
        step_s = (now - trace.at) / steps
        trace.step, trace.at = pace.step, now
        if not is_slow(pace.own_s, usual_s, step_s):
            return _calm(trace)
        whole = pace.rest_s is not None and is_slow(pace.rest_s, usual_s, step_s)
        found = Straggler(
            node=node,
            rank=None if whole else pace.slowest,
            generation=pace.generation,
            step=pace.step,
            own_s=pace.own_s,
            others_s=usual_s,
            steps=steps,
            cost_s=(pace.own_s - usual_s) * steps,
        )
        was = trace.now
        goes_on = was is not None and (trace.told or was.rank == found.rank)
        if was is not None and goes_on:
            # Who was told stays it, though another is slower for a while: the end must be told of the same.
            found = replace(found, rank=was.rank, steps=was.steps + steps, cost_s=was.cost_s + found.cost_s)
        trace.now = found
        trace.looks = 0 if trace.told else trace.looks + 1 if goes_on else 1
        if trace.looks < LOOKS:
            return None
        trace.looks, trace.told = 0, True
        return found


def _calm(trace: _Trace) -> Straggler | None:
    """Count a look at which a node was not slow, or told nothing; give the end of what was told, if it is."""
    trace.looks = trace.looks + 1 if trace.told else 0
    if trace.told and trace.looks < LOOKS:
        return None
    over = _over(trace.now) if trace.told and trace.now is not None else None
    trace.looks, trace.now, trace.told = 0, None, False
    return over


def _over(one: Straggler) -> Straggler:
    return replace(one, own_s=one.others_s + one.cost_s / one.steps, is_over=True)


def usual(paces: Collection[Pace]) -> float:
    """What a step takes most ranks by themselves: the lower median; 0 where there are none."""
    told = [(one.own_s, 1) for one in paces]
    told += [(one.rest_s, one.ranks - 1) for one in paces if one.rest_s is not None]
    told.sort()
    half, count = sum(weight for _, weight in told) / 2, 0
    for own_s, weight in told:
        count += weight
        if count >= half:
            return own_s
    return 0.0


def is_slow(own_s: float, usual_s: float, step_s: float) -> bool:
    """Whether a rank that takes so long by itself is one that others wait for; ``step_s`` is a whole step."""
    return own_s >= TIMES * usual_s and own_s - usual_s >= max(LEAST_S, SHARE * step_s)


def describe(rank: int | None, node: str, own_s: float, others_s: float) -> str:
    """Say it in words; without ``node`` where that stands beside it."""
    where = f" on {node}" if node else ""
    who = f"all ranks{where} are slow" if rank is None else f"rank {rank}{where} is slow"
    return f"{who}: {own_s:.2g} s of its own per step, others {others_s:.2g} s"
