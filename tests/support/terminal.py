"""A command in a real pseudo-terminal, and the lines that the terminal then shows."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path


def run(command: Sequence[str], directory: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a command in a terminal of 120 columns; return all that it has written."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))
    with subprocess.Popen(
        command, cwd=directory, env={**os.environ, **(env or {})}, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        text = _read(ours)
    assert process.returncode == 0, text
    return text


def _read(descriptor: int) -> str:
    data = b""
    while True:
        try:
            piece = os.read(descriptor, 4096)
        except OSError:  # EIO: no process has the other end open
            piece = b""
        if not piece:
            os.close(descriptor)
            return data.decode()
        data += piece


def render(text: str) -> list[str]:
    """Return the lines that the terminal shows: after a carriage return, text replaces the line's text."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        lines.append("".join(cells).rstrip())
    return lines
