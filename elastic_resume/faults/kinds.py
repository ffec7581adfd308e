"""Which faults there are: whom each hits, what can be set, and what it takes to do it here.

Data, and no decision. `plan.py` reads it when a plan is read, `strike.py` does what it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WORKER, NODE, NODES = "worker", "node", "nodes"
PROCESSES, NETWORK, DISK = "", "a network", "a disk"
OWN = {"loopback": (), "namespaces": (NETWORK, DISK)}
"""What each node has of its own, by `grounds.Hosts`."""


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    ``hits``: a worker, a node, or several nodes. ``needs``: what each node must have of its own; loopback
    nodes have none of it. ``settings``: what can be set, by field of `fault.Fault`, each with its default
    (None: for ever, or never). ``weight``: how often a mix that nobody wrote draws it; 0: never, since a job
    need not survive it, or shows nothing when it does.
    """

    hits: str
    says: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs: str = PROCESSES
    weight: int = 0
    inside: bool = False  # it happens in the process itself, at a failpoint


def _kinds() -> dict[str, Kind]:
    return {
        # Processes. What is killed is started again, as a cluster would; a disk survives.
        "kill-worker": Kind(WORKER, "the worker gets a signal", {"signal": "SIGKILL"}, weight=5),
        "kill-agent": Kind(NODE, "SIGKILL to the agent alone", {"back_after_s": 1.0}, weight=2),
        "kill-node": Kind(NODE, "SIGKILL to all of the node", {"back_after_s": 2.0}, weight=4),
        "poweroff": Kind(NODE, "silence, then death", {"back_after_s": 6.0}, NETWORK, 2),
        "stop-worker": Kind(WORKER, "SIGSTOP to the worker: a hang", {"for_s": None}),
        "stop-agent": Kind(NODE, "SIGSTOP to the agent", {"for_s": 6.0}, weight=1),
        "preemption": Kind(
            NODE, "a notice; the node saves and leaves, and comes back", {"back_after_s": 2.0}, weight=2
        ),
        # Within a worker, at the step.
        "raise": Kind(WORKER, "an exception", {"error": "RuntimeError"}, weight=1, inside=True),
        "exit": Kind(WORKER, "the process ends itself", {"code": 9}, weight=1, inside=True),
        "hold-gil": Kind(
            WORKER, "a thread keeps the interpreter: a hang", {"for_s": None}, inside=True
        ),
        "slow-rank": Kind(
            WORKER, "each step takes longer", {"delay_s": 0.2, "for_s": 5.0}, weight=1, inside=True
        ),
        "skip-collective": Kind(WORKER, "one all-reduce without this rank: replicas differ", inside=True),
        "out-of-memory": Kind(WORKER, "memory until the kernel kills", {"limit_bytes": 1 << 30}, inside=True),
        # Links.
        "cut": Kind(NODE, "the node's link is silent, both ways", {"for_s": 6.0}, NETWORK, 2),
        "cut-out": Kind(NODE, "what the node sends is lost", {"for_s": 6.0}, NETWORK, 1),
        "cut-in": Kind(NODE, "what is sent to the node is lost", {"for_s": 6.0}, NETWORK, 1),
        "partition": Kind(NODES, "groups that cannot reach each other", {"for_s": 6.0}, NETWORK, 1),
        "packet-loss": Kind(NODE, "packets are lost", {"percent": 5.0, "for_s": 5.0}, NETWORK, 1),
        "slow-link": Kind(
            NODE, "the link carries less", {"bytes_per_s": 1_000_000, "for_s": 5.0}, NETWORK, 1
        ),
        # Disks.
        "disk-full": Kind(NODE, "no byte is left (ENOSPC)", {"for_s": 5.0}, DISK, 1),
        "disk-error": Kind(NODE, "the disk fails (EIO)", {"for_s": 5.0}, weight=1),
        "slow-disk": Kind(NODE, "each request takes longer", {"delay_s": 0.2, "for_s": 5.0}, weight=1),
        "torn-write": Kind(NODE, "the newest checkpoint loses its end", {"fraction": 0.5}, weight=1),
        "bit-flip": Kind(NODE, "one bit of the newest checkpoint", {"fraction": 0.9}, weight=1),
        "wipe-disk": Kind(NODE, "the node comes back with no disk", {"back_after_s": 2.0}, weight=1),
        # The rest.
        "corrupt-message": Kind(NODE, "a damaged message between agents", {"sender": "peer"}, weight=1),
    }  # fmt: skip


KINDS = _kinds()
SETTINGS = sorted({name for kind in KINDS.values() for name in kind.settings})

ROLES = {
    "random": "whom the seed says",
    "leader": "the node whose agent leads the rendezvous",
    "rank-0": "rank 0, or the node that it is on",
    "lead": "the lowest rank of a node",
    "all": "every one of them, in the same moment",
}

# What a person calls a moment, and the failpoint that it is.
PHASES = {
    "in rendezvous": "rendezvous.record",
    "in resume": "resume.planned",
    "in transfer": "transfer.send",
    "in copy": "snapshot.copying",
    "in commit": "commit.after-data",
}
IN_WORKER = (
    "resume.planned",
    "resume.loaded",
    "transfer.send",
    "transfer.receive",
    "snapshot.begun",
    "snapshot.written",
    "snapshot.copying",
    "snapshot.copied",
    "snapshot.marked",
)
IN_AGENT = (
    "rendezvous.record",
    "keeper.written",
    "commit.after-data",
    "commit.before-manifest",
    "commit.before-rename",
    "commit.after-rename",
)


def point_of(phase: str) -> str:
    """The failpoint of a phase, which may be named itself; empty when there is none."""
    name = PHASES.get(phase, phase)
    return name if name in IN_WORKER or name in IN_AGENT else ""
