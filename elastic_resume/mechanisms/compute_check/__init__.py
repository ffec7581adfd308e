"""Find a rank that computes wrong gradients, before their average hides them in every replica.

Off by default. `check` lets all ranks compute rank 0's batch again every few steps (`recorder` keeps it,
`request` carries it, `computation` computes it), and `judge` compares what they got. Its events are::

    compute-check       generation, step, ranks, is_equal, seconds; of each node
    gradients-differ    generation, step, rank (null: no majority), local_rank, node, gpu (its UUID, or ""),
                        name (of the first output or parameter), agreed_step, times, has_other_inputs, ranks
    compute-check-off   generation, step, reason

A rank that is named twice raises `HardwareError`, which ends its node's part in the job.
"""

from __future__ import annotations

from elastic_resume.errors import ConfigError
from elastic_resume.mechanisms.compute_check import description
from elastic_resume.mechanisms.mechanism import Mechanism, StepObserver, WorkerContext, lazily
from elastic_resume.option import Option

MAX_STEPS = 10**9


def _parse_steps(source: str, value: object) -> int:
    text = str(value)
    if not text.isdecimal() or int(text) > MAX_STEPS:
        raise ConfigError(f"{source} is {text[:100]!r}: write a number of steps, or 0 for no checks.")
    return int(text)


def _observe(context: WorkerContext) -> StepObserver | None:
    every = context.settings.get("check_compute_every")
    if not every:
        return None
    observer: StepObserver = lazily("compute_check.check", "ComputeCheck")(context, every)
    return observer


COMPUTE_CHECK = Mechanism(
    make_observer=_observe,
    make_agent_part=lazily("compute_check.reporter", "ComputeCheckReporter"),
    needs_setting="check_compute_every",
    alerts=description.ALERTS,
    status=description.STATUS,
    gauge=description.GAUGE,
    options=(
        Option(
            "check-compute-every",
            "N",
            "all ranks compute one batch every N steps; 0: off",
            _parse_steps,
            "0",
            has_flag=True,
            details="finds a GPU that computes wrongly, and excludes its node at the second time; a check "
            "costs about a step",
            is_for_workers=True,
        ),
    ),
)
