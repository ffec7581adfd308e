"""Random and damaged input raises only ProtocolError, and every message round-trips."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_resume.constants import MAX_NODES
from elastic_resume.mechanisms.registry import TOPICS
from elastic_resume.policy.failure_classification import MAX_FAILURES, Failure
from elastic_resume.policy.reasons import WorkersRunning
from elastic_resume.rendezvous.core.interface import (
    Event,
    JoinRequest,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
    Persist,
    Persisted,
    RendezvousSettings,
    Tick,
)
from elastic_resume.rendezvous.core.messages import (
    Decided,
    Header,
    Heartbeat,
    Hello,
    JoinSpec,
    Message,
    Propose,
    StartView,
    Waiting,
)
from elastic_resume.rendezvous.core.node import RendezvousNode
from elastic_resume.rendezvous.core.world import Ballot, Incarnation, Proposal, View, Vote
from elastic_resume.rendezvous.facts import MAX_BODY_CHARS, Fact, FactBody
from elastic_resume.rendezvous.net import codec, protocol
from elastic_resume.rendezvous.net.protocol import LineReader, ProtocolError

CASES = int(os.environ.get("ELASTIC_RESUME_FUZZ_CASES", "40"))
"""Cases of each slow test; `make nightly` runs more."""

texts = st.text(max_size=8)
numbers = st.integers(0, 1 << 50)
incarnations = st.builds(Incarnation, texts, texts, numbers, texts, st.none() | st.integers(0, 9))
views = st.builds(
    View,
    numbers,
    st.lists(incarnations, max_size=3).map(tuple),
    st.none() | incarnations,
    is_strict=st.booleans(),
)
st.register_type_strategy(Incarnation, incarnations)
st.register_type_strategy(View, views)
st.register_type_strategy(int, numbers)
st.register_type_strategy(float, st.floats(0, 1e9))
bodies = st.sampled_from(["", "5", "[[]]", "[[7]]", "[2.5,7]", '[8,"ab"]', "[" * 9000]).map(FactBody)
topics = st.sampled_from([topic.name for topic in TOPICS]) | texts
st.register_type_strategy(Fact, st.builds(Fact, topics, numbers, bodies))
any_message = st.deferred(lambda: st.one_of([st.from_type(kind) for kind in get_args(Message)]))
headers = st.builds(Header, numbers, numbers, numbers)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(headers, any_message)
def test_messages_round_trip(header: Header, message: Message) -> None:
    """Every type and field is kept."""
    assert protocol.decode(protocol.encode(header, message)[:-1]) == (header, message)


@pytest.mark.slow
@settings(max_examples=CASES)
@given(st.binary(max_size=200))
def test_random_bytes_raise_only_protocol_errors(data: bytes) -> None:
    """Every function that parses bytes is tried."""
    token, run, nonce = b"t", "r", "0" * 64
    for read in (
        lambda: protocol.decode(data),
        lambda: protocol.parse_greeting(data, run),
        lambda: protocol.parse_challenge(data),
        lambda: protocol.verify_proof(data, token, "dialler", run, (nonce, nonce)),
    ):
        with pytest.raises(ProtocolError):
            read()


def make_line(header: list[int], kind: object, body: object) -> bytes:
    """Return a line as a node sends it."""
    return json.dumps({"header": header, "type": kind, "body": body}, separators=(",", ":")).encode()


@pytest.mark.slow
@settings(max_examples=CASES)
@given(st.sampled_from([kind.__name__ for kind in get_args(Message)]), st.lists(json_values, max_size=7))
def test_json_of_wrong_shape_raises_only_protocol_errors(kind: str, body: list[object]) -> None:
    """The type is known, the fields are random."""
    line = make_line([1, 2, 3], kind, body)
    try:
        header, message = protocol.decode(line)
    except ProtocolError:
        return
    assert protocol.decode(protocol.encode(header, message)[:-1]) == (header, message)


@pytest.mark.slow
@settings(max_examples=CASES)
@given(headers, any_message, st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=3)), max_size=4))
def test_damaged_lines_raise_only_protocol_errors(
    header: Header, message: Message, damages: list[tuple[int, bytes]]
) -> None:
    """Some bytes of a valid line are replaced; an accepted line round-trips."""
    line = protocol.encode(header, message)[:-1]
    for place, data in damages:
        line = line[:place] + data + line[place + len(data) + place % 2 :]
    try:
        read = protocol.decode(line)
    except ProtocolError:
        return
    assert protocol.decode(protocol.encode(*read)[:-1]) == read


@settings(max_examples=1000)
@given(st.text(";,%0123456789abcdef", max_size=60))
def test_random_text_as_a_view_raises_only_protocol_errors(text: str) -> None:
    """The text may be quoted or cut off."""
    try:
        protocol.decode(make_line([1, 0, 0], "Decided", [text]))
    except ProtocolError:
        return
    assert codec.pack_view(codec.decode_view(text, "view")) == text, "an accepted text is canonical"


@pytest.mark.slow
@settings(max_examples=CASES)
@given(json_values, json_values, json_values)
def test_handshake_of_random_json_raises_only_protocol_errors(
    version: object, nonce: object, proof: object
) -> None:
    """All of it is parsed before authentication."""
    token, run, ours = b"t", "r", "0" * 64
    lines = [
        {"elastic_resume": version, "run": run, "nonce": nonce, "status_only": False},
        {"elastic_resume": version, "nonce": nonce},
        {"proof": proof, "view": ""},
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


def test_proof_with_a_lone_surrogate_is_refused() -> None:
    """It is valid JSON and has no encoding."""
    with pytest.raises(ProtocolError):
        protocol.verify_proof(b'{"proof": "\\ud800", "view": ""}', b"t", "dialler", "r", ("0" * 64, "0" * 64))


@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(1, 60))
def test_line_reader_does_not_depend_on_the_chunks(pieces: list[bytes], limit: int) -> None:
    """The lines or the error are the same as for one chunk."""
    whole = split_lines(LineReader(limit), [b"".join(pieces)])
    assert split_lines(LineReader(limit), pieces) == whole


def split_lines(lines: LineReader, pieces: list[bytes]) -> tuple[list[bytes], bool]:
    """Return the lines, and whether one was too long."""
    read: list[bytes] = []
    try:
        for piece in pieces:
            read.extend(one for one in lines.feed(piece))
    except ProtocolError:
        return read, True
    return read, False


def test_proof_is_valid_for_its_token_role_run_and_nonces_only() -> None:
    """Another token, another run, a replay and a reflection are refused."""
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


def test_dialler_refuses_acceptor_without_the_token() -> None:
    """Another program may listen at the address; it would read what a member sends."""
    dialler, nonce = protocol.dial(b"token", "run", "a" * 64), "b" * 64
    next(dialler)
    dialler.send(protocol.encode_challenge(nonce)[:-1])
    with pytest.raises(ProtocolError, match="token"):
        dialler.send(protocol.encode_proof(b"another", "acceptor", "run", ("a" * 64, nonce))[:-1])


def verify_proof(line: bytes) -> str:
    """Verify a dialler's proof of a token."""
    return protocol.verify_proof(line, b"t", "dialler", "r", ("0", "0"))


