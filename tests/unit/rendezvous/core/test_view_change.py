"""When a leader looks again whether a world can form: at whatever it has learnt, from whomever."""

from __future__ import annotations

from elastic_resume.rendezvous.core.events import Settings
from elastic_resume.rendezvous.core.leader import Admission
from elastic_resume.rendezvous.core.messages import Hello, JoinSpec
from elastic_resume.rendezvous.core.peers import Link, Peer, PeerTable
from elastic_resume.rendezvous.core.quorum import Incarnation, QuorumState, View
from elastic_resume.rendezvous.core.state import NodeState
from elastic_resume.rendezvous.core.view_change import ViewChange

A, B, C, D = (Incarnation(name, "1", f"{name}:1", candidate_index=at) for at, name in enumerate("abcd"))


def test_a_death_that_a_refused_call_proves_wakes_a_leader_that_waits() -> None:
    """Of four that died in one moment the last leads before it hears that its calls to the others fail."""
    body = NodeState(Settings(("a:1", "b:1", "c:1"), max_nodes=4), D, None, 100.0)
    body.set_quorum_state(QuorumState(3, View(1, (A, B, C, D), A), (), frozenset({A})))
    body.join = JoinSpec("d:2", 1)
    former = ViewChange(body, PeerTable(), {})
    former.advance()
    assert "1 of the 2 required votes" in former.wait_reason
    body.view_current_until = body.now + 1
    body.mark_dead_at("b:1", body.quorum_state)
    body.mark_dead_at("c:1", body.quorum_state)
    body.now = former.started_at + body.settings.node_timeout_s  # until their leases have ended
    former.advance()
    assert former.pending is not None
    assert former.pending.view.members == (D,)


def test_newer_life_is_taken_in_though_the_leader_still_has_the_former_one_for_a_follower() -> None:
    """The leader was suspended: it hears of the follower's death from the follower's next life."""
    me = Incarnation("a", "1", "a", 0)
    former, newer = Incarnation("c", "1", "c", 2), Incarnation("c", "2", "c", 2)
    begun = View(1, (me, former), me)
    body = NodeState(Settings(("a", "b", "c"), max_nodes=3), me, None, 100.0)
    body.set_quorum_state(QuorumState(3, begun))
    roster = PeerTable()
    roster.add(Peer(former, Link(-1, peer=former)))
    known = QuorumState(3, begun, (View(2, (newer,), newer),), frozenset({former}))
    gate = Admission(
        body, roster, lambda part, _: body.emit_event("lost", str(roster.remove(part.incarnation)))
    )
    assert gate.check_hello(Hello(newer, known, 2, node_timeout_s=3.0, min_nodes=1, max_nodes=3)) is None
    assert body.quorum_state.dead == {former}
