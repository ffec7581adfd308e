"""Test the classification of events into failures, and of failures into causes, by table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_resume.policy.failure_classification import (
    DISK,
    DIVERGENCE,
    EXCEPTION,
    EXIT,
    FAILURE_KINDS,
    GPU,
    HANG,
    MAX_FAILURES,
    NODE_LOST,
    OOM,
    PREEMPTED,
    SIGNAL,
    STUCK,
    Failure,
    FailureLog,
    MemoryPressure,
    WorkerEnd,
    bound_failures,
    classify_failures,
    make_network_failure,
    make_node_failure,
    separate_root_causes,
    truncate_failure,
)
from elastic_resume.policy.gpu_faults import GpuError, GpuFault
from elastic_resume.policy.reasons import Loss, NodeLost, Signalled, to_json
from elastic_resume.policy.stalls import Activity, Stall
from elastic_resume.policy.wording import describe_failure
from elastic_resume.units import MAX_TEXT_CHARS

Events = list[dict[str, Any]]
NO_STRAIN = MemoryPressure()
KILLS = MemoryPressure(1, 510 << 20, 512 << 20, is_control_group=True)


def event(kind: str, t: float, **fields: Any) -> dict[str, Any]:
    """One event of node a."""
    return {"t": t, "event": kind, "node": "a", "pid": 1} | fields


def end(t: float = 2, rank: int | None = 0, **fields: Any) -> dict[str, Any]:
    """Return the exit of a worker, by exit code 1 unless ``fields`` differ."""
    return event(
        "worker-exit", t, **{"rank": rank, "exit_code": 1, "signal": None, "stopped": False} | fields
    )


def killed(t: float = 2, rank: int = 0, signal: str = "SIGKILL", **fields: Any) -> dict[str, Any]:
    """The end of a worker by a signal."""
    return end(t, rank, exit_code=None, signal=signal, **fields)


def report(kind: str, message: str = "", t: float = 1, rank: int | None = 0, **fields: Any) -> dict[str, Any]:
    """Return a worker's report of the exception that ends it."""
    return event("failure", t, **{"rank": rank, "type": kind, "message": message, "step": 7} | fields)


