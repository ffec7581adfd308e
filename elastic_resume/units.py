"""Parse durations and sizes as people write them, and format bytes, counts, addresses and foreign texts.

Every flag and variable uses these parsers. A bare number is seconds or bytes.
"""

from __future__ import annotations

import math
import re

from elastic_resume.errors import ConfigError

MAX_TEXT_CHARS = 500
MAX_DURATION_S = 1e9  # about thirty years; a longer one is surely a typo
_DURATION = re.compile(r"((?:[0-9]{1,18}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)(ms|s|m|h|d)?")
_UNIT_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SIZE = re.compile(r"(\d{1,19}(?:\.\d{1,9})?) ?(?:([kmgt])(i?b|i)?)?", re.IGNORECASE)
_QUANTITY = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)([kMGTPE]|[KMGTPE]i)?")
_QUANTITY_POWERS = ("", "K", "M", "G", "T", "P", "E")
_POWER_BY_UNIT = {unit: power for power, unit in enumerate("kmgt", start=1)}


def parse_duration(setting: str, text: object, *, min_s: float = 0.0, max_s: float = MAX_DURATION_S) -> float:
    """Return the seconds in ``300``, ``5m``, ``30s``, ``1.5h`` or ``500ms``.

    Args:
        setting: the flag or variable, for the error message.
        text: the given value.
        min_s: the shortest accepted duration.
        max_s: the longest accepted duration.

    Raises:
        ConfigError: the text is empty, negative, not a duration, or out of range.

    """
    given = str(text).strip()
    match = _DURATION.fullmatch(given)
    if match is None or math.isinf(float(match[1])):
        raise ConfigError(
            f"{setting} is {given[:100]!r}: write a time in seconds (30) "
            "or with a unit (500ms, 30s, 5m, 1.5h)."
        )
    value_s = float(match[1]) * _UNIT_S[match[2] or "s"]
    if not min_s <= value_s <= max_s:
        raise ConfigError(
            f"{setting} is {given[:100]!r}: write a time {_describe_limits(value_s, min_s, max_s)}."
        )
    return value_s


def _describe_limits(value_s: float, min_s: float, max_s: float) -> str:
    if min_s > 0 and max_s < MAX_DURATION_S:
        return f"from {min_s:.12g}s to {max_s:.12g}s"
    return f"of {min_s:.12g}s or more" if value_s < min_s else f"of {max_s:.12g}s or less"


def parse_size(setting: str, text: object, *, hint: str = "write a size (4GB, 512MiB, 1.5G).") -> int:
    """Return the bytes in ``4GB`` (4 * 10⁹), or in ``4G``, ``4Gi`` or ``4GiB`` (4 * 2³⁰).

    Slurm reads ``4G`` and Kubernetes reads ``4Gi`` as powers of two, and so does this parser.

    Args:
        setting: the flag or variable, for the error message.
        text: the given value.
        hint: the end of the error message: what to write.

    Raises:
        ConfigError: the text is not a size.

    """
    given = str(text).strip()
    match = None if isinstance(text, bool) else _SIZE.fullmatch(given)
    if match is None or (match[2] is None and "." in given):  # half a byte is surely a typo
        raise ConfigError(f"{setting} is {given[:100]!r}: {hint}")
    base = 1000 if (match[3] or "").lower() == "b" else 1024
    power = _POWER_BY_UNIT[match[2].lower()] if match[2] else 0
    # An integer stays exact: it may be a byte count that `Settings.to_env` wrote.
    number = float(match[1]) if "." in match[1] else int(match[1])
    return int(number * base**power)


def parse_kubernetes_quantity(setting: str, text: str) -> int:
    """Return the bytes in a size as Kubernetes reads it: ``4Gi`` (4 * 2³⁰) or ``4G`` (4 * 10⁹).

    Raises:
        ConfigError: the text is not such a size, or less than one byte.

    """
    match = _QUANTITY.fullmatch(text)
    size = 0
    if match is not None:
        base = 1024 if (match[2] or "").endswith("i") else 1000
        power = _QUANTITY_POWERS.index((match[2] or "")[:1].upper())
        size = int((float(match[1]) if "." in match[1] else int(match[1])) * base**power)
    if not 1 <= size < 1 << 63:
        raise ConfigError(f"{setting} is {text[:100]!r}: write a size as 4Gi, 512Mi or 2G, below 8Ei.")
    return size


def format_bytes(count: int | None) -> str:
    """Return a byte count in powers of ten with three digits, as ``604 MB``; ``-`` for None."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if value >= 99.5 or unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def format_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun, as ``1 step`` or ``2 steps``."""
    return f"{count} {noun}" if count == 1 else f"{count} {plural or f'{noun}s'}"


def choose_verb(count: int, singular: str, plural: str) -> str:
    """Return the form of a verb that follows `format_count`."""
    return singular if count == 1 else plural


def to_printable(text: str, limit: int = MAX_TEXT_CHARS) -> str:
    """Return one line of printable text with at most ``limit`` characters."""
    text = "".join(char if char.isprintable() else " " for char in text[: limit + 1])
    return text if len(text) <= limit else text[: limit - 1] + "…"
