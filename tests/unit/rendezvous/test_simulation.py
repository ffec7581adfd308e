"""Random schedules against the real core; and each rule of the quorum is needed: broken, it is found out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

import pytest

from elastic_resume.rendezvous.core import state
from elastic_resume.rendezvous.core.events import Settings, StartWorkers
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.node import RendezvousNode
from elastic_resume.rendezvous.core.quorum import Incarnation
from elastic_resume.rendezvous.core.view_change import ViewChange
from tests.support.rendezvous_sim import schedule as kinds
from tests.support.rendezvous_sim.__main__ import main
from tests.support.rendezvous_sim.batch import BREAKABLE, BROKEN_RULES, break_rule, run_chunk, run_parallel
from tests.support.rendezvous_sim.checkers import (
    EVENTUAL_VIEW,
    JOB_ENDS_EVERYWHERE,
    MONOTONIC_GENERATION,
    ONE_RUNNING_VIEW,
    ONE_VIEW_PER_GENERATION,
    QUIESCENCE,
    STABLE_RANKS,
    InvariantChecker,
)
from tests.support.rendezvous_sim.mutations import MUTATIONS, apply_mutation
from tests.support.rendezvous_sim.draw import FAMILY_WEIGHTS, draw_schedule
from tests.support.rendezvous_sim.schedule import Fault, JobSpec, NodeSpec, Schedule, Trigger
from tests.support.rendezvous_sim.simulate import Result, run_schedule, run_seed

SEEDS = int(os.environ.get("ELASTIC_RESUME_SIMULATE_SEEDS", "800"))
"""How many schedules `make test` plays; `make nightly` plays 100,000 others."""
FIRST = min(200, SEEDS)
"""So many of them `make check` plays."""


@pytest.mark.parametrize(
    "seeds", [range(FIRST), pytest.param(range(FIRST, SEEDS), marks=pytest.mark.slow)], ids=str
)
def test_no_schedule_breaks_a_promise(seeds: range) -> None:
    """A failing seed prints its schedule."""
    failed = [str(result) for tally in run_parallel(seeds) for result in tally.failed]
    assert not failed, "\n\n".join(failed[:3])


def two_worlds(rule: str, seeds: range) -> Iterator[Result]:
    """The schedules in which a checker sees two worlds where there may be one, with a rule broken."""
    with break_rule(rule) as rules:
        for seed in seeds:
            result = run_seed(seed, rules)
            if {ONE_RUNNING_VIEW, ONE_VIEW_PER_GENERATION} & {
                violation.invariant for violation in result.violations
            }:
                yield result


TOLD = {"a-spare-is-not-asked", "grace-for-those-left-behind", "claims-tell-generations"}
"""Cures whose defects the draws do not find: scenarios tell of them."""


@pytest.mark.slow
@pytest.mark.parametrize("cure", sorted(MUTATIONS.keys() - TOLD))
def test_a_cure_taken_out_is_found(cure: str) -> None:
    """Each defect that was cured in the core comes back within 2,000 schedules when its cure is taken out."""
    with apply_mutation(cure):
        assert any(run_seed(seed).violations for seed in range(2000))


@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_a_broken_rule_makes_two_worlds(rule: str) -> None:
    """Without any one of the four rules an early schedule makes two worlds, and a checker sees it."""
    assert any(two_worlds(rule, range(300)))


@pytest.mark.slow
@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_a_broken_rule_is_found_again_and_again(rule: str) -> None:
    """Not by luck: schedules that follow worlds as they form find each at least three times in 600."""
    assert len(list(islice(two_worlds(rule, range(600)), 3))) == 3


@pytest.mark.slow
def test_numbers_that_the_dead_may_have_used_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quorum is forced without knowledge of worlds that the dead had among themselves."""
    schedules = list(
        islice((one for one in map(draw_schedule, range(3000)) if one.family == kinds.FORCED_QUORUM), 40)
    )
    found = [
        ONE_VIEW_PER_GENERATION in {violation.invariant for violation in run_schedule(one).violations}
        for one in schedules
    ]
    monkeypatch.setattr(state, "FORCED_GENERATION_GAP", 0)
    again = [
        ONE_VIEW_PER_GENERATION in {violation.invariant for violation in run_schedule(one).violations}
        for one in schedules
    ]
    assert not any(found)
    assert any(again)


@pytest.mark.slow
@pytest.mark.parametrize("family", [kinds.LOST_DISKS_AND_PARTITIONS, kinds.REJECTING_FIREWALL])
def test_what_is_waived_is_really_defeated(family: str) -> None:
    """The known limits are real: where a family's promises are not waived, some schedule breaks them."""
    schedules = islice((one for one in map(draw_schedule, range(30_000)) if one.family == family), 600)
    found = (run_schedule(one, strict=True).violations for one in schedules)
    assert any(
        violation.invariant in {ONE_RUNNING_VIEW, ONE_VIEW_PER_GENERATION}
        for some in found
        for violation in some
    )


