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

MIN_THRESHOLD_S = 30.0
LONGEST_STEP_FACTOR = 10.0
MAX_SAMPLE_GAP_S = 1.0
# Between two epochs scripts evaluate, often without saying that they are busy. Ten times as long as a step
# may take is still noticed, and costs nobody the run.
BETWEEN_EPOCHS_FACTOR = 10.0
# DDP rebuilds its buckets in the second step, and torch.compile knows dynamic shapes after the second.
CALIBRATION_STEPS = 3
# Of a node that sees only ranks which wait for others: the node of the culprit acts, and these with it. Where
# no node can name one, all of them wait so long; where one is busy and did not tell, it has this long.
PEER_WAIT_S = 300.0


@dataclass(frozen=True)
class HangThreshold:
    """How long a rank may take. ``threshold_s``: given outright by the user, None for the rule above."""

    configured_s: float | None = None

    @property
    def calibration_steps(self) -> int:
        """How many steps of a generation are not judged."""
        return CALIBRATION_STEPS if self.configured_s is None else 1

    def limit_s(self, longest_step_s: float, *, between_epochs: bool) -> float:
        """Seconds without a step after which a rank is hung."""
        if self.configured_s is not None:
            return self.configured_s
        return max(MIN_THRESHOLD_S, LONGEST_STEP_FACTOR * longest_step_s) * (
            BETWEEN_EPOCHS_FACTOR if between_epochs else 1
        )

    def peer_wait_s(self, limit_s: float) -> float:
        """Seconds more that ranks which wait for another node are left alone."""
        return max(PEER_WAIT_S, limit_s) if self.configured_s is None else self.configured_s


@dataclass(frozen=True)
class ProgressSample:
    """One look at the line of a living rank.

    ``life`` names the worker and the generation it is in: with another one all begins anew. ``beat`` changes
    with each step, and is 0 where there is nothing to judge by.
    """

    incarnation: tuple[int, ...]
    first_step: int
    step: int
    progress_counter: int
    is_busy: bool
    is_between_epochs: bool


@dataclass(frozen=True)
class RankProgress:
    """What was seen of one rank: for how long there was no step, and how long the longest took."""

    sample: ProgressSample
    no_progress_s: float = 0.0
    longest_step_s: float = 0.0

    @property
    def finished_steps(self) -> int:
        """How many steps of this generation were finished."""
        return self.sample.step - self.sample.first_step

    @property
    def is_finished(self) -> bool:
        """Whether it has done its last step."""
        return self.sample.progress_counter == 0 and self.finished_steps > 0


def update_progress(progress: RankProgress | None, sample: ProgressSample, elapsed_s: float) -> RankProgress:
    """Take one more look into account; ``since_s`` is the time since the last one."""
    if progress is None or progress.sample.incarnation != sample.incarnation:
        return RankProgress(sample)
    quiet_s = progress.no_progress_s + min(max(elapsed_s, 0.0), MAX_SAMPLE_GAP_S)
    if sample.step != progress.sample.step or sample.progress_counter != progress.sample.progress_counter:
        is_step = (
            sample.step > progress.sample.step
            and progress.sample.progress_counter != 0
            and not progress.sample.is_busy
        )
        return RankProgress(
            sample, 0.0, max(progress.longest_step_s, quiet_s) if is_step else progress.longest_step_s
        )
    if sample.is_busy or sample.progress_counter == 0:
        return RankProgress(sample, 0.0, progress.longest_step_s)
    return replace(progress, sample=sample, no_progress_s=quiet_s)


def pause_while_peer_busy(progress_by_rank: Mapping[int, RankProgress]) -> dict[int, RankProgress]:
    """Take into account that ranks of one node wait for one that is busy: nobody's time goes on meanwhile.

    When it ceases to be busy the others have done no step for as long, until it comes to where they wait.
    """
    if not any(pulse.sample.is_busy for pulse in progress_by_rank.values()):
        return dict(progress_by_rank)
    return {rank: replace(pulse, no_progress_s=0.0) for rank, pulse in progress_by_rank.items()}


