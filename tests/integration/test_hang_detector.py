"""Hangs in real jobs are detected, reported and ended; and what the hang detector must not kill."""

from __future__ import annotations

import errno
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from elastic_resume import constants, linux
from elastic_resume.agent import shutdown
from elastic_resume.checkpoint.atomic_io import DISK, Disk
from elastic_resume.errors import MachineError
from elastic_resume.events import Event
from elastic_resume.mechanisms.hangs import stack_dump
from elastic_resume.mechanisms.hangs.detector import MAX_REPORTS, HangDetector
from elastic_resume.mechanisms.hangs.judge import MIN_UNPROVEN_DELAY_S
from elastic_resume.policy.flight_recorder import parse_dumps
from elastic_resume.policy.reasons import from_json
from elastic_resume.policy.stalls import Stall
from elastic_resume.policy.wording import describe_stall
from elastic_resume.slots.progress_page import (
    STACKS_SIGNAL,
    ProgressPage,
    ProgressRecord,
    WorkerProcess,
    read_records,
)
from elastic_resume.testing.cluster import Cluster
from tests.support.agent_parts import make_agent_context
from tests.support.paths import SCRIPTS
from tests.support.processes import wait_for

pytestmark = pytest.mark.slow

HANG = SCRIPTS / "hang.py"
LIMIT_S = 2.0


# ---- real jobs -----------------------------------------------------------------------------------------


@pytest.fixture
def make_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cluster]]:
    """Create clusters whose nodes run in the test's directory; stop them at the end."""
    monkeypatch.chdir(tmp_path)
    made: list[Cluster] = []

    def build(*, nodes: int = 1, workers: int = 3, limit_s: float = LIMIT_S) -> Cluster:
        flags = ["--hang-timeout", str(limit_s), "--rdzv-conf", "last_call_timeout=0.5"]
        env = {constants.ENV_LOG_LEVEL: "DEBUG", "TORCH_FR_BUFFER_SIZE": "2000"}
        made.append(Cluster(tmp_path, nodes=nodes, workers_per_node=workers, flags=flags, env=env))
        return made[-1]

    yield build
    for cluster in made:
        cluster.stop()


def no_progress_s(cluster: Cluster, index: int = 0) -> float:
    """Return how long no rank of a node has finished a step; 0 before the first step."""
    records = read_records(cluster.nodes[index].directory / constants.PROGRESS_FILE, 3)
    times_ns = [record.last_progress_ns for record in records]
    return (time.monotonic_ns() - max(times_ns)) / 1e9 if times_ns and all(times_ns) else 0.0


ALL_REDUCE = r"all_reduce #\d+ of group 0 \(default_pg\)"
LACKS = f"it has not started {ALL_REDUCE}, in which ranks 0, 2 wait"
UNRECORDED = "hold_gil_in_a_thread"  # torch's flight recorder is off
WAYS = {
    # The signal makes it run for a moment, so it may get a little further.
    "stop": (r"is stopped by a signal \(SIGSTOP\) at hang\.py:\d+ in (stop|main)", "in main"),
    "hold_gil": (r"native code .* holds the GIL \(its main thread is at hang\.py:\d+ in", "in hold_gil"),
    "hold_gil_in_a_thread": ("native code of one of its threads holds the GIL", "in hold_gil"),
    "skip": (r"waits in barrier #.* ranks 0, 2 wait in all_reduce #.* left out a collective", "in barrier"),
    "wait_for_data": (rf"waits for data at hang\.py:\d+ in wait_for_data; {LACKS}", "in _try_get_data"),
    "sleep_in_kernel": ("sleeps in the kernel.*cannot be woken", "kernel: state D"),
    "lock": (rf"stands still at hang\.py:\d+ in lock; {LACKS}", "in lock"),
}
"""What rank 1 does in each generation: the reason in the event, and a line of the report."""


@pytest.mark.cluster
def test_hung_rank_is_named_and_training_continues(make_cluster: Callable[..., Cluster]) -> None:
    """One job hangs differently in each generation. Event, log line and report name rank 1."""
    cluster = make_cluster()
    cluster.start(HANG, *WAYS)
    assert cluster.wait_exit(180) == [0], cluster.output(0)
    assert cluster.output(0).count("ended at step 48") == 3
    hangs = cluster.events("hang")
    assert [hang["generation"] for hang in hangs] == list(range(1, len(WAYS) + 1))
    killed = {e["worker_pid"] for e in cluster.events("worker-exit") if e["signal"] == "SIGKILL"}
    for hang, (way, (reason, stack)) in zip(hangs, WAYS.items(), strict=True):
        check_hang(hang, reason, r"a collective" if way == UNRECORDED else ALL_REDUCE)
        check_report(hang, stack, "pending collectives: unknown" if way == UNRECORDED else ALL_REDUCE)
        check_recorders(hang, set() if way == UNRECORDED else {0, 2})
        assert hang["suspects"][0]["worker_pid"] in killed
    assert len(re.findall(r"hang: rank 1 .* ranks 0, 2 wait", cluster.output(0))) == len(WAYS)


