"""Random schedules against the real core; and mutations of the core and its rules that checkers must find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import pytest

from elastic_resume.policy.reasons import Wait
from elastic_resume.rendezvous.core.interface import RendezvousSettings, StartWorkers
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.next_view import Plan, Situation
from elastic_resume.rendezvous.core.node import RendezvousNode
from elastic_resume.rendezvous.core.world import Incarnation
from tests.support.rendezvous_sim import schedule as kinds
from tests.support.rendezvous_sim.__main__ import main
from tests.support.rendezvous_sim.batch import run_chunk, run_parallel
from tests.support.rendezvous_sim.invariants import (
    EVENTUAL_VIEW,
    JOB_ENDS_EVERYWHERE,
    MONOTONIC_GENERATION,
    NO_STEP_AFTER_SUCCESSOR,
    ONE_DECISION,
    ONE_VIEW_PER_GENERATION,
    ONE_WHOLE_VIEW,
    QUIESCENCE,
    STABLE_RANKS,
    InvariantChecker,
)
from tests.support.rendezvous_sim.mutations import MUTATIONS, apply_mutation
from tests.support.rendezvous_sim.random_schedules import FAMILY_WEIGHTS, draw_schedule
from tests.support.rendezvous_sim.schedule import Fault, JobSpec, NodeSpec, Schedule, Trigger
from tests.support.rendezvous_sim.simulation import Result, run_schedule, run_seed
from tests.support.rendezvous_sim.wide_schedules import FAMILY_WEIGHTS as WIDE_FAMILY_WEIGHTS
from tests.support.rendezvous_sim.wide_schedules import draw_wide_schedule

SEEDS = 140
"""Schedules that are played here; `make nightly` plays 100,000 others."""
FULL = 32
"""Below this seed, crowds of hundreds of nodes are played too: one costs as much as thirty others."""


def test_schedules_violate_no_invariant() -> None:
    """A failing seed prints its schedule."""
    played = [seed for seed in range(SEEDS) if seed < FULL or draw_schedule(seed).family != kinds.CROWDS]
    failed = [str(result) for result in run_chunk(played) if result.violations]
    assert not failed, "\n\n".join(failed[:3])


def test_schedules_of_real_clusters_violate_no_invariant() -> None:
    """Nodes leave, all stop, run again with other settings, in real conditions; `--wide` plays these."""
    played = [seed for seed in range(60) if draw_wide_schedule(seed).family != kinds.MANY_NODES]
    failed = [str(result) for result in run_chunk(played, is_wide=True) if result.violations]
    assert not failed, "\n\n".join(failed[:3])


def test_node_that_joins_after_it_was_asked_to_leave_is_in_no_view() -> None:
    """Its agent was about to join. The others' view is without it, so that they do not need its vote."""
    nodes = tuple(NodeSpec(name) for name in "abcdef")
    settings = RendezvousSettings(tuple("abcdef"), max_nodes=6, heartbeats_per_timeout=4)
    job = JobSpec(nodes, settings, stays_away=tuple("abcdf"), must_continue=True)
    faults = tuple(
        Fault(Trigger(7.0 + 0.02 * place), "leave", (name,), 1e9) for place, name in enumerate("adfbc")
    )
    for seed in range(12):
        result = run_schedule(Schedule(seed, kinds.LEAVERS, job, faults))
        assert not result.violations, result


def test_leader_that_leaves_with_a_view_that_it_alone_has_accepted_blocks_nobody() -> None:
    """It has accepted a view with itself, which the node that stays must not decide with its vote.

    These seeds found it: nodes leave one after the other, the leader last, while it writes that view.
    """
    nodes = (*map(NodeSpec, "abcde"), *(NodeSpec(f"z{index}", start_s=12 + index) for index in range(3)))
    settings = RendezvousSettings(("a", "b"), min_nodes=2, max_nodes=5, is_strict=True)
    job = JobSpec(nodes, settings, stays_away=tuple("acde"), must_continue=True)
    faults = tuple(
        Fault(Trigger(8.7 + 0.02 * place), "leave", (name,), 1e9) for place, name in enumerate("edca")
    )
    for seed in (61, 100):
        result = run_schedule(Schedule(seed, kinds.LEAVERS, job, faults))
        assert not result.violations, result


def test_node_that_leaves_hands_its_vote_over_whatever_the_node_timeout_is() -> None:
    """It calls its successor before that leads, and again when it has announced itself."""
    nodes = NodeSpec("a"), NodeSpec("b", order=1)
    settings = RendezvousSettings(("a", "b"), max_nodes=2, node_timeout_s=10.0, is_strict=True)
    job = JobSpec(nodes, settings, stays_away=("a",), must_continue=True)
    for seed in range(12):
        result = run_schedule(
            Schedule(seed, kinds.LEAVERS, job, (Fault(Trigger(7.0), "leave", ("a",), 1e9),))
        )
        assert not result.violations, result


