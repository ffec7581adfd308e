"""What proves to a voter, and to a follower, that another process has ended."""

from __future__ import annotations

import pytest

from elastic_resume.rendezvous.core.follower import Follower
from elastic_resume.rendezvous.core.interface import (
    Connect,
    Effect,
    Event,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
    Persist,
    Persisted,
    RendezvousSettings,
    Tick,
)
from elastic_resume.rendezvous.core.messages import Header, Welcome
from elastic_resume.rendezvous.core.node import RendezvousNode
from elastic_resume.rendezvous.core.peers import Link
from elastic_resume.rendezvous.core.state import NodeState
from elastic_resume.rendezvous.core.world import NO_VIEW, Incarnation, View

SETTINGS = RendezvousSettings(("head:1", "b:1"), max_nodes=3)


def feed(node: RendezvousNode, now: float, *received: Event) -> list[Effect]:
    """Pass events to a node whose disk is immediate; return all effects."""
    effects: list[Effect] = []
    for event in received:
        effects += node.handle(event, now)
    return effects + [
        further
        for effect in effects
        if isinstance(effect, Persist)
        for further in feed(node, now, Persisted(effect.version))
    ]


@pytest.mark.parametrize(
    ("address", "known_ip", "refusing_ips", "is_ended"),
    [
        ("head:1", "10.0.0.1", {"10.0.0.1"}, True),
        ("head:1", "10.0.0.1", {"10.0.0.9"}, False),  # the name belongs to another machine by now
        ("head:1", "10.0.0.1", {"10.0.0.1", "fd00::1"}, True),
        ("10.0.0.1:1", "192.168.0.1", {"10.0.0.1"}, True),  # a host with two networks, and no name
        ("[fd00::1]:1", "fd00::7", {"fd00::1"}, True),
        ("head:1", "", {"10.0.0.9"}, True),  # a process that this one has never met
    ],
)
def test_refused_call_proves_the_end_of_the_process_that_was_there(
    address: str, known_ip: str, refusing_ips: set[str], *, is_ended: bool
) -> None:
    """The leader has met that follower at an IP address."""
    leader, follower = Incarnation("a", "disk a", 1, "a:1"), Incarnation("b", "disk b", 1, address)
    contacts = NodeState(SETTINGS, leader, None, 0.0).contacts
    contacts.adopt_view(View(1, (leader, follower), leader), leader)
    if known_ip:
        contacts.follower_links[follower] = Link(-1, peer=follower, ip_address=known_ip)
    call = Link(1, address, view_at_dial=contacts.view, refusing_ips=frozenset(refusing_ips))
    contacts.mark_ended_at(call)
    assert (follower in contacts.ended) is is_ended


@pytest.mark.parametrize(("dialled_at", "is_ended"), [(4.0, False), (6.0, True)])
def test_refused_call_proves_the_end_of_a_process_known_before(dialled_at: float, *, is_ended: bool) -> None:
    """The follower, a spare, sent its message at 5 s: an earlier call may have come before it listened."""
    leader, follower = Incarnation("a", "disk a", 1, "a:1"), Incarnation("b", "disk b", 1, "b:1")
    contacts = NodeState(SETTINGS, leader, None, 0.0).contacts
    contacts.follower_links[follower] = Link(-1, peer=follower, ip_address="1", last_received_at=5.0)
    contacts.mark_ended_at(Link(1, "b:1", dialled_at=dialled_at, refusing_ips=frozenset({"1"})))
    assert (follower in contacts.ended) is is_ended


def test_follower_keeps_a_leader_whose_name_leads_to_another_machine() -> None:
    """Only a refusal at the address where the leader answered ends it."""
    node = RendezvousNode(SETTINGS, Incarnation("b", "disk b", 1, "b:1", 1), None, 0.0)
    (call,) = [effect for effect in feed(node, 0.0, Tick()) if isinstance(effect, Connect)]
    leader = Incarnation("a", "disk a", 1, call.address, 0)
    welcome = Welcome(leader, NO_VIEW)
    feed(node, 0.1, PeerConnected(call.conn_id, "10.0.0.1"))
    feed(node, 0.1, MessageReceived(call.conn_id, Header(1, 0), welcome))
    (redial,) = [
        effect for effect in feed(node, 0.2, PeerDisconnected(call.conn_id)) if isinstance(effect, Connect)
    ]
    elsewhere, there = frozenset({"10.0.0.9"}), frozenset({"10.0.0.1"})
    effects = feed(node, 0.3, PeerDisconnected(redial.conn_id, refused=True, refusing_ips=elsewhere))
    assert isinstance(node.role, Follower)
    effects += feed(node, 0.6, Tick())
    (redial,) = [effect for effect in effects if isinstance(effect, Connect)]
    feed(node, 0.7, PeerDisconnected(redial.conn_id, refused=True, refusing_ips=there))
    assert not isinstance(node.role, Follower)
