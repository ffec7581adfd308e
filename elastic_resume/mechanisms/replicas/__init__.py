"""Compare the nodes' replicas while they train, and end the job if they differ.

At the steps that `judge` chooses, each node takes a snapshot. `digester` hashes it in the agent, and `judge`
compares the digests of all nodes at the leader. The event at the end of the job is::

    replicas-differ   generation, step, agreed_step (the newest step with equal replicas), nodes [groups of
                      equal nodes, largest first], diverged_nodes [node]

The ranks' own comparisons, which need no agent, are those of `restore.replica_check`.
"""

from __future__ import annotations

from elastic_resume.mechanisms.mechanism import Mechanism, lazily
from elastic_resume.mechanisms.replicas.description import ALERT
from elastic_resume.mechanisms.replicas.judge import DIGESTS, is_comparison_due

REPLICAS = Mechanism(
    topic=DIGESTS,
    make_agent_part=lazily("replicas.digester", "SnapshotDigester"),
    is_reading_due=is_comparison_due,
    alerts=(ALERT,),
)
