"""Check the flags of ``run``, and fill in those that the user left to the scheduler.

A flag and torchrun's own variables take precedence over the scheduler. If the scheduler's variables
contradict each other and the job depends on them, the start fails with a ConfigError.

torchelastic finds most wrong flags too, but later: by an assertion, or by starting workers that cannot run.
The checks read files and change nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.machinery
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_resume import constants
from elastic_resume.checkpoint.node_dir import mask_secrets
from elastic_resume.errors import ConfigError
from elastic_resume.rendezvous.endpoint import local_addresses, parse_address
from elastic_resume.schedulers import environment
from elastic_resume.schedulers.environment import SchedulerContext
from elastic_resume.schedulers.slurm import SharedDir

MAX_SCRIPT_BYTES = 1 << 24  # a program of --no-python may be larger; this much is compared
MAX_ARGUMENT_CHARS = 1000
MAX_PORT = 65535
# Each of these flags names the rendezvous, or says that there is one node only.
RENDEZVOUS_FLAGS = {"rdzv_endpoint", "standalone", "master_addr", "master_port", "node_rank"}
# CoreDNS caches an answer for 30 s, so nodes may need that long to find candidates that were all replaced.
POD_LAST_CALL_TIMEOUT = "35s"

_STREAMS = (r"[0-3]|\d:[0-3](,\d:[0-3])*", "0, 1, 2 or 3, or one of them for each local rank (0:1,1:3)")
_TORCHRUN_FORMS = {
    "max_restarts": (r"\d+", "a whole number, 0 or more"),
    "redirects": _STREAMS,
    "tee": _STREAMS,
    "local_ranks_filter": (r"|\s*\d+\s*(,\s*\d+\s*)*", "local ranks, separated by commas"),
    "rdzv_conf": (r"|[^=,]+=[^,]+(,[^=,]+=[^,]+)*", "KEY=VALUE, several of them separated by commas"),
}
"""The forms of torchrun's values, by destination: a pattern, and its description."""


# ---- filling in --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FilledOptions:
    """What the scheduler has filled in.

    ``rendezvous_conf`` has defaults for --rdzv-conf. ``shared_dir`` is the job's shared directory, if it has
    one.
    """

    rendezvous_conf: dict[str, str] = field(default_factory=dict)
    shared_dir: SharedDir | None = None


def fill_from_scheduler(
    args: argparse.Namespace, given_flags: set[str], context: SchedulerContext, *, share_token: bool = True
) -> FilledOptions:
    """Fill in the flags of ``args`` that are not in ``given_flags``.

    Without ``share_token`` no file is touched.

    Raises:
        ConfigError: the scheduler's variables, or the shared directory, cannot be used.

    """
    if context.tasks_per_node > 1:  # the tasks would share the node's directory and ports
        raise _scheduler_error(context)
    if "nproc_per_node" not in given_flags and context.workers_per_node:
        args.nproc_per_node = context.workers_per_node
    if given_flags & RENDEZVOUS_FLAGS:
        return FilledOptions()
    # Also where the scheduler says one node: if it misreads the number, each node would be a job of its own.
    if context.problems and ("nnodes" not in given_flags or parse_nnodes(args.nnodes)[1] > 1):
        raise _scheduler_error(context)
    if "nnodes" not in given_flags and context.max_nodes > 1:
        args.nnodes = f"{context.min_nodes}:{context.max_nodes}"
    if parse_nnodes(args.nnodes)[1] == 1 or not context.candidates:
        return FilledOptions()
    args.rdzv_endpoint = ",".join(context.candidates)
    # The address may belong to another node; then this node finds its own by name.
    if context.address and not args.local_addr and parse_address(context.address) in local_addresses():
        args.local_addr = context.address
    if context.scheduler in {"kubernetes", "pet"}:
        return FilledOptions({"last_call_timeout": POD_LAST_CALL_TIMEOUT})
    is_slurm = context.scheduler == "slurm"
    shared_dir = _share_token_in_slurm(args, context) if is_slurm and share_token else None
    token_conf = {} if shared_dir is None else {"token_file": str(shared_dir.token_path)}
    return FilledOptions(token_conf, shared_dir)


def _scheduler_error(context: SchedulerContext) -> ConfigError:
    return ConfigError(f"{context.scheduler}: {'; '.join(context.problems)}.")


