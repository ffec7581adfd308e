"""Keep apart nodes that cannot reach each other, although both reach the leader.

`probe` looks for them on each node, and `judge` ends the view that has two of them.
"""

from __future__ import annotations

from elastic_resume.mechanisms.mechanism import AgentContext, AgentPart, Mechanism
from elastic_resume.mechanisms.unreachable_peers.judge import UNREACHABLE


def _make_agent_part(context: AgentContext) -> AgentPart:
    from elastic_resume.mechanisms.unreachable_peers.probe import PeerProbe  # noqa: PLC0415 - agents only

    return PeerProbe(context)


UNREACHABLE_PEERS = Mechanism(topic=UNREACHABLE, make_agent_part=_make_agent_part)
