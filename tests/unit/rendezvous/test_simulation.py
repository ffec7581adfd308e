"""Random schedules against the real core; and each rule of the quorum is needed: broken, it is found out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

import pytest

from elastic_resume.rendezvous.core import state
from elastic_resume.rendezvous.core.events import BeginWorld, Settings
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.node import Agent
from elastic_resume.rendezvous.core.quorum import Incarnation
from elastic_resume.rendezvous.core.view_change import Former
from tests.support.rendezvous_sim import schedule as kinds
from tests.support.rendezvous_sim.__main__ import main
from tests.support.rendezvous_sim.batch import BREAKS, BROKEN_RULES, broken, play_many, play_some
from tests.support.rendezvous_sim.checkers import (
    BOUNDED,
    CALM,
    ENDS,
    FORWARD,
    ONE_LIVE,
    ONE_WORLD,
    RANKS,
    Checkers,
)
from tests.support.rendezvous_sim.cures import CURES, without
from tests.support.rendezvous_sim.draw import FAMILIES, draw
from tests.support.rendezvous_sim.schedule import Fault, Job, Moment, Schedule, Site
from tests.support.rendezvous_sim.simulate import Result, play, run

SEEDS = int(os.environ.get("ELASTIC_RESUME_SIMULATE_SEEDS", "800"))
"""How many schedules `make test` plays; `make nightly` plays 100,000 others."""
FIRST = min(200, SEEDS)
"""So many of them `make check` plays."""


@pytest.mark.parametrize(
    "seeds", [range(FIRST), pytest.param(range(FIRST, SEEDS), marks=pytest.mark.slow)], ids=str
)
def test_no_schedule_breaks_a_promise(seeds: range) -> None:
    """A failing seed prints its schedule."""
    failed = [str(result) for tally in play_many(seeds) for result in tally.broken]
    assert not failed, "\n\n".join(failed[:3])


def two_worlds(rule: str, seeds: range) -> Iterator[Result]:
    """The schedules in which a checker sees two worlds where there may be one, with a rule broken."""
    with broken(rule) as rules:
        for seed in seeds:
            result = run(seed, rules)
            if {ONE_LIVE, ONE_WORLD} & {violation.checker for violation in result.violations}:
                yield result


TOLD = {"a-spare-is-not-asked", "grace-for-those-left-behind", "claims-tell-generations"}
"""Cures whose defects the draws do not find: scenarios tell of them."""


@pytest.mark.slow
@pytest.mark.parametrize("cure", sorted(CURES.keys() - TOLD))
def test_a_cure_taken_out_is_found(cure: str) -> None:
    """Each defect that was cured in the core comes back within 2,000 schedules when its cure is taken out."""
    with without(cure):
        assert any(run(seed).violations for seed in range(2000))


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
    schedules = list(islice((one for one in map(draw, range(3000)) if one.family == kinds.FORCED), 40))
    found = [ONE_WORLD in {violation.checker for violation in play(one).violations} for one in schedules]
    monkeypatch.setattr(state, "LEFT_OUT", 0)
    again = [ONE_WORLD in {violation.checker for violation in play(one).violations} for one in schedules]
    assert not any(found)
    assert any(again)


@pytest.mark.slow
@pytest.mark.parametrize("family", [kinds.LOST_DISKS_AND_SILENCE, kinds.REJECTION])
def test_what_is_waived_is_really_defeated(family: str) -> None:
    """The known limits are real: where a family's promises are not waived, some schedule breaks them."""
    schedules = islice((one for one in map(draw, range(30_000)) if one.family == family), 600)
    found = (play(one, strict=True).violations for one in schedules)
    assert any(violation.checker in {ONE_LIVE, ONE_WORLD} for some in found for violation in some)


def member(name: str) -> Incarnation:
    """A node in its first life."""
    return Incarnation(name, "1")


def starts(*worlds: tuple[str, int, str, int]) -> list[str]:
    """What the checkers say when nodes start workers: node, generation, members in rank order, own rank."""
    checkers = Checkers()
    for node, generation, nodes, rank in worlds:
        begin = BeginWorld(generation, rank, tuple(map(member, nodes)), "", ())
        checkers.began(node, member(node), begin, 0.0)
    return [violation.checker for violation in checkers.violations]


def test_the_checkers_see_what_they_are_named_for() -> None:
    """Each of those that follow the starts of workers, on the least that breaks its promise."""
    assert starts(("a", 1, "ab", 0), ("b", 1, "ab", 1)) == []
    assert ONE_WORLD in starts(("a", 1, "ab", 0), ("b", 1, "bc", 0))
    assert starts(("a", 1, "ab", 0), ("c", 2, "c", 0)) == [ONE_LIVE]
    assert starts(("a", 1, "ab", 1)) == [RANKS]
    assert RANKS in starts(("a", 1, "abc", 0), ("a", 2, "acb", 0))
    assert RANKS not in starts(("a", 1, "ab", 0), ("c", 2, "cbd", 0), ("d", 3, "db", 0)), "d knows of none"
    assert starts(("a", 2, "ab", 0), ("a", 2, "ab", 0)) == [FORWARD]
    assert FORWARD in starts(("a", 2, "ab", 0), ("a", 1, "ab", 0))


