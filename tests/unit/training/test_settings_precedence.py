"""Test which source of a setting wins: argument, flag, environment, default."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastic_resume import config, constants
from elastic_resume.agent import torchelastic
from elastic_resume.config import Settings

ARGUMENT, FLAG, ENVIRONMENT = "argument", "flag", "environment"


@dataclass(frozen=True)
class Case:
    """A setting's value from each source, as text; the highest source comes first."""

    name: str
    default: str
    values: dict[str, str]
    flag: str = ""
    argument_is_ignored: bool = False

    @property
    def flag_word(self) -> str:
        """The flag."""
        return "--" + (self.flag or self.name.replace("_", "-"))


HERE = Path.cwd()
FLAGGED = (ARGUMENT, FLAG, ENVIRONMENT)
WITH_AGENT = [
    # Settings with an argument and a flag.
    Case("save_every", "auto", dict(zip(FLAGGED, ("7", "8", "10s"), strict=True))),
    Case("snapshot_every", "auto", dict(zip(FLAGGED, ("7", "8", "off"), strict=True))),
    Case("keep", "3", dict(zip(FLAGGED, ("7", "8", "9"), strict=True))),
    Case("resume", "auto", dict(zip(FLAGGED, ("must", "never", "must"), strict=True))),
    Case("resume_from", "None", dict(zip(FLAGGED, ("3", "5", "7"), strict=True))),
    # Settings of the agent: it has locked the directory before the script starts.
    Case(
        "ckpt_dir",
        str(HERE / "checkpoints"),
        dict(zip(FLAGGED, ("/a", "/b", "/c"), strict=True)),
        argument_is_ignored=True,
    ),
    Case(
        "run_id",
        "train",
        dict(zip(FLAGGED, ("a", "b", "c"), strict=True)),
        flag="rdzv-id",
        argument_is_ignored=True,
    ),
    Case("transfer_addr", "None", {ENVIRONMENT: "127.0.0.2"}),
    Case(
        "node_name",
        socket.gethostname(),
        {ARGUMENT: "a", ENVIRONMENT: "c"},
        argument_is_ignored=True,
    ),
    # Settings without an argument.
    Case("snapshot_memory", "None", {ENVIRONMENT: "8192"}),
    Case("check_replicas", "auto", {ENVIRONMENT: "off"}),
    Case("prove", "first", {FLAG: "always", ENVIRONMENT: "stop"}),
    Case("archive", "", {FLAG: "/a", ENVIRONMENT: "s3://bucket/b"}),
]


def read_settings(case: Case, sources: list[str], *, has_agent: bool) -> Settings:
    """Return the settings of a worker, for which each of ``sources`` gives the case's value."""
    environ = {}
    if ENVIRONMENT in sources:
        environ[constants.ENV_PREFIX + case.name.upper()] = case.values[ENVIRONMENT]
    if has_agent:
        words = [case.flag_word, case.values[FLAG]] if FLAG in sources else []
        args, _ = config.parse_flags(torchelastic.build_parser(), [*words, "train.py"], environ)
        environ |= Settings.for_agent(args, environ).to_env() | {constants.ENV_AGENT_PID: "1"}
    arguments = {case.name: case.values[ARGUMENT]} if ARGUMENT in sources else {}
    return Settings.for_worker(environ, "train.py", **arguments)


@pytest.mark.parametrize("case", WITH_AGENT, ids=lambda case: case.name)
def test_highest_source_wins_under_agent(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources are removed one after the other, from the highest to none."""
    monkeypatch.delenv("PET_RDZV_ID", raising=False)  # torchrun's parser reads it
    sources = list(case.values)
    while True:
        deciding = [name for name in sources if name != ARGUMENT or not case.argument_is_ignored]
        expected = case.values[deciding[0]] if deciding else case.default
        settings = read_settings(case, sources, has_agent=True)
        assert str(getattr(settings, case.name)) == expected, f"given by {sources}"
        if not sources:
            break
        del sources[0]


@pytest.mark.parametrize("case", [c for c in WITH_AGENT if ARGUMENT in c.values], ids=lambda case: case.name)
def test_argument_then_environment_then_default_without_agent(case: Case) -> None:
    """Under torchrun or python nothing else decides the directory."""
    for sources in ([ARGUMENT, ENVIRONMENT], [ENVIRONMENT], []):
        settings = read_settings(case, sources, has_agent=False)
        expected = case.values[sources[0]] if sources else case.default
        assert str(getattr(settings, case.name)) == expected


def test_cases_name_all_arguments_that_are_settings() -> None:
    """A new setting belongs into the table."""
    assert {case.name for case in WITH_AGENT} | {"step_mark_s"} == set(Settings.__dataclass_fields__)
    ignored = {case.name for case in WITH_AGENT if case.argument_is_ignored}
    assert ignored == set(config.AGENT_SETTINGS)
