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
from elastic_resume.policy.resume_plan import Copy
from elastic_resume.restore.collectives import World
from elastic_resume.snapshot.committer import Keeper
from elastic_resume.snapshot.ipc import Desk
from elastic_resume.snapshot.slot_client import Memory
from elastic_resume.snapshot.slot_pool import Rack

T = TypeVar("T")


class Place:
    """This rank, its node's directory and its event log.

    The node's lowest rank leads it: it lists what the node holds, and saves.
    """

    def __init__(self, world: World, settings: Settings, events: EventLog) -> None:
        """Every rank of the world must call this at the same time."""
        self.world = world
        self.settings = settings
        self.events = events
        self.node = settings.node_name
        self.run_dir = settings.ckpt_dir / settings.run_id
        self.node_dir = self.run_dir / self.node
        self.node_of: list[str] = world.gather(self.node)
        self.lead_of = {name: self.node_of.index(name) for name in dict.fromkeys(self.node_of)}
        self.leads = self.lead_of[self.node] == world.rank
        self.memory: Memory | None = None  # the node's slots, once they can be reached
        self.local_rank = self.node_of[: world.rank].count(self.node)

    @property
    def catalog(self) -> Catalog:
        """The checkpoints of this node."""
        return Catalog(self.node_dir, self.settings.run_id)

    def path_of(self, copy: Copy) -> Path:
        """Where this node reads ``copy``."""
        return self.run_dir / copy.home / reader.name_of(copy.generation, copy.step)

    def refuse_namesakes(self, identity: str) -> None:
        """Raise when two ranks call their node alike and do not see the same directory.

        Two hosts named "localhost", say, each with a disk of its own: no lock can notice them, and the one
        would take the other's checkpoints for its own that are gone. ``identity`` is this node's directory's.
        """
        told = self.world.gather(identity)
        for rank, node in enumerate(self.node_of):
            first = self.lead_of[node]
            if told[rank] != told[first]:
                raise ConfigError(
                    f"ranks {first} and {rank} both run on a node named {node!r}, and see different disks "
                    "under it: give each node a name of its own with --node-name."
                )

    def quarantine(self, path: Path, reason: str) -> None:
        """Set a checkpoint of this node aside, and say so."""
        kept = self.catalog.quarantine(path, reason)
        self.events.write("quarantine", path=str(kept), reason=reason)

    def together(self, action: Callable[[], T]) -> T:
        """Run ``action`` on every rank; when it fails on one, raise on all, naming rank and reason.

        The ranks on which it did not fail raise too, or they would wait for the others in a collective.
        """
        failure: ElasticResumeError | None = None
        result: T | None = None
        try:
            result = action()
        except ElasticResumeError as error:
            failure = error
        told = self.world.gather([str(failure), failure.at_fault] if failure else None)
        if failure is not None:
            raise failure
        for rank, other in enumerate(told):
            if other is not None:
                text = f"rank {rank} on node {self.node_of[rank]} cannot go on: {other[0]}"
                peer = ElasticResumeError(text)
                peer.at_fault = bool(other[1])
                raise peer
        return result  # type: ignore[return-value]


def open_node(place: Place) -> NodeDir:
    """Claim the node's directory where no agent has done so; only the rank that leads its node does."""
    settings = place.settings
    if place.leads and constants.ENV_AGENT_PID not in os.environ:
        # After a kill, forked DataLoader workers hold the lock until they notice, within some seconds.
        node_dir = NodeDir.claim(settings.ckpt_dir, settings.run_id, settings.node_name, timeout_s=20)
    else:
        node_dir = NodeDir.attach(settings.ckpt_dir, settings.run_id, settings.node_name)
    if place.leads:
        place.catalog.sweep()
    return node_dir


class Keeping:
    """The connection to the node's keeper, and the keeper where it is this process's own."""

    def __init__(self, place: Place) -> None:
        """Every rank of the world must call this at the same time.

        Raises:
            ElasticResumeError: the keeper cannot be reached.

        """
        self._pid = os.getpid()
        self._desk: Desk | None = None
        self._keeper: Keeper | None = None
        name = os.environ.get(constants.ENV_KEEPER, "") if constants.ENV_AGENT_PID in os.environ else ""
        if not name and place.leads:
            name = place.together(lambda: self._keep(place))
        else:
            place.together(lambda: "")
        told = place.world.gather(name)
        name = told[place.lead_of[place.node]]
        try:
            self.memory = place.together(lambda: Memory(name, place.local_rank, lead=place.leads))
        except ElasticResumeError:
            self.close()
            raise

    def close(self) -> None:
        """End the connection; a keeper of our own finishes the commit under way."""
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(AttributeError):
            self.memory.close()
        if self._desk is not None and self._keeper is not None:
            self._desk.close()
            self._keeper.close()
            self._desk = None

    def _keep(self, place: Place) -> str:
        def say(text: str) -> None:
            console.say(f"node {place.node}: {text}")

        rack = Rack(place.settings.snapshot_memory, say=say)
        run_id = place.settings.run_id
        self._keeper = Keeper(place.node_dir, run_id, rack, say=say, tell=place.events.write)
        self._desk = Desk(self._keeper)
        self._keeper.start()
        self._desk.open()
        return self._desk.name


def assigned_generation() -> int:
    """The generation that the agents' rendezvous gave this world; 0 under another launcher."""
    text = os.environ.get(constants.ENV_GENERATION, "")
    return int(text) if text.isdigit() else 0