def check_hang(hang: Event, reason: str, collective: str) -> None:
    """Check that rank 1 is the suspect, with its reason, and that the others wait in ``collective``."""
    (suspect,) = hang["suspects"]
    assert suspect["rank"] == 1
    text = describe_stall(from_json(Stall, suspect["reason"]))
    assert re.search(reason, text), text
    assert hang["victims"] == [0, 2]
    for waiting in hang["waiting"].values():
        text = describe_stall(from_json(Stall, waiting))
        assert re.fullmatch(rf"waits in {collective} at hang\.py:\d+ in main", text), text
    assert (hang["step"], hang["waits_for_other_node"]) == (6 * hang["generation"] - 1, False)
    assert hang["seconds"] >= LIMIT_S == hang["threshold_s"]


def check_report(hang: Event, stack: str, collective: str) -> None:
    """Check that the report has the stacks of all ranks and lists the suspect first."""
    path = Path(hang["report"])
    assert path.name == f"g{hang['generation']}-s{hang['step']}.txt"
    report = path.read_text()
    assert report.index("SUSPECT rank 1") < report.index("victim  rank 0") < report.index("victim  rank 2")
    parts = report.split("-" * 80)
    assert [re.findall(r"rank (\d)", part)[0] for part in parts[1:]] == ["0", "1", "2"]
    assert stack in parts[2]
    # The request may set rank 1 going, which lets the others leave all_reduce; the flight recorder shows it.
    assert all("hang.py" in parts[index] and re.search(collective, parts[index]) for index in (1, 3))


def check_recorders(hang: Event, ranks: set[int]) -> None:
    """Check that the flight recorders of ``ranks`` lie beside the report, with the pending all_reduce."""
    report = Path(hang["report"])
    paths = {
        int(path.stem.rpartition("k")[2]): path for path in report.parent.glob(f"{report.stem}-rank*.json")
    }
    assert paths.keys() - {1} == ranks  # rank 1 answers in some ways of hanging
    for rank in ranks:
        found = parse_dumps(json.loads(paths[rank].read_text()))
        assert found is not None
        assert (found.pending[0].name, found.pending[0].backend) == ("all_reduce", "gloo")


