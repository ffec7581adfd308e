"""Whether a rank is hung: looks at its line on the board in, a judgement out. Pure.

A rank is hung when it has finished no step for max(30 s, 10 x the longest step seen in this generation).
What is not judged: the first steps of a generation (compilation, warm-up, the first touch of data), a time
that the script calls busy, what it does after its last step, and any rank while another one of its node is
in one of these, since it may wait for that one.

The agent measures by what it has seen itself: each look adds the time since the last one, and never more
than `LOOK_S`. So a machine that was suspended, an agent that was stopped, a container that was frozen with
all that is in it, or a clock that jumped adds one such piece, and not the time that nobody was running.

Does not know processes or files (`agent/watch.py`), nor who is to blame (`policy/blame.py`).

Who is to blame for a hang: evidence of each rank of one node in, suspects and victims out. Pure.

In data-parallel training one rank that stands still makes all others wait for it in their next collective.
So a rank that waits in a collective is a victim, and one that stands anywhere else is a suspect. Where all
wait, but not in the same collective, one of them has left one out: the few are the suspects. Where all wait
in the same one, whoever does not come is on another node, which sees it itself.

Two signs tell that a rank waits: torch's flight recorder knows a collective that has begun and not ended, or
the innermost frames of its main thread are torch.distributed's. Stacks alone are a hint: DDP waits for its
gradients in C++ under ``backward()``, and a CUDA rank where it first needs a result.

Does not know how evidence is gathered (`agent/stacks.py`).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
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


COLLECTIVE, BACKWARD, OPTIMIZER, DATA = "collective", "backward", "optimizer", "data"
# Of frames that are not the user's, from the innermost one on; the first that matches tells.
_KINDS = (
    (re.compile(r"/torch/distributed/|/elastic_resume/restore/(collectives|transfer)\.py$"), COLLECTIVE),
    (re.compile(r"/torch/autograd/|/torch/_tensor\.py$"), BACKWARD),
    (re.compile(r"/torch/optim/"), OPTIMIZER),
    (re.compile(r"/torch/utils/data/"), DATA),
)
_LIBRARY = re.compile(
    r"^<frozen|/lib(64)?/python3[^/]*/|/(site|dist)-packages/"
    r"|/elastic_resume/(agent|capture|checkpoint|data|policy|restore|snapshot|state|training)/(\w+/)?\w+\.py$"
)
_IDLE_SHARE = 0.5  # of a core: below it a thread in backward() rather waits than computes


@dataclass(frozen=True)
class Frame:
    """One level of a Python stack."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        """For a sentence: the file without its directories."""
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.name}"


@dataclass(frozen=True)
class Pending:
    """A collective that a rank has begun and that has not ended, as the flight recorder tells it."""

    number: int
    name: str
    group: str = ""
    sizes: str = ""

    def __str__(self) -> str:
        """For a sentence."""
        group = "" if self.group.startswith("0") or not self.group else f" of group {self.group}"
        return f"{self.name} (number {self.number}{group})"


@dataclass(frozen=True)
class Evidence:
    """What is known of one rank at the moment of the hang.

    ``state`` is the kernel's letter, empty where the process has ended. ``answered``: whether its Python did;
    None where it could not be asked. ``pending`` is None where nobody could tell. ``frames`` are the
    main thread's, innermost first. ``cpu_share``: of a core, while it was looked at. ``stands``: it has not
    gone on either; ``rests``: it has done its last step.
    """

    rank: int
    local_rank: int
    state: str
    step: int
    collectives: int = 0
    answered: bool | None = None
    pending: tuple[Pending, ...] | None = None
    frames: tuple[Frame, ...] = ()
    cpu_share: float = 0.0
    sleeps_in: str = ""
    stands: bool = True
    rests: bool = False


@dataclass(frozen=True)
class Named:
    """A rank with the reason for which it is a suspect or a victim: a clause that follows "rank N"."""

    rank: int
    local_rank: int
    reason: str


@dataclass(frozen=True)
class Blame:
    """``elsewhere``: all ranks of this node wait for one that is not here."""

    suspects: tuple[Named, ...] = ()
    victims: tuple[Named, ...] = ()
    elsewhere: bool = False


def kind_of(frames: Sequence[Frame]) -> str:
    """Say what the innermost frames, up to the user's own, are doing; empty where that cannot be told."""
    for frame in frames:
        for pattern, kind in _KINDS:
            if pattern.search(frame.file):
                return kind
        if not _LIBRARY.search(frame.file):
            break
    return ""


def users_frame(frames: Sequence[Frame]) -> Frame | None:
    """Give the innermost frame of the user's own code."""
    own = (frame for frame in frames if not _LIBRARY.search(frame.file))
    return next(own, frames[0] if frames else None)


def waits(one: Evidence) -> bool:
    """Whether a rank waits for others in a collective."""
    kind = kind_of(one.frames)
    if kind in {COLLECTIVE, DATA}:
        return kind == COLLECTIVE
    if one.pending is not None:
        return bool(one.pending)
    return kind == BACKWARD and one.answered is not False and one.cpu_share < _IDLE_SHARE