@pytest.mark.parametrize(
    ("parse", "changed", "error"),
    [
        (lambda line: protocol.parse_greeting(line, "run"), {"status_only": 1}, "neither true nor false"),
        (protocol.parse_challenge, {"elastic_resume": protocol.VERSION + 1}, "speaks protocol version"),
        (protocol.parse_challenge, {"elastic_resume": protocol.VERSION + 1, "new": 1}, "speaks protocol"),
        (protocol.parse_challenge, {"nonce": "0" * 63}, "32 bytes"),
        (protocol.parse_challenge, {"nonce": "0" * 65}, "32 bytes"),
        (protocol.parse_challenge, {"nonce": "A" * 64}, "32 bytes"),
        (protocol.parse_challenge, {"nonce": ["0"] * 64}, "32 bytes"),
        (protocol.parse_challenge, {"nonce": 0}, "32 bytes"),
        (verify_proof, {"proof": 1, "view": ""}, "token"),
        (verify_proof, {"proof": "ä", "view": ""}, "token"),
        (verify_proof, {"proof": "", "view": 1}, "text"),
    ],
)
def test_handshake_refuses_values_of_another_kind(
    parse: Callable[[bytes], object], changed: dict[str, object], error: str
) -> None:
    """Each field is checked before it is used."""
    line = {"elastic_resume": protocol.VERSION, "nonce": "0" * 64}
    if "status_only" in changed:
        line["run"] = "run"
    with pytest.raises(ProtocolError, match=error):
        parse(json.dumps(changed if "proof" in changed else line | changed).encode())


