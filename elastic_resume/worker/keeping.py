"""Where this rank's node keeps its snapshots: with the agent, or, without one, in the node's lead.

Under plain torchrun or python the lead is the keeper itself: copies reach the disk in the same way, and
what is in memory ends with the lead.
"""

from __future__ import annotations

import contextlib
import os

from elastic_resume import contract
from elastic_resume.errors import ElasticResumeError
from elastic_resume.store.handing import Desk
from elastic_resume.store.keeper import Keeper
from elastic_resume.store.rack import Rack
from elastic_resume.worker import telling
from elastic_resume.worker.memory import Memory
from elastic_resume.worker.place import Place


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
        name = os.environ.get(contract.ENV_KEEPER, "") if contract.ENV_AGENT_PID in os.environ else ""
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
            telling.say(f"node {place.node}: {text}")

        rack = Rack(place.settings.snapshot_memory, say=say)
        run_id = place.settings.run_id
        self._keeper = Keeper(place.node_dir, run_id, rack, say=say, tell=place.events.write)
        self._desk = Desk(self._keeper)
        self._keeper.start()
        self._desk.open()
        return self._desk.name