def blame(evidence: Sequence[Evidence], world_size: int) -> Blame:
    """Name suspects and victims among the ranks of one node."""
    standing = [one for one in evidence if one.stands]
    faults = {one.rank: _own_fault(one, alone=world_size == 1) for one in standing}
    waiting = [one for one in standing if not faults[one.rank]]
    suspects = [_named(one, faults[one.rank]) for one in standing if faults[one.rank]]
    if suspects:
        return Blame(tuple(suspects), tuple(_named(one, _waiting(one)) for one in waiting))
    groups = _groups(waiting)
    if len(groups) > 1:
        return _of_groups(groups)
    victims = tuple(_named(one, _waiting(one)) for one in waiting)
    return Blame((), victims, elsewhere=bool(victims) and len(evidence) < world_size)


def sentence(found: Blame) -> str:
    """Say it for people: suspects with their reasons, then who waits for them."""
    if found.suspects:
        told = "; ".join(f"rank {one.rank} {one.reason}" for one in found.suspects)
        return told + (f". {_ranks(found.victims)} for it" if found.victims else "")
    if found.elsewhere:
        return f"{_ranks(found.victims)} for a rank of another node: {found.victims[0].reason}"
    if found.victims:
        return (
            f"all ranks wait in the same collective, and none is missing ({found.victims[0].reason}): "
            "look at the network between them"
        )
    return "no rank can be named"


def _ranks(named: Sequence[Named] | Sequence[Evidence]) -> str:
    listed = ", ".join(str(one.rank) for one in named)
    return f"rank {listed} waits" if len(named) == 1 else f"ranks {listed} wait"


def _named(one: Evidence, reason: str) -> Named:
    return Named(one.rank, one.local_rank, reason)


def _own_fault(one: Evidence, *, alone: bool) -> str:
    """Why a rank cannot be waiting for others; empty where it does. ``alone``: there are none."""
    at = users_frame(one.frames)
    where = f" at {at}" if at else ""
    if one.state in {"", "Z", "X"}:
        return "has ended, while others of its generation go on"
    if one.state in {"T", "t"}:
        by = "by a signal (SIGSTOP)" if one.state == "T" else "by a debugger"
        return f"is stopped {by}{where}"
    if one.state == "D":
        sleeps = f" ({one.sleeps_in})" if one.sleeps_in else ""
        return f"sleeps in the kernel{sleeps} and cannot be woken: a disk or a device hangs{where}"
    if not alone and waits(one):
        return ""
    if one.rests:
        return f"has done its last step, and is{where or ' still there'}"
    if one.answered is False:
        main = f" (its main thread is{where})" if where else ""
        return f"does not let its Python run: native code of one of its threads holds the GIL{main}"
    doing = {
        DATA: "waits for data",
        BACKWARD: "is in backward()",
        OPTIMIZER: "is in the optimizer's step",
    }.get(kind_of(one.frames), "stands still")
    busy = f", using {one.cpu_share:.0%} of a core" if one.cpu_share >= _IDLE_SHARE else ""
    return f"{doing}{where}{busy}"


def _waiting(one: Evidence) -> str:
    what = f"in {one.pending[0]}" if one.pending else "in a collective"
    at = users_frame(one.frames)
    return f"waits {what}" + (f" at {at}" if at else "")


def _groups(waiting: Sequence[Evidence]) -> list[list[Evidence]]:
    """Put those together that wait in the same collective; the largest group first."""
    known = all(one.pending for one in waiting)
    found: dict[Hashable, list[Evidence]] = {}
    for one in waiting:
        at = users_frame(one.frames)
        call: Hashable = one.pending[0] if known and one.pending else (one.step, one.collectives, at)
        found.setdefault(call, []).append(one)
    return sorted(found.values(), key=len, reverse=True)


def _of_groups(groups: Sequence[Sequence[Evidence]]) -> Blame:
    """Tell those who are right from those who are not, where ranks wait in different collectives."""
    most = [group for group in groups if len(group) == len(groups[0])]
    rest = [group for group in groups if len(group) < len(groups[0])]
    if len(most) > 1:
        # As many wait here as there: those that have begun fewer collectives keep the others waiting.
        progress = [_progress(group[0]) for group in most]
        if len(set(progress)) == 1:
            everybody = [one for group in groups for one in group]
            return Blame(tuple(_named(one, f"{_waiting(one)}, others elsewhere") for one in everybody))
        ahead = max(range(len(most)), key=lambda index: progress[index])
        rest += [group for index, group in enumerate(most) if index != ahead]
        most = [most[ahead]]
    right = most[0]
    told = f"and {_ranks(right)} {_waiting(right[0]).removeprefix('waits ')}"
    suspects = [
        _named(one, f"{_waiting(one)}, {told}: it left out a collective, or called one too many")
        for group in rest
        for one in group
    ]
    return Blame(tuple(suspects), tuple(_named(one, _waiting(one)) for one in right))


def _progress(one: Evidence) -> tuple[int, int]:
    return (one.pending[0].number if one.pending else one.collectives, one.step)