@pytest.mark.parametrize(
    ("owner", "name", "instead", "checker"),
    [
        (Former, "_joiners", lambda _: {}, BOUNDED),
        (Leader, "_is_end", lambda _: False, ENDS),
        (Agent, "_deadline", lambda self: self.body.now, CALM),
    ],
    ids=[BOUNDED, ENDS, CALM],
)
def test_a_core_that_stands_still_or_never_rests_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, instead: Callable[..., object], checker: str
) -> None:
    """Promises that something happens are checked too: no world forms, no job ends, no agent sleeps."""
    monkeypatch.setattr(owner, name, instead)
    sites = tuple(Site(name) for name in "abc")
    job = Job(sites, Settings(("a", "b", "c"), max_nodes=3, beats_per_timeout=4), ends=True)
    schedule = Schedule(0, kinds.END_GAME, job, (Fault(Moment(8.0), "worker", ("a",)),))
    assert checker in {violation.checker for violation in play(schedule).violations}


@pytest.mark.parametrize("seed", [197120, 220612])
def test_part_that_knows_two_worlds_of_one_generation_need_not_form_another(seed: int) -> None:
    """A firewall that rejects let both begin; by what some of them know the others have no quorum."""
    assert draw(seed).family == kinds.REJECTION
    assert not run(seed).violations


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
    assert not run(seed).violations


def test_a_seed_is_a_schedule() -> None:
    """The same seed plays the same story, to the last message."""
    first, again = run(7, told=True), run(7, told=True)
    assert str(first) == str(again)
    assert first.story


def test_the_story_changes_nothing() -> None:
    """Told or not, a schedule comes out the same."""
    told, silent = run(7, told=True), run(7)
    assert (told.worlds, told.events) == (silent.worlds, silent.events)


def test_processes_play_what_one_plays() -> None:
    """In the same order."""
    seeds = range(60)
    tallies = list(play_many(seeds, "two-steps", jobs=2))
    total = tallies[0]
    for tally in tallies[1:]:
        total.add(tally)
    assert total == play_some(seeds, "two-steps")
    assert total.broken


def test_every_family_is_drawn() -> None:
    """None is forgotten."""
    assert {draw(seed).family for seed in range(300)} == set(FAMILIES)


def test_a_schedule_is_plain_data() -> None:
    """Written by hand, it plays: the shift comes at the first Begin after the majority was cut off."""
    sites = tuple(Site(name, order=place) for place, name in enumerate("abcde"))
    job = Job(sites, Settings(("a", "b", "c"), max_nodes=5, beats_per_timeout=4))
    faults = (
        Fault(Moment(0.5, "world", 1), "shift", ("a", "b", "c"), 60.0),
        Fault(Moment(0.0, "Begin", 1, then=True), "shift", ("a", "b"), 60.0),
    )
    schedules = [Schedule(seed, kinds.CHASE, job, faults) for seed in range(20)]
    assert "then Begin 1 + 0.000 s  shift a b for 60.00 s" in str(schedules[0])
    assert not [violation for one in schedules for violation in play(one).violations]
    found = (play(one, BROKEN_RULES["later-proposals"]).violations for one in schedules)
    assert any(violation.checker in {ONE_LIVE, ONE_WORLD} for some in found for violation in some)


def test_an_end_of_which_nobody_heard_is_not_forgotten() -> None:
    """One is silent; the others finish; the leader is cut off, ends the job, and is started again."""
    sites = (Site("a"), Site("b", order=1, rate=0.983), Site("c"))
    job = Job(sites, Settings(("a",), max_nodes=3, beats_per_timeout=4))
    faults = (
        Fault(Moment(1.0, "world", 1), "partition", ("#2",), 4.0),
        Fault(Moment(0.01, then=True), "finish", ("#0", "#1")),
        Fault(Moment(0.4, then=True), "shift", ("@",), 60.0),
        Fault(Moment(0.1, then=True), "written", ("#0",), 0.2),
    )
    for seed in range(10):
        result = play(Schedule(seed, kinds.END_GAME, job, faults))
        assert not result.violations, result


def test_a_node_that_never_comes_is_not_waited_for() -> None:
    """A job whose quorum is there forms its world without it."""
    sites = (Site("a"), Site("b"), Site("c", comes_s=float("inf")))
    job = Job(sites, Settings(("a", "b", "c"), max_nodes=3, beats_per_timeout=4))
    late = Fault(Moment(8.0), "slow", ("a",), 0.1)
    schedule = Schedule(1, kinds.IMPATIENCE, job, (late,))
    result = play(schedule)
    assert not result.violations
    assert result.worlds
    alone = replace(job, sites=(Site("a"), *(Site(name, comes_s=float("inf")) for name in "bc")))
    assert not play(replace(schedule, job=alone)).worlds


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
    assert "BeginWorld" in story


def test_every_rule_can_be_broken_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """The command line's choices are the rules; another word, or no schedule, is refused."""
    for rule in BREAKS:
        assert main(["--seeds", "1", "--break", rule]) in {0, 1}
    for wrong in (["--break", "no-such-rule"], ["--seeds", "0"]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
    assert "--break: invalid choice: 'no-such-rule'" in capsys.readouterr().err