def _share_token_in_slurm(args: argparse.Namespace, scheduler_context: SchedulerContext) -> SharedDir | None:
    """Share a generated token between the nodes of a Slurm job, unless the user gave one."""
    if "token_file=" in args.rdzv_conf or constants.ENV_TOKEN in os.environ:
        return None
    root = Path(os.environ.get("SLURM_SUBMIT_DIR") or ".").absolute()
    # Each step is a run of its own; the end of the run removes its directory.
    shared_dir = SharedDir(root, f"{scheduler_context.job}.{os.environ.get('SLURM_STEP_ID', '0')}")
    # Only node 0 creates the token: if the directory is not shared, the other nodes fail with that message.
    shared_dir.wait_for_token(create=scheduler_context.node_order == 0)
    return shared_dir


# ---- checking ----------------------------------------------------------------------------------------


def parse_nnodes(text: str, source: str = "--nnodes") -> tuple[int, int]:
    """Parse ``--nnodes`` into the smallest and the greatest number of nodes."""
    match = re.fullmatch(r"\s*(\d{1,9})(?::(\d{1,9}))?\s*", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise ConfigError(f"{source} is {text!r}: write N or MIN:MAX with 1 <= MIN <= MAX.")
    if high > constants.MAX_NODES:
        # A message with larger views may exceed the limit of the wire protocol, and every node would drop it.
        raise ConfigError(f"{source} is {text!r}: write a MAX of at most {constants.MAX_NODES}.")
    return low, high


def check_torchrun_values(args: argparse.Namespace) -> None:
    """Raise ConfigError for a value that torchrun rejects without naming its flag."""
    for dest, (pattern, form) in _TORCHRUN_FORMS.items():
        text = str(getattr(args, dest))
        if not re.fullmatch(pattern, text):
            source = args.sources.get(dest, f"PET_{dest.upper()}")
            raise ConfigError(f"{source} is {text[:200]!r}: torchrun takes {form}.")
    parse_nnodes(args.nnodes, args.sources.get("nnodes", "--nnodes"))
    if not 0 <= (args.master_port or 0) <= MAX_PORT:
        source = args.sources.get("master_port", "PET_MASTER_PORT")
        raise ConfigError(f"{source} is {args.master_port}: torchrun takes a port, 0 to {MAX_PORT}.")


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


def resolve_grace_s(args: argparse.Namespace, environ: Mapping[str, str]) -> float | None:
    """Return how many seconds workers have to end after SIGTERM; None if neither user nor pod says.

    ``--grace`` comes before torchrun's ``--shutdown-timeout``. Workers get half of a pod's termination grace
    period. In the other half the agent commits the last step and leaves the rendezvous.
    """
    for given_s in (args.grace, getattr(args, "shutdown_timeout", None)):  # older torch has no such flag
        if given_s is not None:
            return float(given_s)
    pod_grace_s = environment.read_termination_grace_s(environ)
    return None if pod_grace_s is None else pod_grace_s / 2


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
    script, source = args.training_script, args.sources.get("training_script")
    where = f"{source}: " if source else ""
    if args.no_python and not args.run_path:
        if shutil.which(script) is None:
            raise ConfigError(f"{where}there is no program {script!r} on PATH that can be run (--no-python).")
    elif args.module:
        top = script.partition(".")[0]
        # `python -m` searches the working directory too.
        spec = importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd()), *sys.path])
        if spec is None and top not in sys.builtin_module_names and "PYTHON_EXEC" not in os.environ:
            raise ConfigError(
                f"{where}there is no module {top!r} in {Path.cwd()} or on Python's path (-m {script})."
            )
    elif not os.access(script, os.R_OK):
        raise ConfigError(
            f"{where}there is no training script {script[:200]!r} in {Path.cwd()} that can be read."
        )
    elif Path(script).is_dir() and not (Path(script) / "__main__.py").is_file():
        raise ConfigError(
            f"{where}the training script {script[:200]!r} is a directory without a __main__.py."
        )


def identify_script(script: str) -> str:
    """Return the script's name, with a digest of its content if it is a file.

    It is empty, which matches any other, if the file cannot be read.
    """
    path, digest = Path(script), ""
    if path.is_file():
        try:
            with path.open("rb") as file:
                digest = f" ({hashlib.sha256(file.read(MAX_SCRIPT_BYTES)).hexdigest()[:12]})"
        except OSError:
            return ""
    return f"{path.name[:MAX_ARGUMENT_CHARS]}{digest}"


def describe_script_arguments(arguments: Sequence[str]) -> str:
    """Return the script's arguments in one line, secrets masked, to compare them between nodes."""
    text = shlex.join(mask_secrets(arguments))
    if len(text) <= MAX_ARGUMENT_CHARS:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]
    return f"{text[:MAX_ARGUMENT_CHARS]}… ({digest})"
