"""The leader's view change and admission at unusual moments."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_resume.policy.reasons import SettingDiffers
from elastic_resume.rendezvous.core.interface import RendezvousSettings
from elastic_resume.rendezvous.core.leader import Admission
from elastic_resume.rendezvous.core.messages import Hello
from elastic_resume.rendezvous.core.peers import Link, Peer, PeerTable
from elastic_resume.rendezvous.core.state import NodeState
from elastic_resume.rendezvous.core.view_change import MAX_BACKOFF_S, Backoff
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
    admission = Admission(state, peers, lambda peer, _: peers.remove(peer.incarnation))
    hello = Hello(
        newer, view, Ballot(), 2, has_followed_another=False, node_timeout_s=3.0, min_nodes=1, max_nodes=3
    )
    refused = admission.check_hello(hello)
    assert refused is not None
    assert refused.refusal == SettingDiffers("host 1 of the list in --rdzv-endpoint", "missing", "a")
    hello = Hello(
        newer,
        view,
        Ballot(),
        2,
        has_followed_another=False,
        node_timeout_s=3.0,
        min_nodes=1,
        max_nodes=3,
        candidates=("a", "b", "c"),
    )
    assert admission.check_hello(hello) is None
    assert state.voter.ended == {former}


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
    admission = Admission(state, PeerTable(), lambda *_: None)
    sender = Incarnation("x", "disk x", 1, "x")
    hello = replace(state.make_hello(), sender=sender, candidates=theirs)
    refused = admission.check_hello(hello)
    assert refused is not None
    number, *values = difference
    assert refused.refusal == SettingDiffers(f"host {number} of the list in --rdzv-endpoint", *values)