SPLIT_VIEWS = {ONE_WHOLE_VIEW, ONE_VIEW_PER_GENERATION, ONE_DECISION, NO_STEP_AFTER_SUCCESSOR}


def find_split_views(rule: str, seeds: Sequence[int]) -> Iterator[Result]:
    """Yield the small schedules in which two views run or share a generation, with a rule broken."""
    with apply_mutation(rule):
        for schedule in map(draw_schedule, seeds):
            if schedule.family == kinds.CROWDS:
                continue
            result = run_schedule(schedule)
            if SPLIT_VIEWS & result.violated:
                yield result


def draw_family(family: str, seeds: range) -> Iterator[Schedule]:
    """Yield the schedules of one family."""
    return (schedule for schedule in map(draw_schedule, seeds) if schedule.family == family)


SEARCHED_FIRST = {
    "newcomers-vote": 20,
    "votes-before-disk": 950,
    "leader-votes-first": 1400,
    "end-undecided": 110,
    "vote-while-running": 82,
    "nothing-bound": 40,
    "anyone-takes": 1340,
    "late-taking": 2575,
    "restarted-vote": 150,
}
"""Seeds shortly before the first that found a rare mutation; the search goes round all of them from there."""


@pytest.mark.parametrize("rule", sorted(MUTATIONS.keys() - {"handed-vote"}))  # test_played_schedules has that
def test_broken_rule_forms_two_views(rule: str) -> None:
    """Without any one clause a schedule decides two views, and a checker reports it."""
    first = SEARCHED_FIRST.get(rule, 0)
    assert any(find_split_views(rule, (*range(first, first + 2000), *range(first))))


@pytest.mark.slow
def test_waived_invariants_are_violated_without_the_waiver() -> None:
    """The known limit is real."""
    schedules = islice(draw_family(kinds.REJECTING_FIREWALL, range(30_000)), 600)
    assert any(SPLIT_VIEWS & run_schedule(schedule, strict=True).violated for schedule in schedules)


def member(name: str) -> Incarnation:
    """Return a node's first incarnation."""
    return Incarnation(name, "1")


def check_starts(*starts: tuple[str, int, str, int]) -> list[str]:
    """Return the violations when nodes start workers: node, generation, members in rank order, own rank."""
    checkers = InvariantChecker()
    for node, generation, nodes, rank in starts:
        begin = StartWorkers(generation, rank, tuple(map(member, nodes)), "", ())
        checkers.on_start(node, member(node), begin, 0.0)
    return [violation.invariant for violation in checkers.violations]


def test_checkers_report_the_smallest_violation_of_each_invariant() -> None:
    """These follow the starts of workers."""
    assert check_starts(("a", 1, "ab", 0), ("b", 1, "ab", 1)) == []
    assert ONE_VIEW_PER_GENERATION in check_starts(("a", 1, "ab", 0), ("b", 1, "bc", 0))
    assert check_starts(("a", 1, "ab", 0), ("c", 2, "c", 0)) == []
    assert check_starts(("a", 1, "ab", 0), ("b", 1, "ab", 1), ("c", 2, "c", 0)) == [ONE_WHOLE_VIEW]
    assert check_starts(("a", 1, "ab", 1)) == [STABLE_RANKS]
    assert STABLE_RANKS in check_starts(("a", 1, "abc", 0), ("a", 2, "acb", 0))
    assert check_starts(("a", 2, "ab", 0), ("a", 2, "ab", 0)) == [MONOTONIC_GENERATION]
    assert MONOTONIC_GENERATION in check_starts(("a", 2, "ab", 0), ("a", 1, "ab", 0))


@pytest.mark.parametrize(
    ("owner", "name", "instead", "checker"),
    [
        (Situation, "plan", lambda _: Plan(reason=Wait.NOTHING_JOINED), EVENTUAL_VIEW),
        (Leader, "_is_job_finished", lambda _: False, JOB_ENDS_EVERYWHERE),
        (RendezvousNode, "_compute_deadline", lambda self: self.state.now, QUIESCENCE),
    ],
    ids=[EVENTUAL_VIEW, JOB_ENDS_EVERYWHERE, QUIESCENCE],
)
def test_core_without_progress_or_rest_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, instead: Callable[..., object], checker: str
) -> None:
    """Liveness is checked too: no view forms, no job ends, no agent rests."""
    monkeypatch.setattr(owner, name, instead)
    nodes = tuple(NodeSpec(name) for name in "abc")
    job = JobSpec(
        nodes,
        RendezvousSettings(("a", "b", "c"), max_nodes=3, heartbeats_per_timeout=4),
        finishes_at_end=True,
    )
    schedule = Schedule(0, kinds.JOB_END, job, (Fault(Trigger(8.0), "worker", ("a",)),))
    assert checker in run_schedule(schedule).violated


