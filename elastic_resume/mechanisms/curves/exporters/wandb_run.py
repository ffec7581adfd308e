"""Write points to a Weights & Biases run, through `wandb_process`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from elastic_resume.errors import MachineError
from elastic_resume.mechanisms.curves.exporter import Exporter, Point

CLOSE_TIMEOUT_S = 60.0
"""How long W&B may upload the rest at the end; ``wandb sync`` can do it later."""


class WandbRun(Exporter):
    """Writes to the run whose id is the job's run id; ``WANDB_MODE`` and W&B's other variables count."""

    def __init__(self, project: str, run_id: str) -> None:
        self._project = project
        self._run_id = run_id
        self._process: subprocess.Popen[str] | None = None
        self._last_synced = -1

    def open(self, last_written: int, go_back_to: int | None = None) -> int:
        """Begin W&B's process and resume the run, or rewind it."""
        self.close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.wandb_process", self._project, self._run_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self._last_synced = int(self._ask("open", last_written, go_back_to))
        except BaseException:
            self._kill()
            raise
        return self._last_synced

    def _ask(self, *request: Any) -> Any:
        """Return the answer of W&B's process.

        Raises:
            MachineError: W&B refuses, or the process has ended.

        """
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise ValueError("the exporter is closed")
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise MachineError("W&B's process has ended; the log of the agent has its last words.")
        answer = json.loads(line)
        if "error" in answer:
            raise MachineError(f"W&B refuses the logged values: {' '.join(answer['error'].split())[:500]}")
        return answer["result"]

    def write(self, points: Sequence[Point]) -> None:
        """Log each point with its own step and time."""
        if points:
            self._ask("write", points)

    def flush(self) -> int:
        """Return the last step in W&B's file, which is some tenths of a second behind."""
        self._last_synced = max(self._last_synced, int(self._ask("flush")))
        return self._last_synced

    def close(self) -> None:
        """Finish the run, and wait for W&B's processes, for a limited time."""
        process = self._process
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(["close"]) + "\n")
            process.stdin.flush()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(CLOSE_TIMEOUT_S)
        self._kill()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for stream in (process.stdin, process.stdout):
                if stream:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
            process.wait()
