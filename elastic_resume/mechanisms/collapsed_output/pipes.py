"""Give each worker's streams a pipe, and keep the process that reads them."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys

from elastic_resume import linux
from elastic_resume.errors import MachineError
from elastic_resume.mechanisms.mechanism import AgentContext, AgentPart
from elastic_resume.rendezvous.client import RendezvousClient

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0  # a process that a worker has left may print on; the reading process stays for it


class OutputPipes(AgentPart):
    """The pipes exist while the agent runs, and this process keeps both ends.

    So a worker can write even while the reading process is started again.
    """

    def __init__(self, context: AgentContext) -> None:
        self._ranks = context.local_world_size
        self._reading: list[int] = []
        self._writing: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, client: RendezvousClient) -> None:
        """Make the pipes; a single rank needs none, since none prints what it prints."""
        del client
        if self._ranks == 1:
            return
        for _ in range(2 * self._ranks):
            reading, writing = os.pipe()
            self._reading.append(reading)
            self._writing.append(writing)
        try:
            self._start_process()
        except OSError as error:
            raise MachineError(
                f"--collapse-output: the process that prints the workers' lines cannot start: {error}."
            ) from error

    def _start_process(self) -> None:
        command = [sys.executable, "-m", f"{__package__}.filter_process", *map(str, self._reading)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=self._reading, start_new_session=True
        )

    def find_streams(self, local_rank: int) -> tuple[str, str]:
        """Return the paths of the pipes of a local rank."""
        if not self._writing:
            return "", ""
        out, err = self._writing[2 * local_rank : 2 * local_rank + 2]
        return linux.name_descriptor(out), linux.name_descriptor(err)

    def update(self, client: RendezvousClient) -> None:
        """Start the process again if it was killed."""
        del client
        if self._process is not None and self._process.poll() is not None:
            logger.warning(
                "the process that prints the workers' lines (--collapse-output) has ended with status %d; "
                "lines of its last second may be lost. It is started again.",
                self._process.returncode,
            )
            with contextlib.suppress(OSError):  # a full machine; it is tried again
                self._start_process()

    def close(self) -> None:
        """Wait until the workers' last lines are printed, for a limited time."""
        for descriptor in self._writing:
            os.close(descriptor)
        self._writing.clear()
        if self._process is not None:
            process, self._process = self._process, None
            try:
                process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                logger.warning(
                    "a process that a worker has left keeps its output open; its lines are still printed."
                )
        for descriptor in self._reading:
            os.close(descriptor)
        self._reading.clear()
