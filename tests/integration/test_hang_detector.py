"""Hangs in real jobs, each noticed, told and ended; and what the watch of an agent must not touch."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import constants
from elastic_resume.agent import shutdown, stack_dump
from elastic_resume.agent.hang_detector import MAX_REPORTS, HangDetector, detect_hangs, parse_hang_timeout
from elastic_resume.checkpoint.atomic_io import Disk
from elastic_resume.errors import ConfigError, MachineError
from elastic_resume.events import Event
from elastic_resume.policy.hangs import HangThreshold
from elastic_resume.snapshot.progress_page import (
    STACKS_SIGNAL,
    ProgressPage,
    ProgressRecord,
    WorkerProcess,
    read_records,
)
from elastic_resume.testing.cluster import Cluster
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.slow

HANG = SCRIPTS / "hang.py"
LIMIT_S = 2.0


# ---- real jobs -----------------------------------------------------------------------------------------


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cluster]]:
    """Make clusters whose nodes run in the test's directory, and stop them in the end."""
    monkeypatch.chdir(tmp_path)
    made: list[Cluster] = []

    def build(*, nodes: int = 1, workers: int = 3, limit_s: float = LIMIT_S) -> Cluster:
        flags = ["--hang-timeout", str(limit_s), "--settle", "0.5"]
        made.append(Cluster(tmp_path, nodes=nodes, workers_per_node=workers, flags=flags))
        return made[-1]

    yield build
    for cluster in made:
        cluster.stop()


def quiet_s(cluster: Cluster, index: int = 0) -> float:
    """For how long no rank of a node has finished a step; 0 before the first one."""
    lines = read_records(cluster.nodes[index].directory / constants.PROGRESS_FILE, 3)
    beats = [line.last_progress_ns for line in lines]
    return (time.monotonic_ns() - max(beats)) / 1e9 if beats and all(beats) else 0.0


WAYS = {
    # Asked, it goes on; another of its threads may take the question, and it gets some microseconds further.
    "stop": (r"is stopped by a signal \(SIGSTOP\) at hang\.py:\d+ in (stop|main)", "in main"),
    "hold_gil": (r"native code .* holds the GIL \(its main thread is at hang\.py:\d+ in", "in hold_gil"),
    "hold_gil_in_a_thread": ("native code of one of its threads holds the GIL", "in hold_gil"),
    "skip": (r"waits in barrier .* ranks 0, 2 wait in all_reduce .* left out a collective", "in barrier"),
    "wait_for_data": (r"waits for data at hang\.py:\d+ in wait_for_data", "in _try_get_data"),
    "sleep_in_kernel": ("sleeps in the kernel.*cannot be woken", "kernel: state D"),
    "lock": (r"stands still at hang\.py:\d+ in lock", "in lock"),
}
"""What rank 1 does: what is said of it, and what the report shows."""


@pytest.mark.cluster
def test_the_rank_that_hangs_is_named_its_victims_too_and_training_goes_on(
    make: Callable[..., Cluster],
) -> None:
    """One job, with another hang in each generation: event, line and report name rank 1, whatever it does."""
    cluster = make()
    cluster.start(HANG, *WAYS)
    assert cluster.wait_exit(180) == [0], cluster.output(0)
    assert cluster.output(0).count("ended at step 48") == 3
    hangs = cluster.events("hang")
    assert [hang["generation"] for hang in hangs] == list(range(1, len(WAYS) + 1))
    killed = {e["worker_pid"] for e in cluster.events("worker-exit") if e["signal"] == "SIGKILL"}
    for hang, (reason, stack) in zip(hangs, WAYS.values(), strict=True):
        check_hang(hang, reason)
        check_report(hang, stack)
        assert hang["suspects"][0]["worker_pid"] in killed
    assert len(re.findall(r"hang: rank 1 .* ranks 0, 2 wait for it", cluster.output(0))) == len(WAYS)


def check_hang(hang: Event, reason: str) -> None:
    """Rank 1 is the suspect, with its reason, and the others wait in their all_reduce."""
    (suspect,) = hang["suspects"]
    assert suspect["rank"] == 1
    assert re.search(reason, suspect["reason"]), suspect["reason"]
    assert hang["victims"] == [0, 2]
    for waiting in hang["waiting"].values():
        assert re.fullmatch(r"waits in all_reduce \(number \d+\) at hang\.py:\d+ in main", waiting)
    assert (hang["step"], hang["elsewhere"]) == (6 * hang["generation"] - 1, False)
    assert hang["seconds"] >= LIMIT_S == hang["threshold_s"]


