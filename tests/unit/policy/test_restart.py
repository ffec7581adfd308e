"""The restart policy, by table: a history of generations in, a decision out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.policy.failure_classification import (
    EXCEPTION,
    FAILURE_KINDS,
    GPU,
    NODE_LOST,
    SIGNAL,
    Failure,
    WorkerEnd,
)
from elastic_resume.policy.gpu_faults import GpuFault, find_gpu_error
from elastic_resume.policy.restart import (
    UNLIMITED,
    CannotStart,
    CausedAlone,
    Continue,
    EndedElsewhere,
    Exclude,
    GenerationResult,
    GiveUp,
    GpuBroken,
    NoProgress,
    RestartDecision,
    RestartLimits,
    SameErrorAgain,
    SameErrorEverywhere,
    StepFails,
    WorldSummary,
    count_failures_without_progress,
    decide_restart,
    find_newest_step,
    merge_reported_failures,
    restart_delay_s,
    summarize_generation,
)

DEFAULT = RestartLimits()
KILLED = Failure(SIGNAL, "a", 1, WorkerEnd(signal="SIGKILL"))
OWN_FAULT = Failure(EXCEPTION, "a", 0, WorkerEnd(1), "MismatchError", "no", is_deterministic=True)


def failed(start: int | None, newest: int | None, failure: Failure = KILLED) -> GenerationResult:
    """A generation that started from step ``start``, reached ``newest`` and lost a worker."""
    return GenerationResult(failed=True, start_step=start, newest_step=newest, failures=(failure,))


def reason_class(decision: RestartDecision) -> type | None:
    """Return the class of a decision's reason; None if the job continues."""
    return None if isinstance(decision, Continue) else type(decision.reason)


def left(start: int, newest: int) -> GenerationResult:
    """A generation that ended because nodes came or went."""
    return GenerationResult(failed=False, start_step=start, newest_step=newest)


NO_STEP = failed(None, None)

