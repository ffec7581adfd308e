"""End a worker at a step boundary when its agent drains the node, or by an exception.

An exception becomes a ``failure`` event. It is not printed here if an agent prints to the same place: the
agent prints the root cause, and a thousand workers' tracebacks would hide it. A traceback that is not printed
is in the event log. An `ElasticResumeError` is printed without a traceback, because its message says what to
do; here too if it is too long for the event.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from elastic_resume import constants
from elastic_resume.bytecode import describe_damaged_bytecode
from elastic_resume.errors import ElasticResumeError, NotProvedError, UsageError
from elastic_resume.events import EventLog
from elastic_resume.policy.gpu_faults import find_gpu_error

MAX_DETAIL_CHARS = 2000
MAX_CAUSES = 20
MAX_HEAD_CHARS, MAX_TAIL_CHARS = 2000, 6000
"""Characters kept of a traceback: JSON may need six bytes for each, and a line of events holds 64 KiB."""
_PACKAGE_DIR = str(Path(__file__).parents[1])

Hook = Callable[..., Any]

_training_position: dict[str, Any] = {
    "generation": None,
    "step": lambda: None,
    "is_proving": lambda: False,
}


def set_generation(
    *, generation: int, read_step: Callable[[], int], is_proving: Callable[[], bool] = lambda: False
) -> None:
    """Attribute later failures to ``generation``, at the last finished step that ``read_step`` returns.

    While steps are computed again for a proof, an error may follow from that alone: it is no reason to give
    up.
    """
    _training_position.update(generation=generation, step=read_step, is_proving=is_proving)


def before_resume() -> None:
    """Do nothing: the fork server replaces this by the check that `er.resume()` needs in its workers."""


def install_startup_hook() -> None:
    """Report exceptions from now on, though the job's settings are not parsed yet.

    The agent's environment variables name the event log. Without an agent there is only the printed text.
    """
    # A worker that starts early has no rank yet, and ends when it reads one.
    rank = "0" if constants.ENV_EARLY_START in os.environ else os.environ.get("RANK", "0")
    path = Path(os.environ.get(constants.ENV_EVENTS_PATH) or os.devnull)
    node = os.environ.get(constants.ENV_NODE_NAME, "")
    install_hook(open_event_log(path, node, int(rank) if rank.isdigit() else 0))


def open_event_log(path: Path, node: str, rank: int) -> EventLog:
    """Return the log of this process, which also writes into its agent's memory."""
    memory_path = os.environ.get(constants.ENV_EVIDENCE)
    return EventLog(path, memory_path=memory_path, node=node, rank=rank)


def install_hook(events: EventLog, base_hook: Hook | None = None) -> None:
    """Report the exception that ends this process to ``events``; replaces an earlier hook of ours.

    ``base_hook`` is the one that `remove_hook` puts back.
    """
    previous = sys.excepthook
    sys.excepthook = _ExceptHook(
        events, previous.previous_hook if isinstance(previous, _ExceptHook) else previous, base_hook
    )


def remove_hook() -> Hook:
    """Remove the hook of the last generation, and torch's below it; return the hook that is left.

    `init_process_group` adds a hook each time.
    """
    if isinstance(sys.excepthook, _ExceptHook) and sys.excepthook.base_hook is not None:
        sys.excepthook = sys.excepthook.base_hook
    return sys.excepthook


