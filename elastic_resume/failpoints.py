"""Crash, stop, delay or corrupt a process at a named point, for tests and the fault injector.

``ELASTIC_RESUME_FAILPOINTS="commit.before-rename=kill,resume.loaded=delay:0.5"``. Actions::

    kill, stop             SIGKILL or SIGSTOP to this process
    exit:CODE              end it without any cleanup
    raise[:EXCEPTION]      OSError EIO, or a built-in exception
    delay:SECONDS          sleep
    hold-gil[:SECONDS]     let a thread keep the GIL, without a number for ever
    out-of-memory[:BYTES]  allocate until the kernel kills this process
    flip                   flip one bit of the data at this point (`mutate`)
    wait                   report the point as reached, then wait until the fault injector releases it
    do:NAME                run the action that this process registered under NAME (`register_action`)

``ACTION@N`` acts only at the N-th time this process passes the point (``kill@3``). Conditions follow, each
after a semicolon: ``rank=1``, ``local=0``, ``node=n2``, ``step=20`` (that step or later), ``once=NAME`` (once
over all processes: the first one creates NAME.fired in ELASTIC_RESUME_FAULTS_DIR), ``for=SECONDS`` (repeat
that long, in the first process). If that directory is set, its file ``armed`` holds a list like the
variable's, and may change at any time.

Without either variable `hit` is one dictionary lookup.
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
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from elastic_resume import constants
from elastic_resume.errors import ConfigError
from elastic_resume.machine import MemoryCgroup

Data = TypeVar("Data", bytes, memoryview)

ACTIONS = ("kill", "stop", "exit", "raise", "delay", "hold-gil", "out-of-memory", "flip", "wait", "do")
CONDITIONS = ("rank", "local", "node", "step", "once", "for")
ARMED_FILE = "armed"
FIRED_SUFFIX, REACHED_SUFFIX, DONE_SUFFIX = ".fired", ".reached", ".done"
MAX_WAIT_S = 10.0  # a dead fault injector delays a process no longer
_POLL_INTERVAL_S = 0.002
_CHUNK_BYTES = 16 << 20
_SIMULATED_BYTES = 64 << 20
_NUMERIC_ACTIONS = {"exit", "delay", "hold-gil", "out-of-memory"}


@dataclass
class _Failpoint:
    """The action at one point, and its conditions."""

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
        values = dict(condition.partition("=")[::2] for condition in conditions)
        readable = bool(equals) and verb in ACTIONS and set(values) <= set(CONDITIONS)
        try:
            float(value or 0) if verb in _NUMERIC_ACTIONS else 0
            for_s = float(values.get("for", 0))
            counts = int(nth or 0), int(values.get("step", 0))
        except ValueError:
            readable = False
        if not readable:
            raise ConfigError(
                f"{constants.ENV_FAILPOINTS}: cannot read {entry!r}; write NAME=ACTION, as in "
                f"commit.before-rename=kill, with one of {', '.join(ACTIONS)}, :VALUE if it takes one, and "
                f"optionally @N and ;{'=…;'.join(CONDITIONS)}=…"
            )
        rank, local, node, once = (values.get(key, "") for key in ("rank", "local", "node", "once"))
        point = _Failpoint(verb, value, counts[0], rank, local, node, counts[1], once, for_s)
        points.setdefault(name, []).append(point)
    return points


def validate(text: str) -> None:
    """Raise ConfigError unless `arm` can read ``text``."""
    _parse(text)


_failpoints_by_name: dict[str, list[_Failpoint]] = {}
_registered_actions: dict[str, Callable[[], object]] = {}
_faults_dir: str = ""
_armed_file_version: tuple[int, int] = (0, 0)  # inode and mtime of the file `armed`


def arm() -> None:
    """Read the environment; call it again after a fork with another environment."""
    global _faults_dir, _armed_file_version
    _faults_dir, _armed_file_version = os.environ.get(constants.ENV_FAULTS_DIR, ""), (0, 0)
    _failpoints_by_name.clear()
    _failpoints_by_name.update(_parse(os.environ.get(constants.ENV_FAILPOINTS, "")))


arm()


def register_action(name: str, action: Callable[[], object]) -> None:
    """Let ``do:NAME`` run ``action``; a later registration replaces it."""
    _registered_actions[name] = action


def hit(name: str, step: int = 0) -> None:
    """Run the actions armed at the point ``name``, if any."""
    if name not in _failpoints_by_name and not _faults_dir:
        return
    for point in _find_due(name, step):
        _run_action(name, point)


def mutate(name: str, data: Data) -> Data | bytearray:
    """Run the actions armed at the point ``name``; return ``data``, with one bit flipped if so armed."""
    if name not in _failpoints_by_name and not _faults_dir:
        return data
    for point in _find_due(name, 0):
        if point.action == "flip" and data:
            corrupted = bytearray(data)
            corrupted[len(corrupted) // 2] ^= 1
            return corrupted
        _run_action(name, point)
    return data


def _find_due(name: str, step: int) -> list[_Failpoint]:
    if _faults_dir:
        _reload_armed_file()
    return [point for point in _failpoints_by_name.get(name, ()) if _is_due(point, step)]


def _reload_armed_file() -> None:
    """Read the file `armed` again if it has changed; keep the counters of unchanged failpoints."""
    global _armed_file_version  # noqa: PLW0603
    path = Path(_faults_dir) / ARMED_FILE
    try:
        status = path.stat()
        if (status.st_ino, status.st_mtime_ns) == _armed_file_version:
            return
        armed = _parse(path.read_text())
    except FileNotFoundError:
        return
    _armed_file_version = (status.st_ino, status.st_mtime_ns)
    known = {
        _identity(name, point): point for name, points in _failpoints_by_name.items() for point in points
    }
    _failpoints_by_name.clear()
    for source in (_parse(os.environ.get(constants.ENV_FAILPOINTS, "")), armed):
        for name, points in source.items():
            _failpoints_by_name.setdefault(name, []).extend(
                known.get(_identity(name, point), point) for point in points
            )


def _identity(name: str, point: _Failpoint) -> tuple[object, ...]:
    return (name, *astuple(replace(point, duration_s=0, first_fired_s=0, hit_count=0)))


def _is_due(point: _Failpoint, step: int) -> bool:
    # A forked process may learn its rank only after it has read the list.
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
    """Return whether this process is the first to claim ``once_name``; create the file that claims it."""
    if not _faults_dir:
        raise ConfigError(f"{constants.ENV_FAILPOINTS}: once={once_name} takes {constants.ENV_FAULTS_DIR}.")
    claimant = {
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
    except OSError:  # the file exists, or the fault injector has removed the directory
        return False
    os.write(descriptor, json.dumps(claimant).encode())
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
    """Let a thread keep the GIL, like an extension that blocks without releasing it."""

    def hold() -> None:
        # A signal would interrupt the call, so other threads must take it.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        library = ctypes.PyDLL(None)
        library.poll(None, ctypes.c_ulong(0), ctypes.c_int(int(min(seconds, 2e6) * 1000)))

    thread = threading.Thread(target=hold, name="hold-gil", daemon=True)
    thread.start()
    thread.join()  # without a timeout: the thread may get the GIL late


def _exhaust_memory(limit_bytes: int) -> None:
    """Touch pages until the kernel kills this process; simulate that if no memory limit applies to it."""
    group = MemoryCgroup.find_own()
    bounded = group is not None and group.read_usage() is not None
    with contextlib.suppress(OSError):  # make the kernel choose this process
        Path("/proc/self/oom_score_adj").write_text("1000")
    held = []
    for _ in range(0, limit_bytes if bounded else min(limit_bytes, _SIMULATED_BYTES), _CHUNK_BYTES):
        memory = mmap.mmap(-1, _CHUNK_BYTES)
        memory.write(b"\1" * _CHUNK_BYTES)
        held.append(memory)
    reason = (
        f"{limit_bytes} bytes did not fill its control group" if bounded else "no control group limits it"
    )
    print(f"elastic_resume: out of memory is simulated by SIGKILL: {reason}.", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_release(file_stem: str) -> None:
    if not _faults_dir:
        return
    path = Path(_faults_dir) / file_stem
    path.with_name(file_stem + REACHED_SUFFIX).touch()
    until = time.monotonic() + MAX_WAIT_S
    while time.monotonic() < until and not path.with_name(file_stem + DONE_SUFFIX).exists():
        time.sleep(_POLL_INTERVAL_S)


# ---- in the process of a test ---------------------------------------------------------------------------


class FailpointController:
    """Arms failpoints in the running processes of one job. It may be used by one thread at a time.

    It writes a directory that all processes of the job see. The list of armed failpoints is replaced
    atomically. Files record which failpoint has fired and which process waits at one. A failpoint fires once,
    in the first process that reaches it, unless it has ``once=""``.
    """

    def __init__(self, directory: Path) -> None:
        """Create ``directory``; every process of the job must see it under this path."""
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._entries: dict[str, str] = {}
        self._count = 0

    @property
    def env(self) -> dict[str, str]:
        """Return the environment variables by which processes find the directory."""
        return {constants.ENV_FAULTS_DIR: str(self.directory)}

    def arm(self, failpoint: str, **conditions: object) -> str:
        """Arm ``NAME=ACTION`` with conditions (see `failpoints`) and return its id.

        Raises:
            ConfigError: the failpoint is malformed.

        """
        self._count += 1
        failpoint_id = f"f{self._count}"
        settings = {"once": failpoint_id, **{key.rstrip("_"): value for key, value in conditions.items()}}
        entry = ";".join([failpoint, *(f"{k}={v}" for k, v in settings.items() if v not in (None, ""))])
        validate(entry)  # each process validates it too, but cannot name the caller
        self._entries[failpoint_id] = entry
        self._write()
        return failpoint_id

    def disarm(self, failpoint_id: str) -> None:
        """Disarm a failpoint. A process that has reached it already continues its action."""
        if self._entries.pop(failpoint_id, None) is not None:
            self._write()

    def read_fired(self, failpoint_id: str) -> dict[str, Any] | None:
        """Return the process that fired it first (t, pid, node, rank, local); None if none has."""
        try:
            record = json.loads((self.directory / (failpoint_id + FIRED_SUFFIX)).read_bytes())
        except (FileNotFoundError, ValueError):  # being written
            return None
        return record if isinstance(record, dict) else None

    def is_waiting(self, failpoint_id: str) -> bool:
        """Whether a process waits at a failpoint that was armed with ``wait``."""
        return (self.directory / (failpoint_id + REACHED_SUFFIX)).exists()

    def release(self, failpoint_id: str) -> None:
        """Let the waiting process continue."""
        (self.directory / (failpoint_id + DONE_SUFFIX)).touch()

    def _write(self) -> None:
        path = self.directory / ARMED_FILE
        new = path.with_suffix(".new")
        new.write_text("\n".join(self._entries.values()) + "\n")
        new.replace(path)


def skip_next_reduction(wrapped: Any) -> None:
    """Let a DDP module skip its next gradient reduction, as no_sync() in the wrong place does."""
    if wrapped is None:
        return

    def restore_reduction(*_: Any) -> None:
        wrapped.require_backward_grad_sync = True
        hook.remove()

    wrapped.require_backward_grad_sync = False
    hook = wrapped.register_forward_hook(restore_reduction)
