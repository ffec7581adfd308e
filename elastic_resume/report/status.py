"""``elastic-resume status``: how a job that runs stands, on one screen, refreshed; or once, or as JSON.

One screen that says how a job stands, of the document that agents give (`agent.document`). Pure.

Finds the agents of a job, and asks whoever leads how it stands.

Where agents are is told by flags (endpoints, the job's name, its token), by a ``agent-endpoint.json`` that an agent of
this machine or of a shared file system wrote, or by the scheduler. Promise: asks, and changes nothing; each
question has a limit of time; no error text shows a token.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_resume import constants
from elastic_resume.config import DEFAULT_CKPT_DIR
from elastic_resume.errors import RendezvousLostError, UsageError
from elastic_resume.rendezvous.endpoint import parse_endpoints
from elastic_resume.rendezvous.net.protocol import ProtocolError, derive_status_key, load_token
from elastic_resume.rendezvous.net.status import query_agent
from elastic_resume.report.formatting import (
    format_count,
    format_seconds,
    format_table,
    replace_unprintable,
    truncate,
    wrap_text,
    write_stdout,
)
from elastic_resume.schedulers import environment
from elastic_resume.schedulers.environment import SchedulerContext
from elastic_resume.units import parse_duration

MAX_NODES = 24
MAX_INCIDENTS = 5
MAX_SPARES = 24
_COLUMNS = ("rank", "node", "step", "steps/s", "snapshot", "checkpoint", "heard", "")


def fit_screen(status: Mapping[str, Any], columns: int, rows: int) -> list[str]:
    """Give the lines of `screen` that a terminal of that size has room for: of many nodes fewer."""
    lines = format_screen(status)
    nodes = min(MAX_NODES, len(status["nodes"]))
    if len(lines) > rows and nodes:
        lines = format_screen(status, max(1, nodes - 1 - (len(lines) - rows)))
    return [line[:columns] for line in lines[: max(1, rows)]]


def format_screen(status: Mapping[str, Any], max_nodes: int = MAX_NODES) -> list[str]:
    """Give the lines, with ``most`` nodes.

    Raises:
        KeyError, TypeError, ValueError: it is no such document.

    """
    return [
        *_format_headline(status),
        "",
        *_format_nodes(status, max_nodes),
        *_format_spares(status["spares"]),
        "",
        *_format_incidents(status),
    ]


def _format_headline(status: Mapping[str, Any]) -> list[str]:
    world, leader = status["world"], status["leader"]
    led = f"led by {leader['node']}" if leader else "nobody leads"
    if status["over"]:
        return wrap_text(f"job {status['run_id']}: {status['over']}")
    if world is None:
        lines = wrap_text(f"job {status['run_id']}: no world runs, {led}")
        if status["waiting"]:
            lines += wrap_text(f"waiting: {status['waiting']}")
        if status["missing"]:
            lines += wrap_text(f"not here: {', '.join(status['missing'])}")
        return lines
    size = f"{format_count(len(world['nodes']), 'node')}, {format_count(world['ranks'], 'rank')}"
    lines = wrap_text(f"job {status['run_id']}: generation {world['generation']}, {size}, {led}")
    if not status["leads"]:
        lines.append(f"(as {replace_unprintable(status['node'])} knows it: who leads did not answer)")
    return [*lines, f"step {status['step']}, {status['steps_per_s']:.3g} steps/s"]


def _format_spares(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - MAX_SPARES} more" if len(names) > MAX_SPARES else ""
    return ["", *wrap_text(f"spares: {', '.join(map(replace_unprintable, names[:MAX_SPARES]))}{more}")]


def _format_nodes(status: Mapping[str, Any], max_nodes: int) -> list[str]:
    nodes = status["nodes"]
    # Those in trouble, or not heard of, are what somebody looks for among thousands.
    shown = nodes
    if len(nodes) > max_nodes:
        shown = sorted(nodes, key=lambda one: (not one["problem"], -(one["status_age_s"] or 1e9)))[:max_nodes]
    rows = [
        (
            "-" if one["node_rank"] is None else str(one["node_rank"]),
            one["node"],
            str(one["step"]),
            f"{one['steps_per_s']:.3g}",
            _format_saved_state(one["snapshot_step"], one["snapshot_age_s"]),
            _format_saved_state(one["checkpoint_step"], one["checkpoint_age_s"]),
            "never" if one["status_age_s"] is None else f"{format_seconds(one['status_age_s'])} ago",
            one["problem"],
        )
        for one in shown
    ]
    lines = format_table(_COLUMNS, rows, right_aligned=(0, 2, 3), shrinkable=7)
    return [*lines, f"and {len(nodes) - len(shown)} more"] if len(shown) < len(nodes) else lines


def _format_saved_state(step: int | None, age_s: float | None) -> str:
    return "-" if step is None else f"{step}, {format_seconds(age_s)} old"


def _format_incidents(status: Mapping[str, Any]) -> list[str]:
    sums = status["totals"]
    kinds = ", ".join(
        f"{count} {replace_unprintable(kind)}" for kind, count in sorted(sums["incidents"].items())
    )
    count = sum(sums["incidents"].values())
    if not count:
        return ["no incident so far"]
    head = (
        f"{format_count(count, 'incident')} ({kinds}), {format_count(sums['recomputed_steps'], 'step')} run again"
    )
    rows = [
        (
            "-" if one["t"] is None else time.strftime("%H:%M:%S", time.gmtime(one["t"])),
            str(one["generation"]),
            truncate(one["cause"], 70),
            "-" if one["recomputed_steps"] is None else str(one["recomputed_steps"]),
            format_seconds(one["recovery_s"]),
        )
        for one in status["incidents"][-MAX_INCIDENTS:]
    ]
    return [
        *wrap_text(head),
        *format_table(
            ("UTC", "generation", "cause", "lost", "recovered in"), rows, right_aligned=(1, 3), shrinkable=2
        ),
    ]


QUERY_TIMEOUT_S = 3.0
MAX_HOPS = 3
MAX_ADDRESSES = 64
"""Addresses of members that are kept, should all that were given be dead by then."""
_MAX_FILE_BYTES = 64 * 1024
_MAX_NAMED = 5


@dataclass
class JobEndpoint:
    """One job, and where its agents were last known to listen."""

    run_id: str
    key: bytes = field(repr=False)
    addresses: list[str]

    def query_leader(self) -> dict[str, Any]:
        """Give the document of whoever leads; of another agent where that one does not answer.

        Raises:
            RendezvousLostError: nobody answers.

        """
        why: dict[str, str] = {}
        for address in list(self.addresses):
            said = self._query(address, why)
            for _ in range(MAX_HOPS):
                leader = said and said["leader"]
                if not said or said["leads"] or not leader or leader["address"] in why:
                    break
                said = self._query(leader["address"], why) or said
            if said:
                self._remember_addresses(said)
                return said
        told = "; ".join(f"{address}: {reason}" for address, reason in list(why.items())[:_MAX_NAMED])
        raise RendezvousLostError(f"no agent of job {self.run_id!r} answers ({told}).")

    def _query(self, address: str, errors: dict[str, str]) -> dict[str, Any] | None:
        try:
            return fetch_status(address, self.run_id, self.key)
        except ProtocolError as error:
            errors[address] = str(error)
        except (OSError, ValueError) as error:
            errors[address] = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return None

    def _remember_addresses(self, said: Mapping[str, Any]) -> None:
        """Whoever answered is asked first, then the members of its world, then those that were given."""
        world = said["world"]
        members = world["addresses"] if world else []
        self.addresses = list(dict.fromkeys([said["address"], *members, *self.addresses]))[:MAX_ADDRESSES]


def fetch_status(address: str, run_id: str, key: bytes) -> dict[str, Any]:
    """Return the document of one agent; ``key`` is a `wire.look_key`.

    Raises:
        WireError: it is no agent of that job, or refuses the key.
        OSError: it is not reached, or does not answer in time.

    """
    return _parse_document(query_agent(address, run_id, key, timeout_s=QUERY_TIMEOUT_S))


def find_job(
    path: Path | None, *, endpoint: str | None, run_id: str | None, token_file: Path | None
) -> JobEndpoint:
    """Find the job that is meant.

    Args:
        path: CKPT_DIR, or the directory of a run or a node in it; None: where a start here would put it.
        endpoint: ``--rdzv-endpoint``; with it ``path`` is not looked at.
        run_id: ``--rdzv-id``.
        token_file: ``--rdzv-token-file``.

    Raises:
        UsageError: it cannot be told which.
        ConfigError: a value is wrong.

    """
    here = environment.read_context(os.environ)
    name = run_id or os.environ.get(constants.ENV_RUN_ID)
    if endpoint is None:
        root = path or Path(os.environ.get(constants.ENV_CKPT_DIR) or DEFAULT_CKPT_DIR)
        found = [job for job in _find_jobs(root) if name in {None, job.run_id}]
        if not name and not path and here.job:
            found = [job for job in found if _matches_scheduler_job(here, job.run_id)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(one.run_id for one in found[:_MAX_NAMED])
            raise UsageError(f"{root}: {len(found)} jobs run here ({names}): say which with --rdzv-id.")
        if path is not None or not here.candidates:
            raise UsageError(
                f"{root}: no agent that runs has left its {constants.AGENT_ENDPOINT_FILE} here, or this user may not "
                "read it. Give the CKPT_DIR of a node on which the job runs, or --rdzv-endpoint and "
                "--rdzv-id as `elastic-resume run` has them."
            )
    name = name or here.job
    if not name:
        raise UsageError("--rdzv-endpoint says where to ask, and not for which job: add --rdzv-id.")
    token, _ = load_token(token_file, os.environ, name)
    addresses = [str(one) for one in parse_endpoints(endpoint)] if endpoint else list(here.candidates)
    return JobEndpoint(name, derive_status_key(token), addresses)


def _matches_scheduler_job(here: SchedulerContext, run_id: str) -> bool:
    """Whether the scheduler's job has that run: in Slurm it is named after job and script."""
    return run_id == here.job or (here.scheduler == "slurm" and run_id.startswith(f"{here.job}-"))


