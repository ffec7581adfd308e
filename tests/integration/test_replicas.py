"""Three members over real sockets, one of which holds another state: all hear of it, and what comes then."""

from __future__ import annotations

import hashlib
import math
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import constants
from elastic_resume.agent.snapshots import SnapshotService, serve_snapshots
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.config import Settings as NodeSettings
from elastic_resume.errors import JobFailedError, MachineError
from elastic_resume.policy.checkpoint_interval import AUTO
from elastic_resume.policy.divergence import RESUME_FROM_MAJORITY, STOP, DivergenceVerdict
from elastic_resume.policy.failure_classification import DIVERGENCE
from elastic_resume.rendezvous.client import RendezvousClient
from elastic_resume.rendezvous.config import RendezvousConfig
from elastic_resume.rendezvous.core.events import EmitEvent, Settings, StartWorkers
from elastic_resume.rendezvous.core.messages import JoinSpec, ReplicasDiverged
from elastic_resume.rendezvous.endpoint import Endpoint, ListenEndpoint
from elastic_resume.rendezvous.net.durable_state import DurableStateFile
from elastic_resume.snapshot.ipc import SnapshotClient
from tests.support.rendezvous_nodes import NODE_TIMEOUT_S, wait_until
from tests.unit.snapshot.test_committer import NEEDED, snapshot

pytestmark = pytest.mark.slow

BEAT_S = 0.2  # which carries a digest
STATE = (1.0, 2.0, 3.0)


