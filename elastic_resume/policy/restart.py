"""Whether to go on after a round ended: the history of one node in, a decision out. Pure.

A restart costs nothing while training advances, and a change of membership costs nothing ever. What ends a
job is a failure that a restart would meet again: one that the worker itself calls its own fault, or the
same standstill `Limits.max_no_progress` times in a row. Progress is a step that no earlier round reached.

Does not know other nodes' workers: each node judges its own, and tells the others when it gives up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic_resume.events import Event

MAX_NO_PROGRESS = 3  # NVRx gives up after as many cycles without growth


@dataclass(frozen=True)
class Limits:
    """What the user may set."""

    max_no_progress: int = MAX_NO_PROGRESS


@dataclass(frozen=True)
class Failure:
    """The first own failure of a worker in a round, as far as this node saw it."""

    rank: int | None
    exit_code: int | None
    signal: str | None
    message: str  # the exception's type and text; empty when the worker died without a word
    frame: str  # where in the user's code it was raised; may be empty
    at_fault: bool


@dataclass(frozen=True)
class Round:
    """What one round of this node came to.

    ``failed`` means that a worker of this node ended it; a round that ended because nodes came or went, or
    that workers finished, did not fail.
    """

    failed: bool
    first_step: int | None = None  # the step it started from
    newest_step: int | None = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Decision:
    """Go on, or give up for ``reason`` (a whole sentence for people; empty when going on)."""

    give_up: bool
    reason: str = ""


def summarize(events: Iterable[Event], *, failed: bool) -> Round:
    """Fold the events of one node since its round began."""
    events = list(events)
    starts = [_step(event) for event in events if event["event"] == "worker-start"]
    reached = [_step(event) for event in events if event["event"] in {"worker-start", "step", "commit"}]
    return Round(
        failed=failed,
        first_step=min((step for step in starts if step is not None), default=None),
        newest_step=max((step for step in reached if step is not None), default=None),
        failure=first_failure(events),
    )


def first_failure(events: Sequence[Event]) -> Failure | None:
    """Give the failure that came first.

    One that is the job's own fault goes before any other: what its peers report is a consequence.
    """
    said = [event for event in events if event["event"] == "failure"]
    said.sort(key=lambda event: (not event.get("at_fault"), event["t"]))
    ends = [event for event in events if event["event"] == "worker-exit" and _is_own_failure(event)]
    ends.sort(key=lambda event: event["t"])
    if said and (said[0].get("at_fault") or not ends or said[0]["t"] <= ends[0]["t"]):
        word = said[0]
        end = next((event for event in ends if _same_worker(word, event)), {})
    elif ends:
        end = ends[0]
        word = next((event for event in said if _same_worker(event, end)), {})
    else:
        return None
    told = ": ".join(str(word[key]) for key in ("type", "message") if word.get(key))
    return Failure(
        rank=end.get("rank") if word.get("rank") is None else word["rank"],
        exit_code=end.get("exit_code"),
        signal=end.get("signal"),
        message=told or str(end.get("message") or ""),
        frame=str(word.get("frame") or ""),
        at_fault=bool(word.get("at_fault")),
    )


def describe(failure: Failure | None) -> str:
    """Say in plain words what happened to which rank."""
    if failure is None:
        return "a worker ended without leaving a word"
    who = "a worker" if failure.rank is None else f"rank {failure.rank}"
    if failure.signal:
        how = f"was killed by {failure.signal}"
    elif failure.exit_code is not None:
        how = f"ended with exit code {failure.exit_code}"
    else:
        how = "failed"
    where = f" ({failure.frame})" if failure.frame else ""
    # A sentence of ours goes on after it.
    return f"{who} {how}" + (f": {failure.message.rstrip('.')}{where}" if failure.message else "")


def decide(history: Sequence[Round], limits: Limits) -> Decision:
    """Decide after the last round of ``history`` (oldest first) has ended."""
    last = history[-1]
    if not last.failed:
        return Decision(give_up=False)
    if last.failure is not None and last.failure.at_fault:
        return Decision(True, f"{describe(last.failure)}. Starting again would meet the same error.")
    stuck = rounds_without_progress(history)
    if stuck < limits.max_no_progress:
        return Decision(give_up=False)
    reached = max((r.newest_step for r in history if r.newest_step is not None), default=None)
    where = "before the first step" if not reached else f"at step {reached}"
    return Decision(
        True, f"{stuck} starts in a row failed without progress, {where}. Last: {describe(last.failure)}."
    )


def rounds_without_progress(history: Sequence[Round]) -> int:
    """Count the failed rounds since a step was reached that no earlier round had reached.

    When a round starts below where the one before it started, copies were lost and training climbs
    again over steps it has seen: what it reached before no longer counts.
    """
    best: int | None = None
    started: int | None = None
    stuck = 0
    for this in history:
        if this.first_step is not None:
            if started is not None and this.first_step < started:
                best = this.first_step
            started = this.first_step
        base = best if best is not None else this.first_step
        if this.newest_step is not None and (base is None or this.newest_step > base):
            stuck = 0
        elif this.failed:
            stuck += 1
        if this.newest_step is not None:
            best = this.newest_step if best is None else max(best, this.newest_step)
    return stuck


def _same_worker(failure: Event, end: Event) -> bool:
    """Whether ``end`` is that of the worker that wrote ``failure``, maybe before it knew its rank."""
    if failure.get("rank") is None:
        return "pid" in failure and bool(failure["pid"] == end.get("worker_pid"))
    return bool(failure["rank"] == end.get("rank"))


def _is_own_failure(event: Event) -> bool:
    return not event.get("stopped") and (event.get("exit_code") != 0 or bool(event.get("signal")))


def _step(event: Event) -> int | None:
    step = event.get("step")
    return step if isinstance(step, int) else None
