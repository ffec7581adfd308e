"""What nodes tell people: nothing twice, nothing without a limit, and whoever looks changes nothing."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.rendezvous.core.messages import Header, Heartbeat, Hello
from elastic_resume.rendezvous.core.quorum import Incarnation, QuorumState
from elastic_resume.rendezvous.core.status import (
    MAX_QUEUED_BYTES,
    MAX_UPDATE_BYTES,
    EventLines,
    NodeStatus,
    StatusOutbox,
    StatusUpdate,
)
from elastic_resume.rendezvous.net import protocol, status
from elastic_resume.rendezvous.net.connection import ConnectionLimits
from elastic_resume.rendezvous.net.protocol import ProtocolError
from tests.support.rendezvous_nodes import (
    RUN,
    TIMEOUT_S,
    TOKEN,
    RendezvousNodes,
    SocketNode,
    authenticate,
    connect,
    count_open_descriptors,
    is_disconnected,
    listener_address,
    read_line,
    send_messages,
    wait_until,
)

pytestmark = pytest.mark.slow

KEY = protocol.derive_status_key(TOKEN)
A, B = Incarnation("a", "1", "a:1"), Incarnation("b", "1", "b:1")


# ---- what waits to be told -----------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.text(st.characters(exclude_characters="\n"), max_size=9), max_size=4), max_size=9)
)
def test_lines_are_told_once_in_order_and_again_to_another_reader(batches: list[list[str]]) -> None:
    """Numbers say which lines they are."""
    outbox = StatusOutbox()
    heard: list[str] = []
    for batch in batches:
        outbox.add(None, batch)
        tidings = outbox.take(A)
        if tidings:
            assert tidings.first_line_number == len(heard)
            heard += tidings.event_lines
    assert heard == [line for batch in batches for line in batch]
    assert outbox.take(A) is None
    again = outbox.take(B)
    assert (list(again.event_lines), again.first_line_number) == (heard, 0) if again else not heard


def test_a_pulse_is_told_once_and_the_newest_counts() -> None:
    """What is old by then is nobody's business."""
    outbox = StatusOutbox()
    outbox.add(NodeStatus(step=1), [])
    outbox.add(NodeStatus(step=2), [])
    assert outbox.take(A) == StatusUpdate(NodeStatus(step=2))
    assert outbox.take(A) is None


def test_no_heartbeat_carries_more_than_its_limit_and_nothing_is_kept_without_one() -> None:
    """The oldest lines go unsaid, and the receiver sees the gap; one that fits nowhere is left out."""
    outbox = StatusOutbox()
    line = '"' * 500
    outbox.add(None, ["x" * (MAX_UPDATE_BYTES + 1), *[line] * 3000])
    before = 3001
    heard = 0
    firsts = []
    while (tidings := outbox.take(A)) is not None:
        sent = protocol.encode(Header(1, 2), Heartbeat(None, tidings))
        assert len(sent) < MAX_UPDATE_BYTES + 1000
        assert protocol.decode(sent[:-1])[1] == Heartbeat(None, tidings)
        firsts.append(tidings.first_line_number)
        heard += len(tidings.event_lines)
    assert 0 < heard * len(line) <= MAX_QUEUED_BYTES
    assert firsts[0] == before - heard, "what was dropped is missing in the numbers"
    outbox.add(None, ["new"])
    assert outbox.take(A) == StatusUpdate(None, before, EventLines(("new",)))


@pytest.mark.parametrize(
    "news", [["a\nb"], ["x" * (MAX_UPDATE_BYTES + 1)], [1], ["x"] * 2000, ["\ud800"], "x", None]
)
def test_news_of_another_form_are_refused(news: object) -> None:
    """Whoever sends them is no agent of ours."""
    line = json.dumps({"header": [1, 2, 3, 0.5], "type": "Heartbeat", "body": [None, [None, 0, news]]})
    with pytest.raises(ProtocolError, match=r"Heartbeat\.status_update\.event_lines"):
        protocol.decode(line.encode())


# ---- at the door ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SocketNode]]:
    """Two nodes with a world, which no test may disturb."""
    stations = RendezvousNodes(
        tmp_path_factory.mktemp("pair"), ConnectionLimits(handshake_timeout_s=TIMEOUT_S, max_status_clients=3)
    )
    made = stations.build(2)
    for one in made:
        one.worlds.get(timeout=30)
    yield made
    stations.stop()


