"""A function in the place of a command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_resume.errors import ConfigError
from elastic_resume.launching.launcher import list_words, make_command
from elastic_resume.mechanisms.on_event.command import parse_command, run_command

MODULE = "from pathlib import Path\ndef notify(notice):\n    Path('got').write_text(notice['text'])\n"
SCRIPT = """
from pathlib import Path
from elastic_resume.launching.launcher import make_command
def notify(notice):
    Path("got").write_text(notice["text"])
if __name__ == "__main__":
    print(make_command("on_event", notify))
"""


@pytest.mark.parametrize("name", ["of_a_file", "package_of_it.inner", "package_alone"])
def test_function_of_module_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whatever directories this process has added to its path."""
    path = tmp_path / "modules" / f"{name.replace('.', '/')}.py"
    if name == "package_alone":
        path = path.with_suffix("") / "__init__.py"
    path.parent.mkdir(parents=True)
    path.write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.chdir(tmp_path)
    notify = __import__(name, fromlist=["notify"]).notify
    (word,), _ = list_words({"on_event": notify})
    assert not run_command(
        parse_command("x", word.removeprefix("--on-event=")), {"text": "a b"}, lambda: False
    )
    assert (tmp_path / "got").read_text() == "a b"


def test_function_of_script_is_called(tmp_path: Path) -> None:
    """The script is imported, below its guard."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    subprocess.run(
        parse_command("x", command), input=json.dumps({"text": "hi"}), text=True, cwd=tmp_path, check=True
    )
    assert (tmp_path / "got").read_text() == "hi"


def test_function_without_module_is_refused() -> None:
    """A new process could not find it."""
    with pytest.raises(ConfigError, match="on_event is a function that a new process cannot import"):
        make_command("on_event", lambda notice: notice)
