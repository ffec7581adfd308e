"""Commands that read or write much show how far they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn

from elastic_resume import console
from elastic_resume.cli import main
from tests.support import terminal
from tests.support.paths import ROOT
from tests.support.state_image import save_checkpoint


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint."""
    return save_checkpoint(tmp_path, 3, model=nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["verify", "--deep", "{path}"], ["reading {name}"]),
        (["diff", "{path}", "{path}"], ["reading {name}"] * 2),
        (
            ["export", "{path}", "{path}/../model.safetensors"],
            ["reading {name}", "writing model.safetensors"],
        ),
    ],
    ids=["verify", "diff", "export"],
)
def test_long_command_logs_bytes(
    words: list[str],
    lines: list[str],
    saved: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A line a minute, and one at the end."""
    monkeypatch.setattr(console, "LONG_OPERATION_S", 0.0)
    assert main([word.format(path=saved) for word in words]) == 0
    ends = re.findall(r"(?m)^(.*): ended, (.*B) of \2 in \d+\.\d s \(.*/s\)$", capsys.readouterr().err)
    assert [end[0] for end in ends] == [line.format(name=saved.name) for line in lines]


@pytest.mark.slow
def test_long_command_shows_a_bar_on_a_terminal(saved: Path) -> None:
    """It is gone at the end."""
    code = "import sys; from elastic_resume import cli, console; console.LONG_OPERATION_S = 0.0; "
    words = ["verify", "--deep", str(saved)]
    shown = terminal.run("-c", f"{code} sys.exit(cli.main(sys.argv[1:]))", *words, directory=ROOT)
    assert re.search(rf"reading {re.escape(saved.name)}:.*\d+%", shown)
    assert not any("%" in line for line in terminal.render(shown))
