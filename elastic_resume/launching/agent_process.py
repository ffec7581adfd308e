"""Run ``elastic-resume run`` as the child of a process that has called `launch`, and report how it ends.

``python -u -m elastic_resume.launching.agent_process CALLER WORDS…``, with the words of ``run``: the agent
drains when the process CALLER ends, however that ends.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from elastic_resume import cli, constants, events, linux
from elastic_resume.agent.workers import run_main
from elastic_resume.errors import ElasticResumeError
from elastic_resume.launching import call_memory
from elastic_resume.launching.call_memory import LaunchEnd


def main() -> None:
    """Run the agent and end this process. A worker that was forked here leaves by SystemExit."""
    caller, *words = sys.argv[1:]
    # The end of the caller's thread counts, and that thread waits in `launch`.
    linux.die_with_parent(int(caller), signal.SIGTERM)
    results = Path(f"/proc/self/fd/{os.environ[constants.ENV_LAUNCH].partition(',')[2]}")
    try:
        exit_code = cli.run(words, owns_process=True)
        end = LaunchEnd(exit_code) if exit_code == constants.EXIT_SUCCESS else describe_end(exit_code)
    except ElasticResumeError as error:  # the caller raises it
        end = LaunchEnd(cli.exit_code_before_start(error), type(error).__name__, str(error))
    except KeyboardInterrupt:  # before the agent handles signals
        end = LaunchEnd(constants.EXIT_SIGNAL_BASE + signal.SIGINT)
    call_memory.append(results, end)
    run_main.exit_without_freeing(end.exit_code)


def describe_end(exit_code: int) -> LaunchEnd:
    """Return the agent's own last words and the root cause, as this node's event log has them."""
    found: list[events.Event] = []
    for event in events.read(Path(os.environ[constants.ENV_EVENTS_PATH])):
        if event["event"] == "agent-start":
            found = []  # of an earlier start
        elif event["event"] in {"failure", "verdict", "agent-end"}:
            found.append(event)
    newest = {event["event"]: event for event in found}
    end = newest.get("agent-end", {})
    failure = find_failure([end.get("reason"), newest.get("verdict", {}).get("root_causes")]) or {}
    tracebacks = [
        event.get("traceback")
        for event in found
        if event["event"] == "failure"
        and all(event.get(k) == failure.get(k) for k in ("node", "rank", "type"))
    ]
    return LaunchEnd(exit_code, "", str(end.get("message", "")), failure, str((tracebacks or [""])[-1] or ""))


def find_failure(fact: Any) -> dict[str, Any] | None:
    """Return the first `Failure` within a fact in its JSON form."""
    if isinstance(fact, dict):
        if {"node", "rank", "frame"} <= fact.keys():
            return fact
        fact = list(fact.values())
    found = map(find_failure, fact) if isinstance(fact, list) else ()
    return next(filter(None, found), None)


if __name__ == "__main__":
    main()
