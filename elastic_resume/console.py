"""Format log lines on standard error.

All modules log through Python's ``logging``, below the logger ``elastic_resume``, in agents and in training
processes:

- ERROR: the job or this node has failed.
- WARNING: something is wrong, and training continues.
- INFO, the default level: the start and the end of a job, failures, and where training continues.
- DEBUG: every step of a start and of a restart.

``--quiet`` or ``ELASTIC_RESUME_QUIET=1`` shows warnings and errors only. ``ELASTIC_RESUME_LOG_LEVEL=DEBUG``
shows all. In a training process, a level or a handler that the script has set on the logger before
`elastic_resume.resume` takes precedence over both::

    logging.getLogger("elastic_resume").setLevel(logging.WARNING)

Lines do not reach handlers of the root logger: set ``propagate`` to true on this logger to have them there.
`logging.config.dictConfig` silences the loggers that exist before it: give it
``disable_existing_loggers=False``, or call it before `elastic_resume.resume`.

`ByteProgress` logs the progress of a restore or a commit that takes longer than 2 s. `show_progress` is for
commands, which have the terminal for themselves.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TextIO

from elastic_resume import constants
from elastic_resume.errors import ConfigError
from elastic_resume.units import format_bytes

PACKAGE_LOGGER = logging.getLogger("elastic_resume")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
LONG_OPERATION_S = 2.0
REPEAT_S = 60.0

logger = logging.getLogger(__name__)


def read_level(environ: Mapping[str, str]) -> int:
    """Return the level of the log lines to show.

    Raises:
        ConfigError: a variable has a wrong value.

    """
    quiet = environ.get(constants.ENV_QUIET, "").strip().lower()
    if quiet in {"1", "true", "yes", "on"}:
        return logging.WARNING
    if quiet not in {"", "0", "false", "no", "off"}:
        raise ConfigError(f"{constants.ENV_QUIET} is {quiet[:100]!r}: write 1 or 0.")
    name = environ.get(constants.ENV_LOG_LEVEL, "").strip().upper() or "INFO"
    if name not in LEVELS:
        raise ConfigError(f"{constants.ENV_LOG_LEVEL} is {name[:100]!r}: write {', '.join(LEVELS)}.")
    return int(getattr(logging, name))


class StderrHandler(logging.Handler):
    """Prints each record after a prefix; a full disk or a closed pipe costs the line only."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def createLock(self) -> None:  # noqa: N802 - the name in logging.Handler
        """Use no lock: a signal handler that raises could leave it locked. Each line is one print."""
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        """Handle a record without the lock that the base class takes."""
        if is_logged := bool(self.filter(record)):
            self.emit(record)
        return is_logged

    def emit(self, record: logging.LogRecord) -> None:
        """See base class."""
        if sys.stderr is None:  # print() would take standard output then
            return
        with contextlib.suppress(OSError, ValueError):
            start = _find_line_start(sys.stderr)
            print(f"{start}{self._prefix}{self.format(record)}", file=sys.stderr, flush=True)


def _find_line_start(stream: TextIO) -> str:
    """Return what brings the cursor to an empty line, since a progress bar leaves it behind the bar.

    On a terminal the bar is erased; it is drawn again. A file shows how it ends. What a pipe was given last
    is unknown, so it gets a new line if tqdm draws a bar in this process.
    """
    try:
        if stream.isatty():
            return "" if os.environ.get("TERM", "dumb") == "dumb" else "\r\x1b[K"
        stream.flush()
        details = os.fstat(stream.fileno())
        if stat.S_ISREG(details.st_mode):
            with open(f"/proc/self/fd/{stream.fileno()}", "rb") as file:
                return "\n" if os.pread(file.fileno(), 1, details.st_size - 1) not in {b"", b"\n"} else ""
    except (OSError, ValueError, AttributeError):  # another object in place of sys.stderr, or write-only
        pass
    bar = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return "\n" if getattr(bar, "_instances", ()) else ""


