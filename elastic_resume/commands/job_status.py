"""Run ``elastic-resume status``: show the state of a running job and of each of its nodes.

The command finds an agent of the job, by the endpoint file in a node's directory or by
``--rdzv-endpoint``. Its answer names the leader, the leader's answer names all nodes, and each node answers
for itself (`report.agent_status`). This module asks them, builds one document from the answers and formats
it for a terminal. The key that it sends is derived from the job's token and only allows reading.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from elastic_resume import constants
from elastic_resume.commands.run_directory import default_ckpt_dir
from elastic_resume.errors import ConfigError, RendezvousLostError, UsageError
from elastic_resume.mechanisms.registry import STATUS_MEMBERS
from elastic_resume.policy.failure_classification import PREEMPTED
from elastic_resume.rendezvous.core.world import Incarnation
from elastic_resume.rendezvous.endpoint import parse_endpoints
from elastic_resume.rendezvous.net.protocol import ProtocolError, derive_status_key, load_token
from elastic_resume.rendezvous.net.status_server import RendezvousStatus
from elastic_resume.report.agent_status import AgentStatus, describe_node, fetch_status
from elastic_resume.report.formatting import (
    format_count,
    format_seconds,
    format_table,
    truncate,
    wrap_text,
    write_stdout,
)
from elastic_resume.report.generations import RECOVERY_BUCKETS_S
from elastic_resume.schedulers import environment
from elastic_resume.schedulers.environment import SchedulerContext

MAX_HOPS = 3
MAX_PARALLEL_QUERIES = 32
ALL_NODES_TIMEOUT_S = 30.0
"""All nodes together must answer within this time; others are shown as not asked."""
_MAX_FILE_BYTES = 64 * 1024
_MAX_NAMED = 5
MAX_NODES = 24
MAX_INCIDENTS = 5
MAX_SPARES = 24
MAX_MEMBER_LINES = 24
_INCIDENT_NAMES = {
    "exception": "exceptions",
    "exit": "workers with an exit code",
    "signal": "workers killed by a signal",
    "oom": "out of memory",
    "hang": "hangs",
    "divergence": "replicas that differ",
    "disk": "disk errors",
    "gpu": "GPU errors",
    "stuck": "processes that cannot be killed",
    "node-lost": "lost nodes",
    "network": "unreachable nodes",
    "job": "all nodes at once",
    "unknown": "unknown causes",
}
_INCIDENT_COLUMNS = ("UTC", "generation", "cause", "recomputed", "recovery")
_COLUMNS = ("rank", "node", "step", "steps/s", "snapshot", "checkpoint", "updated", "")


def format_screen(status: Mapping[str, Any]) -> list[str]:
    """Return the lines of the screen, with at most `MAX_NODES` nodes."""
    return [
        *_format_headline(status),
        "",
        *_format_nodes(status),
        *_format_spares(status["spares"], status["preparing"]),
        "",
        *_format_incidents(status),
    ]


def _format_headline(status: Mapping[str, Any]) -> list[str]:
    world, leader, job = status["world"], status["leader"], f"job {status['run_id']}"
    leader_text = f"led by {leader['node']}" if leader else "no leader"
    if status["end_reason"]:
        return wrap_text(f"{job}: {status['end_reason']}")
    if world is None:
        lines = wrap_text(f"{job}: no world, {leader_text}")
        lines += wrap_text(f"waiting: {status['waiting']}") if status["waiting"] else []
        return lines + (wrap_text(f"missing: {', '.join(status['missing'])}") if status["missing"] else [])
    nodes = f"{format_count(len(world['nodes']), 'node')}, " if world["nodes"] else ""
    size = f"{nodes}{format_count(world['ranks'], 'rank')}"
    lines = wrap_text(f"{job}: generation {world['generation']}, {size}, {leader_text}")
    if not status["is_leader"]:
        lines += wrap_text(f"(as {status['node']} knows it: the leader did not answer)")
    unanswered = sum(bool(node["error"]) for node in status["nodes"])
    if unanswered:
        lines.append(f"{format_count(unanswered, 'node')} did not answer")
    lines.append(f"step {status['step']}, {status['steps_per_s']:.3g} steps/s")
    texts = []
    for node in status["nodes"]:
        texts += [node["proof"]] if node["proof"] else []
        for member in STATUS_MEMBERS:
            if node[member.name]:
                value = member.kind(**node[member.name])
                texts.append(f"node {node['node']}: {member.describe(value)}")
    for text in texts[:MAX_MEMBER_LINES]:
        lines += wrap_text(text)
    more = len(texts) - MAX_MEMBER_LINES
    return [*lines, f"and {more} more of these: --json has all"] if more > 0 else lines


def _format_spares(names: Sequence[str], preparing: Sequence[str]) -> list[str]:
    more = f" and {len(names) - MAX_SPARES} more" if len(names) > MAX_SPARES else ""
    shown = [f"{name} (its workers start)" if name in preparing else name for name in names[:MAX_SPARES]]
    return ["", *wrap_text(f"spares: {', '.join(shown)}{more}")] if names else []


def _format_nodes(status: Mapping[str, Any]) -> list[str]:
    nodes = status["nodes"]
    # Of thousands of nodes, show those with a problem or without a recent update.
    shown = nodes
    if len(nodes) > MAX_NODES:
        by_concern = sorted(
            nodes,
            key=lambda node: (not (node["error"] or node["problem"]), -(node["status_age_s"] or 1e9)),
        )
        shown = by_concern[:MAX_NODES]
    rows = [
        (
            "-" if node["node_rank"] is None else str(node["node_rank"]),
            node["node"],
            "-" if node["status_age_s"] is None else str(node["step"]),
            "-" if node["status_age_s"] is None else f"{node['steps_per_s']:.3g}",
            _format_saved_state(node["snapshot_step"], node["snapshot_age_s"]),
            _format_saved_state(node["checkpoint_step"], node["checkpoint_age_s"]),
            "-" if node["status_age_s"] is None else f"{format_seconds(node['status_age_s'])} ago",
            f"no answer: {node['error']}" if node["error"] else node["problem"] or "",
        )
        for node in shown
    ]
    lines = format_table(_COLUMNS, rows, right_aligned=(0, 2, 3), shrinkable=7)
    return [*lines, f"and {len(nodes) - len(shown)} more"] if len(shown) < len(nodes) else lines


def _format_saved_state(step: int | None, age_s: float | None) -> str:
    return "-" if step is None else f"{step}, {format_seconds(age_s)} old"


def _format_incidents(status: Mapping[str, Any]) -> list[str]:
    totals = status["totals"]
    by_kind = sorted(totals["incidents"].items())
    drained = totals["incidents"].get(PREEMPTED, 0)
    count = sum(number for _, number in by_kind) - drained
    if not (count or drained):
        # What ended the last view is known with the next one only.
        return [] if status["world"] is None else ["no failures since this start"]
    by_kind = [(kind, number) for kind, number in by_kind if kind != PREEMPTED]
    names = {kind: _INCIDENT_NAMES.get(kind, kind) for kind, _ in by_kind}
    kinds = ", ".join(f"{names[kind]}: {number}" for kind, number in by_kind)
    if len(by_kind) == 1:
        kinds = names[by_kind[0][0]]
    failures = f"{format_count(count, 'failure')} ({kinds})" if count else "no failures"
    if drained:
        failures += f", {format_count(drained, 'drain')}"
    steps = format_count(totals["recomputed_steps"], "step")
    rows = [
        (
            "-" if incident["t"] is None else time.strftime("%H:%M:%S", time.gmtime(incident["t"])),
            str(incident["generation"]),
            truncate(incident["cause"], 70),
            "-" if incident["recomputed_steps"] is None else str(incident["recomputed_steps"]),
            format_seconds(incident["recovery_s"]),
        )
        for incident in status["incidents"][-MAX_INCIDENTS:]
    ]
    return [
        *wrap_text(f"{failures}, {steps} recomputed"),
        *format_table(_INCIDENT_COLUMNS, rows, right_aligned=(1, 3), shrinkable=2),
    ]


_Answer = AgentStatus | str
"""What an agent replied, or why it did not."""


@dataclass
class JobEndpoint:
    """One job, and the last known addresses of its agents."""

    run_id: str
    key: bytes = field(repr=False)
    addresses: list[str]

    def query_job(self) -> dict[str, Any]:
        """Ask the leader, or another agent if it does not answer, and then each node that it names.

        Return the document; a node that does not answer is in it with the reason.

        Raises:
            RendezvousLostError: no agent answers.
        """
        answers: dict[str, _Answer] = {}
        asked = self._find_leader(answers)
        nodes = _list_nodes(asked.rendezvous)
        own = asked.rendezvous.incarnation.address
        answers[own] = asked  # the command may have reached it by another address
        self._ask_all([node.address for node in nodes if node.address not in answers], answers)
        return build_document(self.run_id, asked, nodes, dict(answers))

    def _find_leader(self, answers: dict[str, _Answer]) -> AgentStatus:
        for address in self.addresses:
            answer = self._ask(address, answers)
            for _ in range(MAX_HOPS):
                if isinstance(answer, str) or answer.rendezvous.is_leader:
                    break
                leader = answer.rendezvous.leader
                if leader is None or leader.address in answers:
                    break
                found = self._ask(leader.address, answers)
                answer = answer if isinstance(found, str) else found
            if not isinstance(answer, str):
                return answer
        details = "; ".join(f"{address}: {reason}" for address, reason in list(answers.items())[:_MAX_NAMED])
        raise RendezvousLostError(
            f"no agent of job {self.run_id!r} answers ({details}). How it ended: `elastic-resume report`."
        )

    def _ask_all(self, addresses: Sequence[str], answers: dict[str, _Answer]) -> None:
        """Ask agents in threads of their own, which cannot delay the end: a name server may hang too."""
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for address in addresses:
            waiting.put(address)
        deadline = time.monotonic() + ALL_NODES_TIMEOUT_S

        def ask() -> None:
            with contextlib.suppress(queue.Empty):
                while time.monotonic() < deadline:
                    self._ask(waiting.get_nowait(), answers)

        threads = [
            threading.Thread(target=ask, daemon=True)
            for _ in range(min(MAX_PARALLEL_QUERIES, len(addresses)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _ask(self, address: str, answers: dict[str, _Answer]) -> _Answer:
        """Ask one agent, and keep its answer or the reason why there is none."""
        answer: _Answer
        try:
            answer = fetch_status(address, self.run_id, self.key)
        except ProtocolError as error:
            answer = str(error)
        except (OSError, OverflowError, ValueError) as error:
            answer = getattr(error, "strerror", None) or str(error) or type(error).__name__
        answers[address] = answer
        return answer


def _list_nodes(view: RendezvousStatus) -> list[Incarnation]:
    """List the nodes that an agent knows: members in rank order, then the others by name."""
    members = view.view.members if view.view else ()
    return list(dict.fromkeys([*members, *view.others, view.incarnation]))


def build_document(
    run_id: str, asked: AgentStatus, nodes: Sequence[Incarnation], answers: Mapping[str, _Answer]
) -> dict[str, Any]:
    """Build the JSON object that ``elastic-resume status --json`` prints.

    ``asked`` is the leader's answer, or another agent's, and names the ``nodes``; ``answers`` are by address.
    Members may be added; any other change increases `constants.STATUS_VERSION`.
    """
    view = asked.rendezvous
    world = view.view
    described = [_describe_node(node, asked, answers) for node in nodes]
    running = [node for node in described if world and node["generation"] == world.generation]
    furthest = max(running, key=lambda node: node["step"], default=None)
    replies = [answer for answer in answers.values() if isinstance(answer, AgentStatus)]
    # Each node knows the failures since its agent started; the oldest one knows most.
    incidents = max((reply.incidents for reply in [asked, *replies]), key=lambda known: known.extent)
    return {
        "version": constants.STATUS_VERSION,
        "run_id": run_id,
        "t": round(time.time(), 3),
        "node": view.incarnation.node,
        "address": view.incarnation.address,
        "is_leader": view.is_leader,
        "leader": {"node": view.leader.node, "address": view.leader.address} if view.leader else None,
        "generation": view.generation,
        "world": {
            "generation": world.generation,
            "nodes": [member.node for member in world.members],
            "addresses": [member.address for member in world.members],
            "ranks": max((node["world_size"] for node in running), default=0),
        }
        if world
        else None,
        "spares": [other.node for other in view.others] if world else [],
        "preparing": list(view.preparing),
        "missing": list(view.missing),
        "waiting": view.waiting_reason,
        "end_reason": view.end_reason,
        "step": furthest["step"] if furthest else max((node["step"] or 0 for node in described), default=0),
        "steps_per_s": furthest["steps_per_s"] if furthest else 0.0,
        "nodes": described,
        "incidents": [asdict(incident) for incident in incidents.newest],
        "totals": {
            "incidents": dict(incidents.by_kind),
            "recomputed_steps": incidents.recomputed_steps,
            "recovery_bounds_s": list(RECOVERY_BUCKETS_S),
            "recovery_counts": list(incidents.recovery_counts),
            "recovery_s": incidents.recovery_s,
        },
    }


def _describe_node(node: Incarnation, asked: AgentStatus, answers: Mapping[str, _Answer]) -> dict[str, Any]:
    answer = answers.get(node.address, f"not within {ALL_NODES_TIMEOUT_S:g} s")
    if isinstance(answer, AgentStatus) and answer.rendezvous.incarnation.node != node.node:
        answer = f"node {answer.rendezvous.incarnation.node} has its address"
    view = asked.rendezvous.view
    return {
        "node": node.node,
        "node_rank": view.rank(node) if view else None,
        "error": answer if isinstance(answer, str) else "",
        **describe_node(None if isinstance(answer, str) else answer),
    }


def find_job(
    path: Path | None, *, endpoint: str | None, run_id: str | None, token_file: Path | None
) -> JobEndpoint:
    """Find the job to ask.

    Args:
        path: CKPT_DIR, or the directory of a run or a node in it; None: the directory that `run` would use.
        endpoint: ``--rdzv-endpoint``; if given, ``path`` is ignored.
        run_id: ``--rdzv-id``.
        token_file: ``--token-file``.

    Raises:
        UsageError: there is no job.
        ConfigError: a value is wrong, or the job's name is missing.
    """
    context = environment.read_context(os.environ)
    wanted = run_id or os.environ.get(constants.ENV_RUN_ID)
    if endpoint is None:
        root = path or default_ckpt_dir()
        jobs = [job for job in _find_jobs(root) if _is_wanted(job.run_id, path, wanted, context)]
        if len(jobs) == 1:
            return jobs[0]
        if jobs:
            names = ", ".join(job.run_id for job in jobs[:_MAX_NAMED])
            raise ConfigError(f"{root}: {len(jobs)} jobs run here ({names}): choose one with --rdzv-id.")
        if path is not None or not context.candidates:
            raise UsageError(
                f"{root}: no job runs here. Give the CKPT_DIR of a running job, as its user, on a machine of "
                "the job; or from elsewhere --rdzv-endpoint and --rdzv-id as for `elastic-resume run`. For a "
                "job that has ended: `elastic-resume report`."
            )
    wanted = wanted or context.job
    if not wanted:
        raise ConfigError("--rdzv-endpoint needs the name of the job: add --rdzv-id.")
    token, _ = load_token(token_file, os.environ, wanted)
    addresses = map(str, parse_endpoints(endpoint)) if endpoint else context.candidates
    return JobEndpoint(wanted, derive_status_key(token), list(addresses))


def _is_wanted(run_id: str, path: Path | None, wanted: str | None, context: SchedulerContext) -> bool:
    if wanted or path or not context.job:
        return wanted in {None, run_id}
    return _matches_scheduler_job(context, run_id)


def _matches_scheduler_job(context: SchedulerContext, run_id: str) -> bool:
    """Whether the run belongs to the scheduler's job; in Slurm its name starts with the job's."""
    return run_id == context.job or (context.scheduler == "slurm" and run_id.startswith(f"{context.job}-"))


def _find_jobs(root: Path) -> list[JobEndpoint]:
    """Return the jobs whose agents left an endpoint file at or below ``root``."""
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
            merged = jobs.setdefault(job.run_id, job)
            merged.addresses = list(dict.fromkeys([*merged.addresses, *job.addresses]))
    return [job for _, job in sorted(jobs.items())]


def read_agent_endpoint(path: Path) -> JobEndpoint | None:
    """Read an agent's endpoint file; None if it is missing or malformed."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            content = json.loads(file.read(_MAX_FILE_BYTES))
        addresses = [content["address"], *content["endpoints"]]
        if all(isinstance(text, str) for text in (content["run_id"], *addresses)):
            return JobEndpoint(
                content["run_id"], bytes.fromhex(content["key"]), list(dict.fromkeys(addresses))
            )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the parser of the command."""
    parser = subparsers.add_parser(
        "status", help="show a running job: world, steps, snapshots, checkpoints, incidents"
    )
    path_help = "CKPT_DIR, or a run's or node's directory in it (default ./checkpoints)"
    parser.add_argument("path", type=_parse_path, nargs="?", metavar="CKPT_DIR", help=path_help)
    parser.add_argument("--rdzv-endpoint", metavar="HOST,...", help="as for run; any agent of the job")
    parser.add_argument("--rdzv-id", metavar="NAME", help="as for run: the job's name")
    file_help = "as token_file of --rdzv-conf for run (or ELASTIC_RESUME_TOKEN)"
    parser.add_argument("--token-file", type=Path, metavar="FILE", help=file_help)
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.set_defaults(function=status)


def _parse_path(text: str) -> Path:
    if "://" in text:
        raise UsageError(
            f"{text}: status asks the agents of a running job; report takes the archive's address."
        )
    return Path(text)


def status(args: argparse.Namespace) -> int:
    """Show the status once."""
    endpoint = find_job(
        args.path, endpoint=args.rdzv_endpoint, run_id=args.rdzv_id, token_file=args.token_file
    )
    document = endpoint.query_job()
    text = json.dumps(document, indent=2) if args.json else "\n".join(format_screen(document))
    write_stdout(f"{text}\n")
    return constants.EXIT_SUCCESS
