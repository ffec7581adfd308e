"""What the flags of `elastic-resume manifest` have in common, whichever scheduler it is for.

Promise: what is given back is right in its form; else a ConfigError that names the flag. Knows no scheduler.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from elastic_resume.errors import ConfigError

MAX_NODES = 10_000


class _Command(argparse.Action):
    """Takes all that is left, flags of the script too."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        del option_string
        words = list(values or [])
        words = words[1:] if words[:1] == ["--"] else words
        if not words:
            parser.error("the script is missing: write -- SCRIPT [ARGUMENTS] last")
        setattr(namespace, self.dest, words)


def add_command(parser: argparse.ArgumentParser) -> None:
    """Add what `elastic-resume run` is to get, which is the rest of the line."""
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        action=_Command,
        metavar="-- SCRIPT [ARGUMENTS]",
        help="what `elastic-resume run` gets",
    )


def nodes_of(text: str) -> tuple[int, int]:
    """Read ``--nodes``: the fewest that train, and how many there are."""
    match = re.fullmatch(r"(?:([0-9]{1,5}):)?([0-9]{1,5})", text)
    least, nodes = (int(match[1] or 1), int(match[2])) if match else (0, 0)
    if not 1 <= least <= nodes <= MAX_NODES:
        raise ConfigError(f"--nodes is {text!r}: write N or MIN:MAX with 1 <= MIN <= MAX <= {MAX_NODES}.")
    return least, nodes


def name_of(command: Sequence[str]) -> str:
    """Name a job after its script: the first word that ends in .py, or else that is no flag."""
    plain = [word for word in command if not word.startswith("-")]
    script = next((word for word in plain if word.endswith(".py")), plain[0] if plain else "job")
    words = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(script).stem.lower()).strip("-")
    return (words if words[:1].isalpha() else f"job-{words}".strip("-"))[:40].rstrip("-")


def whole(flag: str, text: str, least: int, most: int) -> int:
    """Read a whole number from ``least`` to ``most``."""
    if not re.fullmatch(r"[0-9]{1,6}", str(text)) or not least <= int(text) <= most:
        raise ConfigError(f"{flag} is {text!r}: write a whole number from {least} to {most}.")
    return int(text)
