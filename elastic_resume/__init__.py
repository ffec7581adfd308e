"""Wraps a PyTorch DDP job so that the death of a worker or a node costs seconds, not the run.

    import elastic_resume as er
    run = er.resume(model=model, optimizer=opt, scheduler=sched, data=batches)
    model = run.ddp(model)
    for epoch in run.epochs(EPOCHS):
        for batch in loader:
            ...
            run.step()

Names are imported when they are first used: the command line tools need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_resume.policy.source import ResumePlan as ResumePlan
    from elastic_resume.store.manifest import Position as Position
    from elastic_resume.worker.batches import GlobalBatches as GlobalBatches
    from elastic_resume.worker.reader import load as load
    from elastic_resume.worker.run import Run as Run
    from elastic_resume.worker.sampler import ElasticSampler as ElasticSampler
    from elastic_resume.worker.seeding import seeded as seeded
    from elastic_resume.worker.start import resume as resume
    from elastic_resume.worker.worldsize import WorldChange as WorldChange

__version__ = "0.1.0"

_HOMES = {
    "ElasticSampler": "elastic_resume.worker.sampler",
    "GlobalBatches": "elastic_resume.worker.batches",
    "Position": "elastic_resume.store.manifest",
    "ResumePlan": "elastic_resume.policy.source",
    "Run": "elastic_resume.worker.run",
    "WorldChange": "elastic_resume.worker.worldsize",
    "load": "elastic_resume.worker.reader",
    "resume": "elastic_resume.worker.start",
    "seeded": "elastic_resume.worker.seeding",
}

__all__ = [
    "ElasticSampler",
    "GlobalBatches",
    "Position",
    "ResumePlan",
    "Run",
    "WorldChange",
    "__version__",
    "load",
    "resume",
    "seeded",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
