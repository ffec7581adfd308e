"""Test which ranks hang, and which of them are suspects: by table and by random schedules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.events import Event
from elastic_resume.mechanisms.hangs import judge
from elastic_resume.mechanisms.hangs.judge import (
    BACKWARD,
    COLLECTIVE,
    DATA,
    MAX_SAMPLE_GAP_S,
    MIN_THRESHOLD_S,
    OPTIMIZER,
    HangDecision,
    HangDiagnosis,
    HangThreshold,
    IdleWorkers,
    ProgressSample,
    RankEvidence,
    RankFinding,
    RankProgress,
    StackFrame,
    classify_frames,
    diagnose_hang,
    innermost_user_frame,
)
from elastic_resume.policy.flight_recorder import Collective, RecordedCollectives
from elastic_resume.policy.stalls import Activity, Stall

AUTO, TWO = HangThreshold(), HangThreshold(2.0)


def sample(step: int, **more: object) -> ProgressSample:
    """Return a sample of a rank; steps are counted from 10 on."""
    fields = {"incarnation": (1,), "first_step": 10, "progress_counter": step if step > 10 else 0}
    return ProgressSample(**{"step": step, "is_busy": False, "is_between_epochs": False, **fields, **more})  # type: ignore[arg-type]


def observe(progress: RankProgress | None, *samples: ProgressSample, elapsed_s: float = 0.25) -> RankProgress:
    """Add samples, each ``elapsed_s`` seconds after the last."""
    for item in samples:
        progress = judge.update_progress(progress, item, elapsed_s)
    assert progress is not None
    return progress


def still(seconds: float, step: int = 14, **more: object) -> RankProgress:
    """Return a rank that made steps within a sample each, and then none for so many seconds."""
    steps = [sample(number) for number in range(10, step + 1)]
    return observe(None, *steps, *[sample(step, **more)] * round(seconds * 4))


def hung(threshold: HangThreshold, *ranks: RankProgress) -> tuple[int, ...]:
    """Return the local ranks that hang."""
    return judge.find_hung_ranks(dict(enumerate(ranks)), threshold).hung_ranks


# ---- hung or not ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threshold", "ranks", "expected"),
    [
        (AUTO, [still(29)], ()),
        (AUTO, [still(30)], (0,)),
        (AUTO, [still(31), still(0)], (0,)),
        (TWO, [still(1.75)], ()),
        (TWO, [still(2), still(2)], (0, 1)),
        (TWO, [still(60, step=10)], ()),  # its first step: compilation
        (AUTO, [still(600, step=12)], ()),  # two steps say little
        (TWO, [still(3, step=11)], (0,)),  # outright: from the second step on
        (TWO, [still(60), still(60, step=10)], ()),  # it waits for one in its first step
        (TWO, [still(60, is_busy=True)], ()),
        (TWO, [still(60), still(60, is_busy=True)], ()),  # it waits for one that is busy
        (TWO, [still(60, progress_counter=0)], ()),  # it has done its last step
        (TWO, [still(60, progress_counter=0), still(3)], (1,)),
        (AUTO, [still(60, is_between_epochs=True)], ()),  # an evaluation, most likely
        (AUTO, [still(301, is_between_epochs=True)], (0,)),
        (TWO, [still(3, is_between_epochs=True)], (0,)),  # outright is outright
    ],
)
def test_rank_hangs_after_its_limit_unless_exempt(
    threshold: HangThreshold, ranks: list[RankProgress], expected: tuple[int, ...]
) -> None:
    """The rule has these exceptions."""
    assert hung(threshold, *ranks) == expected


def test_limit_is_ten_times_the_longest_step_of_any_rank() -> None:
    """After a step of 20 s, the next may take 200 s."""
    slow = observe(still(20, step=14), sample(15))
    assert 19 < slow.longest_step_s < 21
    decision = judge.find_hung_ranks({0: slow, 1: still(100)}, AUTO)
    assert decision.hung_ranks == ()
    assert 190 < decision.limit_s < 210


def test_first_step_and_busy_time_do_not_raise_the_limit() -> None:
    """Compilation for ten minutes says nothing about later steps."""
    first = observe(None, *[sample(10)] * 2400, *map(sample, (11, 12, 13, 14)))
    busy = observe(still(0), *[sample(14, is_busy=True)] * 2401, sample(15))
    assert max(first.longest_step_s, busy.longest_step_s) <= 0.25


def test_suspended_machine_or_jumping_clock_is_no_hang() -> None:
    """A sample adds one second at most."""
    progress = still(10)
    for elapsed_s in (3600.0, -50.0, 1e9):
        progress = observe(progress, sample(14), elapsed_s=elapsed_s)
    assert progress.no_progress_s <= 10 + 3 * MAX_SAMPLE_GAP_S
    assert hung(AUTO, progress) == ()
    assert observe(progress, sample(15), elapsed_s=3600.0).longest_step_s < MIN_THRESHOLD_S


def test_new_incarnation_starts_observation_again() -> None:
    """Another process or generation has made no steps yet."""
    progress = observe(still(100), sample(14, incarnation=(2,)))
    assert progress == RankProgress(sample(14, incarnation=(2,)))


def test_rank_that_waited_for_busy_peer_gets_its_full_time() -> None:
    """Its time starts when the peer stops being busy."""
    ranks = {0: still(0), 1: still(0)}
    for is_busy, count in ((True, 240), (False, 7), (False, 2)):
        for _ in range(count):
            samples = {0: sample(14), 1: sample(14, is_busy=is_busy)}
            ranks = judge.pause_while_peer_busy({rank: observe(ranks[rank], samples[rank]) for rank in ranks})
        assert judge.find_hung_ranks(ranks, TWO).hung_ranks == ((0, 1) if count == 2 else ())
    assert {progress.longest_step_s for progress in ranks.values()} == {still(0).longest_step_s}


def test_end_of_busy_time_starts_the_time_again() -> None:
    """The progress counter changes, and the step does not."""
    progress = observe(still(1), *[sample(14, is_busy=True)] * 40, sample(14, progress_counter=99))
    assert (progress.no_progress_s, hung(TWO, progress)) == (0.0, ())


def test_ranks_that_stand_still_with_hung_rank_are_stalled() -> None:
    """All stop within a step of the first."""
    ranks = {0: still(2), 1: still(1.75), 2: still(0.25), 3: still(60, progress_counter=0)}
    decision = judge.find_hung_ranks(ranks, TWO)
    assert decision.hung_ranks == (0,)
    assert judge.find_stalled_ranks(ranks, decision) == (0, 1, 3)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["step", "wait", "busy", "freeze", "restart", "rest"]), st.floats(0.0, 5000.0)
        ),
        max_size=60,
    ),
    st.sampled_from([AUTO, TWO, HangThreshold(60.0)]),
)
def test_hung_rank_was_observed_without_progress_for_the_limit(
    moves: list[tuple[str, float]], threshold: HangThreshold
) -> None:
    """This holds for any moves and any time between two samples."""
    now, progress, seen_s = sample(10), None, 0.0
    for move, elapsed_s in moves:
        counter = now.progress_counter
        if move == "step":
            now = replace(now, step=now.step + 1, progress_counter=counter + 100, is_busy=False)
        elif move == "restart":
            now = sample(10, incarnation=(*now.incarnation, 1))
        elif move == "rest":
            now = replace(now, progress_counter=0)
        elif move == "busy":
            now = replace(now, is_busy=not now.is_busy, progress_counter=counter and counter + 1)
        progress = judge.update_progress(progress, now, elapsed_s)
        may_count = move in {"wait", "freeze"} and not now.is_busy and now.progress_counter
        seen_s = seen_s + min(elapsed_s, MAX_SAMPLE_GAP_S) if may_count else 0.0
        decision = judge.find_hung_ranks({0: progress}, threshold)
        if decision.hung_ranks:
            least_s = min(MIN_THRESHOLD_S, threshold.configured_s or MIN_THRESHOLD_S)
            assert seen_s + 1e-6 >= decision.limit_s >= least_s
            assert progress.finished_steps >= threshold.calibration_steps
        assert 0 <= decision.next_check_s <= decision.limit_s


# ---- suspects and victims ------------------------------------------------------------------------------

SITE = "/venv/lib/python3.11/site-packages"
LIB = "/usr/lib/python3.11"
MAIN = StackFrame("/home/me/train.py", 38, "main")
IN_ALL_REDUCE = (
    StackFrame(f"{SITE}/torch/distributed/distributed_c10d.py", 3252, "all_reduce"),
    StackFrame(f"{SITE}/torch/distributed/c10d_logger.py", 83, "wrapper"),
    MAIN,
)
IN_BACKWARD = (
    StackFrame(f"{SITE}/torch/autograd/graph.py", 865, "_engine_run_backward"),
    StackFrame(f"{SITE}/torch/autograd/__init__.py", 364, "backward"),
    StackFrame(f"{SITE}/torch/_tensor.py", 630, "backward"),
    MAIN,
)
IN_DATA = (
    StackFrame(f"{LIB}/threading.py", 331, "wait"),
    StackFrame(f"{LIB}/queue.py", 180, "get"),
    StackFrame(f"{SITE}/torch/utils/data/dataloader.py", 1275, "_try_get_data"),
    MAIN,
)
IN_OPTIMIZER = (StackFrame(f"{SITE}/torch/optim/adam.py", 200, "step"), MAIN)
GROUP = "0 (default_pg)"


def recorded(*pending: Collective, last: Collective | None = None) -> RecordedCollectives:
    """Return what the flight recorder of a rank shows: its last collective is the newest pending one."""
    return RecordedCollectives(pending, tuple(item for item in (last, *pending[-1:]) if item))


BEFORE = Collective(12, "all_reduce", GROUP, sizes="[[2]]")
THIRTEEN = Collective(13, "all_reduce", GROUP, sizes="[[2]]")
ALL_REDUCE = recorded(THIRTEEN)
BARRIER = recorded(Collective(13, "barrier", GROUP, sizes="[[1]]"))
BEHIND = recorded(BEFORE)
NONE_PENDING = recorded(last=BEFORE)


def rank(number: int, **more: object) -> RankEvidence:
    """Return a rank that waits in an all_reduce, unless ``more`` differs."""
    fields = {"process_state": "S", "step": 5, "num_collectives": 13, "python_responded": True}
    fields |= {"recorded": ALL_REDUCE, "frames": IN_ALL_REDUCE, **more}
    return RankEvidence(rank=number, local_rank=number, **fields)  # type: ignore[arg-type]


def alone(**more: object) -> list[RankEvidence]:
    """Return three ranks that wait, except rank 1."""
    own = {"recorded": NONE_PENDING, "frames": (MAIN,), **more}
    return [rank(index, **(own if index == 1 else {})) for index in range(3)]


def ranks_of(findings: Iterable[RankFinding]) -> list[int]:
    """Return the ranks of suspects or victims."""
    return [finding.rank for finding in findings]


NO_RECORDER = {"recorded": None}
LACKS: dict[str, Any] = {"collective": BEFORE, "others": (0, 2), "others_collective": THIRTEEN}


AT = "train.py:38 in main"
WAITS = Stall(Activity.COLLECTIVE, AT, collective=THIRTEEN)


@pytest.mark.parametrize(
    ("own", "stall"),
    [
        ({"process_state": "T"}, Stall(Activity.STOPPED, AT)),
        ({"process_state": "t"}, Stall(Activity.TRACED, AT)),
        (
            {"process_state": "T", "frames": IN_ALL_REDUCE, "recorded": ALL_REDUCE},
            Stall(Activity.STOPPED, AT),
        ),
        (
            {"process_state": "D", "kernel_function": "nfs"},
            Stall(Activity.UNINTERRUPTIBLE, AT, kernel_function="nfs"),
        ),
        ({"process_state": "Z"}, Stall(Activity.ENDED)),
        ({"process_state": ""}, Stall(Activity.ENDED)),
        ({"python_responded": False, **NO_RECORDER}, Stall(Activity.HOLDS_GIL, AT)),
        ({"frames": IN_DATA}, Stall(Activity.DATA, AT, **LACKS)),
        ({"frames": IN_OPTIMIZER}, Stall(Activity.OPTIMIZER, AT, **LACKS)),
        ({"frames": IN_BACKWARD}, Stall(Activity.BACKWARD, AT, **LACKS)),
        # Its stack is in torch.distributed, as that of a checkpoint being written is, but in no collective.
        ({"frames": IN_ALL_REDUCE}, Stall(Activity.UNKNOWN, AT, **LACKS)),
        (
            {"frames": IN_BACKWARD, "cpu_share": 0.9, **NO_RECORDER},
            Stall(Activity.BACKWARD, AT, cpu_share=0.9),
        ),
        ({"process_state": "R", "cpu_share": 1.0}, Stall(Activity.UNKNOWN, AT, cpu_share=1.0, **LACKS)),
        ({"is_finished": True}, Stall(Activity.LAST_STEP_DONE, AT, **LACKS)),
        ({"frames": ()}, Stall(Activity.UNKNOWN, **LACKS)),
        *(
            (
                {"recorded": other, "frames": IN_ALL_REDUCE},
                Stall(Activity.SKIPPED_COLLECTIVE, AT, **LACKS | {"collective": other.pending[0]}),
            )
            for other in (BARRIER, BEHIND)
        ),
    ],
)
def test_rank_that_others_wait_for_is_suspect(own: dict[str, object], stall: Stall) -> None:
    """The others are victims, each with the place where it waits."""
    found = diagnose_hang(alone(**own), world_size=3)
    assert found.suspects == (RankFinding(1, 1, stall),)
    assert found.victims == (RankFinding(0, 0, WAITS), RankFinding(2, 2, WAITS))
    assert not found.waits_for_other_node


def test_skipped_collective_is_found_without_flight_recorder() -> None:
    """The place in the user's code, the steps and the counts show it."""
    elsewhere = (*IN_ALL_REDUCE[:2], replace(MAIN, line=40))
    evidence = [
        rank(0, recorded=None),
        rank(1, recorded=None, frames=elsewhere),
        rank(2, recorded=None),
    ]
    assert ranks_of(diagnose_hang(evidence, 3).suspects) == [1]
    evidence[1] = rank(1, recorded=None, step=6)
    assert ranks_of(diagnose_hang(evidence, 3).suspects) == [1]


