"""Play scenario files against the rendezvous core and compare what happens with what the file says.

A file's name is the sentence that it proves. `>` lines are commands to `Scenario.run_command`, `#` lines are
comments, and the rest is what people would see until the next command: time, node, text. With
ELASTIC_RESUME_REWRITE=1 the test rewrites the files: read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.paths import SCENARIOS
from tests.support.random_words import random_words
from tests.support.rendezvous_sim.scenario import play

FILES = sorted(SCENARIOS.glob("*.txt"))
REWRITE = os.environ.get("ELASTIC_RESUME_REWRITE") == "1"


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_scenario(path: Path) -> None:
    """The core does what the file says, and the same if all sentences are random words."""
    text = path.read_text()
    result, facts = play(text)
    with random_words():
        assert play(text)[1] == facts
    if REWRITE:
        path.write_text(result)
    assert result == text or REWRITE
