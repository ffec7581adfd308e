"""Schedules found by reading that a scenario file cannot express: they need a moment or a single message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic_resume.policy.reasons import Loss, NodeLost, NodeRefused, Signalled
from elastic_resume.rendezvous.core import interface, messages
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.node import RendezvousNode
from elastic_resume.rendezvous.core.state import NodeState
from elastic_resume.rendezvous.core.world import NO_VIEW, Ballot, Incarnation
from elastic_resume.rendezvous.facts import Fact, FactBody
from tests.support.rendezvous_sim.mutations import apply_mutation
from tests.support.rendezvous_sim.scenario import Scenario
from tests.support.rendezvous_sim.schedule import LOST_DISKS, WAIVED_INVARIANTS

NEWCOMER = Incarnation("x", "disk of x", 1, "x")


def start_job(nodes: str = "a,b,c", options: str = "") -> Scenario:
    """Return a job whose first view runs."""
    scenario = Scenario(f"nodes={nodes} candidates=a,b,c {options}")
    scenario.play(f"start {nodes.replace(',', ' ')}; run 5")
    return scenario


def get_state(scenario: Scenario, name: str) -> NodeState:
    """Return the state of a node's agent."""
    agent = scenario.nodes[name].agent
    assert agent
    return agent.state


def find_proposal(scenario: Scenario, name: str) -> Any:
    """Return the pending proposal of a leader."""
    agent = scenario.nodes[name].agent
    return agent and isinstance(agent.role, Leader) and agent.role.proposer.proposal


def play_unacknowledged_proposal() -> Scenario:
    """Play until b has proposed a view without the paused a, and a leads again. b never gets f's answer."""
    scenario = start_job("a,b,c,d,e,f")
    scenario.play("pause a")
    scenario.run_until(lambda: find_proposal(scenario, "b"))
    scenario.play("drop-messages f b; run 0.1; resume a")
    return scenario


def test_heir_that_followed_another_leader_takes_no_vote() -> None:
    """A returns, and decides b's proposal. Then a, and all that know the end of the job, die."""
    scenario = play_unacknowledged_proposal()
    scenario.run_until(lambda: get_state(scenario, "a").view.generation > 1)
    scenario.play("reset b a; fail-job a")
    scenario.run_until(lambda: get_state(scenario, "c").view.generation > 1 and find_proposal(scenario, "a"))
    scenario.play("reset c a; partition b c | a d e f")
    scenario.run_until(lambda: all(scenario.nodes[name].has_ended for name in "adef"))
    scenario.play("run 0.6; kill a d e f; heal; run 6")
    assert not scenario.checkers.violations


def test_end_of_the_job_has_a_generation_of_its_own() -> None:
    """A demands the end before it learns what b has proposed. All restart, twice."""
    scenario = play_unacknowledged_proposal()
    scenario.play("fail-job a; run 3")
    for _ in range(2):
        scenario.play("kill a b c d e f; heal; start a b c d e f; run 6")
    assert not scenario.checkers.violations
    assert scenario.checkers.find_whole_views(), "the end of the first run ended the second"


@pytest.mark.parametrize(("rule", "worlds"), [("", 1), ("handed-vote", 2)])
def test_node_that_handed_its_vote_over_has_it_no_more(rule: str, worlds: int) -> None:
    """A leaves, and b gets its vote. Then a is back beside c, beyond a cut from b."""
    with apply_mutation(rule):
        scenario = start_job(options="nnodes=1:3 strict")
        for name in "bc":
            scenario.nodes[name].max_stop_s = 8.0
        scenario.play("leave a; run 3; partition b | a c; start a; run 30")
        assert len(scenario.checkers.find_whole_views()) == worlds
        assert bool(scenario.checkers.violations) == (worlds == 2)


