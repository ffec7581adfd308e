"""What the value of each setting may be: from text, or what a script passed, to a value that is valid.

Promise: what comes back is valid, and anything else is a ConfigError that names the setting, what was given
and what may be written. Does not know where a value came from, nor what it does.
"""

from __future__ import annotations

import contextlib
import difflib
import ipaddress
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from elastic_resume import contract
from elastic_resume.durations import parse_duration
from elastic_resume.errors import ConfigError

MIN_KEEP = 2
RESUME_MODES = ("auto", "must", "never")
DIVERGENCE_POLICIES = ("stop", "resume-from-majority")
REQUEUE_MODES = ("auto", "off")
MAX_MEMORY_BYTES = 2**60  # more is a typing error; and the number still fits every word it may be kept in
_UNITS = {unit: power for power, unit in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"(\d{1,19}(?:\.\d{1,9})?) ?(?:([kmgt])(i?b|i)?)?", re.IGNORECASE)


def near(name: str, known: Iterable[str]) -> str:
    """`` Did you mean …?``, or nothing when no known name is like ``name``."""
    found = list(dict.fromkeys(n.replace("_", "-") for n in difflib.get_close_matches(name, list(known), 6)))
    return f" Did you mean {' or '.join(found[:3])}?" if found else ""


def listening(what: str, text: str) -> tuple[str, int]:
    """``[ADDRESS:]PORT`` as address and port: loopback where none is given, any port with 0."""
    host, _, port = text.strip().rpartition(":")
    address = host.strip("[]") or "127.0.0.1"
    with contextlib.suppress(ValueError):
        if re.fullmatch(r"\d{1,5}", port) and int(port) < 1 << 16:
            return str(ipaddress.ip_address(address)), int(port)
    raise ConfigError(
        f"--{what} is {text[:100]!r}: write PORT (of 127.0.0.1), or ADDRESS:PORT with a number for the "
        "address; 0.0.0.0:9400 is every network of this machine."
    )


def directory_name(what: str, name: object) -> str:
    """``name``, which can be the name of a directory."""
    if not re.fullmatch(contract.SAFE_NAME_PATTERN, str(name)):
        raise ConfigError(
            f"{what} {name!r} cannot be the name of a directory: use at most 128 letters, digits, '.', '_' "
            "and '-', beginning with a letter or digit."
        )
    return str(name)


def absolute(what: str, text: str) -> Path:
    """``text`` as an absolute path that the system can at least look for."""
    try:
        path = Path(text).expanduser().absolute()
        with contextlib.suppress(PermissionError):  # whoever uses it says what that needs
            path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # no such user's home, a name too long, a NUL
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{what} is {text[:200]!r}, which cannot be a path here: {reason}.") from error
    return path


def keep(value: Any) -> int:
    """How many checkpoints are kept on each node."""
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch(r"-?\d{1,9}", text):
        raise ConfigError(f"keep is {text!r}: write a whole number of checkpoints, {MIN_KEEP} or more.")
    if int(text) < MIN_KEEP:
        raise ConfigError(
            f"keep is {text}, which is too few: with one copy kept, a copy that turns out corrupt leaves "
            f"nothing to resume from. Write {MIN_KEEP} or more."
        )
    return int(text)


def resume_mode(value: str) -> str:
    """Return one of `RESUME_MODES`. A path, which earlier versions took, is told what to do instead."""
    if value not in RESUME_MODES:
        raise ConfigError(
            f"resume is {value[:100]!r}: write auto, must or never.{near(value, RESUME_MODES)} To begin with "
            "a checkpoint, load it into the model and the optimizer before er.resume(): a first start takes "
            "rank 0's values."
        )
    return value


def step_mark_s(value: Any) -> float:
    """Least seconds between two step marks, 0 for every step; the setting has no flag, only a variable."""
    return parse_duration(contract.ENV_STEP_MARK_S, value)


def snapshot_memory(value: Any) -> int | None:
    """How many bytes of a node's memory snapshots may take; None: ``auto``, 0: ``off``.

    4GB is four times 10⁹ bytes. 4G, 4Gi and 4GiB are four times 2³⁰, as Slurm reads the first and Kubernetes
    the second. A number alone is bytes.
    """
    text = str(value).strip()
    if text in {"auto", "off"}:
        return None if text == "auto" else 0
    size = None if isinstance(value, bool) else _bytes(text)
    if size is None:
        raise ConfigError(
            f"snapshot-memory is {text[:100]!r}: write a size (4GB, 512MiB, 1.5G), auto or off."
            + near(text, ("auto", "off"))
        )
    if size > MAX_MEMORY_BYTES:
        raise ConfigError(f"snapshot-memory is {text!r}, which is more than any node has.")
    return size


def size(what: str, text: str) -> int:
    """``text`` as bytes: 4GB is four times 10⁹, 4G, 4Gi and 4GiB four times 2³⁰."""
    found = _bytes(str(text).strip())
    if found is None:
        raise ConfigError(f"{what} is {str(text)[:100]!r}: write a size, as 4GB, 512MiB, 1.5G.")
    return found


def _bytes(text: str) -> int | None:
    match = _SIZE.fullmatch(text)
    # Half a byte is nothing that anybody means: a point needs a unit.
    if match is None or (match[2] is None and "." in text):
        return None
    power = _UNITS[match[2].lower()] if match[2] else 0
    # A whole number is not rounded on its way through a float: `to_env` may have written it.
    number = float(match[1]) if "." in match[1] else int(match[1])
    return int(number * (1000 if (match[3] or "").lower() == "b" else 1024) ** power)


def choice(setting: str, value: str, choices: Sequence[str]) -> str:
    """One of ``choices``, which are all that ``setting`` may be."""
    if value not in choices:
        raise ConfigError(
            f"{setting} is {value[:100]!r}: write {' or '.join(choices)}." + near(value, choices)
        )
    return value


def on_divergence(value: str) -> str:
    """What is done when replicas differ: one of `DIVERGENCE_POLICIES`."""
    return choice("on-divergence", value, DIVERGENCE_POLICIES)
