"""Whether a job that has ended is to be run again, and who asks for it: pure.

Facts about the end and its surroundings in, one decision with a sentence for people out. Three things must
not happen: that nobody asks (the job is over, though it was not done), that a job comes back which somebody
has cancelled or which fails each time, and that a job which still runs on other nodes is torn down.

What Slurm does (22.05, seen): a job that ends by itself within the grace of a preemption has failed, and is
not run again, also where PreemptMode is REQUEUE; to ask for the requeue of a cancelled job brings it back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from elastic_resume import constants
from elastic_resume.events import Event

# How often a job is started again after a life without a new step, before it is left to people.
MAX_IDLE_RESTARTS = 3
# For what neither takes: the signals' way, goodbyes, the request itself.
SLACK_S = 5.0
TOLD_TO_END = "the scheduler has been told to end or to requeue it"


class End(Enum):
    """How this agent came to its end."""

    DONE = "done"
    AT_FAULT = "at fault"
    LOST = "lost"  # no world can be formed any more; other nodes may have one
    LEFT = "left"  # this node is unfit; the others go on
    INTERRUPTED = "interrupted"  # SIGINT, SIGHUP, SIGQUIT: somebody at a keyboard
    TERMINATED = "terminated"  # SIGTERM, which tells nothing of who sent it
    NOTICE = "notice"  # told ahead of time that the end will come
    DEADLINE = "deadline"  # the time limit is near


class Word(Enum):
    """What the scheduler says of a job whose processes got SIGTERM."""

    NONE = "nothing"  # it cannot be asked, or does not answer
    RUNNING = "running"  # and knows of no reason to end it
    PREEMPTED = "preempted"
    TIME_LIMIT = "time limit"
    ENDING = "ending"  # cancelled, or requeued by somebody else


@dataclass(frozen=True)
class Facts:
    """What the decision is made from.

    ``idle`` is how many lives in a row have brought no new step, this one included, as far as this node
    knows: where it has another disk each time it knows of one. ``only_here``: the scheduler's job is this
    node alone, others have jobs of their own. ``mine``: of several nodes, this one speaks for all. ``alone``:
    what ended this node was meant for it alone. ``other`` names another program that requeues.
    """

    end: End
    word: Word = Word.NONE
    scheduler: str = "slurm"
    idle: int = 0
    only_here: bool = False
    mine: bool = True
    alone: bool = False
    other: str = ""
    scontrol: bool = True
    off: bool = False


def margin_s(grace_s: float, commit_s: float, life_s: float) -> float:
    """How long before its time limit a node is drained.

    All nodes of a job work it out, each for itself, and shall begin together: what a commit takes differs a
    little between them, and is rounded up to the next of 10, 20, 40, … s.

    Args:
        grace_s: of a worker.
        commit_s: what a commit has taken; 0 where there has been none.
        life_s: from this agent's start to the limit; half of it is the job's in any case.

    """
    commit = 10.0
    while commit < min(2 * commit_s, 3600.0):  # all nodes may write to one disk then
        commit *= 2
    return min(grace_s + commit + SLACK_S, max(0.0, life_s) // 2)


def idle_lives(events: Iterable[Event], restarts: int) -> int:
    """How many lives in a row have finished no new step on this node, the last included.

    Args:
        events: all that the node's log holds.
        restarts: how often the scheduler has started the job again. Older lives were other jobs'.

    """
    idle = 0
    start: int | None = None
    for event in events:
        step = event.get("step")
        if event["event"] == "agent-start":
            idle, start = idle + 1, None
        elif event["event"] == "worker-start" and isinstance(step, int):
            start = step if start is None else min(start, step)
        elif event["event"] in {"step", "commit"} and isinstance(step, int) and start is not None:
            idle = 0 if step > start else idle
    return min(idle, restarts + 1)


class Action(Enum):
    """What is done: ``TELL`` leaves it to who reads the exit code."""

    REQUEUE = "requeue"
    TELL = "exit code"
    OVER = "over"  # this node's part is; the others' is not
    LEAVE = "leave alone"


@dataclass(frozen=True)
class Decision:
    """What to do, and why, in words that end a sentence."""

    action: Action
    why: str

    def exit_code(self, otherwise: int) -> int:
        """Give the exit code of an agent that would end with ``otherwise`` were there no requeue."""
        if self.action is Action.OVER:
            return constants.EXIT_DONE
        return otherwise if self.action is Action.LEAVE else constants.EXIT_REQUEUE


def decide(facts: Facts) -> Decision:
    """Decide about one end of one agent."""
    told = _part_of_a_job(facts) or _not_at_all(facts) or _by_others(facts)
    return told or Decision(Action.REQUEUE, _cause(facts))


def _part_of_a_job(facts: Facts) -> Decision | None:
    """Whether this node's end says nothing of the job's.

    srun gives the highest exit code of all nodes, however long ago a node left: with 75 a job would be queued
    again whose other nodes have finished it. Not where this node speaks for all: it may be the last.
    """
    if facts.scheduler != "slurm" or facts.only_here or facts.mine:
        return None
    if facts.word is Word.ENDING or facts.end not in {End.LEFT, End.NOTICE}:
        return None
    if facts.end is End.LEFT or facts.alone:
        return Decision(Action.OVER, "the other nodes of the job go on")
    return Decision(Action.OVER, "the node of rank 0 asks for the requeue, if all were told")


def _not_at_all(facts: Facts) -> Decision | None:
    """Why the job is not to be run again, as far as this node can say."""
    plain = {
        End.DONE: "the job is done",
        End.AT_FAULT: "the job is at fault and would end like this again",
        End.INTERRUPTED: "somebody interrupted it",
    }
    if facts.end in plain:
        return Decision(Action.LEAVE, plain[facts.end])
    if facts.word is Word.ENDING:
        return Decision(Action.LEAVE, TOLD_TO_END)
    if facts.end is End.TERMINATED and facts.word not in {Word.PREEMPTED, Word.TIME_LIMIT}:
        if facts.scheduler == "slurm" and not (facts.mine or facts.only_here):
            return Decision(Action.LEAVE, "the node of rank 0 asks Slurm why SIGTERM came")
        return Decision(Action.LEAVE, "whoever sent SIGTERM decides whether it is to be run again")
    others_go_on = facts.end is End.LEFT and not facts.only_here
    if facts.idle > MAX_IDLE_RESTARTS and not others_go_on:
        return Decision(Action.LEAVE, f"it has lived {facts.idle} times without a new step")
    return None


def _by_others(facts: Facts) -> Decision | None:
    """Why it is not this node that asks the scheduler."""
    if facts.end in {End.LOST, End.LEFT} and not facts.only_here:
        return Decision(Action.TELL, "other nodes of the job may go on")
    if facts.other:
        return Decision(Action.TELL, f"{facts.other} requeues it")
    if facts.off:
        return Decision(Action.TELL, "--requeue is off")
    if facts.scheduler != "slurm":
        return Decision(Action.TELL, "who started this agent sees by its exit code that it is to run again")
    if not facts.only_here and facts.alone:
        return Decision(Action.TELL, "the other nodes of the job go on")
    if not facts.only_here and not facts.mine:
        return Decision(Action.TELL, "the node of rank 0 asks for the requeue")
    if not facts.scontrol:
        return Decision(
            Action.TELL,
            "there is no scontrol here: the batch script has to requeue the job, as exit code "
            f"{constants.EXIT_REQUEUE} tells it",
        )
    return None


def _cause(facts: Facts) -> str:
    if facts.end is End.TERMINATED:
        return "it is preempted" if facts.word is Word.PREEMPTED else "its time limit is reached"
    return {
        End.NOTICE: "a signal told ahead of time that it will end",
        End.DEADLINE: "its time limit is near",
        End.LOST: "no world can be formed any more",
        End.LEFT: "this node left",
    }[facts.end]