class Colour(Enum):
    """A kind that a message may have."""

    RED = 1


@dataclass(frozen=True)
class Word:
    """One of two classes."""

    text: str


@dataclass(frozen=True)
class Sample:
    """A field of each kind that a message may have."""

    many: tuple[int, ...]
    pair: tuple[int, bool]
    some: frozenset[float]
    colour: Colour
    either: Word | View
    perhaps: Word | None
    neither: Word | View | None


SAMPLE = Sample((1, 2), (3, True), frozenset({0.5}), Colour.RED, Word("a"), Word("b"), Word("c"))
BAD_VALUES: list[tuple[str, list[object]]] = [
    ("many", [None, 1, "12", {"1": 2}, [1] * 100_001, [-1], [True], [1.0], [(1 << 53) + 1]]),
    ("pair", [None, [], [3], [3, True, 4], [3, 1], [3, None]]),
    ("some", [None, [True], ["0.5"], [-0.5], [1e17], [10**400], [float("inf")], [float("nan")]]),
    ("colour", [None, 1, ["RED"], "BLUE", "red"]),
    ("either", [None, [], ["Word"], ["Word", ["a"], 1], ["Sample", ["a"]], [["Word"], ["a"]], [1, ["a"]]]),
    ("perhaps", [["Word", ["a"]], [], [None], ["x" * 4097], ["\ud800"], "b"]),
    ("neither", [["a"], [None]]),
]


@pytest.mark.parametrize(("name", "values"), BAD_VALUES)
def test_value_of_another_kind_is_refused_in_each_field(name: str, values: list[object]) -> None:
    """The error names the field. What is left out, or at a limit, is accepted."""
    good = codec.to_json_value(SAMPLE)
    at = [field.name for field in fields(Sample)].index(name)
    for value in values:
        with pytest.raises(ProtocolError, match=f"^Sample.{name}"):
            codec.from_json_value(Sample, [*good[:at], value, *good[at + 1 :]])


def test_value_of_each_kind_is_read_back() -> None:
    """Also with its optional fields empty, and at each limit."""
    limits = replace(SAMPLE, many=(1 << 53,) * 100_000, perhaps=Word("x" * 4096), neither=View(1, ()))
    for sample in (SAMPLE, replace(SAMPLE, perhaps=None, neither=None), limits):
        assert codec.from_json_value(Sample, json.loads(json.dumps(codec.to_json_value(sample)))) == sample
    with pytest.raises(TypeError, match="no codec"):
        codec.from_json_value(bytes, "x")
    with pytest.raises(ProtocolError, match=r"^hello: 6 fields instead of 7"):
        codec.from_json_value(Sample, codec.to_json_value(SAMPLE)[1:], "hello")


MEMBER = "node,disk,host:1,1,"


@pytest.mark.parametrize(
    "view",
    [
        5,
        ["1;;;"],
        "1",
        "1;lax;;",
        ";".join(["1", "", "", "", *[MEMBER] * (codec.MAX_MEMBERS + 1)]),
        f"1;;;;{MEMBER},",
        f"1;;;;{'n' * 4097},disk,host:1,1,",
        "1;;;;ä,disk,host:1,1,",
        "1;;;;%ff,disk,host:1,1,",
        *(f"{number};;;" for number in ("-1", "1.0", "", "\u0661", "0" * 16 + "1", str((1 << 53) + 1))),
    ],
)
def test_text_that_is_no_view_is_refused(view: object) -> None:
    """Each limit holds; what is at the limit is a view."""
    for text in (f"1;;;;{'n' * 4096},disk,host:1,1,", f"{1 << 53};;;", f"{'0' * 15}1;;;"):
        codec.decode_view(text, "view")
    with pytest.raises(ProtocolError, match="body: not a view"):
        codec.decode_view(view, "body")


