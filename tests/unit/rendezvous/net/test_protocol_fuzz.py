"""Whatever arrives on the wire, only WireError escapes, and every message survives the way there."""

from __future__ import annotations

import base64
import json
import os
import zlib
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_resume.policy.divergence import Digest
from elastic_resume.rendezvous.core.events import (
    Event,
    JoinRequested,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
    Persist,
    Persisted,
    Settings,
    Tick,
)
from elastic_resume.rendezvous.core.messages import (
    Header,
    Heartbeat,
    Hello,
    JoinSpec,
    Message,
    ProposeView,
    StateDigest,
    WaitReason,
)
from elastic_resume.rendezvous.core.node import RendezvousNode
from elastic_resume.rendezvous.core.quorum import Incarnation, QuorumState, View
from elastic_resume.rendezvous.core.status import EventLines
from elastic_resume.rendezvous.net import codec, protocol
from elastic_resume.rendezvous.net.protocol import LineReader, ProtocolError

CASES = int(os.environ.get("ELASTIC_RESUME_FUZZ_CASES", "600"))
"""How many cases each slow test tries; `make nightly` has them try more."""

texts = st.text(max_size=8)
numbers = st.integers(0, 1 << 50)
incarnations = st.builds(Incarnation, texts, texts, texts, st.none() | st.integers(0, 9))
worlds = st.builds(View, numbers, st.lists(incarnations, max_size=3).map(tuple), incarnations)
knowledges = st.builds(
    QuorumState,
    numbers,
    st.none() | worlds,
    st.lists(worlds, max_size=2).map(tuple),
    st.frozensets(incarnations, max_size=3),
    st.frozensets(st.tuples(numbers, incarnations), max_size=2),
)
st.register_type_strategy(Incarnation, incarnations)
st.register_type_strategy(View, worlds)
st.register_type_strategy(QuorumState, knowledges)
st.register_type_strategy(int, numbers)
st.register_type_strategy(float, st.floats(0, 1e9))
st.register_type_strategy(Digest, st.sampled_from([Digest("ab" * 16), Digest("01" * 16)]))
news = st.lists(
    st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=9), max_size=3
)
st.register_type_strategy(EventLines, news.map(lambda lines: EventLines(tuple(lines))))
any_message = st.one_of([st.from_type(kind) for kind in get_args(Message)])
stamps = st.builds(Header, numbers, numbers, numbers, st.floats(0, 100))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(stamps, any_message)
def test_a_message_is_read_as_it_was_written(stamp: Header, message: Message) -> None:
    """Every type, every field."""
    assert protocol.decode(protocol.encode(stamp, message)[:-1]) == (stamp, message)


@pytest.mark.slow
@settings(max_examples=CASES)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_wire_errors(data: bytes) -> None:
    """Bytes of a stranger, at every place where bytes are read."""
    token, run, nonce = b"t", "r", "0" * 64
    for read in (
        lambda: protocol.decode(data),
        lambda: protocol.parse_greeting(data, run),
        lambda: protocol.parse_challenge(data),
        lambda: protocol.verify_proof(data, token, "dialler", run, (nonce, nonce)),
    ):
        with pytest.raises(ProtocolError):
            read()


@pytest.mark.slow
@settings(max_examples=CASES)
@given(st.sampled_from([kind.__name__ for kind in get_args(Message)]), st.lists(json_values, max_size=7))
def test_json_of_wrong_shape_raises_nothing_but_wire_errors(kind: str, body: list[object]) -> None:
    """A known type with fields of any kind."""
    line = json.dumps({"header": [1, 2, 3, 0.5], "type": kind, "body": body}).encode()
    try:
        stamp, message = protocol.decode(line)
    except ProtocolError:
        return
    assert protocol.decode(protocol.encode(stamp, message)[:-1]) == (stamp, message)


@pytest.mark.slow
@settings(max_examples=CASES)
@given(stamps, any_message, st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=3)), max_size=4))
def test_a_damaged_line_raises_nothing_but_wire_errors(
    stamp: Header, message: Message, damages: list[tuple[int, bytes]]
) -> None:
    """A good line in which some bytes are others; what is taken all the same can be said again."""
    line = protocol.encode(stamp, message)[:-1]
    for place, data in damages:
        line = line[:place] + data + line[place + len(data) + place % 2 :]
    try:
        read = protocol.decode(line)
    except ProtocolError:
        return
    assert protocol.decode(protocol.encode(*read)[:-1]) == read


