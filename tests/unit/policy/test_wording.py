"""The sentences that people read, by table; nothing else depends on them."""

from __future__ import annotations

import inspect
import types
from dataclasses import replace
from enum import Enum
from typing import Any, get_args

import pytest

from elastic_resume.mechanisms.hangs.description import describe_diagnosis
from elastic_resume.mechanisms.hangs.judge import HangDiagnosis, RankFinding
from elastic_resume.policy import reasons, restart, wording
from elastic_resume.policy.failure_classification import (
    EXCEPTION,
    EXIT,
    GPU,
    HANG,
    HARDWARE,
    OOM,
    SIGNAL,
    STUCK,
    Failure,
    MemoryPressure,
    WorkerEnd,
    make_network_failure,
    make_node_failure,
    separate_root_causes,
)
from elastic_resume.policy.flight_recorder import Collective
from elastic_resume.policy.gpu_faults import GpuFault
from elastic_resume.policy.reasons import (
    AbsentCandidates,
    Departure,
    JoinTimeout,
    LeaderWaits,
    Loss,
    NameTaken,
    NodeLost,
    NodeRefused,
    NodesUnreachable,
    NoLeader,
    OtherJob,
    Signalled,
    TooFewNodes,
    ViewEnd,
    VotesMissing,
    from_json,
    name_nodes,
    to_json,
)
from elastic_resume.policy.stalls import Activity, Stall
from elastic_resume.policy.wording import (
    describe,
    describe_event,
    describe_failure,
    explain_verdict,
)

PINS_SENTENCES = True
KILLED = Failure(SIGNAL, "b", 1, WorkerEnd(signal="SIGKILL"))
RAISED = Failure(EXCEPTION, "a", 0, WorkerEnd(1), "ValueError", "boom.", "t.py:3 in f", 7)
GROUP = MemoryPressure(1, 510_000_000, 512_000_000, is_control_group=True)
MACHINE = MemoryPressure(0, 16_236_000_000, 16_400_000_000)
NODES = [f"n{number:02}" for number in range(18)]
LEFT = NodeLost("c", Loss.LEFT, Signalled("SIGTERM"))
ABSENT = AbsentCandidates(("a:1", "b:1"), ("Connection refused", ""), 3)