@pytest.mark.parametrize("first", ["a b", "c"])
def test_node_of_another_job_with_the_same_run_id_ends_nothing(first: str) -> None:
    """A and b begin anew with empty directories. C knows an old world of four, and starts later, or first."""
    scenario = start_job("a,b,c,d")
    scenario.play("kill a b c d; wipe-disk a b; run 1")
    scenario.checkers.waived = WAIVED_INVARIANTS[LOST_DISKS]
    scenario.play("start a b; run 10; kill a b; run 1")
    second = "c" if first == "a b" else "a b"
    scenario.play(f"start {first}; run 20; start {second}; run 30")
    assert whole_members(scenario) == "ab"
    refused = [fact.reason for _, name, fact in scenario.facts if isinstance(fact, interface.EndMembership)]
    assert any(isinstance(reason, NodeRefused) and "c" in str(reason) for reason in refused)


def test_hello_of_a_former_process_does_not_remove_the_present_one() -> None:
    """A packet of c's first process arrives when the second one leads the other side of a cut."""
    scenario = Scenario("nodes=a,b,c,d,e candidates=a,b,c")
    held: list[Any] = []
    send = scenario.net.send

    def hold(end: Any, payload: Any) -> None:
        if not held and isinstance(payload[1], messages.Hello) and (end.host, end.peer.host) == ("c", "a"):
            held.append(payload)
        else:
            send(end, payload)

    scenario.net.send = hold  # type: ignore[method-assign]
    scenario.play("start a b c; run 0.1; kill c; start c d e; run 6; reset c a; partition a b | c d e")
    deliver(scenario, "a", -900, *held)
    scenario.play("run 8")
    assert not scenario.checkers.violations


def deliver(scenario: Scenario, name: str, conn_id: int, *payloads: Any) -> None:
    """Let a node receive messages on a connection of its own, which is accepted first."""
    node = scenario.nodes[name]
    if conn_id not in get_state(scenario, name).links:
        node.deliver_event(interface.PeerConnected(conn_id), node.incarnation_id)
    for payload in payloads:
        header, message = payload if isinstance(payload, tuple) else (messages.Header(1, 0), payload)
        node.deliver_event(interface.MessageReceived(conn_id, header, message), node.incarnation_id)


def test_node_that_introduces_itself_twice_stops_no_other() -> None:
    """It does so on one connection, and then on another."""
    scenario = start_job()
    hello = replace(get_state(scenario, "b").make_hello(), sender=NEWCOMER, view=NO_VIEW, promised=Ballot())
    deliver(scenario, "a", -900, hello, messages.Heartbeat(), hello)
    deliver(scenario, "a", -901, hello)
    scenario.play("run 12")
    assert not scenario.checkers.violations
    assert scenario.checkers.find_whole_views()


def test_heartbeat_is_routine_only_of_a_follower() -> None:
    """As the first reply to a welcome it admits its sender, and facts may end a view: both act at once."""
    scenario = start_job()
    agent = scenario.nodes["a"].agent
    assert agent
    hello = replace(get_state(scenario, "b").make_hello(), sender=NEWCOMER, view=NO_VIEW, promised=Ballot())
    deliver(scenario, "a", -900, hello)
    link, facts = agent.state.links[-900], (Fact("topic", 3, FactBody("7")),)
    assert not agent.role.is_routine(link, messages.Heartbeat())
    deliver(scenario, "a", -900, messages.Heartbeat())
    assert agent.role.is_routine(link, messages.Heartbeat())
    assert not agent.role.is_routine(link, messages.Heartbeat(facts))
    assert not agent.role.is_routine(link, messages.WorkersStatus(messages.Workers.JOINED))


def test_leader_that_was_paused_checks_its_lease_before_it_answers_on() -> None:
    """A heartbeat is the first thing that it reads; its followers may run a later view by now."""
    scenario = start_job()
    agent = scenario.nodes["a"].agent
    assert agent
    assert agent.state.running_view
    conn_id = next(
        conn_id for conn_id, link in agent.state.links.items() if link.peer and link.peer.node == "b"
    )
    header = messages.Header(agent.state.links[conn_id].last_received_seq + 1, 0)
    now = agent.state.now + 60.0
    agent.handle(interface.MessageReceived(conn_id, header, messages.Heartbeat()), now)
    assert agent.state.running_view is None


