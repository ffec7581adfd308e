"""Collect what explains the end of a generation on this node: worker events, and memory pressure.

`restart_controller` classifies failures by both. The events name exits and exceptions. Memory pressure may
explain the SIGKILL of a worker.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from pathlib import Path

from elastic_resume import events, linux
from elastic_resume.background import BackgroundThread
from elastic_resume.machine import MemoryCgroup, read_fields
from elastic_resume.policy.failure_classification import Failure, MemoryPressure

POLL_INTERVAL_S = 1.0
PRESSURE_MAX_AGE_S = 10.0
"""Pressure that is older cannot explain a death."""
NEAR_LIMIT_SHARE = 0.95
"""Share of the limit that counts as pressure. Below it the kernel still finds pages to reclaim."""


class FailureEvents:
    """The events of `events.FAILURE_EVIDENCE_KINDS` on this node since the last `clear`.

    Supervisors and workers append to a memory file that the agent owns, so a failing disk cannot lose these
    events. The log on disk gets the same events, for people.
    """

    def __init__(self) -> None:
        self._descriptor = linux.create_anonymous_file("elastic_resume-evidence")
        self.path = linux.name_descriptor(self._descriptor)

    def read(self) -> list[events.Event]:
        """Return the events in the order in which they were appended."""
        data = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        parsed = (events.parse_complete_line(line) for line in data.splitlines(keepends=True))
        return [event for event in parsed if event is not None]

    def find_traceback(self, failure: Failure) -> str:
        """Return the traceback of a worker's exception; empty if the worker printed it itself."""
        for event in self.read():
            if event["event"] == "failure" and event.get("type") == failure.type:
                rank = event.get("rank")
                if (rank is None or rank == failure.rank) and isinstance(event.get("traceback"), str):
                    return str(event["traceback"])
        return ""

    def clear(self) -> None:
        """Remove all events, for a new generation."""
        os.ftruncate(self._descriptor, 0)

    def close(self) -> None:
        """Release the memory. Further calls do nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class MemoryMonitor:
    """Measure memory from `start` to `close`, and report on the time since `reset`.

    The kernel counts its kills for lack of memory in the control group: as ``oom_kill`` of memory.events, or
    of memory.oom_control with cgroup v1. Where the count cannot be read, memory that was nearly used up
    shortly before has to do. The memory is free again once the worker is dead, so a thread reads the usage
    once a second, in 0.1 ms. A file that cannot be read means no pressure, and never an error.
    """

    def __init__(self, group: MemoryCgroup | None = None, proc: Path = Path("/proc")) -> None:
        """Measure the control group of the workers, by default that of this process."""
        self._group = group or MemoryCgroup.find_own(proc)
        self._proc = proc
        self._last_pressure: tuple[float, MemoryPressure] | None = None
        self._kills_at_reset = self._read_kills()
        self._thread = BackgroundThread("memory-pressure", self.poll)

    def start(self) -> None:
        """Start to measure."""
        self._thread.start()

    def close(self) -> None:
        """Stop measuring."""
        self._thread.close()

    def reset(self) -> None:
        """Forget what was measured, for a new generation."""
        self._kills_at_reset = self._read_kills()
        self._last_pressure = None

    def read_pressure(self) -> MemoryPressure:
        """Return the kills since the reset, and recent pressure."""
        self.poll()
        measured_at, pressure = self._last_pressure or (-math.inf, MemoryPressure())
        if time.monotonic() - measured_at > PRESSURE_MAX_AGE_S:
            pressure = MemoryPressure()
        return replace(pressure, oom_kills=max(0, self._read_kills() - self._kills_at_reset))

    def poll(self) -> float:
        """Measure once; return the seconds until the next measurement."""
        pressure = self._measure_pressure()
        if pressure.is_short:
            self._last_pressure = (time.monotonic(), pressure)
        return POLL_INTERVAL_S

    def _read_kills(self) -> int:
        return self._group.read_oom_kills() if self._group else 0

    def _measure_pressure(self) -> MemoryPressure:
        usage = self._group.read_usage() if self._group else None
        if usage is not None and usage[0] >= NEAR_LIMIT_SHARE * usage[1]:
            return MemoryPressure(0, usage[0], usage[1], is_control_group=True)
        memory = read_fields(self._proc / "meminfo")
        total, available = memory.get("MemTotal:", 0) << 10, memory.get("MemAvailable:", 0) << 10
        if total and available <= (1 - NEAR_LIMIT_SHARE) * total:
            return MemoryPressure(0, total - available, total)
        return MemoryPressure()