def _find_jobs(root: Path) -> list[JobEndpoint]:
    """The jobs whose agents have left word there."""
    jobs: dict[str, JobEndpoint] = {}
    for depth in ("", "*/", "*/*/"):
        try:
            files = sorted(root.glob(f"{depth}{constants.AGENT_ENDPOINT_FILE}"))
        except OSError:
            files = []
        for file in files:
            job = read_agent_endpoint(file)
            if job is None:
                continue
            known = jobs.setdefault(job.run_id, job)
            known.addresses = list(dict.fromkeys([*known.addresses, *job.addresses]))
    return [job for _, job in sorted(jobs.items())]


def read_agent_endpoint(path: Path) -> JobEndpoint | None:
    """Read what an agent has left; None where there is nothing of the kind."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            said = json.loads(file.read(_MAX_FILE_BYTES))
        addresses = [said["address"], *said["endpoints"]]
        if all(isinstance(one, str) for one in (said["run_id"], *addresses)):
            return JobEndpoint(said["run_id"], bytes.fromhex(said["key"]), list(dict.fromkeys(addresses)))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def _parse_document(line: bytes) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except RecursionError:
        said = None
    if not isinstance(said, dict) or "error" in said:
        raise ProtocolError(str(said.get("error"))[:500] if isinstance(said, dict) else "not a document")
    if said.get("version") != constants.STATUS_VERSION:
        raise ProtocolError(
            f"it tells in version {str(said.get('version'))[:16]!r}, this is version {constants.STATUS_VERSION}"
        )
    leader, world = said.get("leader"), said.get("world")
    who = [said, *([leader] if leader is not None else [])]
    places = [one.get("address") if isinstance(one, dict) else None for one in who]
    if world is not None:
        members = world.get("addresses") if isinstance(world, dict) else None
        places += members if isinstance(members, list) else [None]
    if not all(isinstance(one, str) for one in places) or not isinstance(said.get("leads"), bool):
        raise ProtocolError("it answers with a document that is not one of ours")
    return said


MAX_SILENCE_S = 60.0
"""After so long without an answer a job that was looked at counts as ended."""
_CLEAR = "\x1b[H\x1b[J"


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the parser of the command."""
    one = subparsers.add_parser("status", help="how a job that runs stands: world, steps, copies, incidents")
    one.add_argument(
        "path", type=Path, nargs="?", metavar="CKPT_DIR", help="or a run's or node's directory in it"
    )
    one.add_argument(
        "--rdzv-endpoint", metavar="HOST,...", help="as for run: any agent of the job may be asked"
    )
    one.add_argument("--rdzv-id", metavar="NAME", help="as for run: the job's name")
    one.add_argument(
        "--rdzv-token-file", type=Path, metavar="FILE", help="as for run (or ELASTIC_RESUME_TOKEN)"
    )
    one.add_argument(
        "--once", action="store_true", help="print it once; so it is where stdout is no terminal"
    )
    one.add_argument("--json", action="store_true", help="once, all that is known, as one JSON object")
    one.add_argument(
        "--interval", type=_parse_interval, default=1.0, metavar="TIME", help="between two looks (default 1s)"
    )
    one.set_defaults(function=status)