@pytest.mark.cluster
def test_excused_rank_is_not_hung(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """It takes twice the limit: in its first step, and while it is busy, also after its last step."""
    cluster = make_cluster()
    cluster.start(HANG, "patience")
    for name in ("first", "busy", "after"):
        cluster.wait((tmp_path / f"{name}-waits").exists, f"the rank takes its time: {name}")
        time.sleep(2 * LIMIT_S)  # nothing must happen in this time
        (tmp_path / name).touch()
    assert cluster.wait_exit(120) == [0], cluster.output(0)
    assert cluster.events("hang") == []
    assert {e["generation"] for e in cluster.events("worker-start")} == {1}


@pytest.mark.cluster
def test_node_that_waits_kills_its_ranks_after_delay(make_cluster: Callable[..., Cluster]) -> None:
    """The rank of n1 is stopped twice, and n1 runs no hang detector. The first time the rank recovers."""
    cluster = make_cluster(nodes=2, workers=1, limit_s=4.0)
    cluster.start(HANG, "slow", *["fast"] * 8, only=[0])
    cluster.start_node(1, flags=["--hang-timeout", "0"])
    cluster.wait(step=4)
    pid = cluster.kill_worker(1, sig=signal.SIGSTOP)
    cluster.wait(lambda: cluster.events("hang"), "the hang event")
    os.kill(pid, signal.SIGCONT)
    cluster.wait(lambda: cluster.events("hang-ended"), "the end of the hang")
    assert {e["generation"] for e in cluster.events("worker-start")} == {1}
    cluster.kill_worker(1, sig=signal.SIGSTOP)
    assert cluster.wait_exit(120) == [0, 0], cluster.output(0)
    hang = cluster.events("hang")[-1]
    assert len(cluster.events("hang")) == 2
    assert (hang["node"], hang["suspects"], hang["victims"], hang["waits_for_other_node"]) == (
        "n0",
        [],
        [0],
        True,
    )
    assert "rank 0 waits for a rank of another node: waits in all_reduce" in cluster.output(0)
    assert "no node has ended the hang" in cluster.output(0)
    assert cluster.wait(generation=2)


@pytest.mark.cluster
def test_suspended_node_sees_no_hang(make_cluster: Callable[..., Cluster]) -> None:
    """Agent and workers stand still for twice the limit, as in a frozen container."""
    cluster = make_cluster()
    cluster.start(HANG, "slow", *["fast"] * 8)
    cluster.wait(step=4)
    frozen = cluster.processes(0)
    for process in frozen:  # the agent first
        process.suspend()
    cluster.wait(lambda: no_progress_s(cluster) > 2 * LIMIT_S, "twice the limit")
    for process in reversed(frozen):
        process.resume()
    assert cluster.wait_exit(120) == [0], cluster.output(0)
    assert cluster.events("hang") == []


# ---- a hang detector without a job ----------------------------------------------------------------------


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that waits. It has the descriptors of a worker, but no handler for them."""
    code = "import os; print(os.memfd_create('elastic_resume-stacks'), os.pipe()[1], flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    select.select([process.stdout], [], [])  # it has started
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("timeout_s", [0.0, LIMIT_S])
def test_hang_timeout_of_0_starts_no_thread(tmp_path: Path, timeout_s: float) -> None:
    """With 0 a rank may take for ever."""
    detector = make_detector(tmp_path, 1, Mock(), timeout_s=timeout_s)
    detector.start(Mock())
    assert any(thread.name == "hang-detector" for thread in threading.enumerate()) == (timeout_s > 0)
    detector.close()


def start_ticks(pid: int) -> int:
    """Return when the process started, in clock ticks."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def make_detector(
    path: Path, workers: int, emit: Callable[..., Any], disk: Disk = DISK, timeout_s: float = LIMIT_S
) -> HangDetector:
    """Return the detector of a node in generation 7."""
    settings = {"hang_timeout": timeout_s}
    context = make_agent_context(node_dir=path, workers=workers, emit=emit, settings=settings)
    detector = HangDetector(context, disk)
    detector.begin_generation(Mock(generation=7))
    return detector


class Stage:
    """A hang detector without its thread, a progress page, and a worker that does nothing."""

    def __init__(
        self, path: Path, pid: int, disk: Disk = DISK, emit: Callable[..., Any] | None = None
    ) -> None:
        self.path = path
        self.pid = pid
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.page = ProgressPage(path / constants.PROGRESS_FILE)
        self.detector = make_detector(path, 1, emit or self.emit, disk)

    def emit(self, event: str, **fields: Any) -> None:
        """Keep an event."""
        self.events.append((event, fields))

    def hang(self, polls: int = 4, world_size: int = 1, **other: int) -> None:
        """Let the worker finish one step and no other; ``other`` overrides fields of its record."""
        fields = {"rank": 0, "agent_pid": os.getpid(), "assigned_generation": 7, "pid": self.pid}
        fields |= {"start_ticks": start_ticks(self.pid), "stack_output_fd": 0, "stack_request_fd": 0, **other}
        self.page.start_generation(
            0, generation=3, step=10, world_size=world_size, worker=WorkerProcess(**fields)
        )
        self.page.finish_step(0, 11)
        for _ in range(polls):
            self.detector.poll(1.0)

    @property
    def records(self) -> list[ProgressRecord]:
        """Return the records of the page."""
        return read_records(self.path / constants.PROGRESS_FILE, 1)

    @property
    def is_killed(self) -> bool:
        """Return whether the worker was killed."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.fixture
def stage(tmp_path: Path, child: subprocess.Popen[bytes]) -> Stage:
    """Create a stage in generation 7."""
    return Stage(tmp_path, child.pid)


def test_hung_worker_is_killed_and_reported_once(stage: Stage) -> None:
    """A worker without a handler for the signal is not asked for its stacks."""
    stage.hang()
    wait_for(lambda: stage.is_killed, "the worker to be dead")
    report = stage.path / constants.STACKS_DIR / "g3-s11.txt"
    wait_for(report.exists, "the report")
    ((kind, fields),) = stage.events
    assert (kind, fields["suspects"][0]["worker_pid"]) == ("hang", stage.pid)
    assert "Python stacks: none" in report.read_text()
    stage.detector.poll(1.0)
    assert len(stage.events) == 1


def test_rank_that_may_wait_for_another_node_is_killed_later(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent cannot tell whether it waits; an agent with proof acts at once."""
    stage.hang(polls=6, world_size=2)
    ((kind, fields),) = stage.events
    assert (kind, fields["kill_delay_s"], len(fields["suspects"])) == ("hang", MIN_UNPROVEN_DELAY_S, 1)
    assert not stage.is_killed
    assert "may be the cause. The stalled workers are killed in 4 s" in caplog.text
    stage.detector.poll(1.0)
    wait_for(lambda: stage.is_killed, "the worker to be dead")


