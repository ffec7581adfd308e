"""Start workers before their node joins a view. Each runs the script up to `er.resume()` and waits there.

The agent starts the launcher shim itself, with `constants.ENV_STANDBY` and without the variables of a
generation. The shim exits with `constants.EXIT_PARKED` when its worker is parked. The worker's supervisor
then waits for torchelastic's launcher shim, which hands the worker its generation::

    start --> running --EXIT_PARKED of all--> on_end: the node is ready
                 +-----any other exit code--> on_end: the node is ready; this agent starts no standby again

The node sends its request to join at once. Others may form a view without it until it is ready.

A worker that is needed earlier is not started twice: torchelastic's launcher shim waits until it is parked.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from string import Template

from elastic_resume import constants
from elastic_resume.agent.workers import forkserver, worker_request
from elastic_resume.mechanisms.standbys.start_cost import StartCost, choose_standby_ranks
from elastic_resume.policy.wording import describe_standby_failure, describe_standby_start

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.005
# A standby may take so long, or so many times what a start took last.
MIN_LIMIT_S, LIMIT_FACTOR = 60.0, 10
# What a standby does is no part of a generation, so it cannot write into the events either.
REMOVED_VARIABLES = {name.decode() for name in forkserver.VARIABLES_OF_A_GENERATION} | {
    *("TORCHELASTIC_ERROR_FILE", constants.ENV_GENERATION, constants.ENV_LAST_STEP, constants.ENV_MTBF_S),
    *(constants.ENV_EVIDENCE, constants.ENV_EVENTS_PATH),
}


class StandbyWorkers:
    """The standbys of one agent, from its first `start` to `close`."""

    def __init__(
        self,
        command: Sequence[str],
        local_world_size: int,
        *,
        on_begin: Callable[[], None],
        on_end: Callable[[], None],
        is_possible: bool = True,
    ) -> None:
        """Prepare standbys of ``command``, in which ``${local_rank}`` stands for the local rank.

        ``on_begin`` is called at each start, ``on_end`` when its workers stand at `er.resume()` or one of
        them has failed, in a thread.
        """
        self._command = command
        self._local_world_size = local_world_size
        self._on_begin, self._on_end = on_begin, on_end
        self._is_possible = is_possible
        self._is_closing = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # the newest shim of each local rank

    def start_missing(self, cost: StartCost | None) -> None:
        """Start the workers that have no process, if that takes long. Call it in the agent's main thread.

        The kernel kills the launcher shims when the thread that started them ends.
        """
        ranks = range(self._local_world_size)
        kept = {rank for rank in ranks if self._starts(rank) or worker_request.is_parked(str(rank))}
        missing = choose_standby_ranks(cost, kept, self._local_world_size, is_possible=self._is_possible)
        if not missing or cost is None:
            return
        self._on_begin()
        logger.info(describe_standby_start(missing, sorted(kept), cost.start_s))
        started = {rank: self._spawn(rank, cost) for rank in missing}
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

    def wait_for_supervisors(self, is_over: Callable[[], bool]) -> None:
        """Wait until torchelastic's launcher shims can find the standbys that start, or until ``is_over``.

        A launcher shim that finds none would start a second worker.
        """
        while not is_over() and any(
            self._starts(rank) and not worker_request.is_parked(str(rank)) for rank in self._processes
        ):
            time.sleep(POLL_INTERVAL_S)

    def _starts(self, rank: int) -> bool:
        """Return whether a standby of the local rank has not parked yet."""
        process = self._processes.get(rank)
        return process is not None and process.poll() is None

    def _spawn(self, rank: int, cost: StartCost) -> subprocess.Popen[bytes]:
        environ = {k: v for k, v in os.environ.items() if k not in REMOVED_VARIABLES}
        environ |= {
            constants.ENV_STANDBY: "1",
            constants.ENV_STATE_BYTES: str(cost.state_bytes),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self._local_world_size),
            "TORCHELASTIC_RUN_ID": os.environ.get(constants.ENV_RUN_ID, ""),
        }
        # As torchelastic does with its macros.
        command = [Template(word).safe_substitute(local_rank=rank) for word in self._command]
        return subprocess.Popen(command, env=environ, start_new_session=True)

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
            logger.warning(describe_standby_failure(*next(iter(failed.items()))))
        elif not self._is_closing:
            logger.info(
                "all workers of this node stand at er.resume() after %.1f s.", time.monotonic() - started_at
            )
        self._on_end()


def _kill(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
