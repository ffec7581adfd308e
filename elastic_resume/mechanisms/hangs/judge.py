"""Decide whether a rank hangs, and which rank causes the hang.

A rank hangs if it has finished no step for max(30 s, 10 x the longest step of this generation). The first
steps of a generation (compilation, warm-up), a time that the script calls busy, and the time after the last
step do not count. While one rank of a node is in such a phase, no rank of that node is judged, because the
others may wait for it.

Time counts only as far as the agent has observed it: each sample adds the time since the last one, at most
`MAX_SAMPLE_GAP_S`. So a suspended machine, a stopped agent, a frozen container or a clock that jumps adds one
gap at most.

A rank that hangs makes all others wait in their next collective. So a rank that waits in a collective is a
victim, and a rank that is anywhere else is a suspect. If all wait, but in different collectives, the smaller
group is suspect, because it skipped a collective. If all wait in the same collective, the suspect is on
another node, whose agent sees it.

Two facts show that a rank waits: torch's flight recorder has a collective that has begun and not ended, or
the innermost frames of the main thread are in torch.distributed. Stacks alone are weak evidence: DDP waits
for gradients in C++ under ``backward()``, and a CUDA rank waits where it first needs a result. So a rank
whose recorder lacks the collective that others wait in is a suspect, wherever its stack is.

A rank that neither ends nor works after all others of its node have ended is left behind. That holds before
its first step too, and for scripts that never call `er.resume`.

Only a fact of the process proves that a suspect is the cause: it is stopped, in uninterruptible sleep, ended,
or holds the GIL. Every other suspect may wait for another node without a visible sign. For instance its
collective may have ended since, because collecting stacks woke a stopped rank for a moment. An agent without
such proof therefore waits, so that an agent with proof acts first.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_resume.events import Event
from elastic_resume.policy.flight_recorder import Collective, RecordedCollectives, find_missing
from elastic_resume.policy.stalls import Activity, Stall

MIN_THRESHOLD_S = 30.0
LONGEST_STEP_FACTOR = 10.0
MAX_SAMPLE_GAP_S = 1.0
# Between two epochs scripts evaluate, often without saying that they are busy. With ten times the limit of a
# step a hang is still noticed, and an evaluation is rarely mistaken for one.
BETWEEN_EPOCHS_FACTOR = 10.0
# DDP rebuilds its buckets in the second step, and torch.compile knows dynamic shapes after the second.
CALIBRATION_STEPS = 3
# A node whose ranks all wait for other nodes acts after this time. Normally the culprit's node acts earlier.
# A rank that is busy and did not say so has this long to finish.
PEER_WAIT_S = 300.0
# A rank may upload or evaluate alone at the end, with little CPU time.
LEFT_BEHIND_S = 300.0
# Ending the process groups at exit may wait some seconds for a peer.
MIN_LEFT_BEHIND_S = 10.0
_LEFT_BEHIND_CPU_SHARE = 0.01  # share of a core; a rank that uses more is at work
# An agent without proof waits for this share of the limit. The stalls of different nodes begin at most one
# step apart, so an agent with proof acts first if a step takes less than half of the limit.
UNPROVEN_DELAY_FACTOR = 0.5
# More than an agent with proof takes to collect it (`stack_dump`: three seconds) and to write the event.
MIN_UNPROVEN_DELAY_S = 4.0


@dataclass(frozen=True)
class HangThreshold:
    """The time that a rank may take.

    ``configured_s`` is the user's own limit; None means the rule above, and with 0 no rank is judged.
    """

    configured_s: float | None = None

    @property
    def calibration_steps(self) -> int:
        """Return how many steps at the start of a generation are not judged."""
        return CALIBRATION_STEPS if self.configured_s is None else 1

    def limit_s(self, longest_step_s: float, *, between_epochs: bool) -> float:
        """Return the seconds without a step after which a rank hangs."""
        if self.configured_s is not None:
            return self.configured_s
        return max(MIN_THRESHOLD_S, LONGEST_STEP_FACTOR * longest_step_s) * (
            BETWEEN_EPOCHS_FACTOR if between_epochs else 1
        )

    @property
    def left_behind_s(self) -> float:
        """Return how long a rank may be idle after all others of its node have ended."""
        return LEFT_BEHIND_S if self.configured_s is None else max(self.configured_s, MIN_LEFT_BEHIND_S)

    def kill_delay_s(self, diagnosis: HangDiagnosis, limit_s: float) -> float:
        """Return for how many seconds this agent waits before it kills: another one may have proof."""
        if diagnosis.cause_is_here:
            return 0.0
        unproven_s = max(UNPROVEN_DELAY_FACTOR * limit_s, MIN_UNPROVEN_DELAY_S)
        if not diagnosis.waits_for_other_node:
            return unproven_s
        return max(unproven_s, max(PEER_WAIT_S, limit_s) if self.configured_s is None else self.configured_s)


@dataclass(frozen=True)
class ProgressSample:
    """One sample of a living rank's progress.

    ``incarnation`` names the worker and its generation; a new one starts the observation again.
    ``progress_counter`` changes with each step and is 0 when the rank cannot be judged.
    """

    incarnation: tuple[int, ...]
    first_step: int
    step: int
    progress_counter: int
    is_busy: bool
    is_between_epochs: bool


@dataclass(frozen=True)
class RankProgress:
    """The observed progress of one rank: the time without a step, and the longest step."""

    sample: ProgressSample
    no_progress_s: float = 0.0
    longest_step_s: float = 0.0

    @property
    def finished_steps(self) -> int:
        """Return the number of steps finished in this generation."""
        return self.sample.step - self.sample.first_step

    @property
    def is_finished(self) -> bool:
        """Whether the rank has finished its last step."""
        return self.sample.progress_counter == 0 and self.finished_steps > 0


def update_progress(progress: RankProgress | None, sample: ProgressSample, elapsed_s: float) -> RankProgress:
    """Add one sample; ``elapsed_s`` is the time since the last one."""
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
    """Stop the time of all ranks of a node while one of them is busy.

    When that rank stops being busy, the others need as long as before until it reaches the collective that
    they wait in.
    """
    if not any(progress.sample.is_busy for progress in progress_by_rank.values()):
        return dict(progress_by_rank)
    return {rank: replace(progress, no_progress_s=0.0) for rank, progress in progress_by_rank.items()}


@dataclass(frozen=True)
class HangDecision:
    """The local ranks that hang, and the limit. Before ``next_check_s`` seconds no other rank can hang."""

    hung_ranks: tuple[int, ...]
    limit_s: float
    next_check_s: float


def find_hung_ranks(progress_by_rank: Mapping[int, RankProgress], threshold: HangThreshold) -> HangDecision:
    """Find the ranks of one node and one generation that hang; ``progress_by_rank`` has living ranks."""
    judged = {
        rank: progress
        for rank, progress in progress_by_rank.items()
        if progress.sample.progress_counter and progress.finished_steps >= threshold.calibration_steps
    }
    longest_s = max((progress.longest_step_s for progress in progress_by_rank.values()), default=0.0)
    between = any(progress.sample.is_between_epochs for progress in progress_by_rank.values())
    limit_s = threshold.limit_s(longest_s, between_epochs=between)
    if not judged or any(_is_exempt(progress, threshold) for progress in progress_by_rank.values()):
        return HangDecision((), limit_s, limit_s)
    hung = tuple(sorted(rank for rank, progress in judged.items() if progress.no_progress_s >= limit_s))
    next_s = limit_s - max(progress.no_progress_s for progress in judged.values())
    return HangDecision(hung, limit_s, max(next_s, 0.0))


def find_stalled_ranks(
    progress_by_rank: Mapping[int, RankProgress], decision: HangDecision
) -> tuple[int, ...]:
    """Return the ranks that stand still together with those that hang, even if for a shorter time.

    All ranks stop within one step of the first; a rank that continues has nothing to do with the hang.
    """
    return tuple(
        sorted(
            rank
            for rank, progress in progress_by_rank.items()
            if rank in decision.hung_ranks
            or progress.is_finished
            or progress.no_progress_s >= decision.limit_s / 2
        )
    )


def _is_exempt(progress: RankProgress, threshold: HangThreshold) -> bool:
    return progress.sample.is_busy or (
        not progress.is_finished and progress.finished_steps < threshold.calibration_steps
    )


def find_remaining_workers(
    events: Sequence[Event], generation: int, local_world_size: int
) -> tuple[Event, ...]:
    """Return the ``worker-forked`` events of workers that run when all others have ended with exit code 0."""
    own = [event for event in events if event.get("generation") == generation]
    started = {event.get("local_rank"): event for event in own if event["event"] == "worker-forked"}
    ended = {event.get("local_rank"): event for event in own if event["event"] == "worker-exit"}
    if not ended or len(started) < local_world_size:
        return ()
    if any(event.get("exit_code") != 0 or event.get("stopped") for event in ended.values()):
        return ()
    return tuple(event for rank, event in started.items() if rank not in ended)


@dataclass(frozen=True)
class IdleWorkers:
    """Remaining workers, and for how long they have been idle.

    ``progress`` changes with each step and with each worker that ends. ``cpu_s`` is the CPU time of the
    workers and their descendants when ``idle_s`` began.
    """

    progress: Hashable
    cpu_s: float
    idle_s: float = 0.0


def update_idle_workers(
    idle: IdleWorkers | None, sample: IdleWorkers, elapsed_s: float, threshold: HangThreshold
) -> IdleWorkers:
    """Add one sample; the idle time begins again after a step or a hundredth of a core's time."""
    max_cpu_s = _LEFT_BEHIND_CPU_SHARE * threshold.left_behind_s
    if idle is None or idle.progress != sample.progress or abs(sample.cpu_s - idle.cpu_s) >= max_cpu_s:
        return sample
    return replace(idle, idle_s=idle.idle_s + min(max(elapsed_s, 0.0), MAX_SAMPLE_GAP_S))


