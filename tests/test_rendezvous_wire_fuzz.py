"""Whatever arrives on the wire, only WireError escapes, and every message survives the way there."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_resume.rendezvous import wire
from elastic_resume.rendezvous.messages import Hello, Message, Propose, Stamp
from elastic_resume.rendezvous.quorum import Incarnation, Knowledge, World
from elastic_resume.rendezvous.wire import Lines, WireError

texts = st.text(max_size=8)
numbers = st.integers(0, 1 << 50)
incarnations = st.builds(Incarnation, texts, texts, texts, st.none() | st.integers(0, 9))
worlds = st.builds(World, numbers, st.lists(incarnations, max_size=3).map(tuple), incarnations)
knowledges = st.builds(
    Knowledge,
    numbers,
    st.none() | worlds,
    st.lists(worlds, max_size=2).map(tuple),
    st.frozensets(incarnations, max_size=3),
    st.frozensets(st.tuples(numbers, incarnations), max_size=2),
)
st.register_type_strategy(Incarnation, incarnations)
st.register_type_strategy(World, worlds)
st.register_type_strategy(Knowledge, knowledges)
st.register_type_strategy(int, numbers)
st.register_type_strategy(float, st.floats(0, 1e9))
any_message = st.one_of([st.from_type(kind) for kind in get_args(Message)])
stamps = st.builds(Stamp, numbers, numbers, numbers, st.floats(0, 100))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(stamps, any_message)
def test_a_message_is_read_as_it_was_written(stamp: Stamp, message: Message) -> None:
    """Every type, every field."""
    assert wire.decode(wire.encode(stamp, message)[:-1]) == (stamp, message)


@pytest.mark.slow
@settings(max_examples=5000)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_wire_errors(data: bytes) -> None:
    """Bytes of a stranger, at every place where bytes are read."""
    token, run, nonce = b"t", "r", "0" * 64
    for read in (
        lambda: wire.decode(data),
        lambda: wire.read_greeting(data, run),
        lambda: wire.read_answer(data, token, run, nonce),
        lambda: wire.read_proof(data, token, run, nonce, nonce),
    ):
        with pytest.raises(WireError):
            read()


@pytest.mark.slow
@settings(max_examples=5000)
@given(st.sampled_from([kind.__name__ for kind in get_args(Message)]), st.lists(json_values, max_size=7))
def test_json_of_wrong_shape_raises_nothing_but_wire_errors(kind: str, body: list[object]) -> None:
    """A known type with fields of any kind."""
    line = json.dumps({"stamp": [1, 2, 3, 0.5], "type": kind, "body": body}).encode()
    try:
        stamp, message = wire.decode(line)
    except WireError:
        return
    assert wire.decode(wire.encode(stamp, message)[:-1]) == (stamp, message)


@settings(max_examples=1000)
@given(json_values, json_values, json_values)
def test_a_handshake_of_any_json_raises_nothing_but_wire_errors(
    version: object, nonce: object, proof: object
) -> None:
    """Before anything is proved."""
    token, run, ours = b"t", "r", "0" * 64
    lines = [
        {"elastic_resume": version, "run": run, "nonce": nonce},
        {"elastic_resume": 1, "nonce": ours, "proof": proof},
        {"proof": proof},
    ]
    greeting, answer, last = (json.dumps(line).encode() for line in lines)
    for read in (
        lambda: wire.read_greeting(greeting, run),
        lambda: wire.read_answer(answer, token, run, ours),
        lambda: wire.read_proof(last, token, run, ours, ours),
    ):
        try:
            read()
        except WireError:
            continue
        assert version == 1


def test_a_proof_that_is_no_text_in_utf8_is_refused() -> None:
    """JSON can spell half of a surrogate pair; no encoding holds it."""
    with pytest.raises(WireError):
        wire.read_proof(b'{"proof": "\\ud800"}', b"t", "r", "0" * 64, "0" * 64)


@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(1, 60))
def test_lines_do_not_depend_on_how_the_stream_was_cut(pieces: list[bytes], limit: int) -> None:
    """The same lines, or the same refusal, and never more held than the limit and one piece."""
    whole = cut(Lines(limit), [b"".join(pieces)])
    assert cut(Lines(limit), pieces) == whole


def cut(lines: Lines, pieces: list[bytes]) -> tuple[list[bytes], bool]:
    """The lines read, and whether one was too long."""
    read: list[bytes] = []
    try:
        for piece in pieces:
            read.extend(one for one in lines.feed(piece))
    except WireError:
        return read, True
    return read, False


def test_a_handshake_proves_both_sides_to_each_other_and_no_other() -> None:
    """Right token, wrong token, another run, a replay and a reflection."""
    ours, theirs = "a" * 64, "b" * 64
    assert wire.read_greeting(wire.greeting("run", ours)[:-1], "run") == ours
    reply = wire.answer(b"token", "run", ours, theirs)[:-1]
    last = wire.read_answer(reply, b"token", "run", ours)[:-1]
    wire.read_proof(last, b"token", "run", ours, theirs)
    with pytest.raises(WireError):
        wire.read_greeting(wire.greeting("run", ours)[:-1], "another run")
    with pytest.raises(WireError, match="token"):
        wire.read_answer(reply, b"another token", "run", ours)
    with pytest.raises(WireError, match="token"):
        wire.read_answer(reply, b"token", "run", "c" * 64)  # replayed to a new call
    with pytest.raises(WireError, match="token"):
        wire.read_proof(last, b"token", "run", ours, "c" * 64)  # replayed to a new acceptor
    reflected = json.dumps({"proof": json.loads(reply)["proof"]}).encode()
    with pytest.raises(WireError, match="token"):
        wire.read_proof(reflected, b"token", "run", ours, theirs)


def test_what_a_hello_and_a_proposal_of_a_large_world_weigh() -> None:
    """A thousand members fit the limit many times over."""
    members = tuple(Incarnation(f"node{n:04}", "1" * 16, f"node{n:04}:29400") for n in range(1000))
    world = World(7, members, members[0])
    known = Knowledge(3, world, (world,), frozenset(members[:500]))
    for message in (Hello(members[0], known, 7), Propose(world, known)):
        assert len(wire.encode(Stamp(1, 1), message)) * 8 < wire.MAX_LINE_BYTES
