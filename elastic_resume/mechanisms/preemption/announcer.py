"""Announce this node's end to the job, pass the job's notice on to the workers, and drain this node after it.

Without a script that asks for notices a drain begins at once. Else it begins when the workers have had the
notice: after a signal they decide that themselves (`boundaries`), within the grace. After a cloud's notice
the agent waits until its workers are past the agreed step boundary, and for the deadline at most.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Mapping

from elastic_resume import constants, grace
from elastic_resume.background import BackgroundThread
from elastic_resume.mechanisms.mechanism import AgentContext, AgentPart, decode_body, encode_body
from elastic_resume.mechanisms.preemption.judge import (
    NOTICES,
    NoticeReport,
    NoticeVerdict,
    find_held_limit_s,
    find_patience,
)
from elastic_resume.mechanisms.preemption.notice_page import MAX_TEXT_BYTES, NoticePage
from elastic_resume.mechanisms.preemption.sources import PreemptionNotice, quote_briefly
from elastic_resume.mechanisms.preemption.watcher import NoticeWatcher
from elastic_resume.policy.restart import drain_margin_s
from elastic_resume.rendezvous.client import RendezvousClient
from elastic_resume.rendezvous.core.interface import StartWorkers
from elastic_resume.rendezvous.facts import Fact

CAUSE = "a preemption notice"
DEFAULT_NOTICE_S = 25.0
"""The shortest notice of any cloud is 30 s, and it is polled."""
VERDICT_WAIT_S = 0.5
DRAIN_POLL_S = 0.05


class Announcer(AgentPart):
    """The part of one agent."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._page = NoticePage.create(context.local_world_size, find_held_limit_s(context.node_timeout_s))
        os.environ[constants.ENV_NOTICE_PAGE] = self._page.path
        self._watcher = NoticeWatcher(context, self._on_notice)
        self._lock = threading.Lock()
        self._client: RendezvousClient | None = None
        self._generation = 0
        self._verdict = NoticeVerdict()
        self._is_used = False  # in this generation, as the leader knows
        self._report = self._sent = NoticeReport()
        self._drain_until: float | None = None  # the latest time of a drain that a cloud's notice began
        self._verdicts: Mapping[str, Fact] = {}
        self._thread = BackgroundThread("notices", self._wait_for_verdicts)
        self._has_started = self._is_closed = False

    def start(self, client: RendezvousClient) -> None:
        """Begin to poll for a cloud's notice."""
        self._client = client
        self._watcher.start()

    def begin_generation(self, world: StartWorkers) -> None:
        """Forget the notice of the generation before. A drain that waited for its workers begins now."""
        with self._lock:
            self._generation, self._is_used = world.generation, False
            self._verdict = NoticeVerdict()
            self._report = self._sent = NoticeReport()
            self._page.begin_generation(world.generation)
            if self._drain_until is not None:
                self._drain_until = 0.0
            self._drain_if_due()

    def update(self, client: RendezvousClient) -> None:
        """Look whether a worker's script asks for notices."""
        del client
        self._act()

    def begin_stop(self, cause: str) -> None:
        """Announce a signal to the job."""
        self._announce(cause, grace.find_left_s(time.monotonic()) or 0.0)

    def close(self) -> None:
        """End the threads; the page is unmapped, and its workers have ended."""
        self._watcher.close()
        self._thread.close(VERDICT_WAIT_S)
        with self._lock:
            self._is_closed = True
            self._page.close()
        os.environ.pop(constants.ENV_NOTICE_PAGE, None)

    # ---- notices of this node ------------------------------------------------------------------------

    def _on_notice(self, notice: PreemptionNotice) -> None:
        now = time.monotonic()
        left_s = DEFAULT_NOTICE_S if notice.deadline is None else max(0.0, notice.deadline - time.time())
        if not self._announce(notice.reason, left_s):
            self._context.drain(CAUSE)
            return
        with self._lock:
            grace_s = grace.find_left_s(now) or 0.0
            margin_s = drain_margin_s(grace_s, self._context.committer.last_commit_s, left_s)
            self._drain_until = now + left_s - margin_s
            self._drain_if_due()

    def _announce(self, reason: str, seconds: float) -> bool:
        """Tell the leader that this node is to stop; return whether the job asks for notices."""
        with self._lock:
            if not self._is_used or self._is_closed:
                return False
            if not self._report.reason:
                step_s = max((rank.step_us for rank in self._page.read_ranks()), default=0) / 1e6
                self._report = dataclasses.replace(
                    self._report,
                    reason=quote_briefly(reason),
                    seconds=round(seconds, 1),
                    patience=find_patience(self._context.node_timeout_s, step_s),
                )
                self._send()
            return True

    def _drain_if_due(self) -> None:
        if self._drain_until is None:
            return
        boundary = self._verdict.boundary
        ranks = self._page.read_ranks()
        has_passed = bool(boundary and ranks) and all(rank.boundaries > boundary for rank in ranks)
        if has_passed or self._verdict.is_void or time.monotonic() >= self._drain_until:
            self._drain_until = None
            self._context.drain(CAUSE)

    # ---- the job's notice ----------------------------------------------------------------------------

    def _wait_for_verdicts(self) -> float:
        client = self._client
        if client is None:
            return VERDICT_WAIT_S
        wait_s = VERDICT_WAIT_S if self._drain_until is None else DRAIN_POLL_S
        self._verdicts = client.wait_for_verdicts(self._verdicts, wait_s)
        self._act()
        return 0.0

    def _act(self) -> None:
        """Pass on what the leader has found, and send it what this node knows."""
        with self._lock:
            if self._client is None or self._is_closed:
                return
            fact = self._client.verdicts.get(NOTICES.name)
            if fact is not None and fact.generation == self._generation:
                self._pass_on(decode_body(NoticeVerdict, fact.body))
            if any(rank.is_used for rank in self._page.read_ranks()):
                self._report = dataclasses.replace(self._report, is_used=True)
            self._send()
            self._drain_if_due()
            must_start = self._is_used and not self._has_started
            self._has_started |= must_start
        if must_start:
            self._thread.start()

    def _pass_on(self, verdict: NoticeVerdict) -> None:
        if not self._is_used:
            self._is_used = True
            self._page.set_used()
        if verdict.patience and not self._report.bound:
            self._report = dataclasses.replace(self._report, bound=self._page.announce(verdict.patience))
        if verdict.is_void and not self._verdict.is_void:
            self._page.make_void()
        elif verdict.boundary and not self._verdict.boundary:
            notice = {"reason": verdict.reason, "node": verdict.node, "seconds": verdict.seconds}
            self._page.agree(verdict.boundary, json.dumps(notice).encode()[:MAX_TEXT_BYTES])
        self._verdict = verdict

    def _send(self) -> None:
        if self._client is not None and self._report != self._sent:
            self._sent = self._report
            self._client.send_fact(NOTICES.name, self._generation, encode_body(self._report))