# The kernel's letters of a process's state in /proc/PID/stat; none if the process is gone.
ENDED, STOPPED, UNINTERRUPTIBLE = ("", "Z", "X"), ("T", "t"), "D"

COLLECTIVE, BACKWARD, OPTIMIZER, DATA = "collective", "backward", "optimizer", "data"
# Search the library frames from the innermost one outward; the first match decides.
_FRAME_KINDS = (
    (
        re.compile(
            r"/torch/distributed/|/elastic_resume/(ranks/collectives|restore/(streaming|transfer))\.py$"
        ),
        COLLECTIVE,
    ),
    (re.compile(r"/torch/autograd/|/torch/_tensor\.py$"), BACKWARD),
    (re.compile(r"/torch/optim/"), OPTIMIZER),
    (re.compile(r"/torch/utils/data/"), DATA),
)
_LIBRARY_PATTERN = re.compile(
    r"^<frozen|/lib(64)?/python3[^/]*/|/(site|dist)-packages/"
    r"|/elastic_resume/(agent|capture|checkpoint|data|policy|ranks|restore|slots|state|training)/(\w+/)?\w+\.py$"
)
_IDLE_CPU_SHARE = 0.5  # share of a core; a thread in backward() that uses less is taken to be waiting


@dataclass(frozen=True)
class StackFrame:
    """One frame of a Python stack."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        """Format the frame with the file's name only."""
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.name}"


