"""Define what a mechanism may add, and how its values travel as facts.

A *mechanism* is optional: training, restart and resume work without it. Its package holds all of it: what it
measures in the workers, what the leader judges, what the agents do, and how people read of it. The rest of
elastic_resume knows it by its entry in `mechanisms.registry` alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeVar

from elastic_resume.rendezvous.core.facts import FactBody, Topic
from elastic_resume.rendezvous.net.codec import ProtocolError, dump_json, from_json_value, to_json_value

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One mechanism, and the seams that it uses."""

    topic: Topic | None = None
    """What its agents tell the leader, and how the leader judges it."""


def encode_body(value: Any) -> FactBody:
    """Return a frozen dataclass as the body of a fact."""
    return FactBody(dump_json(to_json_value(value)).decode())


def decode_body(kind: type[T], body: FactBody) -> T:
    """Return the dataclass that `encode_body` encoded.

    Raises:
        ValueError: it is malformed.

    """
    try:
        return from_json_value(kind, json.loads(body))
    except (ProtocolError, RecursionError) as error:
        raise ValueError(str(error)) from error