@dataclass(frozen=True)
class HangDecision:
    """Which ranks are hung, by local rank, and by which limit.

    ``next_s``: before so many seconds nobody can be found hung.
    """

    hung_ranks: tuple[int, ...]
    limit_s: float
    next_check_s: float


def find_hung_ranks(progress_by_rank: Mapping[int, RankProgress], threshold: HangThreshold) -> HangDecision:
    """Say who is hung of the ranks of one node and one generation; ``pulses`` are those of living ones."""
    judged = {
        rank: pulse
        for rank, pulse in progress_by_rank.items()
        if pulse.sample.progress_counter and pulse.finished_steps >= threshold.calibration_steps
    }
    longest_s = max((pulse.longest_step_s for pulse in progress_by_rank.values()), default=0.0)
    between = any(pulse.sample.is_between_epochs for pulse in progress_by_rank.values())
    limit_s = threshold.limit_s(longest_s, between_epochs=between)
    if not judged or any(_is_exempt(pulse, threshold) for pulse in progress_by_rank.values()):
        return HangDecision((), limit_s, limit_s)
    hung = tuple(sorted(rank for rank, pulse in judged.items() if pulse.no_progress_s >= limit_s))
    next_s = limit_s - max(pulse.no_progress_s for pulse in judged.values())
    return HangDecision(hung, limit_s, max(next_s, 0.0))


def find_stalled_ranks(
    progress_by_rank: Mapping[int, RankProgress], decision: HangDecision
) -> tuple[int, ...]:
    """Which ranks stand still with those that are hung, if not yet for as long.

    All stop within a step of the first; one that goes on has nothing to do with it.
    """
    return tuple(
        sorted(
            rank
            for rank, pulse in progress_by_rank.items()
            if rank in decision.hung_ranks or pulse.is_finished or pulse.no_progress_s >= decision.limit_s / 2
        )
    )


def _is_exempt(progress: RankProgress, threshold: HangThreshold) -> bool:
    return progress.sample.is_busy or (
        not progress.is_finished and progress.finished_steps < threshold.calibration_steps
    )


COLLECTIVE, BACKWARD, OPTIMIZER, DATA = "collective", "backward", "optimizer", "data"
# Of frames that are not the user's, from the innermost one on; the first that matches tells.
_FRAME_KINDS = (
    (re.compile(r"/torch/distributed/|/elastic_resume/restore/(collectives|transfer)\.py$"), COLLECTIVE),
    (re.compile(r"/torch/autograd/|/torch/_tensor\.py$"), BACKWARD),
    (re.compile(r"/torch/optim/"), OPTIMIZER),
    (re.compile(r"/torch/utils/data/"), DATA),
)
_LIBRARY_PATTERN = re.compile(
    r"^<frozen|/lib(64)?/python3[^/]*/|/(site|dist)-packages/"
    r"|/elastic_resume/(agent|capture|checkpoint|data|policy|restore|snapshot|state|training)/(\w+/)?\w+\.py$"
)
_IDLE_CPU_SHARE = 0.5  # of a core: below it a thread in backward() rather waits than computes