def test_view_that_is_too_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches hold few views, and each within a limit."""
    monkeypatch.setattr(codec, "MAX_CACHED_CHARS", 4)
    assert codec.decode_view("1;;;", "") is codec.decode_view("1;;;", "")
    assert codec.decode_view("10;;;", "") is not codec.decode_view("10;;;", "")


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"[]", "exactly the fields"),
        (b"5", "exactly the fields"),
        (b'{"header":"123","type":"Heartbeat","body":[]}', "header is not three numbers"),
        (b'{"header":{"1":1,"2":2,"3":3},"type":"Heartbeat","body":[]}', "header is not three numbers"),
        (b'{"header":[1,2],"type":"Heartbeat","body":[]}', "header is not three numbers"),
    ],
)
def test_line_that_is_no_message_is_refused(line: bytes, error: str) -> None:
    """The error says what is wrong with it."""
    with pytest.raises(ProtocolError, match=error):
        protocol.decode(line)


@pytest.mark.parametrize("kind", ["Nothing", 1, ["Heartbeat"]])
def test_message_of_unknown_kind_is_refused(kind: object) -> None:
    """A later version may have more."""
    with pytest.raises(ProtocolError, match="there is no message"):
        protocol.decode(make_line([0, 0, 0], kind, []))


def test_line_reader_refuses_long_line_before_its_end() -> None:
    """A peer that never ends a line costs no more memory than the limit."""
    reader = LineReader(10)
    assert list(reader.feed(b"x" * 10)) == []
    with pytest.raises(ProtocolError, match="more than 10 bytes"):
        list(reader.feed(b"x"))


@pytest.mark.parametrize("status_only", [False, True])
def test_unauthenticated_dialler_receives_nothing_derived_from_the_token(status_only: bool) -> None:
    """The acceptor's lines are the same for every token."""
    received = []
    for token in (b"one token", b"another token"):
        side = protocol.accept(token, "run", "b" * 64)
        said = [
            next(side),
            side.send(protocol.encode_greeting("run", "a" * 64, status_only=status_only)[:-1]),
        ]
        with pytest.raises(protocol.AuthenticationError, match="token") as caught:
            side.send(b'{"proof":"' + b"0" * 64 + b'","view":""}')
        received.append([*said, caught.value.rejection_line])
    assert received[0] == received[1]


