"""Asks the scheduler whether those that are missing are dead, while this agent leads and waits for them.

Only then: a thread looks once a second whether there is a question, and asks no oftener than every few
seconds. Its answer goes to the rendezvous, which decides what it is worth; an answer that took long is thrown
away, since somebody may have come back meanwhile.

Promise: nothing here ends or blocks the agent; why there is no proof is said once for each reason.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from elastic_resume.cluster.verdict import Oracle
from elastic_resume.rendezvous.quorum import Question
from elastic_resume.rendezvous.steps import SchedulerSays

LOOK_S = 1.0
EVERY_S = 5.0
FRESH_S = 5.0
CLOSE_S = 0.5
MAX_TOLD = 16
"""So many different reasons are said."""


class Asking(Protocol):
    """Whom the word is for: `rendezvous.member.Member`."""

    @property
    def question(self) -> Question | None:
        """Of whom it would help to know that they are dead."""

    def scheduler_says(self, word: SchedulerSays) -> None:
        """Take the answer."""


@contextlib.contextmanager
def asked(
    oracle: Oracle | None, member: Asking, *, say: Callable[[str], None], tell: Callable[..., Any]
) -> Iterator[None]:
    """Ask within the context, where there is anybody to ask."""
    if oracle is None:
        yield
        return
    asker = Asker(oracle, member, say=say, tell=tell)
    asker.start()
    try:
        yield
    finally:
        asker.close()


class Asker:
    """The thread that asks, from `start` to `close`."""

    def __init__(
        self, oracle: Oracle, member: Asking, *, say: Callable[[str], None], tell: Callable[..., Any]
    ) -> None:
        """``say`` gets a line for people, ``tell`` events by kind and fields."""
        self._oracle = oracle
        self._member = member
        self._say = say
        self._tell = tell
        self._told: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._live, name="scheduler-word", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End; a question under way ends with its own time."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def _live(self) -> None:
        pause_s = LOOK_S
        while not self._closing.wait(pause_s):
            question = self._member.question
            pause_s = LOOK_S if question is None else EVERY_S
            if question is not None:
                self._ask(question)

    def _ask(self, question: Question) -> None:
        homes = {who: who.home for who in (*question.missing, *question.here)}
        nameless = sorted({who.node for who, home in homes.items() if not home})
        if nameless:
            self._doubt(f"{', '.join(nameless[:4])}: started where no scheduler was told of")
            return
        began = time.monotonic()
        verdict = self._oracle.ask(
            {homes[who] for who in question.missing}, {homes[who] for who in question.here}
        )
        if time.monotonic() > began + FRESH_S:
            self._doubt(f"its answer took longer than {FRESH_S:g} s, and counts no more")
            return
        if not verdict.alone:
            self._doubt(verdict.why)
        dead = frozenset(who for who in question.missing if homes[who] in verdict.dead)
        if dead:
            self._tell("scheduler-word", dead=sorted(map(str, dead)), alone=verdict.alone, why=verdict.why)
            self._member.scheduler_says(SchedulerSays(question, dead, verdict.alone))

    def _doubt(self, why: str) -> None:
        if why not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(why)
            self._say(f"the scheduler does not say that the missing are dead: {why}.")