@settings(max_examples=1000)
@given(st.text(";,%z+/=0123456789abcdef", max_size=60))
def test_any_text_for_a_world_raises_nothing_but_wire_errors(text: str) -> None:
    """Quoted, compressed, cut off, or none of it."""
    line = json.dumps(
        {"header": [1, 0, 0, 0.0], "type": "ProposeView", "body": [text, [1, None, [], [], []]]}
    )
    try:
        protocol.decode(line.encode())
    except ProtocolError:
        return
    assert codec.pack_view(codec.unpack_view(text)) == text, "it was spelled as a world is"


@pytest.mark.slow
@settings(max_examples=1000)
@given(json_values, json_values, json_values)
def test_a_handshake_of_any_json_raises_nothing_but_wire_errors(
    version: object, nonce: object, proof: object
) -> None:
    """Before anything is proved."""
    token, run, ours = b"t", "r", "0" * 64
    lines = [
        {"elastic_resume": version, "run": run, "nonce": nonce, "status_only": False},
        {"elastic_resume": version, "nonce": nonce},
        {"proof": proof},
    ]
    greeting, answer, last = (json.dumps(line).encode() for line in lines)
    for read in (
        lambda: protocol.parse_greeting(greeting, run),
        lambda: protocol.parse_challenge(answer),
        lambda: protocol.verify_proof(last, token, "dialler", run, (ours, ours)),
    ):
        try:
            read()
        except ProtocolError:
            continue
        assert version == protocol.VERSION


def test_a_proof_that_is_no_text_in_utf8_is_refused() -> None:
    """JSON can spell half of a surrogate pair; no encoding holds it."""
    with pytest.raises(ProtocolError):
        protocol.verify_proof(b'{"proof": "\\ud800"}', b"t", "dialler", "r", ("0" * 64, "0" * 64))


@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(1, 60))
def test_lines_do_not_depend_on_how_the_stream_was_cut(pieces: list[bytes], limit: int) -> None:
    """The same lines, or the same refusal, and never more held than the limit and one piece."""
    whole = cut(LineReader(limit), [b"".join(pieces)])
    assert cut(LineReader(limit), pieces) == whole


def cut(lines: LineReader, pieces: list[bytes]) -> tuple[list[bytes], bool]:
    """The lines read, and whether one was too long."""
    read: list[bytes] = []
    try:
        for piece in pieces:
            read.extend(one for one in lines.feed(piece))
    except ProtocolError:
        return read, True
    return read, False


def test_a_handshake_proves_both_sides_to_each_other_and_no_other() -> None:
    """Right token, wrong token, another run, a replay and a reflection."""
    ours, theirs = "a" * 64, "b" * 64
    assert protocol.parse_greeting(protocol.encode_greeting("run", ours)[:-1], "run") == (ours, False)
    assert protocol.parse_challenge(protocol.encode_challenge(theirs)[:-1]) == theirs
    with pytest.raises(ProtocolError):
        protocol.parse_greeting(protocol.encode_greeting("run", ours)[:-1], "another run")
    for side, other in (("dialler", "acceptor"), ("acceptor", "dialler")):
        line = protocol.encode_proof(b"token", side, "run", (ours, theirs))[:-1]
        protocol.verify_proof(line, b"token", side, "run", (ours, theirs))
        for token, of, run, nonces in (
            (b"another token", side, "run", (ours, theirs)),
            (b"token", other, "run", (ours, theirs)),  # reflected
            (b"token", side, "another run", (ours, theirs)),
            (b"token", side, "run", ("c" * 64, theirs)),  # replayed
            (b"token", side, "run", (ours, "c" * 64)),
        ):
            with pytest.raises(ProtocolError, match="token"):
                protocol.verify_proof(line, token, of, run, nonces)


@pytest.mark.parametrize("status_only", [False, True])
def test_a_dialler_that_proves_nothing_hears_nothing_made_of_the_token(status_only: bool) -> None:
    """Whatever the token is, a stranger who knows the run's name is told the same: nothing to crack."""
    heard = []
    for token in (b"one token", b"another token"):
        side = protocol.accept(token, "run", "b" * 64)
        said = [
            next(side),
            side.send(protocol.encode_greeting("run", "a" * 64, status_only=status_only)[:-1]),
        ]
        with pytest.raises(protocol.AuthenticationError, match="token") as caught:
            side.send(b'{"proof":"' + b"0" * 64 + b'"}')
        heard.append([*said, caught.value.rejection_line])
    assert heard[0] == heard[1]