def test_seed_played_again_gives_the_same_trace_and_result() -> None:
    """The trace is equal to the last message, and without one the result is the same."""
    first, again, plain = run_seed(7, with_trace=True), run_seed(7, with_trace=True), run_seed(7)
    assert first.trace
    assert str(first) == str(again)
    assert (first.view_count, first.event_count) == (plain.view_count, plain.event_count)


def test_parallel_run_gives_the_result_of_one_process() -> None:
    """In the same order."""
    seeds = range(20)
    results = list(run_parallel(seeds, "any-half", jobs=2))
    assert results == run_chunk(seeds, "any-half")
    assert any(result.violations for result in results)


def test_300_seeds_draw_every_family() -> None:
    """The weights leave none out."""
    assert {draw_schedule(seed).family for seed in range(300)} == set(FAMILY_WEIGHTS)
    assert {draw_wide_schedule(seed).family for seed in range(300)} >= set(WIDE_FAMILY_WEIGHTS) - {
        kinds.ANY_FAULT
    }


def test_schedule_written_by_hand_is_played() -> None:
    """The second partition comes at the first StartView after the majority was cut off."""
    nodes = tuple(NodeSpec(name, order=place) for place, name in enumerate("abcde"))
    job = JobSpec(nodes, RendezvousSettings(("a", "b", "c"), max_nodes=5, heartbeats_per_timeout=4))
    faults = (
        Fault(Trigger(0.5, "view", 1), "repartition", ("a", "b", "c"), 60.0),
        Fault(Trigger(0.0, "StartView", 1, after_previous=True), "repartition", ("a", "b"), 60.0),
    )
    schedules = [Schedule(seed, kinds.VIEW_CHANGES, job, faults) for seed in range(20)]
    assert "then StartView 1 + 0.000 s  repartition a b for 60.00 s" in str(schedules[0])
    assert not [violation for schedule in schedules for violation in run_schedule(schedule).violations]
    with apply_mutation("nothing-bound"):
        assert any(SPLIT_VIEWS & run_schedule(schedule).violated for schedule in schedules)


def test_leader_that_ended_the_job_unheard_keeps_its_views() -> None:
    """One node is cut off and the others finish. The leader is cut off, ends the job and restarts."""
    nodes = (NodeSpec("a"), NodeSpec("b", order=1, clock_rate=0.983), NodeSpec("c"))
    job = JobSpec(nodes, RendezvousSettings(("a",), max_nodes=3, heartbeats_per_timeout=4))
    faults = (
        Fault(Trigger(1.0, "view", 1), "partition", ("#2",), 4.0),
        Fault(Trigger(0.01, after_previous=True), "finish", ("#0", "#1")),
        Fault(Trigger(0.4, after_previous=True), "repartition", ("@",), 60.0),
        Fault(Trigger(0.1, after_previous=True), "written", ("#0",), 0.2),
    )
    for seed in range(10):
        result = run_schedule(Schedule(seed, kinds.JOB_END, job, faults))
        assert not result.violations, result


def test_command_prints_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    """It names the seeds, the speed and the invariants."""
    assert main(["--seeds", "5", "--jobs", "1"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("5 schedules, seeds 0 to 4\n")
    assert "schedules/s" in output
    assert "all invariants hold" in output


def test_failing_seed_prints_its_schedule_and_the_command_that_repeats_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command fails in the same way and prints a trace."""
    found = next(find_split_views("any-half", range(100)))
    seed = str(found.schedule.seed)
    arguments = ["--first", seed, "--seeds", "1", "--break", "any-half"]
    assert main(arguments) == 1
    output = capsys.readouterr().out
    assert str(found) in output
    (command,) = [line.split(": ", 1)[1] for line in output.splitlines() if line.startswith("  again: ")]
    assert main(command.split()[3:]) == 1
    trace = capsys.readouterr().out
    assert str(found.violations[0]) in trace
    assert "StartWorkers" in trace


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation_ends_with_its_block(mutation: str) -> None:
    """The core is as before, so that no other test runs with the mutation."""
    before = run_seed(7).event_count
    with apply_mutation(mutation):
        run_seed(7)
    assert run_seed(7).event_count == before
