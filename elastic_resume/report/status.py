"""``elastic-resume status``: how a job that runs stands, on one screen, refreshed; or once, or as JSON.

One screen that says how a job stands, of the document that agents give (`agent.document`). Pure.

Finds the agents of a job, and asks whoever leads how it stands.

Where agents are is told by flags (endpoints, the job's name, its token), by a ``look.json`` that an agent of
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
from elastic_resume.rendezvous.net.protocol import WireError, look_key, read_token
from elastic_resume.rendezvous.net.status import ask
from elastic_resume.report.formatting import amount, clean, cut, say, seconds, table, wrap
from elastic_resume.schedulers import environment
from elastic_resume.schedulers.environment import Node
from elastic_resume.units import parse_duration

MAX_NODES = 24
MAX_INCIDENTS = 5
MAX_SPARES = 24
_HEAD = ("rank", "node", "step", "steps/s", "snapshot", "checkpoint", "heard", "")


def fitting(said: Mapping[str, Any], columns: int, rows: int) -> list[str]:
    """Give the lines of `screen` that a terminal of that size has room for: of many nodes fewer."""
    lines = screen(said)
    nodes = min(MAX_NODES, len(said["nodes"]))
    if len(lines) > rows and nodes:
        lines = screen(said, max(1, nodes - 1 - (len(lines) - rows)))
    return [line[:columns] for line in lines[: max(1, rows)]]


def screen(said: Mapping[str, Any], most: int = MAX_NODES) -> list[str]:
    """Give the lines, with ``most`` nodes.

    Raises:
        KeyError, TypeError, ValueError: it is no such document.

    """
    return [
        *_headline(said),
        "",
        *_nodes(said, most),
        *_spares(said["spares"]),
        "",
        *_incidents(said),
    ]


def _headline(said: Mapping[str, Any]) -> list[str]:
    world, leader = said["world"], said["leader"]
    led = f"led by {leader['node']}" if leader else "nobody leads"
    if said["over"]:
        return wrap(f"job {said['run_id']}: {said['over']}")
    if world is None:
        lines = wrap(f"job {said['run_id']}: no world runs, {led}")
        if said["waiting"]:
            lines += wrap(f"waiting: {said['waiting']}")
        if said["missing"]:
            lines += wrap(f"not here: {', '.join(said['missing'])}")
        return lines
    size = f"{amount(len(world['nodes']), 'node')}, {amount(world['ranks'], 'rank')}"
    lines = wrap(f"job {said['run_id']}: generation {world['generation']}, {size}, {led}")
    if not said["leads"]:
        lines.append(f"(as {clean(said['node'])} knows it: who leads did not answer)")
    return [*lines, f"step {said['step']}, {said['steps_per_s']:.3g} steps/s"]


def _spares(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - MAX_SPARES} more" if len(names) > MAX_SPARES else ""
    return ["", *wrap(f"spares: {', '.join(map(clean, names[:MAX_SPARES]))}{more}")]


def _nodes(said: Mapping[str, Any], most: int) -> list[str]:
    nodes = said["nodes"]
    # Those in trouble, or not heard of, are what somebody looks for among thousands.
    shown = nodes
    if len(nodes) > most:
        shown = sorted(nodes, key=lambda one: (not one["trouble"], -(one["heard_s"] or 1e9)))[:most]
    rows = [
        (
            "-" if one["node_rank"] is None else str(one["node_rank"]),
            one["node"],
            str(one["step"]),
            f"{one['steps_per_s']:.3g}",
            _copy(one["snapshot_step"], one["snapshot_age_s"]),
            _copy(one["checkpoint_step"], one["checkpoint_age_s"]),
            "never" if one["heard_s"] is None else f"{seconds(one['heard_s'])} ago",
            one["trouble"],
        )
        for one in shown
    ]
    lines = table(_HEAD, rows, right=(0, 2, 3), elastic=7)
    return [*lines, f"and {len(nodes) - len(shown)} more"] if len(shown) < len(nodes) else lines


def _copy(step: int | None, age_s: float | None) -> str:
    return "-" if step is None else f"{step}, {seconds(age_s)} old"


def _incidents(said: Mapping[str, Any]) -> list[str]:
    sums = said["sums"]
    kinds = ", ".join(f"{count} {clean(kind)}" for kind, count in sorted(sums["incidents"].items()))
    count = sum(sums["incidents"].values())
    if not count:
        return ["no incident so far"]
    head = f"{amount(count, 'incident')} ({kinds}), {amount(sums['lost_steps'], 'step')} run again"
    rows = [
        (
            "-" if one["t"] is None else time.strftime("%H:%M:%S", time.gmtime(one["t"])),
            str(one["generation"]),
            cut(one["cause"], 70),
            "-" if one["lost_steps"] is None else str(one["lost_steps"]),
            seconds(one["recovered_s"]),
        )
        for one in said["incidents"][-MAX_INCIDENTS:]
    ]
    return [
        *wrap(head),
        *table(("UTC", "generation", "cause", "lost", "recovered in"), rows, right=(1, 3), elastic=2),
    ]


PATIENCE_S = 3.0
MAX_HOPS = 3
MAX_KNOWN = 64
"""Addresses of members that are kept, should all that were given be dead by then."""
_MAX_FILE_BYTES = 64 * 1024
_NAMED = 5


@dataclass
class Job:
    """One job, and where its agents were last known to listen."""

    run_id: str
    key: bytes = field(repr=False)
    addresses: list[str]

    def ask(self) -> dict[str, Any]:
        """Give the document of whoever leads; of another agent where that one does not answer.

        Raises:
            RendezvousLostError: nobody answers.

        """
        why: dict[str, str] = {}
        for address in list(self.addresses):
            said = self._ask(address, why)
            for _ in range(MAX_HOPS):
                leader = said and said["leader"]
                if not said or said["leads"] or not leader or leader["address"] in why:
                    break
                said = self._ask(leader["address"], why) or said
            if said:
                self._remember(said)
                return said
        told = "; ".join(f"{address}: {reason}" for address, reason in list(why.items())[:_NAMED])
        raise RendezvousLostError(f"no agent of job {self.run_id!r} answers ({told}).")

    def _ask(self, address: str, why: dict[str, str]) -> dict[str, Any] | None:
        try:
            return ask_agent(address, self.run_id, self.key)
        except WireError as error:
            why[address] = str(error)
        except (OSError, ValueError) as error:
            why[address] = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return None

    def _remember(self, said: Mapping[str, Any]) -> None:
        """Whoever answered is asked first, then the members of its world, then those that were given."""
        world = said["world"]
        members = world["addresses"] if world else []
        self.addresses = list(dict.fromkeys([said["address"], *members, *self.addresses]))[:MAX_KNOWN]


def ask_agent(address: str, run_id: str, key: bytes) -> dict[str, Any]:
    """Return the document of one agent; ``key`` is a `wire.look_key`.

    Raises:
        WireError: it is no agent of that job, or refuses the key.
        OSError: it is not reached, or does not answer in time.

    """
    return _document(ask(address, run_id, key, patience_s=PATIENCE_S))


def find(path: Path | None, *, endpoint: str | None, run_id: str | None, token_file: Path | None) -> Job:
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
    here = environment.read(os.environ)
    name = run_id or os.environ.get(constants.ENV_RUN_ID)
    if endpoint is None:
        root = path or Path(os.environ.get(constants.ENV_CKPT_DIR) or DEFAULT_CKPT_DIR)
        found = [job for job in _jobs_in(root) if name in {None, job.run_id}]
        if not name and not path and here.job:
            found = [job for job in found if _is_of(here, job.run_id)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(one.run_id for one in found[:_NAMED])
            raise UsageError(f"{root}: {len(found)} jobs run here ({names}): say which with --rdzv-id.")
        if path is not None or not here.candidates:
            raise UsageError(
                f"{root}: no agent that runs has left its {constants.LOOK_FILE} here, or this user may not "
                "read it. Give the CKPT_DIR of a node on which the job runs, or --rdzv-endpoint and "
                "--rdzv-id as `elastic-resume run` has them."
            )
    name = name or here.job
    if not name:
        raise UsageError("--rdzv-endpoint says where to ask, and not for which job: add --rdzv-id.")
    token, _ = read_token(token_file, os.environ, name)
    addresses = [str(one) for one in parse_endpoints(endpoint)] if endpoint else list(here.candidates)
    return Job(name, look_key(token), addresses)


def _is_of(here: Node, run_id: str) -> bool:
    """Whether the scheduler's job has that run: in Slurm it is named after job and script."""
    return run_id == here.job or (here.scheduler == "slurm" and run_id.startswith(f"{here.job}-"))


