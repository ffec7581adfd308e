"""Tells the node's event log, and its agent, which exception ended this worker, before Python prints it.

An error of our own is printed as one or two lines: its text says what to do, a traceback would hide it. Of
another one a single line is printed where an agent will print the traceback of the worker that failed first:
of a thousand workers that meet the same error, a thousand tracebacks would hide that one. Promise: a
traceback that is not printed here stands in the event log.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from elastic_resume import constants
from elastic_resume.errors import ElasticResumeError
from elastic_resume.events import EventLog
from elastic_resume.training.graceful_shutdown import DrainRequest

MAX_HEAD_CHARS, MAX_TAIL_CHARS = 2000, 6000
"""Characters kept of a traceback: JSON may need six bytes for each, and a line of events holds 64 KiB."""
_PACKAGE_DIR = str(Path(__file__).parents[1])

_training_position: dict[str, Any] = {"generation": None, "step": lambda: None}


def set_generation(*, generation: int, read_step: Callable[[], int]) -> None:
    """From now on failures belong to ``generation``; ``step`` gives the last finished step when asked."""
    _training_position.update(generation=generation, step=read_step)


@contextlib.contextmanager
def report_startup_errors() -> Iterator[None]:
    """Tell of an error in what the script passed, where not even the node's name is known yet."""
    try:
        yield
    except ElasticResumeError:
        install_startup_hook()
        raise


def install_startup_hook() -> None:
    """Write an event for whatever ends this process from now on, though nothing is known of the job yet.

    An agent gives the paths of its memory and its log; without one the lines that are printed must do.
    """
    path = os.environ.get(constants.ENV_EVENTS_PATH)
    rank = os.environ.get("RANK", "0")
    node = os.environ.get(constants.ENV_NODE_NAME, "")
    memory = os.environ.get(constants.ENV_ROUND_EVENTS)
    number = int(rank) if rank.isdigit() else 0
    install_hook(EventLog(Path(path or os.devnull), memory_path=memory, node=node, rank=number))


def install_hook(events: EventLog) -> None:
    """Write an event for the exception that ends this process, if one does."""
    before = sys.excepthook
    sys.excepthook = _ExceptHook(events, before.previous_hook if isinstance(before, _ExceptHook) else before)


class _ExceptHook:
    """What Python calls for an uncaught exception.

    There may be two: one from the start of the process and one of the run, with torch's own between them.
    """

    reported_error: ClassVar[BaseException | None] = None  # which one the event log has

    def __init__(self, events: EventLog, previous_hook: Callable[..., Any]) -> None:
        self.events = events
        self.previous_hook = previous_hook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        DrainRequest.terminate_instead_of_raising(kind)
        lost = self.events.unwritten_count
        said = describe_error(error, trace)
        if not issubclass(kind, KeyboardInterrupt) and error is not _ExceptHook.reported_error:
            _ExceptHook.reported_error = error
            self.events.emit("failure", **said)
        if isinstance(error, ElasticResumeError):
            print(f"elastic_resume: error: {error}", file=sys.stderr, flush=True)
        elif (
            issubclass(kind, Exception)
            and self._is_printed_by_agent()
            and self.events.unwritten_count <= lost
        ):
            rank = os.environ.get("RANK", "?")
            what = ": ".join(filter(None, [said["type"], said["message"]]))
            where = f" ({said['frame']})" if said["frame"] else ""
            print(f"elastic_resume: rank {rank}: {what}{where}", file=sys.stderr, flush=True)
        else:
            self.previous_hook(kind, error, trace)

    def _is_printed_by_agent(self) -> bool:
        """Whether an agent prints to where we would; not where our output goes to a file of its own."""
        agent = os.environ.get(constants.ENV_AGENT_PID, "")
        ours = os.environ.get(constants.ENV_ROUND)  # a stock torchrun with our plug-in does not tell
        if self.previous_hook is not sys.__excepthook__ or not agent.isdigit() or not ours:
            return False
        try:
            # Of the link itself: what it leads to may be beyond our permission, or a pipe.
            return Path(f"/proc/{agent}/fd/2").readlink() == Path("/proc/self/fd/2").readlink()
        except OSError:
            return False


def describe_error(error: BaseException, trace: TracebackType | None) -> dict[str, Any]:
    """Say of an exception what a report needs: type, first line, the innermost frame outside libraries."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if not _is_library_file(frame.filename)]
    frame = own[-1] if own else frames[-1] if frames else None
    place = f"{frame.filename}:{frame.lineno} in {frame.name}" if frame else ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
    lines = str(error).splitlines()
    said: dict[str, Any] = {
        "generation": _training_position["generation"],
        "step": _training_position["step"](),
        "type": type(error).__name__,
        "message": lines[0][:500] if lines else "",
        "frame": place,
        "deterministic": isinstance(error, ElasticResumeError) and error.is_deterministic,
    }
    if not isinstance(error, ElasticResumeError):
        said["traceback"] = _truncate("".join(traceback.format_exception(type(error), error, trace)))
    return said


def _is_library_file(filename: str) -> bool:
    return "site-packages" in filename or "<frozen" in filename or filename.startswith(_PACKAGE_DIR + os.sep)


def _truncate(text: str) -> str:
    if len(text) <= MAX_HEAD_CHARS + MAX_TAIL_CHARS:
        return text
    return f"{text[:MAX_HEAD_CHARS]}\n  … {len(text) - MAX_HEAD_CHARS - MAX_TAIL_CHARS} characters …\n{text[-MAX_TAIL_CHARS:]}"
