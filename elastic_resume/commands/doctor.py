"""Run ``elastic-resume doctor``: show what a start without flags would take from its environment.

The first lines are the problems, or say that there are none. Each value has its source. The command
leaves nothing behind (it writes a file where checkpoints go, and an object in the archive, and removes
both), waits at most `TORCH_TIMEOUT_S`
for torch, and shows no secret. The exit code is 1 if such a start would fail. Run it like the job itself:
``srun elastic-resume doctor``.
"""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import math
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from elastic_resume import __version__, console, constants, gpus, linux, machine
from elastic_resume.archive.address import parse_address
from elastic_resume.archive.archive import open_store, try_store
from elastic_resume.checkpoint import dir_lock
from elastic_resume.checkpoint.atomic_io import DISK
from elastic_resume.commands.job_file import Row
from elastic_resume.config import OPTIONS, find_misspelled_variables, read_option
from elastic_resume.errors import ArchiveError, ConfigError, MachineError
from elastic_resume.rendezvous.net.protocol import load_token
from elastic_resume.report.formatting import format_bytes, write_stdout
from elastic_resume.schedulers import environment, slurm
from elastic_resume.schedulers.environment import SchedulerContext

TORCH_TIMEOUT_S = 60.0
MIN_LOCKED_BYTES = 1 << 30
NO_PROBLEM = "Nothing found that would make a start fail."
INFINIBAND_DIR = Path("/sys/class/infiniband")
NVIDIA_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_TORCH_PROBE = "import torch; print(torch.__version__, torch.cuda.device_count())"


@dataclass(frozen=True)
class Finding:
    """One line: a name, its value, and its source. ``problem`` says why a start would fail."""

    name: str
    value: str
    source: str = ""
    problem: str = ""


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the parser of the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="show what a start here would take from scheduler and machine",
        description="Shows what a start of run would take from its environment here, without flags or with a "
        "file of --config. It takes no other flags of run.",
    )
    parser.add_argument("--ckpt-dir", metavar="DIR", help="as for run")
    parser.add_argument("--archive", metavar="ADDRESS", help="as for run: write and read an object there")
    parser.add_argument("--config", metavar="FILE", help="check this file of run --config too")
    parser.set_defaults(function=doctor)


def doctor(args: argparse.Namespace) -> int:
    """Print the findings; exit code 1 if a start without flags would fail."""
    context = _add_deadline(environment.read_context(os.environ))
    path = args.config or os.environ.get(constants.ENV_CONFIG, "")
    rows, file_findings = check_config(path, args.read_config) if path else ({}, [])
    # As many workers as GPUs (auto) count as one here, which never is too many.
    given_workers = rows.get("nproc-per-node", context.workers_per_node)
    workers = int(given_workers) if given_workers.isdecimal() else 1
    findings = [
        *check_scheduler(context),
        *file_findings,
        *check_settings(os.environ),
        *check_machine(args.ckpt_dir or rows.get("ckpt-dir"), os.environ, workers),
        *check_archive(
            args.archive or rows.get("archive") or os.environ.get(f"{constants.ENV_PREFIX}ARCHIVE", "")
        ),
        *check_installation(workers),
    ]
    flags = f"with --config {path}" if path else "without flags"
    problems = [*context.problems, *(finding.problem for finding in findings if finding.problem)]
    write_stdout(format_findings(findings, problems, flags) + "\n")
    return constants.EXIT_JOB_ERROR if problems else constants.EXIT_SUCCESS


def _add_deadline(context: SchedulerContext) -> SchedulerContext:
    """Add the job's time limit from squeue; before Slurm 23.02 no variable has it."""
    deadline = slurm.query_end_time(context.slurm_job) if context.scheduler == "slurm" else None
    if deadline is None or math.isinf(deadline):
        return context
    return replace(context, deadline=deadline, sources={**context.sources, "deadline": "squeue"})


def format_findings(findings: list[Finding], problems: list[str], flags: str = "without flags") -> str:
    """Format the problems, or that there are none, the findings as a table, and what was checked."""
    name_width = max(len(finding.name) for finding in findings)
    value_width = min(52, max(len(finding.value) for finding in findings))
    lines = [
        f"{finding.name:<{name_width}}  {finding.value:<{value_width}}  {finding.source}".rstrip()
        for finding in findings
    ]
    header = f"A start {flags} would fail here:" if problems else NO_PROBLEM
    checked = f"Checked: a start of `elastic-resume run` here, {flags}."
    return "\n".join([header, *(f"  - {problem}" for problem in problems), "", *lines, "", checked])


