"""Who is hung and who is to blame: decisions by table and by random schedules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.policy import hangs
from elastic_resume.policy.hangs import (
    BACKWARD,
    COLLECTIVE,
    DATA,
    MAX_SAMPLE_GAP_S,
    MIN_THRESHOLD_S,
    OPTIMIZER,
    HangDecision,
    HangDiagnosis,
    HangThreshold,
    PendingCollective,
    ProgressSample,
    RankEvidence,
    RankProgress,
    StackFrame,
    classify_frames,
    describe_diagnosis,
    diagnose_hang,
    innermost_user_frame,
)

AUTO, TWO = HangThreshold(), HangThreshold(2.0)


def look(step: int, **more: object) -> ProgressSample:
    """One look at a rank whose beat tells its step; steps are counted from 10 on."""
    fields = {
        "incarnation": (1,),
        "first_step": 10,
        "step": step,
        "progress_counter": step if step > 10 else 0,
        **more,
    }
    return ProgressSample(**{"is_busy": False, "is_between_epochs": False, **fields})  # type: ignore[arg-type]


def pulse_of(looks: Iterable[ProgressSample], since_s: float = 0.25) -> RankProgress:
    """What comes of these looks, one each ``since_s`` seconds."""
    pulse = None
    for one in looks:
        pulse = hangs.update_progress(pulse, one, since_s)
    assert pulse is not None
    return pulse


def still(seconds: float, step: int = 14, **more: object) -> RankProgress:
    """A rank that has made four steps, each within a look, and none for so long."""
    looks = [look(at) for at in range(10, step + 1)] + [look(step, **more)] * round(seconds * 4)
    return pulse_of(looks)


def hung(patience: HangThreshold, *pulses: RankProgress) -> tuple[int, ...]:
    """The local ranks that are judged to be hung."""
    return hangs.find_hung_ranks(dict(enumerate(pulses)), patience).hung_ranks


# ---- hung or not ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patience", "pulses", "expected"),
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
def test_a_rank_is_hung_after_its_limit_and_not_where_it_may_take_its_time(
    patience: HangThreshold, pulses: list[RankProgress], expected: tuple[int, ...]
) -> None:
    """The rule of the design, and each of its exceptions."""
    assert hung(patience, *pulses) == expected


def test_the_limit_is_ten_times_the_longest_step_of_any_rank_here() -> None:
    """A step of 20 s was seen: 200 s are waited for the next."""
    slow = still(20, step=14)
    slow = hangs.update_progress(slow, look(15), 0.25)
    assert 19 < slow.longest_step_s < 21
    judgement = hangs.find_hung_ranks({0: slow, 1: still(100)}, AUTO)
    assert judgement.hung_ranks == ()
    assert 190 < judgement.limit_s < 210


def test_the_first_step_and_busy_times_do_not_make_the_limit_longer() -> None:
    """Compilation for ten minutes says nothing of the steps that follow."""
    first = pulse_of([look(10)] * 2400 + [look(11), look(12), look(13), look(14)])
    busy = hangs.update_progress(still(0), look(14, is_busy=True), 0.25)
    for _ in range(2400):
        busy = hangs.update_progress(busy, look(14, is_busy=True), 0.25)
    busy = hangs.update_progress(busy, look(15), 0.25)
    assert first.longest_step_s <= 0.25
    assert busy.longest_step_s <= 0.25


def test_what_the_machine_did_is_no_hang() -> None:
    """The agent was stopped, the machine suspended, the clock set: one look may add one second."""
    pulse = still(10)
    for since_s in (3600.0, -50.0, 1e9):
        pulse = hangs.update_progress(pulse, look(14), since_s)
    assert pulse.no_progress_s <= 10 + 3 * MAX_SAMPLE_GAP_S
    assert hung(AUTO, pulse) == ()
    moved = hangs.update_progress(pulse, look(15), 3600.0)
    assert moved.longest_step_s < MIN_THRESHOLD_S


def test_another_process_or_generation_begins_anew() -> None:
    """What an earlier one did says nothing."""
    pulse = hangs.update_progress(still(100), look(14, incarnation=(2,)), 0.25)
    assert pulse == RankProgress(look(14, incarnation=(2,)))


def test_who_waited_for_a_busy_rank_is_not_hung_when_that_goes_on() -> None:
    """From then on its time counts, as that of the one that was busy."""
    pulses = {0: still(0), 1: still(0)}
    for busy, seconds in ((True, 60), (False, 1.75)):
        for _ in range(round(seconds * 4)):
            looks = {0: look(14), 1: look(14, is_busy=busy)}
            pulses = hangs.pause_while_peer_busy(
                {rank: hangs.update_progress(pulses[rank], looks[rank], 0.25) for rank in pulses}
            )
            assert hangs.find_hung_ranks(pulses, TWO).hung_ranks == ()
    pulses = hangs.pause_while_peer_busy(
        {rank: hangs.update_progress(pulses[rank], look(14), 0.25) for rank in pulses}
    )
    pulses = hangs.pause_while_peer_busy(
        {rank: hangs.update_progress(pulses[rank], look(14), 0.25) for rank in pulses}
    )
    assert hangs.find_hung_ranks(pulses, TWO).hung_ranks == (0, 1)
    assert {pulse.longest_step_s for pulse in pulses.values()} == {still(0).longest_step_s}


def test_the_end_of_what_kept_a_rank_busy_begins_its_time_anew() -> None:
    """The beat moves with it, and the step does not."""
    pulse = still(1)
    for _ in range(40):
        pulse = hangs.update_progress(pulse, look(14, is_busy=True), 0.25)
    pulse = hangs.update_progress(pulse, look(14, progress_counter=99), 0.25)
    assert (pulse.no_progress_s, hung(TWO, pulse)) == (0.0, ())


def test_those_that_stand_with_the_hung_are_involved_and_those_that_go_on_are_not() -> None:
    """All stop within a step of the first."""
    pulses = {0: still(2), 1: still(1.75), 2: still(0.25), 3: still(60, progress_counter=0)}
    judgement = hangs.find_hung_ranks(pulses, TWO)
    assert judgement.hung_ranks == (0,)
    assert hangs.find_stalled_ranks(pulses, judgement) == (0, 1, 3)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["step", "wait", "busy", "freeze", "restart", "rest"]), st.floats(0.0, 5000.0)
        ),
        max_size=60,
    ),
    st.sampled_from([AUTO, TWO, HangThreshold(60.0)]),
)
def test_nobody_is_hung_that_was_not_seen_to_stand_still_for_the_limit(
    moves: list[tuple[str, float]], patience: HangThreshold
) -> None:
    """Whatever happens in whatever order, and however long the time between two looks is."""
    now, pulse, seen_s = look(10), None, 0.0
    for move, since_s in moves:
        if move == "step":
            now = replace(now, step=now.step + 1, progress_counter=now.progress_counter + 100, is_busy=False)
        elif move == "restart":
            now = look(10, incarnation=(*now.incarnation, 1))
        elif move == "rest":
            now = replace(now, progress_counter=0)
        elif move == "busy":
            now = replace(
                now,
                is_busy=not now.is_busy,
                progress_counter=now.progress_counter and now.progress_counter + 1,
            )
        pulse = hangs.update_progress(pulse, now, since_s)
        may_count = move in {"wait", "freeze"} and not now.is_busy and now.progress_counter
        seen_s = seen_s + min(since_s, MAX_SAMPLE_GAP_S) if may_count else 0.0
        judgement = hangs.find_hung_ranks({0: pulse}, patience)
        if judgement.hung_ranks:
            assert (
                seen_s + 1e-6
                >= judgement.limit_s
                >= min(MIN_THRESHOLD_S, patience.configured_s or MIN_THRESHOLD_S)
            )
            assert pulse.finished_steps >= patience.calibration_steps
        assert 0 <= judgement.next_check_s <= judgement.limit_s


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
ALL_REDUCE = (PendingCollective(13, "all_reduce", "0 default_pg", "[[2]]"),)
BARRIER = (PendingCollective(13, "barrier", "0 default_pg", "[[1]]"),)


def rank(number: int, **more: object) -> RankEvidence:
    """A rank that waits in an all_reduce, unless more is said."""
    fields = {
        "process_state": "S",
        "step": 5,
        "num_collectives": 13,
        "python_responded": True,
        "pending_collectives": ALL_REDUCE,
    }
    fields |= {"frames": IN_ALL_REDUCE, **more}
    return RankEvidence(rank=number, local_rank=number, **fields)  # type: ignore[arg-type]


def alone(number: int = 1, **more: object) -> list[RankEvidence]:
    """Three ranks, of which one is as said and the others wait."""
    return [
        rank(one, **({"pending_collectives": (), "frames": (MAIN,), **more} if one == number else {}))
        for one in range(3)
    ]


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        (alone(process_state="T"), r"is stopped by a signal \(SIGSTOP\) at train.py:38 in main"),
        (alone(process_state="t"), "is stopped by a debugger"),
        (
            alone(process_state="T", frames=IN_ALL_REDUCE, pending_collectives=ALL_REDUCE),
            "is stopped by a signal",
        ),
        (
            alone(process_state="D", kernel_function="nfs_wait"),
            r"sleeps in the kernel \(nfs_wait\) and cannot be woken",
        ),
        (alone(process_state="Z"), "has ended"),
        (alone(process_state=""), "has ended"),
        (
            alone(python_responded=False, pending_collectives=None),
            r"holds the GIL \(its main thread is at train.py:38 in main\)",
        ),
        (alone(frames=IN_DATA), "waits for data at train.py:38 in main"),
        (alone(frames=IN_OPTIMIZER), "is in the optimizer's step at train.py:38"),
        (alone(frames=IN_BACKWARD), "is in backward"),  # torch knows of no collective that it waits in
        (
            alone(frames=IN_BACKWARD, pending_collectives=None, cpu_share=0.9),
            "is in backward.* using 90% of a core",
        ),
        (
            alone(process_state="R", cpu_share=1.0),
            "stands still at train.py:38 in main, using 100% of a core",
        ),
        (alone(is_finished=True), "has done its last step, and is at train.py:38 in main"),
        (alone(frames=()), "stands still"),
        (
            alone(pending_collectives=BARRIER, frames=IN_ALL_REDUCE),
            r"waits in barrier \(number 13\).*left out a coll",
        ),
        (
            alone(pending_collectives=(PendingCollective(12, "all_reduce"),), frames=IN_ALL_REDUCE),
            r"waits in all_reduce \(number 12\)",
        ),
    ],
)
def test_the_rank_that_keeps_the_others_waiting_is_the_suspect(
    evidence: list[RankEvidence], reason: str
) -> None:
    """The others are victims, each with the place where it waits."""
    found = diagnose_hang(evidence, world_size=3)
    assert [one.rank for one in found.suspects] == [1]
    assert [one.rank for one in found.victims] == [0, 2]
    assert found.victims[0].reason == "waits in all_reduce (number 13) at train.py:38 in main"
    assert not found.waits_for_other_node
    assert re.search(reason, found.suspects[0].reason)


def test_a_skipped_collective_is_found_without_the_flight_recorder_too() -> None:
    """By the place in the user's code, the steps and the counts."""
    elsewhere = (*IN_ALL_REDUCE[:2], replace(MAIN, line=40))
    evidence = [
        rank(0, pending_collectives=None),
        rank(1, pending_collectives=None, frames=elsewhere),
        rank(2, pending_collectives=None),
    ]
    assert [one.rank for one in diagnose_hang(evidence, 3).suspects] == [1]
    evidence[1] = rank(1, pending_collectives=None, step=6)
    assert [one.rank for one in diagnose_hang(evidence, 3).suspects] == [1]


