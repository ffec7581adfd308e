"""Parse the values of settings.

Each parser gets the setting's source, for its error, and the given value. A wrong value is a ConfigError of
one or two lines with the accepted forms.
"""

from __future__ import annotations

import contextlib
import difflib
import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from elastic_resume import constants
from elastic_resume.errors import ConfigError
from elastic_resume.policy.checkpoint_interval import IntervalSetting
from elastic_resume.units import parse_size

MIN_KEEP = 2
MAX_MEMORY_BYTES = 2**60  # a larger value is surely a typo; this one fits every integer type in use
ALLOWED_DRAIN_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")


def suggest_similar(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean …?`` with known names similar to ``name``, or an empty text."""
    matches = difflib.get_close_matches(name, list(known), 6)
    names = list(dict.fromkeys(match.replace("_", "-") for match in matches))
    return f" Did you mean {' or '.join(names[:3])}?" if names else ""


def parse_listen_address(setting: str, value: object) -> tuple[str, int]:
    """Parse ``[ADDRESS:]PORT`` into address and port. The default address is loopback."""
    text = str(value)
    host, _, port = text.strip().rpartition(":")
    address = host.strip("[]") or "127.0.0.1"
    with contextlib.suppress(ValueError):
        if re.fullmatch(r"\d{1,5}", port) and int(port) < 1 << 16:
            return str(ipaddress.ip_address(address)), int(port)
    raise ConfigError(
        f"{setting} is {text[:100]!r}: write PORT (of 127.0.0.1), or ADDRESS:PORT with a number for the "
        "address; 0.0.0.0:9400 is every network of this machine."
    )


def validate_directory_name(setting: str, name: object) -> str:
    """Return ``name`` if it can be the name of a directory."""
    if not re.fullmatch(constants.SAFE_NAME_PATTERN, str(name)):
        raise ConfigError(
            f"{setting} is {name!r}, which cannot be the name of a directory: use at most 128 letters, "
            "digits, '.', '_' and '-', beginning with a letter or digit."
        )
    return str(name)


def parse_absolute_path(setting: str, value: object) -> Path:
    """Return ``value`` as an absolute path, because the script may change its working directory."""
    text = str(value)
    if not text or isinstance(value, bytes):
        raise ConfigError(f"{setting} is {value!r}: write the path of a directory.")
    try:
        path = Path(text).expanduser().absolute()
        with contextlib.suppress(PermissionError):  # the later access reports it
            path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # unknown user's home, name too long, NUL byte
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{setting} is {text[:200]!r}, which cannot be a path here: {reason}.") from error
    return path


def parse_keep(setting: str, value: object) -> int:
    """Parse the number of checkpoints that each node keeps."""
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch(r"-?\d{1,9}", text):
        raise ConfigError(
            f"{setting} is {text[:100]!r}: write a whole number of checkpoints, {MIN_KEEP} or more."
        )
    if int(text) < MIN_KEEP:
        raise ConfigError(
            f"{setting} is {text}, which is too few: with one kept, a checkpoint that turns out corrupt "
            f"leaves nothing to resume from. Write {MIN_KEEP} or more."
        )
    return int(text)


def parse_snapshot_memory(setting: str, value: object) -> int | None:
    """Parse the bytes of a node's memory for snapshots. ``auto`` is None, ``off`` is 0."""
    text = str(value).strip()
    if text in {"auto", "off"}:
        return None if text == "auto" else 0
    hint = "write a size (4GB, 512MiB, 1.5G), auto or off." + suggest_similar(text, ("auto", "off"))
    size = parse_size(setting, value, hint=hint)
    if size > MAX_MEMORY_BYTES:
        raise ConfigError(f"{setting} is {text!r}, which is more than any node has.")
    return size


def parse_transfer_address(setting: str, value: object) -> str | None:
    """Parse an address of this machine, or a network interface, into an address. ``auto`` is None."""
    text = str(value).strip()
    if text == "auto":
        return None
    import psutil  # noqa: PLC0415 - workers seldom need it

    interfaces = {
        name: [entry.address for entry in entries if entry.family in {socket.AF_INET, socket.AF_INET6}]
        for name, entries in psutil.net_if_addrs().items()
    }
    # A link-local address, which has a scope after "%", needs an interface on the other side too.
    addresses = [address for address in interfaces.get(text, ()) if "%" not in address]
    with contextlib.suppress(ValueError):
        given = ipaddress.ip_address(text)
        is_own = given.is_loopback or str(given) in {a for found in interfaces.values() for a in found}
        addresses = [str(given)] if is_own else []
    if not addresses:
        raise ConfigError(
            f"{setting} is {text[:100]!r}, which is no address and no network interface of this machine: "
            f"write one of its addresses, one of its interfaces ({', '.join(sorted(interfaces))}), or auto."
        )
    return addresses[0]


def parse_choice(setting: str, value: object, choices: Sequence[str], hint: str = "") -> str:
    """Return ``value`` if it is one of ``choices``; ``hint`` ends the error message otherwise."""
    text = str(value)
    if text not in choices:
        *others, last = choices
        similar = suggest_similar(text, choices)
        raise ConfigError(f"{setting} is {text[:100]!r}: write {', '.join(others)} or {last}.{similar}{hint}")
    return text


def parse_interval(setting: str, value: object, **allowed: bool) -> IntervalSetting:
    """Parse an interval; see `IntervalSetting.parse`."""
    return IntervalSetting.parse(value, setting, **allowed)


def parse_count(setting: str, value: object, *, minimum: int) -> int:
    """Parse a whole number of at least ``minimum``."""
    text = str(value)
    if not re.fullmatch(r"\d{1,9}", text) or int(text) < minimum:
        raise ConfigError(f"{setting} is {text[:100]!r}: write a whole number, {minimum} or more.")
    return int(text)


def parse_names(_setting: str, value: object) -> list[str]:
    """Parse names separated by commas."""
    return [name for name in map(str.strip, str(value).split(",")) if name]


def parse_drain_signals(setting: str, value: object) -> list[str]:
    """Parse names of signals, separated by commas; the first of the result is always SIGTERM.

    SIGINT, SIGHUP and SIGQUIT keep torchrun's meaning. Python or torch use the other signals themselves.
    """
    words = [word.upper() for word in parse_names(setting, value)]
    names = [word if word.startswith("SIG") else f"SIG{word}" for word in words]
    if not names or not set(names) <= set(ALLOWED_DRAIN_SIGNALS):
        raise ConfigError(
            f"{setting} is {str(value)[:100]!r}: write one or more of {', '.join(ALLOWED_DRAIN_SIGNALS)}, "
            "separated by commas."
        )
    return list(dict.fromkeys(["SIGTERM", *names]))