def test_rank_behind_in_collectives_is_suspect() -> None:
    """With the same count both ranks are suspects."""
    assert ranks_of(diagnose_hang([rank(0), rank(1, recorded=BEHIND)], 2).suspects) == [1]
    both = diagnose_hang([rank(0), rank(1, recorded=BARRIER)], 2)
    assert (ranks_of(both.suspects), both.victims) == ([0, 1], ())


def test_node_whose_ranks_all_wait_has_no_suspect() -> None:
    """The suspect is on another node; without another node it is the network."""
    found = diagnose_hang([rank(0), rank(1)], world_size=3)
    assert (found.suspects, ranks_of(found.victims), found.waits_for_other_node) == (
        (),
        [0, 1],
        True,
    )
    whole = diagnose_hang([rank(0), rank(1)], world_size=2)
    assert not whole.waits_for_other_node


def test_idle_backward_counts_as_wait_without_flight_recorder() -> None:
    """An older torch has no flight recorder."""
    evidence = [
        rank(0, frames=IN_BACKWARD, recorded=None),
        rank(1, process_state="T"),
        rank(2, frames=IN_BACKWARD, recorded=None),
    ]
    found = diagnose_hang(evidence, 3)
    assert (ranks_of(found.suspects), ranks_of(found.victims)) == ([1], [0, 2])


