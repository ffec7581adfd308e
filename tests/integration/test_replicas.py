"""Three members over real sockets react to the diverged replica of one of them."""

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
from elastic_resume.agent import snapshots
from elastic_resume.agent.snapshots import SnapshotService, serve_snapshots
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.config import Settings as NodeSettings
from elastic_resume.errors import JobFailedError, MachineError
from elastic_resume.policy.checkpoint_interval import AUTO
from elastic_resume.policy.divergence import RESUME_FROM_MAJORITY, STOP, DivergenceVerdict
from elastic_resume.policy.failure_classification import DIVERGENCE
from elastic_resume.rendezvous.client import RendezvousClient
from elastic_resume.rendezvous.config import RendezvousConfig
from elastic_resume.rendezvous.core.events import Settings, StartWorkers
from elastic_resume.rendezvous.core.messages import JoinSpec, ReplicasDiverged
from elastic_resume.rendezvous.endpoint import Endpoint, ListenEndpoint
from elastic_resume.rendezvous.net.durable_state import DurableStateFile
from elastic_resume.snapshot.ipc import SnapshotClient
from tests.support.rendezvous_nodes import NODE_TIMEOUT_S, wait_until
from tests.support.snapshot_samples import SLOT_BYTES as NEEDED
from tests.support.snapshot_samples import write_snapshot as snapshot

pytestmark = pytest.mark.slow

HEARTBEAT_S = 0.2  # which carries a digest
STATE = (1.0, 2.0, 3.0)


def digest(text: str) -> str:
    """Return the digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class RecordingLease:
    """A lease without workers."""

    until = -math.inf

    def set(self, until: float) -> None:
        """Keep it."""
        self.until = until


class FakeNode:
    """One node: a rendezvous client, a fake committer, and a thread that joins as torchelastic does."""

    def __init__(
        self, name: str, place: int, listener: socket.socket, config: RendezvousConfig, directory: Path
    ) -> None:
        self.name = name
        seat = ListenEndpoint(listener, "127.0.0.1", str(config.endpoints[place]), place)
        self.member = RendezvousClient(
            config,
            seat,
            node=name,
            state_file=DurableStateFile(directory),
            max_generation=0,
            lease=RecordingLease(),
            on_log=lambda entry: self.log_entries.append(entry.text),
        )
        committer: Any = self
        self.history: list[str] = []
        self.log_entries: list[str] = []  # of the rendezvous
        self.events: list[dict[str, Any]] = []
        self.views: list[StartWorkers] = []
        self.end = ""
        self.may_discard = threading.Event()
        self.refuses = ""
        comparison = SnapshotService(committer, committer)
        comparison.start_replica_comparison(self.member, self.emit)
        self.thread = threading.Thread(target=self.live, daemon=True)

    def live(self) -> None:
        """Join one view after the other."""
        try:
            while True:
                view = self.member.join(JoinSpec(f"{self.name}:1", 1))
                self.history.append(f"view {view.generation}")
                self.views.append(view)
                wait_until(lambda: self.member.restart_requested, "the view ends", timeout_s=60)
        except JobFailedError as error:
            self.end = str(error)

    def emit(self, event: str, /, **fields: object) -> None:
        """Keep an event."""
        self.events.append({"event": event, **fields})

    def train(self, generation: int, step: int, state: tuple[float, ...] = STATE) -> None:
        """Finish a step, and send its digest."""
        self.member.send_digest(generation, step, digest(repr(state)))

    def distrust_after(self, generation: int, agreed_step: int) -> None:
        """Wait until the test permits it."""
        assert self.may_discard.wait(30)
        self.history.append(f"distrusts {generation} after {agreed_step}")
        if self.refuses:
            raise MachineError(self.refuses)


@pytest.fixture
def config(request: pytest.FixtureRequest) -> RendezvousConfig:
    """Give the settings of three candidates; the parameter is ``on_divergence``."""
    settings = Settings(
        (),
        3,
        3,
        NODE_TIMEOUT_S,
        heartbeats_per_timeout=round(NODE_TIMEOUT_S / HEARTBEAT_S),
        resume_from_majority=request.param == RESUME_FROM_MAJORITY,
    )
    return RendezvousConfig("job", (), None, b"token", True, settings)


@pytest.fixture
def nodes(config: RendezvousConfig, tmp_path: Path) -> Iterator[list[FakeNode]]:
    """Give nodes a, b and c in their first view.

    Their node timeout is long: they are threads of node process, which may wait for a processor.
    """
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    endpoints = tuple(Endpoint("127.0.0.1", listener.getsockname()[1]) for listener in listeners)
    config = replace(config, endpoints=endpoints)
    built = []
    for place, name in enumerate("abc"):
        (tmp_path / name).mkdir()
        built.append(FakeNode(name, place, listeners[place], config, tmp_path / name))
    for node in built:
        node.member.start()
        node.thread.start()
    wait_until(lambda: all(node.views for node in built), "the first view starts on all nodes")
    yield built
    for node in built:
        node.may_discard.set()
    built[0].member.fail_job("the test is over")
    for node in built:
        node.thread.join(30)
        node.member.close()


def diverge(nodes: list[FakeNode]) -> int:
    """Let node c diverge at step 128 and all agree at step 64; return the generation."""
    generation = nodes[0].views[0].generation
    for node in nodes:
        node.train(generation, 64)
    leader = next(node for node in nodes if node.member._server._server._core.is_leader)  # type: ignore[union-attr]
    comparer = leader.member._server._server._core.role.divergence  # type: ignore[union-attr]
    wait_until(lambda: comparer.agreed_step == 64, "step 64 was compared")
    for node in nodes:
        node.train(generation, 128, (1.0, 2.5, 3.0) if node.name == "c" else STATE)
    return generation


def check_event(node: FakeNode, generation: int, *, continues_from_majority: bool) -> None:
    """Check the event of a node."""
    (event,) = node.events
    assert event == {
        "event": "replicas-differ",
        "generation": generation,
        "step": 128,
        "agreed_step": 64,
        "nodes": [["a", "b"], ["c"]],
        "diverged_nodes": ["c"],
        "continues_from_majority": continues_from_majority,
    }


def agent_log(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines that the replica comparisons of all nodes have logged."""
    return [record.getMessage() for record in caplog.records if record.name == snapshots.__name__]


