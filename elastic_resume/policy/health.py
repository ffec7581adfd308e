"""Whether a rank is hung: looks at its line on the board in, a judgement out. Pure.

A rank is hung when it has finished no step for max(30 s, 10 x the longest step seen in this generation).
What is not judged: the first steps of a generation (compilation, warm-up, the first touch of data), a time
that the script calls busy, what it does after its last step, and any rank while another one of its node is
in one of these, since it may wait for that one.

The agent measures by what it has seen itself: each look adds the time since the last one, and never more
than `LOOK_S`. So a machine that was suspended, an agent that was stopped, a container that was frozen with
all that is in it, or a clock that jumped adds one such piece, and not the time that nobody was running.

Does not know processes or files (`agent/watch.py`), nor who is to blame (`policy/blame.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

LEAST_S = 30.0
TIMES_LONGEST = 10.0
LOOK_S = 1.0
# Between two epochs scripts evaluate, often without saying that they are busy. Ten times as long as a step
# may take is still noticed, and costs nobody the run.
TIMES_BETWEEN_EPOCHS = 10.0
# DDP rebuilds its buckets in the second step, and torch.compile knows dynamic shapes after the second.
CALIBRATION_STEPS = 3
# Of a node that sees only ranks which wait for others: the node of the culprit acts, and these with it. Where
# no node can name one, all of them wait so long; where one is busy and did not tell, it has this long.
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Patience:
    """How long a rank may take. ``threshold_s``: given outright by the user, None for the rule above."""

    threshold_s: float | None = None

    @property
    def calibration_steps(self) -> int:
        """How many steps of a generation are not judged."""
        return CALIBRATION_STEPS if self.threshold_s is None else 1

    def limit_s(self, longest_s: float, *, between_epochs: bool) -> float:
        """Seconds without a step after which a rank is hung."""
        if self.threshold_s is not None:
            return self.threshold_s
        return max(LEAST_S, TIMES_LONGEST * longest_s) * (TIMES_BETWEEN_EPOCHS if between_epochs else 1)

    def for_others_s(self, limit_s: float) -> float:
        """Seconds more that ranks which wait for another node are left alone."""
        return max(PATIENCE_S, limit_s) if self.threshold_s is None else self.threshold_s


@dataclass(frozen=True)
class Look:
    """One look at the line of a living rank.

    ``life`` names the worker and the generation it is in: with another one all begins anew. ``beat`` changes
    with each step, and is 0 where there is nothing to judge by.
    """

    life: tuple[int, ...]
    first_step: int
    step: int
    beat: int
    busy: bool
    between_epochs: bool


@dataclass(frozen=True)
class Pulse:
    """What was seen of one rank: for how long there was no step, and how long the longest took."""

    look: Look
    quiet_s: float = 0.0
    longest_s: float = 0.0

    @property
    def steps(self) -> int:
        """How many steps of this generation were finished."""
        return self.look.step - self.look.first_step

    @property
    def rests(self) -> bool:
        """Whether it has done its last step."""
        return self.look.beat == 0 and self.steps > 0


def observe(pulse: Pulse | None, look: Look, since_s: float) -> Pulse:
    """Take one more look into account; ``since_s`` is the time since the last one."""
    if pulse is None or pulse.look.life != look.life:
        return Pulse(look)
    quiet_s = pulse.quiet_s + min(max(since_s, 0.0), LOOK_S)
    if look.step != pulse.look.step or look.beat != pulse.look.beat:
        is_step = look.step > pulse.look.step and pulse.look.beat != 0 and not pulse.look.busy
        return Pulse(look, 0.0, max(pulse.longest_s, quiet_s) if is_step else pulse.longest_s)
    if look.busy or look.beat == 0:
        return Pulse(look, 0.0, pulse.longest_s)
    return replace(pulse, look=look, quiet_s=quiet_s)


def together(pulses: Mapping[int, Pulse]) -> dict[int, Pulse]:
    """Take into account that ranks of one node wait for one that is busy: nobody's time goes on meanwhile.

    When it ceases to be busy the others have done no step for as long, until it comes to where they wait.
    """
    if not any(pulse.look.busy for pulse in pulses.values()):
        return dict(pulses)
    return {rank: replace(pulse, quiet_s=0.0) for rank, pulse in pulses.items()}


@dataclass(frozen=True)
class Judgement:
    """Which ranks are hung, by local rank, and by which limit.

    ``next_s``: before so many seconds nobody can be found hung.
    """

    hung: tuple[int, ...]
    limit_s: float
    next_s: float


def judge(pulses: Mapping[int, Pulse], patience: Patience) -> Judgement:
    """Say who is hung of the ranks of one node and one generation; ``pulses`` are those of living ones."""
    judged = {
        rank: pulse
        for rank, pulse in pulses.items()
        if pulse.look.beat and pulse.steps >= patience.calibration_steps
    }
    longest_s = max((pulse.longest_s for pulse in pulses.values()), default=0.0)
    between = any(pulse.look.between_epochs for pulse in pulses.values())
    limit_s = patience.limit_s(longest_s, between_epochs=between)
    if not judged or any(_excuses(pulse, patience) for pulse in pulses.values()):
        return Judgement((), limit_s, limit_s)
    hung = tuple(sorted(rank for rank, pulse in judged.items() if pulse.quiet_s >= limit_s))
    next_s = limit_s - max(pulse.quiet_s for pulse in judged.values())
    return Judgement(hung, limit_s, max(next_s, 0.0))


def involved(pulses: Mapping[int, Pulse], judgement: Judgement) -> tuple[int, ...]:
    """Which ranks stand still with those that are hung, if not yet for as long.

    All stop within a step of the first; one that goes on has nothing to do with it.
    """
    return tuple(
        sorted(
            rank
            for rank, pulse in pulses.items()
            if rank in judgement.hung or pulse.rests or pulse.quiet_s >= judgement.limit_s / 2
        )
    )


def _excuses(pulse: Pulse, patience: Patience) -> bool:
    return pulse.look.busy or (not pulse.rests and pulse.steps < patience.calibration_steps)
