"""Commands that read or write much show how far they are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from tests.support import terminal
from tests.support.paths import ROOT
from tests.support.state_image import save_checkpoint

COMMANDS = """
import sys
from elastic_resume import cli, console
console.LONG_OPERATION_S = 0.0
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["verify", "--deep", "{path}"], ["reading {name}"]),
        (
            ["export", "{path}", "{path}/../model.safetensors"],
            ["reading {name}", "writing model.safetensors"],
        ),
    ],
    ids=["verify", "export"],
)
def test_long_command_logs_bytes(words: list[str], lines: list[str], tmp_path: Path) -> None:
    """A line a minute, and one at the end."""
    path = save_checkpoint(tmp_path, 3, model=nn.Linear(3, 2))
    words = [word.format(path=path) for word in words]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, *words], capture_output=True, text=True, check=True, cwd=ROOT
    )
    for line in lines:
        text = re.escape(line.format(name=path.name))
        assert re.search(rf"^{text}: ended, (.*B) of \1 in \d+\.\d s \(.*/s\)$", done.stderr, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["verify", "--deep", "{path}"], ["diff", "{path}", "{path}"]], ids=["verify", "diff"]
)
def test_long_command_shows_a_bar_on_a_terminal(words: list[str], tmp_path: Path) -> None:
    """It is gone at the end."""
    path = save_checkpoint(tmp_path, 3, model=nn.Linear(3, 2))
    shown = terminal.run("-c", COMMANDS, *[word.format(path=path) for word in words], directory=ROOT)
    assert re.search(rf"reading {re.escape(path.name)}:.*\d+%", shown)
    assert not any("%" in line for line in terminal.render(shown))