def shaken(
    token: bytes, nonces: tuple[str, str], *, looks: bool = False
) -> tuple[protocol.HandshakeResult, protocol.HandshakeResult]:
    """Both ends of a handshake, dialler and acceptor."""
    key = protocol.derive_status_key(token) if looks else token
    dialler, acceptor = (
        protocol.dial(key, "run", nonces[0], status_only=looks),
        protocol.accept(token, "run", nonces[1]),
    )
    next(acceptor)
    line = dialler.send(acceptor.send(next(dialler)[:-1])[:-1])
    with pytest.raises(StopIteration) as accepted:
        acceptor.send(line[:-1])
    with pytest.raises(StopIteration) as called:
        dialler.send(accepted.value.value.final_line[:-1])
    return called.value.value, accepted.value.value


@pytest.mark.parametrize("status_only", [False, True])
def test_each_line_is_read_once_in_its_order_by_the_one_it_was_signed_for(status_only: bool) -> None:
    """Changed, repeated, left out, turned round, sent back or of another connection: the digest is wrong."""
    nonces = ("a" * 64, "b" * 64)
    lines = [b"one\n", b"two\n", b"\n"]
    for _ in range(2):
        here, there = shaken(b"token", nonces, looks=status_only)
        for sends, hears in ((here.signer, there.verifier), (there.signer, here.verifier)):
            assert [hears.verify(sends.sign(line)[:-1]) for line in lines] == [b"one", b"two", b""]
    one, two = (shaken(b"token", nonces)[0].signer.sign(lines[0])[:-1] for _ in range(2))
    assert one == two, "a digest is of key, count and line"

    def refused(*said: bytes, good: int = 0) -> None:
        hears = shaken(b"token", nonces)[1].verifier
        for line in said[:good]:
            hears.verify(line)
        with pytest.raises(ProtocolError, match="wrong digest"):
            hears.verify(said[good])

    first, second, third = map(shaken(b"token", nonces)[0].signer.sign, lines)
    first, second, third = first[:-1], second[:-1], third[:-1]
    refused(first, first, good=1)
    refused(first, third, good=1)
    refused(second)
    refused(b"ome" + first[3:])
    refused(first[3:])
    refused(b"")
    refused(shaken(b"token", nonces)[1].signer.sign(lines[0])[:-1])
    refused(shaken(b"token", ("a" * 64, "c" * 64))[0].signer.sign(lines[0])[:-1])
    refused(shaken(b"token", ("c" * 64, "b" * 64))[0].signer.sign(lines[0])[:-1])
    refused(shaken(b"another", nonces)[0].signer.sign(lines[0])[:-1])
    refused(shaken(b"token", nonces, looks=True)[0].signer.sign(lines[0])[:-1])


def test_what_a_hello_and_a_proposal_of_a_large_world_weigh() -> None:
    """A thousand members fit the limit many times over."""
    members = tuple(Incarnation(f"node{n:04}", "1" * 16, f"node{n:04}:29400") for n in range(1000))
    world = View(7, members, members[0])
    known = QuorumState(3, world, (world,), frozenset(members[:500]))
    for message in (Hello(members[0], known, 7), ProposeView(world, known)):
        assert len(protocol.encode(Header(1, 1), message)) * 8 < protocol.MAX_LINE_BYTES


def test_a_large_world_is_compressed_and_comes_back_as_one_object() -> None:
    """What is sent to a thousand is read once; a small one stays readable."""
    members = tuple(
        Incarnation(f"node,{n};%\u00e9", f"life{n}", f"[::1]:{n}", n or None) for n in range(1000)
    )
    world = View(7, members, members[3])
    text = codec.pack_view(world)
    assert text.startswith("z")
    codec._view_cache.clear()
    read = codec.unpack_view(text)
    assert [(one, one.address, one.candidate_index) for one in read.members] == [
        (one, one.address, one.candidate_index) for one in members
    ]
    assert (read, read.leader) == (world, members[3])
    assert codec.unpack_view(text + "") is read
    assert codec.pack_view(View(1, members[1:2], members[1])) == "1;" + ";".join(
        ["node%2C1%3B%25%C3%A9,life1,[::1]:1,1"] * 2
    )


