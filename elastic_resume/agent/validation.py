"""Check the flags of ``run`` before anything is created or started.

torchelastic finds most of these errors too, but later: by an assertion, or by starting workers that cannot
run. The checks read files and change nothing.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_resume import constants
from elastic_resume.errors import ConfigError
from elastic_resume.schedulers import environment
from elastic_resume.units import parse_duration

# The interpreter, the dynamic loader, a library or torch reads these once, when the process starts.
PROCESS_START_ENV_PREFIXES = (
    "PYTHON", "LD_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_", "LANG", "LC_",
    "TORCH_LOGS", "TORCH_SHOW", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "PYTORCH_",
    "ELASTIC_RESUME_FAILPOINTS",
)  # fmt: skip
ALLOWED_DRAIN_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")


def parse_nnodes(text: str) -> tuple[int, int]:
    """Parse ``--nnodes`` into the smallest and the greatest number of nodes."""
    match = re.fullmatch(r"\s*(\d{1,9})(?::(\d{1,9}))?\s*", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise ConfigError(f"--nnodes is {text!r}: write N or MIN:MAX with 1 <= MIN <= MAX.")
    return low, high


def check_launch_config(config: Any) -> None:
    """Check the values of a torchelastic ``LaunchConfig`` that torchelastic does not check itself."""
    if config.nproc_per_node < 1:
        raise ConfigError(
            f"--nproc-per-node comes to {config.nproc_per_node}: a node needs one worker at least."
        )
    if not 0 < config.monitor_interval < 1e9:  # nan and inf too
        raise ConfigError(
            f"--monitor-interval is {config.monitor_interval:g}: write a number of seconds > 0."
        )
    names = getattr(config, "signals_to_handle", "")  # older torch has no such flag
    for name in filter(None, map(str.strip, names.split(","))):
        if name not in signal.Signals.__members__:
            raise ConfigError(f"--signals-to-handle names {name!r}, which is not a signal.")


def parse_grace(text: str | None) -> float | None:
    """Parse ``--grace`` into seconds; return None if the flag was not given."""
    if text is None:
        return None
    return parse_duration("--grace", text, max_s=86400)


def resolve_grace_s(args: argparse.Namespace, environ: Mapping[str, str]) -> float | None:
    """Return how many seconds workers have to end after SIGTERM; None if neither user nor pod says.

    Workers get half of a pod's termination grace period. In the other half the agent commits the last step
    and leaves the rendezvous.
    """
    grace_s = parse_grace(args.grace)
    if grace_s is not None:
        return grace_s
    if environ.get(constants.ENV_GRACE_S):
        return parse_duration(constants.ENV_GRACE_S, environ[constants.ENV_GRACE_S], max_s=86400)
    pod_grace_s = environment.read_termination_grace_s(environ)
    return None if pod_grace_s is None else pod_grace_s / 2


def parse_drain_signals(text: str | None) -> list[str]:
    """Parse ``--drain-signals`` into names of signals; the first is always SIGTERM.

    SIGINT, SIGHUP and SIGQUIT keep torchrun's meaning. Python or torch use the other signals themselves.
    """
    words = [word.strip().upper() for word in (text or "SIGTERM,SIGUSR1").split(",")]
    names = [word if word.startswith("SIG") else f"SIG{word}" for word in words if word]
    wrong = [name for name in names if name not in ALLOWED_DRAIN_SIGNALS]
    if wrong or not names:
        raise ConfigError(
            f"--drain-signals is {str(text)[:100]!r}: write one or more of "
            f"{', '.join(ALLOWED_DRAIN_SIGNALS)}, separated by commas."
        )
    return list(dict.fromkeys(["SIGTERM", *names]))


def parse_count(flag: str, text: str | None, *, minimum: int) -> int | None:
    """Parse a whole number; return None if the flag was not given."""
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,9}", str(text)) or int(text) < minimum:
        raise ConfigError(f"{flag} is {text!r}: write a whole number, {minimum} or more.")
    return int(text)


def cold_start_reason(args: argparse.Namespace, entrypoint: object) -> str:
    """Return why the fork server cannot start this job's workers; empty if it can."""
    if args.run_path:
        return "with --run-path torchelastic forks them itself"
    if args.no_python:
        return "--no-python allows any program, not only Python"
    if entrypoint != sys.executable:
        return f"PYTHON_EXEC names another interpreter, {entrypoint}"
    return ""


def check_script(args: argparse.Namespace) -> None:
    """Raise ConfigError unless the training script, module or program exists."""
    script = args.training_script
    if args.no_python and not args.run_path:
        if shutil.which(script) is None:
            raise ConfigError(f"there is no program {script!r} on PATH that can be run (--no-python).")
    elif args.module:
        top = script.partition(".")[0]
        # `python -m` looks in the working directory too.
        spec = importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd()), *sys.path])
        if spec is None and top not in sys.builtin_module_names and "PYTHON_EXEC" not in os.environ:
            raise ConfigError(
                f"there is no module {top!r} in {Path.cwd()} or on Python's path (-m {script})."
            )
    else:
        _check_script_file(Path(script), script)


def _check_script_file(path: Path, script: str) -> None:
    try:
        exists, is_dir = path.exists(), path.is_dir()
        has_main = is_dir and any(path.glob("__main__.*"))
    except OSError as error:  # a parent directory without permission, or a name too long
        raise ConfigError(
            f"the training script {script[:200]!r} cannot be read: {error.strerror}."
        ) from error
    if not exists:
        raise ConfigError(f"there is no training script {script!r} in {Path.cwd()}.")
    if is_dir and not has_main:
        raise ConfigError(f"{script!r} is a directory without a __main__.py: name the training script in it.")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"the training script {script!r} cannot be read: this user has no permission.")
