"""Send the own times of this node's ranks to the leader, and report a rank of this node that it names.

The leader compares the ranks of all nodes. Nothing else follows: no rank is stopped.
"""

from __future__ import annotations

import logging
from dataclasses import asdict

from elastic_resume import gpus
from elastic_resume.mechanisms.mechanism import AgentContext, AgentPart, decode_body, encode_body
from elastic_resume.mechanisms.slow_ranks.description import SlowRankStatus, describe_slow_rank
from elastic_resume.mechanisms.slow_ranks.judge import OWN_TIMES, OwnTimes, SlowRank
from elastic_resume.rendezvous.client import RendezvousClient
from elastic_resume.slots.progress_page import read_own_records

logger = logging.getLogger(__name__)


class SlowRankReporter(AgentPart):
    """Reports the slow rank of one node."""

    def __init__(self, context: AgentContext) -> None:
        self._node_dir = context.node_dir
        self._local_world_size = context.local_world_size
        self._emit, self._index = context.emit, context.measurement_index
        self._read_evidence = context.read_evidence
        self._generation = 0
        self._named: SlowRankStatus | None = None

    def update(self, client: RendezvousClient) -> SlowRankStatus | None:
        """Send the newest own times; return the slow rank if it is on this node."""
        records = read_own_records(self._node_dir, self._local_world_size)
        generation = max((record.worker.assigned_generation for record in records), default=0)
        running = {
            record.local_rank: record for record in records if record.worker.assigned_generation == generation
        }
        times_us = {local_rank: record.measurements[self._index] for local_rank, record in running.items()}
        own_times = OwnTimes(tuple(times_us.get(i, 0) for i in range(self._local_world_size)))
        client.send_fact(OWN_TIMES.name, generation, encode_body(own_times))
        verdict, status = client.verdicts.get(OWN_TIMES.name), None
        slow = decode_body(SlowRank, verdict.body) if verdict and verdict.generation == generation else None
        if slow and slow.node == client.node and slow.local_rank in running:
            rank = running[slow.local_rank].worker.rank
            starts = [event for event in self._read_evidence() if event["event"] == "worker-start"]
            gpu = next((str(event.get("gpu") or "") for event in starts if event.get("rank") == rank), "")
            load = gpus.describe_load(gpu) if gpu else ""
            status = SlowRankStatus(rank, slow.own_us / 1e6, slow.others_us / 1e6, gpu, load)
        if generation != self._generation:  # with its generation, the rank's slowness is over for certain
            self._generation, self._named = generation, None
        step = min((record.step for record in running.values()), default=0)
        self._report(status, {"generation": generation, "step": step})
        return status

    def _report(self, status: SlowRankStatus | None, position: dict[str, int]) -> None:
        """Emit and log a change."""
        named, self._named = self._named, status
        if named and (status is None or status.rank != named.rank):
            logger.info("rank %d is no longer slow.", named.rank)
            self._emit("slow-rank-ended", **position, rank=named.rank)
        if status and (named is None or status.rank != named.rank):
            logger.warning("%s.", describe_slow_rank(status))
            self._emit("slow-rank", **position, **asdict(status))