class _ExceptHook:
    """The hook that Python calls for an uncaught exception.

    Two may exist: the startup hook and the run's, with torch's own hook between them.
    """

    reported_error: ClassVar[BaseException | None] = None

    def __init__(self, events: EventLog, previous_hook: Hook, base_hook: Hook | None) -> None:
        self.events = events
        self.previous_hook = previous_hook
        self.base_hook = base_hook
        self._pid = os.getpid()

    def report(self, error: BaseException, trace: TracebackType | None) -> dict[str, Any]:
        """Emit the event of ``error``, once; return its fields."""
        fields = _describe_error(error, trace)
        if not isinstance(error, KeyboardInterrupt) and error is not _ExceptHook.reported_error:
            _ExceptHook.reported_error = error
            self.events.emit("failure", **fields)
        return fields

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._pid:  # a child that the script has forked: its failure is not the rank's
            self.previous_hook(kind, error, trace)
            return
        DrainRequest.terminate_instead_of_raising(kind)
        unwritten_before = self.events.unwritten_count
        fields = self.report(error, trace)
        is_written = self.events.unwritten_count <= unwritten_before
        is_ours = isinstance(error, ElasticResumeError)
        is_whole = not is_ours or fields["message"] == str(error)
        # A hook of the script's own, or torch's, gets every other exception.
        hooked = not is_ours and self.previous_hook is not sys.__excepthook__
        if issubclass(kind, Exception) and is_written and is_whole and not hooked and _is_printed_by_agent():
            return  # if it is a root cause
        if is_ours:
            print(f"elastic_resume: error: {error}", file=sys.stderr, flush=True)
        else:
            self.previous_hook(kind, error, trace)
            if damage := describe_damaged_bytecode(error):
                print(f"elastic_resume: error: {damage}", file=sys.stderr, flush=True)


def report_caught_error() -> None:
    """Report the exception that the script has caught and printed before it exits with 1, as Hydra does."""
    end, hook = getattr(sys, "last_value", None), sys.excepthook
    if isinstance(end, SystemExit) and end.code == 1 and isinstance(hook, _ExceptHook):
        error = end.__context__
        if isinstance(error, Exception):
            hook.report(error, error.__traceback__)


def is_error_raised() -> bool:
    """Return whether an exception is being handled, or has ended the script."""
    return sys.exc_info()[0] is not None or hasattr(sys, "last_value")


def _is_printed_by_agent() -> bool:
    """Return whether an agent prints to the same standard error as this process."""
    agent = os.environ.get(constants.ENV_AGENT_PID, "")
    if not os.environ.get(constants.ENV_GENERATION):
        return False
    try:
        # Compare the links themselves: the target may be a pipe, or not accessible.
        return Path(f"/proc/{agent}/fd/2").readlink() == Path("/proc/self/fd/2").readlink()
    except OSError:
        return False


def _describe_error(error: BaseException, trace: TracebackType | None) -> dict[str, Any]:
    """Return the fields of a ``failure`` event; ``frame`` is the innermost frame outside libraries."""
    frames = traceback.extract_tb(trace)
    candidates = [frame for frame in frames if not is_library_file(frame.filename)] or list(frames)
    frame = candidates[-1] if candidates else None
    place = f"{frame.filename}:{frame.lineno} in {frame.name}" if frame else ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
    lines = (describe_damaged_bytecode(error) or str(error)).splitlines()
    fields: dict[str, Any] = {
        "generation": _training_position["generation"],
        "step": _training_position["step"](),
        "type": type(error).__name__,
        "message": lines[0][:500] if lines else "",
        "detail": _cut("\n".join(lines[1:])),  # NCCL names the cause in its last line
        "frame": place,
        "deterministic": isinstance(error, ElasticResumeError) and error.is_deterministic,
        "worth_requeue": isinstance(error, ElasticResumeError) and error.is_worth_requeue,
    }
    if _training_position["is_proving"]() and not isinstance(error, NotProvedError):
        fields |= {"deterministic": False, "is_proving": True}
    for cause in list_causes(error):
        with contextlib.suppress(Exception):  # its text is the script's own code
            if find_gpu_error(type(cause).__name__, str(cause)):
                fields |= {"cause_type": type(cause).__name__, "cause": _cut(str(cause))}
                break
    if not isinstance(error, ElasticResumeError):
        fields["traceback"] = _truncate("".join(traceback.format_exception(type(error), error, trace)))
    return fields


