"""Keep apart nodes that cannot reach each other, although both reach the leader.

`probe` looks for them on each node, and `judge` ends the view that has two of them.
"""

from __future__ import annotations

from elastic_resume.mechanisms.mechanism import Mechanism, lazily
from elastic_resume.mechanisms.unreachable_peers.judge import UNREACHABLE

UNREACHABLE_PEERS = Mechanism(
    topic=UNREACHABLE,
    make_agent_part=lazily("unreachable_peers.probe", "PeerProbe"),
)
