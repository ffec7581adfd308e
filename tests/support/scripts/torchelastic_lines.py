"""Provoke the log lines of torchelastic that the agent drops, without our rendezvous.

Print the text of each line of those loggers, and whether it was dropped, as one JSON list.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from elastic_resume.agent import torchelastic

WORKER = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
kind, rank = sys.argv[2:], os.environ["RANK"]
while kind != ["end"] and (rank == "1" or kind != ["fail"] or not pathlib.Path(sys.argv[1], "1").exists()):
    time.sleep(0.01)
sys.exit(3 if kind == ["fail"] else 0)
"""


def work(directory: str, kind: str) -> None:
    """Do what a worker of that kind does, as a function."""
    with mock.patch.object(sys, "argv", ["-c", directory, kind]):
        exec(WORKER, {})  # noqa: S102


def launch(directory: Path, kind: str, entrypoint: Any = None) -> None:
    """Run two workers until they end, one fails, or this process has got a signal."""
    directory.mkdir()
    if kind == "wait":
        threading.Thread(target=stop_once_ready, args=(directory,), daemon=True).start()
    config = LaunchConfig(
        *(1, 1, 2), run_id="job", rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", max_restarts=0
    )
    command = [] if entrypoint else ["-c", WORKER]
    with contextlib.suppress(ChildFailedError, SignalException):
        launch_agent(config, entrypoint or sys.executable, [*command, str(directory), kind])


def stop_once_ready(directory: Path) -> None:
    """Send this process SIGTERM when both workers run."""
    while not all((directory / rank).exists() for rank in "01"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def main(directory: Path) -> None:
    """Provoke each line."""
    torchelastic._filter_torchelastic_logs()
    lines: list[tuple[str, bool]] = []

    def note(filters: list[Any], record: logging.LogRecord) -> bool:
        lines.append((str(record.msg), not all(is_wanted(record) for is_wanted in filters)))
        return True

    for name in torchelastic.DROPPED_LINES:
        logger = logging.getLogger(name)
        logger.filters.insert(0, functools.partial(note, list(logger.filters)))
    launch(directory / "failure", "fail")
    launch(directory / "signal", "wait")
    launch(directory / "signal-to-functions", "wait", work)
    ended = RuntimeError("another node ended the job")
    with mock.patch("torch.distributed.elastic.utils.store.barrier", side_effect=ended):
        launch(directory / "end", "end")
    print(json.dumps(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