def run_handshake(
    token: bytes, nonces: tuple[str, str], *, status_only: bool = False
) -> tuple[protocol.HandshakeResult, protocol.HandshakeResult]:
    """Return the results of dialler and acceptor."""
    key = protocol.derive_status_key(token) if status_only else token
    dialler, acceptor = (
        protocol.dial(key, "run", nonces[0], status_only=status_only),
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
def test_signed_line_is_accepted_once_in_order_by_its_receiver_only(status_only: bool) -> None:
    """A changed, repeated, omitted, reordered, reflected or foreign line has a wrong digest."""
    nonces = ("a" * 64, "b" * 64)
    lines = [b"one\n", b"two\n", b"\n"]
    for _ in range(2):
        here, there = run_handshake(b"token", nonces, status_only=status_only)
        for sends, hears in ((here.signer, there.verifier), (there.signer, here.verifier)):
            assert [hears.verify(sends.sign(line)[:-1]) for line in lines] == [b"one", b"two", b""]
    one, two = (run_handshake(b"token", nonces)[0].signer.sign(lines[0])[:-1] for _ in range(2))
    assert one == two, "a digest depends on key, count and line alone"

    def refused(*said: bytes, good: int = 0) -> None:
        hears = run_handshake(b"token", nonces)[1].verifier
        for line in said[:good]:
            hears.verify(line)
        with pytest.raises(ProtocolError, match="wrong digest"):
            hears.verify(said[good])

    first, second, third = map(run_handshake(b"token", nonces)[0].signer.sign, lines)
    first, second, third = first[:-1], second[:-1], third[:-1]
    refused(first, first, good=1)
    refused(first, third, good=1)
    refused(second)
    refused(b"ome" + first[3:])
    refused(first[3:])
    refused(b"")
    refused(run_handshake(b"token", nonces)[1].signer.sign(lines[0])[:-1])
    refused(run_handshake(b"token", ("a" * 64, "c" * 64))[0].signer.sign(lines[0])[:-1])
    refused(run_handshake(b"token", ("c" * 64, "b" * 64))[0].signer.sign(lines[0])[:-1])
    refused(run_handshake(b"another", nonces)[0].signer.sign(lines[0])[:-1])
    refused(run_handshake(b"token", nonces, status_only=True)[0].signer.sign(lines[0])[:-1])


def test_long_line_is_signed_by_the_digest_of_its_body() -> None:
    """No byte of it can change, and no short line that holds the digest itself passes for it."""
    nonces = ("a" * 64, "b" * 64)
    message = Propose(
        7, Proposal(Ballot(), View(7, tuple(Incarnation(f"n{i}", f"d{i}") for i in range(1000))))
    )
    head, body = protocol.encode_head(Header(1, 2, 3)), protocol.encode_body(message)
    line = head + body.text
    assert len(line) > protocol.LONG_LINE_BYTES
    signed = run_handshake(b"token", nonces)[0].signer.sign_message(head, body)[:-1]
    assert signed == run_handshake(b"token", nonces)[0].signer.sign(line + b"\n")[:-1]
    assert run_handshake(b"token", nonces)[1].verifier.verify(signed) == line
    for at in (0, len(head) - 1, len(head), len(line) // 2, len(line) - 1):
        changed = signed[:at] + bytes([signed[at] ^ 1]) + signed[at + 1 :]
        with pytest.raises(ProtocolError, match="wrong digest"):
            run_handshake(b"token", nonces)[1].verifier.verify(changed)
    short = head + body.digest + signed[-protocol.DIGEST_HEX_CHARS :]
    with pytest.raises(ProtocolError, match="wrong digest"):
        run_handshake(b"token", nonces)[1].verifier.verify(short)


def test_messages_of_the_largest_job_fit_the_limits() -> None:
    """Names are long and share nothing, a proposal is open, and the voter holds half of the votes."""
    rng = random.Random(0)
    names = [f"{rng.getrandbits(128):032x}-{n:05}.cluster.example.com" for n in range(MAX_NODES)]
    members = tuple(Incarnation(name, f"{rng.getrandbits(64):016x}", 1, f"{name}:29400") for name in names)
    view = View(7, members, members[0])
    ballot = Ballot(9, members[0].disk_id, 1)
    proposal = Proposal(ballot, View(8, members[1:], members[1]))
    held = frozenset(member.disk_id for member in members[: MAX_NODES // 2])
    failure = Failure("crash", names[0], 0, message="x" * 4000)
    messages: list[Message] = [
        Hello(members[0], view, ballot, 8),
        Vote(7, ballot, proposal, held=held),
        Propose(7, proposal),
        Decided(view),
        StartView(9, f"{names[0]}:29400", (8,) * MAX_NODES, 10**9, (failure,) * MAX_FAILURES),
    ]
    for message in messages:
        line = protocol.encode(Header(1, 1), message)
        assert len(line) < protocol.MAX_LINE_BYTES, type(message)
        codec._view_cache.clear()
        assert protocol.decode(line) == (Header(1, 1), message)
    assert len(codec.pack_view(view)) <= codec.MAX_CACHED_CHARS


def test_large_view_is_cached() -> None:
    """Parsing the same text returns the same object."""
    members = tuple(
        Incarnation(f"node,{n};%\u00e9", f"disk{n}", n, f"[::1]:{n}", n or None) for n in range(1000)
    )
    view = View(7, members, members[3])
    text = codec.pack_view(view)
    codec._view_cache.clear()
    read = codec.decode_view(text, "view")
    assert [(one, one.address, one.candidate_index) for one in read.members] == [
        (one, one.address, one.candidate_index) for one in members
    ]
    assert (read, read.leader) == (view, members[3])
    assert codec.decode_view(text + "", "view") is read
    assert codec.pack_view(View(1, members[1:2], members[1])) == "1;;;" + ";".join(
        ["node%2C1%3B%25%C3%A9,disk1,[::1]:1,1,1"] * 2
    )


def test_view_caches_are_bounded() -> None:
    """Many different views do not fill the memory."""
    for generation in range(100):
        codec.decode_view(f"{generation};;;a,b,c,1,", "view")
    assert len(codec._view_cache) <= codec.MAX_CACHED_VIEWS
    assert len(codec._text_cache) <= codec.MAX_CACHED_VIEWS


def test_text_with_a_lone_surrogate_is_refused() -> None:
    """It is valid JSON; a log line or a lookup would fail later."""
    with pytest.raises(ProtocolError, match="cannot be encoded"):
        protocol.decode(b'{"header":[1,0,0],"type":"Waiting","body":[["WorkersRunning",["\\ud800"]]]}')


def test_reason_that_is_too_long_is_cut() -> None:
    """A reason with a thousand names must not make all receivers disconnect."""
    line = protocol.encode(Header(1, 0), Waiting(WorkersRunning("node " * 1000)))
    message = protocol.decode(line[:-1])[1]
    assert isinstance(message, Waiting)
    assert isinstance(message.reason, WorkersRunning)
    assert message.reason.node.startswith("node node ")
    assert message.reason.node.endswith("…")


def test_line_of_a_known_body_is_parsed_as_strictly_as_the_first() -> None:
    """Nearly every line is a heartbeat, whose body is parsed once."""
    good = protocol.encode(Header(1, 2, 3), Heartbeat())[:-1]
    assert protocol.decode(good) == (Header(1, 2, 3), Heartbeat())
    tail = b',"type":"Heartbeat","body":[[]]}'
    assert good.endswith(tail)
    for head in (
        b"",
        b"{",
        b'{"header":[1,2]',
        b'{"header":[1,2,3],"x":1',
        b"[1,2,3]",
        b'{"header":[-1,2,3]',
        b'{"header":[01,2,3]',
        b'{"header":[1,2,9999999999999999]',
    ):
        with pytest.raises(ProtocolError):
            protocol.decode(head + tail)


@pytest.mark.parametrize("body", [7, None, ["7"], "\u0661", "7" * (MAX_BODY_CHARS + 1)])
def test_heartbeat_with_a_malformed_fact_is_refused(body: object) -> None:
    """A body is a text of limited length; only its judge parses it."""
    line = protocol.encode(Header(1, 2), Heartbeat((Fact("topic", 3, FactBody("7")),)))[:-1]
    assert protocol.decode(line)[1] == Heartbeat((Fact("topic", 3, FactBody("7")),))
    said = json.loads(line)
    said["body"][0][0][2] = body
    with pytest.raises(ProtocolError, match="body"):
        protocol.decode(make_line(said["header"], said["type"], said["body"]))


# ---- messages of an authenticated peer ---------------------------------------------------------------


steps = st.lists(
    st.tuples(st.sampled_from([-1, -2, 1, 2]), headers, any_message, st.floats(0, 2), st.integers(0, 9)),
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=CASES)
@given(st.integers(0, 1), steps)
def test_no_message_of_an_authenticated_peer_makes_the_state_machine_fail(
    place: int, said: list[tuple[int, Header, Message, float, int]]
) -> None:
    """Messages of any type arrive in any role and order."""
    addresses = ("a:1", "b:1")
    me = Incarnation("me", "disk", 1, addresses[place], place)
    agent = RendezvousNode(RendezvousSettings(addresses, max_nodes=3, topics=TOPICS), me, None, 0.0)
    now = 0.0
    feed(agent, now, Tick(), JoinRequest(JoinSpec("a:2", 1)), PeerConnected(-1), PeerConnected(-2))
    for conn, header, message, pause_s, chance in said:
        now += pause_s
        happens: Event = MessageReceived(conn, header, message)
        if chance == 0:
            happens = PeerDisconnected(conn)
        elif chance == 1:
            happens = PeerConnected(conn)
        feed(agent, now, happens, Tick())


def feed(agent: RendezvousNode, now: float, *events: Event) -> None:
    """Pass events to the state machine; writes are durable at once."""
    for event in events:
        for effect in agent.handle(event, now):
            if isinstance(effect, Persist):
                feed(agent, now, Persisted(effect.version))