def test_of_two_that_wait_in_different_collectives_the_one_behind_is_the_suspect() -> None:
    """With the same count nobody can tell, and both are."""
    behind = rank(1, pending_collectives=(PendingCollective(12, "all_reduce"),))
    assert [one.rank for one in diagnose_hang([rank(0), behind], 2).suspects] == [1]
    both = diagnose_hang([rank(0), rank(1, pending_collectives=BARRIER)], 2)
    assert ([one.rank for one in both.suspects], both.victims) == ([0, 1], ())


def test_where_all_of_a_node_wait_the_culprit_is_on_another() -> None:
    """With one rank or several; where all of the world are here, it is the network."""
    found = diagnose_hang([rank(0), rank(1)], world_size=3)
    assert (found.suspects, [one.rank for one in found.victims], found.waits_for_other_node) == (
        (),
        [0, 1],
        True,
    )
    assert describe_diagnosis(found).startswith(
        "ranks 0, 1 wait for a rank of another node: waits in all_reduce"
    )
    whole = diagnose_hang([rank(0), rank(1)], world_size=2)
    assert not whole.waits_for_other_node
    assert "network" in describe_diagnosis(whole)


def test_ddp_waits_under_backward_where_nothing_more_is_known() -> None:
    """An older torch, without a flight recorder: an idle backward() is taken for a wait."""
    evidence = [
        rank(0, frames=IN_BACKWARD, pending_collectives=None),
        rank(1, process_state="T"),
        rank(2, frames=IN_BACKWARD, pending_collectives=None),
    ]
    found = diagnose_hang(evidence, 3)
    assert ([one.rank for one in found.suspects], [one.rank for one in found.victims]) == ([1], [0, 2])


