"""Who is slow: found by each rank's own time of a step, and told by status and report; and nobody else is."""

from __future__ import annotations

import itertools
import os
import random
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_resume import contract
from elastic_resume.agent.pulse import Finger
from elastic_resume.faults.course import Course
from elastic_resume.faults.fault import Fault
from elastic_resume.policy.links import Links
from elastic_resume.policy.stragglers import LEAST_S, LOOKS, SHARE, STEPS, TIMES, Pace, Straggler, Stragglers
from elastic_resume.rendezvous.beats import KEPT, LEFT_OUT, Beats, own_s
from elastic_resume.rendezvous.link import Link
from elastic_resume.rendezvous.messages import Stamp
from elastic_resume.report import asking, story
from elastic_resume.report.gather import gather
from elastic_resume.report.status_screen import screen
from elastic_resume.report.troubles import Trouble, described
from elastic_resume.store.board import Board, Worker
from elastic_resume.testing import Cluster
from elastic_resume.worker.own_time import CALIBRATION_STEPS, OwnTime

TRAIN = Path(__file__).parent / "jobs" / "train.py"
EVERY_S = 1.0
Own = Mapping[str, float]


# ---- the decision --------------------------------------------------------------------------------------


def look(found: Stragglers, number: int, own: Own, *, steps: int = 5, generation: int = 1) -> list[Straggler]:
    """Let it look once at nodes of one rank each; ``own`` is in seconds."""
    paces = {
        node: Pace(generation, number * steps, 1, rank, own_s)
        for rank, (node, own_s) in enumerate(own.items())
    }
    return found.take(paces, number * EVERY_S)


def looks(*owns: Own) -> list[tuple[int, str, bool]]:
    """What is told in so many looks: in which, of which node, whether that it is over."""
    found = Stragglers()
    return [
        (number, one.node, one.is_over) for number, own in enumerate(owns) for one in look(found, number, own)
    ]


EVEN = {"a": 0.01, "b": 0.012, "c": 0.011}
SLOW = {**EVEN, "b": 0.2}


@pytest.mark.parametrize(
    ("owns", "told"),
    [
        ([EVEN] * 20, []),
        ([SLOW] * 20, [(LOOKS, "b", False)]),
        ([{"a": 0.01, "b": 0.2}] * 20, [(LOOKS, "b", False)]),
        ([{"a": 0.2}] * 20, []),
        ([{"a": 0.2, "b": 0.2, "c": 0.01}] * 20, []),
        ([EVEN, SLOW, EVEN, SLOW, SLOW, EVEN] * 5, []),
        ([EVEN] + [SLOW] * LOOKS + [EVEN] * 9, [(LOOKS, "b", False), (2 * LOOKS, "b", True)]),
        ([EVEN] + [SLOW] * LOOKS + [EVEN] * (LOOKS - 1) + [SLOW] * 9, [(LOOKS, "b", False)]),
        ([{"a": 0.001, "b": 0.001 + 0.9 * LEAST_S}] * 20, []),
        ([{"a": 1.0, "b": 1.0 + 2 * SHARE}] * 20, []),
        ([{"a": 0.1, "b": TIMES * 0.1, "c": 0.1}] * 20, [(LOOKS, "b", False)]),
        ([{"a": 0.01, "b": 0.01 + 0.9 * SHARE * EVERY_S / 5}] * 20, []),
    ],
    ids=[
        "nobody differs",
        "one does",
        "of two the slower one",
        "who is alone",
        "the larger part",
        "now and then",
        "it is over",
        "it was not over",
        "by little",
        "by a small part of what it does",
        "by half",
        "by a small part of a step",
    ],
)
def test_who_is_told_and_when(owns: list[Own], told: list[tuple[int, str, bool]]) -> None:
    """Once when it begins and once when it is over; the first look has nothing to compare with."""
    assert looks(*owns) == told