def show_log(environ: Mapping[str, str]) -> None:
    """Print what elastic_resume logs from now on, unless its logger has a handler already.

    Raises:
        ConfigError: see `read_level`.

    """
    for name, package_logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(package_logger, logging.Logger) and f"{name}.".startswith("elastic_resume."):
            package_logger.disabled = False  # logging.config.dictConfig disables loggers that exist before it
    if not PACKAGE_LOGGER.handlers:
        PACKAGE_LOGGER.addHandler(StderrHandler("elastic_resume: "))
        PACKAGE_LOGGER.propagate = False  # a library's handler on the root logger would print the line again
    if PACKAGE_LOGGER.level == logging.NOTSET:
        PACKAGE_LOGGER.setLevel(logging.INFO)  # also for the error of a wrong variable
        PACKAGE_LOGGER.setLevel(read_level(environ))


@contextlib.contextmanager
def log_handler(
    logger: logging.Logger, handler: logging.Handler, level: int = logging.INFO
) -> Iterator[None]:
    """Let ``handler`` alone handle what ``logger`` logs at ``level`` and above, within the context."""
    old_level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(old_level)
        logger.propagate = propagate


# ---- progress of long operations -----------------------------------------------------------------------


class ByteProgress:
    """Logs the progress of an operation within the context, once it has taken `LONG_OPERATION_S`.

    It logs a line then, one each `REPEAT_S`, and one at the end. A thread reads how many bytes are done, so
    the operation may stand still.
    """

    def __init__(
        self,
        what: str,
        total_bytes: int,
        read_done: Callable[[], int] | None = None,
        write: Callable[[str], object] | None = None,
    ) -> None:
        """Prepare it.

        Args:
            what: names the operation, as "reading step 8 from the checkpoint of node a".
            total_bytes: bytes of the whole operation.
            read_done: returns how many bytes are done, in any thread; default is those that `track` counts.
            write: gets each line; default is the log.

        """
        self._what = what
        self._is_shown = write is not None or logger.isEnabledFor(logging.INFO)
        self._write = write or logger.info
        self._total_bytes = total_bytes
        self._tracked_bytes = 0
        self._read_done = read_done or (lambda: self._tracked_bytes)
        self._started_at = time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ByteProgress:  # noqa: PYI034 - typing.Self needs Python 3.11
        if self._is_shown:
            self._thread = threading.Thread(target=self._run, name="elastic-resume-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def track(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield ``pieces``, and count each as done when the next one is asked for."""
        for piece in pieces:
            yield piece
            self._tracked_bytes += piece.nbytes

    def _run(self) -> None:
        self._ended.wait(LONG_OPERATION_S)
        if time.monotonic() - self._started_at < LONG_OPERATION_S:
            return
        self._write(f"{self._what}: {self._describe()}")
        while not self._ended.wait(REPEAT_S):
            self._write(f"{self._what}: {self._describe()}")
        self._write(f"{self._what}: ended, {self._describe()}")

    def _describe(self) -> str:
        seconds = max(time.monotonic() - self._started_at, 1e-3)
        done = min(self._read_done(), self._total_bytes)
        left = self._total_bytes - done
        left_text = f", {left * seconds / done:.0f} s left" if done and left else ""
        return (
            f"{format_bytes(done)} of {format_bytes(self._total_bytes)} in {seconds:.1f} s "
            f"({format_bytes(round(done / seconds))}/s{left_text})"
        )


@contextlib.contextmanager
def show_progress(what: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """Show how far a command is, on standard error, if it takes longer than 2 s.

    On a terminal it is a bar, if tqdm is installed; elsewhere a line a minute. Yield a function that gets the
    number of bytes that are done.
    """
    if sys.stderr is not None and sys.stderr.isatty() and importlib.util.find_spec("tqdm"):
        from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415  few commands take long

        tqdm.set_lock(threading.RLock())  # tqdm's own spans processes
        with tqdm(
            desc=what,
            total=total_bytes,
            unit="B",
            unit_scale=True,
            delay=LONG_OPERATION_S,
            leave=False,
            dynamic_ncols=True,
        ) as bar:
            yield lambda done: bar.update(done - bar.n)
        return
    done_bytes = 0

    def set_done(done: int) -> None:
        nonlocal done_bytes
        done_bytes = done

    def write(line: str) -> None:
        if sys.stderr is None:  # print() would take standard output then
            return
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)

    with ByteProgress(what, total_bytes, lambda: done_bytes, write):
        yield set_done
