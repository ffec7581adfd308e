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
from elastic_resume.policy.divergence import RESUME, STOP
from elastic_resume.rendezvous.core.events import Settings
from elastic_resume.rendezvous.endpoint import Endpoint, parse_endpoints
from elastic_resume.rendezvous.net.protocol import read_token
from elastic_resume.units import parse_duration

# Keys of --rdzv-conf, and the flags of `elastic-resume run` of the same meaning.
KEYS = {
    "node_timeout": "--node-timeout",
    "settle": "--settle",
    "join_timeout": "--join-timeout",
    "token_file": "--rdzv-token-file",
}


@dataclass(frozen=True)
class Terms:
    """The valid terms of one job. ``secret``: the token is the user's, and not made from the job's name."""

    run_id: str
    endpoints: tuple[Endpoint, ...]
    min_nodes: int
    max_nodes: int
    local_addr: str | None
    token: bytes = field(repr=False)
    secret: bool
    node_timeout_s: float = 3.0  # a tenth of it is the time between heartbeats
    settle_s: float = 3.0  # at a first start: how long after the last newcomer the world waits for another
    join_timeout_s: float = 600.0
    on_divergence: str = STOP  # or RESUME; the leader's counts

    @classmethod
    def read(
        cls,
        endpoint: str,
        conf: Mapping[str, Any],
        environ: Mapping[str, str],
        *,
        run_id: str,
        nodes: tuple[int, int],
        local_addr: str | None,
    ) -> Terms:
        """Read the terms from ``--rdzv-endpoint``, the values by name, and the environment (the token).

        Raises:
            ConfigError: one of them is wrong.

        """
        for key in conf:
            if key not in KEYS:
                near = difflib.get_close_matches(key, KEYS, 1)
                hint = f" Did you mean {near[0]}?" if near else ""
                raise ConfigError(f"--rdzv-conf: unknown key {key}.{hint}")
        given = {key: value for key, value in conf.items() if value is not None}
        path = given.get("token_file")
        token, secret = read_token(Path(path) if path else None, environ, run_id)
        return cls(
            run_id=run_id,
            endpoints=parse_endpoints(endpoint),
            min_nodes=nodes[0],
            max_nodes=nodes[1],
            local_addr=local_addr or None,
            token=token,
            secret=secret,
            node_timeout_s=_seconds(given, "node_timeout", 3.0, 0.5),
            settle_s=_seconds(given, "settle", 3.0, 0.0),
            join_timeout_s=_seconds(given, "join_timeout", 600.0, 1.0),
        )

    def settings(self, own_address: str) -> Settings:
        """What the core needs; ``own_address`` stands for the one candidate that lets the kernel choose."""
        addresses = tuple(str(one) if one.port else own_address for one in self.endpoints)
        return Settings(
            candidates=addresses,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            node_timeout_s=self.node_timeout_s,
            settle_s=self.settle_s,
            join_timeout_s=self.join_timeout_s,
            alone=self.alone,
            resume_from_majority=self.on_divergence == RESUME,
        )

    @property
    def alone(self) -> bool:
        """Whether nobody can find this node: a person's or a scheduler's word that there is no other."""
        return self.max_nodes == 1 and not self.endpoints[0].port


def _seconds(given: Mapping[str, Any], key: str, default: float, least: float) -> float:
    return parse_duration(KEYS[key], given.get(key, default), least_s=least, most_s=86400)
