"""What the restart controller decides from events in memory and from the progress page."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_resume import constants
from elastic_resume.agent import restart_controller
from elastic_resume.agent.failure_evidence import RoundEvents
from elastic_resume.agent.restart_controller import RestartController, WaitLog
from elastic_resume.agent.workers.lease_page import LeasePage
from elastic_resume.errors import JobFailedError
from elastic_resume.events import EventLog, parse_line
from elastic_resume.policy.failure_classification import Failure, make_network_failure, make_node_failure
from elastic_resume.policy.restart import RestartLimits
from elastic_resume.rendezvous.core.interface import EmitEvent, StartWorkers
from elastic_resume.rendezvous.core.world import Incarnation
from elastic_resume.slots.progress_page import ProgressPage, WorkerProcess
from tests.support.disks import SimulatedDisk
from tests.support.processes import wait_for


@pytest.fixture(autouse=True)
def round_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the variables that a round sets."""
    for name in (constants.ENV_ROUND, constants.ENV_MTBF_S, constants.ENV_GENERATION):
        monkeypatch.setenv(name, "1")


@contextlib.contextmanager
def open_controller(
    directory: Path, limits: RestartLimits | None = None
) -> Iterator[tuple[RestartController, EventLog]]:
    """Open a controller of node a and its event log."""
    path = directory / constants.EVENTS_FILE
    with (
        contextlib.closing(LeasePage()) as lease_page,
        contextlib.closing(RoundEvents()) as round_events,
        contextlib.closing(EventLog(path, memory_path=round_events.path, node="a")) as log,
    ):
        controller = RestartController("a", log, path, lease_page, round_events, limits=limits)
        yield controller, log
        controller.end_wait()


def world(generation: int, *failures: Failure, nodes: str = "a") -> StartWorkers:
    """Return a view, by default of node a alone."""
    members = tuple(Incarnation(node, "1", 1, f"{node}:1") for node in nodes)
    return StartWorkers(generation, 0, members, "a:2", (1,) * len(nodes), failures=failures)


def this_process(start_ticks: int = 0) -> WorkerProcess:
    """Return this process as a worker of round 1."""
    return WorkerProcess(0, os.getpid(), 1, os.getpid(), start_ticks, 0, 0)


def test_controller_is_spare_after_spare_event(tmp_path: Path) -> None:
    """The rendezvous emits the event."""
    with open_controller(tmp_path) as (controller, _):
        controller.on_rendezvous_event(EmitEvent("waiting", "for others"))
        assert not controller.is_spare
        controller.on_rendezvous_event(EmitEvent("spare", "generation 1 runs without this node"))
        assert controller.is_spare


def test_event_of_a_wait_has_the_missing_nodes(tmp_path: Path) -> None:
    """The report names them. Without missing nodes the field is absent."""
    with open_controller(tmp_path) as (controller, _):
        controller.on_rendezvous_event(EmitEvent("waiting", "for votes", ("b", "c")))
        controller.on_rendezvous_event(EmitEvent("waiting", "for others"))
    events = [parse_line(line) for line in (tmp_path / constants.EVENTS_FILE).read_text().splitlines()]
    assert [event.get("missing") for event in events if event] == [["b", "c"], None]


@pytest.mark.parametrize(("step", "fails"), [(7, False), (5, True)])
def test_controller_decides_with_unreadable_event_log(tmp_path: Path, step: int, *, fails: bool) -> None:
    """Exits are in memory, and steps are on the progress page."""
    with (
        SimulatedDisk(tmp_path) as disk,
        open_controller(disk.path, RestartLimits(max_no_progress=1)) as (controller, log),
    ):
        path = disk.path / constants.EVENTS_FILE
        log.emit("agent-start")
        page = ProgressPage(disk.path / constants.PROGRESS_FILE)
        controller.after_rendezvous(world(1))
        with path.open("rb") as file:
            os.fsync(file.fileno())  # the failing disk then forgets what the page cache has of it
        log.close()
        disk.fail()
        with pytest.raises(OSError, match="Input/output error"):
            path.read_bytes()
        page.start_generation(0, generation=1, step=5, world_size=1, worker=this_process())
        page.finish_step(0, step)
        log.emit("worker-start", step=5, rank=0)
        log.emit("worker-exit", rank=0, signal="SIGSEGV", exit_code=None, stopped=False)
        controller.before_round(failed=True)
        if fails:
            with pytest.raises(JobFailedError, match="rank 0 was killed by SIGSEGV"):
                controller.after_rendezvous(world(2))
        failure = controller.summarize_round().failure
        assert failure is not None
        assert failure.text == "was killed by SIGSEGV"