def test_a_world_that_expands_without_end_is_refused() -> None:
    """A thousand bytes that say a million members."""
    bomb = zlib.compress(b"1;" + b"a,b,c,;" * 10_000_000)
    for data in (bomb, bomb[:-20], zlib.compress(b"1;a,b,c,") + b"more", b"no zlib"):
        with pytest.raises(ValueError):  # noqa: PT011  unpack promises no more
            codec.unpack_view("z" + base64.b64encode(data).decode())


def test_what_is_kept_of_worlds_is_bounded() -> None:
    """Whoever sends one world after the other finds the memory as small as before."""
    for generation in range(100):
        codec.unpack_view(f"{generation};a,b,c,")
    assert len(codec._view_cache) <= codec.MAX_CACHED_VIEWS
    assert len(codec._text_cache) <= codec.MAX_CACHED_VIEWS


def test_a_name_that_no_encoding_holds_is_refused() -> None:
    """JSON can spell half of a surrogate pair; a log or a lookup of such a name would fail later."""
    with pytest.raises(ProtocolError, match="cannot be encoded"):
        protocol.decode(b'{"header":[1,0,0,0.0],"type":"WaitReason","body":["\\ud800"]}')


def test_a_reason_that_is_too_long_is_cut_not_refused() -> None:
    """A sentence that names a thousand nodes must not make all who hear it hang up."""
    line = protocol.encode(Header(1, 0), WaitReason("node " * 1000))
    message = protocol.decode(line[:-1])[1]
    assert isinstance(message, WaitReason)
    assert message.reason.startswith("node node ")
    assert message.reason.endswith("…")


def test_a_heartbeat_is_read_as_strictly_as_any_line() -> None:
    """It has a way of its own through the reader, since nearly every line is one."""
    good = protocol.encode(Header(1, 2, 3, 0.5), Heartbeat())[:-1]
    assert protocol.decode(good) == (Header(1, 2, 3, 0.5), Heartbeat())
    tail = b',"type":"Heartbeat","body":[null,null]}'
    assert good.endswith(tail)
    for head in (
        b"",
        b"{",
        b'{"header":[1,2,3]',
        b'{"header":[1,2,3,0.5],"x":1',
        b"[1,2,3,0.5]",
        b'{"header":[-1,2,3,4]',
    ):
        with pytest.raises(ProtocolError):
            protocol.decode(head + tail)


@pytest.mark.parametrize(
    "digest", ["", "ab" * 15, "ab" * 16 + "\n", "AB" * 16, "ag" * 16, "\u0661" * 32, 7, None, ["ab" * 16]]
)
def test_a_heartbeat_carries_a_digest_of_32_digits_or_none(digest: object) -> None:
    """Anything else ends the connection, as all that is not part of the protocol does."""
    line = protocol.encode(Header(1, 2), Heartbeat(StateDigest(3, 4, Digest("ab" * 16))))[:-1]
    assert protocol.decode(line)[1] == Heartbeat(StateDigest(3, 4, Digest("ab" * 16)))
    said = json.loads(line)
    said["body"][0][2] = digest
    with pytest.raises(ProtocolError, match="digest"):
        protocol.decode(json.dumps(said).encode())


# ---- what a proven peer may send, to the core --------------------------------------------------------


steps = st.lists(
    st.tuples(st.sampled_from([-1, -2, 1, 2]), stamps, any_message, st.floats(0, 2), st.integers(0, 9)),
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=1000)
@given(st.integers(0, 1), steps)
def test_no_message_of_a_proven_peer_makes_the_core_fail(
    place: int, said: list[tuple[int, Header, Message, float, int]]
) -> None:
    """Whatever it says, in whatever role, in any order: nonsense is ignored or believed, and time goes on."""
    addresses = ("a:1", "b:1")
    me = Incarnation("me", "life", addresses[place], place)
    agent = RendezvousNode(Settings(addresses, max_nodes=3), me, None, 0.0)
    now = 0.0
    feed(agent, now, Tick(), JoinRequested(JoinSpec("a:2", 1)), PeerConnected(-1), PeerConnected(-2))
    for conn, stamp, message, pause_s, chance in said:
        now += pause_s
        happens: Event = MessageReceived(conn, stamp, message)
        if chance == 0:
            happens = PeerDisconnected(conn)
        elif chance == 1:
            happens = PeerConnected(conn)
        feed(agent, now, happens, Tick())


def feed(agent: RendezvousNode, now: float, *events: Event) -> None:
    """Hand over events; what is to be durable is so at once."""
    for event in events:
        for effect in agent.handle(event, now):
            if isinstance(effect, Persist):
                feed(agent, now, Persisted(effect.version))
