"""Test what `elastic-resume doctor` reports of a node, and when it predicts a failure."""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import os
import platform
import resource
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import __version__, linux, machine
from elastic_resume.cli import main
from elastic_resume.commands import doctor
from tests.support.gpus import FakeGpus
from tests.unit.schedulers.test_environment import POD, STEP


@pytest.fixture
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ELASTIC_RESUME_TOKEN", "ELASTIC_RESUME_CKPT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "_TORCH_PROBE", "print('2.9.9+cu1 8')")  # the import takes seconds
    monkeypatch.setenv("PATH", "")  # a squeue without its controller takes four seconds to say so


def run_doctor(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], *flags: str) -> int:
    """Return the exit code of the command in this environment."""
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    return main(["doctor", *flags])


@pytest.mark.usefixtures("_bare")
def test_findings_have_sources_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """This is a healthy step of a Slurm job."""
    environ = {
        **STEP,
        "ELASTIC_RESUME_TOKEN": "do not show this",
        "ELASTIC_RESUME_MAX_NO_PROGRESS": "7",
        "ELASTIC_RESUME_CKPT_DIR": "/proc/stat",  # the flag beats it
    }
    assert run_doctor(monkeypatch, environ, "--ckpt-dir", str(tmp_path / "new")) == 0
    header, table, checked = capsys.readouterr().out.split("\n\n")
    assert "Checked: a start of `elastic-resume run` here, without flags" in checked
    assert header == "Nothing found that would make a start fail."
    lines = dict(line.split(maxsplit=1) for line in table.splitlines())
    assert lines["job"].split() == ["slurm-1234567", "SLURM_JOB_ID"]
    assert lines["workers"].split() == ["8", "SLURM_GPUS_ON_NODE"]
    assert lines["max-no-progress"].split() == ["7", "ELASTIC_RESUME_MAX_NO_PROGRESS"]
    assert "free" in lines["checkpoints"]
    assert "--ckpt-dir" in lines["checkpoints"]
    assert "do not show" not in str(lines)
    assert lines["Python"].split()[0] == platform.python_version()
    assert lines["elastic_resume"].split()[0] == __version__
    assert lines["torch"].split()[0] == "2.9.9+cu1"
    assert lines["GPUs"].split()[0] == "8"


