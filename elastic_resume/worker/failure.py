"""Tells the node's event log which exception ended this worker, before Python prints it.

An error of our own is printed as one or two lines: its text says what to do, a traceback would hide it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from elastic_resume import contract
from elastic_resume.errors import ElasticResumeError
from elastic_resume.events import EventLog

_where: dict[str, Any] = {"generation": None, "step": lambda: None}


def enter(*, generation: int, step: Callable[[], int]) -> None:
    """From now on failures belong to ``generation``; ``step`` gives the last finished step when asked."""
    _where.update(generation=generation, step=step)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Tell of an error in what the script passed, where not even the node's name is known yet.

    An agent gives the path of its event log; without one the lines that are printed must do.
    """
    try:
        yield
    except ElasticResumeError:
        path = os.environ.get(contract.ENV_EVENTS_PATH)
        rank = os.environ.get("RANK", "0")
        node = os.environ.get(contract.ENV_NODE_NAME, "")
        report_to(EventLog(Path(path or os.devnull), node=node, rank=int(rank) if rank.isdigit() else 0))
        raise


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
