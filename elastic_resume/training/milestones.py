"""Check what a script gives `Run.save` to name a checkpoint."""

from __future__ import annotations

import math
from typing import Any

from elastic_resume.errors import UsageError
from elastic_resume.milestone import Milestone, is_name


def make_milestone(name: object, metric: Any) -> Milestone | None:
    """Return the milestone of a save; None without a name.

    Its metric may be nan or infinite: a loss of nan must not end a job.

    Raises:
        UsageError: the name or the metric has a wrong form.

    """
    if name is None and metric is None:
        return None
    if not isinstance(name, str) or not is_name(name):
        raise UsageError(
            f"run.save: milestone is {name!r:.100}: give it a name of 1 to 64 letters, digits, '.', '_' and "
            "'-', such as milestone=\"best\": no number, no checkpoint's name, not latest and not off."
        )
    if metric is None:
        return Milestone(name)
    try:
        value = float("" if isinstance(metric, (str, bytes, bool)) else metric)
    except OverflowError:  # a whole number beyond all floats
        value = math.inf if metric > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"run.save: metric is {metric!r:.100}: give one number, of which the greatest is the best, such "
            "as metric=-loss.item()."
        ) from error
    return Milestone(name, value)