def test_controller_ignores_progress_of_earlier_start(tmp_path: Path) -> None:
    """In a container the earlier agent had the same pid, and a volume keeps the page."""
    ProgressPage(tmp_path / constants.PROGRESS_FILE).start_generation(
        0, generation=1, step=5000, world_size=1, worker=this_process(start_ticks=7)
    )
    with open_controller(tmp_path) as (controller, log):
        controller.after_rendezvous(world(1))
        log.emit("failure", rank=0, type="ImportError", message="no module named x", deterministic=False)
        log.emit("worker-exit", rank=0, signal=None, exit_code=1, stopped=False)
        assert controller.summarize_round().newest_step == 0
        controller.before_round(failed=True)
        with pytest.raises(JobFailedError, match="no module named x"):
            controller.after_rendezvous(world(2))


SECONDARY = {"type": "RuntimeError", "message": "Connection closed by peer"}
KILLED = Failure("signal", "b", 1, "was killed by SIGKILL")


@pytest.mark.parametrize(
    ("own", "reason", "reported", "nodes", "line"),
    [
        ("SIGKILL", "", (), "ab", "rank 0 was killed by SIGKILL; restarting."),
        (SECONDARY, "", (KILLED,), "ab", "rank 1 on node b was killed by SIGKILL; restarting."),
        (SECONDARY, "", (make_node_failure("b", "died"),), "a", "node b died; restarting."),
        (
            None,
            "the workers of b stopped",
            (KILLED,),
            "ab",
            "rank 1 on node b was killed by SIGKILL; restarting.",
        ),
        (None, "newcomers are here", (), "abc", "joined: c; restarting."),
        (None, "the leader has lost its quorum", (), "ab", "the leader has lost its quorum; restarting."),
    ],
)
def test_restart_logs_its_cause_in_one_line(  # noqa: PLR0917 - the cases and three fixtures
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    own: object,
    reason: str,
    reported: tuple[Failure, ...],
    nodes: str,
    line: str,
) -> None:
    """A secondary failure is not logged, and its traceback is not printed."""
    caplog.set_level("INFO", "elastic_resume")
    with open_controller(tmp_path) as (controller, log):
        controller.after_rendezvous(world(1, nodes="ab"))
        log.emit("worker-start", step=0, rank=0)
        if isinstance(own, dict):
            log.emit("failure", rank=0, step=3, traceback="Traceback: connection closed", **own)
        if own is not None:
            signal = own if isinstance(own, str) else None
            log.emit("worker-exit", rank=0, signal=signal, exit_code=1, stopped=False)
        controller.before_round(failed=own is not None, reason=reason)
        controller.after_rendezvous(world(2, *reported, nodes=nodes), membership_changed=nodes != "ab")
    assert caplog.messages == [line]
    assert capsys.readouterr().err == ""


def test_starts_of_nodes_that_cannot_reach_each_other_never_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor do they when the world is the same again, or when the other nodes' failures are unknown here."""
    with open_controller(tmp_path, RestartLimits(max_no_progress=2)) as (controller, log):
        controller.after_rendezvous(world(1, nodes="ab"))
        for generation in range(2, 9):
            log.emit("failure", rank=0, type="RuntimeError", message="connect: No route to host")
            log.emit("worker-exit", rank=0, signal=None, exit_code=1, stopped=False)
            controller.list_unreachable_nodes = lambda: ("b",)
            failure = controller.summarize_round().failure
            assert failure == make_network_failure("a", ["b"])
            controller.before_round(failed=True)
            controller.list_unreachable_nodes = tuple
            controller.after_rendezvous(world(generation, *[failure] * (generation % 2), nodes="ab"))
    assert set(caplog.messages) == {"node a cannot reach b; restarting."}


