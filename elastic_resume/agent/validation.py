"""What can be seen to be wrong with the flags before anything is made or started.

torchelastic would find most of it as well, but after the node's directory is made: with an assertion, or by
starting workers that cannot start. Looks at files, changes nothing. Does not import torch.
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
from elastic_resume.schedulers import kubernetes
from elastic_resume.units import parse_duration

# Read once, by the interpreter, the loader, a library or torch, when it starts.
PROCESS_START_ENV_PREFIXES = (
    "PYTHON", "LD_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_", "LANG", "LC_",
    "TORCH_LOGS", "TORCH_SHOW", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "PYTORCH_",
    "ELASTIC_RESUME_FAILPOINTS",
)  # fmt: skip
ALLOWED_DRAIN_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")


def parse_nnodes(text: str) -> tuple[int, int]:
    """Read ``--nnodes``; give the least and the greatest number of nodes."""
    match = re.fullmatch(r"\s*(\d{1,9})(?::(\d{1,9}))?\s*", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise ConfigError(f"--nnodes is {text!r}: write N or MIN:MAX with 1 <= MIN <= MAX.")
    return low, high


def check_launch_config(config: Any) -> None:
    """Check the numbers and names of a torchelastic ``LaunchConfig`` that it does not check itself."""
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
            raise ConfigError(f"--signals-to-handle names {name!r}, which is no signal.")


def parse_grace(text: str | None) -> float | None:
    """Read ``--grace`` into seconds; None where it is not given."""
    if text is None:
        return None
    return parse_duration("--grace", text, max_s=86400)


def resolve_grace_s(args: argparse.Namespace, environ: Mapping[str, str]) -> float | None:
    """Seconds for workers to end after SIGTERM; None where nobody says.

    Of what a pod is given before SIGKILL workers get half: the other half is for their last step to reach
    the disk, and for saying goodbye.
    """
    given = parse_grace(args.grace)
    if given is not None:
        return given
    if environ.get(constants.ENV_GRACE_S):
        return parse_duration(constants.ENV_GRACE_S, environ[constants.ENV_GRACE_S], max_s=86400)
    told = kubernetes.read_termination_grace_s(environ)
    return None if told is None else told / 2


def parse_drain_signals(text: str | None) -> list[str]:
    """Read ``--drain-signals``: names of signals, SIGTERM always among them, first.

    SIGINT, SIGHUP and SIGQUIT have torchrun's meaning, and others mean something to Python or to torch.
    """
    words = [word.strip().upper() for word in (text or "SIGTERM,SIGUSR1").split(",")]
    names = [word if word.startswith("SIG") else f"SIG{word}" for word in words if word]
    wrong = [name for name in names if name not in ALLOWED_DRAIN_SIGNALS]
    if wrong or not names:
        raise ConfigError(
            f"--drain-signals is {str(text)[:100]!r}: write one or more of {', '.join(ALLOWED_DRAIN_SIGNALS)}, with "
            "commas between them."
        )
    return list(dict.fromkeys(["SIGTERM", *names]))


def parse_count(flag: str, text: str | None, *, minimum: int) -> int | None:
    """Read a whole number; None where the flag was not given."""
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,9}", str(text)) or int(text) < minimum:
        raise ConfigError(f"{flag} is {text!r}: write a whole number, {minimum} or more.")
    return int(text)


def cold_start_reason(args: argparse.Namespace, entrypoint: object) -> str:
    """Why no worker can be forked from a Python process that has imported torch; empty where it can."""
    if args.run_path:
        return "--run-path has torchelastic fork them itself"
    if args.no_python:
        return "--no-python means that they may be any program"
    if entrypoint != sys.executable:
        return f"PYTHON_EXEC names another interpreter, {entrypoint}"
    return ""


def check_script(args: argparse.Namespace) -> None:
    """Raise ConfigError unless there is something to run."""
    script = args.training_script
    if args.no_python and not args.run_path:
        if shutil.which(script) is None:
            raise ConfigError(f"there is no program {script!r} that can be run (--no-python).")
    elif args.module:
        top = script.partition(".")[0]
        # As `python -m` does, look in the working directory too.
        found = importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd()), *sys.path])
        if found is None and top not in sys.builtin_module_names and "PYTHON_EXEC" not in os.environ:
            raise ConfigError(
                f"there is no module {top!r} in {Path.cwd()} or where Python looks (-m {script})."
            )
    else:
        _check_script_file(Path(script), script)


def _check_script_file(path: Path, script: str) -> None:
    try:
        is_there, is_dir = path.exists(), path.is_dir()
        has_main = is_dir and any(path.glob("__main__.*"))
    except OSError as error:  # a directory on the way that may not be entered, a name too long
        raise ConfigError(
            f"the training script {script[:200]!r} cannot be read: {error.strerror}."
        ) from error
    if not is_there:
        raise ConfigError(f"there is no training script {script!r} in {Path.cwd()}.")
    if is_dir and not has_main:
        raise ConfigError(f"{script!r} is a directory without a __main__.py: name the training script in it.")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"the training script {script!r} cannot be read: this user has no permission to.")
