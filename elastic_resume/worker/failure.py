"""Tells the node's event log which exception ended this worker, before Python prints it.

An error of our own is printed as one or two lines: its text says what to do, a traceback would hide it.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from elastic_resume.errors import ElasticResumeError
from elastic_resume.events import EventLog

_where: dict[str, Any] = {"generation": None, "step": lambda: None}


def enter(*, generation: int, step: Callable[[], int]) -> None:
    """From now on failures belong to ``generation``; ``step`` gives the last finished step when asked."""
    _where.update(generation=generation, step=step)


def report_to(events: EventLog) -> None:
    """Write an event for the exception that ends this process, if one does."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            events.write("failure", **describe(error, trace))
        if isinstance(error, ElasticResumeError):
            print(f"elastic_resume: error: {error}", file=sys.stderr, flush=True)
        else:
            before(kind, error, trace)

    sys.excepthook = hook


def describe(error: BaseException, trace: TracebackType | None) -> dict[str, Any]:
    """Say of an exception what a report needs: type, first line, the innermost frame outside libraries."""
    frames = traceback.extract_tb(trace)
    own = [
        frame for frame in frames if "site-packages" not in frame.filename and "<frozen" not in frame.filename
    ]
    frame = own[-1] if own else frames[-1] if frames else None
    lines = str(error).splitlines()
    return {
        "generation": _where["generation"],
        "step": _where["step"](),
        "type": type(error).__name__,
        "message": lines[0][:500] if lines else "",
        "frame": f"{frame.filename}:{frame.lineno} in {frame.name}" if frame else "",
        "at_fault": isinstance(error, ElasticResumeError) and error.at_fault,
    }
