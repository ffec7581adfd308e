"""Parse the rendezvous settings of one job from flags or from ``--rdzv-conf``.

Every `RendezvousConfig` made by `RendezvousConfig.parse` is valid. Parsing reads the token file and opens no
socket.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elastic_resume.errors import ConfigError
from elastic_resume.rendezvous.core.interface import RendezvousSettings
from elastic_resume.rendezvous.endpoint import Endpoint, parse_endpoints
from elastic_resume.rendezvous.net.protocol import load_token
from elastic_resume.units import parse_duration

CONF_KEYS = {
    "join_timeout": "TIME: how long a node waits for a rendezvous (default 10m)",
    "last_call_timeout": "TIME: how long a first start waits for one more node (default 3s; in pods 35s)",
    "strict": "true: count no votes of dead nodes (docs/concepts/worlds.md)",
    "token_file": "FILE: 0600, with the secret of all nodes, 16 bytes or more (or ELASTIC_RESUME_TOKEN)",
}
"""The keys of --rdzv-conf, each with its help."""


@dataclass(frozen=True)
class RendezvousConfig:
    """The settings of one job. ``has_user_token`` is false if the token is derived from the job's name."""

    run_id: str
    endpoints: tuple[Endpoint, ...]
    local_addr: str | None
    token: bytes = field(repr=False)
    has_user_token: bool
    settings: RendezvousSettings
    """Of the state machine; a candidate's open port is filled in by `settings_at`."""

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
        node_timeout_s: float = 3.0,
        source: str = "--rdzv-conf",
    ) -> RendezvousConfig:
        """Parse ``--rdzv-endpoint``, the values of ``conf``, and the token from its file or the environment.

        ``source`` says for an error where ``conf`` came from.

        Raises:
            ConfigError: a setting is wrong.

        """
        for key in conf:
            if key not in CONF_KEYS:
                similar = difflib.get_close_matches(key, CONF_KEYS, 1)
                hint = f" Did you mean {similar[0]}?" if similar else ""
                raise ConfigError(f"{source}: unknown key {key}.{hint}")

        def parse_seconds(key: str, default_s: float, min_s: float) -> float:
            value = conf.get(key, default_s)
            return parse_duration(f"{source} {key}", value, min_s=min_s, max_s=86400)

        path = conf.get("token_file")
        token, has_user_token = load_token(Path(path) if path else None, environ, run_id)
        candidates = parse_endpoints(endpoints)
        min_nodes, max_nodes = nnodes
        settings = RendezvousSettings(
            tuple(map(str, candidates)),
            min_nodes,
            max_nodes,
            node_timeout_s=node_timeout_s,
            last_call_timeout_s=parse_seconds("last_call_timeout", 3.0, 0.0),
            join_timeout_s=parse_seconds("join_timeout", 600.0, 1.0),
            # No other node can exist: one node at most, at a port that the kernel chooses.
            single_node=max_nodes == 1 and not candidates[0].port,
            is_strict=_parse_bool(f"{source} strict", conf.get("strict", False)),
        )
        return cls(run_id, candidates, local_addr or None, token, has_user_token, settings)

    def settings_at(self, own_address: str) -> RendezvousSettings:
        """Return the settings; ``own_address`` replaces a candidate with an open port."""
        candidates = tuple(str(endpoint) if endpoint.port else own_address for endpoint in self.endpoints)
        return replace(self.settings, candidates=candidates)


def _parse_bool(name: str, value: Any) -> bool:
    """Return a switch of the configuration."""
    text = str(value).lower()
    if text not in {"true", "false"}:
        raise ConfigError(f"{name}: {value!r} is neither true nor false.")
    return text == "true"
