"""``elastic-resume force-quorum``: let the nodes that are left go on without a majority.

A node leaves its world waiting when more than half of its members are unreachable, since they may train on.
An operator who knows that they are dead for good says so here. The command writes one small file into a
node's directory. The node's agent, running or started later, takes it in once and tells its leader.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from elastic_resume import constants
from elastic_resume.errors import RendezvousLostError, UsageError
from elastic_resume.rendezvous.core.quorum import QuorumState, format_node_names
from elastic_resume.rendezvous.net.durable_state import RENDEZVOUS_STATE_FILE, DurableStateFile
from elastic_resume.report import status
from elastic_resume.report.formatting import write_stdout

RISK_NOTE = (
    "If any of them is alive after all, two worlds train at the same time. When they meet, the one with the "
    "lower generation stops, and the steps that it made meanwhile are lost."
)


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the parser of the command."""
    one = subparsers.add_parser(
        "force-quorum", help="declare a job's missing nodes dead for good: the others go on without them"
    )
    one.add_argument(
        "run_dir",
        type=Path,
        metavar="RUN_DIR",
        help="CKPT_DIR/RUN_ID on a node that is left; where it holds several nodes, one node's directory",
    )
    one.add_argument("--yes", action="store_true", help="do it; without this, only print what would be done")
    one.set_defaults(function=force_quorum)


def force_quorum(args: argparse.Namespace) -> int:
    """Print who is missing; with ``--yes``, declare them dead. Exit code 1 if nothing was done."""
    node_dir = _find_node_dir(args.run_dir)
    record = DurableStateFile(node_dir)
    known = record.state.quorum_state if record.state else QuorumState(0)
    if not known.newest_generation:
        raise UsageError(f"{node_dir}: this node has been in no world yet, so no quorum is lacking.")
    write_stdout(_describe_situation(node_dir, known))
    if not args.yes:
        write_stdout("Nothing was done. If all of them are dead for good, run this again with --yes.\n")
        return constants.EXIT_JOB_ERROR
    record.request_force_quorum(known.newest_generation)
    write_stdout(
        f"Declared dead: the missing members of generation {known.newest_generation}. See the agent's log.\n"
    )
    return constants.EXIT_SUCCESS


def _find_node_dir(path: Path) -> Path:
    """Return the directory of the one node that is meant."""
    if (path / RENDEZVOUS_STATE_FILE).is_file():
        return path
    found = sorted(one.parent for one in path.glob(f"*/{RENDEZVOUS_STATE_FILE}"))
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(
            f"{path}: no node has taken part in a rendezvous here. Give CKPT_DIR/RUN_ID of a node of the job."
        )
    names = ", ".join(one.name for one in found[:5])
    raise UsageError(f"{path}: {len(found)} nodes are here ({names}): give the directory of one of them.")


def _describe_situation(node_dir: Path, known: QuorumState) -> str:
    members = dict.fromkeys(one for world in known.voting_views for one in known.live_members(world))
    text = f"Generation {known.newest_generation}, of which {node_dir.name} knows: {format_node_names(members)}.\n"
    job = status.read_agent_endpoint(node_dir / constants.AGENT_ENDPOINT_FILE)
    try:
        said = job.query_leader() if job else None
    except RendezvousLostError:
        said = None
    if said is None:
        return text + (
            f"No agent of {node_dir.name} answers. When one takes part again, members that have not joined "
            f"count as dead.\n{RISK_NOTE}\n"
        )
    if said["world"]:
        raise UsageError(f"{node_dir}: generation {said['generation']} runs, so no quorum is lacking.")
    missing = ", ".join(map(str, said.get("missing", []))) or said.get("waiting") or "members not known here"
    return text + f"Missing: {missing}.\n{RISK_NOTE}\n"