@dataclass(frozen=True)
class StackFrame:
    """One level of a Python stack."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        """For a sentence: the file without its directories."""
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.name}"


@dataclass(frozen=True)
class PendingCollective:
    """A collective that a rank has begun and that has not ended, as the flight recorder tells it."""

    sequence_number: int
    name: str
    process_group: str = ""
    sizes: str = ""

    def __str__(self) -> str:
        """For a sentence."""
        group = (
            ""
            if self.process_group.startswith("0") or not self.process_group
            else f" of group {self.process_group}"
        )
        return f"{self.name} (number {self.sequence_number}{group})"


@dataclass(frozen=True)
class RankEvidence:
    """What is known of one rank at the moment of the hang.

    ``state`` is the kernel's letter, empty where the process has ended. ``answered``: whether its Python did;
    None where it could not be asked. ``pending`` is None where nobody could tell. ``frames`` are the
    main thread's, innermost first. ``cpu_share``: of a core, while it was looked at. ``stands``: it has not
    gone on either; ``rests``: it has done its last step.
    """

    rank: int
    local_rank: int
    process_state: str
    step: int
    num_collectives: int = 0
    python_responded: bool | None = None
    pending_collectives: tuple[PendingCollective, ...] | None = None
    frames: tuple[StackFrame, ...] = ()
    cpu_share: float = 0.0
    kernel_function: str = ""
    is_stalled: bool = True
    is_finished: bool = False


@dataclass(frozen=True)
class RankFinding:
    """A rank with the reason for which it is a suspect or a victim: a clause that follows "rank N"."""

    rank: int
    local_rank: int
    reason: str


@dataclass(frozen=True)
class HangDiagnosis:
    """``elsewhere``: all ranks of this node wait for one that is not here."""

    suspects: tuple[RankFinding, ...] = ()
    victims: tuple[RankFinding, ...] = ()
    waits_for_other_node: bool = False


def classify_frames(frames: Sequence[StackFrame]) -> str:
    """Say what the innermost frames, up to the user's own, are doing; empty where that cannot be told."""
    for frame in frames:
        for pattern, kind in _FRAME_KINDS:
            if pattern.search(frame.file):
                return kind
        if not _LIBRARY_PATTERN.search(frame.file):
            break
    return ""


def innermost_user_frame(frames: Sequence[StackFrame]) -> StackFrame | None:
    """Give the innermost frame of the user's own code."""
    own = (frame for frame in frames if not _LIBRARY_PATTERN.search(frame.file))
    return next(own, frames[0] if frames else None)


def waits_in_collective(evidence: RankEvidence) -> bool:
    """Whether a rank waits for others in a collective."""
    kind = classify_frames(evidence.frames)
    if kind in {COLLECTIVE, DATA}:
        return kind == COLLECTIVE
    if evidence.pending_collectives is not None:
        return bool(evidence.pending_collectives)
    return (
        kind == BACKWARD and evidence.python_responded is not False and evidence.cpu_share < _IDLE_CPU_SHARE
    )


def diagnose_hang(evidence: Sequence[RankEvidence], world_size: int) -> HangDiagnosis:
    """Name suspects and victims among the ranks of one node."""
    standing = [one for one in evidence if one.is_stalled]
    faults = {one.rank: _describe_own_fault(one, has_no_peers=world_size == 1) for one in standing}
    waiting = [one for one in standing if not faults[one.rank]]
    suspects = [_make_finding(one, faults[one.rank]) for one in standing if faults[one.rank]]
    if suspects:
        return HangDiagnosis(
            tuple(suspects), tuple(_make_finding(one, _describe_wait(one)) for one in waiting)
        )
    groups = _group_by_collective(waiting)
    if len(groups) > 1:
        return _diagnose_groups(groups)
    victims = tuple(_make_finding(one, _describe_wait(one)) for one in waiting)
    return HangDiagnosis((), victims, waits_for_other_node=bool(victims) and len(evidence) < world_size)


def describe_diagnosis(diagnosis: HangDiagnosis) -> str:
    """Say it for people: suspects with their reasons, then who waits for them."""
    if diagnosis.suspects:
        told = "; ".join(f"rank {one.rank} {one.reason}" for one in diagnosis.suspects)
        return told + (f". {_describe_waiting_ranks(diagnosis.victims)} for it" if diagnosis.victims else "")
    if diagnosis.waits_for_other_node:
        return f"{_describe_waiting_ranks(diagnosis.victims)} for a rank of another node: {diagnosis.victims[0].reason}"
    if diagnosis.victims:
        return (
            f"all ranks wait in the same collective, and none is missing ({diagnosis.victims[0].reason}): "
            "look at the network between them"
        )
    return "no rank can be named"


def _describe_waiting_ranks(named: Sequence[RankFinding] | Sequence[RankEvidence]) -> str:
    listed = ", ".join(str(one.rank) for one in named)
    return f"rank {listed} waits" if len(named) == 1 else f"ranks {listed} wait"


