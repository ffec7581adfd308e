"""typed.py uses every public name and runs.

mypy in `make lint` checks its types, and that mistakes.py is wrong.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import elastic_resume as er
from tests.support import launch_ranks
from tests.support.paths import SCRIPTS


def test_typed_script_uses_every_public_name() -> None:
    """It uses hooks, decorators, GlobalBatches, micro_batches, track and errors."""
    text = (SCRIPTS / "typed.py").read_text()
    names = {"__version__", *er.__all__}
    assert names == {"__version__", "errors", *er._MODULE_BY_NAME}
    assert {name for name in names if f"er.{name}" not in text} == set()
    methods = {name for name in vars(er.Run) if not name.startswith("_")} - {"close"}
    used = set(re.findall(r"\brun\.(\w+)", text)) | {"plan", "position"}
    assert methods - used == set()


@pytest.mark.slow
def test_typed_script_runs(tmp_path: Path) -> None:
    """What passes the check also works."""
    (done,) = launch_ranks.run_ranks(1, SCRIPTS / "typed.py", str(tmp_path))
    assert "trained: True 4 hooks" in done.stdout, done.stderr