def start_candidate() -> tuple[RendezvousNode, int]:
    """Return the candidate b, and the connection of its call to a."""
    settings = interface.RendezvousSettings(("a", "b", "c"), 1, 9)
    node = RendezvousNode(settings, Incarnation("b", "disk of b", 1, "b", 1), None, 0.0)
    node.handle(interface.Tick(), 0.0)
    node.handle(interface.Persisted(1), 0.01)
    (conn_id,) = node.state.links
    node.handle(interface.PeerConnected(conn_id, "1"), 0.02)
    return node, conn_id


def receive(node: RendezvousNode, conn_id: int, message: messages.Message) -> None:
    """Let a node receive the first message of a connection."""
    node.handle(interface.MessageReceived(conn_id, messages.Header(1, 0), message), 0.04)


CANDIDATE_A = Incarnation("a", "disk of a", 1, "a", 0)


def test_candidate_that_leaves_drops_its_own_call() -> None:
    """The node that it calls introduces itself on that call."""
    node, conn_id = start_candidate()
    node.handle(interface.Leave(Signalled("SIGTERM")), 0.03)
    receive(node, conn_id, replace(node.state.make_hello(), sender=CANDIDATE_A))
    for now in (0.5, 1.2, 1.5, 2.0, 2.5):
        node.handle(interface.Tick(), now)
    assert node.end_reason == NodeLost(node.state.incarnation.node, Loss.LEFT, Signalled("SIGTERM"))


def test_restarted_leader_that_called_twice_is_followed_again() -> None:
    """Its former process welcomes the candidate that holds both calls."""
    node, conn_id = start_candidate()
    for accepted_id in (-1, -2):
        node.handle(interface.PeerConnected(accepted_id), 0.03)
        receive(node, accepted_id, replace(node.state.make_hello(), sender=replace(CANDIDATE_A, boot=2)))
    receive(node, conn_id, messages.Welcome(CANDIDATE_A, NO_VIEW))
    assert not node.end_reason


def test_follower_that_left_may_still_take_its_leaders_vote() -> None:
    """C leads without a quorum and still lists b, which has left it and is the heir of a later view."""
    scenario = Scenario("nodes=a,b,c,d,e candidates=a,c,b,d,e nnodes=1:4")
    scenario.play("partition b c | a d e; start a b c d; run 2; block-links c>b c-a c-d c-e")
    scenario.play("run 2.8; block-links c-b c-a c-d c-e; start e")
    scenario.run_until(lambda: len(scenario.checkers.find_whole_views()) == 1, 10)
    scenario.play("run 0.2; leave a; run 0.02; partition a c d | b e; run 1.5; kill a")
    scenario.play("partition c d | a b e; run 20")
    assert scenario.checkers.violations == []


@pytest.mark.parametrize(
    ("nodes", "leaving"), [("a,b,c", "ab"), ("a,b,c", "ba"), ("a,b,c,d", "abc"), ("a,b,c,d", "cba")]
)
@pytest.mark.parametrize("pause", ["0.03", "0.1"])
def test_last_node_continues_when_the_others_leave(nodes: str, leaving: str, pause: str) -> None:
    """The view that is decided meanwhile still has the node that leaves next."""
    scenario = Scenario(f"nodes={nodes} candidates={nodes}")
    scenario.play(f"start {nodes.replace(',', ' ')}; run 5")
    for name in leaving:
        scenario.play(f"leave {name}; run {pause}")
    scenario.play("run 25")
    assert whole_members(scenario) == (set(nodes) - set(leaving) - {","}).pop()


@pytest.mark.parametrize("after_s", ["0.08", "0.085", "0.09", "0.095", "0.1"])
def test_second_of_two_nodes_continues_when_the_first_dies_during_a_start(after_s: str) -> None:
    """B has accepted a's proposal and decides it again. It takes a's vote on the next view, too."""
    scenario = Scenario("nodes=a,b candidates=a,b")
    scenario.play(f"start a b; run 6; kill-worker a; run {after_s}; kill a; run 10")
    assert whole_members(scenario) == "b"