@dataclass(frozen=True)
class RankEvidence:
    """What is known of one rank at the moment of a hang.

    ``process_state`` is the kernel's letter, empty if the process has ended. ``python_responded`` is None if
    Python could not be asked. ``num_collectives`` counts those of the default group, 0 if unknown.
    ``recorded`` is None without torch's flight recorder. ``frames`` are those of the main thread, innermost
    first. ``cpu_share`` is a fraction of one core. ``is_stalled``: it stands still too. ``is_finished``: it
    has done its last step.
    """

    rank: int
    local_rank: int
    process_state: str
    step: int
    num_collectives: int = 0
    python_responded: bool | None = None
    recorded: RecordedCollectives | None = None
    frames: tuple[StackFrame, ...] = ()
    cpu_share: float = 0.0
    kernel_function: str = ""
    is_stalled: bool = True
    is_finished: bool = False

    @property
    def pending(self) -> Collective | None:
        """Return the oldest collective that it has begun and not ended, if known."""
        return self.recorded.pending[0] if self.recorded and self.recorded.pending else None


@dataclass(frozen=True)
class RankFinding:
    """A rank, and why it is a suspect or a victim."""

    rank: int
    local_rank: int
    stall: Stall


@dataclass(frozen=True)
class HangDiagnosis:
    """Suspects and victims of a hang, or the finding that all ranks of this node wait for another node.

    ``cause_is_here``: this node has all ranks, or a rank here is proved to be the cause.
    """

    suspects: tuple[RankFinding, ...] = ()
    victims: tuple[RankFinding, ...] = ()
    waits_for_other_node: bool = False
    cause_is_here: bool = False