def test_a_rank_that_is_alone_waits_for_nobody() -> None:
    """Whatever its stack looks like."""
    found = diagnose_hang([rank(0, frames=IN_BACKWARD, pending_collectives=None)], 1)
    assert [one.reason for one in found.suspects] == ["is in backward() at train.py:38 in main"]


def test_a_rank_that_goes_on_is_neither_suspect_nor_victim() -> None:
    """A job whose ranks do not wait for each other."""
    found = diagnose_hang([rank(0, pending_collectives=(), frames=(MAIN,)), rank(1, is_stalled=False)], 2)
    assert ([one.rank for one in found.suspects], found.victims) == ([0], ())


def test_it_is_said_in_one_sentence() -> None:
    """Suspects with reasons, then who waits."""
    found = diagnose_hang(alone(process_state="T"), 3)
    assert describe_diagnosis(found) == (
        "rank 1 is stopped by a signal (SIGSTOP) at train.py:38 in main. ranks 0, 2 wait for it"
    )
    assert describe_diagnosis(HangDiagnosis()) == "no rank can be named"


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        (IN_ALL_REDUCE, COLLECTIVE),
        (IN_BACKWARD, BACKWARD),
        (IN_DATA, DATA),
        (IN_OPTIMIZER, OPTIMIZER),
        ((MAIN, *IN_BACKWARD), ""),  # the user's own hook within backward()
        ((), ""),
        ((StackFrame("/x/elastic_resume/restore/collectives.py", 80, "gather"), MAIN), COLLECTIVE),
    ],
)
def test_the_innermost_frames_tell_what_a_rank_does(frames: tuple[StackFrame, ...], kind: str) -> None:
    """And the innermost of the user's own where."""
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
            pending_collectives=st.sampled_from([None, (), ALL_REDUCE, BARRIER]),
            frames=st.sampled_from([(), (MAIN,), IN_ALL_REDUCE, IN_BACKWARD, IN_DATA]),
            cpu_share=st.floats(0, 1),
            is_stalled=st.booleans(),
            is_finished=st.booleans(),
        ),
        max_size=8,
        unique_by=lambda one: one.rank,
    ),
    st.integers(1, 16),
)
def test_each_rank_that_stands_is_suspect_or_victim_and_none_is_both(
    evidence: list[RankEvidence], more: int
) -> None:
    """Stopped ones are suspects always; and there is a sentence for everything."""
    found = diagnose_hang(evidence, len(evidence) + more)
    suspects = {one.rank for one in found.suspects}
    victims = {one.rank for one in found.victims}
    assert suspects | victims == {one.rank for one in evidence if one.is_stalled}
    assert not suspects & victims
    assert {one.rank for one in evidence if one.is_stalled and one.process_state == "T"} <= suspects
    assert found.waits_for_other_node == (bool(victims) and not suspects)
    assert describe_diagnosis(found)


def test_a_judgement_tells_how_long_nobody_can_be_hung() -> None:
    """So the next look may wait."""
    assert hangs.find_hung_ranks({0: still(1.5)}, TWO) == HangDecision((), 2.0, 0.5)
    assert hangs.find_hung_ranks({}, TWO) == HangDecision((), 2.0, 2.0)


def test_those_that_wait_for_another_node_are_left_alone_for_longer() -> None:
    """Outright: as long again; else five minutes at least, since a rank there may be busy."""
    assert (TWO.peer_wait_s(2.0), AUTO.peer_wait_s(30.0), AUTO.peer_wait_s(999.0)) == (2.0, 300.0, 999.0)
