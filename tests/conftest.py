"""Settings and fixtures of all tests, and what a failed test prints about its nodes."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from elastic_resume.console import PACKAGE_LOGGER
from elastic_resume.report import summary
from elastic_resume.report.loader import load_run

# In the output of a failed test.
MAX_LOG_BYTES = 4_000  # of each log
MAX_SECTIONS = 20

# Other tests run at the same time, so the duration of one example means nothing.
settings.register_profile("patient", parent=settings.default, deadline=None)
settings.load_profile("patient")

# On a busy machine a node may stand still for seconds without being lost. A death is still detected at
# once, because connections end. A test about unreachable nodes sets --node-timeout, which takes precedence.
os.environ.setdefault("ELASTIC_RESUME_NODE_TIMEOUT", "10")

# Most tests know the step from which a job resumes. Those of proofs set it.
os.environ.setdefault("ELASTIC_RESUME_PROVE", "off")

# OpenMP's threads spin while they wait, which slows all other tests down. Nodes get the same value from
# `Cluster`, and equal variables let them share one fork server.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# `Cluster` sets it for its nodes. With it, those fork servers also serve ranks without an agent and pages.
os.environ.setdefault("PYTHONUNBUFFERED", "1")

# An import of Lightning sets it, and fork servers that were started before would refuse all later workers.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


# A run that nohup or a shell's & has started ignores these, and all that the tests start would inherit that.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


# Imports and thousands of tests are no garbage: looking for it takes a third of the collection.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but not among what is there already."""
    gc.freeze()
    gc.enable()
    # pytest adds two handlers to each logger that does not propagate, in each phase of each test.
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
            logger.handlers.clear()


@pytest.fixture(autouse=True)
def freeze_objects() -> Iterator[None]:
    """Let the collector, and the searches of `training.untracked`, look at no objects of earlier tests."""
    yield
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `make soak` has the time for; a skip would mean that something is missing.

    `ORDER` changes the order of the modules and of each module's tests: `reversed`, or the seed of a shuffle.
    """
    if "ELASTIC_RESUME_SOAK_KILLS" not in os.environ:
        soak = [item for item in items if item.get_closest_marker("soak") is not None]
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if item not in soak]
    if order := os.environ.get("ORDER"):
        modules: dict[str, list[pytest.Item]] = {}
        for item in items:
            modules.setdefault(item.nodeid.partition("::")[0], []).append(item)
        groups, rng = list(modules.values()), random.Random(order)
        lists: list[list[Any]] = [groups, *groups]
        for each in lists:
            each.reverse() if order == "reversed" else rng.shuffle(each)
        items[:] = itertools.chain.from_iterable(groups)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to the output of a failed test the report of its job and the last lines of its nodes."""
    report = yield
    directory = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and isinstance(directory, Path):
        report.sections += itertools.islice(_describe_jobs(directory), MAX_SECTIONS)
    return report


def _describe_jobs(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield a title and a text for each job and each log below ``directory``, which pytest keeps.

    Processes of the test may still write there.
    """
    found = [Path(folder, name) for folder, _, names in os.walk(directory) for name in sorted(names)]
    for run in sorted({path.parent.parent for path in found if path.name == "events.jsonl"}):
        yield f"report of {run}", _text_or_error(partial(_format_report, run))
    for log in found:
        if log.suffix == ".log":
            yield f"end of {log}", _text_or_error(partial(_read_end, log))


def _text_or_error(read: Callable[[], str]) -> str:
    try:
        return read()
    except Exception as error:  # noqa: BLE001  the test's own error is what matters
        return repr(error)


def _format_report(run: Path) -> str:
    return summary.format_text(summary.build_run_report(load_run([run]).events))


def _read_end(log: Path) -> str:
    if not log.is_file():
        return "no regular file"
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - MAX_LOG_BYTES))
        return file.read(MAX_LOG_BYTES).decode(errors="replace")


_SET_BY_IMPORTS = {"TORCHINDUCTOR_CACHE_DIR", "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK"}
_SIGNALS = signal.valid_signals() - {signal.SIGALRM, signal.SIGCHLD}  # of pytest-timeout, and a DataLoader's
_LIMITS = {name: value for name, value in vars(resource).items() if "RLIMIT_" in name}


def _describe_limits() -> dict[str, object]:
    status = Path("/proc/self/status").read_text()
    return {
        **{name: resource.getrlimit(limit) for name, limit in _LIMITS.items()},
        "umask": next(line for line in status.splitlines() if line.startswith("Umask:")),
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "sys.dont_write_bytecode": sys.dont_write_bytecode,
    }


@pytest.fixture(autouse=True)
def restore_process() -> Iterator[None]:
    """Restore what a test changed in its process. Fail it if it leaves the process limited."""
    limits, environment, directory = _describe_limits(), dict(os.environ), Path.cwd()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    hook, path = sys.excepthook, list(sys.path)
    yield
    for name in os.environ.keys() - environment.keys() - _SET_BY_IMPORTS:
        del os.environ[name]
    os.environ.update(environment.items() - os.environ.items())
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    sys.excepthook, sys.path[:] = hook, path
    os.chdir(directory)
    assert _describe_limits() == limits


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """Reset the package's logger: `er.resume` adds a handler for the rest of the process.

    Before the test too, since a fixture of a whole module may have called it.
    """
    _reset_logging()
    yield
    _reset_logging()


def _reset_logging() -> None:
    PACKAGE_LOGGER.handlers.clear()
    PACKAGE_LOGGER.setLevel(logging.NOTSET)
    PACKAGE_LOGGER.propagate = True