# ---- checks --------------------------------------------------------------------------------------------


def check_scheduler(context: SchedulerContext) -> list[Finding]:
    """Return what the scheduler's variables say."""
    peers = ", ".join(context.peers[:4]) + (f", … {context.peers[-1]}" if len(context.peers) > 4 else "")
    node_range = (
        str(context.max_nodes)
        if context.max_nodes == context.min_nodes
        else f"{context.min_nodes} to {context.max_nodes}"
    )
    values = {
        "scheduler": context.scheduler,
        "job": context.job or "named after the script",
        "name": context.name,
        "order": str(context.node_order) if context.max_nodes > 1 else "",
        "nodes": node_range,
        "peers": peers,
        "candidates": ", ".join(context.candidates) if context.max_nodes > 1 else "",
        "address": context.address,
        "workers": context.workers_per_node or "1",
        "restarts": str(context.restarts) if context.scheduler == "slurm" else "",
        "slurm job": context.slurm_job,
        "deadline": _format_time(context.deadline),
    }
    defaults = {
        "job": "not set by a scheduler",
        "workers": "default",
        "nodes": "default",
        "scheduler": "environment",
        "address": context.sources.get("peers", ""),
    }
    source = context.sources.get("endpoint", context.sources.get("peers", ""))
    sources = {**defaults, "candidates": source, "restarts": "not set: first start"}
    if context.scheduler == "host":
        sources["scheduler"] = "no variable of a scheduler or a trainer is set"
    if context.scheduler == "pet":
        sources["scheduler"] = "PET_* variables, as Kubeflow sets them"
    sources |= context.sources
    return [Finding(name, value, sources.get(name, "")) for name, value in values.items() if value]


def check_config(path: str, read_config: Callable[[str], list[Row]]) -> tuple[dict[str, str], list[Finding]]:
    """Return what a file of ``--config`` gives, and a finding for each of its settings, or for its error."""
    try:
        rows = read_config(path)
    except (ConfigError, ImportError) as error:
        return {}, [Finding("config", path, "--config", str(error).rstrip("."))]
    given = [row for row in rows if row.key and row.origin.startswith(f"{path}:")]
    findings = [Finding(row.key, row.text[:200], row.origin) for row in given]
    return {row.key: row.text for row in given}, findings


def check_settings(environ: Mapping[str, str]) -> list[Finding]:
    """Return the settings that variables give; the others have their defaults."""
    found = []
    for option in OPTIONS:
        if environ.get(option.variable) and option.name not in {"ckpt-dir", "archive"}:
            problem = ""
            try:
                read_option(option, {}, {}, environ)
            except ConfigError as error:
                problem = str(error).rstrip(".")
            found.append(Finding(option.name, environ[option.variable][:200], option.variable, problem))
    try:
        level = environ.get(constants.ENV_LOG_LEVEL, "")
        console.read_level({constants.ENV_LOG_LEVEL: level})
    except ConfigError as error:
        problem = str(error).rstrip(".")
        found.append(Finding("log level", level[:200], constants.ENV_LOG_LEVEL, problem))
    return found + [Finding("variable", message) for message in find_misspelled_variables(environ)]


def check_machine(ckpt_dir: str | None, environ: Mapping[str, str], workers: int = 1) -> list[Finding]:
    """Return what this machine offers the job."""
    group = machine.MemoryCgroup.find_own()
    usage = group.read_usage() if group is not None else None
    limit = f"control group's limit {format_bytes(usage[1])}" if usage else "no limit of a control group"
    found = [
        Finding("memory", f"{format_bytes(machine.available_memory_bytes())} available", limit),
        _check_shared_memory(),
        _check_disk(ckpt_dir, environ),
        Finding("kernel", platform.release(), "uname -r; 4.18 is the oldest that is meant to work"),
        Finding("processors", str(len(os.sched_getaffinity(0))), f"of {psutil.cpu_count()}"),
        *_check_process_limit(workers),
        _check_locked_memory(),
        _check_own_name(),
    ]
    found += check_system_calls()
    token = "set" if environ.get(constants.ENV_TOKEN) else "not set"
    if "SLURM_JOB_ID" in environ and token == "not set":  # noqa: S105
        token = "created in the shared directory if there are several nodes"  # noqa: S105
    problem = ""
    try:
        load_token(None, environ, "")
    except ConfigError as error:
        problem = str(error).rstrip(".")
    found.append(Finding("token", token, constants.ENV_TOKEN, problem))
    return [*found, *_check_grace(environ)]


