"""Which nodes wait: those that end views before they make a step."""

from __future__ import annotations

import pytest

from elastic_resume.rendezvous.core.backoff import MAX_BACKOFF_S, Backoff
from elastic_resume.rendezvous.core.world import Incarnation

NODE = Incarnation("c", "disk of c")


def test_each_setback_doubles_the_wait() -> None:
    """The first costs nothing, a view that lasts forgets them, and the wait has a limit."""
    node, backoff = Incarnation("d", "disk"), Backoff(node_timeout_s=3.0)
    waits = []
    for _ in range(4):
        backoff.add(node, 10.0)
        waits.append(backoff.wait_until(node) - 10.0)
    assert waits == [0.0, 3.0, 9.0, 21.0]
    for _ in range(9):
        backoff.add(node, 10.0)
    assert backoff.wait_until(node) == 10.0 + MAX_BACKOFF_S
    backoff.remove(node)
    assert backoff.wait_until(node) < 0


@pytest.mark.parametrize(
    ("newest_step", "lasted_s", "waits"),
    [
        (8, 2.0, False),  # it made a step
        (7, 2.0, True),
        (7, 100.0, True),  # the job reports steps, and made none
        (7, 400.0, False),
        (0, 30.0, True),  # the job reports no steps: time counts
        (0, 61.0, False),
    ],
)
def test_node_that_ends_views_without_progress_waits(newest_step: int, lasted_s: float, waits: bool) -> None:
    """The first time costs nothing."""
    backoff, now = Backoff(3.0), 1000.0
    for _ in range(3):
        backoff.note_start(now, min(7, newest_step))
        now += lasted_s
        backoff.note_end(NODE, now)
        backoff.settle(newest_step)
    assert (backoff.wait_until(NODE) > now) is waits
    backoff.note_start(now, min(7, newest_step))
    backoff.note_end(NODE, now + 400.0)
    backoff.settle(newest_step + 1)
    assert backoff.wait_until(NODE) < now, "a view with it has made progress"


def test_newcomers_let_views_train_for_half_of_the_time() -> None:
    """One waits whenever a view starts, and the script needs 20 s to its first step."""
    backoff, now, step, trained_s = Backoff(3.0), 0.0, 1, 0.0
    for _ in range(30):
        backoff.note_start(now, step)
        lasted_s = backoff.compute_scale_up_delay_s(1.0)
        now += lasted_s
        trained_s += max(0.0, lasted_s - 20.0)
        step += lasted_s > 20.0
        backoff.note_newcomers(now)
        backoff.settle(step)
    assert trained_s > now / 2
    backoff.note_start(now, step)
    backoff.note_start(now + 1000.0, step)
    assert backoff.compute_scale_up_delay_s(1.0) == 1.0, "they come rarely"


def test_thousands_of_lost_views_cost_no_error() -> None:
    """A node that is needed does not wait, and its losses count all the same."""
    backoff = Backoff(3.0)
    for time_s in range(2000):
        backoff.note_start(time_s, 1)
        backoff.note_end(NODE, time_s + 0.5)
        backoff.note_newcomers(time_s + 0.5)
        backoff.settle(1)
    assert backoff.wait_until(NODE) - 1999.5 == MAX_BACKOFF_S
    assert backoff.compute_scale_up_delay_s(1.0) == MAX_BACKOFF_S


def test_loss_that_an_earlier_leader_has_judged_is_not_held_against_a_node() -> None:
    """A follower notes losses too, and may lead much later."""
    backoff = Backoff(3.0)
    for time_s in (0.0, 500.0, 1000.0):
        backoff.note_start(time_s, 1)
        if time_s == 0.0:
            backoff.note_end(NODE, 100.0)  # settled by the leader of that time
    backoff.settle(1)
    backoff.note_start(1100.0, 1)
    backoff.note_end(NODE, 1101.0)
    backoff.settle(1)
    assert backoff.wait_until(NODE) <= 1101.0, "the first time costs nothing"


def test_first_wait_does_not_grow_with_the_node_timeout() -> None:
    """A preempted node comes back as soon in a job that allows slow networks."""
    backoff = Backoff(30.0)
    for _ in range(2):
        backoff.add(NODE, 10.0)
    assert backoff.wait_until(NODE) == 15.0
