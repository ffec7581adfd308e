"""Why a generation ended: every sign of it in the logs, and which of them is the cause.

A death is seen more than once: the worker that was killed, its peers whose connection broke, the agents
that stopped the rest. Signs have three weights. *Definite*: a death or exception that nothing else explains.
*Silent*: a node's log ends, or begins anew, without a goodbye; when it died is known only roughly. *Echo*:
what a peer's death makes of a living worker (a closed connection, an aborted collective). A heavier sign
beats a lighter one, and among equals the first by time is the cause: so clocks that differ by less than
the time between two failures do no harm, and an echo never hides the death that made it.

Exits of workers that were told to stop are signs of nothing: the restart did that.

Where agents left a verdict, which rests on the order in which their coordinator heard of things and not on
clocks, it says which signs are causes (`judged`).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from elastic_resume.policy import failures
from elastic_resume.policy.failures import looks_like_echo
from elastic_resume.report.timeline import Seen

DEFINITE, SILENT, ECHO = 0, 1, 2
# How a kind of failure is counted here. What is not among them ended a worker.
_COUNTED = {
    failures.NODE_LOST: "node",
    failures.PREEMPTED: "left",
    failures.EXCEPTION: "exception",
    failures.DIVERGENCE: "exception",
    failures.DISK: "exception",
}
# Those that a worker's exit or exception does not tell by itself.
_MORE_THAN_AN_EXIT = {failures.OOM, failures.HANG, failures.STUCK, failures.DISK, failures.DIVERGENCE}


@dataclass(frozen=True)
class Sign:
    """Something that shows that a generation is over. ``t`` None: it left no time behind."""

    weight: int
    t: float | None
    node: str
    rank: int | None
    kind: str  # worker, exception, node, left
    text: str

    @property
    def order(self) -> tuple[int, float]:
        """The smallest is the cause."""
        return (self.weight, math.inf if self.t is None else self.t)


@dataclass(frozen=True)
class Fate:
    """What became of a node's agent at the end of a generation.

    ``how``: stays, lost, signalled, failed, done, or unknown (no agent, or nothing to tell by).
    """

    how: str
    t: float | None = None
    text: str = ""


@dataclass(frozen=True)
class Span:
    """When a generation was. ``until`` is when the next one began, None while there is none."""

    number: int
    began: float
    until: float | None


def fate_of(log: Sequence[Seen], last: int | None, span: Span) -> Fate:
    """Say what became of a node in the generation ``span``.

    ``log`` are the node's events by time; ``last`` is the place of the last one that is of the generation.
    """
    seen_t = log[last].t if last is not None else None
    if last is not None:
        after = (log[place] for place in range(last + 1, len(log)))
    else:  # wiped: what an agent wrote after its return tells of this generation only until the next one
        first = bisect.bisect_right(log, span.began, key=_time)
        stop = len(log) if span.until is None else bisect.bisect_left(log, span.until, key=_time)
        after = (log[place] for place in range(first, stop))
    for one in after:
        if one.kind == "agent-end":
            outcome = one.text("outcome")
            how = outcome if outcome in {"signalled", "failed", "done"} else "unknown"
            if outcome == "left":  # of itself: it could not take part any more
                how = "signalled"
            return Fate(how, one.t, one.text("message").removeprefix(f"node {one.node} leaves the job: "))
        if one.kind == "agent-start":
            return Fate("lost", seen_t)
        if one.kind == "round":
            return Fate("stays")
        if one.generation is not None and one.generation > span.number:
            return Fate("unknown")
    return Fate("unknown", seen_t)


def _time(one: Seen) -> float:
    return one.t


def signs_of(events: Collection[Seen], fates: dict[str, Fate]) -> list[Sign]:
    """All signs of the end of one generation, the cause first."""
    lost = {name for name, fate in fates.items() if fate.how == "lost"}
    told = {(one.node, one.pid) for one in events if one.kind == "failure"}
    signs = []
    for one in events:
        if one.kind == "failure":
            signs.append(_exception(one))
        elif one.kind == "worker-exit" and one.at_fault and not one.stopped:
            if (one.node, one.pid) in told or (one.node in lost and one.text("signal") == "SIGKILL"):
                continue  # told better by the exception, or by the loss of its node
            signs.append(worker_sign(one))
    for name, fate in fates.items():
        if fate.how == "lost":
            signs.append(_loss(name, fate, events))
        elif fate.how == "signalled":
            text = f"node {name} left: {fate.text or 'stopped by a signal.'}"
            signs.append(Sign(DEFINITE, fate.t, name, None, "left", text))
    return sorted(signs, key=lambda sign: sign.order)


def judged(signs: Sequence[Sign], verdict: Seen | None) -> list[Sign]:
    """Put the signs in the order that the agents' verdict gives them, the cause first.

    A cause whose own log is lost has left no sign but the verdict.
    """
    left = list(signs)
    if verdict is None:
        return left
    causes = []
    for cause in _listed(verdict, "causes"):
        kind = cause.text("kind")
        of_node = kind in failures.OF_NODES
        # What a worker of a silent node says of its peers' end tells nothing of its own node's.
        sign = next((one for one in left if one.node == cause.node and _is_about(one, cause, of_node)), None)
        # A log that was lost is no loss of its node, where the others heard the node say goodbye.
        guessed = sign is not None and kind == failures.PREEMPTED and sign.kind == "node"
        if sign is None or guessed or kind in _MORE_THAN_AN_EXIT:
            who = f"node {cause.node}" if of_node else _who(cause)
            said = ": ".join(filter(None, [cause.text("type"), cause.text("message")]))
            text = f"{who} {cause.text('text')}" + (f": {said}" if said else "")
            made = Sign(DEFINITE, None, cause.node, cause.rank, _COUNTED.get(kind, "worker"), text)
            causes.append(made if sign is None else replace(made, t=sign.t))
        else:
            causes.append(replace(sign, weight=min(sign.weight, SILENT)))
        if sign is not None:
            left.remove(sign)
    followed = {(one.node, one.rank) for one in _listed(verdict, "cascade")}
    rest = [replace(one, weight=ECHO) if (one.node, one.rank) in followed else one for one in left]
    return causes + sorted(rest, key=lambda sign: sign.order)


def _is_about(sign: Sign, cause: Seen, of_node: bool) -> bool:
    return sign.kind in {"node", "left"} if of_node else sign.rank == cause.rank


def _listed(verdict: Seen, name: str) -> list[Seen]:
    """The failures in a list of a verdict."""
    listed = verdict.raw.get(name)
    raws: list[Mapping[str, object]] = (
        [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    )
    empty = Seen(verdict.t, "", "", None, None, None, None, {})
    found = [replace(empty, raw=raw) for raw in raws]
    return [replace(one, node=one.text("node"), rank=one.count("rank")) for one in found if one.text("node")]


def worker_sign(exit_event: Seen) -> Sign:
    """The sign that a worker's exit is."""
    one = exit_event
    code, signal = one.count("exit_code"), one.text("signal")
    message = one.text("message").strip().partition("\n")[0]
    how = (signal or f"exit code {code}") + (f": {message}" if message else "")
    # NCCL's watchdog aborts the process when a peer is gone.
    weight = ECHO if signal == "SIGABRT" or looks_like_echo(message) else DEFINITE
    return Sign(weight, one.t, one.node, one.rank, "worker", f"{_who(one)}: {how}")