LOST = "Connection closed by peer"
STOPPED = Stall(Activity.STOPPED, "t.py:3 in f")
HANGS = event("hang", 1, suspects=[{"rank": 2, "reason": to_json(STOPPED)}], victims=[0, 1], step=7)
HUNG_ALL = event("hang", 1, suspects=[], victims=[0, 1], step=7, waits_for_other_node=True)
ILLEGAL = "CUDA error: an illegal memory access was encountered"
ECC = report(
    "DistBackendError",
    "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error",
    detail="ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
    "Cuda failure 'uncorrectable ECC error encountered'",
)
START = [event("worker-start", 0, rank=rank, local_rank=rank - 4, gpu=f"GPU-{rank}") for rank in (4, 5)]
ABORT = killed(3, 4, "SIGABRT")
XID = event("gpu-fault", 1, local_rank=0, index=7, uuid="GPU-4", xid=79, recovery_action="")
GENERATIONS: list[tuple[str, Events, MemoryPressure, list[tuple[str, int | None]]]] = [
    ("an exception", [report("ValueError", "boom"), end()], NO_STRAIN, [(EXCEPTION, 0)]),
    ("an exit code without a word", [end(exit_code=9)], NO_STRAIN, [(EXIT, 0)]),
    ("the message that @record left", [end(message="KeyError: 'x'\nmore")], NO_STRAIN, [(EXCEPTION, 0)]),
    ("a signal", [killed(signal="SIGSEGV")], NO_STRAIN, [(SIGNAL, 0)]),
    ("SIGKILL with memory to spare", [killed()], NO_STRAIN, [(SIGNAL, 0)]),
    ("SIGKILL, and the kernel counted it", [killed()], MemoryPressure(oom_kills=1), [(OOM, 0)]),
    ("SIGKILL under pressure", [killed()], MemoryPressure(0, 990, 1000), [(OOM, 0)]),
    ("exit code 137 under pressure", [end(exit_code=137)], KILLS, [(OOM, 0)]),
    ("another signal under pressure", [killed(signal="SIGSEGV")], KILLS, [(SIGNAL, 0)]),
    (
        "a DataLoader's worker that the kernel killed",
        [report("RuntimeError", "DataLoader worker (pid 12) is killed by signal: Killed. "), end()],
        KILLS,
        [(OOM, 0)],
    ),
    (
        "a DataLoader's worker that had ended when the loader looked for it",
        [report("RuntimeError", "DataLoader worker (pid(s) 12, 13) exited unexpectedly"), end()],
        KILLS,
        [(OOM, 0)],
    ),
    (
        "a DataLoader's worker that ended with memory to spare",
        [report("RuntimeError", "DataLoader worker (pid(s) 12) exited unexpectedly"), end()],
        NO_STRAIN,
        [(EXCEPTION, 0)],
    ),
    (
        "a process of a pool",
        [report("BrokenProcessPool", "A process in the process pool was terminated abruptly"), end()],
        KILLS,
        [(OOM, 0)],
    ),
    ("an exception under pressure", [report("ValueError", "boom"), end()], KILLS, [(EXCEPTION, 0)]),
    ("replicas that differ", [report("DivergenceError", "fc.weight"), end()], NO_STRAIN, [(DIVERGENCE, 0)]),
    ("a full disk", [report("OSError", "[Errno 28] No space left on device"), end()], NO_STRAIN, [(DISK, 0)]),
    ("our own error of the disk", [report("MachineError", "cannot write"), end()], NO_STRAIN, [(DISK, 0)]),
    (
        "another error of the system",
        [report("OSError", "[Errno 2] No such file"), end()],
        NO_STRAIN,
        [(EXCEPTION, 0)],
    ),
    ("one that does not die", [killed(stuck=True, stopped=True)], NO_STRAIN, [(STUCK, 0)]),
    ("those that were found to stop", [killed(stopped=True), end(stopped=True)], NO_STRAIN, []),
    (
        "one that lost a peer, which was stopped just before it",
        [
            report("DistBackendError", LOST, 2.0, rank=1),
            end(rank=1, stopped=True),
            killed(stopped=True, stopped_at=1.9),
        ],
        NO_STRAIN,
        [],
    ),
    (
        "one that lost a peer before any was stopped",
        [report("DistBackendError", LOST, 1.8, rank=1), end(rank=1, stopped=True, stopped_at=1.9)],
        NO_STRAIN,
        [(EXCEPTION, 1)],
    ),
    (
        "one that raised just before it was stopped",
        [report("ValueError", "boom"), end(stopped=True)],
        NO_STRAIN,
        [(EXCEPTION, 0)],
    ),
    ("those that finished", [end(exit_code=0)], NO_STRAIN, []),
    (
        "a hang and those killed for it",
        [HANGS, *(killed(2, rank) for rank in range(3))],
        NO_STRAIN,
        [(HANG, 2)],
    ),
    (
        "a suspect that was killed, since no other node ended the hang",
        [{**HANGS, "kill_delay_s": 15.0}, *(killed(2, rank) for rank in range(3))],
        NO_STRAIN,
        [(HANG, 2)],
    ),
    (
        "a suspect, and another node that ended the hang first",
        [{**HANGS, "kill_delay_s": 15.0}, report("DistBackendError", LOST, 2.0, rank=2), end(2, rank=2)],
        NO_STRAIN,
        [(EXCEPTION, 2)],
    ),
    (
        "a hang, and one that died by itself",
        [HANGS, end(0.5, 5, exit_code=3)],
        NO_STRAIN,
        [(EXIT, 5), (HANG, 2)],
    ),
    (
        "one that hung with all of its node, and was killed for it",
        [HUNG_ALL, killed(2, 0), killed(2, 1)],
        NO_STRAIN,
        [(HANG, 0)],
    ),
    (
        "a hang of another node's, that this one was found to stop for",
        [HUNG_ALL, killed(2, 0, stopped=True)],
        NO_STRAIN,
        [],
    ),
    (
        "a hang that was over before a worker was killed",
        [HANGS, event("hang-ended", 1.5), killed(2, 2)],
        NO_STRAIN,
        [(SIGNAL, 2)],
    ),
    ("a hang of unknown shape", [event("hang", 1, suspects="?", victims=7)], NO_STRAIN, []),
    (
        "the death before the connections it broke",
        [report("RuntimeError", "Connection closed by peer", t=1), end(3), killed(2, 1)],
        NO_STRAIN,
        [(SIGNAL, 1), (EXCEPTION, 0)],
    ),
    (
        "what the job is at fault for before an earlier death",
        [killed(1, 0), report("MismatchError", "fc", t=2, rank=1, deterministic=True), end(3, 1)],
        NO_STRAIN,
        [(EXCEPTION, 1), (SIGNAL, 0)],
    ),
    (
        "a word of one that did not know its rank",
        [report("ConfigError", rank=None, pid=71), end(2, 1, worker_pid=71)],
        NO_STRAIN,
        [(EXCEPTION, 1)],
    ),
    ("a word without an end", [report("ValueError", "boom", rank=3)], NO_STRAIN, [(EXCEPTION, 3)]),
    ("an error of NCCL whose last line names a GPU", [ECC, end()], NO_STRAIN, [(GPU, 0)]),
    ("a script's illegal access", [report("AcceleratorError", ILLEGAL), end()], NO_STRAIN, [(EXCEPTION, 0)]),
    (
        "an abort, and a GPU that the driver reports",
        [*START, XID, ABORT],
        NO_STRAIN,
        [(GPU, 4)],
    ),
    ("an abort on another GPU", [*START, XID, {**ABORT, "rank": 5}], NO_STRAIN, [(GPU, 4), (SIGNAL, 5)]),
    ("a GPU that the driver reports while others fail", [*START, XID, XID], NO_STRAIN, [(GPU, 4)]),
]


