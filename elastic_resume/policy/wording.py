"""Format reasons, decisions and failures as text for log lines, error messages, events and reports.

Only this module formats them, and no code decides by the text. Each function returns one printable line,
because names and messages may come from other nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import groupby
from typing import Any

from elastic_resume.policy import failure_classification as failures
from elastic_resume.policy import reasons, restart
from elastic_resume.policy.failure_classification import (
    Failure,
    FailureVerdict,
    MemoryPressure,
    WorkerEnd,
)
from elastic_resume.policy.flight_recorder import Collective
from elastic_resume.policy.gpu_faults import GpuError, GpuFault
from elastic_resume.policy.reasons import MAX_NODES_NAMED, Departure, Loss, NodeLost, ViewEnd
from elastic_resume.policy.stalls import Activity, Stall
from elastic_resume.units import format_bytes, to_printable

MAX_NAMED = 4
"""Failures, nodes of a group and groups that one line lists."""
MAX_CANDIDATES_NAMED = 5
MAX_CHARS = 2000
MAX_NAME_CHARS = 200

# docs.nvidia.com/deploy/xid-errors: those that a cluster meets most.
_XIDS = {
    48: "double-bit memory error",
    74: "NVLink error",
    79: "fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "its processor does not answer",
}
_GPU_HINTS = {
    GpuError.MEMORY: (
        "give each rank fewer samples at a time (with more micro-batches the step stays the same), or look "
        "with nvidia-smi for another process on that GPU."
    ),
    GpuError.ACCESS: (
        "if it recurs on this node only, its GPU is to be replaced; else CUDA_LAUNCH_BLOCKING=1 shows which "
        "call of the script does it."
    ),
    GpuError.MISSING: "compare `elastic-resume doctor` on this node and on another one.",
}
_MEMBERS: dict[Enum, str] = {
    Loss.DIED: "died",
    Loss.LEFT: "left",
    Loss.RESTARTED: "is back as a new process",
    Loss.REPLACED: "is back with an empty disk",
    Loss.UNREACHABLE: "is unreachable",
    Loss.UNRESPONSIVE: "did not acknowledge a proposal",
    Loss.REFUSED: "was refused: its script differs",
    Departure.EXCLUDED: "it leaves the job because of its failures",
    Departure.JOB_FAILED: "the job failed",
    Departure.NO_RENDEZVOUS: "it found no rendezvous",
    ViewEnd.NEWCOMERS: "newcomers are here",
    ViewEnd.PAUSED: "the leader was paused for longer than its lease",
    ViewEnd.DISK_STUCK: "the leader's disk does not complete writes",
    ViewEnd.NO_QUORUM: "too few members follow it, and perhaps more follow another",
    ViewEnd.WORKERS_STUCK: "its workers do not stop, and others may train without them",
    ViewEnd.JOB_OVER: "the job is over",
    ViewEnd.LEADER_STEPPED_DOWN: "the leader stepped down, or continues without this node",
    ViewEnd.NOT_READMITTED: "the leader does not readmit this node",
    ViewEnd.LATER_VIEW_DECIDED: "generation {} was decided elsewhere",
    ViewEnd.ENDED_MEANWHILE: "generation {} ended while this node was reconnecting",
    ViewEnd.OTHER_LEADS: "{} leads",
    ViewEnd.LEADER_IDLE: "the leader {} starts no generation, and {} leads, too",
    ViewEnd.LEASE_EXPIRED: "the lease expired: no message from the leader {}",
    reasons.Wait.NOTHING_JOINED: "no node has joined yet",
    reasons.Wait.LINK_BROKEN: "a connection has just broken",
    reasons.OwnObstacle.OWN_DISK_STUCK: "this node's disk does not complete writes",
    reasons.OwnObstacle.THREAD_ENDED: (
        "the rendezvous thread ended, which is an internal error of elastic_resume"
    ),
}


def describe(fact: Any) -> str:
    """Return one clause about any fact of `reasons`, `restart` or `failure_classification`."""
    return to_printable(_describe(fact), MAX_CHARS)


def _describe(fact: Any) -> str:
    if isinstance(fact, Enum):
        return _MEMBERS[fact]
    if isinstance(fact, Failure):
        return describe_failure(fact)
    match fact:
        case GpuFault():
            return _describe_gpu(fact)
        case reasons.NodeLost(node):
            return f"{node} {_describe_loss(fact)}"
        case reasons.Signalled(signal, cause):
            return cause or signal
        case reasons.ErrorRaised(kind, message):
            return message or kind
        case reasons.WorkersStopped(node):
            return f"the workers of {node} stopped"
        case reasons.ViewEndOf(end, names):
            return _MEMBERS[end].format(*names, "?", "?")  # a peer or a log may give too few
        case reasons.NodesUnreachable(node, others):
            return f"{node} {_describe_unreachable(others)}"
        case reasons.SettingDiffers(setting, here, at_leader):
            return f"{setting} is {here} on this node and {at_leader} at the leader: give all nodes the same"
        case reasons.DirectoryCopied(node, is_certain=True):
            remedy = "remove rendezvous.json there, and give each machine its own ELASTIC_RESUME_NODE_NAME"
            return f"the directory of {node} was copied or rolled back, and a later process runs: {remedy}"
        case reasons.DirectoryCopied(node):
            return f"the former process of {node} has not ended yet"
        case reasons.NameTaken(node):
            remedy = "give one of them a different name with ELASTIC_RESUME_NODE_NAME"
            return f"another live agent is called {node}: {remedy}"
        case reasons.OtherJob(node, generation, members, _):
            other = f"generation {generation} of {format_node_names(members, len(members))}"
            remedy = "give each job its own --rdzv-id; if that one is over, remove rendezvous.json there"
            return f"the directory of {node} knows {other}, of another job with the same run id: {remedy}"
        case reasons.JobFinished(unfinished, count):
            absent = format_node_names(unfinished, count)
            return (
                f"all remaining nodes have finished; absent at the end: {absent}"
                if unfinished
                else "every node has finished"
            )
        case restart.GaveUp(node, reason):
            return f"node {node} gave up: {_describe_decision(reason)}"
        case restart.JudgedFailure(text=text):
            return text
        case restart.GiveUp(reason) | restart.Exclude(_, reason):
            return _describe_decision(reason)
    return _describe_wait(fact)


def _describe_wait(fact: Any) -> str:
    """Describe why no view is formed, or why this node is in none."""
    match fact:
        case reasons.WorkersRunning(node):
            return f"the workers of {node} have not stopped, or it waits before it starts them again"
        case reasons.TooFewNodes(joined, min_nodes, left_out):
            clauses = [f"{_describe(item)}, and is left out until it can" for item in left_out]
            return "; ".join([f"{joined} of at least {min_nodes} nodes have joined", *clauses])
        case reasons.VotesMissing(generation, votes, needed, missing, count):
            here = f"{votes} of the {needed} required votes count"
            nodes = format_node_names(missing, count)
            return f"generation {generation} may still run elsewhere: {here}; waiting for {nodes}"
        case reasons.CandidatesMissing(votes, needed, absent):
            here = f"{votes} of the {needed} required votes are here"
            return (
                f"{here} (a first start needs more than half of --rdzv-endpoint); not here: "
                f"{_list_candidates(absent)}"
            )
        case reasons.MembersAbsent(nodes, count):
            return f"waiting for {format_node_names(nodes, count)}, which may be looking for this leader"
        case reasons.LastCall(joined, max_nodes, timeout_s):
            wait = f"waiting until no new node has joined for {timeout_s:g} s"
            return f"{joined} of at most {max_nodes} nodes have joined: {wait}"
        case reasons.LeaderWaits(leader, reason):
            text = f"the leader {leader} started no generation with this node"
            return f"{text}: {_describe(reason)}" if reason else text
        case reasons.NoLeader(absent):
            where = f"{_list_candidates(absent)} nor at any member of the last generation"
            return f"no leader answers at {where}"
        case reasons.NodeRefused(address, refusal):
            return f"{address} refuses this node: {_describe(refusal)}"
        case reasons.JoinTimeout(timeout_s, obstacle):
            text = f"no rendezvous within {timeout_s:g} s"
            return f"{text}: {_describe(obstacle)}" if obstacle else text
    raise TypeError(f"no words for {fact!r}")


def describe_event(kind: str, reason: Any, *, node: str, generation: int) -> str:
    """Return one line about an event of the rendezvous on that node."""
    text = describe(reason) if reason is not None else ""
    match kind:
        case "leading":
            return f"{node} leads"
        case "step-down":
            return f"{node} steps down: {text}"
        case "view-ended":
            return f"generation {generation} is over: {text}"
        case "lease-expired":
            return f"generation {generation}: the start message arrived after the lease expired; rejoining"
        case "spare":
            return f"generation {generation} runs without this node, which stands by"
        case "workers-finished":
            return "this node's workers have finished; waiting for the others'"
        case "left-out":
            return f"{text}, and is left out until it can"
        case "unauthenticated":
            return f"a connection was dropped: {text}"
        case "disk":
            return f"{text.rstrip('.')}; trying again"
        case "leader-lost" if isinstance(reason, NodeLost):
            return f"the leader {text}"
    return text


def _describe_decision(reason: restart.GiveUpReason | restart.ExclusionReason) -> str:
    last = describe_failure(reason.failure)
    match reason:
        case restart.SameErrorAgain(failure) if failure.is_worth_requeue or failure.type == "NotProvedError":
            return f"{last}."
        case restart.SameErrorAgain():
            return f"{last}. Starting again would meet the same error."
        case restart.SameErrorEverywhere(_, num_nodes):
            return f"the same error on all {num_nodes} nodes before the first step: {last}."
        case restart.StepFails(_, step, times):
            return (
                f"what follows step {step - 1} fails deterministically: {times} times in a row with the same "
                f"exception. Last: {last}. Look at the samples of step {step}, or at what the script does "
                f"after step {step - 1}."
            )
        case restart.NoProgress(_, starts, step):
            where = f"at step {step}" if step else "before the first step"
            return (
                f"{f'{starts} starts in a row' if starts > 1 else 'a start'} failed without progress, "
                f"{where}. Last: {last}."
            )
        case restart.EndedElsewhere(_, nodes):
            ended = f"the workers of {format_node_names(nodes)} have finished, and those of this node failed"
            return f"{ended}: {last}. The script calls no er.resume(), so it would start over alone."
        case restart.RestartsExhausted():
            return f"{last}."
        case restart.WorkerStuck():
            return f"{last}. No worker can be started beside it: repair or reboot this node."
        case restart.GpuBroken():
            return f"{last}. The machine is at fault: reset its GPU, reboot it, or replace it."
        case restart.MachineBroken():
            return f"{last}. Test this machine, or replace it."
        case restart.CausedAlone(failure, times):
            count = f"the last {times} failures were" if times > 1 else "the failure was"
            return f"{count} caused by node {failure.node} alone. Last: {last}."
        case restart.CannotStart():
            return f"{last}. The other nodes have trained: this node's environment is wrong."


def describe_arguments(arguments: Sequence[reasons.NodeArguments]) -> str:
    """Name the script's arguments of nodes that differ; rank 0's node is first."""
    listed = "; ".join(f"{each.node}: {each.arguments or '(none)'}" for each in arguments)
    text = f"the script's arguments differ between nodes: {listed}."
    return to_printable(f"{text} Give all nodes the same, unless that is meant.", MAX_CHARS)


# ---- nodes ---------------------------------------------------------------------------------------------


def format_node_names(names: Iterable[object], count: int = 0) -> str:
    """List node names, at most `MAX_NODES_NAMED`; `count` is their number if not all are given."""
    texts = [to_printable(str(name), MAX_NAME_CHARS) for name in names]
    more = max(count, len(texts)) - MAX_NODES_NAMED
    return ", ".join(heapq.nsmallest(MAX_NODES_NAMED, texts)) + (f" and {more} more" if more > 0 else "")


def _describe_loss(lost: NodeLost) -> str:
    return _MEMBERS[lost.loss] + (f" ({_describe(lost.departure)})" if lost.departure else "")


def _describe_unreachable(others: Sequence[str]) -> str:
    more = f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
    return f"cannot reach {', '.join(others[:MAX_NAMED])}{more}"


def _list_candidates(absent: reasons.AbsentCandidates) -> str:
    listed = [
        f"{address} ({error})" if error else address
        for address, error in zip(absent.addresses, absent.errors, strict=False)
    ]
    more = absent.count - len(listed)
    return ", ".join(listed) + (f" and {more} more" if more > 0 else "")


# ---- failures ------------------------------------------------------------------------------------------


def describe_failure(failure: Failure | None, *, with_node: bool = False) -> str:
    """Describe what happened to which rank, without a full stop; with ``with_node`` also on which node."""
    if failure is None:
        return "a worker exited without reporting an error"
    if failure.kind in failures.NODE_FAILURE_KINDS:
        return to_printable(f"node {failure.node} {_describe_cause(failure)}")
    if failure.type == "NotProvedError":  # alike on all ranks
        return to_printable(failure.message.rstrip("."), MAX_CHARS)
    if isinstance(failure.cause, GpuFault) and failure.rank is None:
        return _describe_gpu(failure.cause) + (f" on node {failure.node}" if with_node else "")
    subject = "a worker" if failure.rank is None else f"rank {failure.rank}"
    if with_node:
        subject += f" on node {failure.node}"
    if failure.nodes > 1:
        subject += f" (and alike on {failure.nodes - 1} more)"
    if failure.kind == failures.NOT_PROVED:
        subject += ", which computed steps again to prove its resume,"
    error = ": ".join(part for part in (failure.type, failure.message.rstrip(".")) if part)
    where = f" ({failure.frame})" if failure.frame else ""
    text = f"{subject} {_describe_cause(failure)}" + (f": {error}{where}" if error else where)
    return to_printable(text, MAX_CHARS)


def _describe_cause(failure: Failure) -> str:
    cause = failure.cause
    match cause:
        case NodeLost():
            return _describe_loss(cause)
        case reasons.NodesUnreachable(_, others):
            return _describe_unreachable(others)
        case Stall():
            return f"hung: it {describe_stall(cause)}"
        case GpuFault():
            return f"failed: {_describe_gpu(cause, 'its')}"
        case WorkerEnd(exit_code, signal, memory):
            code = "failed" if exit_code is None else f"ended with exit code {exit_code}"
            text = f"was killed by {signal}" if signal else code
            return f"{text}, out of memory: {describe_memory(memory)}" if memory else text
    if failure.kind in failures.NODE_FAILURE_KINDS:
        return "was lost"
    if failure.kind == failures.STUCK:
        return "does not die of SIGKILL: it sleeps in the kernel (state D), on a device or a file system"
    if failure.kind == failures.DIVERGENCE and failure.step is not None:
        return f"held another state at step {failure.step} than the majority of nodes"
    return "failed"


def _describe_gpu(fault: GpuFault, article: str = "a") -> str:
    details = [] if fault.local_rank is None else [f"local rank {fault.local_rank}"]
    details += [] if fault.index is None else [f"index {fault.index}"]
    details += [fault.uuid] if fault.uuid else []
    if fault.xid is not None:
        meaning = f": {_XIDS[fault.xid]}" if fault.xid in _XIDS else ""
        details.append(f"Xid {fault.xid}{meaning}")
    details += [f"the driver asks for: {fault.recovery_action}"] if fault.recovery_action else []
    return f"{article} GPU is broken" + (f" ({'; '.join(details)})" if details else "")


def describe_memory(memory: MemoryPressure) -> str:
    """Describe how short memory was; empty if it was not."""
    texts = []
    if memory.oom_kills:
        processes = "a process" if memory.oom_kills == 1 else f"{memory.oom_kills} processes"
        texts.append(f"the kernel killed {processes} of this node's control group")
    used, limit = format_bytes(memory.used_bytes), format_bytes(memory.limit_bytes)
    if memory.is_control_group:
        texts.append(f"its control group had used {used} of {limit}")
    elif memory.limit_bytes:
        left = format_bytes(memory.limit_bytes - memory.used_bytes)
        texts.append(f"{left} of {limit} of this machine's memory were left")
    return "; ".join(texts)


def describe_not_parked(ranks: Sequence[int]) -> str:
    """Return the line about workers that did not leave the function of `run.restartable` in time."""
    return (
        f"{name_ranks(ranks)} did not leave the restartable function within 2 s, so a new process starts: "
        "look for a call that never returns to Python, or an `except BaseException` that swallows everything."
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 1`` or ``ranks 0, 2``."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def explain_verdict(verdict: FailureVerdict) -> list[str]:
    """Describe the root causes and the secondary failures in a few lines."""
    if verdict.root_cause is None:
        return []
    lines = [f"first: {describe_failure(verdict.root_cause, with_node=True)}."]
    if verdict.root_causes[1:]:
        lines.append(f"also: {_list_failures(verdict.root_causes[1:])}.")
    if verdict.secondary_failures:
        count = sum(failure.nodes for failure in verdict.secondary_failures)
        nodes = f"{count} node{'s' * (count > 1)}"
        lines.append(f"as a consequence, on {nodes}: {_list_failures(verdict.secondary_failures)}.")
    hint = _GPU_HINTS.get(verdict.root_cause.gpu_error) if verdict.root_cause.gpu_error else None
    return [*lines, hint] if hint else lines


def _list_failures(listed: Sequence[Failure]) -> str:
    shown = [describe_failure(failure, with_node=True) for failure in listed[:MAX_NAMED]]
    more = len(listed) - MAX_NAMED
    return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


# ---- hangs ---------------------------------------------------------------------------------------------


def describe_stall(stall: Stall) -> str:
    """Say why a rank stands still: a clause that follows "rank N"."""
    where = f" at {stall.at}" if stall.at else ""
    wait = f"waits in {describe_collective(stall.collective, stall.others_collective)}{where}"
    busy = f", using {stall.cpu_share:.0%} of a core" if stall.cpu_share else ""
    match stall.activity:
        case Activity.ENDED:
            return "has ended, while others of its generation continue"
        case Activity.STOPPED:
            return f"is stopped by a signal (SIGSTOP){where}"
        case Activity.TRACED:
            return f"is stopped by a debugger{where}"
        case Activity.UNINTERRUPTIBLE:
            sleeps = f" ({stall.kernel_function})" if stall.kernel_function else ""
            return f"sleeps in the kernel{sleeps} and cannot be woken: a disk or a device hangs{where}"
        case Activity.LAST_STEP_DONE:
            return f"has done its last step, and is{where or ' still there'}{_describe_missing(stall)}"
        case Activity.LEFT_BEHIND:
            place = f", and is{where}" if where else ""
            return f"did not end after the other ranks of its node had ended{place}"
        case Activity.HOLDS_GIL:
            main = f" (its main thread is{where})" if where else ""
            return f"does not let its Python run: native code of one of its threads holds the GIL{main}"
        case Activity.DATA:
            return f"waits for data{where}{busy}{_describe_missing(stall)}"
        case Activity.BACKWARD:
            return f"is in backward(){where}{busy}{_describe_missing(stall)}"
        case Activity.OPTIMIZER:
            return f"is in the optimizer's step{where}{busy}{_describe_missing(stall)}"
        case Activity.UNKNOWN:
            return f"stands still{where}{busy}{_describe_missing(stall)}"
        case Activity.COLLECTIVE:
            return wait
        case Activity.SPLIT_COLLECTIVE:
            return f"{wait}, others elsewhere"
        case Activity.SKIPPED_COLLECTIVE:
            named = stall.others_collective and describe_collective(stall.others_collective, stall.collective)
            others = f"{list_waiting_ranks(stall.others)} in {named or 'another collective'}"
            return f"{wait}, and {others}: it left out a collective, or called one too many"
        case Activity.OTHER_NODE:
            return "timed out waiting for other ranks"


def describe_collective(collective: Collective | None, other: Collective | None = None) -> str:
    """Name a collective as torch's flight recorder does, with its sizes if ``other`` has others."""
    if collective is None:
        return "a collective"
    group = f" of group {collective.group}" if collective.group else ""
    same = other is not None and (collective.sequence, collective.name) == (other.sequence, other.name)
    sizes = f" with sizes {collective.sizes}" if other and same and collective.sizes != other.sizes else ""
    return f"{collective.name} #{collective.number}{group}{sizes}"


def _describe_missing(stall: Stall) -> str:
    """Name the collective that others wait in and this rank has not started, else its last one."""
    if stall.others_collective is not None:
        waiting = list_waiting_ranks(stall.others)
        return f"; it has not started {describe_collective(stall.others_collective)}, in which {waiting}"
    return f"; its last collective is {describe_collective(stall.collective)}" if stall.collective else ""


def list_waiting_ranks(ranks: Sequence[int]) -> str:
    """Return a clause such as "ranks 0-3, 5 wait"."""
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])
    ]
    listed = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return f"rank {listed} waits" if len(ranks) == 1 else f"ranks {listed} wait"
