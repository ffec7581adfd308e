"""Make what a mechanism's parts in agents and workers work with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastic_resume.agent.workers import worker_request
from elastic_resume.checkpoint.manifest import Position
from elastic_resume.events import Event
from elastic_resume.mechanisms.mechanism import AgentContext, WorkerContext
from elastic_resume.policy.resume_plan import ResumePlan


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


def make_worker_context(node_dir: Path, **changes: Any) -> WorkerContext:
    """Return the context of the only rank of a job that begins; ``changes`` are other fields of it."""
    context = WorkerContext(
        rank=0,
        local_rank=0,
        world_size=1,
        generation=1,
        step=0,
        node_dir=node_dir,
        settings={},
        tracked={},
        emit=lambda *_, **__: None,
        record=lambda _: None,
        count_collectives=lambda: 0,
        gather=lambda value: [value],
        broadcast_tensors=lambda *_: None,
        read_position=lambda: Position(0, 0, 0, 0),
        plan=ResumePlan("cold", generation=1),
    )
    return context._replace(**changes)
