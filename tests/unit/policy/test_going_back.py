"""Which state a request goes back to, when it is done, and what it leaves behind: by table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.errors import ConfigError, NoValidCheckpointError
from elastic_resume.milestone import MAX_WAYS_BACK, Milestone, WayBack, choose_kept
from elastic_resume.policy import going_back, proof
from elastic_resume.policy.resume_plan import (
    ARCHIVE,
    ASIDE,
    MEMORY,
    Inventory,
    RejectedState,
    SavedState,
    reject_saved_state,
)

REQUESTED = "500"
WAYS = (WayBack(REQUESTED, 4, 500, 5),)


def state(
    generation: int,
    step: int,
    *labels: tuple[str, float | None],
    node: str = "a",
    ways: tuple[WayBack, ...] = (),
    tier: str = "disk",
) -> SavedState:
    """Return a saved state."""
    milestones = tuple(Milestone(*label) for label in labels)
    return SavedState(node, generation, step, 0, tier, milestones=milestones, ways_back=ways)


def node(name: str, *states: SavedState, request: str = "", rank: int = 0, **more: object) -> Inventory:
    """Return the inventory of a node that holds ``states`` itself."""
    return Inventory(name, rank, tuple(states), resume_from=request, **more)  # type: ignore[arg-type]


OLD = (
    state(2, 500),
    state(4, 480, ("best", -0.3)),
    state(4, 500),
    state(4, 600, ("eval", None)),
    state(4, 2000),
)
BEFORE = (*OLD, state(1, 100, ("best", -0.9)), state(3, 400, ("eval", None)))


@pytest.mark.parametrize(
    ("request_text", "chosen"),
    [
        ("500", (4, 500)),  # the newest of that step, not the first
        ("g2-s500", (2, 500)),
        ("g000002-s0000000500", (2, 500)),
        ("best", (4, 480)),  # the greatest metric
        ("eval", (4, 600)),  # no metric: the newest
        ("latest", (4, 600)),
        ("2000", (4, 2000)),  # no way back, and yet done once
    ],
)
def test_request_chooses_state(request_text: str, chosen: tuple[int, int]) -> None:
    """The generation rises above all; the steps behind are given up, not recomputed."""
    request = going_back.parse_setting("--resume-from", request_text) or ""
    nodes = [
        node("a", *BEFORE, request=request, generation=6, last_generation=4, last_step=2003),
        node("b", rank=1),
    ]
    plan = going_back.plan_with_request(nodes, "auto")
    assert (plan.version, plan.generation, plan.goes_back) == (chosen, 7, True)
    assert plan.ways_back == (WayBack(request, *chosen, 7),)
    assert (plan.recomputed_steps, plan.given_up_steps) == (0, 2003 - chosen[1])
    assert plan.receiving_nodes == ("b",)


def test_request_is_done_once() -> None:
    """Whatever repeats it goes on from the newest state, whose history descends from it."""
    new = (state(5, 500, ways=WAYS), state(7, 530, ways=WAYS))
    for repeated in (REQUESTED, ""):  # a start without the flag goes on too, and passes the request on
        plan = going_back.plan_with_request([node("a", *OLD, *new, request=repeated)], "auto")
        assert (plan.version, plan.goes_back, plan.ways_back) == ((7, 530), False, WAYS)
    again = going_back.plan_with_request([node("a", *OLD, *new, request="g000005-s0000000500")], "auto")
    assert (again.version, again.goes_back, again.given_up_steps) == ((5, 500), True, 30)


def test_request_is_taken_from_any_node_and_two_are_refused() -> None:
    """A node may have been started by another script."""
    plan = going_back.plan_with_request([node("a", *OLD), node("b", rank=1, request="best")], "must")
    assert plan.version == (4, 480)
    nodes = [node("a", *OLD, request="best"), node("b", rank=1, request="500"), node("c", rank=2)]
    with pytest.raises(ConfigError, match=r"\(a: best; b: 500\).*same value"):
        going_back.plan_with_request(nodes, "auto")


@pytest.mark.parametrize("request_text", ["700", "g9-s500", "worst"])
def test_missing_state_is_an_error_that_lists_what_there_is(request_text: str) -> None:
    """Milestones come first. A state that exists and is not usable is named with its reason."""
    rejected = RejectedState("b", "g000003-s0000000700", "torn.", (3, 700), milestones=("worst",))
    request = going_back.parse_setting("x", request_text) or ""
    nodes = [node("a", *OLD, request=request), node("b", rank=1, rejected=(rejected,))]
    with pytest.raises(NoValidCheckpointError) as caught:
        going_back.plan_with_request(nodes, "auto")
    text = str(caught.value)
    assert "Looked on a, b. Milestones: best (g4-s480), eval (g4-s600). Others: g4-s2000, " in text
    assert ("Not usable: b/g000003-s0000000700: torn." in text) == (request_text != "g9-s500")


def test_request_without_any_state_is_no_fresh_start() -> None:
    """A wrong --rdzv-id must not start over."""
    with pytest.raises(NoValidCheckpointError, match=r"Nothing is saved on a: is .* Start the node"):
        going_back.plan_with_request([node("a", request="best")], "auto")


def test_best_that_fails_to_load_leads_to_the_next_best_with_its_name() -> None:
    """The failed one is listed; a quarantined one from before is not."""
    second = state(4, 300, ("best", -0.5))
    aside = RejectedState("a", "g000004-s0000001900", "newer", (4, 1900), ASIDE, ("best",))
    before = node("a", *OLD, second, request="best", rejected=(aside,))
    failed = reject_saved_state(before, OLD[1], "g000004-s0000000480", "a digest is wrong")
    plan = going_back.plan_with_request([failed], "auto")
    assert plan.version == (4, 300)
    assert [each.version for each in plan.rejected] == [(4, 480)]


def test_late_node_with_newer_old_states_changes_nothing() -> None:
    """They lose by order, are no milestone of the job any more, and are found to be moved aside."""
    new = state(5, 505, ("eval", None), ways=WAYS)
    late = node("b", state(4, 2000, ("best", 9.0), node="b"), state(4, 490, node="b"), rank=1)
    plan = going_back.plan_with_request([node("a", *OLD, new), late], "auto")
    assert plan.version == (5, 505)
    assert [s.step for s in late.saved_states if going_back.is_abandoned(s, plan)] == [2000]
    for request, chosen in (("best", (4, 480)), ("eval", (5, 505)), ("latest", (5, 505))):
        back = going_back.plan_with_request([node("a", *OLD, new, request=request), late], "auto")
        assert back.version == chosen, request
    with pytest.raises(NoValidCheckpointError, match="such a saved state"):
        going_back.plan_with_request([node("a", new, request="2000"), late], "auto")


def test_steps_of_an_abandoned_history_are_not_recomputed() -> None:
    """The only node that has trained in the new one is lost right after its commit."""
    new = state(5, 500, ways=WAYS)
    nodes = [node("a", *OLD, new, request=REQUESTED, last_generation=4, last_step=2003)]
    plan = going_back.plan_with_request(nodes, "auto")
    assert (plan.version, plan.recomputed_steps) == ((5, 500), 0)


# g1 to step 400, back to 50, g3 to 150, back to 100, g5 to 390, back to 200.
TO_50, TO_100, TO_200 = WayBack("early", 1, 50, 2), WayBack("good", 3, 100, 4), WayBack("200", 5, 200, 6)
TWICE = state(5, 390, ways=(TO_50, TO_100))
THRICE = state(7, 300, ways=(TO_50, TO_100, TO_200))


@pytest.mark.parametrize(
    ("newest", "version", "is_left"),
    [
        (TWICE, (1, 50), False),
        (TWICE, (1, 51), True),  # by the first way back, though it is older than the second one's state
        (TWICE, (1, 342), True),
        (TWICE, (2, 60), False),
        (TWICE, (3, 100), False),
        (TWICE, (3, 101), True),
        (TWICE, (4, 100), False),
        (TWICE, (5, 389), False),
        (THRICE, (1, 342), True),
        (THRICE, (3, 150), True),
        (THRICE, (4, 100), False),
        (THRICE, (5, 200), False),
        (THRICE, (5, 390), True),
        (THRICE, (6, 200), False),
    ],
)
def test_state_is_abandoned_if_any_way_back_left_it(
    newest: SavedState, version: tuple[int, int], is_left: bool
) -> None:
    """The newest way back alone says nothing of what an earlier one has left."""
    assert going_back.is_abandoned(state(*version), newest) == is_left


def test_step_of_a_history_left_two_ways_ago_is_not_found_and_says_why_it_went() -> None:
    """Unless by its name; then its own ways back count, and no longer those of the other history."""
    first, second = state(1, 342, tier="archive"), state(3, 100, ways=(TO_50,))
    with pytest.raises(NoValidCheckpointError, match="such a saved state"):
        going_back.plan_with_request([node("a", first, second, TWICE, request="342")], "auto")
    plan = going_back.plan_with_request([node("a", first, second, TWICE, request="100")], "auto")
    assert plan.ways_back == (TO_50, WayBack("100", 3, 100, 6))
    assert "g000001-s0000000050, to which --resume-from early" in going_back.describe_abandoned(first, plan)
    named = "g000001-s0000000342"
    plan = going_back.plan_with_request([node("a", first, second, TWICE, request=named)], "auto")
    assert plan.ways_back == (WayBack(named, 1, 342, 6),)
    assert going_back.is_abandoned(second, plan)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1 << 16)), min_size=1, max_size=40))
def test_exactly_states_that_are_no_ancestors_are_abandoned(choices: list[tuple[bool, int]]) -> None:
    """By a model: each state has its history. A start goes on or back, to any state, and trains a step."""
    start = state(1, 1)
    states, ancestors = [start], {start: {start}}
    for goes_back, number in choices:
        newest = max(states, key=lambda each: each.version)
        base = states[number % len(states)] if goes_back else newest
        request = f"g{base.generation}-s{base.step}" if goes_back else ""
        plan = going_back.plan_with_request([node("a", *states, request=request)], "auto")
        at_base = state(plan.generation, plan.step, ways=plan.ways_back)
        past_it = state(plan.generation, plan.step + 1, ways=plan.ways_back)
        ancestors[at_base] = ancestors[plan.saved_state_for("a") or start] | {at_base}
        ancestors[past_it] = ancestors[at_base] | {past_it}
        states += [at_base, past_it]
        left = {each for each in states if going_back.is_abandoned(each, past_it)}
        assert left == {*states} - ancestors[past_it]


def test_history_with_too_many_ways_back_refuses_one_more() -> None:
    """The error comes at the request, since no state could carry it. Another history has room."""
    ways = tuple(WayBack("1", number, 1, number + 1) for number in range(1, MAX_WAYS_BACK + 1))
    states = (state(1, 1), state(MAX_WAYS_BACK + 1, 1, ways=ways), state(MAX_WAYS_BACK + 1, 2, ways=ways))
    named = "g000257-s0000000001"
    with pytest.raises(NoValidCheckpointError, match="gone back 256 times, which is the limit"):
        going_back.plan_with_request([node("a", *states, request=named)], "auto")
    plan = going_back.plan_with_request([node("a", *states, request="g000001-s0000000001")], "auto")
    assert len(plan.ways_back) == 1


def test_newer_format_blocks_a_request_too() -> None:
    """It may be the state that descends from it."""
    newer = RejectedState("a", "g000005-s0000000500", "format 99", (5, 500), "newer")
    with pytest.raises(NoValidCheckpointError, match="Upgrade"):
        going_back.plan_with_request([node("a", *OLD, request=REQUESTED, rejected=(newer,))], "auto")


def test_going_back_is_not_a_moment_for_a_proof() -> None:
    """The next resume is; it repeats steps of the new history alone."""
    memory = [state(4, step, tier=MEMORY) for step in (500, 501, 502)]
    before = node("a", *memory, request="501", wants_proof=True, last_generation=4, last_world_size=1)
    assert proof.plan_with_proof([before], "auto", 1).target is None
    ways = (WayBack("501", 4, 501, 5),)
    new = [state(5, step, tier=MEMORY, ways=ways) for step in (501, 502)]
    after = node("a", *memory, *new, request="501", wants_proof=True, last_generation=5, last_world_size=1)
    plan = proof.plan_with_proof([after], "auto", 1)
    assert (plan.version, plan.target, plan.ways_back) == ((5, 501), new[1], ways)


def test_of_milestones_with_a_metric_the_best_of_each_name_counts() -> None:
    """All without a metric do. Of equals the newest."""
    best, worse, equal = Milestone("best", 0.5), Milestone("best", 0.4), Milestone("best", 0.5)
    other, plain = Milestone("other", -1.0), Milestone("best")
    labels = [
        ((1, 1), best),
        ((1, 2), worse),
        ((1, 3), equal),
        ((1, 2), other),
        ((1, 1), plain),
        ((2, 1), plain),
    ]
    assert choose_kept(labels) == {((1, 3), equal), ((1, 2), other), ((1, 1), plain), ((2, 1), plain)}


@pytest.mark.parametrize("text", [" ", "a b", "ü", "x" * 65, "../x", "-1.5x/", "latest\n"])
def test_wrong_request_is_refused(text: str) -> None:
    """The text has the forms that are accepted."""
    with pytest.raises(ConfigError, match=r"--resume-from is .*g4-s500"):
        going_back.parse_setting("--resume-from", text)


@pytest.mark.parametrize(
    ("request_name", "states", "text"),
    [
        (
            "bset",
            (state(1, 5), state(1, 5, tier=ARCHIVE), state(1, 3, ("best", None), tier=ARCHIVE)),
            "Did you mean best? Looked on a and in s3://b/llm. Milestones: best (g1-s3). Others: g1-s5. Name",
        ),
        (
            "nope",
            (state(2, 7, ("eval", None)), state(1, 5, ("eval", None)), state(1, 3, ("best", None))),
            "Looked on a and in s3://b/llm. Milestones: best (g1-s3), eval (g2-s7, g1-s5). Name",
        ),
        (
            "9",
            (),
            "Nothing is saved on a and in s3://b/llm: is --rdzv-id, --ckpt-dir or --archive another one?",
        ),
    ],
)
def test_missing_state_is_told_what_there_is_and_where(
    request_name: str, states: tuple[SavedState, ...], text: str
) -> None:
    """Each once, though a node and the archive have it."""
    inventory = Inventory("a", 0, states, resume_from=request_name, archive="s3://b/llm")
    with pytest.raises(NoValidCheckpointError) as caught:
        going_back.plan_with_request([inventory], "auto")
    assert f"no node of this start has such a saved state. {text}" in str(caught.value)


@pytest.mark.parametrize("text", ["", "off"])
def test_no_request_can_be_said(text: str) -> None:
    """As over a variable that has one. So "off" is no name either."""
    assert going_back.parse_setting("--resume-from", text) is None
    assert going_back.parse_request(text) is None