def test_only_rank_of_world_is_suspect() -> None:
    """Whatever its stack looks like."""
    found = diagnose_hang([rank(0, frames=IN_BACKWARD, recorded=None)], 1)
    assert found.suspects == (RankFinding(0, 0, Stall(Activity.BACKWARD, AT)),)


def test_rank_that_continues_is_neither_suspect_nor_victim() -> None:
    """Not all jobs have ranks that wait for each other."""
    found = diagnose_hang([rank(0, recorded=NONE_PENDING, frames=(MAIN,)), rank(1, is_stalled=False)], 2)
    assert (ranks_of(found.suspects), found.victims) == ([0], ())


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        (IN_ALL_REDUCE, COLLECTIVE),
        (IN_BACKWARD, BACKWARD),
        (IN_DATA, DATA),
        (IN_OPTIMIZER, OPTIMIZER),
        ((MAIN, *IN_BACKWARD), ""),  # the user's own hook within backward()
        ((), ""),
        ((StackFrame("/x/elastic_resume/ranks/collectives.py", 80, "gather"), MAIN), COLLECTIVE),
    ],
)
def test_innermost_library_frames_classify_a_rank(frames: tuple[StackFrame, ...], kind: str) -> None:
    """The innermost frame of the user's code gives the place."""
    assert classify_frames(frames) == kind
    assert innermost_user_frame(frames) in {MAIN, None}


