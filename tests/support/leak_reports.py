"""Remove the leak reports that triton prints at exit from torch 2.15 on."""

from __future__ import annotations

import re

_REPORT = re.compile(
    r"^(?:nanobind: (?:leaked \d+ \w+!|this is likely caused by .*)"
    r"| - leaked (?:instance|type|function|keep_alive record).*| - \.\.\. skipped remainder"
    r"|See https://nanobind\.readthedocs\.io/\S*)\n?",
    re.MULTILINE,
)


def without_leaks(stderr: str) -> str:
    """Return ``stderr`` without nanobind's reports."""
    return _REPORT.sub("", stderr)
