"""Evidence of a round's end: its events in memory, and memory pressure read from files like the kernel's."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pytest

from elastic_resume.agent import failure_evidence
from elastic_resume.agent.failure_evidence import FailureEvents, MemoryMonitor
from elastic_resume.events import EventLog
from elastic_resume.machine import MemoryCgroup, available_memory_bytes, read_fields
from elastic_resume.policy.failure_classification import MemoryPressure

MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 {memory_root} {directory}/v1 rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / {directory}/v2 rw,relatime - cgroup2 cgroup2 rw
"""
ROOMY = "MemTotal: 16000000 kB\nMemFree: 1 kB\nMemAvailable: 8000000 kB\n"
FULL = "MemTotal: 16000000 kB\nMemAvailable: 160000 kB\n"
GROUP_LINE = {1: "4:memory:", 2: "0::"}  # of /proc/self/cgroup, before the group's path


def make_proc(tmp_path: Path, *, cgroup: str, memory_root: str = "/") -> Path:
    """Write the files of /proc; return their directory."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(cgroup)
    (proc / "self/mountinfo").write_text(MOUNTS.format(memory_root=memory_root, directory=tmp_path))
    (proc / "meminfo").write_text(ROOMY)
    return proc


def write_cgroup(
    directory: Path,
    version: int,
    *,
    kills: int = 0,
    used: int = 100,
    cached: int = 0,
    limit: int | None = 1000,
) -> None:
    """Write the files of a control group."""
    directory.mkdir(parents=True, exist_ok=True)
    if version == 1:
        files = {
            "memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n",
            "memory.usage_in_bytes": f"{used}\n",
            "memory.limit_in_bytes": f"{limit or 9223372036854771712}\n",
            "memory.stat": f"cache 5\ntotal_cache {cached}\ntotal_shmem 0\n",
        }
    else:
        files = {
            "memory.events": f"low 0\nhigh 3\nmax 9\noom 2\noom_kill {kills}\n",
            "memory.current": f"{used}\n",
            "memory.max": f"{limit or 'max'}\n",
            "memory.stat": f"anon 50\nfile {cached}\nshmem 0\n",
        }
    for name, text in files.items():
        (directory / name).write_text(text)


@pytest.mark.parametrize("version", [1, 2])
def test_monitor_counts_oom_kills_since_reset(version: int, tmp_path: Path) -> None:
    """Earlier kills belong to an earlier round."""
    group = tmp_path / f"v{version}" / "job"
    write_cgroup(group, version, kills=3)
    monitor = MemoryMonitor(
        proc=make_proc(tmp_path, cgroup=f"8:pids:/elsewhere\n{GROUP_LINE[version]}/job\n")
    )
    assert monitor.read_pressure() == MemoryPressure()
    write_cgroup(group, version, kills=4)
    assert monitor.read_pressure() == MemoryPressure(oom_kills=1)
    monitor.reset()
    assert monitor.read_pressure() == MemoryPressure()


def test_cgroup_is_found_inside_container(tmp_path: Path) -> None:
    """The path is that of the host, and the mount begins at that path."""
    write_cgroup(tmp_path / "v1", 1, kills=1)
    group = MemoryCgroup.find_own(
        make_proc(tmp_path, cgroup="4:memory:/docker/abc\n", memory_root="/docker/abc")
    )
    assert group is not None
    assert (group.directory, group.read_oom_kills()) == (tmp_path / "v1", 1)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("limited", ["slurm/job_7", "slurm/job_7/step_0", "slurm/job_7/step_0/task_0"])
def test_available_memory_obeys_limits_of_all_ancestors(version: int, limited: str, tmp_path: Path) -> None:
    """Slurm sets its limits on the job or the step. The group of the task and the host do not show them."""
    root = tmp_path / f"v{version}"
    task = root / "slurm/job_7/step_0/task_0"
    write_cgroup(task, version, used=100_000, limit=None)
    write_cgroup(task.parent, version, used=300_000, limit=None)
    write_cgroup(task.parent.parent, version, used=400_000, limit=2_000_000)
    write_cgroup(root / limited, version, used=400_000, cached=100_000, limit=1_000_000)
    write_cgroup(tmp_path, version, used=1, limit=2)  # above the mount point: no group of ours
    proc = make_proc(tmp_path, cgroup=f"{GROUP_LINE[version]}/slurm/job_7/step_0/task_0\n")
    group = MemoryCgroup.find_own(proc)
    assert group is not None
    assert (group.directory, group.read_usage()) == (task, (300_000, 1_000_000))
    assert available_memory_bytes(proc) == 700_000


def test_cgroup_without_memory_controller_uses_parent(tmp_path: Path) -> None:
    """Cgroup v2 gives the memory controller to some levels only; below them its files are missing."""
    write_cgroup(tmp_path / "v2/job/step", 2, kills=2, used=100, limit=1000)
    (tmp_path / "v2/job/step/user/task_0").mkdir(parents=True)
    proc = make_proc(tmp_path, cgroup="0::/job/step/user/task_0\n")
    group = MemoryCgroup.find_own(proc)
    assert group is not None
    assert (group.directory, group.read_oom_kills()) == (tmp_path / "v2/job/step", 2)
    assert available_memory_bytes(proc) == 900


def test_monitor_remembers_pressure_after_memory_is_free(tmp_path: Path) -> None:
    """A dead worker has released its memory. Cached memory does not count."""
    group = tmp_path / "v2/job"
    write_cgroup(group, 2, used=990_000_000, cached=500_000_000, limit=1_000_000_000)
    monitor = MemoryMonitor(proc=make_proc(tmp_path, cgroup="0::/job\n"))
    assert monitor.read_pressure() == MemoryPressure()
    write_cgroup(group, 2, used=990_000_000, limit=1_000_000_000)
    monitor.poll()
    write_cgroup(group, 2, used=10_000_000, limit=1_000_000_000)
    assert monitor.read_pressure() == MemoryPressure(0, 990_000_000, 1_000_000_000, is_control_group=True)
    monitor.reset()
    assert monitor.read_pressure() == MemoryPressure()


@pytest.mark.parametrize("version", [1, 2])
def test_cgroup_without_limit_shows_no_pressure(version: int, tmp_path: Path) -> None:
    """Both versions write that differently."""
    write_cgroup(tmp_path / f"v{version}/job", version, used=10**12, limit=None)
    proc = make_proc(tmp_path, cgroup=f"{GROUP_LINE[version]}/job\n")
    assert MemoryMonitor(proc=proc).read_pressure() == MemoryPressure()


@pytest.mark.parametrize("text", ["", "\0\xff", "memory", "4:memory", "4:memory:/x\n0::/x\n", "::::"])
def test_unreadable_files_mean_no_pressure(text: str, tmp_path: Path) -> None:
    """The files are missing, empty or malformed."""
    proc = tmp_path / "proc"
    assert MemoryMonitor(proc=proc).read_pressure() == MemoryPressure()
    (proc / "self").mkdir(parents=True)
    for name in ("self/cgroup", "self/mountinfo", "meminfo"):
        (proc / name).write_bytes(text.encode("latin1"))
    assert MemoryMonitor(proc=proc).read_pressure() == MemoryPressure()


def test_monitor_polls_memory_of_machine_in_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is free again when a worker is dead. `close` ends the thread."""
    monkeypatch.setattr(failure_evidence, "POLL_INTERVAL_S", 0.01)
    proc = make_proc(tmp_path, cgroup="")
    (proc / "meminfo").write_text(FULL)
    monitor, num_threads = MemoryMonitor(proc=proc), threading.active_count()
    monitor.start()
    deadline_s = time.monotonic() + 60
    while monitor._last_pressure is None:
        assert time.monotonic() < deadline_s, "the monitor does not poll"
        time.sleep(0.01)
    (proc / "meminfo").write_text(ROOMY)
    assert monitor.read_pressure() == MemoryPressure(0, 15_840_000 << 10, 16_000_000 << 10)
    monitor.close()
    assert threading.active_count() == num_threads


def test_monitor_reads_files_of_this_kernel() -> None:
    """The usage is within the limit, where there is one."""
    group = MemoryCgroup.find_own()
    memory = read_fields(Path("/proc/meminfo"))
    assert memory["MemTotal:"] > memory["MemAvailable:"] > 0
    usage = group.read_usage() if group is not None else None
    if usage is not None:
        assert 0 < usage[0] <= usage[1]


def test_evidence_contain_event_after_torn_line() -> None:
    """A writer that is killed leaves the start of its line."""
    with contextlib.closing(FailureEvents()) as evidence:
        with open(evidence.path, "ab") as file:
            file.write(b'{"t":1.0,"event":"failure","mess')
        with contextlib.closing(EventLog(Path("/dev/full"), memory_path=evidence.path)) as log:
            log.emit("worker-exit", rank=0)
            log.emit("hang", rank=0)
        assert [event["event"] for event in evidence.read()] == ["worker-exit", "hang"]
