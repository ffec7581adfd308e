"""``elastic-resume doctor``: what a start without flags would take from its surroundings, and from where.

Promise: changes nothing, waits for nobody longer than `PATIENCE_S`, and shows no secret. The exit code is 1
when such a start would fail. Run it as the job would be run: ``srun elastic-resume doctor``.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from elastic_resume import constants
from elastic_resume.config import DEFAULT_CKPT_DIR
from elastic_resume.errors import ConfigError
from elastic_resume.rendezvous.endpoint import local_addresses, parse_address, resolve_name
from elastic_resume.rendezvous.net.protocol import load_token
from elastic_resume.report.formatting import format_bytes, write_stdout
from elastic_resume.schedulers import environment, kubernetes, preemption, resources, slurm
from elastic_resume.schedulers.environment import SchedulerContext

LOOKUP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Finding:
    """One line: what, its value, and where that comes from. ``problem``: why a start would fail of it."""

    name: str
    value: str
    source: str = ""
    problem: str = ""


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the parser of the command."""
    one = subparsers.add_parser("doctor", help="what a start here would take from scheduler and machine")
    one.add_argument("--ckpt-dir", type=Path, metavar="DIR", help="as for run")
    one.add_argument("--json", action="store_true", help="one JSON object")
    one.set_defaults(function=doctor)


def doctor(args: argparse.Namespace) -> int:
    """Print what is found; 1 where a start without flags would fail."""
    here = _add_deadline(environment.read_context(os.environ))
    directory = args.ckpt_dir or Path(os.environ.get(constants.ENV_CKPT_DIR) or DEFAULT_CKPT_DIR)
    findings = [
        *check_scheduler(here),
        *check_candidates(here),
        *check_machine(directory, os.environ),
    ]
    problems = [*here.problems, *(one.problem for one in findings if one.problem)]
    if args.json:
        told = [{"what": one.name, "value": one.value, "source": one.source} for one in findings]
        write_stdout(json.dumps({"findings": told, "problems": problems}, indent=2) + "\n")
    else:
        write_stdout(format_findings(findings, problems) + "\n")
    return constants.EXIT_JOB_ERROR if problems else constants.EXIT_SUCCESS


def _add_deadline(context: SchedulerContext) -> SchedulerContext:
    """Ask for the time limit, as an agent does: no variable told it before Slurm 23.02."""
    asked = slurm.find_deadline(context.requeue_id, environ={}) if context.scheduler == "slurm" else None
    if asked is None:
        return context
    return replace(context, deadline=asked, sources={**context.sources, "deadline": "squeue"})


def format_findings(findings: list[Finding], problems: list[str]) -> str:
    """Lay the findings out as a table, what is wrong below it."""
    wide = max(len(one.name) for one in findings)
    most = min(52, max(len(one.value) for one in findings))
    lines = [f"{one.name:<{wide}}  {one.value:<{most}}  {one.source}".rstrip() for one in findings]
    if problems:
        lines += ["", "A start without flags would fail here:", *(f"  - {problem}" for problem in problems)]
    return "\n".join(lines)


# ---- what is looked at ---------------------------------------------------------------------------------


def check_scheduler(context: SchedulerContext) -> list[Finding]:
    """What the scheduler tells."""
    peers = ", ".join(context.peers[:4]) + (f", … {context.peers[-1]}" if len(context.peers) > 4 else "")
    span = (
        str(context.max_nodes)
        if context.max_nodes == context.min_nodes
        else f"{context.min_nodes} to {context.max_nodes}"
    )
    told = {
        "scheduler": context.scheduler,
        "job": context.job or "named after the script",
        "name": context.name,
        "order": str(context.node_index) if context.max_nodes > 1 else "",
        "nodes": span,
        "peers": peers,
        "candidates": ", ".join(context.candidates) if context.max_nodes > 1 else "",
        "address": context.address,
        "workers": str(context.workers_per_node or 1),
        "restarts": str(context.restarts) if context.scheduler == "slurm" else "",
        "requeue": context.requeue_id,
        "deadline": _format_time(context.deadline),
    }
    defaults = {
        "job": "no scheduler tells",
        "workers": "default",
        "nodes": "default",
        "scheduler": "environment",
    }
    sources = {
        **defaults,
        "candidates": context.sources.get("peers", ""),
        "restarts": "not set: the first life",
    }
    if context.scheduler == "host":
        sources["scheduler"] = "no variable of Slurm, Kubernetes or a trainer is set"
    sources |= context.sources
    return [Finding(what, value, sources.get(what, "")) for what, value in told.items() if value]


