"""Memory pressure and control groups of both versions, read from files like the kernel's."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from elastic_resume.agent import round_evidence
from elastic_resume.agent.round_evidence import MemoryMonitor
from elastic_resume.policy.failure_classification import MemoryPressure
from elastic_resume.schedulers.resources import MemoryCgroup, available_memory_bytes, read_fields

MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
{memory} rw,relatime - cgroup cgroup rw,memory
{unified} rw,relatime - cgroup2 cgroup2 rw
"""
ROOMY = "MemTotal: 16000000 kB\nMemFree: 1 kB\nMemAvailable: 8000000 kB\n"


def make_proc(tmp_path: Path, *, cgroup: str, memory_root: str = "/", unified_root: str = "/") -> Path:
    """Write the files of /proc and of both hierarchies; return the directory of /proc."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(cgroup)
    mounts = MOUNTS.format(
        memory=f"35 31 0:32 {memory_root} {tmp_path}/memory",
        unified=f"41 31 0:38 {unified_root} {tmp_path}/unified",
    )
    (proc / "self/mountinfo").write_text(mounts)
    (proc / "meminfo").write_text(ROOMY)
    return proc


def write_cgroup_v1(
    directory: Path, *, kills: int = 0, used: int = 100, cached: int = 0, limit: int = 1000
) -> None:
    """Write the files of a control group of version 1."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
    (directory / "memory.usage_in_bytes").write_text(f"{used}\n")
    (directory / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (directory / "memory.stat").write_text(f"cache 5\ntotal_cache {cached}\ntotal_shmem 0\n")


def write_cgroup_v2(
    directory: Path, *, kills: int = 0, used: int = 100, cached: int = 0, limit: str = "1000"
) -> None:
    """Write the files of a control group of version 2."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.events").write_text(f"low 0\nhigh 3\nmax 9\noom 2\noom_kill {kills}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.stat").write_text(f"anon 50\nfile {cached}\nshmem 0\n")


@pytest.mark.parametrize("write", [write_cgroup_v1, write_cgroup_v2])
def test_monitor_counts_oom_kills_since_reset(write: object, tmp_path: Path) -> None:
    """Earlier kills belong to an earlier round."""
    line, name = ("4:memory:/job\n", "memory") if write is write_cgroup_v1 else ("0::/job\n", "unified")
    make = write_cgroup_v1 if write is write_cgroup_v1 else write_cgroup_v2
    make(tmp_path / name / "job", kills=3)
    proc = make_proc(tmp_path, cgroup=f"8:pids:/elsewhere\n{line}")
    monitor = MemoryMonitor(proc=proc)
    assert monitor.read_pressure() == MemoryPressure()
    make(tmp_path / name / "job", kills=4)
    assert monitor.read_pressure() == MemoryPressure(oom_kills=1)
    monitor.reset()
    assert monitor.read_pressure() == MemoryPressure()


def test_cgroup_is_found_inside_container(tmp_path: Path) -> None:
    """The path is that of the host, and the mount begins at that path."""
    write_cgroup_v1(tmp_path / "memory", kills=1)
    proc = make_proc(tmp_path, cgroup="4:memory:/docker/abc\n", memory_root="/docker/abc")
    group = MemoryCgroup.find_own(proc)
    assert group is not None
    assert (group.directory, group.read_oom_kills()) == (tmp_path / "memory", 1)


@pytest.mark.parametrize("write", [write_cgroup_v1, write_cgroup_v2])
@pytest.mark.parametrize("limited", ["slurm/job_7", "slurm/job_7/step_0", "slurm/job_7/step_0/task_0"])
def test_available_memory_obeys_limits_of_all_ancestors(write: object, limited: str, tmp_path: Path) -> None:
    """Slurm sets its limits on the job or the step. The group of the task and the host do not show them."""
    line, name = ("4:memory:", "memory") if write is write_cgroup_v1 else ("0::", "unified")
    make, none = (write_cgroup_v1, 1 << 62) if write is write_cgroup_v1 else (write_cgroup_v2, "max")
    task = tmp_path / name / "slurm/job_7/step_0/task_0"
    make(task, used=100_000, limit=none)  # type: ignore[arg-type]
    make(task.parent, used=300_000, limit=none)  # type: ignore[arg-type]
    make(task.parent.parent, used=400_000, limit="2000000")  # type: ignore[arg-type]
    make(tmp_path / name / limited, used=400_000, cached=100_000, limit="1000000")  # type: ignore[arg-type]
    make(tmp_path, used=1, limit="2")  # type: ignore[arg-type] # above the mount point: no group of ours
    proc = make_proc(tmp_path, cgroup=f"{line}/slurm/job_7/step_0/task_0\n")
    group = MemoryCgroup.find_own(proc)
    assert group is not None
    assert (group.directory, group.read_usage()) == (task, (300_000, 1_000_000))
    assert available_memory_bytes(proc) == 700_000


def test_cgroup_without_memory_controller_uses_parent(tmp_path: Path) -> None:
    """Cgroup v2 gives the memory controller to some levels only; below them its files are missing."""
    write_cgroup_v2(tmp_path / "unified/job/step", kills=2, used=100, limit="1000")
    (tmp_path / "unified/job/step/user/task_0").mkdir(parents=True)
    proc = make_proc(tmp_path, cgroup="0::/job/step/user/task_0\n")
    group = MemoryCgroup.find_own(proc)
    assert group is not None
    assert (group.directory, group.read_oom_kills()) == (tmp_path / "unified/job/step", 2)
    assert available_memory_bytes(proc) == 900


def test_monitor_remembers_pressure_after_memory_is_free(tmp_path: Path) -> None:
    """A dead worker has released its memory. Cached memory does not count."""
    proc = make_proc(tmp_path, cgroup="0::/job\n")
    job = tmp_path / "unified/job"
    write_cgroup_v2(job, used=990_000_000, cached=500_000_000, limit="1000000000")
    monitor = MemoryMonitor(proc=proc)
    assert monitor.read_pressure() == MemoryPressure()
    write_cgroup_v2(job, used=990_000_000, limit="1000000000")
    monitor.poll()
    write_cgroup_v2(job, used=10_000_000, limit="1000000000")
    assert monitor.read_pressure() == MemoryPressure(description="its control group had used 990 MB of 1 GB")
    monitor.reset()
    assert monitor.read_pressure() == MemoryPressure()


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_cgroup_without_limit_shows_no_pressure(limit: str, tmp_path: Path) -> None:
    """Both versions write that differently."""
    proc = make_proc(tmp_path, cgroup="0::/job\n")
    write_cgroup_v2(tmp_path / "unified/job", used=10**12, limit=limit)
    assert MemoryMonitor(proc=proc).read_pressure() == MemoryPressure()


def test_monitor_reports_full_or_stalling_machine(tmp_path: Path) -> None:
    """No control group is needed for that."""
    proc = make_proc(tmp_path, cgroup="")
    (proc / "meminfo").write_text("MemTotal: 16000000 kB\nMemAvailable: 160000 kB\n")
    assert (
        MemoryMonitor(proc=proc).read_pressure().description
        == "164 MB of 16.4 GB of this machine's memory were left"
    )
    (proc / "meminfo").write_text(ROOMY)
    (proc / "pressure").mkdir()
    (proc / "pressure/memory").write_text("some avg10=61.30 avg60=9.00 avg300=0.00 total=9\nfull avg10=1\n")
    assert (
        MemoryMonitor(proc=proc).read_pressure().description == "processes waited for memory 61 % of the time"
    )


@pytest.mark.parametrize("text", ["", "\0\xff", "memory", "4:memory", "4:memory:/x\n0::/x\n", "::::"])
def test_unreadable_files_mean_no_pressure(text: str, tmp_path: Path) -> None:
    """The files are missing, empty or malformed."""
    proc = tmp_path / "proc"
    assert MemoryMonitor(proc=proc).read_pressure() == MemoryPressure()
    (proc / "self").mkdir(parents=True)
    for name in ("self/cgroup", "self/mountinfo", "meminfo"):
        (proc / name).write_bytes(text.encode("latin1"))
    assert MemoryMonitor(proc=proc).read_pressure() == MemoryPressure()


def test_monitor_polls_in_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is free again when a worker is dead. `close` ends the thread."""
    monkeypatch.setattr(round_evidence, "POLL_INTERVAL_S", 0.01)
    proc = make_proc(tmp_path, cgroup="")
    (proc / "meminfo").write_text("MemTotal: 16000000 kB\nMemAvailable: 160000 kB\n")
    monitor, before = MemoryMonitor(proc=proc), threading.active_count()
    monitor.start()
    until_s = time.monotonic() + 60
    while monitor._last_pressure is None:
        assert time.monotonic() < until_s, "the monitor does not poll"
        time.sleep(0.01)
    (proc / "meminfo").write_text(ROOMY)
    assert monitor.read_pressure().description == "164 MB of 16.4 GB of this machine's memory were left"
    monitor.close()
    assert threading.active_count() == before


def test_monitor_reads_files_of_this_kernel() -> None:
    """The usage is within the limit, where there is one."""
    group = MemoryCgroup.find_own(Path("/proc"))
    assert (
        read_fields(Path("/proc/meminfo"))["MemTotal:"]
        > read_fields(Path("/proc/meminfo"))["MemAvailable:"]
        > 0
    )
    used = group.read_usage() if group is not None else None
    if used is not None:
        assert 0 < used[0] <= used[1]
