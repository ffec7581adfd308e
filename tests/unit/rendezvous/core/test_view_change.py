"""When a leader looks again whether a world can form: at whatever it has learnt, from whomever."""

from __future__ import annotations

from elastic_resume.rendezvous.core.events import Settings
from elastic_resume.rendezvous.core.leader import Gate
from elastic_resume.rendezvous.core.messages import Hello, Join
from elastic_resume.rendezvous.core.peers import Part, Roster
from elastic_resume.rendezvous.core.quorum import Incarnation, Knowledge, World
from elastic_resume.rendezvous.core.state import Body, Link
from elastic_resume.rendezvous.core.view_change import Former

A, B, C, D = (Incarnation(name, "1", f"{name}:1", candidate=at) for at, name in enumerate("abcd"))


def test_a_death_that_a_refused_call_proves_wakes_a_leader_that_waits() -> None:
    """Of four that died in one moment the last leads before it hears that its calls to the others fail."""
    body = Body(Settings(("a:1", "b:1", "c:1"), max_nodes=4), D, None, 100.0)
    body.believe(Knowledge(3, World(1, (A, B, C, D), A), (), frozenset({A})))
    body.join = Join("d:2", 1)
    former = Former(body, Roster())
    former.advance()
    assert "1 of the 2 votes" in former.waiting_for
    body.current_until = body.now + 1
    body.nobody_at("b:1", body.known)
    body.nobody_at("c:1", body.known)
    body.now = former.since + body.settings.node_timeout_s  # until their leases have ended
    former.advance()
    assert former.forming is not None
    assert former.forming.world.members == (D,)


def test_newer_life_is_taken_in_though_the_leader_still_has_the_former_one_for_a_follower() -> None:
    """The leader was suspended: it hears of the follower's death from the follower's next life."""
    me = Incarnation("a", "1", "a", 0)
    former, newer = Incarnation("c", "1", "c", 2), Incarnation("c", "2", "c", 2)
    begun = World(1, (me, former), me)
    body = Body(Settings(("a", "b", "c"), max_nodes=3), me, None, 100.0)
    body.believe(Knowledge(3, begun))
    roster = Roster()
    roster.add(Part(former, Link(-1, who=former)))
    known = Knowledge(3, begun, (World(2, (newer,), newer),), frozenset({former}))
    gate = Gate(body, roster, lambda part, _: body.log("lost", str(roster.drop(part.who))))
    assert gate.check(Hello(newer, known, 2, node_timeout_s=3.0, min_nodes=1, max_nodes=3)) is None
    assert body.known.gone == {former}