def check_candidates(context: SchedulerContext) -> list[Finding]:
    """Where the names lead at which nodes meet."""
    if context.max_nodes == 1:
        return []
    own = local_addresses()
    found = []
    known = _resolve_hosts([candidate.rpartition(":")[0] for candidate in context.candidates])
    for host, addresses in known.items():
        mine = any(parse_address(one) in own for one in addresses)
        told = ", ".join(addresses) or "no address yet"
        loopback = [one for one in addresses if (read := parse_address(one)) and read.is_loopback]
        hint = "leads to the loopback here: others may still reach it" if loopback else ""
        found.append(Finding(host, told + (" (this node)" if mine else ""), hint or "looked up now"))
    return found


def check_machine(directory: Path, environ: Mapping[str, str]) -> list[Finding]:
    """What this machine has for the job."""
    group = resources.MemoryCgroup.find_own()
    used = group.read_usage() if group is not None else None
    limit = f"control group's limit {format_bytes(used[1])}" if used else "no limit of a control group"
    found = [
        Finding("memory", f"{format_bytes(resources.available_memory_bytes())} can be taken", limit),
        _check_shared_memory(),
        _check_disk(directory, environ),
        Finding("processors", str(len(os.sched_getaffinity(0))), f"of {psutil.cpu_count()}"),
    ]
    token = "set" if environ.get(constants.ENV_TOKEN) else "not set"
    if "SLURM_JOB_ID" in environ and token == "not set":  # noqa: S105
        token = "made in the shared directory, where there are several nodes"  # noqa: S105
    problem = ""
    try:
        load_token(None, environ, "")
    except ConfigError as error:
        problem = str(error).rstrip(".")
    found.append(Finding("token", token, constants.ENV_TOKEN, problem))
    return [*found, *_check_grace(environ), *_check_notices(environ)]


def _check_notices(environ: Mapping[str, str]) -> list[Finding]:
    told = environ.get(constants.ENV_PREEMPTION_NOTICE)
    try:
        asked = [one.name for one in preemption.parse_sources(told)]
    except ConfigError as error:
        return [Finding("notices", str(told), constants.ENV_PREEMPTION_NOTICE, str(error))]
    return [Finding("notices", ", ".join(asked), constants.ENV_PREEMPTION_NOTICE)] if asked else []


def _check_shared_memory() -> Finding:
    path = str(resources.SHARED_MEMORY_DIR)
    try:
        total = format_bytes(psutil.disk_usage(path).total)
    except OSError:
        total = "not there"
    return Finding(path, total, resources.check_shared_memory())


def _check_grace(environ: Mapping[str, str]) -> list[Finding]:
    try:
        told = kubernetes.read_termination_grace_s(environ)
    except ConfigError as error:
        return [Finding("grace", "unknown", constants.ENV_TERMINATION_GRACE_S, problem=str(error))]
    if told is None:
        return []
    value = f"{told:g} s from SIGTERM to SIGKILL, of which workers get {told / 2:g}"
    return [Finding("grace", value, constants.ENV_TERMINATION_GRACE_S)]


def _check_disk(directory: Path, environ: Mapping[str, str]) -> Finding:
    there = directory
    try:
        there = directory.absolute()
        while not there.exists() and there != there.parent:
            there = there.parent
        if not there.is_dir():
            return Finding("checkpoints", str(directory), problem=f"{there} is no directory: --ckpt-dir")
        free, limited = resources.free_disk_bytes(there, environ), resources.read_checkpoint_limit(environ)
    except ConfigError as error:
        return Finding("checkpoints", str(directory), constants.ENV_CKPT_LIMIT, problem=str(error))
    except OSError as error:
        return Finding("checkpoints", str(directory)[:200], problem=f"{str(there)[:200]}: {error.strerror}")
    if free == 0:
        return Finding("checkpoints", str(directory), problem=f"{there} has no space left: --ckpt-dir")
    if not os.access(there, os.W_OK):
        return Finding("checkpoints", str(directory), problem=f"{there} cannot be written to: --ckpt-dir")
    where = f"{_file_system_type(there)}, --ckpt-dir" + (
        f", volume of {format_bytes(limited)}" if limited is not None else ""
    )
    return Finding("checkpoints", f"{directory.absolute()}: {format_bytes(free)} free", where)


def _file_system_type(path: Path) -> str:
    """The file system under a path."""
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown file system"


def _resolve_hosts(hosts: list[str]) -> dict[str, list[str]]:
    """Look names up, each in a thread that is left behind when the answer takes too long."""
    found: dict[str, list[str]] = {host: [] for host in hosts}

    def ask(host: str) -> None:
        try:
            found[host] = resolve_name(host)
        except (OSError, UnicodeError):
            return

    threads = [threading.Thread(target=ask, args=[host], daemon=True) for host in hosts]
    until = time.monotonic() + LOOKUP_TIMEOUT_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return dict(found)


def _format_time(unix: float | None) -> str:
    if unix is None:
        return ""
    return datetime.fromtimestamp(unix).astimezone().isoformat(sep=" ", timespec="seconds")
