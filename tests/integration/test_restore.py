"""Real ranks restore, until one is killed; unit/restore/test_attempt.py has the cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import launch_ranks, resumer


@pytest.mark.cluster
def test_killed_source_ends_receivers(tmp_path: Path) -> None:
    """Before, the same ranks restore. Then the receivers fail with a connection error."""
    cases: list[dict[str, Any]] = [
        {
            "states_by_node": {"a": {"disk": [[1, 9]], "fail": fail}},
            "env": [
                {"ELASTIC_RESUME_CKPT_DIR": str(tmp_path / node / fail), "ELASTIC_RESUME_NODE_NAME": node}
                for node in "abc"
            ],
        }
        for fail in ("", "transfer.send=kill@9")
    ]
    first, *others = launch_ranks.run_ranks(3, Path(resumer.__file__), json.dumps(cases))
    for done in (first, *others):
        # The gloo of torch 2.10 prints its connections too.
        (result,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
        assert (result["values"], result["buffer"], result["held"]) == ([9.0], 100.0, [1, 9])
    for done in others:
        assert "onnection" in done.stderr
