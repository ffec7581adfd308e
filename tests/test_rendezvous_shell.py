"""The shell over real sockets and a real disk: worlds form, nodes die, strangers are kept out."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_resume.errors import CorruptError
from elastic_resume.rendezvous.messages import Join
from elastic_resume.rendezvous.quorum import Incarnation
from elastic_resume.rendezvous.record import RECORD_FILE, Record
from elastic_resume.rendezvous.shell import Limits, Shell
from elastic_resume.rendezvous.steps import (
    BeginWorld,
    Effect,
    JoinRequested,
    RestartWorkers,
    Settings,
    StopWorkers,
)

TOKEN = b"token"


class Station:
    """One node's shell, with workers that stop at once."""

    def __init__(self, directory: Path, index: int, listeners: list[socket.socket]) -> None:
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in listeners]
        self.name = f"n{index}"
        self.index = index
        self.address = addresses[index]
        self.worlds: queue.Queue[BeginWorld] = queue.Queue()
        (directory / self.name).mkdir(exist_ok=True)
        self.shell = Shell(
            Settings(candidates=tuple(addresses[:3]), max_nodes=len(listeners), settle_s=0.5),
            Incarnation(self.name, f"life-of-{index}", self.address, index if index < 3 else None),
            listener=listeners[index],
            run_id="job",
            token=TOKEN,
            record=Record(directory / self.name),
            carry_out=self.carry_out,
            limits=Limits(unproven=8, handshake_s=1.0),
        )

    def start(self) -> None:
        """Start, and ask for a world."""
        self.shell.start()
        self.join()

    def join(self) -> None:
        """Ask for a world."""
        self.shell.submit(JoinRequested(Join(f"{self.address}/store", 1, self.index)))

    def carry_out(self, effect: Effect) -> None:
        """Keep worlds; stop and join again when told to."""
        if isinstance(effect, BeginWorld):
            self.worlds.put(effect)
        elif isinstance(effect, (RestartWorkers, StopWorkers)):
            self.join()


@pytest.fixture
def stations(tmp_path: Path) -> Iterator[Callable[..., list[Station]]]:
    """Start that many stations; stop them in the end."""
    made: list[Station] = []

    def build(count: int) -> list[Station]:
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        made.extend(Station(tmp_path, index, listeners) for index in range(count))
        for one in made:
            one.start()
        return made

    yield build
    for one in made:
        one.shell.stop()


def names(world: BeginWorld) -> list[str]:
    """The members of a world by rank."""
    return [str(member) for member in world.members]


def test_a_world_forms_and_goes_on_without_its_leader_and_without_a_member(
    stations: Callable[..., list[Station]], tmp_path: Path
) -> None:
    """Four nodes; the leader's process ends, then another's: ranks keep their order, generations grow."""
    made = stations(4)
    first = [one.worlds.get(timeout=30) for one in made]
    assert {tuple(names(world)) for world in first} == {("n0", "n1", "n2", "n3")}
    assert [world.rank for world in first] == [0, 1, 2, 3]
    made[0].shell.stop()
    second = [one.worlds.get(timeout=30) for one in made[1:]]
    assert {tuple(names(world)) for world in second} == {("n1", "n2", "n3")}
    made[2].shell.stop()
    third = [made[index].worlds.get(timeout=30) for index in (1, 3)]
    assert {tuple(names(world)) for world in third} == {("n1", "n3")}
    generations = [worlds[0].generation for worlds in (first, second, third)]
    assert generations == sorted(set(generations))
    kept = Record(tmp_path / "n1").memory
    assert kept is not None
    assert kept.seen == generations[-1], "a member has it on disk before the world begins"


@pytest.mark.slow
def test_strangers_do_not_disturb_a_running_world(stations: Callable[..., list[Station]]) -> None:
    """Random bytes, endless lines, half a handshake, another job, and more connections than allowed."""
    made = stations(3)
    for one in made:
        one.worlds.get(timeout=30)
    host, _, port = made[0].address.rpartition(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(40)]
    for data in (
        b"\x00\xff" * 100,
        b"x" * 100_000,
        b'{"elastic_resume":1,"run":"other","nonce":"00"}\n',
        b"{}\n",
    ):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(data)
            stranger.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(10) == b""
    for held in idle:
        held.close()
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        assert all(one.worlds.empty() for one in made), "the world was disturbed"
        time.sleep(0.05)
    made[2].shell.stop()
    assert names(made[0].worlds.get(timeout=30)) == ["n0", "n1"]


def test_a_record_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """It holds what the quorum rests on: never taken for nothing."""
    assert Record(tmp_path).memory is None
    for text in ("", "{}", '{"memory": [], "digest": "x"}', "[" * 100_000):
        (tmp_path / RECORD_FILE).write_text(text)
        with pytest.raises(CorruptError, match="remove the file"):
            Record(tmp_path)