@pytest.mark.parametrize(
    ("events", "strain", "found"), [row[1:] for row in GENERATIONS], ids=[r[0] for r in GENERATIONS]
)
def test_events_are_classified(
    events: Events, strain: MemoryPressure, found: list[tuple[str, int | None]]
) -> None:
    """Each row of the table above."""
    assert [(item.kind, item.rank) for item in classify_failures(events, "a", strain)] == found


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (
            [report("ValueError", "boom", frame="t.py:3 in f"), end()],
            Failure(EXCEPTION, "a", 0, WorkerEnd(1), "ValueError", "boom", "t.py:3 in f", 7),
        ),
        ([killed(rank=4)], Failure(OOM, "a", 4, WorkerEnd(None, "SIGKILL", KILLS))),
        ([end(exit_code=9, rank=None)], Failure(EXIT, "a", None, WorkerEnd(9))),
        ([HANGS], Failure(HANG, "a", 2, STOPPED, step=7)),
        (
            [*START, {**ECC, "rank": 5}, end(rank=5)],
            Failure(
                GPU,
                "a",
                5,
                GpuFault(1, uuid="GPU-5"),
                "DistBackendError",
                "Cuda failure 'uncorrectable ECC error encountered' "
                "(NCCL error in: NCCLUtils.cpp:77, unhandled cuda error)",
                step=7,
                gpu_error=GpuError.HARDWARE,
            ),
        ),
        (
            [*START, XID, ABORT],
            Failure(GPU, "a", 4, GpuFault(0, 7, "GPU-4", 79), gpu_error=GpuError.HARDWARE),
        ),
        ([HUNG_ALL, killed(2, 0)], Failure(HANG, "a", 0, Stall(Activity.OTHER_NODE), step=7)),
        (
            [event("hang", 1, suspects=[{"rank": 1, "reason": {"kind": "?"}}], victims=[])],
            Failure(HANG, "a", 1, Stall(Activity.UNKNOWN)),
        ),
    ],
)
def test_failure_has_rank_cause_and_place(events: Events, expected: Failure) -> None:
    """All fields; memory was short."""
    assert classify_failures(events, "a", KILLS) == (expected,)


# ---- causes --------------------------------------------------------------------------------------------


def failure(node: str, message: str = "", signal: str = "SIGKILL", **more: Any) -> Failure:
    """A failure of rank 0 of that node."""
    kind = EXCEPTION if message else SIGNAL
    made = Failure(kind, node, 0, WorkerEnd(signal=signal), message=message)
    return replace(made, **more)


CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2"
LOST_CONNECTIONS = [
    CLOSED,
    "Connection reset by peer",
    "[Errno 32] Broken pipe",
    "NCCL error: remote process exited or there was a network error, ncclRemoteError",
    "wait timeout after 60000ms, keys: /default_pg/0//store->get",
    "Socket Timeout",
]


@pytest.mark.parametrize("message", LOST_CONNECTIONS)
def test_lost_connection_is_secondary_to_any_other_failure(message: str) -> None:
    """The order of arrival does not matter; without another failure it is the root cause."""
    lost, dead, gone = (
        failure("a", message=message),
        failure("b"),
        make_node_failure(NodeLost("c", Loss.DIED)),
    )
    for others in ([dead], [gone], [dead, gone]):
        verdict = separate_root_causes([lost, *others])
        assert verdict.root_causes == tuple(others)
        assert verdict.secondary_failures == (lost,)
    assert separate_root_causes([lost]).root_causes == (lost,)
    assert separate_root_causes([lost, failure("b", message=message)]).root_cause == lost


def test_root_causes_keep_order_of_arrival() -> None:
    """A deterministic failure comes first."""
    first, second = failure("a"), failure("b", message="boom")
    fault = failure("c", message="fc.weight", is_deterministic=True)
    assert separate_root_causes([first, second]).root_causes == (first, second)
    assert separate_root_causes([first, second, fault]).root_causes == (fault, first, second)
    cut = make_network_failure("d", ["e"])
    assert separate_root_causes([first, cut, fault]).root_causes == (fault, cut, first)


