"""Serve this node's snapshots from the agent, so that they outlive the workers that took them.

The agent owns the slots and the committer. When a generation ends, its newest snapshot is committed to disk
while the next rendezvous runs. When the agent ends, for any reason but SIGKILL, it commits the newest
snapshot first, if the disk accepts it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_resume import constants
from elastic_resume.config import Settings
from elastic_resume.errors import MachineError
from elastic_resume.mechanisms.mechanism import encode_body
from elastic_resume.mechanisms.replicas.judge import DIGESTS, StateDigest
from elastic_resume.policy.restart import ReplicasDiffer
from elastic_resume.rendezvous.client import RendezvousClient
from elastic_resume.slots.committer import CheckpointCommitter, SnapshotDigester
from elastic_resume.slots.ipc import SnapshotServer
from elastic_resume.slots.slot_memory import decode_snapshot_id
from elastic_resume.slots.slot_pool import SlotPool

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SnapshotService:
    """The committer of this node's snapshots, and the thread that digests them for replica comparison."""

    committer: CheckpointCommitter
    digester: SnapshotDigester

    def start_replica_comparison(self, client: RendezvousClient) -> None:
        """Compare this node's state with the other nodes' state, through ``client``, from now on."""
        # A view's generation -> its workers' generation, which is greater if they resumed another job's copy.
        worker_generations: dict[int, int] = {}

        def request_digest(snapshot_id: int, view_generation: int) -> None:
            worker_generations[view_generation] = decode_snapshot_id(snapshot_id)[0]
            self.digester.enqueue(snapshot_id)

        def send_digest(worker_generation: int, step: int, digest: str) -> None:
            view_generations = {worker: view for view, worker in list(worker_generations.items())}
            body = encode_body(StateDigest(step, digest))
            client.send_fact(DIGESTS.name, view_generations[worker_generation], body)

        self.digester.on_digest = send_digest
        self.committer.request_comparison = request_digest


def emit_divergence(job_end: object, emit: Callable[..., Any]) -> None:
    """Emit an event if the job has ended because replicas differ."""
    if isinstance(job_end, ReplicasDiffer):
        verdict = job_end.verdict
        emit(
            "replicas-differ",
            generation=job_end.generation,
            step=verdict.step,
            agreed_step=verdict.agreed_step,
            nodes=[list(group) for group in verdict.groups],
            diverged_nodes=list(verdict.diverged),
        )


@contextlib.contextmanager
def serve_snapshots(
    node_dir: Path, settings: Settings, emit: Callable[..., Any]
) -> Iterator[SnapshotService]:
    """Serve snapshots within the context; workers find the service by their environment.

    This process owns ``node_dir``. ``emit`` takes an event's kind and fields.
    """
    slot_pool = SlotPool(settings.snapshot_memory)
    committer = CheckpointCommitter(node_dir, settings.run_id, slot_pool, emit=emit)
    digester = SnapshotDigester(slot_pool)
    server = SnapshotServer(committer)
    os.environ[constants.ENV_COMMITTER] = server.socket_name
    os.environ[constants.ENV_SLOTS] = slot_pool.control_path
    committer.start()
    digester.start()
    server.start()
    try:
        yield SnapshotService(committer, digester)
    finally:
        os.environ.pop(constants.ENV_COMMITTER, None)
        os.environ.pop(constants.ENV_SLOTS, None)
        with contextlib.suppress(MachineError):  # the committer has logged the error
            committer.commit()
        if committer.last_error:
            text = "the newest snapshot was not committed and is lost with this agent: %s"
            logger.error(text, committer.last_error)
        server.close()
        digester.close()
        committer.close()
