"""The shell over real sockets and a real disk: worlds form, nodes die, disks refuse and strangers knock."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_resume.errors import RecordError
from elastic_resume.rendezvous import channel, node
from elastic_resume.rendezvous.core import Agent
from elastic_resume.rendezvous.door import Limits
from elastic_resume.rendezvous.record import RECORD_FILE, Record
from elastic_resume.rendezvous.steps import BeginWorld, Effect
from elastic_resume.store.durable import Disk, machine
from tests.stations import Station, Stations, descriptors, until

pytestmark = pytest.mark.slow


@pytest.fixture
def stations(tmp_path: Path) -> Iterator[Stations]:
    """Build some; they are stopped in the end."""
    made = Stations(tmp_path, Limits())
    yield made
    made.stop()


def names(world: BeginWorld) -> list[str]:
    """The members of a world by rank."""
    return [str(member) for member in world.members]


class Refusing(Disk):
    """A disk that is full, as long as somebody says so."""

    full = True
    refusals = 0

    def write_atomic(self, path: Path, data: bytes) -> None:
        """Write, or say why not."""
        if not self.full:
            super().write_atomic(path, data)
            return
        self.refusals += 1
        with machine("write", path):
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_world_forms_and_goes_on_without_its_leader_and_without_a_member(
    stations: Stations, tmp_path: Path
) -> None:
    """Four nodes; the leader's process ends, then another's: ranks keep their order, generations grow."""
    made = stations.build(4)
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


def test_a_disk_that_refuses_is_tried_again_and_told_of_once(
    stations: Stations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No world begins before every member has it on disk; the log names file and reason; then it goes on."""
    monkeypatch.setattr(node, "DISK_PAUSE_S", 0.01)
    disk = Refusing()
    made = stations.build(2, record=lambda place: Record(place, disk if place.name == "n1" else Disk()))
    until(lambda: disk.refusals > 3, "the disk was asked again and again")
    assert all(one.worlds.empty() for one in made)
    disk.full = False
    for one in made:
        assert names(one.worlds.get(timeout=30)) == ["n0", "n1"]
    (line,) = made[1].told("disk")
    assert RECORD_FILE in line
    assert "No space left on device" in line
    assert line.endswith("; trying again")
    assert not made[0].told("disk")


def test_a_shell_whose_disk_refuses_can_be_stopped(stations: Stations) -> None:
    """Stopping waits for no disk."""
    disk = Refusing()
    (alone,) = stations.build(1, record=lambda place: Record(place, disk))
    until(lambda: disk.refusals > 0, "the disk was asked")
    alone.shell.stop()
    until(lambda: not alone.shell.alive, "it has ended, and the disk is full as ever")


def test_a_stopped_shell_leaves_no_socket(stations: Stations) -> None:
    """Neither listening nor connected."""
    before = descriptors()
    made = stations.build(3)
    for one in made:
        one.worlds.get(timeout=30)
    assert descriptors() > before
    stations.stop()
    until(lambda: descriptors() <= before, "all is closed")


def test_the_owner_is_shown_the_core_before_effects_are_carried_out(stations: Stations) -> None:
    """A fence moves before anybody hears of a world."""
    running: list[bool] = []
    seen: list[bool] = []

    class Watching(Station):
        def watch(self, agent: Agent) -> None:
            running.append(agent.running is not None)

        def carry_out(self, effect: Effect) -> None:
            if isinstance(effect, BeginWorld):
                seen.append(running[-1])
            super().carry_out(effect)

    (alone,) = stations.build(1, station=Watching)
    alone.worlds.get(timeout=30)
    assert seen == [True]


def test_an_error_of_our_own_ends_the_thread_and_is_told(
    stations: Stations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a core must not go on: its owner sees that the shell lives no more."""
    told: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", told.append)

    class Broken(Station):
        def watch(self, agent: Agent) -> None:
            raise KeyError(str(agent))

    (alone,) = stations.build(1, station=Broken)
    until(lambda: not alone.shell.alive, "the thread ended")
    assert [args.exc_type for args in told] == [KeyError]


@pytest.mark.slow
@pytest.mark.parametrize("odd", ["here:99999", "no port", ":1", "\x00:1", "a" * 300 + ":1", "localhost:1"])
def test_a_candidate_that_is_no_address_does_not_stop_the_search(stations: Stations, odd: str) -> None:
    """A call to it fails, and the next one is made."""
    for one in stations.build(2, first=(odd,)):
        one.worlds.get(timeout=30)


def test_a_record_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """It holds what the quorum rests on: never taken for nothing."""
    assert Record(tmp_path).memory is None
    for text in ("", "{}", '{"memory": [], "digest": "x"}', "[" * 100_000):
        (tmp_path / RECORD_FILE).write_text(text)
        with pytest.raises(RecordError, match="remove the file"):
            Record(tmp_path)


def test_an_agents_end_waits_for_no_name_server() -> None:
    """Python waits for an executor's threads; a pod would be killed while its resolver is silent."""
    daemons = []

    def resolve(host: str) -> list[str]:
        daemons.append(threading.current_thread().daemon)
        raise OSError(errno.EAGAIN, host)

    with pytest.raises(OSError, match="nobody"):
        asyncio.run(channel.connect(channel.Channel.__new__(channel.Channel), "nobody:1", resolve))
    assert daemons == [True]
