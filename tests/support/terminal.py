"""A command in a real pseudo-terminal, and the lines that the terminal then shows."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from pathlib import Path

from elastic_resume.testing import fork_server


def run(*words: str, directory: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run Python in a terminal of 120 columns, a script in a fork; return all that it has written."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))
    command, environ = [sys.executable, *words], {**os.environ, **(env or {})}
    with open(theirs, "wb", buffering=0) as end:
        forked = None if words[0] == "-c" else fork_server.start(command, environ, end, cwd=directory)
        process = forked or subprocess.Popen(command, cwd=directory, env=environ, stdout=end, stderr=end)
    text = _read(ours)
    assert process.wait() == 0, text
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
