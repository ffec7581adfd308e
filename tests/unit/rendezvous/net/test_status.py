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

from elastic_resume.rendezvous.core.messages import Beat, Hello, Stamp
from elastic_resume.rendezvous.core.quorum import Incarnation, Knowledge
from elastic_resume.rendezvous.core.status import MAX_KEPT_BYTES, MAX_NEWS_BYTES, News, Outbox, Pulse, Tidings
from elastic_resume.rendezvous.net import protocol, status
from elastic_resume.rendezvous.net.protocol import WireError
from elastic_resume.rendezvous.net.server import Limits
from tests.support.stations import (
    PATIENCE_S,
    RUN,
    TOKEN,
    Station,
    Stations,
    address_of,
    calling,
    descriptors,
    dropped,
    prove,
    read_line,
    say,
    until,
)

pytestmark = pytest.mark.slow

KEY = protocol.look_key(TOKEN)
A, B = Incarnation("a", "1", "a:1"), Incarnation("b", "1", "b:1")


# ---- what waits to be told -----------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.text(st.characters(exclude_characters="\n"), max_size=9), max_size=4), max_size=9)
)
def test_lines_are_told_once_in_order_and_again_to_another_reader(batches: list[list[str]]) -> None:
    """Numbers say which lines they are."""
    outbox = Outbox()
    heard: list[str] = []
    for batch in batches:
        outbox.put(None, batch)
        tidings = outbox.take(A)
        if tidings:
            assert tidings.first == len(heard)
            heard += tidings.news
    assert heard == [line for batch in batches for line in batch]
    assert outbox.take(A) is None
    again = outbox.take(B)
    assert (list(again.news), again.first) == (heard, 0) if again else not heard


def test_a_pulse_is_told_once_and_the_newest_counts() -> None:
    """What is old by then is nobody's business."""
    outbox = Outbox()
    outbox.put(Pulse(step=1), [])
    outbox.put(Pulse(step=2), [])
    assert outbox.take(A) == Tidings(Pulse(step=2))
    assert outbox.take(A) is None


def test_no_heartbeat_carries_more_than_its_limit_and_nothing_is_kept_without_one() -> None:
    """The oldest lines go unsaid, and the receiver sees the gap; one that fits nowhere is left out."""
    outbox = Outbox()
    line = '"' * 500
    outbox.put(None, ["x" * (MAX_NEWS_BYTES + 1), *[line] * 3000])
    before = 3001
    heard = 0
    firsts = []
    while (tidings := outbox.take(A)) is not None:
        sent = protocol.encode(Stamp(1, 2), Beat(None, tidings))
        assert len(sent) < MAX_NEWS_BYTES + 1000
        assert protocol.decode(sent[:-1])[1] == Beat(None, tidings)
        firsts.append(tidings.first)
        heard += len(tidings.news)
    assert 0 < heard * len(line) <= MAX_KEPT_BYTES
    assert firsts[0] == before - heard, "what was dropped is missing in the numbers"
    outbox.put(None, ["new"])
    assert outbox.take(A) == Tidings(None, before, News(("new",)))


@pytest.mark.parametrize(
    "news", [["a\nb"], ["x" * (MAX_NEWS_BYTES + 1)], [1], ["x"] * 2000, ["\ud800"], "x", None]
)
def test_news_of_another_form_are_refused(news: object) -> None:
    """Whoever sends them is no agent of ours."""
    line = json.dumps({"stamp": [1, 2, 3, 0.5], "type": "Beat", "body": [None, [None, 0, news]]})
    with pytest.raises(WireError, match=r"Beat\.tidings\.news"):
        protocol.decode(line.encode())


# ---- at the door ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Station]]:
    """Two nodes with a world, which no test may disturb."""
    stations = Stations(tmp_path_factory.mktemp("pair"), Limits(handshake_s=PATIENCE_S, lookers=3))
    made = stations.build(2)
    for one in made:
        one.worlds.get(timeout=30)
    yield made
    stations.stop()


def hasten(station: Station, patch: pytest.MonkeyPatch) -> None:
    """Give strangers a second from now on: who is to be let in has had all the time."""
    node = station.shell._node
    assert node is not None
    patch.setattr(node, "_limits", replace(node._limits, handshake_s=1.0))


def undisturbed(pair: list[Station]) -> None:
    """Leases go on, and no world has ended."""
    fences = [one.fence_at for one in pair]
    until(lambda: all(one.fence_at > old for one, old in zip(pair, fences, strict=True)), "leases go on")
    assert not [end for one in pair for end in one.ends]
    assert all(one.worlds.empty() and one.shell.alive for one in pair)


def test_whoever_holds_the_key_is_told_how_it_stands_and_nobody_else(pair: list[Station]) -> None:
    """A leader and a follower each say what they see; the core never hears of those who look."""
    links = [one.links for one in pair]
    said = [json.loads(status.ask(one.address, RUN, KEY)) for one in pair]
    assert [one["leads"] for one in said] == [True, False]
    assert all(one["nodes"] == ["n0", "n1"] for one in said)
    with pytest.raises(WireError, match="does not hold the run's token"):
        status.ask(pair[0].address, RUN, protocol.look_key(b"another"))
    with pytest.raises(WireError, match="does not hold the run's token"):
        status.ask(pair[0].address, RUN, TOKEN)  # it opens more, and not this door
    with pytest.raises(WireError, match="it belongs to another job"):
        status.ask(pair[0].address, "other", KEY)
    with pytest.raises(OSError, match="refused"):
        status.ask("127.0.0.1:1", RUN, KEY)
    undisturbed(pair)
    assert [one.links for one in pair] == links


def test_the_key_for_looking_makes_nobody_a_member(
    pair: list[Station], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held for a token it proves nothing; and who has looked may not go on talking."""
    with monkeypatch.context() as patch:
        hasten(pair[0], patch)
        with calling(pair[0].address) as stranger:
            with contextlib.suppress(WireError):
                prove(stranger, KEY)
            assert dropped(stranger)
    with looker(pair[0].address) as stranger:
        say(stranger, Hello(A, Knowledge(1), 99))
        assert dropped(stranger)
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
                conn.sendall(stop.value.last + b'{"leads":true}\n')

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=[listener])
        thread.start()
        with pytest.raises(WireError, match="wrong digest"):
            status.ask(address_of(listener), RUN, KEY)
        thread.join()


def test_those_who_look_and_do_not_read_cost_little_and_not_for_long(pair: list[Station]) -> None:
    """Three at a time, until they are answered; the oldest goes when more come, and others are answered."""
    undisturbed(pair)
    before = descriptors()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(looker(pair[0].address))
        assert json.loads(status.ask(pair[0].address, RUN, KEY))["leads"]
        held = [stack.enter_context(looker(pair[0].address)) for _ in range(3)]
        for one in held:
            assert dropped(one), "it need not be asked to go"
    until(lambda: descriptors() <= before, "nothing is left of them")
    undisturbed(pair)


def test_one_that_sends_byte_by_byte_is_let_go(pair: list[Station], monkeypatch: pytest.MonkeyPatch) -> None:
    """A greeting that never ends ends with the time for a handshake."""
    hasten(pair[0], monkeypatch)
    with calling(pair[0].address) as stranger:
        stranger.sendall(protocol.greeting(RUN, "0" * 64, looks=True)[:20])
        assert dropped(stranger)
    undisturbed(pair)


@contextlib.contextmanager
def looker(address: str) -> Iterator[socket.socket]:
    """Go through the handshake, and read no further."""
    with calling(address) as stranger:
        prove(stranger, KEY, looks=True)
        yield stranger