@given(
    st.lists(
        st.builds(
            RankEvidence,
            rank=st.integers(0, 7),
            local_rank=st.integers(0, 7),
            process_state=st.sampled_from(["", "S", "R", "D", "T", "t", "Z", "X", "I"]),
            step=st.integers(0, 3),
            num_collectives=st.integers(0, 3),
            python_responded=st.sampled_from([None, True, False]),
            recorded=st.sampled_from([None, NONE_PENDING, ALL_REDUCE, BARRIER, BEHIND]),
            frames=st.sampled_from([(), (MAIN,), IN_ALL_REDUCE, IN_BACKWARD, IN_DATA]),
            cpu_share=st.floats(0, 1),
            is_stalled=st.booleans(),
            is_finished=st.booleans(),
        ),
        max_size=8,
        unique_by=lambda item: item.rank,
    ),
    st.integers(1, 16),
)
def test_any_stalled_rank_is_either_suspect_or_victim(evidence: list[RankEvidence], more: int) -> None:
    """Stopped ranks are always suspects."""
    found = diagnose_hang(evidence, len(evidence) + more)
    suspects = set(ranks_of(found.suspects))
    victims = set(ranks_of(found.victims))
    assert suspects | victims == {item.rank for item in evidence if item.is_stalled}
    assert not suspects & victims
    assert {item.rank for item in evidence if item.is_stalled and item.process_state == "T"} <= suspects
    assert found.waits_for_other_node == (bool(victims) and not suspects)


