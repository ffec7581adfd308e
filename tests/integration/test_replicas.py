"""Three members over real sockets react to the diverged replica of one of them."""

from __future__ import annotations

import hashlib
import math
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import constants
from elastic_resume.agent.snapshots import SnapshotService, serve_snapshots
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.config import Settings as NodeSettings
from elastic_resume.errors import JobFailedError
from elastic_resume.policy.checkpoint_interval import AUTO
from elastic_resume.policy.failure_classification import DIVERGENCE
from elastic_resume.policy.restart import GaveUp, NoProgress
from elastic_resume.rendezvous.client import RendezvousClient
from elastic_resume.rendezvous.core.interface import RendezvousSettings, StartWorkers
from elastic_resume.rendezvous.core.messages import JoinSpec
from elastic_resume.rendezvous.endpoint import Endpoint, ListenEndpoint
from elastic_resume.rendezvous.net.durable_state import DurableStateFile
from elastic_resume.rendezvous.rendezvous_config import RendezvousConfig
from elastic_resume.slots.ipc import SnapshotClient
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
            on_log=lambda _: None,
        )
        committer: Any = self
        self.events: list[dict[str, Any]] = []
        self.views: list[StartWorkers] = []
        self.end = ""
        comparison = SnapshotService(committer, committer)
        comparison.start_replica_comparison(self.member, self.emit)
        self.thread = threading.Thread(target=self.live, daemon=True)

    def live(self) -> None:
        """Join one view after the other."""
        try:
            while True:
                view = self.member.join(JoinSpec(f"{self.name}:1", 1))
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


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[FakeNode]]:
    """Give nodes a, b and c in their first view.

    Their node timeout is long: they are threads of node process, which may wait for a processor.
    """
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    endpoints = tuple(Endpoint("127.0.0.1", listener.getsockname()[1]) for listener in listeners)
    settings = RendezvousSettings(
        (), 3, 3, NODE_TIMEOUT_S, heartbeats_per_timeout=round(NODE_TIMEOUT_S / HEARTBEAT_S)
    )
    config = RendezvousConfig("job", endpoints, None, b"token", True, settings)
    built = []
    for place, name in enumerate("abc"):
        (tmp_path / name).mkdir()
        built.append(FakeNode(name, place, listeners[place], config, tmp_path / name))
    for node in built:
        node.member.start()
        node.thread.start()
    wait_until(lambda: all(node.views for node in built), "the first view starts on all nodes")
    yield built
    built[0].member.fail_job(GaveUp("a", NoProgress(None, 1, 0)))
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


def check_event(node: FakeNode, generation: int) -> None:
    """Check the event of a node."""
    (event,) = node.events
    assert event == {
        "event": "replicas-differ",
        "generation": generation,
        "step": 128,
        "agreed_step": 64,
        "nodes": [["a", "b"], ["c"]],
        "diverged_nodes": ["c"],
    }


def test_diverged_replicas_end_the_job_on_all_nodes(nodes: list[FakeNode]) -> None:
    """The reason names step and node."""
    generation = diverge(nodes)
    wait_until(lambda: all(node.end and node.events for node in nodes), "the job has ended everywhere")
    for node in nodes:
        assert node.end.startswith(
            "replicas differ at step 128: node c is not as nodes a and b, the majority"
        )
        check_event(node, generation)
        assert [view.generation for view in node.views] == [generation]
        assert node.member.job_end is not None
        failures = node.member.job_end.failures
        assert [(failure.kind, failure.node) for failure in failures] == [(DIVERGENCE, "c")]


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
        """Drop the handler; nothing diverges."""

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
        connection.close()
