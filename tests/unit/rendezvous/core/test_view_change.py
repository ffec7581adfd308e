"""The leader's view change and admission at unusual moments."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_resume.policy.reasons import SettingDiffers
from elastic_resume.rendezvous.core.admission import Admission
from elastic_resume.rendezvous.core.interface import JoinRequest, RendezvousSettings, Send
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.messages import Hello, JoinSpec, Refused, Workers, WorkersStatus
from elastic_resume.rendezvous.core.peers import Link, Peer, PeerTable
from elastic_resume.rendezvous.core.state import NodeState
from elastic_resume.rendezvous.core.view_change import (
    MAX_ARGUMENTS_NAMED,
    compare_arguments,
)
from elastic_resume.rendezvous.core.world import Ballot, Incarnation, View


def test_admission_accepts_a_restarted_node_whose_former_process_still_follows() -> None:
    """The leader was suspended, and learns of the follower's end from its next process."""
    leader = Incarnation("a", "disk a", 1, "a", 0)
    former, newer = (Incarnation("c", "disk c", boot, "c", 2) for boot in (1, 2))
    view = View(1, (leader, former), leader)
    state = NodeState(RendezvousSettings(("a", "b", "c"), max_nodes=3), leader, None, 100.0)
    state.adopt_view(view)
    peers = PeerTable()
    peers.add(Peer(former, Link(-1, peer=former)))
    admission = Admission(state, peers)
    hello = Hello(newer, view, Ballot(), 2, node_timeout_s=3.0, min_nodes=1, max_nodes=3)
    refused = admission.check_hello(hello, is_running=False)
    assert refused is not None
    assert refused.refusal == SettingDiffers("host 1 of the list in --rdzv-endpoint", "missing", "a")
    hello = Hello(
        newer,
        view,
        Ballot(),
        2,
        node_timeout_s=3.0,
        min_nodes=1,
        max_nodes=3,
        candidates=("a", "b", "c"),
    )
    assert admission.check_hello(hello, is_running=False) is None
    assert state.contacts.ended == {former}


@pytest.mark.parametrize(
    ("theirs", "difference"),
    [
        (("a", "c", "b"), (2, "c", "b")),
        (("localhost", "b", "c"), (1, "localhost", "a")),
        (("a", "b"), (3, "missing", "c")),
        (("a", "b", "c", "d"), (4, "d", "missing")),
    ],
)
def test_admission_names_the_first_candidate_that_differs(
    theirs: tuple[str, ...], difference: tuple[int, str, str]
) -> None:
    """The order counts: a candidate's place is its vote before the first view."""
    state = NodeState(RendezvousSettings(("a", "b", "c")), Incarnation("a", "disk a", 1, "a", 0), None, 0.0)
    admission = Admission(state, PeerTable())
    sender = Incarnation("x", "disk x", 1, "x")
    hello = replace(state.make_hello(), sender=sender, candidates=theirs)
    refused = admission.check_hello(hello, is_running=False)
    assert refused is not None
    number, *values = difference
    assert refused.refusal == SettingDiffers(f"host {number} of the list in --rdzv-endpoint", *values)


@pytest.mark.parametrize(("script", "is_refused"), [("a", False), ("b", True), ("", False)])
@pytest.mark.parametrize("leader_joins_first", [False, True])
def test_node_with_another_script_is_refused_whoever_joins_first(
    script: str, is_refused: bool, leader_joins_first: bool
) -> None:
    """A script that could not be read is taken for the same."""
    own, other = Incarnation("a", "disk a", 1, "a", 0), Incarnation("b", "disk b", 1, "b")
    state = NodeState(RendezvousSettings(("a",), max_nodes=2), own, None, 100.0)
    leader, link = Leader(state, {}), Link(-1, peer=other)
    state.links[-1] = link
    leader.peers.add(Peer(other, link))
    theirs = WorkersStatus(Workers.JOINED, join=JoinSpec("b:1", 1, script=script))
    if not leader_joins_first:
        leader.handle_message(link, theirs)
    state.script = "a"
    leader.handle_own(JoinRequest(JoinSpec("a:1", 1, script="a")))
    if leader_joins_first:
        leader.handle_message(link, theirs)
    sent = [effect.message for effect in state.effects if isinstance(effect, Send)]
    refusal = Refused(SettingDiffers("the training script", "b", "a"))
    assert [message for message in sent if isinstance(message, Refused)] == [refusal] * is_refused
    assert len(leader.peers.by_incarnation) == int(not is_refused)


def test_arguments_are_named_of_rank_0_and_of_nodes_that_differ() -> None:
    """Only of some, if many differ; of none, if all are equal."""
    nodes = tuple(Incarnation(name, name) for name in "abcdef")
    view = View(1, nodes, nodes[0])

    def compare(*arguments: str) -> list[str]:
        joins = {
            node: JoinSpec("x:1", 1, arguments=text) for node, text in zip(nodes, arguments, strict=True)
        }
        return [f"{each.node} {each.arguments}" for each in compare_arguments(view, joins)]

    assert compare(*["--lr 1"] * 6) == []
    assert compare("--lr 1", "--lr 1", "--lr 2", "--lr 1", "--lr 1", "--lr 1") == ["a --lr 1", "c --lr 2"]
    assert len(compare(*map(str, range(6)))) == MAX_ARGUMENTS_NAMED