def member(name: str) -> Incarnation:
    """A node in its first life."""
    return Incarnation(name, "1")


def starts(*worlds: tuple[str, int, str, int]) -> list[str]:
    """What the checkers say when nodes start workers: node, generation, members in rank order, own rank."""
    checkers = InvariantChecker()
    for node, generation, nodes, rank in worlds:
        begin = StartWorkers(generation, rank, tuple(map(member, nodes)), "", ())
        checkers.on_start(node, member(node), begin, 0.0)
    return [violation.invariant for violation in checkers.violations]


def test_the_checkers_see_what_they_are_named_for() -> None:
    """Each of those that follow the starts of workers, on the least that breaks its promise."""
    assert starts(("a", 1, "ab", 0), ("b", 1, "ab", 1)) == []
    assert ONE_VIEW_PER_GENERATION in starts(("a", 1, "ab", 0), ("b", 1, "bc", 0))
    assert starts(("a", 1, "ab", 0), ("c", 2, "c", 0)) == [ONE_RUNNING_VIEW]
    assert starts(("a", 1, "ab", 1)) == [STABLE_RANKS]
    assert STABLE_RANKS in starts(("a", 1, "abc", 0), ("a", 2, "acb", 0))
    assert STABLE_RANKS not in starts(("a", 1, "ab", 0), ("c", 2, "cbd", 0), ("d", 3, "db", 0)), (
        "d knows of none"
    )
    assert starts(("a", 2, "ab", 0), ("a", 2, "ab", 0)) == [MONOTONIC_GENERATION]
    assert MONOTONIC_GENERATION in starts(("a", 2, "ab", 0), ("a", 1, "ab", 0))


@pytest.mark.parametrize(
    ("owner", "name", "instead", "checker"),
    [
        (ViewChange, "_collect_joins", lambda _: {}, EVENTUAL_VIEW),
        (Leader, "_is_job_finished", lambda _: False, JOB_ENDS_EVERYWHERE),
        (RendezvousNode, "_compute_deadline", lambda self: self.state.now, QUIESCENCE),
    ],
    ids=[EVENTUAL_VIEW, JOB_ENDS_EVERYWHERE, QUIESCENCE],
)
def test_a_core_that_stands_still_or_never_rests_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, instead: Callable[..., object], checker: str
) -> None:
    """Promises that something happens are checked too: no world forms, no job ends, no agent sleeps."""
    monkeypatch.setattr(owner, name, instead)
    sites = tuple(NodeSpec(name) for name in "abc")
    job = JobSpec(
        sites, Settings(("a", "b", "c"), max_nodes=3, heartbeats_per_timeout=4), finishes_at_end=True
    )
    schedule = Schedule(0, kinds.JOB_END, job, (Fault(Trigger(8.0), "worker", ("a",)),))
    assert checker in {violation.invariant for violation in run_schedule(schedule).violations}


@pytest.mark.parametrize("seed", [197120, 220612])
def test_part_that_knows_two_worlds_of_one_generation_need_not_form_another(seed: int) -> None:
    """A firewall that rejects let both begin; by what some of them know the others have no quorum."""
    assert draw_schedule(seed).family == kinds.REJECTING_FIREWALL
    assert not run_seed(seed).violations


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(60008553, id="a follower learns of a death while its welcome is under way"),
        pytest.param(70065200, id="a node whose disk is stuck says goodbye, and goes on as somebody new"),
        pytest.param(80058237, id="a refused call is answered late, when the node has come back"),
        pytest.param(70080964, id="a straggler forms a world of its own, and is lost"),
    ],
)
def test_schedule_that_once_broke_a_promise_breaks_none(seed: int) -> None:
    """Found by long runs: the leader waited for ever, or a living node was counted gone."""
    assert not run_seed(seed).violations


def test_a_seed_is_a_schedule() -> None:
    """The same seed plays the same story, to the last message."""
    first, again = run_seed(7, with_trace=True), run_seed(7, with_trace=True)
    assert str(first) == str(again)
    assert first.trace


def test_the_story_changes_nothing() -> None:
    """Told or not, a schedule comes out the same."""
    told, silent = run_seed(7, with_trace=True), run_seed(7)
    assert (told.view_count, told.event_count) == (silent.view_count, silent.event_count)


