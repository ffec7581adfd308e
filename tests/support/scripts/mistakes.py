"""Each marked line has one type error.

If mypy stops finding it, `make lint` fails: the `type: ignore` is unused.
"""

from pathlib import Path

import torch

import elastic_resume as er

model = torch.nn.Linear(1, 1)
run = er.resume(model=model, keep=5)
er.resume(model=model, keeep=5)  # type: ignore[call-arg]
er.resume(model=model, save_every=0.5)  # type: ignore[arg-type]
er.resume(model=model, rng="saved")  # type: ignore[arg-type]
er.resume(model=model, track=[model])  # type: ignore[arg-type]
er.resume(model)  # type: ignore[call-arg]


@run.on_resume
def report(resumed: er.Run) -> None:
    """Use an unknown name."""
    print(resumed.position.steps)  # type: ignore[attr-defined]


@run.on_world_change  # type: ignore[type-var]
def scale(change: er.Run) -> None:
    """Take the argument of another hook."""
    print(change)


for epoch in run.epochs("2"):  # type: ignore[arg-type]
    run.step(epoch)  # type: ignore[call-arg]
path: Path = run.save()  # type: ignore[assignment]
er.GlobalBatches(24, 8, micro_batches=2)  # type: ignore[call-arg]
raise er.errors.ConfigErrors  # type: ignore[attr-defined]
