"""Log why a node's workers restart, and what ended the job; decide nothing."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from elastic_resume import machine
from elastic_resume.agent.failure_evidence import FailureEvents
from elastic_resume.policy.failure_classification import (
    NODE_FAILURE_KINDS,
    Failure,
    FailureVerdict,
)
from elastic_resume.policy.reasons import NodeArguments
from elastic_resume.policy.restart import Exclude, RestartDecision
from elastic_resume.policy.wording import (
    describe,
    describe_arguments,
    describe_event,
    describe_failure,
    describe_not_parked,
    explain_verdict,
    format_node_names,
)
from elastic_resume.rendezvous.core.interface import EmitEvent, StopReason

logger = logging.getLogger(__name__)

# Kinds of rendezvous events that are logged for people; the others are only in the event log.
WARNING_KINDS = {"refused", "disk", "unauthenticated", "left-out"}
STATE_KINDS = {"waiting", "spare", "workers-finished"}  # logged only if the state lasts
LASTING_S = 5.0
NO_RESUME_S = 60.0
MAX_LOST_NAMED = 3


class WaitLog:
    """Logs why this node has no running workers, if that lasts longer than ``delay_s``.

    A start or a restart that goes well passes through these states in a moment, and needs no line for each.
    """

    def __init__(self, delay_s: float = LASTING_S) -> None:
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._texts: dict[str, str] = {}  # not logged yet: the newest text of each kind
        self._is_lasting = False
        self._timer: threading.Timer | None = None

    def add(self, kind: str, text: str) -> None:
        """Log ``text`` once the wait has lasted long enough, unless a newer text of its kind replaces it."""
        with self._lock:
            if self._is_lasting:
                logger.info(text)
                return
            self._texts[kind] = text
            if self._timer is None:
                self._timer = threading.Timer(self._delay_s, self._log_texts)
                self._timer.daemon = True
                self._timer.start()

    def end(self) -> bool:
        """End the wait, and forget what was not logged. Return whether the wait was logged."""
        with self._lock:
            was_lasting, self._is_lasting = self._is_lasting, False
            self._texts.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return was_lasting

    def _log_texts(self) -> None:
        with self._lock:
            if threading.current_thread() is not self._timer:
                return  # the wait ended as the timer fired
            self._is_lasting = True
            for text in self._texts.values():
                logger.info(text)
            self._texts.clear()


class RestartLog:
    """The lines about one node's restarts: one for each, from the node that knows most."""

    def __init__(self, node: str, evidence: FailureEvents) -> None:
        self._node = node
        self._evidence = evidence
        self._wait_log = WaitLog()
        self._end_text = ""  # why the last generation ended, as far as this node knew
        self._is_end_logged = False
        self._traceback = ""  # of this node's failure in that generation
        self._printed_traceback = ""
        self._has_warned_of_no_resume = False
        self._resume_timer: threading.Timer | None = None
        self._logged_arguments: tuple[NodeArguments, ...] = ()
        self._process_limit = machine.ProcessLimit.find_own()
        self._refusals = self._process_limit.read_refusals() if self._process_limit else 0

    def log_rendezvous_event(self, event: EmitEvent) -> str:
        """Log an event of the rendezvous if it concerns people; return its text."""
        text = describe_event(event.kind, event.reason, node=self._node, generation=event.generation)
        if event.kind in WARNING_KINDS:
            logger.warning(text)
        elif event.kind in STATE_KINDS:
            self._wait_log.add(event.kind, text)
        else:
            logger.debug(text)
        return text

    def end_wait(self) -> None:
        """Log no more about waiting: this node's part of the job is over."""
        self._wait_log.end()
        self.stop_watching()

    def log_view_end(self, reason: StopReason | None) -> None:
        """Log why other nodes ended the generation, if the restart takes long."""
        why = describe(reason) if reason else "nodes have joined or left"
        self._end_text, self._is_end_logged, self._traceback = f"{why}; restarting.", False, ""
        self._wait_log.add("restart", self._end_text)

    def log_failure(self, root_cause: Failure | None, *, restarts: bool, delay_s: float) -> None:
        """Log how workers of this node failed. If it is secondary, another node reports the root cause."""
        plan = "; restarting" if restarts else ""
        plan += f" in {delay_s:g} s, because training made no progress" if delay_s else ""
        self._end_text, self._is_end_logged = f"{describe_failure(root_cause)}{plan}.", False
        self._traceback = self._evidence.find_traceback(root_cause) if root_cause else ""
        if root_cause is not None and root_cause.is_secondary:
            self._wait_log.add("restart", self._end_text)
        else:
            self._is_end_logged = True
            logger.warning(self._end_text)

    def log_refused_processes(self) -> None:
        """Log that the kernel has refused processes or threads in this generation: errors do not name it."""
        refusals = self._process_limit.read_refusals() if self._process_limit else 0
        usage = self._process_limit.read_usage() if self._process_limit else None
        if refusals > self._refusals and usage is not None:
            logger.warning(
                f"the kernel refused {refusals - self._refusals} new processes or threads, because the "
                f"control group may have {usage[1]} (pids.max): {machine.PROCESS_LIMIT_REMEDY}."
            )
        self._refusals = refusals

    def log_not_parked(self) -> None:
        """Log which workers of the last generation were killed because they did not park."""
        events = self._evidence.read()
        ranks = sorted({event["rank"] for event in events if event.get("not_parked") and "rank" in event})
        if ranks:
            logger.warning(describe_not_parked(ranks))

    def log_restart(
        self,
        verdict: FailureVerdict,
        decision: RestartDecision,
        joined: Sequence[str],
        lost: Sequence[str],
        preparing: Sequence[str] = (),
    ) -> None:
        """Log why the last generation ended, unless this node has logged its own failure as the cause.

        Nodes that are ``preparing`` were in it, and join again when their workers have reached `er.resume`.
        """
        was_wait_logged = self._wait_log.end()
        root_cause = verdict.root_cause
        if root_cause is not None and root_cause.node != self._node:
            cause = describe_failure(root_cause, with_node=True)
            without = (
                f" without {format_node_names(preparing)}, whose workers start first" if preparing else ""
            )
            logger.warning("%s%s; restarting%s.", cause, _describe_also_lost(root_cause, lost), without)
        elif not self._is_end_logged and not was_wait_logged:
            joins = root_cause is None and joined
            logger.info(f"joined: {format_node_names(joined)}; restarting." if joins else self._end_text)
        if isinstance(decision, Exclude):
            if decision.node == self._node:
                return  # `log_summary` follows
            logger.warning("node %s is excluded: %s", decision.node, describe(decision))
        is_root_cause = any(failure.node == self._node for failure in verdict.root_causes)
        if is_root_cause and self._traceback not in {"", self._printed_traceback}:
            self._print_traceback(logging.WARNING)
        self._traceback = ""

    def log_arguments(self, arguments: tuple[NodeArguments, ...]) -> None:
        """Log once that the script's arguments differ between nodes."""
        if arguments and arguments != self._logged_arguments:
            logger.warning(describe_arguments(arguments))
        self._logged_arguments = arguments or self._logged_arguments

    def watch_for_resume(self, has_resumed: Callable[[], bool]) -> None:
        """Warn in a minute if no worker of this node has come out of `er.resume` by then."""
        self.stop_watching()

        def check() -> None:
            waits = any(event["event"] == "archive-wait" for event in self._evidence.read())
            if not waits and not has_resumed():
                self.warn_of_no_resume("no worker has come out of er.resume() for a minute")

        self._resume_timer = threading.Timer(NO_RESUME_S, check)
        self._resume_timer.daemon = True
        self._resume_timer.start()

    def stop_watching(self) -> None:
        """Forget the last `watch_for_resume`."""
        if self._resume_timer is not None:
            self._resume_timer.cancel()

    def warn_of_no_resume(self, why: str) -> None:
        """Warn once that no worker came out of `er.resume`."""
        if self._has_warned_of_no_resume:
            return
        self._has_warned_of_no_resume = True
        logger.warning(
            "%s. A script that never calls it saves nothing and starts over at each restart: call "
            "er.epochs(...) or er.resume(...) in it, as docs/getting-started/port-your-script.md shows.",
            why,
        )

    def log_summary(self, verdict: FailureVerdict, events_path: Path, log_dir: str) -> None:
        """Log root cause and secondary failures, print the traceback, and name the files with the details.

        ``log_dir`` is where the user redirects the workers' output; empty if nowhere.
        """
        root_cause = verdict.root_cause
        if root_cause is None:
            return
        has_more = len(verdict.root_causes) > 1 or bool(verdict.secondary_failures)
        if has_more or not root_cause.is_deterministic:  # else the job's last line says the same
            for line in explain_verdict(verdict):
                logger.error(line)
        if root_cause.node == self._node:
            self._traceback = self._traceback or self._evidence.find_traceback(root_cause)
            if self._traceback:
                self._print_traceback(logging.ERROR)
        elif (
            root_cause.kind not in NODE_FAILURE_KINDS and root_cause.type and not root_cause.is_deterministic
        ):
            logger.error("the traceback is in the output and in the events of node %s.", root_cause.node)
        places = [f"events in {events_path}"]
        hangs = [event for event in self._evidence.read() if event["event"] == "hang"]
        reports = [str(event["report"]) for event in hangs if event.get("report")]
        places += [f"stacks of the hang in {path}" for path in reports[-1:]]
        places += [f"workers' output in {log_dir}"] if log_dir else []
        logger.error("more: %s.", "; ".join(places))

    def _print_traceback(self, level: int) -> None:
        if not logger.isEnabledFor(level):
            return
        self._printed_traceback = self._traceback
        with contextlib.suppress(OSError):  # a closed pipe or terminal must not end the job
            print(self._traceback.rstrip("\n"), file=sys.stderr, flush=True)


def _describe_also_lost(root_cause: Failure, lost: Sequence[str]) -> str:
    """Name the lost nodes that the root cause does not name; it counts towards `MAX_LOST_NAMED`."""
    is_node_failure = root_cause.kind in NODE_FAILURE_KINDS
    names = sorted(node for node in lost if not (is_node_failure and node == root_cause.node))
    shown = MAX_LOST_NAMED - is_node_failure
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"; also lost: {', '.join(names[:shown])}{more}" if names else ""