@pytest.mark.parametrize("config", [STOP], indirect=True)
def test_diverged_replicas_end_the_job_on_all_nodes(
    nodes: list[FakeNode], caplog: pytest.LogCaptureFixture
) -> None:
    """The reason names step and node; no copy is discarded."""
    generation = diverge(nodes)
    wait_until(lambda: all(node.end and node.events for node in nodes), "the job has ended everywhere")
    for node in nodes:
        assert node.end.startswith(
            "replicas differ at step 128: node c is not as nodes a and b, the majority"
        )
        check_event(node, generation, continues_from_majority=False)
        assert node.history == [f"view {generation}"]
        assert node.member.job_end is not None
        failures = node.member.job_end.failures
        assert [(failure.kind, failure.node) for failure in failures] == [(DIVERGENCE, "c")]
    assert not agent_log(caplog), "the end of the job has the reason"


@pytest.mark.parametrize("refuses", ["", "the disk is full"])
@pytest.mark.parametrize("config", [RESUME_FROM_MAJORITY], indirect=True)
def test_diverged_node_discards_its_copies_before_the_next_view(
    nodes: list[FakeNode], refuses: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If discarding fails, the node logs it; the next start compares what the nodes resume from."""
    wrong = nodes[2]
    wrong.refuses = refuses
    generation = diverge(nodes)
    wait_until(
        lambda: any("the workers of c have not stopped" in text for text in nodes[0].log_entries), "c is late"
    )
    assert all(len(node.views) == 1 for node in nodes)
    wrong.may_discard.set()
    wait_until(lambda: all(len(node.views) == 2 for node in nodes), "the next view starts on all nodes")
    then = nodes[0].views[1]
    assert [str(member) for member in then.members] == [str(node) for node in nodes[0].views[0].members]
    assert [(failure.kind, failure.node, failure.step) for failure in then.failures] == [
        (DIVERGENCE, "c", 128)
    ]
    assert wrong.history == [
        f"view {generation}",
        f"distrusts {generation} after 64",
        f"view {then.generation}",
    ]
    for node in nodes:
        check_event(node, generation, continues_from_majority=True)
        assert node is wrong or node.history == [f"view {generation}", f"view {then.generation}"]
    lines = agent_log(caplog)
    assert sum("node c is not as nodes a and b" in line for line in lines) == 3
    refusal = (
        f"diverged checkpoints after step 64 of generation {generation} could not be set aside: {refuses}"
    )
    assert (refusal in lines, len(lines)) == ((True, 4) if refuses else (False, 3))


@pytest.mark.parametrize("config", [STOP], indirect=True)
def test_send_digest_refuses_a_malformed_digest(nodes: list[FakeNode]) -> None:
    """Peers would drop the connection."""
    for wrong in ("", "AB" * 16, "ab" * 8):
        with pytest.raises(ValueError, match="not a digest"):
            nodes[0].member.send_digest(1, 1, wrong)


class FakeClient:
    """A client without a rendezvous."""

    node = "a"

    def __init__(self) -> None:
        self.digests: list[tuple[int, int, str]] = []

    def set_divergence_handler(self, handler: Any) -> None:
        """Keep the handler."""
        self.handler = handler

    def send_digest(self, *digest: Any) -> None:
        """Keep it."""
        self.digests.append(digest)


def test_digest_is_sent_under_the_generation_of_the_view(tmp_path: Path) -> None:
    """Workers that resumed another job's generation 50 are in 51, and their view is the first."""
    settings = NodeSettings(tmp_path, "job", "a", AUTO, 3, "auto", snapshot_memory=3 * NEEDED)
    nothing: Any = lambda *_, **__: None  # noqa: E731
    client: Any = FakeClient()
    with (
        NodeDir.claim(tmp_path, "job", "a") as node_dir,
        serve_snapshots(node_dir.path, settings, nothing) as service,
    ):
        service.start_replica_comparison(client, nothing)
        slot_pool = service.committer.slot_pool
        connection = SnapshotClient(os.environ[constants.ENV_COMMITTER])
        slot_pool.reserve(NEEDED)
        snapshot_id = snapshot(slot_pool._owned[0].slot, 9, generation=51)
        connection.send("compare", snapshot_id=snapshot_id, world=1)
        wait_until(lambda: bool(client.digests), "the digest")
        assert client.digests[0][:2] == (1, 9)
        client.handler(
            ReplicasDiverged(
                1, DivergenceVerdict(9, 8, (("b", "c"), ("a",)), ("a",)), continues_from_majority=True
            )
        )
        assert not any(slot.complete for slot in slot_pool.control_block.read_slots())
        connection.close()
