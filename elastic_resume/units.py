"""Read a duration as people write it, for every flag, variable and fault plan.

A number alone is seconds; with a unit it is that many ms, s, m, h or d.

Write a count with its noun, for every message.
"""

from __future__ import annotations

import math
import re

from elastic_resume.errors import ConfigError

LONGEST_S = 1e9  # thirty years: more is a typing error
_DURATION = re.compile(r"((?:[0-9]{1,18}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)(ms|s|m|h|d)?")
_UNIT_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(what: str, text: object, *, least_s: float = 0.0, most_s: float = LONGEST_S) -> float:
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
            f"{what} is {given[:100]!r}: write a time in seconds (30) or with a unit (500ms, 30s, 5m, 1.5h)."
        )
    found_s = float(match[1]) * _UNIT_S[match[2] or "s"]
    if not least_s <= found_s <= most_s:
        raise ConfigError(f"{what} is {given[:100]!r}: write a time {_limits(found_s, least_s, most_s)}.")
    return found_s


def _limits(found_s: float, least_s: float, most_s: float) -> str:
    if least_s > 0 and most_s < LONGEST_S:
        return f"from {least_s:.12g}s to {most_s:.12g}s"
    return f"of {least_s:.12g}s or more" if found_s < least_s else f"of {most_s:.12g}s or less"


def amount(count: int, noun: str, plural: str = "") -> str:
    """Return ``1 step``, ``2 steps``."""
    return f"{count} {noun}" if count == 1 else f"{count} {plural or f'{noun}s'}"


def verb(count: int, one: str, many: str) -> str:
    """Return ``one`` or ``many``: the form of a verb behind `amount`."""
    return one if count == 1 else many