def _parse_interval(text: str) -> float:
    return parse_duration("--interval", text, min_s=0.1, max_s=3600)


def status(args: argparse.Namespace) -> int:
    """Show it; exit code 1 when nobody answers."""
    job = find_job(
        args.path, endpoint=args.rdzv_endpoint, run_id=args.rdzv_id, token_file=args.rdzv_token_file
    )
    if args.json:
        write_stdout(json.dumps(job.query_leader(), indent=2) + "\n")
    elif args.once or not (sys.stdout and sys.stdout.isatty()):
        write_stdout(_format_text(job.query_leader()))
    else:
        _refresh(job, args.interval)
    return constants.EXIT_SUCCESS


def _refresh(endpoint: JobEndpoint, interval_s: float) -> None:
    """Show it again and again, until Ctrl-C or until nobody has answered for long."""
    said, answered_at = endpoint.query_leader(), time.monotonic()
    while True:
        silent_s = time.monotonic() - answered_at
        note = f"\nno answer for {silent_s:.0f} s\n" if silent_s > interval_s + QUERY_TIMEOUT_S else ""
        # A row less than there are: the last line ends with a new one.
        columns, rows = shutil.get_terminal_size()
        write_stdout(f"{_CLEAR}{_format_text(said, columns, rows - 1 - note.count(chr(10)))}{note}")
        time.sleep(interval_s)
        try:
            said, answered_at = endpoint.query_leader(), time.monotonic()
        except RendezvousLostError:
            if time.monotonic() > answered_at + MAX_SILENCE_S:
                raise


def _format_text(document: dict[str, Any], columns: int = 0, rows: int = 0) -> str:
    """The screen; with ``columns`` and ``rows`` as much of it as they have room for."""
    try:
        lines = fit_screen(document, columns, rows) if rows else format_screen(document)
        return "\n".join(lines) + "\n"
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"an agent answered with a document that is not one of ours: {error!r}.") from error
