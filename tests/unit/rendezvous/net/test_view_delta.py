"""Views as differences: every view comes back as it was, and no line can make anything else of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.rendezvous.core import messages
from elastic_resume.rendezvous.core.messages import Header, Message
from elastic_resume.rendezvous.core.world import Ballot, Incarnation, Proposal, View, Vote
from elastic_resume.rendezvous.net import protocol, view_delta
from elastic_resume.rendezvous.net.codec import ProtocolError, pack_view
from elastic_resume.rendezvous.net.view_delta import NO_BASE, Base, make_base

HEADER = Header(1, 1)
MEMBERS = tuple(Incarnation(f"node{i:03}", f"{i:016x}", 1 + i, f"node{i:03}:29400") for i in range(100))
VIEW = View(7, MEMBERS, MEMBERS[0], "d:1:1")
BASE = make_base(pack_view(VIEW))


def send(message: Message, base: Base) -> tuple[Message, int]:
    """Return a message as its receiver has it, and the bytes of its line."""
    line = protocol.encode_head(HEADER) + protocol.encode_body(message, base).text
    return protocol.decode(line, base)[1], len(line)


@given(
    st.lists(st.sampled_from(MEMBERS), unique=True, max_size=100),
    st.lists(st.integers(1000, 2000), unique=True, max_size=5),
    st.booleans(),
)
def test_view_comes_back_from_any_other_one(kept: list[Incarnation], new: list[int], is_strict: bool) -> None:
    """Members may leave, come, begin again, and change their order."""
    members = (*kept, *(Incarnation(f"new,;{i}", f"{i}", 1, "[::1]:1", 2) for i in new))
    view = View(8, members, members[-1] if members else None, "d;,:1", is_strict)
    message, _ = send(messages.Decided(view), BASE)
    assert isinstance(message, messages.Decided)
    assert pack_view(message.view) == pack_view(view)


def make_hello(view: View) -> messages.Hello:
    """Return a hello of the first member."""
    return messages.Hello(MEMBERS[0], view, Ballot(), 7)


@pytest.mark.parametrize(
    "wrap",
    [
        make_hello,
        lambda view: messages.Welcome(MEMBERS[0], view),
        lambda view: messages.Propose(7, Proposal(Ballot(1), view)),
        lambda view: Vote(7, Ballot(1), Proposal(Ballot(1), view)),
        messages.Decided,
    ],
    ids=["Hello", "Welcome", "Propose", "Vote", "Decided"],
)
@pytest.mark.parametrize(
    "view", [VIEW, replace(VIEW, generation=8, members=MEMBERS[1:])], ids=["same", "one less"]
)
def test_each_message_with_a_view_is_short(wrap: Any, view: View) -> None:
    """A new field with a view has to be found by `find_view`."""
    whole, bytes_whole = send(wrap(view), NO_BASE)
    message, bytes_sent = send(wrap(view), BASE)
    assert message == whole
    assert bytes_sent < bytes_whole / 5
    assert view_delta.next_base(message, NO_BASE).packed == pack_view(view)


def test_short_view_or_another_one_is_sent_whole() -> None:
    """A reference would save nothing."""
    others = tuple(replace(member, disk_id=f"other{member.disk_id}") for member in MEMBERS)
    for view in (View(8, MEMBERS[:3]), View(8, others)):
        assert send(messages.Decided(view), BASE)[1] == send(messages.Decided(view), NO_BASE)[1]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ([[0, 105]], "does not have"),
        ([[-1, 2]], "does not have"),
        ([[0, 0]], "does not have"),
        ([[0, 1.5]], "not fields"),
        ([[True, True]], "not fields"),
        ([[0]], "not fields"),
        ([None], "not fields"),
        ("all", "not fields"),
        ([[0, 104]] * 2000, "more than"),
        (["7", "", "", "", "not a member"], "not a view"),
        ([], "not a view"),
    ],
)
def test_malformed_difference_is_refused(fields: Any, error: str) -> None:
    """Nothing but `ProtocolError` is raised, and a short line makes no huge view."""
    with pytest.raises(ProtocolError, match=error):
        decode({"base": BASE.digest, "fields": fields}, BASE)


@pytest.mark.parametrize("base", [NO_BASE, make_base("7;;;;x")])
@pytest.mark.parametrize("digest", [BASE.digest, "", None, []])
def test_difference_to_a_view_that_the_receiver_lacks_is_refused(base: Base, digest: Any) -> None:
    """The empty digest is that of no base."""
    with pytest.raises(ProtocolError, match="does not have"):
        decode({"base": digest, "fields": [[0, 1]]}, base)


def test_line_with_a_difference_is_parsed_with_the_base_of_its_own_connection() -> None:
    """The same bytes are no view on a connection where another view, or none, has travelled."""
    body = protocol.encode_body(messages.Decided(VIEW), BASE).text
    assert len(body) <= protocol.MAX_REMEMBERED_BYTES, "else it would not be remembered in any case"
    line = protocol.encode_head(HEADER) + body
    assert protocol.decode(line, BASE)[1] == messages.Decided(VIEW)
    with pytest.raises(ProtocolError, match="does not have"):
        protocol.decode(line, NO_BASE)


def decode(view: Any, base: Base) -> None:
    """Decode a line in which ``view`` is in the place of a view."""
    body = json.dumps({"type": "Decided", "body": [view]})[1:]
    protocol.decode(protocol.encode_head(HEADER) + body.encode(), base)


def test_object_elsewhere_in_a_line_stays_what_it_is() -> None:
    """It is refused as before."""
    with pytest.raises(ProtocolError, match="not a view"):
        decode({"other": 1}, BASE)
