"""What a generation's own events say, and why it ended.

Each generation is judged by its events, by what became of its nodes' agents, and by the one that followed:
what is missing there was lost. Does not know what an end cost (`incidents`), nor how signs weigh (`causes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastic_resume.policy.tally import GROWN
from elastic_resume.report.causes import ECHO, Fate, Sign, Span, fate_of, judged, signs_of
from elastic_resume.report.timeline import Seen, Timeline

# Ends that are an observed failure. A node that joins, or a job that is stopped or done, is none.
FAILURES = frozenset({"worker", "exception", "node", "job", "left", "unknown"})


@dataclass(frozen=True)
class End:
    """Why a generation ended.

    ``kind``: worker, exception, node (lost), left (a node was told to), job (all of it was killed), stopped
    (all of it was told to), joined, finished, open (it runs, or was killed as a whole), or unknown.
    ``node`` and ``rank`` were first. ``also``: other failures of their own; ``cascade``: what followed.
    """

    kind: str
    text: str
    t: float | None = None
    node: str = ""
    rank: int | None = None
    also: tuple[str, ...] = ()
    cascade: tuple[str, ...] = ()

    @property
    def is_failure(self) -> bool:
        """Whether this end counts as an incident."""
        return self.kind in FAILURES


@dataclass(frozen=True)
class Facts:
    """What the events of one generation say by themselves."""

    number: int
    events: tuple[Seen, ...]
    resume: Seen | None
    verdict: Seen | None  # of the agents
    nodes: tuple[str, ...]
    world_size: int | None
    began: float
    start_step: int | None
    for_newcomers: bool = False  # its leader ended it, as nothing had befallen it

    @property
    def announced_last(self) -> int | None:
        """The last step of the generation before, as this one's resume found it."""
        if self.resume is None or self.start_step is None:
            return None
        lost = self.resume.count("lost_steps")
        return None if lost is None else self.start_step + lost


def facts_of(line: Timeline) -> list[Facts]:
    """Give the generations in order."""
    verdicts: dict[int | None, Seen] = {}
    for one in line.of_kind("verdict"):
        verdicts.setdefault(one.generation, one)
    told = {one.text("message") for one in line.of_kind("rendezvous") if one.text("what") == "restart"}
    return [
        replace(
            _facts(number, found, verdicts.get(number)),
            for_newcomers=f"generation {number} is over: {GROWN}" in told,
        )
        for number, found in line.generations.items()
    ]


def _facts(number: int, events: tuple[Seen, ...], verdict: Seen | None) -> Facts:
    starts = [one for one in events if one.kind == "worker-start"]
    resume = next((one for one in reversed(events) if one.kind == "resume"), None)
    told = [resume, *starts] if resume else starts
    sizes = [size for one in told if (size := one.count("world_size")) is not None]
    named = resume.names("nodes") if resume else ()
    return Facts(
        number=number,
        events=events,
        resume=resume,
        verdict=verdict,
        nodes=named or tuple(sorted({one.node for one in events})),
        world_size=sizes[0] if sizes else None,
        began=min(one.t for one in told or events),
        start_step=next((one.step for one in told if one.step is not None), None),
    )


def end_of(line: Timeline, one: Facts, following: Facts | None) -> tuple[End, list[Sign]]:
    """Why generation ``one`` ended, and every sign of it."""
    later = following.nodes if following else None
    fates = _fates(line, one, following)
    signs = judged(signs_of(one.events, fates), one.verdict)
    best = signs[0] if signs else None
    hows = {fate.how for fate in fates.values()}
    heavy = {sign.kind for sign in signs if sign.weight != ECHO}
    joined = [name for name in later or () if name not in one.nodes]
    if _is_finished(one, fates, signs):
        end = End("finished", "finished")
    elif hows and hows <= {"lost", "signalled"} and heavy <= {"node", "left"}:
        end = _all_gone(fates, signs)
    elif best is not None and best.weight != ECHO:
        end = _from_sign(best, signs)
    elif joined:
        # Agents stop their workers one after the other: an echo is all that a join leaves.
        end = End("joined", f"{_names(joined)} joined", cascade=tuple(sign.text for sign in signs))
    elif best is not None:
        end = _from_sign(best, signs)
    elif one.for_newcomers:
        end = End("joined", "nodes came that left again")
    elif following is None:
        end = End("open", "still running, or killed as a whole")
        failed = [fate for fate in fates.values() if fate.how == "failed"]
        if failed:
            end = End("unknown", failed[0].text or "the agents gave up", t=failed[0].t)
    else:
        end = End("unknown", "ended without a record of why")
    return end, signs


def _fates(line: Timeline, one: Facts, following: Facts | None) -> dict[str, Fate]:
    """What became of each node. A silent one is lost if the others went on, or gave up, without it."""
    span = Span(
        number=one.number,
        began=one.began,
        until=following.began if following else None,
    )
    fates = {
        name: fate_of(line.nodes.get(name, ()), line.last.get((name, one.number)), span) for name in one.nodes
    }
    gave_up = following is None and any(fate.how == "failed" for fate in fates.values())
    for name, fate in fates.items():
        missing = following is not None and name not in following.nodes
        if fate.how == "unknown" and (missing or gave_up):
            fates[name] = Fate("lost", fate.t)
    return fates


def _is_finished(one: Facts, fates: Mapping[str, Fate], signs: Sequence[Sign]) -> bool:
    began = {seen.rank for seen in one.events if seen.kind == "worker-start"}
    ended = {seen.rank for seen in one.events if seen.kind == "run-end"}
    heavy = {sign.kind for sign in signs if sign.weight != ECHO}
    if ended and ended >= began:
        # All whose logs are left have finished. What was killed after its work was done ended nothing.
        return len(ended) == one.world_size or not heavy & {"worker", "exception"}
    return not heavy and (bool(ended) or any(fate.how == "done" for fate in fates.values()))


def _all_gone(fates: Mapping[str, Fate], signs: Sequence[Sign]) -> End:
    """Every node was told to stop, or died without a word: nobody was left to go on."""
    times = [sign.t for sign in signs if sign.t is not None]
    words = sorted({fate.text for fate in fates.values() if fate.how == "signalled" and fate.text})
    cascade = tuple(sign.text for sign in signs if sign.weight == ECHO)
    first = min(times, default=None)
    if any(fate.how == "signalled" for fate in fates.values()):
        return End("stopped", words[0].rstrip(".") if words else "stopped", t=first, cascade=cascade)
    return End("job", "whole job killed", t=first, cascade=cascade)


def _from_sign(best: Sign, signs: Sequence[Sign]) -> End:
    others = [sign for sign in signs if sign is not best]
    return End(
        kind=best.kind,
        text=best.text,
        t=best.t,
        node=best.node,
        rank=best.rank,
        also=tuple(sign.text for sign in others if sign.weight != ECHO),
        cascade=tuple(sign.text for sign in others if sign.weight == ECHO),
    )


def _names(names: Sequence[str]) -> str:
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return ("nodes " if len(names) > 1 else "node ") + listed