def digest(text: str) -> str:
    """Of any text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Unfenced:
    """There are no workers to be stopped."""

    until = -math.inf

    def set(self, until: float) -> None:
        """Keep it."""
        self.until = until


class Trainer:
    """One node: a member, what keeps its state, and a thread that asks for worlds as torchelastic does."""

    def __init__(
        self, name: str, place: int, listener: socket.socket, terms: RendezvousConfig, directory: Path
    ) -> None:
        self.name = name
        seat = ListenEndpoint(listener, "127.0.0.1", str(terms.endpoints[place]), place)
        self.member = RendezvousClient(
            terms,
            seat,
            node=name,
            state_file=DurableStateFile(directory),
            max_generation=0,
            lease=Unfenced(),
            on_log=self.told,
        )
        keeper: Any = self
        SnapshotService(keeper, keeper).start_replica_comparison(self.member, log=self.said, emit=self.tell)
        self.diary: list[str] = []
        self.news: list[str] = []
        self.lines: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.worlds: list[StartWorkers] = []
        self.end = ""
        self.may_distrust = threading.Event()
        self.refuses = ""
        self.thread = threading.Thread(target=self.live, daemon=True)

    def live(self) -> None:
        """Ask for one world after the other."""
        try:
            while True:
                world = self.member.join(JoinSpec(f"{self.name}:1", 1))
                self.diary.append(f"world {world.generation}")
                self.worlds.append(world)
                wait_until(lambda: self.member.restart_requested, "the world ends", timeout_s=60)
        except JobFailedError as error:
            self.end = str(error)

    def told(self, news: EmitEvent) -> None:
        """Keep what the rendezvous does."""
        self.news.append(news.text)

    def said(self, line: str) -> None:
        """Keep what people read."""
        self.lines.append(line)

    def tell(self, event: str, /, **fields: object) -> None:
        """Keep an event."""
        self.events.append({"event": event, **fields})

    def train(self, generation: int, step: int, state: tuple[float, ...] = STATE) -> None:
        """Finish a step, and tell of it."""
        self.member.send_digest(generation, step, digest(repr(state)))

    def distrust_after(self, generation: int, agreed_step: int) -> None:
        """Take its time."""
        assert self.may_distrust.wait(30)
        self.diary.append(f"distrusts {generation} after {agreed_step}")
        if self.refuses:
            raise MachineError(self.refuses)


@pytest.fixture
def terms(request: pytest.FixtureRequest) -> RendezvousConfig:
    """Three candidates, and what is done about replicas that differ."""
    endpoints = tuple(Endpoint("127.0.0.1", 0) for _ in range(3))
    return RendezvousConfig("job", endpoints, 3, 3, None, b"token", True, on_divergence=request.param)


@pytest.fixture
def trainers(
    terms: RendezvousConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Trainer]]:
    """Nodes a, b and c, in their first world; none is silent for longer than the others wait.

    They are threads of one process, which may have to wait for a processor.
    """
    own, beats = RendezvousConfig.settings, round(NODE_TIMEOUT_S / BEAT_S)

    def patient(of: RendezvousConfig, own_address: str) -> Settings:
        return replace(own(of, own_address), node_timeout_s=NODE_TIMEOUT_S, heartbeats_per_timeout=beats)

    monkeypatch.setattr(RendezvousConfig, "settings", patient)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    endpoints = tuple(Endpoint("127.0.0.1", one.getsockname()[1]) for one in listeners)
    terms = RendezvousConfig(**{**vars(terms), "endpoints": endpoints})
    made = []
    for place, name in enumerate("abc"):
        (tmp_path / name).mkdir()
        made.append(Trainer(name, place, listeners[place], terms, tmp_path / name))
    for one in made:
        one.member.start()
        one.thread.start()
    wait_until(lambda: all(one.worlds for one in made), "the first world begins everywhere")
    yield made
    for one in made:
        one.may_distrust.set()
    made[0].member.fail_job("the test is over")
    for one in made:
        one.thread.join(30)
        one.member.close()


def diverge(trainers: list[Trainer]) -> int:
    """Node c holds another bias after step 128; up to 64 all are equal. Give the generation."""
    generation = trainers[0].worlds[0].generation
    for one in trainers:
        one.train(generation, 64)
    leader = next(one for one in trainers if one.member._server._server._core.is_leader)  # type: ignore[union-attr]
    comparer = leader.member._server._server._core.role.divergence  # type: ignore[union-attr]
    wait_until(lambda: comparer.agreed_step == 64, "step 64 was compared")
    for one in trainers:
        one.train(generation, 128, (1.0, 2.5, 3.0) if one.name == "c" else STATE)
    return generation


def check_event(one: Trainer, generation: int, *, goes_on: bool) -> None:
    """Its log says what is known."""
    (event,) = one.events
    assert event == {
        "event": "replicas-differ",
        "generation": generation,
        "step": 128,
        "agreed_step": 64,
        "nodes": [["a", "b"], ["c"]],
        "wrong": ["c"],
        "goes_on": goes_on,
    }


@pytest.mark.parametrize("terms", [STOP], indirect=True)
def test_the_job_ends_on_all_nodes_when_replicas_differ(trainers: list[Trainer]) -> None:
    """With a sentence that names step and node; no copy is touched, whoever was right."""
    generation = diverge(trainers)
    wait_until(lambda: all(one.end and one.events for one in trainers), "the job has ended everywhere")
    for one in trainers:
        assert one.end.startswith("replicas differ at step 128: node c is not as nodes a and b, the majority")
        check_event(one, generation, goes_on=False)
        assert not one.lines, "the end says it"
        assert one.diary == [f"world {generation}"]
        assert [(told.kind, told.node) for told in one.member.worker_failures] == [(DIVERGENCE, "c")]


@pytest.mark.parametrize("refuses", ["", "the disk is full"])
@pytest.mark.parametrize("terms", [RESUME_FROM_MAJORITY], indirect=True)
def test_all_go_on_from_the_majority_when_the_wrong_one_distrusts_its_copies(
    trainers: list[Trainer], refuses: str
) -> None:
    """It enters no world before; where it cannot, it says so, and what nodes resume from is compared."""
    wrong = trainers[2]
    wrong.refuses = refuses
    generation = diverge(trainers)
    wait_until(
        lambda: any("the workers of c have not stopped" in text for text in trainers[0].news), "c is late"
    )
    assert all(len(one.worlds) == 1 for one in trainers)
    wrong.may_distrust.set()
    wait_until(lambda: all(len(one.worlds) == 2 for one in trainers), "the next world begins everywhere")
    then = trainers[0].worlds[1]
    assert [str(member) for member in then.members] == [str(one) for one in trainers[0].worlds[0].members]
    assert [(told.kind, told.node, told.step) for told in then.failures] == [(DIVERGENCE, "c", 128)]
    assert wrong.diary == [
        f"world {generation}",
        f"distrusts {generation} after 64",
        f"world {then.generation}",
    ]
    for one in trainers:
        check_event(one, generation, goes_on=True)
        assert "node c is not as nodes a and b" in one.lines[0]
        assert one is wrong or one.diary == [f"world {generation}", f"world {then.generation}"]
    assert wrong.lines[1:] == (
        [f"copies that are wrong could not be set aside: {refuses}"] if refuses else []
    )


@pytest.mark.parametrize("terms", [STOP], indirect=True)
def test_what_is_no_digest_is_refused_where_it_is_told(trainers: list[Trainer]) -> None:
    """The others would drop the connection for it."""
    for wrong in ("", "AB" * 16, "ab" * 8):
        with pytest.raises(ValueError, match="not a digest"):
            trainers[0].member.send_digest(1, 1, wrong)


class Hearing:
    """A member's part in it, without a rendezvous."""

    node = "a"

    def __init__(self) -> None:
        self.told: list[tuple[int, int, str]] = []

    def set_divergence_handler(self, differ: Any) -> None:
        """Take what is called when replicas differ."""
        self.differ = differ

    def send_digest(self, *told: Any) -> None:
        """Keep it."""
        self.told.append(told)


def test_a_state_is_told_under_its_worlds_generation_whatever_its_workers_count(tmp_path: Path) -> None:
    """Workers that began with another job's copy of generation 50 are in 51, and their world is the first."""
    settings = NodeSettings(tmp_path, "job", "a", AUTO, 3, "auto", snapshot_memory=3 * NEEDED)
    nothing: Any = lambda *_, **__: None  # noqa: E731
    hearing: Any = Hearing()
    with (
        NodeDir.claim(tmp_path, "job", "a") as node_dir,
        serve_snapshots(node_dir.path, settings, log=nothing, emit=nothing) as one,
    ):
        one.start_replica_comparison(hearing, log=nothing, emit=nothing)
        rack, line = one.committer.slot_pool, SnapshotClient(os.environ[constants.ENV_COMMITTER])
        rack.reserve(NEEDED)
        mark = snapshot(rack._owned[0].slot, 9, generation=51)
        line.send("compare", snapshot_id=mark, world=1)
        wait_until(lambda: bool(hearing.told), "the digest")
        assert hearing.told[0][:2] == (1, 9)
        hearing.differ(
            ReplicasDiverged(
                1, DivergenceVerdict(9, 8, (("b", "c"), ("a",)), ("a",)), continues_from_majority=True
            )
        )
        assert not any(slot.complete for slot in rack.control_block.read_slots())
        line.close()