def _check_process_limit(workers: int) -> list[Finding]:
    limit = machine.ProcessLimit.find_own()
    usage = limit.read_usage() if limit is not None else None
    if limit is None or usage is None:
        return []
    value = f"{usage[0]} of {usage[1]} run, threads included"
    return [Finding("processes", value, "control group's pids.max", limit.describe_shortage(workers))]


def _check_locked_memory() -> Finding:
    """Return the limit of locked memory; the queues and buffers of InfiniBand are locked."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return Finding("locked memory", "unlimited")
    if not any(INFINIBAND_DIR.glob("*")):
        return Finding("locked memory", format_bytes(limit), "ulimit -l; no InfiniBand here, so it is enough")
    remedy = "too little for NCCL on InfiniBand: ulimit -l unlimited, docker run --ulimit memlock=-1"
    return Finding("locked memory", format_bytes(limit), remedy if limit < MIN_LOCKED_BYTES else "ulimit -l")


def _check_own_name() -> Finding:
    """Return the address of this host's name, which gloo gives to other nodes unless it is told another."""
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        return Finding("own address", "none", f"{name}: {error.strerror}; run gives gloo an interface")
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return Finding(
            "own address", address, f"{name} is no address for others; run gives gloo an interface"
        )
    return Finding("own address", address, name)


def check_system_calls() -> list[Finding]:
    """Try what each run needs of the kernel, of Python and of the temporary directory."""
    checks = {
        "memory files": (_try_memfd, "a run needs memfd_create(2)"),
        "pidfd": (_try_pidfd, ""),
        "sockets": (_try_sockets, "a run needs unix and TCP sockets"),
        "temporary files": (_try_temporary_file, "set TMPDIR to a directory that can be written"),
    }
    found = []
    for name, (check, remedy) in checks.items():
        try:
            found.append(Finding(name, check()))
        except OSError as error:
            reason = error.strerror or str(error)
            found.append(Finding(name, "none", remedy, f"{name}: {reason}; {remedy}"))
    return found


def _try_memfd() -> str:
    os.close(linux.create_anonymous_file("elastic_resume-doctor"))
    return "work"


def _try_pidfd() -> str:
    try:
        descriptor = linux.pidfd_open(os.getpid())
    except OSError as error:
        return f"none ({error.strerror}): a process is known by its number and start time"
    os.close(descriptor)
    return "works"


def _try_sockets() -> str:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket() as tcp:
        listener.bind(f"\0elastic_resume-doctor-{os.getpid()}")
        tcp.bind(("", 0))
        tcp.listen(1)
    return "work"


def _try_temporary_file() -> str:
    with tempfile.NamedTemporaryFile(prefix="elastic_resume_") as file:
        return f"in {Path(file.name).parent}"


def check_directory(directory: Path) -> tuple[str, str]:
    """Try locks and a durable file in a directory that exists; return what fails, and what replaces locks."""
    try:
        with tempfile.TemporaryDirectory(prefix=".elastic_resume-doctor-", dir=directory) as name:
            path = Path(name) / "file"
            DISK.write_atomic(path, b"x")
            with open(path, "r+b") as file:
                problem = dir_lock.find_problem(file.fileno(), path)
    except (OSError, MachineError) as error:
        return f"a file cannot be locked or made durable there: {error}", ""
    return "", f"; {problem}: a run keeps its directory by {constants.OWNER_LEASE_FILE}" if problem else ""


def check_archive(text: str) -> list[Finding]:
    """Put, get and delete an object in the archive; one is created twice, which must fail."""
    if text.strip() in {"", "off"}:
        return []
    shown, source = "", "put, get, list, create-only put and delete of an object"
    try:
        address = parse_address("--archive", text)
        shown = str(address)
        started_at = time.monotonic()
        can_create = try_store(open_store(address))
    except (ConfigError, ArchiveError) as error:
        return [Finding("archive", f"{shown}: FAILED".lstrip(": "), source, str(error).rstrip("."))]
    value = f"{shown}: answers in {time.monotonic() - started_at:.1f} s"
    return [Finding("archive", value, source if can_create else "no create-only put: one job at a time")]


