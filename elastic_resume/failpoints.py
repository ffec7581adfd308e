"""Named points at which a test, or the failure laboratory, may crash, stop, spoil or delay us.

``ELASTIC_RESUME_FAILPOINTS="commit.before-rename=kill,resume.loaded=delay:0.5"``. Actions::

    kill, stop             SIGKILL or SIGSTOP to this process
    exit:CODE              end it, without any clearing up
    raise[:EXCEPTION]      OSError EIO, or a built-in exception
    delay:SECONDS          wait
    hold-gil[:SECONDS]     a thread keeps the interpreter, for ever without a number
    out-of-memory[:BYTES]  use memory up
    flip                   one bit of what passes here (`passing`)
    wait                   tell the laboratory that the point is reached; go on when it has done what it will
    do:NAME                what this process has offered by that name (`offer`)

An action may carry ``@N``: only the N-th time this process passes (``kill@3``). And conditions, each after a
semicolon: ``rank=1``, ``local=0``, ``node=n2``, ``step=20`` (that step or a later one), ``once=NAME`` (never
again, in no process: the file NAME.fired in ELASTIC_RESUME_FAULTS_DIR says so, and who it was),
``for=SECONDS`` (on and on for so long, in the process that was the first). With that directory set, the file
``armed`` in it is a list like the variable's, and may change at any time.

With neither variable set, `hit` is one dictionary look-up.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import json
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from elastic_resume import constants
from elastic_resume.errors import ConfigError
from elastic_resume.schedulers.resources import MemoryCgroup

Data = TypeVar("Data", bytes, memoryview)

ACTIONS = ("kill", "stop", "exit", "raise", "delay", "hold-gil", "out-of-memory", "flip", "wait", "do")
CONDITIONS = ("rank", "local", "node", "step", "once", "for")
ARMED_FILE = "armed"
FIRED_SUFFIX, REACHED_SUFFIX, DONE_SUFFIX = ".fired", ".reached", ".done"
MAX_WAIT_S = 10.0  # a laboratory that has died holds nobody for longer
_POLL_INTERVAL_S = 0.002
_CHUNK_BYTES = 16 << 20
_SIMULATED_BYTES = 64 << 20
_NUMERIC_ACTIONS = {"exit", "delay", "hold-gil", "out-of-memory"}


@dataclass
class _Failpoint:
    """What happens at one point, and when."""

    action: str
    argument: str = ""
    only_nth: int = 0
    rank: str = ""
    local_rank: str = ""
    node: str = ""
    min_step: int = 0
    once_name: str = ""
    duration_s: float = 0.0
    first_fired_s: float = 0.0
    hit_count: int = 0


def _parse(text: str) -> dict[str, list[_Failpoint]]:
    points: dict[str, list[_Failpoint]] = {}
    for entry in filter(None, (part.strip() for part in text.replace("\n", ",").split(","))):
        name, equals, rest = entry.partition("=")
        action, *conditions = rest.split(";")
        action, _, nth = action.partition("@")
        verb, _, value = action.partition(":")
        told = dict(condition.partition("=")[::2] for condition in conditions)
        readable = bool(equals) and verb in ACTIONS and set(told) <= set(CONDITIONS)
        try:
            float(value or 0) if verb in _NUMERIC_ACTIONS else 0
            for_s = float(told.get("for", 0))
            counts = int(nth or 0), int(told.get("step", 0))
        except ValueError:
            readable = False
        if not readable:
            raise ConfigError(
                f"{constants.ENV_FAILPOINTS}: cannot read {entry!r}; write NAME=ACTION, as in "
                f"commit.before-rename=kill, with one of {', '.join(ACTIONS)}, :VALUE where it takes one, and "
                f"optionally @N and ;{'=…;'.join(CONDITIONS)}=…"
            )
        rank, local, node, once = (told.get(key, "") for key in ("rank", "local", "node", "once"))
        point = _Failpoint(verb, value, counts[0], rank, local, node, counts[1], once, for_s)
        points.setdefault(name, []).append(point)
    return points


def validate(text: str) -> None:
    """Raise ConfigError for what `arm` could not read."""
    _parse(text)


_failpoints_by_name: dict[str, list[_Failpoint]] = {}
_registered_actions: dict[str, Callable[[], object]] = {}
_faults_dir: str = ""
_armed_file_version: tuple[int, int] = (0, 0)  # of the file `armed`: its number and time


def arm() -> None:
    """Read the environment, again in a process that was forked with another one."""
    global _faults_dir, _armed_file_version
    _faults_dir, _armed_file_version = os.environ.get(constants.ENV_FAULTS_DIR, ""), (0, 0)
    _failpoints_by_name.clear()
    _failpoints_by_name.update(_parse(os.environ.get(constants.ENV_FAILPOINTS, "")))


arm()


def register_action(name: str, action: Callable[[], object]) -> None:
    """Let ``do:NAME`` mean ``action``; a later offer replaces it."""
    _registered_actions[name] = action


def hit(name: str, step: int = 0) -> None:
    """Do what is asked for at the point ``name``; nothing in normal life."""
    if name not in _failpoints_by_name and not _faults_dir:
        return
    for point in _find_due(name, step):
        _run_action(name, point)


def mutate(name: str, data: Data) -> Data | bytearray:
    """``data`` as it is, or as it is asked to be at the point ``name``."""
    if name not in _failpoints_by_name and not _faults_dir:
        return data
    for point in _find_due(name, 0):
        if point.action == "flip" and data:
            spoilt = bytearray(data)
            spoilt[len(spoilt) // 2] ^= 1
            return spoilt
        _run_action(name, point)
    return data


def _find_due(name: str, step: int) -> list[_Failpoint]:
    if _faults_dir:
        _reload_armed_file()
    return [point for point in _failpoints_by_name.get(name, ()) if _is_due(point, step)]


def _reload_armed_file() -> None:
    """Read the laboratory's list again if it has changed."""
    global _armed_file_version  # noqa: PLW0603
    path = Path(_faults_dir) / ARMED_FILE
    try:
        status = path.stat()
        if (status.st_ino, status.st_mtime_ns) == _armed_file_version:
            return
        listed = _parse(path.read_text())
    except FileNotFoundError:
        return
    _armed_file_version = (status.st_ino, status.st_mtime_ns)
    known = {
        _identity(name, point): point for name, points in _failpoints_by_name.items() for point in points
    }
    _failpoints_by_name.clear()
    for source in (_parse(os.environ.get(constants.ENV_FAILPOINTS, "")), listed):
        for name, points in source.items():
            _failpoints_by_name.setdefault(name, []).extend(
                known.get(_identity(name, one), one) for one in points
            )