def hasten(station: SocketNode, patch: pytest.MonkeyPatch) -> None:
    """Give strangers a second from now on: who is to be let in has had all the time."""
    node = station.shell._server
    assert node is not None
    patch.setattr(node, "_limits", replace(node._limits, handshake_timeout_s=1.0))


def undisturbed(pair: list[SocketNode]) -> None:
    """Leases go on, and no world has ended."""
    fences = [one.lease_expires_at for one in pair]
    wait_until(
        lambda: all(one.lease_expires_at > old for one, old in zip(pair, fences, strict=True)), "leases go on"
    )
    assert not [end for one in pair for end in one.stop_effects]
    assert all(one.worlds.empty() and one.shell.is_alive for one in pair)


def test_whoever_holds_the_key_is_told_how_it_stands_and_nobody_else(pair: list[SocketNode]) -> None:
    """A leader and a follower each say what they see; the core never hears of those who look."""
    links = [one.link_count for one in pair]
    said = [json.loads(status.query_agent(one.address, RUN, KEY)) for one in pair]
    assert [one["leads"] for one in said] == [True, False]
    assert all(one["nodes"] == ["n0", "n1"] for one in said)
    with pytest.raises(ProtocolError, match="does not hold the run's token"):
        status.query_agent(pair[0].address, RUN, protocol.derive_status_key(b"another"))
    with pytest.raises(ProtocolError, match="does not hold the run's token"):
        status.query_agent(pair[0].address, RUN, TOKEN)  # it opens more, and not this door
    with pytest.raises(ProtocolError, match="it belongs to another job"):
        status.query_agent(pair[0].address, "other", KEY)
    with pytest.raises(OSError, match="refused"):
        status.query_agent("127.0.0.1:1", RUN, KEY)
    undisturbed(pair)
    assert [one.link_count for one in pair] == links


def test_the_key_for_looking_makes_nobody_a_member(
    pair: list[SocketNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held for a token it proves nothing; and who has looked may not go on talking."""
    with monkeypatch.context() as patch:
        hasten(pair[0], patch)
        with connect(pair[0].address) as stranger:
            with contextlib.suppress(ProtocolError):
                authenticate(stranger, KEY)
            assert is_disconnected(stranger)
    with looker(pair[0].address) as stranger:
        send_messages(stranger, Hello(A, QuorumState(1), 99))
        assert is_disconnected(stranger)
    undisturbed(pair)


def test_an_answer_that_somebody_wrote_into_the_connection_is_refused() -> None:
    """Who looks is told by an agent, or not at all."""

    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as conn:
            side = protocol.accept(TOKEN, RUN, "1" * 64)
            next(side)
            try:
                while True:
                    conn.sendall(side.send(read_line(conn)))
            except StopIteration as stop:
                conn.sendall(stop.value.final_line + b'{"leads":true}\n')

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=[listener])
        thread.start()
        with pytest.raises(ProtocolError, match="wrong digest"):
            status.query_agent(listener_address(listener), RUN, KEY)
        thread.join()


def test_those_who_look_and_do_not_read_cost_little_and_not_for_long(pair: list[SocketNode]) -> None:
    """Three at a time, until they are answered; the oldest goes when more come, and others are answered."""
    undisturbed(pair)
    before = count_open_descriptors()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(looker(pair[0].address))
        assert json.loads(status.query_agent(pair[0].address, RUN, KEY))["leads"]
        held = [stack.enter_context(looker(pair[0].address)) for _ in range(3)]
        for one in held:
            assert is_disconnected(one), "it need not be asked to go"
    wait_until(lambda: count_open_descriptors() <= before, "nothing is left of them")
    undisturbed(pair)


def test_one_that_sends_byte_by_byte_is_let_go(
    pair: list[SocketNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A greeting that never ends ends with the time for a handshake."""
    hasten(pair[0], monkeypatch)
    with connect(pair[0].address) as stranger:
        stranger.sendall(protocol.encode_greeting(RUN, "0" * 64, status_only=True)[:20])
        assert is_disconnected(stranger)
    undisturbed(pair)


@contextlib.contextmanager
def looker(address: str) -> Iterator[socket.socket]:
    """Go through the handshake, and read no further."""
    with connect(address) as stranger:
        authenticate(stranger, KEY, looks=True)
        yield stranger
