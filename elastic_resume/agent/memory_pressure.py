"""Measures how short this node is of memory, to explain a worker that dies of SIGKILL.

The kernel kills a process for lack of memory by SIGKILL, and counts that in the process's control group: as
``oom_kill`` of memory.events, or of memory.oom_control with cgroup v1. The count also covers limits of outer
groups. Where it cannot be read, memory that was nearly used up shortly before has to do. A thread reads the
usage once a second, because the memory is free again once the worker is dead. That costs some 0.1 ms.

A file that cannot be read means no pressure, and never an error.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from elastic_resume.background import BackgroundThread
from elastic_resume.policy.failure_classification import MemoryPressure
from elastic_resume.schedulers.resources import MemoryCgroup, read_fields
from elastic_resume.units import format_bytes

POLL_INTERVAL_S = 1.0
PRESSURE_MAX_AGE_S = 10.0
"""Pressure that is older cannot explain a death."""
NEAR_LIMIT_SHARE = 0.95
"""Share of the limit that counts as pressure. Below it the kernel still finds pages to reclaim."""
STALL_THRESHOLD_PERCENT = 20.0
"""Percent of ten seconds in which some process waited for memory (PSI). Before a kill it is most of them."""


class MemoryMonitor:
    """Measures memory from `start` to `close`, and reports on the time since `reset`."""

    def __init__(self, group: MemoryCgroup | None = None, proc: Path = Path("/proc")) -> None:
        """Measure the control group of the workers, by default that of this process."""
        self._group = group or MemoryCgroup.find_own(proc)
        self._proc = proc
        self._last_pressure: tuple[float, str] | None = None
        self._kills_at_reset = self._read_kills()
        self._thread = BackgroundThread("memory-pressure", self.poll)

    def start(self) -> None:
        """Start to measure."""
        self._thread.start()

    def close(self) -> None:
        """Stop measuring."""
        self._thread.close()

    def reset(self) -> None:
        """Forget what was measured, for a new round."""
        self._kills_at_reset = self._read_kills()
        self._last_pressure = None

    def read_pressure(self) -> MemoryPressure:
        """Return the kills since the reset, and a description of recent pressure."""
        self.poll()
        last = self._last_pressure
        is_recent = last is not None and time.monotonic() - last[0] <= PRESSURE_MAX_AGE_S
        return MemoryPressure(
            max(0, self._read_kills() - self._kills_at_reset), last[1] if last and is_recent else ""
        )

    def poll(self) -> float:
        """Measure once; return the seconds until the next measurement."""
        text = self._describe_pressure()
        if text:
            self._last_pressure = (time.monotonic(), text)
        return POLL_INTERVAL_S

    def _read_kills(self) -> int:
        return self._group.read_oom_kills() if self._group else 0

    def _describe_pressure(self) -> str:
        usage = self._group.read_usage() if self._group else None
        if usage is not None and usage[0] >= NEAR_LIMIT_SHARE * usage[1]:
            return f"its control group had used {format_bytes(usage[0])} of {format_bytes(usage[1])}"
        memory = read_fields(self._proc / "meminfo")
        total, available = memory.get("MemTotal:", 0) << 10, memory.get("MemAvailable:", 0) << 10
        if total and available <= (1 - NEAR_LIMIT_SHARE) * total:
            return f"{format_bytes(available)} of {format_bytes(total)} of this machine's memory were left"
        stalled = self._read_stall_percent()
        if stalled >= STALL_THRESHOLD_PERCENT:
            return f"processes waited for memory {stalled:.0f} % of the time"
        return ""

    def _read_stall_percent(self) -> float:
        path = self._group.directory / "memory.pressure" if self._group else Path()
        with contextlib.suppress(OSError, ValueError, IndexError):
            if not path.is_file():
                path = self._proc / "pressure/memory"
            # some avg10=0.00 avg60=0.00 avg300=0.00 total=0
            return float(path.read_text().split()[1].removeprefix("avg10="))
        return 0.0