def _make_finding(one: RankEvidence, reason: str) -> RankFinding:
    return RankFinding(one.rank, one.local_rank, reason)


def _describe_own_fault(one: RankEvidence, *, has_no_peers: bool) -> str:
    """Why a rank cannot be waiting for others; empty where it does. ``alone``: there are none."""
    at = innermost_user_frame(one.frames)
    where = f" at {at}" if at else ""
    if one.process_state in {"", "Z", "X"}:
        return "has ended, while others of its generation go on"
    if one.process_state in {"T", "t"}:
        by = "by a signal (SIGSTOP)" if one.process_state == "T" else "by a debugger"
        return f"is stopped {by}{where}"
    if one.process_state == "D":
        sleeps = f" ({one.kernel_function})" if one.kernel_function else ""
        return f"sleeps in the kernel{sleeps} and cannot be woken: a disk or a device hangs{where}"
    if not has_no_peers and waits_in_collective(one):
        return ""
    if one.is_finished:
        return f"has done its last step, and is{where or ' still there'}"
    if one.python_responded is False:
        main = f" (its main thread is{where})" if where else ""
        return f"does not let its Python run: native code of one of its threads holds the GIL{main}"
    doing = {
        DATA: "waits for data",
        BACKWARD: "is in backward()",
        OPTIMIZER: "is in the optimizer's step",
    }.get(classify_frames(one.frames), "stands still")
    busy = f", using {one.cpu_share:.0%} of a core" if one.cpu_share >= _IDLE_CPU_SHARE else ""
    return f"{doing}{where}{busy}"


def _describe_wait(one: RankEvidence) -> str:
    what = f"in {one.pending_collectives[0]}" if one.pending_collectives else "in a collective"
    at = innermost_user_frame(one.frames)
    return f"waits {what}" + (f" at {at}" if at else "")


def _group_by_collective(waiting: Sequence[RankEvidence]) -> list[list[RankEvidence]]:
    """Put those together that wait in the same collective; the largest group first."""
    known = all(one.pending_collectives for one in waiting)
    found: dict[Hashable, list[RankEvidence]] = {}
    for one in waiting:
        at = innermost_user_frame(one.frames)
        call: Hashable = (
            one.pending_collectives[0]
            if known and one.pending_collectives
            else (one.step, one.num_collectives, at)
        )
        found.setdefault(call, []).append(one)
    return sorted(found.values(), key=len, reverse=True)


def _diagnose_groups(groups: Sequence[Sequence[RankEvidence]]) -> HangDiagnosis:
    """Tell those who are right from those who are not, where ranks wait in different collectives."""
    most = [group for group in groups if len(group) == len(groups[0])]
    rest = [group for group in groups if len(group) < len(groups[0])]
    if len(most) > 1:
        # As many wait here as there: those that have begun fewer collectives keep the others waiting.
        progress = [_progress_key(group[0]) for group in most]
        if len(set(progress)) == 1:
            everybody = [one for group in groups for one in group]
            return HangDiagnosis(
                tuple(_make_finding(one, f"{_describe_wait(one)}, others elsewhere") for one in everybody)
            )
        ahead = max(range(len(most)), key=lambda index: progress[index])
        rest += [group for index, group in enumerate(most) if index != ahead]
        most = [most[ahead]]
    right = most[0]
    told = f"and {_describe_waiting_ranks(right)} {_describe_wait(right[0]).removeprefix('waits ')}"
    suspects = [
        _make_finding(one, f"{_describe_wait(one)}, {told}: it left out a collective, or called one too many")
        for group in rest
        for one in group
    ]
    return HangDiagnosis(tuple(suspects), tuple(_make_finding(one, _describe_wait(one)) for one in right))


def _progress_key(one: RankEvidence) -> tuple[int, int]:
    return (
        one.pending_collectives[0].sequence_number if one.pending_collectives else one.num_collectives,
        one.step,
    )
