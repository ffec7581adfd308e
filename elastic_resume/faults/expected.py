"""What a job is expected to lose to failures, in closed form: Young/Daly, with what a failure costs.

Pure. With a mean time between failures of M seconds, u seconds from a failure until training goes on, and
copies every Δt seconds that cost training w each::

    goodput ≈ (1 - (u + Δt/2) / M) / (1 + w/Δt)        greatest at  Δt = √(2wM) - w

(J. W. Young, CACM 17(9), 1974; J. T. Daly, FGCS 22(3), 2006). It takes for granted that every failure sets
training back to the newest copy, half an interval on average; that failures never come during a recovery; and
that there is always another node. `simulate.py` takes none of that for granted.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_resume.policy import cadence


@dataclass(frozen=True)
class Expected:
    """Shares of the time, which add up to 1: training that counts, and what is lost."""

    productive: float
    down: float
    repeated: float
    copies: float


def shares(*, mtbf_s: float, down_s: float, interval_s: float, cost_s: float) -> Expected:
    """Give the closed form, part by part; 0 productive where failures come faster than it can hold for.

    Args:
        mtbf_s: mean seconds between failures of the job, which is a node's by the number of nodes.
        down_s: mean seconds from a failure to the next step.
        interval_s: seconds of training between two copies.
        cost_s: seconds that a copy adds to training.

    """
    down, repeated = down_s / mtbf_s, interval_s / 2 / mtbf_s
    if down + repeated >= 1:
        return Expected(0.0, down / (down + repeated), repeated / (down + repeated), 0.0)
    productive = (1 - down - repeated) / (1 + cost_s / interval_s)
    return Expected(productive, down, repeated, 1 - down - repeated - productive)


def best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds between two copies that lose least: Young's, within its bounds (`policy/cadence.py`)."""
    return cadence.optimum_s(cost_s, mtbf_s)
