"""Where things lie in the repository."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
SCRIPTS = TESTS / "support" / "scripts"
SCENARIOS = TESTS / "scenarios"


def preload(*modules: str) -> dict[str, str]:
    """Return variables for the process from which agents are forked, so that all share these imports."""
    path = f"{ROOT}{os.pathsep}{TESTS / 'support' / 'preload'}"
    return {"PYTHONPATH": path, "PYTHON_TEST_IMPORTS": " ".join(modules)}
