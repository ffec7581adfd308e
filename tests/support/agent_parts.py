"""Make what the agent's part of a mechanism works with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastic_resume.mechanisms.mechanism import AgentContext


def make_agent_context(
    *,
    workers: int = 1,
    emit: Callable[..., Any] = print,
    has_resumed: Callable[[], bool] = lambda: True,
    drain: Callable[[str], None] = print,
    settings: Mapping[str, Any] | None = None,
    committer: Any = None,
) -> AgentContext:
    """Return the context of an agent whose node timeout is 0."""
    return AgentContext(Path(), workers, 0.0, emit, has_resumed, drain, settings or {}, committer)