@pytest.mark.parametrize(
    ("cause", "nodes", "line"),
    [
        (make_node_failure("c", "died"), "abd", "node c died; restarting."),
        (make_node_failure("c", "died"), "ab", "node c died; also lost: d; restarting."),
        (
            make_node_failure("f", "is unreachable"),
            "a",
            "node f is unreachable; also lost: b, c and 2 more; restarting.",
        ),
        (KILLED, "ad", "rank 1 on node b was killed by SIGKILL; also lost: b, c; restarting."),
    ],
)
def test_restart_names_all_lost_nodes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cause: Failure, nodes: str, line: str
) -> None:
    """The root cause is one of them; the others are missing in the new view too."""
    caplog.set_level("INFO", "elastic_resume")
    with open_controller(tmp_path) as (controller, log):
        controller.after_rendezvous(world(1, nodes="abcdef" if cause.node == "f" else "abcd"))
        log.emit("worker-start", step=0, rank=0)
        controller.before_round(failed=False, reason=f"{cause.node} is lost")
        controller.after_rendezvous(world(2, cause, nodes=nodes), membership_changed=True)
    assert caplog.messages == [line]


@pytest.mark.parametrize(
    ("rounds", "count"),
    [
        ([(False, "KILLED"), (False, "KILLED")], 1),
        ([(True, "KILLED"), (False, "KILLED")], 0),
        ([(False, "joined"), (False, "joined")], 0),
        ([(False, "joined"), (False, "KILLED")], 1),
    ],
)
def test_restart_of_script_without_resume_is_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rounds: list[tuple[bool, str]], count: int
) -> None:
    """A node that joins may come before the workers have reached er.resume()."""
    with open_controller(tmp_path) as (controller, log):
        nodes = "ab"
        controller.after_rendezvous(world(1, nodes=nodes))
        for generation, (resumed, end) in enumerate(rounds, start=2):
            if resumed:
                log.emit("worker-start", step=0, rank=0)
            controller.before_round(failed=False, reason=end)
            nodes += "" if end == "KILLED" else str(generation)
            failures = (KILLED,) if end == "KILLED" else ()
            controller.after_rendezvous(world(generation, *failures, nodes=nodes))
    assert "\n".join(caplog.messages).count("never calls it starts over at each restart") == count


def test_wait_log_logs_newest_texts_only_if_wait_lasts(caplog: pytest.LogCaptureFixture) -> None:
    """After that, further texts of the same wait are logged at once."""
    caplog.set_level("INFO", "elastic_resume")
    wait_log = WaitLog(delay_s=600.0)
    wait_log.add("waiting", "for b")
    (timer,) = (thread for thread in threading.enumerate() if isinstance(thread, threading.Timer))
    assert not wait_log.end()
    timer.join()
    assert caplog.messages == []

    wait_log = WaitLog(delay_s=0.1)
    wait_log.add("restart", "c died")
    wait_log.add("waiting", "for b and c")
    wait_log.add("waiting", "for c")
    wait_for(lambda: len(caplog.messages) == 2, "the timer")
    wait_log.add("waiting", "for c still")
    assert caplog.messages == ["c died", "for c", "for c still"]
    assert wait_log.end()
    assert not wait_log.end()


@pytest.mark.parametrize("kind", sorted(restart_controller.WARNING_KINDS))
def test_problem_of_rendezvous_is_warned_about_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """A wait may be normal; these are not."""
    with open_controller(tmp_path) as (controller, _):
        controller.on_rendezvous_event(EmitEvent(kind, "why"))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("WARNING", "why")]
