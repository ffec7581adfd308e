"""Where this rank stands: its world, its node, and which rank speaks for the node.

Where this rank's node keeps its snapshots: with the agent, or, without one, in the node's lead.

Under plain torchrun or python the lead is the keeper itself: copies reach the disk in the same way, and
what is in memory ends with the lead.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from elastic_resume import console, constants
from elastic_resume.checkpoint import reader
from elastic_resume.checkpoint.catalog import Catalog
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.config import Settings
from elastic_resume.errors import ConfigError, ElasticResumeError
from elastic_resume.events import EventLog
from elastic_resume.policy.resume_plan import SavedState
from elastic_resume.restore.collectives import Collectives
from elastic_resume.snapshot.committer import CheckpointCommitter
from elastic_resume.snapshot.ipc import SnapshotServer
from elastic_resume.snapshot.slot_client import SlotClient
from elastic_resume.snapshot.slot_pool import SlotPool

T = TypeVar("T")


class RankContext:
    """This rank, its node's directory and its event log.

    The node's lowest rank leads it: it lists what the node holds, and saves.
    """

    def __init__(self, collectives: Collectives, settings: Settings, events: EventLog) -> None:
        """Every rank of the world must call this at the same time."""
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
        self.slot_client: SlotClient | None = None  # the node's slots, once they can be reached
        self.local_rank = self.node_by_rank[: collectives.rank].count(self.node)

    @property
    def catalog(self) -> Catalog:
        """The checkpoints of this node."""
        return Catalog(self.node_dir, self.settings.run_id)

    def checkpoint_path(self, copy: SavedState) -> Path:
        """Where this node reads ``copy``."""
        return self.run_dir / copy.owner_node / reader.checkpoint_name(copy.generation, copy.step)

    def check_node_names_unique(self, directory_id: str) -> None:
        """Raise when two ranks call their node alike and do not see the same directory.

        Two hosts named "localhost", say, each with a disk of its own: no lock can notice them, and the one
        would take the other's checkpoints for its own that are gone. ``identity`` is this node's directory's.
        """
        told = self.collectives.gather(directory_id)
        for rank, node in enumerate(self.node_by_rank):
            first = self.local_leader_by_node[node]
            if told[rank] != told[first]:
                raise ConfigError(
                    f"ranks {first} and {rank} both run on a node named {node!r}, and see different disks "
                    "under it: give each node a name of its own with --node-name."
                )

    def quarantine(self, path: Path, reason: str) -> None:
        """Set a checkpoint of this node aside, and say so."""
        kept = self.catalog.quarantine(path, reason)
        self.events.emit("quarantine", path=str(kept), reason=reason)

    def run_on_all_ranks(self, action: Callable[[], T]) -> T:
        """Run ``action`` on every rank; when it fails on one, raise on all, naming rank and reason.

        The ranks on which it did not fail raise too, or they would wait for the others in a collective.
        """
        failure: ElasticResumeError | None = None
        result: T | None = None
        try:
            result = action()
        except ElasticResumeError as error:
            failure = error
        told = self.collectives.gather([str(failure), failure.is_deterministic] if failure else None)
        if failure is not None:
            raise failure
        for rank, other in enumerate(told):
            if other is not None:
                text = f"rank {rank} on node {self.node_by_rank[rank]} cannot go on: {other[0]}"
                peer = ElasticResumeError(text)
                peer.is_deterministic = bool(other[1])
                raise peer
        return result  # type: ignore[return-value]


def open_node_dir(context: RankContext) -> NodeDir:
    """Claim the node's directory where no agent has done so; only the rank that leads its node does."""
    settings = context.settings
    if context.is_local_leader and constants.ENV_AGENT_PID not in os.environ:
        # After a kill, forked DataLoader workers hold the lock until they notice, within some seconds.
        node_dir = NodeDir.claim(settings.ckpt_dir, settings.run_id, settings.node_name, timeout_s=20)
    else:
        node_dir = NodeDir.attach(settings.ckpt_dir, settings.run_id, settings.node_name)
    if context.is_local_leader:
        context.catalog.remove_unfinished()
    return node_dir


class CommitterConnection:
    """The connection to the node's keeper, and the keeper where it is this process's own."""

    def __init__(self, context: RankContext) -> None:
        """Every rank of the world must call this at the same time.

        Raises:
            ElasticResumeError: the keeper cannot be reached.

        """
        self._pid = os.getpid()
        self._snapshot_server: SnapshotServer | None = None
        self._committer: CheckpointCommitter | None = None
        name = os.environ.get(constants.ENV_COMMITTER, "") if constants.ENV_AGENT_PID in os.environ else ""
        if not name and context.is_local_leader:
            name = context.run_on_all_ranks(lambda: self._start_committer(context))
        else:
            context.run_on_all_ranks(lambda: "")
        told = context.collectives.gather(name)
        name = told[context.local_leader_by_node[context.node]]
        try:
            self.slot_client = context.run_on_all_ranks(
                lambda: SlotClient(name, context.local_rank, is_local_leader=context.is_local_leader)
            )
        except ElasticResumeError:
            self.close()
            raise

    def close(self) -> None:
        """End the connection; a keeper of our own finishes the commit under way."""
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(AttributeError):
            self.slot_client.close()
        if self._snapshot_server is not None and self._committer is not None:
            self._snapshot_server.close()
            self._committer.close()
            self._snapshot_server = None

    def _start_committer(self, context: RankContext) -> str:
        def say(text: str) -> None:
            console.say(f"node {context.node}: {text}")

        rack = SlotPool(context.settings.snapshot_memory, log=say)
        run_id = context.settings.run_id
        self._committer = CheckpointCommitter(
            context.node_dir, run_id, rack, log=say, emit=context.events.emit
        )
        self._snapshot_server = SnapshotServer(self._committer)
        self._committer.start()
        self._snapshot_server.start()
        return self._snapshot_server.socket_name


def assigned_generation() -> int:
    """The generation that the agents' rendezvous gave this world; 0 under another launcher."""
    text = os.environ.get(constants.ENV_GENERATION, "")
    return int(text) if text.isdigit() else 0