SENTENCES: list[tuple[Any, str]] = [
    (LEFT, "c left (SIGTERM)"),
    (NodeLost("c", Loss.UNREACHABLE), "c is unreachable"),
    (ViewEnd.NEWCOMERS, "newcomers are here"),
    (
        VotesMissing(1, 2, 10, name_nodes(NODES), len(NODES)),
        (
            f"generation 1 may still run elsewhere: 2 of the 10 required votes count; waiting for "
            f"{', '.join(NODES[:16])} and 2 more"
        ),
    ),
    (
        TooFewNodes(1, 2, (NodesUnreachable("b", ("c",)),)),
        "1 of at least 2 nodes have joined; b cannot reach c, and is left out until it can",
    ),
    (
        JoinTimeout(9.0, NoLeader(ABSENT)),
        (
            "no rendezvous within 9 s: no leader answers at a:1 (Connection refused), b:1 and 1 more nor at "
            "any member of the last generation"
        ),
    ),
    (
        LeaderWaits("a", reasons.Wait.LINK_BROKEN),
        "the leader a started no generation with this node: a connection has just broken",
    ),
    (
        NodeRefused("a:1", OtherJob("b", 3, ("c", "d"), is_running=True)),
        (
            "a:1 refuses this node: the directory of b knows generation 3 of c, d, of another job with "
            "the same run id: give each job its own --rdzv-id; if that one is over, remove "
            "rendezvous.json there"
        ),
    ),
    (
        NodeRefused("a:1", NameTaken("b")),
        (
            "a:1 refuses this node: another live agent is called b: give one of them a different name with "
            "ELASTIC_RESUME_NODE_NAME"
        ),
    ),
    (
        NodeRefused("a:1", reasons.DirectoryCopied("b", is_certain=True)),
        (
            "a:1 refuses this node: the directory of b was copied or rolled back, and a later process runs: "
            "remove rendezvous.json there, and give each machine its own ELASTIC_RESUME_NODE_NAME"
        ),
    ),
    (
        NodeRefused("a:1", reasons.DirectoryCopied("b", is_certain=False)),
        "a:1 refuses this node: the former process of b has not ended yet",
    ),
    (reasons.JobFinished(), "every node has finished"),
    (reasons.JobFinished(("b",), 1), "all remaining nodes have finished; absent at the end: b"),
    (restart.JudgedFailure("topic", 3, "{}", "a text of the mechanism"), "a text of the mechanism"),
    (
        restart.GaveUp("a", restart.NoProgress(KILLED, 3, 7)),
        (
            "node a gave up: 3 starts in a row failed without progress, at step 7. Last: rank 1 was killed "
            "by SIGKILL."
        ),
    ),
    (
        restart.GiveUp(restart.NoProgress(None, 1, 0)),
        (
            "a start failed without progress, before the first step. Last: a worker exited without reporting "
            "an error."
        ),
    ),
    (
        restart.GiveUp(restart.SameErrorAgain(RAISED)),
        (
            "rank 0 ended with exit code 1: ValueError: boom (t.py:3 in f). Starting again would meet the "
            "same error."
        ),
    ),
    (
        restart.GiveUp(restart.StepFails(KILLED, 8, 3)),
        (
            "what follows step 7 fails deterministically: 3 times in a row with the same exception. Last: "
            "rank 1 was killed by SIGKILL. Look at the samples of step 8, or at what the script does after "
            "step 7."
        ),
    ),
    (
        restart.Exclude("b", restart.CausedAlone(KILLED, 3)),
        "the last 3 failures were caused by node b alone. Last: rank 1 was killed by SIGKILL.",
    ),
    (
        replace(RAISED, nodes=7),
        "rank 0 (and alike on 6 more) ended with exit code 1: ValueError: boom (t.py:3 in f)",
    ),
    (Failure(EXIT, "a", None, WorkerEnd(9)), "a worker ended with exit code 9"),
    (
        restart.Exclude("a", restart.GpuBroken(Failure(GPU, "a", 4, GpuFault(0, 3, "GPU-5f", 79), "E"))),
        (
            "rank 4 failed: its GPU is broken (local rank 0; index 3; GPU-5f; Xid 79: fallen off the bus): E."
            " The machine is at fault: reset its GPU, reboot it, or replace it."
        ),
    ),
    (
        restart.Exclude(
            "a", restart.MachineBroken(Failure(HARDWARE, "a", 4, None, "HardwareError", "it is."))
        ),
        "rank 4 failed: HardwareError: it is. Test this machine, or replace it.",
    ),
    (
        Failure(GPU, "a", None, GpuFault(uuid="GPU-5f", recovery_action="GPU reset")),
        "a GPU is broken (GPU-5f; the driver asks for: GPU reset)",
    ),
    (
        Failure(HANG, "a", 2, Stall(Activity.STOPPED, "t.py:3 in f")),
        "rank 2 hung: it is stopped by a signal (SIGSTOP) at t.py:3 in f",
    ),
    (
        Failure(OOM, "a", 0, WorkerEnd(signal="SIGKILL", memory=GROUP)),
        (
            "rank 0 was killed by SIGKILL, out of memory: the kernel killed a process of this node's control "
            "group; its control group had used 510 MB of 512 MB"
        ),
    ),
    (
        Failure(OOM, "a", 0, WorkerEnd(137, memory=MACHINE)),
        (
            "rank 0 ended with exit code 137, out of memory: 164 MB of 16.4 GB of this machine's memory were "
            "left"
        ),
    ),
    (
        Failure(STUCK, "a", 0),
        "rank 0 does not die of SIGKILL: it sleeps in the kernel (state D), on a device or a file system",
    ),
    (make_node_failure(LEFT), "node c left (SIGTERM)"),
    (make_network_failure("d", list("abcef")), "node d cannot reach a, b, c, e and 1 more"),
]


@pytest.mark.parametrize(("fact", "sentence"), SENTENCES)
def test_fact_has_its_sentence(fact: Any, sentence: str) -> None:
    """Each row of the table above; the fact survives its way through an event too."""
    assert describe(fact) == sentence
    assert from_json(type(fact), to_json(fact)) == fact


def test_node_is_named_on_request() -> None:
    """Where failures of several nodes are listed."""
    assert describe_failure(KILLED, with_node=True) == "rank 1 on node b was killed by SIGKILL"


def test_event_has_its_sentence() -> None:
    """Some name the generation or the node."""
    assert (
        describe_event("view-ended", LEFT, node="a", generation=3) == "generation 3 is over: c left (SIGTERM)"
    )
    assert describe_event("leader-lost", LEFT, node="a", generation=3) == "the leader c left (SIGTERM)"


def test_verdict_lists_root_causes_then_secondary_failures() -> None:
    """Secondary failures have a number of nodes."""
    lost = Failure(EXCEPTION, "a", 0, WorkerEnd(1), "RuntimeError", "Connection closed by peer", nodes=7)
    first, also, then = explain_verdict(separate_root_causes([lost, KILLED, make_node_failure(LEFT)]))
    assert first == "first: rank 1 on node b was killed by SIGKILL."
    assert also == "also: node c left (SIGTERM)."
    assert then.startswith("as a consequence, on 7 nodes: rank 0 on node a (and alike on 6 more) ended with")
    assert explain_verdict(separate_root_causes([])) == []