def test_later_kill_survives_page_that_cannot_be_read(stage: Stage) -> None:
    """The disk that hangs may be the one that the page is on."""
    stage.hang(polls=4, world_size=2)
    page = stage.path / constants.PROGRESS_FILE
    page.rename(stage.path / "away")
    stage.detector.poll(1.0)
    (stage.path / "away").rename(page)
    for _ in range(8):  # the page's reading begins again
        stage.detector.poll(1.0)
    wait_for(lambda: stage.is_killed, "the worker to be dead")


def test_later_kill_does_not_wait_for_finished_rank(tmp_path: Path, stage: Stage) -> None:
    """A rank that has done its last step makes no progress that could be missed."""
    stage.hang(polls=0, world_size=4)
    with subprocess.Popen(["sleep", "60"]) as finished:
        fields = {"rank": 1, "agent_pid": os.getpid(), "assigned_generation": 7, "pid": finished.pid}
        fields |= {"start_ticks": start_ticks(finished.pid), "stack_output_fd": 0, "stack_request_fd": 0}
        worker = WorkerProcess(**fields)
        stage.page.start_generation(1, generation=3, step=10, world_size=4, worker=worker)
        stage.page.finish_step(1, 11)
        stage.page.set_idle(1)
        stage.detector = make_detector(tmp_path, 2, stage.emit)
        for _ in range(8):
            stage.detector.poll(1.0)
        wait_for(lambda: stage.is_killed, "the worker to be dead")
        finished.kill()