def list_causes(error: BaseException) -> list[BaseException]:
    """List the exceptions that led to ``error`` and those in it, the nearest first."""
    found: dict[int, BaseException] = {}  # by identity, since a script's exceptions may have no hash
    waiting = [error]
    while waiting and len(found) < MAX_CAUSES:
        each = waiting.pop(0)
        members = getattr(each, "exceptions", ())  # of an ExceptionGroup
        for item in (each.__cause__, each.__context__, *(members if isinstance(members, tuple) else ())):
            if isinstance(item, BaseException) and id(item) not in found:
                found[id(item)] = item
                waiting.append(item)
    return list(found.values())


def _cut(text: str) -> str:
    """Keep the ends of a text."""
    half = MAX_DETAIL_CHARS // 2
    return text if len(text) <= MAX_DETAIL_CHARS else f"{text[:half]}\n…\n{text[-half:]}"


def is_library_file(filename: str) -> bool:
    """Return whether the file is of this package or of an installed one."""
    return "site-packages" in filename or "<frozen" in filename or filename.startswith(_PACKAGE_DIR + os.sep)


def is_own_module(name: str) -> bool:
    """Return whether a module is the script's own: neither Python's nor an installed package's."""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return name.partition(".")[0] not in sys.stdlib_module_names and not is_library_file(file)


def _truncate(text: str) -> str:
    removed = len(text) - MAX_HEAD_CHARS - MAX_TAIL_CHARS
    if removed <= 0:
        return text
    return f"{text[:MAX_HEAD_CHARS]}\n  … {removed} characters …\n{text[-MAX_TAIL_CHARS:]}"


# ---- the agent's request to end -------------------------------------------------------------------------


class DrainRequest:
    """Records whether the agent has requested the end of this process.

    The handler is installed only under our agent, where SIGTERM means a drain: under torchrun every restart
    sends SIGTERM. A handler of the script's own is left in place. Processes that the script forks get the
    default action back, because they reach no step boundary and ``Process.terminate()`` must end them.
    """

    current: ClassVar[DrainRequest | None] = None

    def __init__(self) -> None:
        DrainRequest.current = self
        self.requested = False
        self.requested_at = 0.0  # of the monotonic clock
        self._pid = os.getpid()
        self._handler_installed = False
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGTERM)
        # An earlier generation that failed at its start has left its handler.
        is_ours = isinstance(getattr(handler, "__self__", None), DrainRequest)
        if is_main and (handler is signal.SIG_DFL or is_ours):
            self.install_handler()

    def install_handler(self) -> None:
        """Handle SIGTERM, whoever handled it before. Without an agent do nothing.

        Raises:
            UsageError: this is not the main thread, where alone Python handles signals.

        """
        if constants.ENV_AGENT_PID not in os.environ:
            return
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("run.take_signals() was called outside the main thread: call it there.")
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._handler_installed = True

    def _on_sigterm(self, number: int, frame: object) -> None:
        del number, frame
        # A forked child, before `_restore_handler_in_child` has run; or a library has put the handler back in
        # place after the run was closed, and no step boundary follows.
        if os.getpid() != self._pid or not self._handler_installed:
            self.terminate_process()
        self.requested_at = self.requested_at or time.monotonic()
        self.requested = True

    def terminate_process(self) -> None:
        """End this process as an unhandled SIGTERM would."""
        self._handler_installed = True
        self.restore_handler()
        os.kill(os.getpid(), signal.SIGTERM)

    @classmethod
    def terminate_instead_of_raising(cls, error_type: type[BaseException]) -> None:
        """End this process silently if a peer of the same drain ended first and broke a collective."""
        if cls.current is not None and cls.current.requested and issubclass(error_type, RuntimeError):
            cls.current.terminate_process()

    def restore_handler(self) -> None:
        """Restore the default action of SIGTERM, if this object has replaced it."""
        if not self._handler_installed:
            return
        self._handler_installed = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _restore_handler_in_child() -> None:
    owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if isinstance(owner, DrainRequest):
        owner.restore_handler()
    DrainRequest.current = None


os.register_at_fork(after_in_child=_restore_handler_in_child)
