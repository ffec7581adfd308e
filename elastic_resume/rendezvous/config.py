"""What a user decides about the rendezvous of one job, read once from flags or from ``--rdzv-conf``.

Every `Terms` holds valid values. Reads the token's file and nothing else; opens no socket.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_resume.errors import ConfigError
from elastic_resume.policy.divergence import RESUME_FROM_MAJORITY, STOP
from elastic_resume.rendezvous.core.events import Settings
from elastic_resume.rendezvous.endpoint import Endpoint, parse_endpoints
from elastic_resume.rendezvous.net.protocol import load_token
from elastic_resume.units import parse_duration

# Keys of --rdzv-conf, and the flags of `elastic-resume run` of the same meaning.
CONF_FLAGS = {
    "node_timeout": "--node-timeout",
    "settle": "--settle",
    "join_timeout": "--join-timeout",
    "token_file": "--rdzv-token-file",
}


@dataclass(frozen=True)
class RendezvousConfig:
    """The valid terms of one job. ``secret``: the token is the user's, and not made from the job's name."""

    run_id: str
    endpoints: tuple[Endpoint, ...]
    min_nodes: int
    max_nodes: int
    local_addr: str | None
    token: bytes = field(repr=False)
    has_user_token: bool
    node_timeout_s: float = 3.0  # a tenth of it is the time between heartbeats
    last_call_s: float = 3.0  # at a first start: how long after the last newcomer the world waits for another
    join_timeout_s: float = 600.0
    on_divergence: str = STOP  # or RESUME; the leader's counts

    @classmethod
    def parse(
        cls,
        endpoints: str,
        conf: Mapping[str, Any],
        environ: Mapping[str, str],
        *,
        run_id: str,
        nnodes: tuple[int, int],
        local_addr: str | None,
    ) -> RendezvousConfig:
        """Read the terms from ``--rdzv-endpoint``, the values by name, and the environment (the token).

        Raises:
            ConfigError: one of them is wrong.

        """
        for key in conf:
            if key not in CONF_FLAGS:
                near = difflib.get_close_matches(key, CONF_FLAGS, 1)
                hint = f" Did you mean {near[0]}?" if near else ""
                raise ConfigError(f"--rdzv-conf: unknown key {key}.{hint}")
        given = {key: value for key, value in conf.items() if value is not None}
        path = given.get("token_file")
        token, secret = load_token(Path(path) if path else None, environ, run_id)
        return cls(
            run_id=run_id,
            endpoints=parse_endpoints(endpoints),
            min_nodes=nnodes[0],
            max_nodes=nnodes[1],
            local_addr=local_addr or None,
            token=token,
            has_user_token=secret,
            node_timeout_s=_parse_seconds(given, "node_timeout", 3.0, 0.5),
            last_call_s=_parse_seconds(given, "settle", 3.0, 0.0),
            join_timeout_s=_parse_seconds(given, "join_timeout", 600.0, 1.0),
        )

    def settings(self, own_address: str) -> Settings:
        """What the core needs; ``own_address`` stands for the one candidate that lets the kernel choose."""
        addresses = tuple(str(one) if one.port else own_address for one in self.endpoints)
        return Settings(
            candidates=addresses,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            node_timeout_s=self.node_timeout_s,
            last_call_s=self.last_call_s,
            join_timeout_s=self.join_timeout_s,
            single_node=self.single_node,
            resume_from_majority=self.on_divergence == RESUME_FROM_MAJORITY,
        )

    @property
    def single_node(self) -> bool:
        """Whether nobody can find this node: a person's or a scheduler's word that there is no other."""
        return self.max_nodes == 1 and not self.endpoints[0].port


def _parse_seconds(conf: Mapping[str, Any], key: str, default_s: float, minimum_s: float) -> float:
    return parse_duration(CONF_FLAGS[key], conf.get(key, default_s), min_s=minimum_s, max_s=86400)