HISTORIES: list[tuple[str, list[GenerationResult], bool]] = [
    ("one failed start is tried again", [NO_STEP], False),
    ("two failed starts are tried again", [NO_STEP] * 2, False),
    ("the third failed start in a row ends the job", [NO_STEP] * 3, True),
    ("an error of the job's own ends it at once", [failed(0, 50, OWN_FAULT)], True),
    ("failures cost nothing while steps advance", [failed(i, i + 1) for i in range(50)], False),
    ("a step that kills every time ends the job", [failed(0, 19)] + [failed(10, 19)] * 3, True),
    ("twice at the same step is tried again", [failed(0, 19)] + [failed(10, 19)] * 2, False),
    ("progress in between starts the count anew", [NO_STEP, NO_STEP, failed(0, 1), NO_STEP, NO_STEP], False),
    ("a change of membership costs nothing", [left(5, 5)] * 50, False),
    ("a change of membership forgives nothing", [NO_STEP, NO_STEP, left(0, 0), NO_STEP], True),
    (
        "steps seen before count again after copies were lost",
        [failed(90, 99), *(failed(i, i + 5) for i in (0, 3, 6, 9))],
        False,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("history", "gives_up"), [row[1:] for row in HISTORIES], ids=[row[0] for row in HISTORIES]
)
def test_decision_follows_progress_of_history(history: list[GenerationResult], gives_up: bool) -> None:
    """Each row of the table above."""
    assert isinstance(decide_restart(history, DEFAULT), GiveUp) is gives_up


def test_reason_has_count_step_and_failure() -> None:
    """The limit can be set."""
    first = decide_restart([NO_STEP], RestartLimits(max_no_progress=1))
    assert first == GiveUp(NoProgress(KILLED, 1, 0))
    later = decide_restart([failed(0, 7), failed(7, 7), failed(7, 7), failed(7, 7)], DEFAULT)
    assert later == GiveUp(NoProgress(KILLED, 3, 7))


def test_no_progress_counts_failures_since_newest_step() -> None:
    """A generation that reached a new step is not counted, the ones after it are."""
    assert count_failures_without_progress([failed(0, 5), failed(5, 5), left(5, 5), failed(5, 5)]) == 2


def test_steps_of_other_nodes_are_no_progress_of_a_node_that_fails() -> None:
    """They train while its workers start, so each generation with it begins further on."""
    history = [failed(0, 5), failed(40, 40), failed(90, 90), failed(130, 130)]
    assert count_failures_without_progress(history) == 3
    assert count_failures_without_progress([*history, failed(170, 171)]) == 0


def event(kind: str, t: float, **fields: Any) -> dict[str, Any]:
    """One event of node a."""
    return {"t": t, "event": kind, "node": "a", "pid": 1} | fields


def test_summary_takes_first_and_newest_step() -> None:
    """A worker that has finished no step has reached the one from which it started."""
    events = [event("worker-start", 1, step=10), event("worker-start", 2, step=11)]
    for newest, found in ((14, 14), (None, 11), (0, 11)):
        this = summarize_generation(events, node="a", newest_step=newest)
        assert (this.start_step, this.newest_step, this.failures) == (10, found, ())


def test_deterministic_failure_without_rank_ends_job() -> None:
    """A wrong argument of er.resume() fails before the rank is known; the supervisor knows the rank."""
    error = {"type": "ConfigError", "message": "keep is 1. Write 2 or more.", "deterministic": True}
    events = [
        event("failure", 1, pid=71, **error),
        event("worker-exit", 2, rank=0, worker_pid=70, exit_code=None, signal="SIGKILL", stopped=False),
        event("worker-exit", 3, rank=1, worker_pid=71, exit_code=1, signal=None, stopped=False),
    ]
    this = summarize_generation(events, node="a")
    decision = decide_restart([this], DEFAULT)
    assert isinstance(decision, GiveUp)
    assert isinstance(decision.reason, SameErrorAgain)
    failure = decision.reason.failure
    assert (failure.rank, failure.type, failure.cause) == (1, "ConfigError", WorkerEnd(1))


# ---- errors that a restart would meet again ------------------------------------------------------------


def raised(
    kind: str, step: int | None = None, node: str = "a", nodes: int = 1, message: str = "boom"
) -> Failure:
    """An exception on a rank of that node."""
    return Failure(EXCEPTION, node, 0, WorkerEnd(1), kind, message, "train.py:9 in main", step, nodes=nodes)


def world(names: str = "abc", step: int = 0) -> WorldSummary:
    """Nodes of one letter each."""
    return WorldSummary(tuple(names), step)


Row = tuple[str, list[GenerationResult], WorldSummary, RestartLimits, type | None]
IMPORT = raised("ModuleNotFoundError", message="No module named 'x'")
TWO_OF = RestartLimits(min_nodes=2)


def ended(
    *failures: Failure, start: int | None = None, newest: int | None = None, nodes: int = 3
) -> GenerationResult:
    """A failed generation of several nodes."""
    return GenerationResult(True, start, newest, failures, nodes)


THREE_OF = RestartLimits(min_nodes=3)
PATIENT = RestartLimits(max_no_progress=UNLIMITED, max_same_failures=UNLIMITED)
EVERYWHERE = ended(raised("KeyError", nodes=3))
HOPELESS: list[Row] = [
    ("import error", [ended(IMPORT)], world(), DEFAULT, SameErrorAgain),
    ("syntax error", [ended(raised("SyntaxError"))], world(), DEFAULT, SameErrorAgain),
    ("late import error", [ended(IMPORT, start=0, newest=5)], world(step=5), DEFAULT, None),
    ("import error on a newcomer", [ended(IMPORT)], world(step=5), TWO_OF, CannotStart),
    ("import error on a newcomer that is needed", [ended(IMPORT)], world(step=5), THREE_OF, SameErrorAgain),
    ("same error on all nodes before the first step", [EVERYWHERE], world(), DEFAULT, SameErrorEverywhere),
    ("on two of three nodes", [ended(raised("KeyError", nodes=2))], world(), DEFAULT, None),
    ("on all nodes of a job that has trained", [EVERYWHERE], world(step=7), DEFAULT, None),
    (
        "on all nodes after a step",
        [ended(raised("KeyError", 3, nodes=3), start=0, newest=3)],
        world(step=3),
        DEFAULT,
        None,
    ),
    ("on the only node", [ended(raised("KeyError"), nodes=1)], world("a"), DEFAULT, None),
    ("with --max-restarts", [ended(IMPORT)], world(), PATIENT, SameErrorAgain),
    ("changed membership", [replace(ended(IMPORT), failed=False)], world(), DEFAULT, None),
]


@pytest.mark.parametrize(
    ("history", "now", "limits", "reason"), [row[1:] for row in HOPELESS], ids=[row[0] for row in HOPELESS]
)
def test_unstartable_script_gives_up_or_excludes(
    history: list[GenerationResult], now: WorldSummary, limits: RestartLimits, reason: type | None
) -> None:
    """Each row of the table above."""
    assert reason_class(decide_restart(history, limits, now)) is reason


def at(step: int, node: str = "a", message: str = "bad sample 17") -> GenerationResult:
    """A generation that climbed to ``step`` and met an exception there."""
    return ended(raised("ValueError", step, node, message=message), start=step - 3, newest=step)


LAX = RestartLimits(max_no_progress=10)
POISON: list[tuple[str, list[GenerationResult], bool]] = [
    ("three times the same exception at the same step", [at(19), at(19), at(19)], True),
    (
        "whichever node it is on, whatever numbers it names",
        [at(19), at(19, "b", "bad sample 4"), at(19, "c")],
        True,
    ),
    ("twice is chance", [at(19), at(19)], False),
    ("another step in between", [at(19), at(20), at(19)], False),
    ("another exception in between", [at(19), at(19, message="other"), at(19)], False),
    ("a node that went in between does not count", [at(19), at(19), left(16, 19), at(19)], True),
    ("a worker killed at the same step is no exception", [ended(KILLED, start=16, newest=19)] * 3, False),
    ("a lost connection is no poison", [at(19, message="Connection closed by peer")] * 3, False),
]


@pytest.mark.parametrize(("history", "poisoned"), [row[1:] for row in POISON], ids=[row[0] for row in POISON])
def test_deterministic_failure_of_one_step_is_named(history: list[GenerationResult], poisoned: bool) -> None:
    """The job fails before its budget is spent, and the reason has step and exception."""
    decision = decide_restart(history, LAX, world())
    last = history[-1].failures[0]
    assert decision == (GiveUp(StepFails(last, 20, 3)) if poisoned else Continue())


# ---- a node that fails alone ---------------------------------------------------------------------------


def killed(node: str, start: int | None = None, newest: int | None = None) -> GenerationResult:
    """A generation that ended because a worker of that node was killed."""
    return ended(Failure(SIGNAL, node, 1, WorkerEnd(signal="SIGSEGV")), start=start, newest=newest)


def stepping(node: str, count: int) -> list[GenerationResult]:
    """Generations that advanced by ten steps each."""
    return [killed(node, i, i + 10) for i in range(0, 10 * count, 10)]


def gpu_error(node: str, message: str, step: int | None) -> GenerationResult:
    """A generation that ended with an error of a GPU of that node."""
    error = find_gpu_error("RuntimeError", message)
    failure = Failure(EXCEPTION, node, 1, WorkerEnd(1), "RuntimeError", message, step=step, gpu_error=error)
    return ended(failure, start=0, newest=step)


def broken(node: str, nodes: int = 1, of: int = 3) -> GenerationResult:
    """A generation that ended with an error that names broken hardware, on so many nodes."""
    return ended(Failure(GPU, node, 1, GpuFault(0), nodes=nodes), start=0, newest=5, nodes=of)


def aborted(node: str) -> GenerationResult:
    """A generation in which a worker of that node aborted before others lost their connections."""
    return ended(Failure(SIGNAL, node, 1, WorkerEnd(signal="SIGABRT")), CUT_OFF)


CUT_OFF = Failure(EXCEPTION, "a", 0, WorkerEnd(1), "RuntimeError", "Connection closed by peer")
ACCESS = "CUDA error: an illegal memory access was encountered"
MISSING = "No CUDA GPUs are available"
AFTER_FOUR = RestartLimits(min_nodes=2, exclude_after=4)
OTHERS_BETWEEN = [*stepping("b", 2), *stepping("c", 1), *stepping("b", 2)]
ALONE: list[Row] = [
    ("instead of giving up", [killed("b")] * 3, world(), TWO_OF, CausedAlone),
    ("it is needed", [killed("b")] * 3, world(), THREE_OF, NoProgress),
    ("others failed too", [killed("b"), killed("c"), killed("b")], world(), TWO_OF, NoProgress),
    ("steps advance", stepping("b", 9), world(step=90), TWO_OF, None),
    ("the user's limit is reached", stepping("b", 4), world(step=40), AFTER_FOUR, CausedAlone),
    ("below the user's limit", stepping("b", 3), world(step=40), AFTER_FOUR, None),
    ("not in a row", OTHERS_BETWEEN, world(step=40), AFTER_FOUR, None),
    ("it has left", [killed("b")] * 3, world("ac"), DEFAULT, None),
    (
        "others fail after it left",
        [*[killed("b")] * 3, killed("a"), killed("c")],
        world("ac"),
        DEFAULT,
        None,
    ),
    ("an illegal access of a GPU, once", [gpu_error("b", ACCESS, 5)], world(step=9), TWO_OF, None),
    ("of another node before", [gpu_error(n, ACCESS, 5) for n in "ab"], world(step=9), TWO_OF, None),
    ("twice", [gpu_error("b", ACCESS, step) for step in (5, 7)], world(step=9), TWO_OF, CausedAlone),
    ("twice, but it is needed", [gpu_error("b", ACCESS, s) for s in (5, 7)], world(step=9), THREE_OF, None),
    ("twice at one step", [gpu_error("b", ACCESS, 5)] * 2, world(step=9), TWO_OF, None),
    ("no GPU is there, once", [gpu_error("b", MISSING, None)], world(step=9), THREE_OF, None),
    ("no GPU is there", [gpu_error("b", MISSING, None)] * 2, world(step=9), THREE_OF, GpuBroken),
    ("no GPU has ever been there", [gpu_error("b", MISSING, None)] * 2, world(), TWO_OF, None),
    ("no GPU on a node that has left", [gpu_error("b", MISSING, None)] * 2, world("ac", 9), TWO_OF, None),
    ("a broken GPU", [broken("b")], world(step=9), THREE_OF, GpuBroken),
    ("a broken GPU, by all nodes' errors", [broken("b", nodes=3)], world(step=9), TWO_OF, None),
    ("a broken GPU on the only node", [broken("b", of=1)], world("b", 9), RestartLimits(), GpuBroken),
    ("aborts that came first", [aborted("b")] * 3, world(), TWO_OF, NoProgress),
    ("no node names", [killed("b")] * 3, WorldSummary(), DEFAULT, NoProgress),
]


@pytest.mark.parametrize(
    ("history", "now", "limits", "reason"), [row[1:] for row in ALONE], ids=[row[0] for row in ALONE]
)
def test_node_that_fails_alone_is_excluded(
    history: list[GenerationResult], now: WorldSummary, limits: RestartLimits, reason: type | None
) -> None:
    """Each row of the table above; it is node b."""
    decision = decide_restart(history, limits, now)
    assert reason_class(decision) is reason
    if isinstance(decision, Exclude):
        assert (decision.node, decision.reason.failure) == ("b", history[-1].failures[0])


# ---- reported failures and delays ----------------------------------------------------------------------

LOST = Failure(NODE_LOST, "c", None)


@pytest.mark.parametrize(
    ("own", "reported", "changed", "failed"),
    [
        (CUT_OFF, (LOST, CUT_OFF), False, False),  # the lost node is back already
        (CUT_OFF, (CUT_OFF, LOST), True, False),
        (CUT_OFF, (CUT_OFF, KILLED), False, True),
        (KILLED, (KILLED,), True, False),
        (OWN_FAULT, (LOST, OWN_FAULT), True, True),
        (KILLED, (), False, True),  # a stock rendezvous tells nothing
    ],
)
def test_changed_membership_is_no_failure(
    own: Failure, reported: tuple[Failure, ...], changed: bool, failed: bool
) -> None:
    """A lost node fails no generation; a deterministic error does."""
    assert merge_reported_failures(ended(own), reported, membership_changed=changed).failed is failed


def test_generation_that_failed_elsewhere_counts() -> None:
    """All nodes keep the same history, so they give up together."""
    assert merge_reported_failures(GenerationResult(failed=False), [KILLED], membership_changed=False).failed


@pytest.mark.parametrize(
    ("result", "is_ended"),
    [
        (GenerationResult(True), True),
        (GenerationResult(True, start_step=0), False),
        (GenerationResult(True, start_step=0, newest_step=5), False),
    ],
)
def test_wrong_argument_of_the_script_is_not_tried_again(result: GenerationResult, is_ended: bool) -> None:
    """Python's argparse ends with exit code 2; after er.resume() the code may mean anything."""
    failure = Failure("exit", "a", 0, WorkerEnd(2))
    decision = decide_restart([replace(result, failures=(failure,))], RestartLimits())
    assert decision == (GiveUp(SameErrorAgain(failure)) if is_ended else Continue())
    trained = WorldSummary(("a",), newest_step=9)
    assert decide_restart([replace(result, failures=(failure,))], RestartLimits(), trained) == Continue()
    other = replace(failure, cause=WorkerEnd(1))
    assert decide_restart([replace(result, failures=(other,))], RestartLimits()) == Continue()


def test_script_that_resumes_nothing_does_not_start_over_alone_after_the_end() -> None:
    """With er.resume() the last steps are recomputed, or a further step is refused."""
    world = WorldSummary(("n1",), 0, finished_nodes=("n0",))
    failure = Failure("exit", "n1", 1)
    decision = decide_restart([GenerationResult(True, failures=(failure,))], RestartLimits(), world)
    assert decision == GiveUp(EndedElsewhere(failure, ("n0",)))
    here = replace(world, newest_step=9)  # another node has resumed
    assert decide_restart([GenerationResult(True, failures=(failure,))], RestartLimits(), here) == Continue()
    resumed = GenerationResult(True, start_step=0, newest_step=9, failures=(failure,))
    assert decide_restart([resumed], RestartLimits(), world) == Continue()


def test_restart_delay_doubles_without_progress() -> None:
    """There is no delay after the first failure, and a minute at most."""
    stuck = [restart_delay_s([NO_STEP] * count) for count in range(1, 10)]
    assert stuck == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert restart_delay_s([failed(i, i + 1) for i in range(9)]) == 0


def test_newest_step_ignores_resumed_step() -> None:
    """A start from a checkpoint is no step."""
    assert find_newest_step([left(40, 40)]) == 0
    assert find_newest_step([left(40, 43), left(41, 41)]) == 43


generations = st.builds(
    GenerationResult,
    st.booleans(),
    st.none() | st.integers(0, 30),
    st.none() | st.integers(0, 30),
    st.lists(
        st.builds(
            Failure,
            st.sampled_from(FAILURE_KINDS),
            st.sampled_from("abcd"),
            st.none() | st.integers(0, 3),
            st.just(WorkerEnd()),
            st.sampled_from(["", "ValueError", "ImportError", "RuntimeError"]),
            st.sampled_from(["", "boom", "Connection reset by peer"]),
            st.just(""),
            st.none() | st.integers(0, 30),
            st.booleans(),
            st.integers(1, 4),
        ),
        max_size=4,
    ).map(tuple),
    st.integers(1, 4),
)


@given(
    st.lists(generations, min_size=1, max_size=8),
    st.builds(RestartLimits, st.integers(1, 4), st.integers(0, 3), st.integers(2, 4), st.integers(1, 4)),
    st.lists(st.sampled_from("abcd"), unique=True).map(tuple),
    st.integers(0, 40),
)
def test_any_history_gives_sound_decision(
    history: list[GenerationResult], limits: RestartLimits, nodes: tuple[str, ...], step: int
) -> None:
    """Success ends nothing, and a needed node is not excluded unless its GPU is broken."""
    decision = decide_restart(history, limits, WorldSummary(nodes, step))
    if not history[-1].failed:
        assert decision == Continue()
    if isinstance(decision, Exclude):
        assert decision.node in nodes
        assert len(nodes) - 1 >= limits.min_nodes or isinstance(decision.reason, GpuBroken)
    assert 0 <= restart_delay_s(history) <= 60
    lone = decide_restart(history, replace(limits, exclude_after=0), WorldSummary((), step))
    assert not isinstance(lone, Exclude)
