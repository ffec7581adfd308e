"""How near to its end this node's memory is, and how many processes the kernel killed for it.

A worker that the kernel kills for want of memory dies of SIGKILL, as of any other; what tells them apart is a
counter of its control group (``oom_kill`` of memory.events, or of memory.oom_control with cgroup v1; an
outer group's limit counts there too, since the count is the victim's). Where that cannot be read, memory that
was nearly used up shortly before will do, and since it is free again once the worker is dead, a thread looks
once a second. What it costs: three small files, some 0.1 ms.

Promise: what cannot be read is no pressure, and never an error. Does not know workers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from elastic_resume.policy.failure_classification import MemoryPressure
from elastic_resume.schedulers.resources import MemoryCgroup, read_fields
from elastic_resume.units import format_bytes

POLL_INTERVAL_S = 1.0
PRESSURE_MAX_AGE_S = 10.0
"""Pressure so long before a death may be its cause."""
NEAR_LIMIT_SHARE = 0.95
"""Share of the limit; with less, the kernel still finds pages to take back."""
STALL_THRESHOLD_PERCENT = 20.0
"""Percent of ten seconds in which some process waited for memory (PSI). Before a kill it is most of it."""


class MemoryMonitor:
    """Looks at memory from `start` to `close`; `strain` tells of the time since `mark`."""

    def __init__(self, group: MemoryCgroup | None = None, proc: Path = Path("/proc")) -> None:
        """``group``: of the workers, which is this process's own unless they are moved."""
        self._group = group or MemoryCgroup.find_own(proc)
        self._proc = proc
        self._kills_at_reset = self._group.read_oom_kills() if self._group else 0
        self._last_pressure: tuple[float, str] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pressure", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def reset(self) -> None:
        """A round begins: what was before counts no more."""
        self._kills_at_reset = self._group.read_oom_kills() if self._group else 0
        self._last_pressure = None

    def read_pressure(self) -> MemoryPressure:
        """Tell what befell memory since the mark."""
        self.poll()
        kills = max(0, self._group.read_oom_kills() - self._kills_at_reset) if self._group else 0
        seen = self._last_pressure
        recent = seen is not None and time.monotonic() - seen[0] <= PRESSURE_MAX_AGE_S
        return MemoryPressure(kills, seen[1] if seen and recent else "")

    def poll(self) -> None:
        """Look once."""
        text = self._describe_pressure()
        if text:
            self._last_pressure = (time.monotonic(), text)

    def _run(self) -> None:
        while not self._closing.wait(POLL_INTERVAL_S):
            self.poll()

    def _describe_pressure(self) -> str:
        used = self._group.read_usage() if self._group else None
        if used is not None and used[0] >= NEAR_LIMIT_SHARE * used[1]:
            return f"its control group had used {format_bytes(used[0])} of {format_bytes(used[1])}"
        memory = read_fields(self._proc / "meminfo")
        total, free = memory.get("MemTotal:", 0), memory.get("MemAvailable:", 0)
        if total and free <= (1 - NEAR_LIMIT_SHARE) * total:
            return f"{format_bytes(free << 10)} of {format_bytes(total << 10)} of this machine's memory were left"
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
