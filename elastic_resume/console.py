"""Print what elastic_resume logs on standard error, in agents and in training processes.

All modules log through Python's ``logging``, below the logger ``elastic_resume``. To handle the lines
yourself, add a handler to that logger before `elastic_resume.resume`; to see fewer, set its level.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

PACKAGE_LOGGER = logging.getLogger("elastic_resume")


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
        with contextlib.suppress(OSError, ValueError):
            print(f"{self._prefix}{self.format(record)}", file=sys.stderr, flush=True)


def show_log(prefix: str) -> None:
    """Print what elastic_resume logs from now on, unless its logger has a handler already."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and f"{name}.".startswith("elastic_resume."):
            logger.disabled = False  # logging.config.dictConfig disables loggers that exist before it
    if PACKAGE_LOGGER.handlers:
        return
    PACKAGE_LOGGER.addHandler(StderrHandler(prefix))
    PACKAGE_LOGGER.propagate = False  # a library's handler on the root logger would print the line again
    if PACKAGE_LOGGER.level == logging.NOTSET:
        PACKAGE_LOGGER.setLevel(logging.INFO)


@contextlib.contextmanager
def log_handler(logger: logging.Logger, handler: logging.Handler) -> Iterator[None]:
    """Let ``handler`` alone handle what ``logger`` logs at level INFO and above, within the context."""
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
