"""Report the exception that ends a worker: a ``failure`` event, and a short text in place of most tracebacks.

An `ElasticResumeError` is printed as one or two lines, because its message says what to do. Another exception
is printed as one line if an agent prints to the same place: the agent prints the traceback of the root cause,
and a thousand workers' tracebacks would hide it. A traceback that is not printed here is in the event log.
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
    """Attribute later failures to ``generation``, at the last finished step that ``read_step`` returns."""
    _training_position.update(generation=generation, step=read_step)


@contextlib.contextmanager
def report_startup_errors() -> Iterator[None]:
    """Report an error in the script's arguments, raised before the node's name is known."""
    try:
        yield
    except ElasticResumeError:
        install_startup_hook()
        raise


def install_startup_hook() -> None:
    """Report exceptions from now on, though the job's settings are not parsed yet.

    The agent's environment variables name the event log. Without an agent there is only the printed text.
    """
    rank = os.environ.get("RANK", "0")
    events = EventLog(
        Path(os.environ.get(constants.ENV_EVENTS_PATH) or os.devnull),
        memory_path=os.environ.get(constants.ENV_ROUND_EVENTS),
        node=os.environ.get(constants.ENV_NODE_NAME, ""),
        rank=int(rank) if rank.isdigit() else 0,
    )
    install_hook(events)


def install_hook(events: EventLog) -> None:
    """Report the exception that ends this process to ``events``; replaces an earlier hook of ours."""
    previous = sys.excepthook
    sys.excepthook = _ExceptHook(
        events, previous.previous_hook if isinstance(previous, _ExceptHook) else previous
    )


class _ExceptHook:
    """The hook that Python calls for an uncaught exception.

    Two may exist: the startup hook and the run's, with torch's own hook between them.
    """

    reported_error: ClassVar[BaseException | None] = None

    def __init__(self, events: EventLog, previous_hook: Callable[..., Any]) -> None:
        self.events = events
        self.previous_hook = previous_hook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        DrainRequest.terminate_instead_of_raising(kind)
        unwritten_before = self.events.unwritten_count
        fields = describe_error(error, trace)
        if not issubclass(kind, KeyboardInterrupt) and error is not _ExceptHook.reported_error:
            _ExceptHook.reported_error = error
            self.events.emit("failure", **fields)
        if isinstance(error, ElasticResumeError):
            print(f"elastic_resume: error: {error}", file=sys.stderr, flush=True)
        elif (
            issubclass(kind, Exception)
            and self._is_printed_by_agent()
            and self.events.unwritten_count <= unwritten_before
        ):
            rank = os.environ.get("RANK", "?")
            text = ": ".join(filter(None, [fields["type"], fields["message"]]))
            frame = f" ({fields['frame']})" if fields["frame"] else ""
            print(f"elastic_resume: rank {rank}: {text}{frame}", file=sys.stderr, flush=True)
        else:
            self.previous_hook(kind, error, trace)

    def _is_printed_by_agent(self) -> bool:
        """Return whether an agent prints to the same standard error as this process."""
        agent = os.environ.get(constants.ENV_AGENT_PID, "")
        if (
            self.previous_hook is not sys.__excepthook__
            or not agent.isdigit()
            or not os.environ.get(constants.ENV_ROUND)
        ):
            return False
        try:
            # Compare the links themselves: the target may be a pipe, or not accessible.
            return Path(f"/proc/{agent}/fd/2").readlink() == Path("/proc/self/fd/2").readlink()
        except OSError:
            return False


def describe_error(error: BaseException, trace: TracebackType | None) -> dict[str, Any]:
    """Return the fields of a ``failure`` event; ``frame`` is the innermost frame outside libraries."""
    frames = traceback.extract_tb(trace)
    candidates = [frame for frame in frames if not _is_library_file(frame.filename)] or list(frames)
    frame = candidates[-1] if candidates else None
    place = f"{frame.filename}:{frame.lineno} in {frame.name}" if frame else ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
    lines = str(error).splitlines()
    fields: dict[str, Any] = {
        "generation": _training_position["generation"],
        "step": _training_position["step"](),
        "type": type(error).__name__,
        "message": lines[0][:500] if lines else "",
        "frame": place,
        "deterministic": isinstance(error, ElasticResumeError) and error.is_deterministic,
    }
    if not isinstance(error, ElasticResumeError):
        fields["traceback"] = _truncate("".join(traceback.format_exception(type(error), error, trace)))
    return fields


def _is_library_file(filename: str) -> bool:
    return "site-packages" in filename or "<frozen" in filename or filename.startswith(_PACKAGE_DIR + os.sep)


def _truncate(text: str) -> str:
    removed = len(text) - MAX_HEAD_CHARS - MAX_TAIL_CHARS
    if removed <= 0:
        return text
    return f"{text[:MAX_HEAD_CHARS]}\n  … {removed} characters …\n{text[-MAX_TAIL_CHARS:]}"
