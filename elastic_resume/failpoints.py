"""Named points at which a test may crash, stop or delay us.

``ELASTIC_RESUME_FAILPOINTS="commit.before-rename=kill,resume.loaded=delay:0.5"``. Actions: ``kill``
(SIGKILL to this process), ``exit:CODE``, ``raise`` (OSError EIO), ``delay:SECONDS``. An action may carry
``@N``: only the N-th time this process passes (``kill@3``). With the variable unset, `hit` is one
dictionary look-up.
"""

from __future__ import annotations

import errno
import os
import signal
import time

from elastic_resume import contract
from elastic_resume.errors import ConfigError


def _parse(text: str) -> dict[str, tuple[str, str, int]]:
    points: dict[str, tuple[str, str, int]] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, action = entry.partition("=")
        action, _, nth = action.partition("@")
        verb, _, value = action.partition(":")
        if not equals or verb not in {"kill", "exit", "raise", "delay"}:
            raise ConfigError(
                f"{contract.ENV_FAILPOINTS}: cannot read {entry!r}; "
                "write NAME=kill|exit:CODE|raise|delay:SECONDS, optionally followed by @N."
            )
        points[name] = (verb, value, int(nth or 0))
    return points


_points: dict[str, tuple[str, str, int]] = {}
_passes: dict[str, int] = {}


def arm() -> None:
    """Read the environment, again in a process that was forked with another one."""
    _points.clear()
    _points.update(_parse(os.environ.get(contract.ENV_FAILPOINTS, "")))


arm()


def hit(name: str) -> None:
    """Do what the environment asks for at the point ``name``; nothing in normal life."""
    if name not in _points:
        return
    verb, value, nth = _points[name]
    _passes[name] = _passes.get(name, 0) + 1
    if nth and _passes[name] != nth:
        return
    if verb == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif verb == "exit":
        os._exit(int(value or 1))
    elif verb == "raise":
        raise OSError(errno.EIO, f"failpoint {name}")
    else:
        time.sleep(float(value or 1))