def check_installation(workers: int = 1) -> list[Finding]:
    """Return versions and the state of the GPUs; another process imports torch, which takes seconds."""
    found = [
        Finding("elastic_resume", __version__, str(Path(__file__).parents[1])),
        Finding("Python", platform.python_version(), sys.executable),
    ]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE],
            capture_output=True,
            text=True,
            timeout=TORCH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [*found, Finding("torch", f"not imported after {TORCH_TIMEOUT_S:.0f} s", "import torch")]
    answer = done.stdout.split()[-2:]
    if done.returncode or len(answer) < 2:
        error = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        problem = f"torch cannot be imported by {sys.executable}: {error[:300]}"
        return [*found, Finding("torch", "cannot be imported", "import torch", problem)]
    version, num_gpus = answer[0], int(answer[1])
    found.append(Finding("torch", version, "import torch"))
    source = "torch.cuda.device_count()"
    if 0 < num_gpus < workers:
        source += f": {workers} workers must share them"
    found.append(Finding("GPUs", str(num_gpus), source))
    has_nvidia = NVIDIA_DRIVER_FILE.exists() or (num_gpus > 0 and "rocm" not in version)
    return found + (_check_nvidia(workers) if has_nvidia else [])


def _check_nvidia(workers: int) -> list[Finding]:
    """Return what NVML says about the GPUs that workers see; a worker uses that of its local rank."""
    if importlib.util.find_spec("pynvml") is None:
        remedy = f"broken GPUs go unnoticed: {constants.EXTRA_INSTALL.format('nvidia')}"
        return [Finding("nvidia-ml-py", "not installed", remedy)]
    visible = gpus.list_gpus(limit_s=gpus.START_LIMIT_S) or ()
    remedy = "" if visible else "see nvidia-smi; unequal GPUs need CUDA_DEVICE_ORDER=PCI_BUS_ID"
    found = [Finding("nvidia-ml-py", f"knows {len(visible)} GPUs", remedy)]
    for rank, gpu in enumerate(visible):
        if gpu.recovery_action:
            name, value = f"GPU {gpu.index}", f"needs a recovery: {gpu.recovery_action}"
            problem = f"{name} ({gpu.uuid}), of local rank {rank}, {value}" if rank < workers else ""
            found.append(Finding(name, value, gpu.name, problem))
    return found


def _check_shared_memory() -> Finding:
    path = str(machine.SHARED_MEMORY_DIR)
    try:
        total = format_bytes(psutil.disk_usage(path).total)
    except OSError:
        total = "missing"
    return Finding(path, total, machine.check_shared_memory())


def _check_grace(environ: Mapping[str, str]) -> list[Finding]:
    try:
        grace_s = environment.read_termination_grace_s(environ)
    except ConfigError as error:
        return [Finding("grace", "unknown", constants.ENV_TERMINATION_GRACE_S, problem=str(error))]
    if grace_s is None or environ.get(constants.ENV_GRACE):
        return []
    value = f"{grace_s:g} s from SIGTERM to SIGKILL, of which workers get {grace_s / 2:g}"
    return [Finding("grace", value, constants.ENV_TERMINATION_GRACE_S)]


def _check_disk(ckpt_dir: str | None, environ: Mapping[str, str]) -> Finding:
    (option,) = (option for option in OPTIONS if option.name == "ckpt-dir")
    is_set = environ.get(option.variable)
    source = "--ckpt-dir" if ckpt_dir else option.variable if is_set else "default of --ckpt-dir"
    shown = str(ckpt_dir or is_set or option.default)[:200]
    try:
        directory = existing = read_option(option, {"ckpt_dir": ckpt_dir}, {"ckpt_dir": source}, environ)
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        if not existing.is_dir():
            return Finding("checkpoints", shown, source, f"{existing} is no directory: {source}")
        free, limit = machine.free_disk_bytes(existing, environ), machine.read_checkpoint_limit(environ)
        missing = machine.describe_missing_inodes(existing)
    except ConfigError as error:
        return Finding("checkpoints", shown, source, problem=str(error))
    except OSError as error:
        return Finding("checkpoints", shown, source, problem=f"{shown}: {error.strerror}")
    if free == 0 or missing:
        problem = missing or f"{existing} has no space left"
        return Finding("checkpoints", shown, source, f"{problem}: {source}")
    if not os.access(existing, os.W_OK):
        return Finding("checkpoints", shown, source, f"{existing} cannot be written to: {source}")
    problem, no_locks = check_directory(existing)
    if problem:
        return Finding("checkpoints", shown, source, f"{existing}: {problem}: {source}")
    volume = f", volume of {format_bytes(limit)}" if limit is not None else ""
    value = f"{directory}: {format_bytes(free)} free{no_locks}"
    return Finding("checkpoints", value, f"{source}{volume}")


def _format_time(unix: float | None) -> str:
    if unix is None:
        return ""
    return datetime.fromtimestamp(unix).astimezone().isoformat(sep=" ", timespec="seconds")