def check_report(hang: Event, stack: str) -> None:
    """All three ranks with their stacks, the suspect first in the list."""
    path = Path(hang["report"])
    assert path.name == f"g{hang['generation']}-s{hang['step']}.txt"
    report = path.read_text()
    assert report.index("SUSPECT rank 1") < report.index("victim  rank 0") < report.index("victim  rank 2")
    parts = report.split("-" * 80)
    assert [re.findall(r"rank (\d)", part)[0] for part in parts[1:]] == ["0", "1", "2"]
    assert stack in parts[2]
    # One that is set going by the question put to rank 1 may have left the all_reduce: the recorder tells.
    assert all("hang.py" in parts[index] and "all_reduce (number" in parts[index] for index in (1, 3))


@pytest.mark.cluster
def test_a_rank_that_may_take_its_time_is_left_alone(make: Callable[..., Cluster], tmp_path: Path) -> None:
    """For twice the limit: in its first step, where it says that it is busy, and after its last step."""
    cluster = make()
    cluster.start(HANG, "patience")
    for name in ("first", "busy", "after"):
        cluster.wait((tmp_path / f"{name}-waits").exists, f"the rank takes its time: {name}")
        over = time.monotonic() + 2 * LIMIT_S
        cluster.wait(functools.partial(is_over, over), "twice the limit")
        (tmp_path / name).touch()
    assert cluster.wait_exit(120) == [0], cluster.output(0)
    assert cluster.events("hang") == []
    assert {e["generation"] for e in cluster.events("worker-start")} == {1}


def is_over(moment: float) -> bool:
    """Whether it has passed."""
    return time.monotonic() > moment


@pytest.mark.cluster
def test_a_node_whose_ranks_all_wait_says_so_and_ends_them_if_no_other_node_does(
    make: Callable[..., Cluster],
) -> None:
    """The rank of n1 is stopped, and there nobody looks."""
    cluster = make(nodes=2, workers=1)
    cluster.start(HANG, "slow", only=[0])
    cluster.start_node(1, flags=["--hang-timeout", "0"])
    cluster.wait(step=4)
    cluster.kill_worker(1, sig=signal.SIGSTOP)
    assert cluster.wait_exit(120) == [0, 0], cluster.output(0)
    (hang,) = cluster.events("hang")
    assert (hang["node"], hang["suspects"], hang["victims"], hang["elsewhere"]) == ("n0", [], [0], True)
    assert "rank 0 waits for a rank of another node: waits in all_reduce" in cluster.output(0)
    assert "no node has ended the hang" in cluster.output(0)
    assert cluster.wait(generation=2)


@pytest.mark.cluster
def test_ranks_that_waited_for_another_node_go_on_when_it_does(make: Callable[..., Cluster]) -> None:
    """Nobody is killed, and it is told that training goes on."""
    cluster = make(nodes=2, workers=1, limit_s=4.0)
    cluster.start(HANG, "slow", only=[0])
    cluster.start_node(1, flags=["--hang-timeout", "0"])
    cluster.wait(step=4)
    pid = cluster.kill_worker(1, sig=signal.SIGSTOP)
    cluster.wait(lambda: cluster.events("hang"), "it is noticed")
    os.kill(pid, signal.SIGCONT)
    assert cluster.wait_exit(120) == [0, 0], cluster.output(0)
    assert len(cluster.events("hang-ended")) == 1
    assert {e["generation"] for e in cluster.events("worker-start")} == {1}


@pytest.mark.cluster
def test_a_node_that_was_suspended_as_a_whole_sees_no_hang(make: Callable[..., Cluster]) -> None:
    """Agent and workers stand still for twice the limit, as when a container is frozen."""
    cluster = make()
    cluster.start(HANG, "slow")
    cluster.wait(step=4)
    frozen = cluster.processes(0)
    for process in frozen:  # the agent first
        process.suspend()
    cluster.wait(lambda: quiet_s(cluster) > 2 * LIMIT_S, "twice the limit")
    for process in reversed(frozen):
        process.resume()
    assert cluster.wait_exit(120) == [0], cluster.output(0)
    assert cluster.events("hang") == []


# ---- what it may touch ---------------------------------------------------------------------------------


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits: with a file and a bell as ours have them, and nobody who heeds them."""
    code = "import os; print(os.memfd_create('elastic_resume-stacks'), os.pipe()[1], flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def ticks_of(pid: int) -> int:
    """When the process started."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


