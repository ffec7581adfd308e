from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_resume.errors import ConfigError
from elastic_resume.mechanisms.curves.exporter import Point, parse_exporter


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--log-metrics is '', which is no tracker: write csv:FILE, jsonl:FILE"),
        ("comet", "--log-metrics is 'comet', which is no tracker"),
        ("csv", "--log-metrics is 'csv': write csv:FILE."),
        ("jsonl:", "--log-metrics is 'jsonl:': write jsonl:FILE."),
        ("tensorboard:", "write tensorboard:DIR."),
        ("wandb:", "write wandb:PROJECT."),
        ("mlflow:", "write mlflow:URI."),
        ("csv:~nobody-of-this-name/loss.csv", "which cannot be a path here"),
    ],
)
def test_wrong_setting_names_the_forms(text: str, message: str) -> None:
    """The error is one line, before anything starts."""
    with pytest.raises(ConfigError) as error:
        parse_exporter("--log-metrics", text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow"])
def test_missing_library_names_the_extra(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noticed before the job starts."""
    monkeypatch.setattr(importlib.util, "find_spec", {}.get)
    with pytest.raises(ConfigError, match=rf"--log-metrics {kind} needs {kind}, .*'\.\[{kind}\]'"):
        parse_exporter("--log-metrics", f"{kind}:there")


def test_no_library_is_imported_by_parsing() -> None:
    """Each takes seconds, and every node parses the setting."""
    code = (
        "import sys; from elastic_resume.mechanisms.curves.exporter import parse_exporter\n"
        "for text in ('csv:a', 'tensorboard:a', 'wandb', 'mlflow'): parse_exporter('--log-metrics', text)\n"
        "assert not {'tensorboard', 'wandb', 'mlflow', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_path_is_that_of_the_directory_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later change of the working directory moves no file."""
    monkeypatch.chdir(tmp_path)
    make = parse_exporter("--log-metrics", "csv:loss.csv")
    monkeypatch.chdir("/")
    exporter = make("job-1")
    assert exporter.open(-1) == -1
    exporter.write([Point(0, 1.0, {"a": 1.0})])
    exporter.close()
    assert (tmp_path / "loss.csv").exists()
