"""What went wrong and killed nobody: disks that refuse, copies set aside, notices, words of schedulers.

Each kind of event has one sentence. The same trouble of the same node, again and again, is one with a count,
from the first time to the last; one that ends (a disk that takes checkpoints again) says when. Pure.

Failures that ended a generation are not among these (`incidents`).
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import PurePath

from elastic_resume.report.event_log import Seen, Timeline
from elastic_resume.report.formatting import amount, seconds, without_path

BAD, NOTE, NEWS = "bad", "note", "news"
_SLOW = 5  # times as long as such a commit mostly takes
_SLOW_LEAST_S = 1.0
_MIN_COMMITS = 4  # fewer tell nothing of what is usual


@dataclass(frozen=True)
class Trouble:
    """``weight``: bad (somebody should look), note, or news (of how worlds formed).

    ``until``: when it was over, or last seen.
    """

    kind: str
    weight: str
    node: str
    t: float
    until: float
    count: int
    text: str
    generation: int | None = None
    step: int | None = None
    is_over: bool = True


def find(line: Timeline) -> tuple[Trouble, ...]:
    """All troubles of a run, by the time at which they began."""
    found: list[Trouble] = []
    for kind, (usual, sentence) in _SENTENCES.items():
        for seen in line.of_kind(kind):
            said = sentence(seen)
            if said:
                weight = NOTE if seen.raw.get("elsewhere") is True else usual  # a hang that another node made
                made = Trouble(kind, weight, seen.node, seen.t, seen.t, 1, said, seen.generation, seen.step)
                found.append(made)
    found += [one for one in map(_of_rendezvous, line.of_kind("rendezvous")) if one is not None]
    found += _slow(line.of_kind("commit"))
    return tuple(sorted(_folded(found, line), key=lambda trouble: (trouble.t, trouble.node)))


def _folded(found: Iterable[Trouble], line: Timeline) -> list[Trouble]:
    """The same again becomes one; a checkpoint that is written ends the trouble with writing them."""
    commits: dict[str, list[float]] = {}
    for one in line.of_kind("commit"):
        commits.setdefault(one.node, []).append(one.t)
    open_ones: dict[tuple[str, str, str], Trouble] = {}
    told = []
    for trouble in sorted(found, key=lambda trouble: trouble.t):
        said = trouble.text if trouble.kind != "commit-failed" else ""
        key = (trouble.kind, trouble.node, said)
        last = open_ones.get(key)
        if last is not None and not _between(commits.get(trouble.node, []), last.until, trouble.t):
            open_ones[key] = replace(last, until=trouble.t, count=last.count + 1)
            continue
        if last is not None:
            told.append(last)
        open_ones[key] = trouble
    told += open_ones.values()
    return [_ended(one, commits.get(one.node, [])) for one in told]


def _ended(one: Trouble, commits: list[float]) -> Trouble:
    if one.kind != "commit-failed":
        return one
    again = next((t for t in commits if t > one.until), None)
    return replace(one, is_over=again is not None, until=one.until if again is None else again)


def _between(times: list[float], since: float, until: float) -> bool:
    place = bisect.bisect_right(times, since)
    return place < len(times) and times[place] < until


def _slow(commits: list[Seen]) -> list[Trouble]:
    """Commits that took much longer than this node's mostly take."""
    by_node: dict[str, list[tuple[Seen, float]]] = {}
    for one in commits:
        spent = one.seconds("seconds")
        if spent is not None:
            by_node.setdefault(one.node, []).append((one, spent))
    found = []
    for node, here in by_node.items():
        usual = statistics.median(spent for _, spent in here)
        for one, spent in here:
            if len(here) >= _MIN_COMMITS and spent > max(_SLOW_LEAST_S, _SLOW * usual):
                text = f"a checkpoint took {seconds(spent)} to write, most take {seconds(usual)}"
                slow = Trouble(
                    "slow-disk", BAD, node, one.t - spent, one.t, 1, text, one.generation, one.step
                )
                found.append(slow)
    return found


# ---- one sentence for each kind ------------------------------------------------------------------------


def _said(one: Seen, *names: str) -> str:
    return next((without_path(text) for name in names if (text := one.text(name))), "no reason is told")


def _quarantine(one: Seen) -> str:
    return f"a copy was set aside ({PurePath(one.text('path')).name}): {_said(one, 'reason')}"


