"""Announce a drain of this node to the leader, and any planned end of the view to this node's workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from elastic_resume.background import BackgroundThread
from elastic_resume.mechanisms.mechanism import AgentContext, AgentPart, encode_body
from elastic_resume.mechanisms.planned_ends.judge import (
    ANNOUNCEMENT_NODE_TIMEOUTS,
    ENDS,
    EndReport,
)
from elastic_resume.rendezvous.client import RendezvousClient
from elastic_resume.rendezvous.core.interface import StartWorkers
from elastic_resume.rendezvous.facts import Fact
from elastic_resume.slots.progress_page import MAX_LOCAL_RANKS, read_own_records
from elastic_resume.slots.slot_memory import decode_snapshot_id, list_complete

VERDICT_WAIT_S = 0.5
PREPARATION_POLL_S = 0.02


class EndAnnouncer(AgentPart):
    """The part of one agent. It stores `planned_end_ms` of the control block for the workers."""

    def __init__(self, context: AgentContext) -> None:
        self._node_dir = context.node_dir
        self._takes_snapshots = not context.settings["snapshot_every"].is_off
        self._control_block = context.committer.slot_pool.control_block
        self._announcement_s = ANNOUNCEMENT_NODE_TIMEOUTS * context.node_timeout_s
        self._client: RendezvousClient | None = None
        self._lock = threading.Lock()
        self._generation = 0
        self._has_peers = False
        self._is_drained = self._is_closed = False
        self._until_ms = 0
        self._report = self._sent = EndReport()
        self._verdicts: Mapping[str, Fact] = {}
        self._thread = BackgroundThread("planned-ends", self._work)

    def start(self, client: RendezvousClient) -> None:
        """Begin to wait for verdicts."""
        self._client = client
        self._thread.start()

    def begin_generation(self, view: StartWorkers) -> None:
        """Forget the end of the view before. A drain that is under way is announced again."""
        with self._lock:
            self._generation, self._has_peers = view.generation, len(view.members) > 1
            self._store(0)
            self._report = self._sent = EndReport()
            if self._is_drained:
                self._announce_drain()

    def begin_stop(self, cause: str) -> None:
        """Announce the drain, and let the workers train on until all nodes know of it."""
        del cause
        with self._lock:
            if not self._is_drained:
                self._is_drained = True
                self._announce_drain()

    def close(self) -> None:
        """End the thread. The committer unmaps the control block later."""
        self._thread.close(VERDICT_WAIT_S)
        with self._lock:
            self._is_closed = True

    def _announce_drain(self) -> None:
        self._plan_end()
        self._send(EndReport(is_drained=True, is_prepared=self._report.is_prepared))

    def _work(self) -> float:
        """Pass on a verdict, and report when the newest step has a snapshot."""
        if self._client is None:
            return VERDICT_WAIT_S
        wait_s = PREPARATION_POLL_S if self._report.is_prepared is False else VERDICT_WAIT_S
        self._verdicts = self._client.wait_for_verdicts(self._verdicts, wait_s)
        fact = self._verdicts.get(ENDS.name)
        with self._lock:
            if fact is not None and fact.generation == self._generation:
                self._plan_end()
            elif not self._is_drained:
                self._store(0)
            if not self._is_closed:
                self._send(EndReport(self._is_drained, self._find_whether_prepared()))
        return 0.0

    def _find_whether_prepared(self) -> bool | None:
        """Return whether no finished step would be lost if the view ended now; see `EndReport`."""
        if not (self._until_ms and self._takes_snapshots):
            return None
        slots = self._control_block.read_slots()
        if len(slots) < 2:
            return None
        snapshots = [decode_snapshot_id(slot.snapshot_id) for slot in list_complete(slots)]
        for record in read_own_records(self._node_dir, MAX_LOCAL_RANKS):
            is_own = record.worker.assigned_generation == self._generation
            if (
                is_own
                and record.step > record.first_step
                and (record.generation, record.step) > max(snapshots, default=(0, 0))
            ):
                return False
        return True

    def _plan_end(self) -> None:
        """Store that the view is to end, and when all nodes know of it."""
        if not self._until_ms:
            wait_s = self._announcement_s if self._has_peers else 0.0
            self._store(int((time.monotonic() + wait_s) * 1000))

    def _store(self, until_ms: int) -> None:
        self._until_ms = until_ms
        if not self._is_closed:
            self._control_block.set("planned_end_ms", until_ms)

    def _send(self, report: EndReport) -> None:
        self._report = report
        if self._client is not None and self._has_peers and report != self._sent:
            self._sent = report
            self._client.send_fact(ENDS.name, self._generation, encode_body(report))