def test_a_look_without_a_new_step_counts_for_nothing() -> None:
    """Of steps that take ten seconds one slow one is not seen ten times."""
    found = Stragglers()
    assert not any(look(found, number // 10, SLOW, steps=STEPS) for number in range(10 * LOOKS))
    assert look(found, LOOKS, SLOW, steps=STEPS)


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_whose_batches_differ_at_random_name_nobody(ranks: int) -> None:
    """Nobody is slower than anybody, but some batches take three times as long as others (sigma 0.5)."""
    chance, found = random.Random(ranks), Stragglers()
    for step in range(STEPS, 20_000, STEPS):
        owns = [sum(chance.lognormvariate(0, 0.5) for _ in range(STEPS)) / STEPS for _ in range(ranks)]
        paces = {f"n{rank}": Pace(1, step, 1, rank, own_s) for rank, own_s in enumerate(owns)}
        assert not found.take(paces, 3.0 * step), step


def test_a_new_generation_begins_anew() -> None:
    """Who has resumed warms up; what was told of the generation before has ended with it."""
    found = Stragglers()
    for number in range(LOOKS + 1):
        look(found, number, SLOW)
    assert [one.node for one in found.slow] == ["b"]
    (over,) = look(found, LOOKS + 1, EVEN, generation=2)
    assert (over.node, over.generation, over.steps, over.is_over) == ("b", 1, 5 * LOOKS, True)
    assert found.slow == []


def test_one_whose_node_is_silent_is_told_once_and_ends_if_that_lasts() -> None:
    """A node that was paused tells no second time of what it still is; one that measures no more ends it."""
    away = {name: own_s for name, own_s in EVEN.items() if name != "b"}
    begins, ends = (LOOKS, "b", False), (3 * LOOKS - 1, "b", True)
    assert looks(EVEN, *[SLOW] * LOOKS, *[away] * (LOOKS - 1), *[SLOW] * 9) == [begins]
    assert looks(EVEN, *[SLOW] * LOOKS, *[SLOW] * (LOOKS - 1), *[away] * 9) == [begins, ends]


def test_the_end_is_told_of_the_rank_that_was() -> None:
    """Though another of its node, or all of them, were slower at last."""
    for others in ((4, 0.01), (7, 0.2)):
        found, told = Stragglers(), []
        for number in range(4 * LOOKS):
            slowest, rest_s = (7, 0.01) if number <= LOOKS else others
            own_s = 0.2 if number < 2 * LOOKS else 0.01
            step = number * STEPS
            slow = Pace(1, step, 4, slowest, own_s, min(rest_s, own_s))
            told += found.take({"a": Pace(1, step, 4, 0, 0.02, 0.01), "b": slow}, number * EVERY_S)
        assert [(one.rank, one.is_over) for one in told] == [(7, False), (7, True)]


def test_a_node_with_several_ranks_is_told_of_as_one_where_all_are_slow() -> None:
    """Else its slowest is, by the rank that it has in the job."""
    for rest_s, rank in ((0.19, None), (0.01, 7)):
        found = Stragglers()
        told = []
        for number in range(9):
            step = number * STEPS
            slow = Pace(1, step, 4, 7, 0.2, rest_s)
            told += found.take({"a": Pace(1, step, 4, 0, 0.02, 0.01), "b": slow}, number * EVERY_S)
        assert [(one.node, one.rank) for one in told] == [("b", rank)]


def test_another_slow_rank_at_each_look_is_nobody() -> None:
    """A machine with more to do than processors has one that came off badly, at any time."""
    found = Stragglers()
    for number in range(40):
        step = number * STEPS
        slow = Pace(1, step, 4, 4 + number % 3, 0.2, 0.01)
        assert not found.take({"a": Pace(1, step, 4, 0, 0.02, 0.01), "b": slow}, number * EVERY_S)


def test_what_it_cost_is_counted() -> None:
    """Steps since it began, and what they took longer; its own time is their mean."""
    found = Stragglers()
    owns = [EVEN, *[SLOW] * LOOKS, {**EVEN, "b": 0.111}, *[EVEN] * LOOKS]
    (_, over) = [one for number, own in enumerate(owns) for one in look(found, number, own)]
    steps = 5 * (LOOKS + 1)
    assert (over.step, over.steps, over.is_over) == (steps, steps, True)
    assert over.cost_s == pytest.approx(5 * LOOKS * (0.2 - 0.011) + 5 * 0.1)
    assert over.own_s == pytest.approx(0.011 + over.cost_s / steps)


_NEARLY = st.floats(1.0, TIMES * 0.99)


@given(st.floats(0.0001, 10.0), st.lists(st.lists(_NEARLY, min_size=5, max_size=5), max_size=20))
def test_ranks_that_differ_by_little_name_nobody(base_s: float, rounds: list[list[float]]) -> None:
    """However long a step takes, and whoever is the slowest of them in which look."""
    assert not looks(*({str(at): base_s * part for at, part in enumerate(one)} for one in rounds))


@given(
    st.integers(2, 9),
    st.floats(0.001, 0.1),
    st.lists(st.sets(st.integers(0, 8), max_size=1), min_size=LOOKS + 1, max_size=30),
)
def test_the_slow_one_is_named_and_those_who_stumble_are_not(
    count: int, base_s: float, stumbles: list[set[int]]
) -> None:
    """A collection of garbage lasts longer than a step of the slow one, and befalls each once in a while."""
    slow = count - 1
    rounds = [
        {str(at): 5.0 if at in fall and number % 2 else base_s for at in range(slow)}
        | {str(slow): base_s + 0.3}
        for number, fall in enumerate(stumbles)
    ]
    told = looks(*rounds)
    assert {node for _, node, _ in told} <= {str(slow)}
    if count > 3:  # with one that stumbles the larger part is as before
        assert told == [(LOOKS, str(slow), False)]


# ---- measured by the rank, told by the node ------------------------------------------------------------


def train(own: OwnTime, model: nn.Module, optimizer: Any, steps: int, *, sleep_s: float = 0.0) -> int:
    """Train, with a pause of its own before each forward pass; give what was measured."""
    before = own.total_ns
    for _ in range(steps):
        time.sleep(sleep_s)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        time.sleep(sleep_s)  # as in an all-reduce: not this rank's
        optimizer.step()
        own.end_step()
    return own.total_ns - before


def test_own_time_is_what_lies_before_the_first_gradient() -> None:
    """And that of the first steps is not."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = OwnTime({"model": model, "optimizer": optimizer})
    assert train(own, model, optimizer, CALIBRATION_STEPS) == 0
    began = time.perf_counter_ns()
    measured = train(own, model, optimizer, 10, sleep_s=0.005)
    whole = time.perf_counter_ns() - began
    assert 9 * 5_000_000 <= measured <= whole - 10 * 5_000_000
    own.close()
    assert train(own, model, optimizer, 3) == 0


def test_where_nothing_can_be_measured_nothing_is() -> None:
    """Without an optimizer, with one whose last parameter gets no gradient, with one that trains nothing."""
    model, unused = nn.Linear(4, 4), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), unused], lr=0.1)
    for tracked in ({"model": model}, {"model": model, "optimizer": optimizer}):
        assert train(OwnTime(tracked), model, optimizer, 2 * CALIBRATION_STEPS) == 0
    frozen = torch.optim.SGD([nn.Parameter(torch.ones(1), requires_grad=False)], lr=0.1)
    assert OwnTime({"optimizer": frozen}).total_ns == 0


def test_a_step_that_cannot_be_measured_ends_it_for_good() -> None:
    """Else a rank that uses its last head now and then would seem faster than it is, and others slow."""
    body, heads = nn.Linear(4, 4), [nn.Linear(4, 4), nn.Linear(4, 4)]
    every = nn.ModuleList([body, *heads])
    optimizer = torch.optim.SGD(every.parameters(), lr=0.1)
    own = OwnTime({"optimizer": optimizer})
    assert train(own, nn.Sequential(body, heads[1]), optimizer, 2 * CALIBRATION_STEPS) > 0
    train(own, nn.Sequential(body, heads[0]), optimizer, 1)
    train(own, nn.Sequential(body, heads[1]), optimizer, 3)
    assert own.total_ns == 0


def test_optimizers_that_step_together_are_measured() -> None:
    """Each has a part of the model: two ends of steps, and one first gradient."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    own = OwnTime({"first": first, "second": second})
    first.register_step_post_hook(lambda *_: second.step())
    assert train(own, model, first, 3 * CALIBRATION_STEPS) > 0


def test_several_backward_passes_for_a_step_count_to_the_first() -> None:
    """What follows waits for others, where each pass is reduced."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = OwnTime({"optimizer": optimizer})
    train(own, model, optimizer, CALIBRATION_STEPS + 1)
    before = own.total_ns
    model(torch.ones(2, 4)).sum().backward()
    first = own.total_ns
    time.sleep(0.01)
    model(torch.ones(2, 4)).sum().backward()
    assert before < first == own.total_ns


def test_a_pulse_tells_the_slowest_rank_of_a_node(tmp_path: Path) -> None:
    """By the steps since it last told, so many at least; a worker that has just come has told nothing yet."""
    board = Board(tmp_path / contract.BOARD_FILE)
    for local_rank in range(3):
        me = Worker(4 + local_rank, os.getpid(), 1, 100 + local_rank, 7, 0, 0)
        board.begin(local_rank, generation=2, step=10, world_size=8, worker=me)
    finger = Finger(tmp_path, 3, states=list, trouble=lambda: "")

    def pulse(step: int, *own_ms: int) -> tuple[int | None, float | None, float | None]:
        for local_rank, own in enumerate(own_ms):
            board.finish_step(local_rank, step, own_ns=own * 1_000_000)
        told = finger.take(0)
        return told.slowest, told.own_s, told.rest_s

    assert pulse(11, 0, 0, 0) == (None, None, None), "calibration"
    assert pulse(20, 50, 50, 50) == (None, None, None)
    assert pulse(30, 150, 1050, 250) == (5, 0.1, 0.01)
    assert pulse(30 + STEPS - 1, 900, 1060, 260) == (5, 0.1, 0.01), "too few steps since"
    assert pulse(30 + 2 * STEPS, 150 + 20 * STEPS, 1050 + 10 * STEPS, 250 + 12 * STEPS) == (4, 0.01, 0.005)
    me = Worker(4, os.getpid(), 1, 200, 7, 0, 0)
    board.begin(0, generation=2, step=30 + 2 * STEPS, world_size=8, worker=me)
    assert pulse(30 + 3 * STEPS, 10, 1050 + 20 * STEPS, 250 + 32 * STEPS) == (6, 0.02, 0.01)


# ---- in a report ---------------------------------------------------------------------------------------


def told_of(*events: dict[str, Any], kind: str = "slow-rank") -> list[Trouble]:
    """Who was slow, as a report tells it."""
    base = {"node": "n0", "pid": 1, "generation": 1, "rank": 0}
    first = [
        {**base, "t": 100.0, "event": "resume", "kind": "cold", "step": 0, "world_size": 3},
        *({**base, "t": 100.0 + step, "event": "step", "step": step} for step in (1, 20, 60)),
    ]
    slow = ({"node": "n0", "pid": 9, "event": "slow-rank", "generation": 1, **one} for one in events)
    return [one for one in story.tell([*first, *slow]).troubles if one.kind == kind]


BEGAN = {
    "t": 120.0,
    "step": 20,
    "slow_node": "n2",
    "slow_rank": 2,
    "own_s": 0.21,
    "others_s": 0.01,
    "steps": 5,
    "cost_s": 1.0,
}
NEXT = {"node": "n0", "pid": 1, "t": 170.0, "event": "step", "generation": 2, "step": 61, "rank": 0}
OVER = {**BEGAN, "t": 140.0, "step": 40, "steps": 25, "cost_s": 4.0, "is_over": True}


def test_a_report_names_who_was_slow_for_how_long_and_what_it_cost() -> None:
    """On the node that was, whoever told it; two events are one trouble."""
    (one,) = told_of(BEGAN, OVER)
    assert (one.node, one.t, one.until, one.is_over) == ("n2", 120.0, 140.0, True)
    assert one.text == (
        "rank 2 is slow: 0.21 s of its own per step, others 0.01 s; 25 steps took 4.0 s longer for it"
    )


def test_of_one_whose_end_nobody_told_no_more_is_said_than_was_told() -> None:
    """It may have ended in the next second; while its generation runs nobody says that it is over."""
    (one,) = told_of(BEGAN)
    assert (one.until, one.is_over, described(one)) == (120.0, False, "and not over")
    assert one.text.endswith("; at least 5 steps took 1.0 s longer for it")
    (one,) = told_of(BEGAN, {**BEGAN, "t": 130.0, "steps": 15, "cost_s": 3.0})
    assert (one.t, one.until, one.is_over) == (120.0, 130.0, False)
    assert one.text.endswith("; at least 15 steps took 3.0 s longer for it")
    for later in (NEXT, {**NEXT, "generation": 1, "event": "run-end"}):
        (one,) = told_of(BEGAN, later)
        assert (one.until, one.is_over, described(one)) == (120.0, True, "")


def test_an_end_is_that_of_its_nodes_rank_and_in_its_generation() -> None:
    """Whichever rank it names; told when the next generation runs, it was no later than that began."""
    (one,) = told_of(BEGAN, NEXT, {**OVER, "t": 175.0, "slow_rank": 3})
    assert (one.t, one.until, one.is_over) == (120.0, 170.0, True)
    (one,) = told_of(NEXT, {**BEGAN, "t": 172.0}, {**OVER, "t": 175.0})
    assert (one.t, one.until) == (172.0, 172.0), "it never ended before it was found"
    (one,) = told_of(BEGAN, NEXT, {**OVER, "t": 180.0, "generation": 2})
    assert (one.until, "at least 5 steps" in one.text) == (120.0, True), "that is the end of another"
    assert told_of(OVER) == []


def test_a_slow_rank_that_two_leaders_tell_of_is_one() -> None:
    """It began when the first did; another rank is another."""
    (one,) = told_of(BEGAN, {**BEGAN, "t": 130.0}, OVER)
    assert (one.t, one.until) == (120.0, 140.0)
    first, second = told_of(BEGAN, {**BEGAN, "t": 130.0, "slow_rank": 3}, OVER)
    assert [(found.t, found.until) for found in (first, second)] == [(120.0, 120.0), (130.0, 140.0)]


@pytest.mark.parametrize("odd", [{"own_s": "x"}, {"steps": None}, {"slow_rank": -1}, {"generation": "1"}])
def test_what_makes_no_sense_raises_nothing(odd: dict[str, Any]) -> None:
    """A log may hold anything."""
    assert len(told_of({**BEGAN, **odd})) == 1


# ---- links ---------------------------------------------------------------------------------------------


def links_told(*rounds_s: Own, generation: int = 1) -> list[tuple[int, str, bool]]:
    """What is told in so many looks."""
    found = Links()
    return [
        (at, one.node, one.is_over)
        for at, told in enumerate(rounds_s)
        for one in found.take(generation, told)
    ]


NEAR = {"b": 0.001, "c": 0.002, "d": 0.003, "e": 0.09}
FAR = {**NEAR, "c": 0.2}


@pytest.mark.parametrize(
    ("rounds_s", "told"),
    [
        ([NEAR] * 9, []),
        ([FAR] * 9, [(3, "c", False)]),
        ([{"b": 0.001, "c": 0.2}] * 9, [(3, "c", False)]),
        ([{"c": 0.2}] * 9, []),
        ([{"b": 0.2, "c": 0.25}] * 9, []),
        ([FAR, FAR, FAR, NEAR] * 5, []),
        ([*[FAR] * 4, *[NEAR] * 4], [(3, "c", False), (7, "c", True)]),
        ([*[FAR] * 4, *[{"b": 0.001}] * 3, *[FAR] * 4], [(3, "c", False)]),
        ([*[FAR] * 4, *[{"b": 0.001}] * 9], [(3, "c", False), (7, "c", True)]),
        ([*[FAR] * 3, {"b": 0.001}, *[FAR] * 3], []),
    ],
    ids=[
        "near",
        "one is far",
        "of two",
        "of one",
        "all are",
        "now and then",
        "it is over",
        "it was away for a while",
        "it went",
        "it was away before",
    ],
)
def test_whose_link_is_slow(rounds_s: list[Own], told: list[tuple[int, str, bool]]) -> None:
    """Of two members the slower one; a leader whose own link is slow is every member's, and nobody."""
    assert links_told(*rounds_s) == told


def test_what_is_told_of_a_slow_link_is_the_worst_of_it() -> None:
    """When it is over the newest heartbeats are nearly as good as any."""
    found, told = Links(), []
    for round_s in (*[0.2] * 4, 0.5, 0.15, *[0.002] * 4):
        told += found.take(1, {**NEAR, "c": round_s})
    assert [(one.round_s, one.is_over) for one in told] == [(0.2, False), (0.5, True)]


def test_a_link_that_is_told_outlives_a_generation() -> None:
    """What was not told yet begins anew: workers start, and machines have much to do."""
    found = Links()
    assert [len(found.take(1, FAR)) for _ in range(3)] == [0, 0, 0]
    assert [len(found.take(2, FAR)) for _ in range(4)] == [0, 0, 0, 1]
    assert found.take(3, FAR) == []
    assert [one.node for one in found.slow] == ["c"]


def beats(*taken_s: float, each_own_s: float = 0.0) -> float | None:
    """What is told after heartbeats that took so long, of which the thread itself took ``each_own_s``."""
    own = itertools.count()
    link, told = Link(1), Beats(lambda: each_own_s * next(own))
    for at, taken in enumerate(taken_s):
        stamp = link.stamp(at, 1, 1.0)
        told.note(link)
        link.note(Stamp(at + 1, stamp.seq), at + taken)
        told.note(link)
        link.note(Stamp(at + 1, stamp.seq), at + 0.9)  # said of its own accord, before the next heartbeat
        told.note(link)
    before = told.round_s
    told.note(Link(2))
    assert told.round_s is None
    return before


def test_a_few_late_heartbeats_make_no_slow_link() -> None:
    """Measured by what each message says which it answers; another leader's are others."""
    assert beats(*[0.01] * (KEPT - 1)) is None
    late = [0.3] * LEFT_OUT
    assert beats(*late, *[0.01] * KEPT, *late) == pytest.approx(0.01)
    assert beats(*[0.01] * (KEPT - 1), *late, 0.2) == pytest.approx(0.2)


def test_heartbeats_that_waited_for_a_processor_make_no_slow_link() -> None:
    """Nor those that were read late since much else was to be done; the kernel counts both."""
    assert beats(*[0.3] * KEPT, each_own_s=0.29) == pytest.approx(0.01)
    assert beats(*[0.3] * KEPT, each_own_s=0.4) == 0
    before = own_s()
    while own_s() <= before:
        pass


def test_a_report_names_whose_link_was_slow() -> None:
    """From when it was found to when it was so no more."""
    slow = {"event": "slow-link", "t": 120.0, "slow_node": "n1", "round_s": 0.21, "others_s": 0.001}
    over = {**slow, "t": 180.0, "generation": 2, "is_over": True}  # a link outlives generations
    for told in (over, {**over, "generation": 1}):
        (one,) = told_of(slow, NEXT, told, kind="slow-link")
        assert (one.node, one.t, one.until, one.is_over) == ("n1", 120.0, 180.0, True)
    said = "its link is slow: a heartbeat takes 0.21 s to the leader and back, others' 0.001 s"
    assert one.text == said


# ---- for real ------------------------------------------------------------------------------------------


@pytest.mark.cluster
def test_a_job_names_its_slow_rank_and_nobody_else(tmp_path: Path) -> None:
    """Its model has buffers, which DDP sends around before each forward pass: the others wait there too."""
    with Cluster(tmp_path, nodes=3, min_nodes=2, flags=["--settle", "60"]) as cluster:
        words = ["--diary", str(tmp_path / "diary"), "--epochs", "10000", "--step-delay", "0.01"]
        cluster.start(TRAIN, *words)
        cluster.wait(step=1)
        slow = Fault("slow-rank", rank=0, at_s=0.0, delay_s=0.1, for_s=600.0)
        course = Course(cluster, [slow], cluster.arming)
        course.look()

        def told() -> list[dict[str, Any]]:
            course.look()
            return cluster.events("slow-rank")

        cluster.wait(told, "somebody is slow")
        said = asking.find(cluster.run_dir, endpoint=None, run_id=None, token_file=None).ask()
        course.close()
        found = story.tell(gather([cluster.run_dir]).events)
    assert [(one["node"], one["rank"]) for one in said["stragglers"]] == [("n0", 0)]
    assert re.search(
        r"\nrank 0 on n0 is slow: [\d.]+ s of its own per step, others [\d.]+ s\n", "\n".join(screen(said))
    )
    (trouble,) = (one for one in found.troubles if one.kind == "slow-rank")
    assert trouble.node == "n0"
    assert re.match(r"rank 0 is slow: .* s of its own per step, others .* steps took ", trouble.text)
