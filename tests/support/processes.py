"""Waiting for processes, and reading the event that reports their end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """Wait until ``condition`` is true; return its value. ``what`` describes it in the error."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.01)
    return value


def wait_for_pid(path: Path) -> int:
    """Wait until a process has written its process ID to ``path``; return the ID."""
    return int(wait_for(lambda: path.exists() and path.read_text().strip(), f"{path} to be written"))


def is_alive(pid: int) -> bool:
    """Return whether the process runs. A zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def read_exit_event(directory: Path) -> dict[str, Any]:
    """Return the only event in the log ``directory``/events.jsonl."""
    (line,) = (directory / "events.jsonl").read_text().splitlines()
    event: dict[str, Any] = json.loads(line)
    return event


def write_command(directory: Path, name: str, text: str) -> None:
    """Create a shell script that a test finds as a command."""
    path = directory / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