def test_decision_has_time_of_next_check() -> None:
    """No rank can hang before."""
    assert judge.find_hung_ranks({0: still(1.5)}, TWO) == HangDecision((), 2.0, 0.5)
    assert judge.find_hung_ranks({}, TWO) == HangDecision((), 2.0, 2.0)


HERE = HangDiagnosis(cause_is_here=True)
ELSEWHERE = HangDiagnosis(waits_for_other_node=True)


def test_kill_delay_follows_where_the_cause_may_be() -> None:
    """Ranks that wait get the configured time again, or five minutes at least, since a rank may be busy."""
    for diagnosis, two, auto in ((HERE, 0.0, 0.0), (HangDiagnosis(), 4.0, 15.0), (ELSEWHERE, 4.0, 300.0)):
        assert (TWO.kill_delay_s(diagnosis, 2.0), AUTO.kill_delay_s(diagnosis, 30.0)) == (two, auto)
    assert AUTO.kill_delay_s(ELSEWHERE, 999.0) == 999.0


@pytest.mark.parametrize(
    ("own", "cause_is_here"),
    [
        ({"process_state": "T"}, True),
        ({"process_state": "D"}, True),
        ({"process_state": ""}, True),
        ({"python_responded": False, **NO_RECORDER}, True),
        ({"python_responded": False, "frames": IN_ALL_REDUCE, **NO_RECORDER}, False),
        ({"python_responded": False, "frames": IN_BACKWARD, **NO_RECORDER}, False),
        ({"process_state": "T", "is_stalled": False}, False),
        ({"frames": IN_BACKWARD}, False),
        ({"frames": IN_DATA}, False),
        ({"frames": (MAIN,)}, False),
        ({"is_finished": True}, False),
        ({"recorded": BARRIER, "frames": IN_ALL_REDUCE}, False),
        ({"recorded": ALL_REDUCE, "frames": IN_ALL_REDUCE}, False),
    ],
)
def test_cause_is_proved_only_by_process_state_or_gil(own: dict[str, object], cause_is_here: bool) -> None:
    """If this node has all ranks, the cause is here anyway."""
    assert diagnose_hang(alone(**own), world_size=4).cause_is_here == cause_is_here
    assert diagnose_hang(alone(**own), world_size=3).cause_is_here


