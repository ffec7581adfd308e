"""Parse Kubernetes' quantities and the time that a pod has to end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

from elastic_resume import constants
from elastic_resume.errors import ConfigError
from elastic_resume.units import parse_duration

_QUANTITY_PATTERN = re.compile(
    r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][0-9]{1,2})?"
)
_UNITS = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** (n + 1) for n, unit in enumerate(("k", "M", "G", "T", "P", "E"))},
    **{unit: Decimal(1024) ** (n + 1) for n, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))},
}


def read_termination_grace_s(environ: Mapping[str, str]) -> float | None:
    """Return the seconds between SIGTERM and SIGKILL for this pod; None if unknown.

    Raises:
        ConfigError: the value is no duration.

    """
    text = environ.get(constants.ENV_TERMINATION_GRACE_S, "").strip()
    if not text:
        return None
    return parse_duration(
        f"{constants.ENV_TERMINATION_GRACE_S} (the pod's terminationGracePeriodSeconds)", text, max_s=1e6
    )


def parse_quantity_bytes(text: str, setting: str) -> int:
    """Parse a Kubernetes quantity, such as 4Gi or 500M, to bytes.

    Raises:
        ConfigError: it is no quantity, or less than one byte.

    """
    match = _QUANTITY_PATTERN.fullmatch(text)
    if match is None:
        raise ConfigError(f"{setting} is {text!r}: write a size as 4Gi, 512Mi or 2G.")
    unit = match[2] or ""
    value = Decimal(match[1]) * (_UNITS[unit] if unit in _UNITS else Decimal(10) ** int(unit[1:]))
    if unit == "m":
        raise ConfigError(f"{setting} is {text!r}, and m is for thousandths of a byte: write Mi or M.")
    if not 1 <= value < 1 << 63:
        raise ConfigError(f"{setting} is {text!r}: more than nothing, and less than 8Ei.")
    return int(value)
