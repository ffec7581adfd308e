"""``elastic-resume force-quorum``: let the remaining nodes continue without a majority.

If more than half of a view's members are unreachable, the others wait, because the missing ones may still
train. An operator who knows that they are dead for good declares it with this command. It writes one
small file into a node's directory. The node's agent, running or started later, reads it once and informs
the leader.
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
    "If any of them is still alive, two worlds train at the same time. Once they can reach each other, the "
    "one with the lower generation stops, and its steps since then are lost."
)


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the parser of the command."""
    parser = subparsers.add_parser(
        "force-quorum", help="declare a job's missing nodes dead, so that the others continue without them"
    )
    parser.add_argument(
        "run_dir",
        type=Path,
        metavar="RUN_DIR",
        help="CKPT_DIR/RUN_ID on a remaining node; one node's directory if it holds several",
    )
    parser.add_argument("--yes", action="store_true", help="without it, only print which nodes are missing")
    parser.set_defaults(function=force_quorum)


def force_quorum(args: argparse.Namespace) -> int:
    """Print the missing members; with ``--yes``, declare them dead. Return 1 if nothing was done."""
    node_dir = _find_node_dir(args.run_dir)
    state_file = DurableStateFile(node_dir)
    quorum_state = state_file.state.quorum_state if state_file.state else QuorumState(0)
    if not quorum_state.newest_generation:
        raise UsageError(f"{node_dir}: this node has been in no world yet, so there is no quorum to force.")
    write_stdout(_describe_situation(node_dir, quorum_state))
    if not args.yes:
        write_stdout(
            "Nothing was changed. If all of them are dead for good, run this command again with --yes.\n"
        )
        return constants.EXIT_JOB_ERROR
    state_file.request_force_quorum(quorum_state.newest_generation)
    write_stdout(
        f"Declared dead: the missing members of generation {quorum_state.newest_generation}. "
        "The agent logs the result.\n"
    )
    return constants.EXIT_SUCCESS


def _find_node_dir(path: Path) -> Path:
    """Return the directory of the one node at ``path``."""
    if (path / RENDEZVOUS_STATE_FILE).is_file():
        return path
    found = sorted(file.parent for file in path.glob(f"*/{RENDEZVOUS_STATE_FILE}"))
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(
            f"{path}: no node has taken part in a rendezvous here. Give CKPT_DIR/RUN_ID of a node of the job."
        )
    names = ", ".join(file.name for file in found[:5])
    raise UsageError(f"{path}: {len(found)} nodes are here ({names}): give the directory of one of them.")


def _describe_situation(node_dir: Path, known: QuorumState) -> str:
    """Describe which members are missing.

    Raises:
        UsageError: a world runs, so there is no quorum to force.
    """
    members = dict.fromkeys(member for world in known.voting_views for member in known.live_members(world))
    text = (
        f"Generation {known.newest_generation}, as {node_dir.name} knows it: {format_node_names(members)}.\n"
    )
    endpoint = status.read_agent_endpoint(node_dir / constants.AGENT_ENDPOINT_FILE)
    try:
        document = endpoint.query_leader() if endpoint else None
    except RendezvousLostError:
        document = None
    if document is None:
        return text + (
            f"No agent of {node_dir.name} answers. When it starts again, members that have not joined "
            f"count as dead.\n{RISK_NOTE}\n"
        )
    if document["world"]:
        raise UsageError(
            f"{node_dir}: generation {document['generation']} runs, so there is no quorum to force."
        )
    missing = ", ".join(map(str, document.get("missing", []))) or document.get("waiting")
    return text + f"Missing: {missing or 'members unknown to this node'}.\n{RISK_NOTE}\n"