def test_sigabrt_of_nccl_watchdog_is_secondary() -> None:
    """Without another failure it is the root cause, and certain if it came first."""
    abort, lost = failure("a", signal="SIGABRT"), failure("b", message=CLOSED)
    assert separate_root_causes([abort, failure("b")]).root_cause == failure("b")
    first = separate_root_causes([abort, lost])
    assert (first.root_causes, first.is_certain) == ((abort,), True)
    late = separate_root_causes([lost, abort])
    assert (late.root_causes, late.is_certain) == ((lost,), False)


def test_node_that_waited_is_secondary_to_hung_rank() -> None:
    """A node whose ranks all waited has no suspect."""
    (waited,) = classify_failures([HUNG_ALL, killed(2, 0), killed(2, 1)], "a")
    (suspect,) = classify_failures([HANGS, killed(2, 2)], "b")
    assert separate_root_causes([waited, suspect]).root_causes == (suspect,)
    assert separate_root_causes([waited]).root_cause == waited


# ---- the leader's list --------------------------------------------------------------------------------


def test_failure_log_merges_like_failures() -> None:
    """A thousand nodes with one error are one entry; addresses and ranks make no difference."""
    ledger = FailureLog()
    for number in range(1000):
        ledger.record(3, failure(f"n{number}", message=f"{CLOSED}{number}"))
    (item,) = ledger.get_failures(3)
    assert (item.node, item.nodes) == ("n0", 1000)
    for number in range(1000, 1000 + MAX_FAILURES):
        ledger.record(3, failure(f"n{number}", message="x" * (number - 990)))
    kept = ledger.get_failures(3)
    assert len(kept) == MAX_FAILURES
    assert not any(item.is_secondary for item in kept), "secondary failures make room for causes"


def test_received_failures_are_bounded_and_printable() -> None:
    """A leader may send anything."""
    found = bound_failures((failure("a", "\x1b[2J" + "x" * 9999),) * 99)
    assert len(found) == MAX_FAILURES
    assert all(item.message.isprintable() and len(item.message) == MAX_TEXT_CHARS for item in found)


def test_lost_nodes_are_not_merged() -> None:
    """An announced end is a preemption."""
    ledger = FailureLog()
    for name in "ab":
        ledger.record(1, make_node_failure(NodeLost(name, Loss.DIED)))
    assert [(item.node, item.kind) for item in ledger.get_failures(1)] == [("a", NODE_LOST), ("b", NODE_LOST)]
    assert make_node_failure(NodeLost("a", Loss.LEFT, Signalled("SIGTERM"))).kind == PREEMPTED


def test_failure_log_keeps_first_failure_of_node_and_generation() -> None:
    """A repeated report is ignored, and so is an older generation."""
    ledger = FailureLog()
    ledger.record(2, failure("a"))
    ledger.record(2, make_node_failure(NodeLost("a", Loss.DIED)))
    ledger.record(1, failure("b"))
    assert [(item.node, item.kind) for item in ledger.get_failures(2)] == [("a", SIGNAL)]
    assert ledger.get_failures(1) == ()
    ledger.record(4, failure("b"))
    assert [item.node for item in ledger.get_failures(4)] == ["b"]
    assert ledger.get_failures(2) == ()


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = """
    rank exit_code signal stopped stuck message type frame step at_fault pid worker_pid suspects victims xid
    local_rank uuid gpu detail
"""


@settings(max_examples=40)
@given(
    st.lists(
        st.builds(
            lambda kind, t, rest: {**rest, "event": kind, "t": t},
            st.sampled_from(["failure", "worker-exit", "hang", "hang-ended", "gpu-fault", "worker-start"]),
            st.floats(0, 1e9),
            st.dictionaries(st.sampled_from(KEYS.split()), anything),
        ),
        max_size=6,
    ),
    st.builds(MemoryPressure, st.integers(0, 3), st.just(9), st.sampled_from([0, 9])),
)
def test_any_events_give_valid_failures(events: Events, strain: MemoryPressure) -> None:
    """Kinds are known, texts are short and printable, and each failure has a description."""
    found = classify_failures(events, "a", strain)
    for item in found:
        assert item.kind in FAILURE_KINDS
        assert truncate_failure(item) == item
        assert max(len(item.message), len(item.frame)) <= MAX_TEXT_CHARS
        assert describe_failure(item).isprintable()
    verdict = separate_root_causes(found)
    assert len(verdict.root_causes) + len(verdict.secondary_failures) == len(found)
    assert bool(verdict.root_causes) is bool(found)