def classify_frames(frames: Sequence[StackFrame]) -> str:
    """Classify what the innermost library frames do; empty if unknown."""
    for frame in frames:
        for pattern, kind in _FRAME_KINDS:
            if pattern.search(frame.file):
                return kind
        if not _LIBRARY_PATTERN.search(frame.file):
            break
    return ""


def innermost_user_frame(frames: Sequence[StackFrame]) -> StackFrame | None:
    """Return the innermost frame of the user's own code."""
    own = (frame for frame in frames if not _LIBRARY_PATTERN.search(frame.file))
    return next(own, frames[0] if frames else None)


def waits_in_collective(evidence: RankEvidence) -> bool:
    """Whether a rank waits in a collective."""
    kind = classify_frames(evidence.frames)
    if kind in {COLLECTIVE, DATA}:
        return kind == COLLECTIVE
    if evidence.recorded is not None:
        return bool(evidence.recorded.pending)
    return (
        kind == BACKWARD and evidence.python_responded is not False and evidence.cpu_share < _IDLE_CPU_SHARE
    )


def diagnose_hang(evidence: Sequence[RankEvidence], world_size: int) -> HangDiagnosis:
    """Find suspects and victims among the ranks of one node."""
    cause_is_here = len(evidence) == world_size or any(
        item.is_stalled and _cannot_wait_for_peers(item) for item in evidence
    )
    return replace(_find_suspects(evidence, world_size), cause_is_here=cause_is_here)


def _find_suspects(evidence: Sequence[RankEvidence], world_size: int) -> HangDiagnosis:
    standing = [item for item in evidence if item.is_stalled]
    pending_by_rank = {item.rank: item.pending for item in standing if item.pending}
    suspects: list[RankFinding] = []
    waiting: list[RankEvidence] = []
    for item in standing:
        fault = _find_own_fault(item, pending_by_rank, has_no_peers=world_size == 1)
        if fault:
            suspects.append(RankFinding(item.rank, item.local_rank, fault))
        else:
            waiting.append(item)
    groups = _group_by_collective(waiting)
    if not suspects and len(groups) > 1:
        return _diagnose_groups(groups)
    victims = _find_waits(waiting)
    waits_for_other = not suspects and bool(victims) and len(evidence) < world_size
    return HangDiagnosis(tuple(suspects), victims, waits_for_other)


def _find_waits(
    waiting: Sequence[RankEvidence], activity: Activity = Activity.COLLECTIVE, **others: Any
) -> tuple[RankFinding, ...]:
    return tuple(
        RankFinding(
            item.rank,
            item.local_rank,
            Stall(activity, _user_frame(item), collective=item.pending, **others),
        )
        for item in waiting
    )


def _user_frame(evidence: RankEvidence) -> str:
    return str(innermost_user_frame(evidence.frames) or "")


def _cannot_wait_for_peers(evidence: RankEvidence) -> bool:
    """Whether the process has ended, is stopped, is in uninterruptible sleep or holds the GIL."""
    if evidence.process_state in {*ENDED, *STOPPED, UNINTERRUPTIBLE}:
        return True
    # A rank that waits in C++ and gets no processor does not respond in time either.
    may_wait = classify_frames(evidence.frames) in {COLLECTIVE, BACKWARD}
    return evidence.python_responded is False and not may_wait