def test_node_that_is_replaced_behind_a_cut_keeps_its_vote() -> None:
    """A new pod of e's name joins a, while e runs on beside b."""
    scenario = Scenario("nodes=a,b,e,e2 candidates=a,b,e same_names")
    scenario.play("start a b e; run 5; reset a e; partition a e2 | b e; start e2; run 30")
    assert not scenario.checkers.violations


def whole_members(scenario: Scenario) -> str:
    """Return the members of the only whole view in rank order."""
    ((_, members),) = scenario.checkers.find_whole_views()
    return "".join(member.node for member in members)


def test_node_that_another_cannot_reach_is_left_out_until_that_one_can() -> None:
    """Only a reports the pair, because it connects. It keeps its place and reports when the link is back."""
    scenario = Scenario("nodes=a,b,c candidates=a,b,c")
    scenario.play("start a b c; run 5; report-unreachable a b; run 600")
    assert whole_members(scenario) == "ac"
    scenario.play("report-unreachable a; run 5")
    assert whole_members(scenario) == "acb"


def test_crowd_goes_on_when_its_lowest_ranks_lose_power() -> None:
    """They are those that all others call first."""
    names = [f"n{place:03}" for place in range(120)]
    scenario = Scenario(f"nodes={','.join(names)} candidates={','.join(names[:3])} nnodes=1:120 heartbeats=4")
    scenario.play(f"start {' '.join(names)}; run 8; power-off {' '.join(names[:11])}; run 25")
    ((generation, members),) = scenario.checkers.find_whole_views()
    assert generation > 1
    assert len(members) == 109


def test_followers_killed_twice_stop_nobody() -> None:
    """Their second processes have introduced themselves and not joined when they die too."""
    scenario = start_job("a,b,c,d", "nnodes=1:4")
    scenario.play("begin-preparation c d; kill c d; start c d; run 0.1; kill c d; run 10")
    assert whole_members(scenario) == "ab"


@pytest.mark.parametrize("fault", ["reset", "die"])
def test_newcomer_that_is_lost_during_each_proposal_stops_the_others_rarely(fault: str) -> None:
    """Its connection breaks when it gets a proposal, or it dies then and is started again."""
    scenario = Scenario("nodes=a,b,c,x candidates=a,b,c nnodes=1:9")
    scenario.play("start a b c; run 8")
    newcomer, send, call_at = scenario.nodes["x"], scenario.net.send, scenario.clock.call_at

    def lose(leader: str, incarnation_id: int) -> None:
        if fault == "reset":
            scenario.net.reset_connections(leader, "x")
        elif newcomer.incarnation_id == incarnation_id and newcomer.has_process:
            newcomer.die()
            call_at(scenario.clock.now + 0.5, newcomer.boot)

    def send_and_lose(end: Any, payload: Any) -> None:
        send(end, payload)
        if isinstance(payload[1], messages.Propose) and end.peer.host == "x":
            call_at(scenario.clock.now + 0.002, lose, end.host, newcomer.incarnation_id)

    scenario.net.send = send_and_lose  # type: ignore[method-assign]
    scenario.play("start x; run 60")
    assert get_state(scenario, "a").view.generation < 15
    assert whole_members(scenario) == "abc"


def test_leader_whose_workers_do_not_stop_lets_others_lead_beside_a_crashing_newcomer() -> None:
    """Each change of the followers makes it look again."""
    scenario = Scenario("nodes=a,b,c,d candidates=a,b,c")
    scenario.play("start a b c; run 8; hang-workers a; kill-worker b")
    for _ in range(70):
        scenario.play("start d; run 1; kill d; run 1")
    ((_, members),) = scenario.checkers.find_whole_views()
    assert "bc" in "".join(member.node for member in members)