def _exception(one: Seen) -> Sign:
    what = one.text("type") or "exception"
    message = one.text("message")
    weight = ECHO if looks_like_echo(f"{what} {message}") else DEFINITE
    text = f"{_who(one)}: {what}" + (f": {message}" if message else "")
    return Sign(weight, one.t, one.node, one.rank, "exception", text)


def _loss(name: str, fate: Fate, events: Collection[Seen]) -> Sign:
    own = [one for one in events if one.node == name]
    # A stub sees its agent die and ends the worker: the only one who can tell the moment.
    kills = [one for one in own if one.kind == "worker-exit" and one.text("signal") == "SIGKILL"]
    ranks = sorted({one.rank for one in own if one.rank is not None})
    rank = ranks[0] if ranks else None
    if kills:
        return Sign(DEFINITE, kills[0].t, name, rank, "node", f"node {name} lost")
    # Nobody steps without it, so it lived when the others did that last, whatever is left of its log.
    alive = [one.t for one in events if one.kind == "step"] + ([fate.t] if fate.t is not None else [])
    return Sign(SILENT, max(alive, default=None), name, rank, "node", f"node {name} lost")


def _who(one: Seen) -> str:
    rank = "a worker" if one.rank is None else f"rank {one.rank}"
    return f"{rank} on {one.node or 'an unnamed node'}"