ALL_REDUCE = Collective(13, "all_reduce", "0 (default_pg)", sizes="[[2]]")
WAITS = RankFinding(0, 0, Stall(Activity.COLLECTIVE, "t.py:3 in f", collective=ALL_REDUCE))


def lacks(activity: Activity, own: Collective, *others: int) -> RankFinding:
    """Return rank 3, which has not started the all_reduce of ``others``."""
    return RankFinding(
        3, 1, Stall(activity, "t.py:4 in f", collective=own, others=others, others_collective=ALL_REDUCE)
    )


@pytest.mark.parametrize(
    ("diagnosis", "text"),
    [
        (
            HangDiagnosis(
                (lacks(Activity.SKIPPED_COLLECTIVE, replace(ALL_REDUCE, name="barrier"), 0),), (WAITS,)
            ),
            (
                "rank 3 waits in barrier #13 of group 0 (default_pg) at t.py:4 in f, and rank 0 waits in "
                "all_reduce #13 of group 0 (default_pg): it left out a collective, or called one too many"
            ),
        ),
        (
            HangDiagnosis(
                (lacks(Activity.SKIPPED_COLLECTIVE, replace(ALL_REDUCE, sizes="[[3]]"), 0),), (WAITS,)
            ),
            (
                "rank 3 waits in all_reduce #13 of group 0 (default_pg) with sizes [[3]] at t.py:4 in f, and "
                "rank 0 waits in all_reduce #13 of group 0 (default_pg) with sizes [[2]]: it left out a "
                "collective, or called one too many"
            ),
        ),
        (
            HangDiagnosis((lacks(Activity.UNKNOWN, ALL_REDUCE, 0, 1, 2, 4, 5, 7),), (WAITS,)),
            (
                "rank 3 stands still at t.py:4 in f; it has not started all_reduce #13 of group 0 "
                "(default_pg), in which ranks 0-2, 4, 5, 7 wait"
            ),
        ),
        (
            HangDiagnosis((RankFinding(3, 1, replace(WAITS.stall, activity=Activity.DATA)),), (WAITS,)),
            (
                "rank 3 waits for data at t.py:3 in f; its last collective is all_reduce #13 of group 0 "
                "(default_pg). rank 0 waits for it"
            ),
        ),
        (
            HangDiagnosis((), (WAITS,), waits_for_other_node=True),
            (
                "rank 0 waits for a rank of another node: waits in all_reduce #13 of group 0 (default_pg) at "
                "t.py:3 in f"
            ),
        ),
        (
            HangDiagnosis((), (WAITS,)),
            (
                "all ranks have entered the same collective (waits in all_reduce #13 of group 0 (default_pg) "
                "at t.py:3 in f): look at the network between them"
            ),
        ),
        (HangDiagnosis(), "no rank can be named"),
    ],
)
def test_diagnosis_names_suspects_then_victims(diagnosis: HangDiagnosis, text: str) -> None:
    """A diagnosis without ranks has a text too."""
    assert describe_diagnosis(diagnosis) == text


def list_members() -> list[Enum]:
    """Return the members of all enumerations of reasons, and of activities."""
    enums = [item for item in vars(reasons).values() if inspect.isclass(item) and issubclass(item, Enum)]
    return [member for item in enums if item is not Enum for member in item]


def test_each_fact_has_words() -> None:
    """A new member or class cannot be forgotten; its fields do not matter here."""
    assert all(describe(member) for member in list_members())
    assert all(wording.describe_stall(Stall(activity)) for activity in Activity)
    unions = [
        item
        for module in (reasons, restart)
        for item in vars(module).values()
        if isinstance(item, types.UnionType)
    ]
    described = {type(fact) for fact, _ in SENTENCES}
    source = inspect.getsource(wording)
    for kind in {
        kind for union in unions for kind in get_args(union) if not issubclass(kind, Enum)
    } - described:
        assert f".{kind.__name__}(" in source or kind is restart.Continue, f"no words for {kind.__name__}"


def test_reason_that_is_no_fact_is_rejected() -> None:
    """A log may be damaged, or of a newer version."""
    assert to_json(LEFT) == {
        "kind": "node-lost",
        "node": "c",
        "loss": {"kind": "left"},
        "departure": {"kind": "signalled", "signal": "SIGTERM", "cause": ""},
    }
    assert to_json(Departure.NO_RENDEZVOUS) == {"kind": "no-rendezvous"}
    good = to_json(LEFT)
    bad: Any
    for bad in (
        None,
        [],
        "left",
        {},
        good | {"node": 7},
        good | {"loss": {"kind": "x"}},
        good | {"kind": "x"},
    ):
        with pytest.raises(ValueError, match="not "):
            from_json(NodeLost, bad)