def _jobs_in(root: Path) -> list[Job]:
    """The jobs whose agents have left word there."""
    jobs: dict[str, Job] = {}
    for depth in ("", "*/", "*/*/"):
        try:
            files = sorted(root.glob(f"{depth}{constants.LOOK_FILE}"))
        except OSError:
            files = []
        for file in files:
            job = read_look(file)
            if job is None:
                continue
            known = jobs.setdefault(job.run_id, job)
            known.addresses = list(dict.fromkeys([*known.addresses, *job.addresses]))
    return [job for _, job in sorted(jobs.items())]


def read_look(path: Path) -> Job | None:
    """Read what an agent has left; None where there is nothing of the kind."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            said = json.loads(file.read(_MAX_FILE_BYTES))
        addresses = [said["address"], *said["endpoints"]]
        if all(isinstance(one, str) for one in (said["run_id"], *addresses)):
            return Job(said["run_id"], bytes.fromhex(said["key"]), list(dict.fromkeys(addresses)))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def _document(line: bytes) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except RecursionError:
        said = None
    if not isinstance(said, dict) or "error" in said:
        raise WireError(str(said.get("error"))[:500] if isinstance(said, dict) else "not a document")
    if said.get("version") != constants.STATUS_VERSION:
        raise WireError(
            f"it tells in version {str(said.get('version'))[:16]!r}, this is version {constants.STATUS_VERSION}"
        )
    leader, world = said.get("leader"), said.get("world")
    who = [said, *([leader] if leader is not None else [])]
    places = [one.get("address") if isinstance(one, dict) else None for one in who]
    if world is not None:
        members = world.get("addresses") if isinstance(world, dict) else None
        places += members if isinstance(members, list) else [None]
    if not all(isinstance(one, str) for one in places) or not isinstance(said.get("leads"), bool):
        raise WireError("it answers with a document that is not one of ours")
    return said


LONGEST_S = 60.0
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
        "--interval", type=_seconds, default=1.0, metavar="TIME", help="between two looks (default 1s)"
    )
    one.set_defaults(function=status)


def _seconds(text: str) -> float:
    return parse_duration("--interval", text, least_s=0.1, most_s=3600)


def status(args: argparse.Namespace) -> int:
    """Show it; exit code 1 when nobody answers."""
    job = find(args.path, endpoint=args.rdzv_endpoint, run_id=args.rdzv_id, token_file=args.rdzv_token_file)
    if args.json:
        say(json.dumps(job.ask(), indent=2) + "\n")
    elif args.once or not (sys.stdout and sys.stdout.isatty()):
        say(_text(job.ask()))
    else:
        _watch(job, args.interval)
    return constants.EXIT_DONE


def _watch(job: Job, interval_s: float) -> None:
    """Show it again and again, until Ctrl-C or until nobody has answered for long."""
    said, answered_at = job.ask(), time.monotonic()
    while True:
        silent_s = time.monotonic() - answered_at
        note = f"\nno answer for {silent_s:.0f} s\n" if silent_s > interval_s + PATIENCE_S else ""
        # A row less than there are: the last line ends with a new one.
        columns, rows = shutil.get_terminal_size()
        say(f"{_CLEAR}{_text(said, columns, rows - 1 - note.count(chr(10)))}{note}")
        time.sleep(interval_s)
        try:
            said, answered_at = job.ask(), time.monotonic()
        except RendezvousLostError:
            if time.monotonic() > answered_at + LONGEST_S:
                raise


def _text(said: dict[str, Any], columns: int = 0, rows: int = 0) -> str:
    """The screen; with ``columns`` and ``rows`` as much of it as they have room for."""
    try:
        lines = fitting(said, columns, rows) if rows else screen(said)
        return "\n".join(lines) + "\n"
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"an agent answered with a document that is not one of ours: {error!r}.") from error
