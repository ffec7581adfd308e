"""Make what the agent's part of a mechanism works with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastic_resume.agent.workers import worker_request
from elastic_resume.events import Event
from elastic_resume.mechanisms.mechanism import AgentContext


def make_agent_context(
    *,
    node_dir: Path = Path(),
    workers: int = 1,
    emit: Callable[..., Any] = print,
    read_evidence: Callable[[], list[Event]] = list,
    drain: Callable[[str], None] = print,
    settings: Mapping[str, Any] | None = None,
    committer: Any = None,
    start_early: Any = None,
    is_parked: Callable[[int], bool] = lambda local_rank: worker_request.is_parked(str(local_rank)),
) -> AgentContext:
    """Return the context of an agent whose node timeout is 0."""
    return AgentContext(
        node_dir, workers, 0.0, emit, read_evidence, drain, settings or {}, committer, start_early, is_parked
    )
