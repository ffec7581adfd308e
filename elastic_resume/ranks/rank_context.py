"""Hold a rank's place in the job: collectives, its node's directory, its connection to the committer.

The lowest rank of each node is the local leader: it lists the node's snapshots and checkpoints, and requests
commits.
Under an agent the committer runs in the agent. Under plain torchrun or python the local leader runs the
committer itself, and the snapshots in memory end with that process.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from elastic_resume import constants
from elastic_resume.checkpoint import reader
from elastic_resume.checkpoint.catalog import Catalog
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.config import Settings
from elastic_resume.errors import ConfigError, ElasticResumeError, OtherRankFailedError
from elastic_resume.events import EventLog
from elastic_resume.policy.resume_plan import SavedState
from elastic_resume.ranks.collectives import Collectives
from elastic_resume.slots.committer import CheckpointCommitter
from elastic_resume.slots.ipc import SlotClient, SnapshotServer
from elastic_resume.slots.progress_page import read_start_ticks
from elastic_resume.slots.slot_pool import SlotPool

T = TypeVar("T")


class RankContext:
    """This rank, its node's directory and its event log."""

    def __init__(self, collectives: Collectives, settings: Settings, events: EventLog) -> None:
        """Gather the node names. Every rank calls this at the same time."""
        self.collectives = collectives
        self.settings = settings
        self.events = events
        self.node = settings.node_name
        self.run_dir = settings.ckpt_dir / settings.run_id
        self.node_dir = self.run_dir / self.node
        self.node_by_rank: list[str] = collectives.gather(self.node)
        self.local_leader_by_node = {
            name: self.node_by_rank.index(name) for name in dict.fromkeys(self.node_by_rank)
        }
        self.is_local_leader = self.local_leader_by_node[self.node] == collectives.rank
        counts = Counter[str]()
        self.local_rank_by_rank: list[int] = []  # a rank's place among those of its own node
        for name in self.node_by_rank:
            self.local_rank_by_rank.append(counts[name])
            counts[name] += 1
        self.local_rank = self.local_rank_by_rank[collectives.rank]

    @property
    def catalog(self) -> Catalog:
        """The checkpoints of this node."""
        return Catalog(self.node_dir, self.settings.run_id)

    def checkpoint_path(self, saved_state: SavedState) -> Path:
        """Return the directory from which this node reads ``saved_state``."""
        return self.run_dir / saved_state.owner_node / reader.checkpoint_name(*saved_state.version)

    def check_node_names_unique(self, ids: Sequence[str]) -> None:
        """Raise if two ranks have the same node name and different directories under it.

        Two hosts named "localhost" that have separate disks would both take the lock, and neither would see
        the other's checkpoints. ``ids`` are the random ids in the nodes' directories, by rank.
        """
        for rank, node in enumerate(self.node_by_rank):
            first = self.local_leader_by_node[node]
            if ids[rank] != ids[first]:
                raise ConfigError(
                    f"ranks {first} and {rank} both run on a node named {node!r} and see different disks "
                    "under it: give each node its own name with ELASTIC_RESUME_NODE_NAME."
                )

    def quarantine(self, path: Path, reason: str) -> None:
        """Move a checkpoint of this node to quarantine, and emit an event."""
        kept = self.catalog.quarantine(path, reason)
        self.events.emit("quarantine", path=str(kept), reason=reason)

    def run_on_all_ranks(self, action: Callable[[], T]) -> T:
        """Run ``action`` on every rank; if it fails on one rank, raise on all ranks.

        The other ranks raise too, because they would otherwise wait for the failed one in their next
        collective.
        """
        return self.run_and_gather(lambda: (action(), None))[0]

    def run_and_gather(self, action: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
        """Run ``action``, which returns its result and a JSON value; if it fails on one rank, raise on all.

        Returns:
            this rank's result, and the values of all ranks.

        """
        failure: ElasticResumeError | None = None
        result: T | None = None
        value = None
        try:
            result, value = action()
        except ElasticResumeError as error:
            failure = error
        encoded = [str(failure), failure.is_deterministic] if failure else None
        outcomes = self.collectives.gather([value, encoded])
        if failure is not None:
            raise failure
        for rank, (_, failed) in enumerate(outcomes):
            if failed is not None:
                text = f"rank {rank} on node {self.node_by_rank[rank]} cannot continue: {failed[0]}"
                peer_failure = OtherRankFailedError(text)
                peer_failure.is_deterministic = bool(failed[1])
                raise peer_failure
        return result, [value for value, _ in outcomes]  # type: ignore[return-value]


def raise_if_set(error: ElasticResumeError | None) -> None:
    """Raise ``error`` unless it is None; for `RankContext.run_on_all_ranks`."""
    if error is not None:
        raise error


def open_node(context: RankContext, cleanup: contextlib.ExitStack) -> tuple[NodeDir, str]:
    """Open the node's directory, and find its committer; ``cleanup`` closes what this opens.

    Without an agent the local leader locks the directory first, and runs the committer. Every rank calls this
    at the same time.

    Returns:
        the directory, and the name of the committer's socket.

    """

    def open_own() -> tuple[NodeDir, str]:
        node_dir = _open_node_dir(context)
        cleanup.callback(node_dir.release)
        name = os.environ.get(constants.ENV_COMMITTER, "")
        if name and constants.ENV_AGENT_PID in os.environ:
            return node_dir, name
        return node_dir, _start_committer(context, cleanup) if context.is_local_leader else ""

    node_dir, names = context.run_and_gather(open_own)
    return node_dir, names[context.local_leader_by_node[context.node]]


def open_slot_client(context: RankContext, committer: str, cleanup: contextlib.ExitStack) -> SlotClient:
    """Connect to the committer at this socket; ``cleanup`` closes the connection.

    Every rank calls this at the same time.

    Raises:
        ElasticResumeError: the committer of a node does not answer.

    """

    def connect() -> SlotClient:
        client = SlotClient(committer, context.local_rank, is_local_leader=context.is_local_leader)
        cleanup.callback(client.close)
        return client

    return context.run_on_all_ranks(connect)


def _open_node_dir(context: RankContext) -> NodeDir:
    settings = context.settings
    if context.is_local_leader and constants.ENV_AGENT_PID not in os.environ:
        # After a SIGKILL the script's forked DataLoader workers keep the lock for some seconds.
        node_dir = NodeDir.claim(settings.ckpt_dir, settings.run_id, settings.node_name, timeout_s=20)
        if settings.resume == "never":
            node_dir.move_earlier_run_aside(launcher_id())
    else:
        node_dir = NodeDir.attach(settings.ckpt_dir, settings.run_id, settings.node_name)
    if context.is_local_leader:
        context.catalog.remove_unfinished()
    return node_dir


def _start_committer(context: RankContext, cleanup: contextlib.ExitStack) -> str:
    """Start a committer, which ``cleanup`` closes; return its socket's name."""
    pool = SlotPool(context.settings.snapshot_memory)
    committer = CheckpointCommitter(context.node_dir, context.settings.run_id, pool, emit=context.events.emit)
    server = SnapshotServer(committer)
    committer.start()
    cleanup.callback(committer.close)
    server.start()
    cleanup.callback(server.close)
    return server.socket_name


def launcher_id() -> str:
    """Identify this start of the job by its launcher: the node's agent, torchrun, or this process.

    The id holds the launcher's start time in ticks since boot, and the boot. A wall-clock time could change,
    and this start's own checkpoints would then count as an earlier start's.
    """
    agent = os.environ.get(constants.ENV_AGENT_PID)
    pid = int(agent) if agent else os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    try:
        return f"{pid} {read_start_ticks(pid)} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        return str(pid)


def assigned_generation() -> int:
    """Return the generation that the agents' rendezvous assigned; 0 under another launcher."""
    text = os.environ.get(constants.ENV_GENERATION, "")
    return int(text) if text.isdigit() else 0
