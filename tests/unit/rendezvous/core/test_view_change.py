"""The leader's view change and admission at unusual moments."""

from __future__ import annotations

from elastic_resume.rendezvous.core.events import Settings
from elastic_resume.rendezvous.core.leader import Admission
from elastic_resume.rendezvous.core.messages import Hello, JoinSpec
from elastic_resume.rendezvous.core.peers import Link, Peer, PeerTable
from elastic_resume.rendezvous.core.quorum import Incarnation, QuorumState, View
from elastic_resume.rendezvous.core.state import NodeState
from elastic_resume.rendezvous.core.view_change import ViewChange

A, B, C, D = (Incarnation(name, "1", f"{name}:1", candidate_index=at) for at, name in enumerate("abcd"))


def test_refused_call_lets_a_waiting_leader_propose() -> None:
    """Three of four nodes died at once; the last leads before its calls to them are refused."""
    state = NodeState(Settings(("a:1", "b:1", "c:1"), max_nodes=4), D, None, 100.0)
    state.set_quorum_state(QuorumState(3, View(1, (A, B, C, D), A), (), frozenset({A})))
    state.join = JoinSpec("d:2", 1)
    view_change = ViewChange(state, PeerTable(), {})
    view_change.advance()
    assert "1 of the 2 required votes" in view_change.wait_reason
    state.view_current_until = state.now + 1
    state.mark_dead_at("b:1", state.quorum_state)
    state.mark_dead_at("c:1", state.quorum_state)
    state.now = view_change.started_at + state.settings.node_timeout_s  # their leases have expired
    view_change.advance()
    assert view_change.pending is not None
    assert view_change.pending.view.members == (D,)


def test_admission_accepts_a_restarted_node_whose_former_process_still_follows() -> None:
    """The leader was suspended, and learns of the follower's death from its next process."""
    leader = Incarnation("a", "1", "a", 0)
    former, newer = Incarnation("c", "1", "c", 2), Incarnation("c", "2", "c", 2)
    installed = View(1, (leader, former), leader)
    state = NodeState(Settings(("a", "b", "c"), max_nodes=3), leader, None, 100.0)
    state.set_quorum_state(QuorumState(3, installed))
    peers = PeerTable()
    peers.add(Peer(former, Link(-1, peer=former)))
    known = QuorumState(3, installed, (View(2, (newer,), newer),), frozenset({former}))
    admission = Admission(
        state, peers, lambda peer, _: state.emit_event("lost", str(peers.remove(peer.incarnation)))
    )
    assert admission.check_hello(Hello(newer, known, 2, node_timeout_s=3.0, min_nodes=1, max_nodes=3)) is None
    assert state.quorum_state.dead == {former}
