"""Define the status that an agent sends to a status client, check it, and request it.

A reply is one line of JSON, ``{"version": ..., "status": ...}``, or ``{"error": ...}``. The codec of the
rendezvous checks each field, so a reply has all members with the right types, or it is refused.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from elastic_resume import constants
from elastic_resume.mechanisms.mechanism import decode_body
from elastic_resume.mechanisms.registry import STATUS_MEMBERS
from elastic_resume.rendezvous.facts import FactBody
from elastic_resume.rendezvous.net.codec import ProtocolError, dump_json, from_json_value, to_json_value
from elastic_resume.rendezvous.net.status_server import RendezvousStatus, query_agent
from elastic_resume.report.generations import Incident

QUERY_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The status of one node. Ages count from its creation; counts and sums from the start of its agent."""

    generation: int = 0
    """The generation whose workers run; 0 for none."""
    step: int = 0
    """The newest step that they have finished."""
    steps_per_s: float = 0.0
    world_size: int = 0
    workers: int = 0
    snapshot_step: int | None = None
    snapshot_age_s: float = 0.0
    checkpoint_step: int | None = None
    checkpoint_age_s: float = 0.0
    commits: int = 0
    commit_s: float = 0.0
    commit_bytes: int = 0
    commit_failures: int = 0
    problem: str = ""
    """A problem of its disk or memory; empty without one."""
    proof: str = ""
    """The newest verdict about a resume, on the node of rank 0."""
    mechanisms: tuple[tuple[str, FactBody], ...] = ()
    """By name, the members of the status (`StatusMember`) that have a value."""


@dataclass(frozen=True, slots=True)
class KnownIncidents:
    """The incidents of the job since one node's agent started."""

    newest: tuple[Incident, ...] = ()
    by_kind: tuple[tuple[str, int], ...] = ()
    recomputed_steps: int = 0
    recovery_counts: tuple[int, ...] = ()
    """As `report.generations.IncidentTotals.recovery_buckets`."""
    recovery_s: float = 0.0

    @property
    def extent(self) -> tuple[int, int, int]:
        """Return a key that orders what several nodes know; the greatest knows most."""
        return sum(number for _, number in self.by_kind), self.recomputed_steps, sum(self.recovery_counts)


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """All that one agent replies: the rendezvous as it knows it, and its own node."""

    rendezvous: RendezvousStatus
    node_status: NodeStatus | None
    """None before the first sample."""
    status_age_s: float
    """The age of the sample."""
    incidents: KnownIncidents


def encode_reply(status: AgentStatus) -> bytes:
    """Return the line that `parse_reply` reads."""
    return dump_json({"version": constants.STATUS_VERSION, "status": to_json_value(status)})


def parse_reply(line: bytes) -> AgentStatus:
    """Parse and check a reply.

    Raises:
        ProtocolError: it is no status of this version, or says why there is none.
    """
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("its answer is not JSON") from error
    if not isinstance(reply, dict):
        raise ProtocolError("its answer is not a status")
    if "error" in reply:
        raise ProtocolError(str(reply["error"])[:500])
    if reply.get("version") != constants.STATUS_VERSION:
        raise ProtocolError(
            f"its status has version {str(reply.get('version'))[:16]!r}; "
            f"this command reads version {constants.STATUS_VERSION}"
        )
    return from_json_value(AgentStatus, reply.get("status"), "its status")


def fetch_status(address: str, run_id: str, key: bytes) -> AgentStatus:
    """Return the status of one agent; ``key`` comes from `derive_status_key`.

    Raises:
        ProtocolError: it is no agent of that job, refuses the key, or its answer is wrong.
        OSError: it cannot be reached, or does not answer in time.
        ValueError: ``address`` is not an address.
    """
    return parse_reply(query_agent(address, run_id, key, timeout_s=QUERY_TIMEOUT_S))


def describe_node(status: AgentStatus | None) -> dict[str, Any]:
    """Return the members of a node in the document; null without an answer or before the first sample.

    Ages are as of the reply, so the sample's own age is added to what it says.
    """
    if status is None or status.node_status is None:
        names = [field.name for field in fields(NodeStatus) if field.name != "mechanisms"]
        return dict.fromkeys(["status_age_s", *names, *(member.name for member in STATUS_MEMBERS)])
    members = {"status_age_s": status.status_age_s, **asdict(status.node_status)}
    bodies = dict(members.pop("mechanisms"))
    for member in STATUS_MEMBERS:
        body = bodies.get(member.name)
        members[member.name] = None if body is None else asdict(decode_body(member.kind, body))
    for saved_state in ("snapshot", "checkpoint"):
        age_s = round(members[f"{saved_state}_age_s"] + status.status_age_s, 3)
        members[f"{saved_state}_age_s"] = None if members[f"{saved_state}_step"] is None else age_s
    return members