def test_processes_play_what_one_plays() -> None:
    """In the same order."""
    seeds = range(60)
    tallies = list(run_parallel(seeds, "two-steps", jobs=2))
    total = tallies[0]
    for tally in tallies[1:]:
        total.add(tally)
    assert total == run_chunk(seeds, "two-steps")
    assert total.failed


def test_every_family_is_drawn() -> None:
    """None is forgotten."""
    assert {draw_schedule(seed).family for seed in range(300)} == set(FAMILY_WEIGHTS)


def test_a_schedule_is_plain_data() -> None:
    """Written by hand, it plays: the shift comes at the first Begin after the majority was cut off."""
    sites = tuple(NodeSpec(name, order=place) for place, name in enumerate("abcde"))
    job = JobSpec(sites, Settings(("a", "b", "c"), max_nodes=5, heartbeats_per_timeout=4))
    faults = (
        Fault(Trigger(0.5, "world", 1), "repartition", ("a", "b", "c"), 60.0),
        Fault(Trigger(0.0, "InstallView", 1, after_previous=True), "repartition", ("a", "b"), 60.0),
    )
    schedules = [Schedule(seed, kinds.VIEW_CHANGES, job, faults) for seed in range(20)]
    assert "then InstallView 1 + 0.000 s  repartition a b for 60.00 s" in str(schedules[0])
    assert not [violation for one in schedules for violation in run_schedule(one).violations]
    found = (run_schedule(one, BROKEN_RULES["later-proposals"]).violations for one in schedules)
    assert any(
        violation.invariant in {ONE_RUNNING_VIEW, ONE_VIEW_PER_GENERATION}
        for some in found
        for violation in some
    )


def test_an_end_of_which_nobody_heard_is_not_forgotten() -> None:
    """One is silent; the others finish; the leader is cut off, ends the job, and is started again."""
    sites = (NodeSpec("a"), NodeSpec("b", order=1, clock_rate=0.983), NodeSpec("c"))
    job = JobSpec(sites, Settings(("a",), max_nodes=3, heartbeats_per_timeout=4))
    faults = (
        Fault(Trigger(1.0, "world", 1), "partition", ("#2",), 4.0),
        Fault(Trigger(0.01, after_previous=True), "finish", ("#0", "#1")),
        Fault(Trigger(0.4, after_previous=True), "repartition", ("@",), 60.0),
        Fault(Trigger(0.1, after_previous=True), "written", ("#0",), 0.2),
    )
    for seed in range(10):
        result = run_schedule(Schedule(seed, kinds.JOB_END, job, faults))
        assert not result.violations, result


def test_a_node_that_never_comes_is_not_waited_for() -> None:
    """A job whose quorum is there forms its world without it."""
    sites = (NodeSpec("a"), NodeSpec("b"), NodeSpec("c", start_s=float("inf")))
    job = JobSpec(sites, Settings(("a", "b", "c"), max_nodes=3, heartbeats_per_timeout=4))
    late = Fault(Trigger(8.0), "slow", ("a",), 0.1)
    schedule = Schedule(1, kinds.SHORT_JOIN_TIMEOUT, job, (late,))
    result = run_schedule(schedule)
    assert not result.violations
    assert result.view_count
    alone = replace(job, nodes=(NodeSpec("a"), *(NodeSpec(name, start_s=float("inf")) for name in "bc")))
    assert not run_schedule(replace(schedule, job=alone)).view_count


def test_the_command_says_what_it_played(capsys: pytest.CaptureFixture[str]) -> None:
    """How many schedules of which family, how fast, and that all is well."""
    assert main(["--seeds", "5", "--jobs", "1"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("5 schedules, seeds 0 to 4, processes: 1\n")
    assert "schedules/s" in told
    assert "all promises were kept" in told


def test_a_failing_seed_prints_its_schedule_and_how_to_play_it_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command that it names fails in the same way, and tells the story."""
    found = next(two_worlds("two-steps", range(100)))
    seed = str(found.schedule.seed)
    words = ["--first", seed, "--seeds", "1", "--break", "two-steps"]
    assert main([*words]) == 1
    told = capsys.readouterr().out
    assert str(found) in told
    (command,) = [line.split(": ", 1)[1] for line in told.splitlines() if line.startswith("  again: ")]
    assert main(command.split()[3:]) == 1
    story = capsys.readouterr().out
    assert str(found.violations[0]) in story
    assert "StartWorkers" in story


def test_every_rule_can_be_broken_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """The command line's choices are the rules; another word, or no schedule, is refused."""
    for rule in BREAKABLE:
        assert main(["--seeds", "1", "--break", rule]) in {0, 1}
    for wrong in (["--break", "no-such-rule"], ["--seeds", "0"]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
    assert "--break: invalid choice: 'no-such-rule'" in capsys.readouterr().err
