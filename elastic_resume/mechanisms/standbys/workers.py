"""Start workers before their node joins a view. Each runs the script up to `er.resume()` and waits there.

The agent starts the launcher shim itself (`AgentContext.start_early`). The shim exits with
`constants.EXIT_PARKED` when its worker is parked. The worker's supervisor then waits for torchelastic's
launcher shim, which hands the worker its generation::

    start --> running --EXIT_PARKED of all--> the node is ready
                 +-----any other exit code--> the node is ready; this agent starts no standby again

The node sends its request to join at once. Others may form a view without it until it is ready.

A worker that is needed earlier is not started twice: torchelastic's launcher shim waits until it is parked.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Iterable

from elastic_resume import constants
from elastic_resume.mechanisms.mechanism import AgentContext, AgentPart, decode_body, encode_body
from elastic_resume.mechanisms.standbys.judge import (
    START_COST,
    StartCost,
    choose_standby_ranks,
    describe_failure,
    describe_start,
    find_start_cost,
)
from elastic_resume.rendezvous.client import RendezvousClient
from elastic_resume.rendezvous.core.interface import StartWorkers

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.005
# A standby may take so long, or so many times what a start took last.
MIN_LIMIT_S, LIMIT_FACTOR = 60.0, 10


class StandbyWorkers(AgentPart):
    """The standbys of one agent, from `start` to `close`, and what its workers have needed to start."""

    def __init__(self, context: AgentContext) -> None:
        self._start_early, self._is_parked = context.start_early, context.is_parked
        self._read_evidence = context.read_evidence
        self._ranks = range(context.local_world_size)
        self._is_possible = context.start_early is not None
        self._is_closing = False
        self._sent_cost: StartCost | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # the newest shim of each local rank

    def start(self, client: RendezvousClient) -> None:
        """Take the client."""
        self._client = client

    def update(self, client: RendezvousClient) -> None:
        """Send what the workers of this generation have needed, if they can keep their process."""
        self._send_cost(client)

    def _send_cost(self, client: RendezvousClient) -> StartCost | None:
        """Return what they have needed, and send it if it is new."""
        cost = find_start_cost(self._read_evidence())
        if cost is not None and cost != self._sent_cost:
            self._sent_cost = cost
            client.send_fact(START_COST.name, 0, encode_body(cost))
        return cost

    def before_join(self) -> None:
        """Start the workers that have no process, if that takes long.

        The kernel kills the launcher shims when the thread that started them ends.
        """
        verdict = self._client.verdicts.get(START_COST.name)
        cost = self._send_cost(self._client) or (decode_body(StartCost, verdict.body) if verdict else None)
        kept = {rank for rank in self._ranks if self._starts(rank) or self._is_parked(rank)}
        missing = choose_standby_ranks(cost, kept, len(self._ranks), is_possible=self._is_possible)
        if not missing or cost is None or self._start_early is None:
            return
        self._client.begin_preparation()
        logger.info(describe_start(missing, sorted(kept), cost.start_s))
        started = {rank: self._start_early(rank, cost.state_bytes) for rank in missing}
        self._processes.update(started)
        threading.Thread(
            target=self._wait,
            args=(started, time.monotonic(), cost.start_s),
            name="elastic-resume-standby",
            daemon=True,
        ).start()

    def close(self) -> None:
        """End the standbys that run. Parked workers end with the agent."""
        self._is_closing = True
        _kill(self._processes.values())

    def begin_generation(self, view: StartWorkers) -> None:
        """Wait until torchelastic's launcher shims can find the standbys that start, or the view has ended.

        A launcher shim that finds none would start a second worker.
        """
        del view
        while not self._client.restart_requested and any(
            self._starts(rank) and not self._is_parked(rank) for rank in self._processes
        ):
            time.sleep(POLL_INTERVAL_S)

    def _starts(self, rank: int) -> bool:
        """Return whether a standby of the local rank has not parked yet."""
        process = self._processes.get(rank)
        return process is not None and process.poll() is None

    def _wait(self, started: dict[int, subprocess.Popen[bytes]], started_at: float, start_s: float) -> None:
        # A script that hangs would else keep this node out of the job for ever. With a dead launcher shim the
        # supervisor kills the worker.
        limit_s = max(MIN_LIMIT_S, LIMIT_FACTOR * start_s)
        timer = threading.Timer(limit_s, lambda: _kill(started.values()))
        timer.daemon = True
        timer.start()
        exit_codes = {rank: process.wait() for rank, process in started.items()}
        timer.cancel()
        failed = {rank: code for rank, code in exit_codes.items() if code != constants.EXIT_PARKED}
        if failed and not self._is_closing:
            self._is_possible = False
            logger.warning(describe_failure(*next(iter(failed.items()))))
        elif not self._is_closing:
            taken_s = time.monotonic() - started_at
            logger.info("all workers of this node have reached er.resume() after %.1f s.", taken_s)
        self._client.finish_preparation()


def _kill(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
