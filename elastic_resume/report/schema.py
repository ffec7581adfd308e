"""A report as a program reads it: one JSON object, whose members are told in docs/report.md.

Promise: within one `SCHEMA` members are only added. Times are Unix seconds of clocks that were set right,
durations seconds; null is what is not known.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from elastic_resume.report.story import Story

SCHEMA = 1


def as_json(told: Story) -> str:
    """Give the whole story."""
    return json.dumps(as_dict(told), indent=1, allow_nan=False) + "\n"


def as_dict(told: Story) -> dict[str, Any]:
    """Give the members of the object."""
    report = asdict(told.report)
    for row in report["generations"]:
        phases = told.recoveries.get(row["number"])
        row["recovery"] = asdict(phases) if phases is not None else None
        row["cost_s"] = told.costs.get(row["number"])
    return {
        "schema": SCHEMA,
        "run_id": told.run_id,
        "command": told.command,
        "began": told.began,
        "until": told.until,
        "verdict": asdict(told.verdict),
        "outcome": report.pop("outcome"),
        "message": report.pop("message"),
        "goodput": {**asdict(told.goodput), "share": told.goodput.share},
        **report,
        "troubles": [asdict(one) for one in told.troubles],
        "faults": [asdict(one) for one in told.faults],
        "checkpoints": [asdict(one) for one in told.copies],
        "clocks": [asdict(one) for one in told.clocks],
        "hangs": [{"file": name, "text": text} for name, text in told.stacks.items()],
        "problems": list(told.problems),
    }
