"""Write points to a W&B run, as a child of the agent: ``python -m …wandb_process PROJECT RUN_ID``.

W&B starts a service, names it in the environment of its process, and ends it for all runs of the process.
In the agent that would reach the workers and their own runs. So W&B has a process of its own. It gets
requests as lines of JSON, and answers each with one. When the agent dies, it ends at once, and its service
with it.

Online, W&B's server knows the last step. Offline the files of earlier writers in W&B's directory tell it, and
each writer begins a new one. ``wandb sync`` uploads them as one run, in their order.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_resume.checkpoint.atomic_io import DISK
from elastic_resume.mechanisms.curves.exporters.wandb_file import StepReader

if TYPE_CHECKING:
    import wandb

_FILE_INTERVAL_S = 0.5
"""How often W&B writes its buffer to its file; its default is 15 s."""


class _RunWriter:
    def __init__(self, project: str, run_id: str) -> None:
        self._project = project
        self._run_id = run_id
        self._run: wandb.Run | None = None
        self._reader: StepReader | None = None

    def open(self, last_written: int, go_back_to: int | None) -> int:
        import wandb  # noqa: PLC0415 - an extra

        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
            x_transaction_log_flush_interval=_FILE_INTERVAL_S,
            x_sync_dir_suffix=f"{time.time_ns() % 10**9:09d}",  # else two starts in a second share a file
        )
        how: dict[str, Any] = {"resume": "allow"}
        if go_back_to is not None:  # the first is a new run of the same id, which replaces the old one
            how = {} if go_back_to < 0 else {"resume_from": f"{self._run_id}?_step={go_back_to}"}
        project = self._project or None
        run = wandb.init(project=project, id=self._run_id, name=self._run_id, settings=settings, **how)
        self._run = run
        if run.disabled:
            return last_written
        directory = Path(run.settings.sync_dir)
        self._reader = StepReader(Path(run.settings.sync_file))
        if not run.offline:
            return run.starting_step - 1
        found = -1
        for earlier in sorted(directory.parent.glob(f"offline-run-*-{self._run_id}-*")):
            if earlier != directory:
                reader = StepReader(earlier / directory_file(self._run_id))
                last_step = reader.read()
                found = max(found if reader.restarts_after is None else reader.restarts_after, last_step)
        found = max(found, last_written)
        return found if go_back_to is None else min(found, go_back_to)

    def write(self, points: Sequence[tuple[int, float, dict[str, float]]]) -> None:
        if self._run is None:
            raise ValueError("the exporter is closed")
        for step, when, values in points:
            self._run.log({**values, "_timestamp": when}, step=step, commit=True)

    def flush(self) -> int:
        """Return the last step that W&B has written to its file; it writes a moment later."""
        if self._reader is None:
            return -1
        last_step = self._reader.read()
        if last_step >= 0:
            descriptor = os.open(self._reader.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                DISK.sync_file(descriptor, self._reader.path)
            finally:
                os.close(descriptor)
        return last_step

    def close(self) -> None:
        import wandb  # noqa: PLC0415 - an extra

        if self._run is not None:
            self._run.finish()
        wandb.teardown()  # it waits for the service, which writes the rest


def directory_file(run_id: str) -> str:
    """Return the name of a run's file in its directory."""
    return f"run-{run_id}.wandb"


def main() -> None:
    """Answer requests until ``close``, or the end of the input: then the agent is dead."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # those of the terminal or scheduler are for the agent
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    run = _RunWriter(*sys.argv[1:])
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            answer["result"] = getattr(run, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - it is raised again in the agent
            answer["error"] = f"{type(error).__name__}: {error}"
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if method == "close":
            return
    os._exit(1)


if __name__ == "__main__":
    main()
