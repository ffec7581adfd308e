"""The keeper of an agent: this node's snapshots outlive its workers, and go to disk when those are gone.

Promise: whatever ends the agent short of SIGKILL, the newest snapshot is on disk before it goes, if the disk
takes it. A generation that ends has its newest snapshot committed while the next one forms.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_resume import constants
from elastic_resume.config import Settings
from elastic_resume.errors import ElasticResumeError, MachineError
from elastic_resume.policy.divergence import describe_divergence
from elastic_resume.rendezvous.client import RendezvousClient
from elastic_resume.rendezvous.core.messages import ReplicasDiverged
from elastic_resume.snapshot.committer import CheckpointCommitter
from elastic_resume.snapshot.digests import SnapshotDigester
from elastic_resume.snapshot.ipc import SnapshotServer
from elastic_resume.snapshot.slot_pool import SlotPool
from elastic_resume.snapshot.slots import decode_snapshot_id


@dataclass(frozen=True)
class SnapshotService:
    """What keeps this node's snapshots, and what digests them for a comparison with other nodes'."""

    committer: CheckpointCommitter
    digester: SnapshotDigester

    def start_replica_comparison(
        self, client: RendezvousClient, *, log: Callable[[str], None], emit: Callable[..., Any]
    ) -> None:
        """Compare this node's state with that of the others in ``member``'s rendezvous from now on.

        When this node is found wrong and the job goes on, its own later copies of that generation are
        distrusted before it enters another world (`Member.join` waits).
        """
        keeper, digester = self.committer, self.digester
        # A world's generation -> its workers'. That is greater where they began with a copy of another job.
        workers: dict[int, int] = {}

        def compare(mark: int, world: int) -> None:
            workers[world] = decode_snapshot_id(mark)[0]
            digester.enqueue(mark)

        def note(generation: int, step: int, digest: str) -> None:
            worlds = {generation: world for world, generation in list(workers.items())}
            client.send_digest(worlds[generation], step, digest)

        def differ(told: ReplicasDiverged) -> None:
            verdict = told.verdict
            emit(
                "replicas-differ",
                generation=told.generation,
                step=verdict.step,
                agreed_step=verdict.agreed_step,
                nodes=[list(camp) for camp in verdict.groups],
                wrong=list(verdict.diverged),
                goes_on=told.continues_from_majority,
            )
            if not told.continues_from_majority:
                return  # the end of the job says it
            log(describe_divergence(verdict, continues=True))
            if client.node in verdict.diverged:
                try:
                    keeper.distrust_after(workers.get(told.generation, told.generation), verdict.agreed_step)
                except ElasticResumeError as error:
                    # The next start compares what it has resumed from, and would find it.
                    log(f"copies that are wrong could not be set aside: {error}")

        client.set_divergence_handler(differ)
        digester.on_digest = note
        keeper.request_comparison = compare


@contextlib.contextmanager
def serve_snapshots(
    node_dir: Path, settings: Settings, *, log: Callable[[str], None], emit: Callable[..., Any]
) -> Iterator[SnapshotService]:
    """Keep this node's snapshots within the context; workers find the keeper in their environment.

    Args:
        node_dir: claimed by this process.
        settings: of the job.
        say: gets lines for people.
        tell: gets events, by kind and fields.

    """
    rack = SlotPool(settings.snapshot_memory, log=log)
    keeper = CheckpointCommitter(node_dir, settings.run_id, rack, log=log, emit=emit)
    digester = SnapshotDigester(rack)
    desk = SnapshotServer(keeper)
    os.environ[constants.ENV_COMMITTER] = desk.socket_name
    os.environ[constants.ENV_SLOTS] = rack.control_path
    keeper.start()
    digester.start()
    desk.start()
    try:
        yield SnapshotService(keeper, digester)
    finally:
        os.environ.pop(constants.ENV_COMMITTER, None)
        os.environ.pop(constants.ENV_SLOTS, None)
        with contextlib.suppress(MachineError):  # which has been said
            keeper.commit()
        if keeper.last_error:
            log(f"the newest step in memory is lost with this agent: {keeper.last_error}")
        desk.close()
        digester.close()
        keeper.close()