class Stage:
    """A watch without its thread, a board, and a worker that never does anything."""

    def __init__(
        self, path: Path, pid: int, disk: Disk | None = None, tell: Callable[..., Any] | None = None
    ) -> None:
        self.path = path
        self.pid = pid
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.said: list[str] = []
        self.board = ProgressPage(path / constants.PROGRESS_FILE)
        self.watch = HangDetector(
            path, 1, HangThreshold(LIMIT_S), log=self.said.append, emit=tell or self.tell, disk=disk or Disk()
        )

    def tell(self, event: str, **fields: Any) -> None:
        """Keep an event."""
        self.events.append((event, fields))

    def hang(self, looks: int = 4, world_size: int = 1, **other: int) -> None:
        """Let the worker begin, make a step and no other; ``other`` is what its line says instead."""
        fields = {"rank": 0, "agent_pid": os.getpid(), "round": 7, "pid": self.pid}
        fields |= {"start_ticks": ticks_of(self.pid), "stack_output_fd": 0, "stack_request_fd": 0, **other}
        self.board.start_generation(
            0, generation=3, step=10, world_size=world_size, worker=WorkerProcess(**fields)
        )
        self.board.finish_step(0, 11)
        for _ in range(looks):
            self.watch.poll(1.0)

    @property
    def lines(self) -> list[ProgressRecord]:
        """What the board says."""
        return read_records(self.path / constants.PROGRESS_FILE, 1)

    @property
    def killed(self) -> bool:
        """Whether the worker was killed."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.fixture
def stage(tmp_path: Path, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> Stage:
    """In round 7."""
    monkeypatch.setenv(constants.ENV_ROUND, "7")
    return Stage(tmp_path, child.pid)


def wait_for(condition: Callable[[], Any], what: str) -> None:
    """Wait until it is true."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.005)


def test_a_worker_of_this_round_that_hangs_is_killed_once_and_told_of(stage: Stage) -> None:
    """Also one that cannot be asked for its stacks: a signal that it does not expect would kill it."""
    stage.hang()
    wait_for(lambda: stage.killed, "it is dead")
    report = stage.path / constants.HANGS_DIR / "g3-s11.txt"
    wait_for(report.exists, "the report is there")
    ((kind, fields),) = stage.events
    assert (kind, fields["suspects"][0]["worker_pid"]) == ("hang", stage.pid)
    assert "Python stacks: none" in report.read_text()
    stage.watch.poll(1.0)
    assert len(stage.events) == 1


@pytest.mark.parametrize(
    "other", [{"round": 6}, {"round": 8}, {"agent_pid": 1}, {"start_ticks": 1}, {"pid": 0}, {"pid": 1 << 40}]
)
def test_a_line_of_another_round_agent_or_process_kills_nobody(stage: Stage, other: dict[str, int]) -> None:
    """A stale one, or one whose number has become another process's."""
    stage.hang(looks=8, **other)
    assert (stage.killed, stage.events) == (False, [])