@pytest.mark.usefixtures("_bare")
@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2"}, "--ntasks-per-node=1"),
        ({**POD, "ELASTIC_RESUME_NODES": "4:2"}, "ELASTIC_RESUME_NODES"),
        ({"ELASTIC_RESUME_CKPT_DIR": "/proc/nothing"}, "/proc"),
        ({"ELASTIC_RESUME_CKPT_DIR": "/proc/stat"}, "/proc/stat is no directory"),
        ({"ELASTIC_RESUME_CKPT_DIR": "/x" * 3000}, "name too long"),
        ({"ELASTIC_RESUME_PREEMPTION_NOTICE": "bogus"}, "ELASTIC_RESUME_PREEMPTION_NOTICE is 'bogus'"),
        ({"ELASTIC_RESUME_KEEP": "1"}, "ELASTIC_RESUME_KEEP is 1, which is too few"),
        ({"ELASTIC_RESUME_GRACE": "soon"}, "ELASTIC_RESUME_GRACE is 'soon'"),
        ({"ELASTIC_RESUME_LOG_LEVEL": "TRACE"}, "ELASTIC_RESUME_LOG_LEVEL is 'TRACE'"),
        ({"ELASTIC_RESUME_TOKEN": ""}, "ELASTIC_RESUME_TOKEN holds no token"),
        ({"ELASTIC_RESUME_TOKEN": "short"}, "ELASTIC_RESUME_TOKEN is shorter than 16 bytes"),
    ],
)
def test_problem_is_reported_with_exit_code_1(
    environ: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It comes first."""
    assert run_doctor(monkeypatch, environ) == 1
    header, _, below = capsys.readouterr().out.partition("\n")
    problems, _, table = below.partition("\n\n")
    assert header == "A start without flags would fail here:"
    assert problem in problems
    assert table.startswith("scheduler")


@pytest.mark.usefixtures("_bare")
def test_missing_torch_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No worker could start."""
    monkeypatch.setattr(doctor, "_TORCH_PROBE", "import torch_that_is_missing")
    assert run_doctor(monkeypatch, {}) == 1
    assert "No module named 'torch_that_is_missing'" in capsys.readouterr().out


@pytest.mark.usefixtures("_bare")
def test_gpus_are_compared_with_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU that a worker would use is a problem; another one is not."""
    fake = FakeGpus(tmp_path, count=3)
    fake.install(monkeypatch)
    for index in (1, 2):
        fake.change_gpu(index, recovery_action=index)
    lines = {finding.name: finding for finding in doctor.check_installation(workers=2)}
    assert lines["GPUs"] == doctor.Finding("GPUs", "8", "torch.cuda.device_count()")
    assert lines["nvidia-ml-py"].value == "knows 3 GPUs"
    assert lines["GPU 1"].problem == "GPU 1 (GPU-0001), of local rank 1, needs a recovery: GPU reset"
    assert (lines["GPU 2"].value, lines["GPU 2"].problem) == ("needs a recovery: reboot", "")
    lines = {finding.name: finding for finding in doctor.check_installation(workers=9)}
    assert lines["GPUs"].source == "torch.cuda.device_count(): 9 workers must share them"
    assert run_doctor(monkeypatch, {}) == 0
    assert run_doctor(monkeypatch, {"PET_NPROC_PER_NODE": "2"}) == 1
    fake.change(errors={"nvmlInit": 18})
    assert doctor.check_installation()[-1].value == "knows 0 GPUs"


@pytest.mark.usefixtures("_bare")
@pytest.mark.parametrize(
    ("version", "has_driver", "is_named"),
    [("2.9.9+cu1 8", False, True), ("2.9.9+rocm7 8", False, False), ("2.9.9+cpu 0", True, True)],
)
def test_missing_nvidia_ml_py_is_named(
    version: str, has_driver: bool, is_named: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only where there are GPUs of NVIDIA."""
    monkeypatch.setattr(doctor, "_TORCH_PROBE", f"print('{version}')")
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER_FILE", tmp_path if has_driver else tmp_path / "none")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    found = {finding.name: finding.source for finding in doctor.check_installation()}
    assert ("pip install '.[nvidia]'" in found.get("nvidia-ml-py", "")) == is_named


def test_torch_is_probed_in_another_process() -> None:
    """The version is that of this environment."""
    found = {finding.name: finding for finding in doctor.check_installation()}
    # A build's own suffix (+cpu, +cu130) is not always in the package's version.
    assert found["torch"].value.partition("+")[0] == importlib.metadata.version("torch").partition("+")[0]
    assert found["GPUs"].value.isdecimal()


@pytest.mark.usefixtures("_bare")
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ((linux, "memfd_create"), "memory files: Operation not permitted; a run needs memfd_create(2)"),
        ((tempfile, "NamedTemporaryFile"), "temporary files: Operation not permitted; set TMPDIR"),
        ((fcntl, "flock"), "a file cannot be locked or made durable there: "),
        ((os, "fsync"), "a file cannot be locked or made durable there: "),
        ((socket, "socket"), "sockets: Operation not permitted; a run needs unix and TCP sockets"),
    ],
)
def test_call_that_the_machine_refuses_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    change: tuple[Any, str],
    problem: str,
) -> None:
    """As under a filter for system calls, or on a file system without them."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(*change, refuse)
    assert run_doctor(monkeypatch, {}, "--ckpt-dir", str(tmp_path)) == 1
    assert problem in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_bare")
def test_directory_whose_locks_exclude_nobody_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As on a network file system that is mounted without locks."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert run_doctor(monkeypatch, {}, "--ckpt-dir", str(tmp_path)) == 0
    assert "flock(2) grants a lock twice: a run keeps its directory by owner-lease" in capsys.readouterr().out


@pytest.mark.usefixtures("_bare")
def test_kernel_without_pidfd_is_named_and_no_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Such as RHEL 8's."""

    def refuse(_: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(linux, "pidfd_open", refuse)
    assert run_doctor(monkeypatch, {}, "--ckpt-dir", str(tmp_path)) == 0
    assert "none (Function not implemented)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("address", "value", "source"),
    [
        ("127.0.1.1", "127.0.1.1", "is no address for others; run gives gloo an interface"),
        ("::1", "::1", "is no address for others; run gives gloo an interface"),
        ("fe80::1%eth0", "fe80::1%eth0", socket.gethostname()),
        (None, "none", "Name or service not known; run gives gloo an interface"),
    ],
)
def test_address_of_own_name_is_shown(
    address: str | None, value: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's leads to 127.0.1.1."""

    def look_up(*_: object, **__: object) -> list[Any]:
        if address is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    finding = doctor._check_own_name()
    assert (finding.value, finding.problem) == (value, "")
    assert finding.source.endswith(source)


@pytest.mark.parametrize(
    ("limit", "card", "value", "is_small"),
    [
        (64 << 10, "mlx5_0", "65.5 kB", True),
        (64 << 10, "", "65.5 kB", False),
        (4 << 30, "mlx5_0", "4.29 GB", False),
        (resource.RLIM_INFINITY, "mlx5_0", "unlimited", False),
    ],
)
def test_small_limit_of_locked_memory_is_named(
    limit: int, card: str, value: str, *, is_small: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """InfiniBand locks its buffers. It is no problem of a machine without, as most containers are."""
    (tmp_path / card).mkdir(exist_ok=True)
    monkeypatch.setattr(doctor, "INFINIBAND_DIR", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    finding = doctor._check_locked_memory()
    assert (finding.value, finding.problem) == (value, "")
    assert ("ulimit -l unlimited" in finding.source) == is_small


@pytest.mark.usefixtures("_bare")
def test_small_limit_of_processes_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As in a container of --pids-limit 40."""
    for name, text in (("pids.current", "3"), ("pids.max", "40"), ("pids.events", "max 0")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine.ProcessLimit, "find_own", lambda: machine.ProcessLimit(tmp_path, tmp_path))
    assert run_doctor(monkeypatch, {"PET_NPROC_PER_NODE": "1"}, "--ckpt-dir", str(tmp_path)) == 0
    assert "3 of 40 run, threads included" in capsys.readouterr().out
    assert run_doctor(monkeypatch, {"PET_NPROC_PER_NODE": "2"}, "--ckpt-dir", str(tmp_path)) == 1
    assert "the node needs about 44 more" in capsys.readouterr().out


def test_archive_that_fails_shows_it_in_its_row(tmp_path: Path) -> None:
    """The row of one that works says what was tried; so would this one."""
    (tmp_path / "file").touch()
    (finding,) = doctor.check_archive(str(tmp_path / "file" / "x"))
    assert finding.value == f"file://{tmp_path}/file/x: FAILED"
    assert finding.problem
    (malformed,) = doctor.check_archive("s3:/x")
    assert malformed.value == "FAILED"
