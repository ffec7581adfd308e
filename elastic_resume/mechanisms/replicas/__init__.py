"""Compare the nodes' replicas while they train, and end the job if they differ.

At the steps that `judge` chooses, each node takes a snapshot. `digester` hashes it in the agent, and `judge`
compares the digests of all nodes at the leader. The event at the end of the job is::

    replicas-differ   generation, step, agreed_step (the newest step with equal replicas), nodes [groups of
                      equal nodes, largest first], diverged_nodes [node]

The ranks' own comparisons, which need no agent, are those of `restore.replica_check`.
"""

from __future__ import annotations

from elastic_resume.events import Event
from elastic_resume.mechanisms.mechanism import AlertKind, Mechanism, lazily
from elastic_resume.mechanisms.replicas.judge import DIGESTS, is_comparison_due


def _describe_difference(event: Event) -> str:
    nodes = [node for node in event.get("diverged_nodes") or () if isinstance(node, str)]
    which = f"of {', '.join(nodes)} differ from the majority" if nodes else "differ, and there is no majority"
    return f"replicas {which}; the job ends"


REPLICAS = Mechanism(
    topic=DIGESTS,
    make_agent_part=lazily("replicas.digester", "SnapshotDigester"),
    is_reading_due=is_comparison_due,
    alerts=(AlertKind("replicas-differ", _describe_difference, is_bad=True, is_worst=True),),
)
