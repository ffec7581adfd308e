"""Standbys with a shell in place of the launcher shim: it says how the shim ends, and shows what it gets."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from elastic_resume import constants
from elastic_resume.agent import torchelastic
from elastic_resume.agent.workers import worker_request
from elastic_resume.events import Event
from elastic_resume.mechanisms.mechanism import encode_body
from elastic_resume.mechanisms.standbys.judge import START_COST, StartCost
from elastic_resume.mechanisms.standbys.workers import StandbyWorkers
from elastic_resume.rendezvous.facts import Fact
from tests.support.agent_parts import make_agent_context
from tests.support.processes import wait_for

COST = StartCost(20.0, 1 << 30)


class Node:
    """The standbys of a node with three local ranks, and what they have called."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.has_ended = threading.Event()
        self.client = Mock(restart_requested=False, finish_preparation=self.has_ended.set)
        self.client.verdicts = {START_COST.name: Fact(START_COST.name, 0, encode_body(COST))}

    def open(self, exit_status: str) -> StandbyWorkers:
        """Return standbys whose shims write their process id and environment, and end once told so."""
        # As with torchelastic's macros, two dollar signs stand for one.
        script = f"cd {self.directory}; env > env-$1; echo $$$$ > $1; read line < gate; "
        command = ["sh", "-c", script + exit_status, "shim", "${local_rank}"]
        workers = StandbyWorkers(
            make_agent_context(workers=3, start_early=partial(torchelastic.start_early, command, 3))
        )
        workers.start(self.client)
        return workers

    @property
    def begun(self) -> int:
        """The number of starts."""
        return int(self.client.begin_preparation.call_count)

    def wait_for_shims(self, *local_ranks: str) -> None:
        """Wait until these shims, and no others, wait at the gate."""

        def list_waiting() -> set[str]:
            return {path.name for path in self.directory.glob("[0-9]") if path.read_text()}

        wait_for(lambda: list_waiting() == {*local_ranks}, f"the shims of {local_ranks}")

    def let_shims_end(self, count: int) -> None:
        """Open the gate for as many shims."""
        with (self.directory / "gate").open("w") as gate:
            gate.write("\n" * count)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """Have the environment of an agent whose last view was of generation 7."""
    os.mkfifo(tmp_path / "gate")
    (tmp_path / "parked").touch()
    monkeypatch.setenv(constants.ENV_PARKED, str(tmp_path / "parked"))
    monkeypatch.setenv(constants.ENV_RUN_ID, "job")
    for name in torchelastic.GENERATION_VARIABLES:
        monkeypatch.setenv(name, "7")
    return Node(tmp_path)


@pytest.fixture
def park() -> Iterator[Callable[[int], None]]:
    """Listen in place of the supervisor of a parked worker."""
    listeners = []

    def listen(local_rank: int) -> None:
        listener = worker_request.listen_parked(str(local_rank))
        assert listener is not None
        listeners.append(listener)

    yield listen
    for listener in listeners:
        listener.close()


def test_node_joins_when_all_missing_workers_have_parked(
    node: Node, park: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Only workers without a process start, once, and none of them knows a generation."""
    caplog.set_level("INFO")
    workers = node.open(f"exit {constants.EXIT_PARKED}")
    park(1)
    workers.before_join()
    workers.before_join()  # its heartbeat has changed the cost while they start
    node.wait_for_shims("0", "2")
    environ = dict(line.partition("=")[::2] for line in (node.directory / "env-2").read_text().splitlines())
    assert environ.keys().isdisjoint(torchelastic.GENERATION_VARIABLES)
    expected = {constants.ENV_EARLY_START: "1", constants.ENV_STATE_BYTES: str(1 << 30)}
    expected |= {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "job"}
    assert environ == environ | expected
    assert (node.begun, node.has_ended.is_set()) == (1, False)
    node.let_shims_end(2)
    assert node.has_ended.wait(30)
    assert caplog.messages[0] == (
        "local rank 1 keeps its process; local ranks 0, 2 start before this node joins, which takes about "
        "20 s. Other nodes that are enough train meanwhile."
    )
    assert caplog.messages[1].startswith("all workers of this node have reached er.resume() after ")
    park(0)
    park(2)
    workers.before_join()
    assert node.begun == 1


def test_view_that_needs_the_node_waits_for_the_supervisors_of_standbys(
    node: Node, park: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for their end: torchelastic's launcher shims connect, and wait for that."""
    workers = node.open(f"exit {constants.EXIT_PARKED}")
    workers.before_join()
    node.wait_for_shims("0", "1", "2")
    to_listen, looks = [2, 0, 1], []

    def look(_: float) -> None:
        looks.append(1)
        park(to_listen.pop())

    monkeypatch.setattr(time, "sleep", look)
    workers.begin_generation(Mock())
    assert len(looks) == 3
    to_listen.append(7)
    node.client.restart_requested = True
    workers.begin_generation(Mock())
    assert len(looks) == 3
    workers.close()


@pytest.mark.parametrize(
    ("exit_status", "why"),
    [
        (f"exit {constants.EXIT_NEEDS_GENERATION}", "no worker can start ahead, as its own line above says"),
        ("exit 1", "it ended with exit code 1"),
        ("kill -9 $$$$", "it was killed by signal 9"),
    ],
)
def test_agent_whose_standby_failed_starts_no_other(
    node: Node, park: Callable[[int], None], caplog: pytest.LogCaptureFixture, exit_status: str, why: str
) -> None:
    """It joins at once, and the start in its view shows whether the script is at fault."""
    workers = node.open(exit_status)
    park(0)
    park(1)
    workers.before_join()
    node.wait_for_shims("2")
    node.let_shims_end(1)
    assert node.has_ended.wait(30)
    assert f"local rank 2 did not reach er.resume() before this node joined: {why}." in caplog.text
    workers.before_join()
    assert node.begun == 1


def test_standbys_end_with_the_agents_part_in_the_job(
    node: Node, park: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A drain, a signal or the job's end may come while they run; that is no failure of theirs."""
    workers = node.open(f"exit {constants.EXIT_PARKED}")
    park(0)
    workers.before_join()
    node.wait_for_shims("1", "2")
    workers.close()
    assert node.has_ended.wait(30)
    for rank in "12":
        pid = int((node.directory / rank).read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not caplog.messages


def test_own_workers_cost_counts_and_is_sent_once(node: Node) -> None:
    """The leader's is that of its own workers; another one is sent when it is known."""
    events: list[Event] = [{"event": "restartable", "start_s": 9.0, "state_bytes": 5}]
    workers = StandbyWorkers(make_agent_context(read_evidence=lambda: list(events)))
    workers.start(node.client)
    workers.before_join()
    workers.update(node.client)
    node.client.send_fact.assert_called_once_with(START_COST.name, 0, encode_body(StartCost(9.0, 5)))
    events[0] |= {"start_s": 11.0}
    workers.update(node.client)
    assert node.client.send_fact.call_count == 2