def _differ(one: Seen) -> str:
    wrong = one.names("wrong")
    who = f"of {', '.join(wrong)} differ from the others'" if wrong else "differ, and no majority says whose"
    then = "the majority's state is taken" if one.raw.get("goes_on") is True else "the job ends"
    return f"replicas {who}; {then}"


def _drain(one: Seen) -> str:
    others = ", the others go on" if one.raw.get("alone") is True else ""
    return f"{_said(one, 'cause')}: this node saves and leaves{others}"


def _notice(one: Seen) -> str:
    reason = one.text("reason")
    return f"the node is to be taken away, says {_said(one, 'source')}" + (f": {reason}" if reason else "")


def _requeue(one: Seen) -> str:
    done = ", done" if one.raw.get("done") is True else ", refused" if "done" in one.raw else ""
    told = ": ".join(filter(None, [one.text("why"), one.text("message")]))
    return f"{_said(one, 'action')}{done}" + (f" ({told})" if told else "")


def _hang(one: Seen) -> str:
    suspects = one.raw.get("suspects")
    named = [s for s in suspects if isinstance(s, dict)] if isinstance(suspects, list) else []
    blamed = "; ".join(f"rank {s.get('rank')} {s.get('reason')}" for s in named[:3])
    quiet = seconds(one.seconds("seconds"))
    who = blamed or "all ranks of this node wait for another node's"
    return f"no step for {quiet} after step {one.step}: {who}"


def _zygote(one: Seen) -> str:
    left = one.raw.get("left_out")
    names = ", ".join(map(str, left)) if isinstance(left, dict) else ""
    return f"not preloaded, since it spoils a fork: {names}" if names else ""


def _left_out(one: Seen) -> str:
    return "" if one.count("exit_code") == 0 else "the process that forks workers died, and was replaced"


def _stuck(one: Seen) -> str:
    return f"rank {one.rank}'s process cannot be killed" if one.raw.get("stuck") is True else ""


_SENTENCES: dict[str, tuple[str, Callable[[Seen], str]]] = {
    "commit-failed": (BAD, lambda one: f"no checkpoint could be written: {_said(one, 'error')}"),
    "snapshot-failed": (BAD, lambda one: f"no copy in memory: {_said(one, 'reason')}"),
    "snapshot-ignored": (BAD, lambda one: f"a copy in memory cannot be true: {_said(one, 'reason')}"),
    "keeper-failed": (BAD, lambda one: f"a fault of elastic_resume's keeper: {_said(one, 'error')}"),
    "watch-failed": (BAD, lambda one: f"a fault of elastic_resume's watch: {_said(one, 'error')}"),
    "prune-failed": (BAD, lambda one: f"old checkpoints could not be removed: {_said(one, 'error')}"),
    "board-ignored": (BAD, lambda one: f"the page of last steps was damaged: {_said(one, 'reason')}"),
    "quarantine": (BAD, _quarantine),
    "replicas-differ": (BAD, _differ),
    "hang": (BAD, _hang),
    "worker-exit": (BAD, _stuck),
    "hang-over": (NOTE, lambda one: f"the hang after step {one.step} ended by itself"),
    "drain": (NOTE, _drain),
    "preemption-notice": (NOTE, _notice),
    "requeue": (NOTE, _requeue),
    "zygote-ready": (NOTE, _zygote),
    "zygote-exit": (NOTE, _left_out),
}
_OF_RENDEZVOUS = {
    "disk": BAD,
    "refused": BAD,
    "stranger": BAD,
    "forced": BAD,
    "late": BAD,
    "waiting": NOTE,
    "spare": NEWS,
    "dropped": NEWS,
    "step-down": NEWS,
    "leader-lost": NEWS,
    "reborn": NEWS,
}


def _of_rendezvous(one: Seen) -> Trouble | None:
    what = one.text("what")
    weight = _OF_RENDEZVOUS.get(what)
    if weight is None:
        return None
    return Trouble(what, weight, one.node, one.t, one.t, 1, one.text("message") or what)


def described(one: Trouble) -> str:
    """How often and for how long, where it was more than once."""
    lasting = one.until - one.t
    again = amount(one.count, "time") if one.count > 1 else ""
    while_ = f"for {seconds(lasting)}" if lasting >= 1 and one.kind != "slow-disk" else ""
    still = "" if one.is_over else "and not over"
    return ", ".join(filter(None, [again, while_, still]))