def test_between_rounds_and_while_it_is_paused_nobody_is_judged(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that are being ended may take their time."""
    stage.watch.pause()
    stage.hang(looks=8)
    monkeypatch.delenv(constants.ENV_ROUND)
    stage.hang(looks=8)
    assert (stage.killed, stage.events) == (False, [])


def test_a_page_that_takes_the_place_of_the_workers_own_proves_no_hang(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails and is mounted anew has the page of before; workers write on where nobody sees it."""
    stage.hang(looks=2)
    path = stage.path / constants.PROGRESS_FILE
    copy = stage.path / "copy"
    copy.write_bytes(path.read_bytes())
    copy.replace(path)
    for _ in range(8):
        stage.watch.poll(1.0)
    assert (stage.killed, stage.events) == (False, [])
    assert stage.said == [f"hang detection is off until the next restart: {path} was replaced by another file."]
    monkeypatch.setenv(constants.ENV_ROUND, "8")
    stage.board = ProgressPage(path)
    stage.hang(looks=5, round=8)
    wait_for(lambda: stage.killed, "the next round is watched")


def test_a_signal_that_asks_for_the_end_pauses_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that are drained save what they want to save, and make no steps."""
    monkeypatch.setenv(constants.ENV_DRAIN_SIGNALS, "SIGTERM,SIGUSR1")
    paused = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with (
            detect_hangs(tmp_path, 1, None, log=print, emit=print) as nothing,
            shutdown.watch_stop_signals(nothing, paused.set),
        ):
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_for(paused.is_set, "it is told")
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_the_script_calls_busy_has_the_limit_that_it_gives(stage: Stage) -> None:
    """After it, the time counts."""
    stage.hang(looks=0)
    stage.board.set_busy(0, True, limit_s=0.05)
    stage.watch.poll(1.0)
    wait_for(lambda: time.monotonic_ns() > stage.lines[0].busy_until_ns, "the limit is over")
    for _ in range(4):
        stage.watch.poll(1.0)
    wait_for(lambda: stage.killed, "it is dead")


def test_a_disk_that_hangs_delays_no_kill(stage: Stage) -> None:
    """Neither the event nor the report can be written, and the worker ends all the same."""
    hangs = threading.Event()
    stuck = Stage(stage.path, stage.pid, tell=lambda *_, **__: hangs.wait())
    stuck.hang()
    wait_for(lambda: stuck.killed, "it is dead")
    hangs.set()


def test_a_report_that_cannot_be_written_is_said(stage: Stage) -> None:
    """And the event is there."""

    class Full(Disk):
        def make_dirs(self, path: Path) -> None:
            raise MachineError(f"cannot make {path}: no space")

    full = Stage(stage.path, stage.pid, disk=Full())
    full.hang()
    wait_for(lambda: len(full.said) == 2, "both lines")
    assert "cannot write the report of the hang: cannot make" in full.said[1]
    assert [kind for kind, _ in full.events] == ["hang"]


def test_the_newest_reports_are_kept_and_nothing_else_is_touched(stage: Stage) -> None:
    """By generation and step, which are no texts to be sorted."""
    directory = stage.path / constants.HANGS_DIR
    directory.mkdir()
    (directory / "notes.txt").touch()
    for number in range(MAX_REPORTS + 5):
        (directory / f"g{number}-s{1000 - number}.txt").touch()
    stage.watch._prune_reports(directory)
    left = {path.name for path in directory.iterdir()}
    assert left == {"notes.txt", *(f"g{n}-s{1000 - n}.txt" for n in range(5, MAX_REPORTS + 5))}


def test_a_worker_is_asked_only_for_what_it_offers(stage: Stage, child: subprocess.Popen[bytes]) -> None:
    """Descriptors may be something else by now, and a signal without a handler would kill."""
    assert child.stdout is not None
    stacks_fd, bell_fd = map(int, child.stdout.readline().split())
    for fields, answered in (
        ({"stack_output_fd": 1, "stack_request_fd": 0}, None),
        ({"stack_output_fd": stacks_fd, "stack_request_fd": stacks_fd}, None),
        ({"stack_output_fd": stacks_fd, "stack_request_fd": bell_fd}, False),
    ):
        stage.hang(looks=0, **fields)
        (found,) = stack_dump.collect_rank_states(stage.lines, lambda line: line.step == 11)
        assert (
            found.evidence.python_responded,
            found.evidence.pending_collectives,
            found.evidence.frames,
        ) == (
            answered,
            None,
            (),
        )
        assert not stage.killed
    os.kill(stage.pid, STACKS_SIGNAL)
    wait_for(lambda: stage.killed, "the signal would have killed it")


@pytest.mark.parametrize(
    ("text", "patience"),
    [(None, HangThreshold()), ("0", None), ("2.5", HangThreshold(2.5)), ("1.5m", HangThreshold(90.0))],
)
def test_the_flag_sets_the_threshold_or_turns_it_off(
    text: str | None, patience: HangThreshold | None
) -> None:
    """Without it the rule of the design holds."""
    assert parse_hang_timeout(text) == patience


@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "2 s", "1e99"])
def test_other_values_of_the_flag_are_refused(text: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError, match=r"--hang-timeout is .* write a time "):
        parse_hang_timeout(text)


def test_the_main_thread_is_the_last_that_is_written() -> None:
    """Whichever thread got the signal."""
    text = (
        'Current thread 0x01 (most recent call first):\n  File "/a/b.py", line 3 in f\n\n'
        'Thread 0x02 [main] (most recent call first):\n  File "/a/c d.py", line 5 in <lambda>\n'
        '  File "/a/e.py", line 7 in <module>\n'
    )
    frames = stack_dump.parse_main_thread(text)
    assert [str(one) for one in frames] == ["c d.py:5 in <lambda>", "e.py:7 in <module>"]
    assert stack_dump.parse_main_thread("") == ()
