"""Keep a PyTorch DDP or FSDP2 job running: the death of a worker or a node costs seconds.

::

    import elastic_resume as er
    for epoch in er.epochs(EPOCHS, loader, model=model, optimizer=optimizer, scheduler=scheduler):
        for batch in loader:
            ...
            optimizer.step()

`errors` has every error that is raised on purpose: ``except er.errors.CheckpointError``. Other names are
imported at first use, so that the command line tools start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from elastic_resume import errors

if TYPE_CHECKING:
    from elastic_resume.checkpoint.manifest import Position as Position
    from elastic_resume.data.batch_size import WorldChange as WorldChange
    from elastic_resume.data.elastic_sampler import ElasticSampler as ElasticSampler
    from elastic_resume.data.global_batches import GlobalBatches as GlobalBatches
    from elastic_resume.data.rank_values import RankValues as RankValues
    from elastic_resume.data.rank_values import per_rank as per_rank
    from elastic_resume.data.rng import seeded as seeded
    from elastic_resume.data.sharded_stream import ShardedStream as ShardedStream
    from elastic_resume.launching.launcher import launch as launch
    from elastic_resume.mechanisms.preemption.notice import Preemption as Preemption
    from elastic_resume.policy.resume_plan import ResumePlan as ResumePlan
    from elastic_resume.state.open_checkpoint import load as load
    from elastic_resume.training.epochs import epochs as epochs
    from elastic_resume.training.epochs import steps as steps
    from elastic_resume.training.hsdp import shard_mesh as shard_mesh
    from elastic_resume.training.resume import resume as resume
    from elastic_resume.training.run import Run as Run

__version__ = "0.1.0"

_MODULE_BY_NAME = {
    "ElasticSampler": "elastic_resume.data.elastic_sampler",
    "GlobalBatches": "elastic_resume.data.global_batches",
    "Position": "elastic_resume.checkpoint.manifest",
    "Preemption": "elastic_resume.mechanisms.preemption.notice",
    "RankValues": "elastic_resume.data.rank_values",
    "ResumePlan": "elastic_resume.policy.resume_plan",
    "Run": "elastic_resume.training.run",
    "ShardedStream": "elastic_resume.data.sharded_stream",
    "WorldChange": "elastic_resume.data.batch_size",
    "epochs": "elastic_resume.training.epochs",
    "launch": "elastic_resume.launching.launcher",
    "load": "elastic_resume.state.open_checkpoint",
    "per_rank": "elastic_resume.data.rank_values",
    "resume": "elastic_resume.training.resume",
    "seeded": "elastic_resume.data.rng",
    "shard_mesh": "elastic_resume.training.hsdp",
    "steps": "elastic_resume.training.epochs",
}

__all__ = [
    "ElasticSampler",
    "GlobalBatches",
    "Position",
    "Preemption",
    "RankValues",
    "ResumePlan",
    "Run",
    "ShardedStream",
    "WorldChange",
    "__version__",
    "epochs",
    "errors",
    "launch",
    "load",
    "per_rank",
    "resume",
    "seeded",
    "shard_mesh",
    "steps",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)