# ---- ranks that are left behind ------------------------------------------------------------------------

FORKED = [
    {
        "t": 0.0,
        "event": "worker-forked",
        "generation": 3,
        "local_rank": rank,
        "pid": 1,
        "worker_pid": 10 + rank,
    }
    for rank in range(3)
]


def ended(rank: int, **fields: object) -> Event:
    """Return the event of a worker that has ended by itself with exit code 0."""
    return {"t": 1.0, "event": "worker-exit", "generation": 3, "local_rank": rank, "exit_code": 0} | fields


@pytest.mark.parametrize(
    ("events", "remaining"),
    [
        ([*FORKED], []),
        ([*FORKED, ended(0)], [1, 2]),
        ([*FORKED, ended(0), ended(2)], [1]),
        ([*FORKED, ended(0), ended(1), ended(2)], []),
        ([*FORKED[:2], ended(0)], []),
        ([*FORKED, ended(0), ended(2, exit_code=1)], []),
        ([*FORKED, ended(0), ended(2, exit_code=None, signal="SIGKILL")], []),
        ([*FORKED, ended(0, stopped=True)], []),
        ([*FORKED, ended(0, generation=2)], []),
    ],
)
def test_workers_remain_when_all_others_have_ended_well(events: list[Event], remaining: list[int]) -> None:
    """All workers of the node must have started; a failure or a stop is somebody else's business."""
    found = judge.find_remaining_workers(events, 3, local_world_size=3)
    assert [event["local_rank"] for event in found] == remaining


@pytest.mark.parametrize(
    ("threshold", "sample", "elapsed_s", "idle_s"),
    [
        (AUTO, IdleWorkers("a", 8.0), 0.5, 100.5),
        (AUTO, IdleWorkers("a", 10.9), 0.5, 100.5),
        (AUTO, IdleWorkers("a", 11.0), 0.5, 0.0),
        (AUTO, IdleWorkers("a", 5.0), 0.5, 0.0),  # a child with CPU time has ended
        (AUTO, IdleWorkers("b", 8.0), 0.5, 0.0),
        (AUTO, IdleWorkers("a", 8.0), 500.0, 100.0 + MAX_SAMPLE_GAP_S),
        (TWO, IdleWorkers("a", 8.01), 0.5, 100.5),
        (TWO, IdleWorkers("a", 8.13), 0.5, 0.0),
    ],
)
def test_idle_time_begins_again_after_work(
    threshold: HangThreshold, sample: IdleWorkers, elapsed_s: float, idle_s: float
) -> None:
    """A hundredth of a core's time is work, and so is a step."""
    assert (
        judge.update_idle_workers(IdleWorkers("a", 8.0, 100.0), sample, elapsed_s, threshold).idle_s == idle_s
    )
    assert (AUTO.left_behind_s, TWO.left_behind_s) == (judge.LEFT_BEHIND_S, judge.MIN_LEFT_BEHIND_S)
