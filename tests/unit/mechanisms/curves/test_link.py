"""Test how the agents of two nodes copy each other's files over a connection."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_resume.mechanisms.curves import journal
from elastic_resume.mechanisms.curves.link import Replicator
from elastic_resume.rendezvous.net import protocol


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[tuple[Path, Replicator]]]:
    """Two agents, each with its node's directory."""
    made = []
    for name in ("n0", "n1"):
        (tmp_path / name / journal.DIRECTORY).mkdir(parents=True)
        made.append((tmp_path / name, Replicator(tmp_path / name, "job", "127.0.0.1", threading.Event().set)))
    yield made
    for _, replicator in made:
        replicator.close()


def test_lines_reach_the_follower_while_they_are_written(nodes: list[tuple[Path, Replicator]]) -> None:
    """Also those from before it followed, and a file larger than one message."""
    (here, source), (there, follower) = nodes
    own, copy = journal.record_path(here, 3), journal.record_path(there, 3)
    own.write_bytes(b"first\n" * 50_000)
    follower.follow(source.endpoint)
    wait_for(lambda: copy.exists() and copy.read_bytes() == own.read_bytes())
    for number in range(50):
        with open(own, "ab") as file:
            file.write(b"line %d\n" % number)
        source.announce()
        wait_for(lambda: copy.read_bytes() == own.read_bytes())


def test_each_side_gets_what_it_lacks(nodes: list[tuple[Path, Replicator]]) -> None:
    """A new node of rank 0 gets what a former one has sent to the others; nothing is merged or cut."""
    (here, source), (there, follower) = nodes
    journal.record_path(here, 1).write_bytes(b"one\ntw")
    journal.record_path(there, 1).write_bytes(b"one\ntwo\nthree\n")
    journal.record_path(there, 2).write_bytes(b"begin\n")
    journal.written_path(here, 2).write_bytes(b"{}\n")
    follower.follow(source.endpoint)
    wait_for(lambda: journal.list_files(here) == journal.list_files(there))
    assert journal.record_path(here, 1).read_bytes() == b"one\ntwo\nthree\n"
    assert len(journal.list_files(here)) == 3


def test_nothing_is_received_for_the_file_that_a_worker_writes(nodes: list[tuple[Path, Replicator]]) -> None:
    """Rank 0's own file has all; a line that arrives late would come between its lines."""
    (here, source), (there, follower) = nodes
    source.own_generation = 4
    journal.record_path(there, 4).write_bytes(b"foreign\n")
    journal.record_path(there, 3).write_bytes(b"older\n")
    follower.follow(source.endpoint)
    wait_for(journal.record_path(here, 3).exists)
    wait_for(lambda: journal.list_files(here)["g000003.jsonl"] == len(b"older\n"))
    source.receive("g000004.jsonl", 0, b"foreign\n")
    assert not journal.record_path(here, 4).exists()


def test_other_source_is_followed_at_once(nodes: list[tuple[Path, Replicator]]) -> None:
    """The one before may hang: its connection is closed."""
    (here, source), (there, follower) = nodes
    with socket.create_server(("127.0.0.1", 0)) as silent:
        follower.follow(("127.0.0.1", silent.getsockname()[1], "key"))
        silent.accept()[0].close()
        follower.follow(source.endpoint)
        journal.record_path(here, 1).write_bytes(b"one\n")
        source.announce()
        wait_for(journal.record_path(there, 1).exists)


def test_follower_without_the_key_gets_nothing(nodes: list[tuple[Path, Replicator]]) -> None:
    """The key travels with the workers' restore alone."""
    (here, source), (there, follower) = nodes
    journal.record_path(here, 1).write_bytes(b"one\n")
    host, port, _ = source.endpoint
    with socket.create_connection((host, port)) as connection:
        handshake = protocol.dial(b"another key", "job", "ab" * 32)
        connection.sendall(next(handshake))
        reader = connection.makefile("rb")
        connection.sendall(handshake.send(reader.readline()[:-1]))
        assert b"one" not in reader.read()
    follower.follow((host, port, "another key"))
    other = Replicator(there, "job", "127.0.0.1", threading.Event().set)
    other.follow(source.endpoint)
    wait_for(journal.record_path(there, 1).exists)
    other.close()


@pytest.mark.parametrize("name", ["../escape.jsonl", "endpoint.json", "g000001.jsonl.x", ""])
def test_other_names_are_refused(nodes: list[tuple[Path, Replicator]], name: str) -> None:
    """A peer writes nothing but such files."""
    with pytest.raises(protocol.ProtocolError, match="there is no file"):
        nodes[0][1].receive(name, 0, b"x")
    assert journal.list_files(nodes[0][0]) == {}


def test_missing_part_is_refused_and_overlap_is_written_once(nodes: list[tuple[Path, Replicator]]) -> None:
    """Files are prefixes of one another."""
    here, replicator = nodes[0]
    replicator.receive("g000001.jsonl", 0, b"abc")
    replicator.receive("g000001.jsonl", 1, b"bcde")
    replicator.receive("g000001.jsonl", 0, b"ab")
    assert journal.record_path(here, 1).read_bytes() == b"abcde"
    with pytest.raises(protocol.ProtocolError, match="is missing"):
        replicator.receive("g000001.jsonl", 6, b"x")
