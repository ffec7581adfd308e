"""Print lines for people on standard error.

A full disk behind the log, or a pipe without a reader, costs the line and nothing else.
"""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """Print a line that begins with the project's name. Raises nothing."""
    with contextlib.suppress(OSError, ValueError):
        print(f"elastic_resume: {text}", file=sys.stderr, flush=True)