def _identity(name: str, point: _Failpoint) -> tuple[object, ...]:
    return (
        name,
        point.action,
        point.argument,
        point.only_nth,
        point.rank,
        point.local_rank,
        point.node,
        point.min_step,
        point.once_name,
    )


def _is_due(point: _Failpoint, step: int) -> bool:
    # Forked before they were known: not read when the list is.
    if point.rank and point.rank != os.environ.get("RANK"):
        return False
    if point.local_rank and point.local_rank != _read_local_rank():
        return False
    if point.node and point.node != os.environ.get(constants.ENV_NODE_NAME):
        return False
    if step < point.min_step:
        return False
    point.hit_count += 1
    if point.only_nth and point.hit_count != point.only_nth:
        return False
    now = time.monotonic()
    if point.first_fired_s:
        return now < point.first_fired_s + point.duration_s if point.duration_s else not point.once_name
    if point.once_name and not _claim_once(point.once_name):
        return False
    point.first_fired_s = now
    return True


def _read_local_rank() -> str:
    return os.environ.get(constants.ENV_LOCAL_RANK, os.environ.get("LOCAL_RANK", ""))


def _claim_once(once_name: str) -> bool:
    """Whether no process was here before; from now on, one was."""
    if not _faults_dir:
        raise ConfigError(f"{constants.ENV_FAILPOINTS}: once={once_name} takes {constants.ENV_FAULTS_DIR}.")
    who = {
        "t": round(time.time(), 3),
        "pid": os.getpid(),
        "node": os.environ.get(constants.ENV_NODE_NAME, ""),
        "rank": os.environ.get("RANK", ""),
        "local": _read_local_rank(),
    }
    try:
        descriptor = os.open(
            Path(_faults_dir) / (once_name + FIRED_SUFFIX), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644
        )
    except OSError:  # there already; or no laboratory any more
        return False
    os.write(descriptor, json.dumps(who).encode())
    os.close(descriptor)
    return True


def _run_action(name: str, point: _Failpoint) -> None:
    verb, value = point.action, point.argument
    if verb in {"kill", "stop"}:
        os.kill(os.getpid(), signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
    elif verb == "exit":
        os._exit(int(value or 1))
    elif verb == "raise":
        kind = getattr(builtins, value, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            raise kind(f"failpoint {name}")
        raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} (failpoint {name})")
    elif verb == "delay":
        time.sleep(float(value or 1))
    elif verb == "hold-gil":
        _hold_gil(float(value) if value else float("inf"))
    elif verb == "out-of-memory":
        _exhaust_memory(int(value or 1 << 30))
    elif verb == "wait":
        _wait_for_release(point.once_name or name)
    elif verb == "do" and value in _registered_actions:
        _registered_actions[value]()


def _hold_gil(seconds: float) -> None:
    """Let a thread keep the interpreter, as an extension does that waits without giving it back."""

    def hold() -> None:
        # A signal would end the call: it goes to another thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        library = ctypes.PyDLL(None)
        library.poll(None, ctypes.c_ulong(0), ctypes.c_int(int(min(seconds, 2e6) * 1000)))

    thread = threading.Thread(target=hold, name="hold-gil", daemon=True)
    thread.start()
    thread.join()  # not for so long only: it may come to hold it later than it was started


def _exhaust_memory(limit_bytes: int) -> None:
    """Touch pages until the kernel kills this process; where no group of it has a limit, imitate that."""
    group = MemoryCgroup.find_own()
    bounded = group is not None and group.read_usage() is not None
    with contextlib.suppress(OSError):  # and nobody else
        Path("/proc/self/oom_score_adj").write_text("1000")
    held = []
    for _ in range(0, limit_bytes if bounded else min(limit_bytes, _SIMULATED_BYTES), _CHUNK_BYTES):
        memory = mmap.mmap(-1, _CHUNK_BYTES)
        memory.write(b"\1" * _CHUNK_BYTES)
        held.append(memory)
    why = f"{limit_bytes} bytes did not use its control group up" if bounded else "no control group bounds it"
    print(f"elastic_resume: out of memory is imitated by SIGKILL: {why}.", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_release(file_stem: str) -> None:
    if not _faults_dir:
        return
    path = Path(_faults_dir) / file_stem
    path.with_name(file_stem + REACHED_SUFFIX).touch()
    until = time.monotonic() + MAX_WAIT_S
    while time.monotonic() < until and not path.with_name(file_stem + DONE_SUFFIX).exists():
        time.sleep(_POLL_INTERVAL_S)