_OWN_ACTIVITIES = {DATA: Activity.DATA, BACKWARD: Activity.BACKWARD, OPTIMIZER: Activity.OPTIMIZER}


def _find_own_fault(
    evidence: RankEvidence, pending_by_rank: Mapping[int, Collective], *, has_no_peers: bool
) -> Stall | None:
    """Find why a rank cannot be waiting for others; None if it can."""
    at = _user_frame(evidence)
    if evidence.process_state in ENDED:
        return Stall(Activity.ENDED)
    if evidence.process_state in STOPPED:
        return Stall(Activity.STOPPED if evidence.process_state == "T" else Activity.TRACED, at)
    if evidence.process_state == UNINTERRUPTIBLE:
        return Stall(Activity.UNINTERRUPTIBLE, at, kernel_function=evidence.kernel_function)
    missing, ranks = find_missing(evidence.recorded or RecordedCollectives(), pending_by_rank) or (None, ())
    is_late = missing is not None and (evidence.pending is None or evidence.pending.call == missing.call)
    if not has_no_peers and waits_in_collective(evidence) and not is_late:
        return None
    newest = evidence.recorded.newest if evidence.recorded and not has_no_peers else None
    stall = Stall(Activity.UNKNOWN, at, collective=newest, others=ranks, others_collective=missing)
    if evidence.is_finished:
        return replace(stall, activity=Activity.LAST_STEP_DONE)
    if evidence.python_responded is False:
        return replace(stall, activity=Activity.HOLDS_GIL)
    activity = _OWN_ACTIVITIES.get(classify_frames(evidence.frames), Activity.UNKNOWN)
    share = evidence.cpu_share if evidence.cpu_share >= _IDLE_CPU_SHARE else 0.0
    return replace(stall, activity=activity, cpu_share=share)


def make_left_behind(evidence: RankEvidence) -> Stall:
    """Make the reason of a rank that is left behind, with its place in the user's code."""
    return Stall(Activity.LEFT_BEHIND, _user_frame(evidence))


def _group_by_collective(waiting: Sequence[RankEvidence]) -> list[list[RankEvidence]]:
    """Group ranks that wait in the same collective; the largest group comes first."""
    known, counted = all(item.pending for item in waiting), all(item.num_collectives for item in waiting)
    found: dict[Hashable, list[RankEvidence]] = {}
    for item in waiting:
        at = innermost_user_frame(item.frames)
        count = item.num_collectives if counted else 0
        call = item.pending.call if known and item.pending else (item.step, count, at)
        found.setdefault(call, []).append(item)
    return sorted(found.values(), key=len, reverse=True)


def _diagnose_groups(groups: Sequence[Sequence[RankEvidence]]) -> HangDiagnosis:
    """Separate suspects from victims among ranks that wait in different collectives."""
    most = [group for group in groups if len(group) == len(groups[0])]
    rest = [group for group in groups if len(group) < len(groups[0])]
    if len(most) > 1:
        # The largest groups are equal in size; the one that has begun fewer collectives keeps others waiting.
        progress = [_progress_key(group[0]) for group in most]
        sequences = {group[0].pending and group[0].pending.sequence for group in most}
        if len(set(progress)) == 1 or len(sequences) > 1:  # numbers of different groups say nothing
            everybody = [item for group in groups for item in group]
            return HangDiagnosis(_find_waits(everybody, Activity.SPLIT_COLLECTIVE))
        ahead = max(range(len(most)), key=lambda index: progress[index])
        rest += [group for index, group in enumerate(most) if index != ahead]
        most = [most[ahead]]
    right = most[0]
    suspects = _find_waits(
        [item for group in rest for item in group],
        Activity.SKIPPED_COLLECTIVE,
        others=tuple(item.rank for item in right),
        others_collective=right[0].pending,
    )
    return HangDiagnosis(suspects, _find_waits(right))


def _progress_key(evidence: RankEvidence) -> tuple[int, int]:
    pending = evidence.pending
    return (pending.number if pending else evidence.num_collectives, evidence.step)
