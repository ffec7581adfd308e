"""Announce a drain of this node to the leader, and any planned end of the view to this node's workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from elastic_resume.background import BackgroundThread
from elastic_resume.mechanisms.mechanism import AgentContext, AgentPart, encode_body
from elastic_resume.mechanisms.planned_ends.judge import PLANNED_ENDS, PlannedEnd
from elastic_resume.rendezvous.client import RendezvousClient
from elastic_resume.rendezvous.core.interface import StartWorkers
from elastic_resume.rendezvous.facts import Fact

ANNOUNCEMENT_NODE_TIMEOUTS = 0.2
"""Two heartbeats: a fact is sent at once, and each node gets the verdict in the answer to its next one."""
VERDICT_WAIT_S = 0.5


class EndAnnouncer(AgentPart):
    """The part of one agent. It stores `planned_end_ms` of the control block for the workers."""

    def __init__(self, context: AgentContext) -> None:
        self._control_block = context.committer.slot_pool.control_block
        self._announcement_s = ANNOUNCEMENT_NODE_TIMEOUTS * context.node_timeout_s
        self._client: RendezvousClient | None = None
        self._lock = threading.Lock()
        self._generation = 0
        self._has_peers = False
        self._is_drained = self._is_closed = False
        self._until_ms = 0
        self._verdicts: Mapping[str, Fact] = {}
        self._thread = BackgroundThread("planned-ends", self._wait_for_verdict)

    def start(self, client: RendezvousClient) -> None:
        """Begin to wait for verdicts."""
        self._client = client
        self._thread.start()

    def begin_generation(self, view: StartWorkers) -> None:
        """Forget the end of the view before."""
        with self._lock:
            self._generation, self._has_peers = view.generation, len(view.members) > 1
            self._is_drained = False
            self._store(0)

    def begin_stop(self, cause: str) -> None:
        """Announce the drain, and let the workers train on until all nodes know of it."""
        del cause
        with self._lock:
            if self._client is None or self._is_drained:
                return
            self._is_drained = True
            if not self._until_ms:  # else all nodes know already
                self._store_in(self._announcement_s if self._has_peers else 0.0)
            if self._has_peers:
                body = encode_body(PlannedEnd(is_planned=True))
                self._client.send_fact(PLANNED_ENDS.name, self._generation, body)

    def close(self) -> None:
        """End the thread. The committer unmaps the control block later."""
        self._thread.close(VERDICT_WAIT_S)
        with self._lock:
            self._is_closed = True

    def _wait_for_verdict(self) -> float:
        client = self._client
        if client is None:
            return VERDICT_WAIT_S
        self._verdicts = client.wait_for_verdicts(self._verdicts, VERDICT_WAIT_S)
        fact = self._verdicts.get(PLANNED_ENDS.name)
        with self._lock:
            is_planned = fact is not None and fact.generation == self._generation
            if is_planned and not self._until_ms:
                self._store_in(0.0)
            elif not (is_planned or self._is_drained):
                self._store(0)
        return 0.0

    def _store_in(self, wait_s: float) -> None:
        self._store(int((time.monotonic() + wait_s) * 1000) or 1)

    def _store(self, until_ms: int) -> None:
        self._until_ms = until_ms
        if not self._is_closed:
            self._control_block.set("planned_end_ms", until_ms)
