"""A command in a real pseudo-terminal, and the lines that the terminal then shows."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pexpect


def run(*words: str, directory: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run Python in a terminal of 120 columns; return all that it has written."""
    place: dict[str, Any] = {"cwd": directory, "env": {**os.environ, **(env or {})}, "dimensions": (40, 120)}
    process = pexpect.spawn(sys.executable, list(words), timeout=120, encoding="utf-8", **place)
    process.expect(pexpect.EOF)
    process.close()
    text: str = process.before
    assert process.exitstatus == 0, text
    return text


def render(text: str) -> list[str]:
    """Return the lines that the terminal shows: after a carriage return, text replaces the line's text."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        lines.append("".join(cells).rstrip())
    return lines
