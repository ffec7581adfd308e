"""Read a duration as people write it, for every flag, variable and fault plan.

A number alone is seconds; with a unit it is that many ms, s, m, h or d.

Write a count with its noun, for every message.
"""

from __future__ import annotations

import math
import re

from elastic_resume.errors import ConfigError

MAX_DURATION_S = 1e9  # thirty years: more is a typing error
_DURATION = re.compile(r"((?:[0-9]{1,18}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)(ms|s|m|h|d)?")
_UNIT_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(setting: str, text: object, *, min_s: float = 0.0, max_s: float = MAX_DURATION_S) -> float:
    """Return the seconds of ``300``, ``5m``, ``30s``, ``1.5h`` or ``500ms``.

    Args:
        what: the flag, key or variable, for the error.
        text: what was given.
        least_s: the shortest duration that is accepted, in seconds.
        most_s: the longest one.

    Raises:
        ConfigError: the text is empty, negative, not a duration, or out of range.

    """
    given = str(text).strip()
    match = _DURATION.fullmatch(given)
    if match is None or math.isinf(float(match[1])):
        raise ConfigError(
            f"{setting} is {given[:100]!r}: write a time in seconds (30) or with a unit (500ms, 30s, 5m, 1.5h)."
        )
    found_s = float(match[1]) * _UNIT_S[match[2] or "s"]
    if not min_s <= found_s <= max_s:
        raise ConfigError(
            f"{setting} is {given[:100]!r}: write a time {_describe_limits(found_s, min_s, max_s)}."
        )
    return found_s


def _describe_limits(value_s: float, min_s: float, max_s: float) -> str:
    if min_s > 0 and max_s < MAX_DURATION_S:
        return f"from {min_s:.12g}s to {max_s:.12g}s"
    return f"of {min_s:.12g}s or more" if value_s < min_s else f"of {max_s:.12g}s or less"


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Return ``1 step``, ``2 steps``."""
    return f"{count} {noun}" if count == 1 else f"{count} {plural or f'{noun}s'}"


def choose_verb(count: int, singular: str, plural: str) -> str:
    """Return ``one`` or ``many``: the form of a verb behind `amount`."""
    return singular if count == 1 else plural