def test_hung_worker_is_killed_on_a_kernel_without_pidfd(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is known by its number and start time."""

    def refuse(_: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(linux, "pidfd_open", refuse)
    stage.hang(polls=8)
    wait_for(lambda: stage.is_killed, "the worker to be dead")


def test_worker_that_cannot_be_killed_is_named(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody says that it was killed."""

    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(linux, "pidfd_send_signal", refuse)
    stage.hang(polls=8)
    assert "could not be killed: kill it by hand." in caplog.text
    assert not stage.is_killed


@pytest.mark.parametrize(
    "other",
    [
        *({"assigned_generation": other} for other in (6, 8)),
        *({"pid": other} for other in (0, 1 << 40)),
        {"agent_pid": 1},
        {"start_ticks": 1},
    ],
)
def test_record_of_other_worker_kills_nothing(stage: Stage, other: dict[str, int]) -> None:
    """It is stale, or its process ID was recycled."""
    stage.hang(polls=8, **other)
    assert (stage.is_killed, stage.events) == (False, [])


def test_detector_judges_nothing_before_first_view_or_while_paused(stage: Stage) -> None:
    """Workers that are being stopped may take their time."""
    stage.detector.begin_stop("SIGTERM")
    stage.hang(polls=8)
    stage.detector.begin_generation(Mock(generation=0))
    stage.hang(polls=8)
    assert (stage.is_killed, stage.events) == (False, [])


def test_stop_signal_pauses_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are drained save and make no steps."""
    monkeypatch.setenv(constants.ENV_DRAIN_SIGNALS, "SIGTERM,SIGUSR1")
    paused = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with shutdown.watch_stop_signals(print, lambda _: paused.set()):
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_for(paused.is_set, "the detector to be paused")
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_busy_time_counts_after_its_limit(stage: Stage) -> None:
    """The script sets the limit."""
    stage.hang(polls=0)
    stage.page.set_busy(0, True, limit_s=0.05)
    stage.detector.poll(1.0)
    wait_for(lambda: time.monotonic_ns() > stage.records[0].busy_until_ns, "the end of the limit")
    for _ in range(4):
        stage.detector.poll(1.0)
    wait_for(lambda: stage.is_killed, "the worker to be dead")


def test_hanging_disk_does_not_prevent_kill(stage: Stage) -> None:
    """Neither event nor report can be written."""
    disk_recovers = threading.Event()
    stuck = Stage(stage.path, stage.pid, emit=lambda *_, **__: disk_recovers.wait())
    stuck.hang()
    wait_for(lambda: stuck.is_killed, "the worker to be dead")
    disk_recovers.set()


def test_unwritable_report_is_logged(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """The event is emitted."""

    class Full(Disk):
        def make_dirs(self, path: Path) -> None:
            raise MachineError(f"cannot make {path}: no space")

    full = Stage(stage.path, stage.pid, disk=Full())
    full.hang()
    wait_for(lambda: "cannot write the report of the hang: cannot make" in caplog.text, "the log line")
    assert [kind for kind, _ in full.events] == ["hang"]


def test_detector_keeps_newest_reports_and_other_files(stage: Stage) -> None:
    """Generation and step are compared as numbers, not as text."""
    directory = stage.path / constants.STACKS_DIR
    directory.mkdir()
    (directory / "notes.txt").touch()
    names = [
        {f"g{number}-s{1000 - number}{end}" for end in (".txt", "-rank0.json", "-rank11.json")}
        for number in range(MAX_REPORTS + 5)
    ]
    for name in set().union(*names):
        (directory / name).touch()
    stage.detector._prune_reports(directory)
    assert {path.name for path in directory.iterdir()} == {"notes.txt"}.union(*names[5:])


def test_worker_without_handlers_is_not_disturbed(stage: Stage, child: subprocess.Popen[bytes]) -> None:
    """Descriptors may be other files by now, and a signal without a handler would kill."""
    assert child.stdout is not None
    stacks_fd, request_fd = map(int, child.stdout.readline().split())
    for fields, answered in (
        ({"stack_output_fd": 1, "stack_request_fd": 0}, None),
        ({"stack_output_fd": stacks_fd, "stack_request_fd": stacks_fd}, None),
        ({"stack_output_fd": stacks_fd, "stack_request_fd": request_fd}, False),
    ):
        stage.hang(polls=0, **fields)
        (state,) = stack_dump.collect_rank_states(stage.records, lambda record: record.step == 11)
        evidence = state.evidence
        assert (evidence.python_responded, evidence.recorded) == (answered, None)
        assert evidence.frames == ()
        assert not stage.is_killed
    os.kill(stage.pid, STACKS_SIGNAL)
    wait_for(lambda: stage.is_killed, "the signal to kill it")


@pytest.mark.parametrize(
    ("answers", "num_collectives"),
    [
        (b'{"collectives": 3}\n', 3),  # reading the flight recorder takes too long
        (b'{"collectives": 3}\n{"flight_recorder": 7}\n', 3),
        (b'{"collectives": "x"}\n{"flight_recorder": {"gloo": {"entries": [{}, 7]}}}\n', 0),
        (b'{"collectives": 3}\n{"flight_recorder": ' + b"[" * 100_000 + b"\n", 3),
        (b'{"collectives": 3}\n{"flight_recorder": "' + b"x" * stack_dump.MAX_ANSWERS_BYTES + b'"}\n', 3),
    ],
)
def test_worker_without_readable_recorder_has_responded(
    stage: Stage,
    child: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    answers: bytes,
    num_collectives: int,
) -> None:
    """It holds no GIL. Whatever the script's process writes, its hang is examined."""
    assert child.stdout is not None
    stacks_fd, request_fd = map(int, child.stdout.readline().split())

    def answer(query: Any) -> None:
        query._is_sent = True
        with open(f"/proc/{stage.pid}/fd/{stacks_fd}", "ab") as output:
            output.write(answers)

    monkeypatch.setattr(stack_dump._RankQuery, "send", answer)
    monkeypatch.setattr(stack_dump, "RECORDER_TIMEOUT_S", 0.05)
    stage.hang(polls=0, stack_output_fd=stacks_fd, stack_request_fd=request_fd)
    (state,) = stack_dump.collect_rank_states(stage.records, lambda _: True)
    evidence = state.evidence
    assert (evidence.python_responded, evidence.recorded) == (True, None)
    assert evidence.num_collectives == num_collectives


def test_parse_main_thread_takes_last_thread() -> None:
    """The interpreter writes the thread that got the signal first."""
    text = (
        'Current thread 0x01 (most recent call first):\n  File "/a/b.py", line 3 in f\n\n'
        'Thread 0x02 [main] (most recent call first):\n  File "/a/c d.py", line 5 in <lambda>\n'
        '  File "/a/e.py", line 7 in <module>\n'
    )
    frames = stack_dump.parse_main_thread(text)
    assert [str(frame) for frame in frames] == ["c d.py:5 in <lambda>", "e.py:7 in <module>"]
    assert stack_dump.parse_main_thread("") == ()
