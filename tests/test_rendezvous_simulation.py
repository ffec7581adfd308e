"""Random schedules against the real core; and each rule of the quorum is needed: broken, it is found out."""

from __future__ import annotations

import os

import pytest

from elastic_resume.rendezvous.checkers import ONE_LIVE
from elastic_resume.rendezvous.quorum import Rules
from elastic_resume.rendezvous.simulate import first_violation, main, run

SEEDS = int(os.environ.get("ELASTIC_RESUME_SIMULATE_SEEDS", "300"))


def test_no_schedule_breaks_a_promise() -> None:
    """A failing seed prints its schedule."""
    broken = [str(result) for result in map(run, range(SEEDS)) if result.violations]
    assert not broken, "\n".join(broken)


@pytest.mark.slow
def test_no_schedule_of_many_more_breaks_a_promise() -> None:
    """The same, for longer; the seeds are others."""
    broken = [str(result) for result in map(run, range(10_000, 10_000 + 5 * SEEDS)) if result.violations]
    assert not broken, "\n".join(broken)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules",
    [
        Rules(incarnations=False),
        Rules(two_steps=False),
        Rules(later_proposals=False),
        Rules(gone_brings_knowledge=False),
    ],
    ids=["incarnations", "two steps", "later proposals", "gone brings knowledge"],
)
def test_a_broken_rule_makes_two_live_worlds(rules: Rules) -> None:
    """Without any one of the four rules some schedule makes two worlds, and the checker sees it."""
    found = first_violation(rules, range(2000), lambda violation: violation.checker == ONE_LIVE)
    assert found is not None


def test_a_seed_is_a_schedule() -> None:
    """The same seed plays the same story, to the last message."""
    first, again = run(7, told=True), run(7, told=True)
    assert str(first) == str(again)
    assert first.story


def test_the_command_prints_what_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    """`simulate rendezvous --seeds N` says how many and how fast."""
    assert main(["--seeds", "3"]) == 0
    assert capsys.readouterr().out.startswith("3 schedules, ")
