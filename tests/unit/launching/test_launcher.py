"""The decisions of `launch`: flags, names, and what it returns or raises."""

from __future__ import annotations

import functools
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import elastic_resume as er
from elastic_resume.errors import ConfigError, LaunchError, MachineError, UsageError
from elastic_resume.launching import launcher
from elastic_resume.launching.call_memory import LaunchEnd, Result
from tests.support import launched


@pytest.mark.parametrize(
    ("settings", "words", "variables"),
    [
        ({"nproc_per_node": 2, "snapshot_every": "30s"}, ["--nproc-per-node=2", "--snapshot-every=30s"], {}),
        ({"quiet": True, "standalone": False, "keep": None}, ["--quiet"], {}),
        ({"rdzv_endpoint": ["a", "b:1"]}, ["--rdzv-endpoint=a,b:1"], {}),
        ({"rdzv_conf": {"join_timeout": 5, "x": "y"}}, ["--rdzv-conf=join_timeout=5,x=y"], {}),
        ({"ckpt_dir": Path("/a b")}, ["--ckpt-dir=/a b"], {}),
        ({"check_replicas": "off"}, [], {"ELASTIC_RESUME_CHECK_REPLICAS": "off"}),
        ({"no_warm": True, "exclude_after": None}, [], {"ELASTIC_RESUME_NO_WARM": "True"}),
    ],
)
def test_settings_become_flags_and_variables(
    settings: dict[str, Any], words: list[str], variables: dict[str, str]
) -> None:
    """Their names are those of the flags; the parser of `run` checks them."""
    assert launcher.list_words(settings) == (words, variables)


@pytest.mark.parametrize("name", ["module", "no_python", "run_path", "training_script"])
def test_setting_that_names_script_is_refused(name: str) -> None:
    """The script is the worker's module."""
    with pytest.raises(ConfigError, match=f"no setting {name}"):
        er.launch(print, (), **{name: True})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "tests.support.launched.train"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "night"}, "slurm-7-tests.support.launched.train"),
        (
            {
                "ELASTIC_RESUME_AGENT_PID": "1",
                "ELASTIC_RESUME_RUN_ID": "outer",
                "ELASTIC_RESUME_LOCAL_RANK": "3",
            },
            "outer-r3-tests.support.launched.train",
        ),
    ],
)
def test_run_id_names_function_after_the_job_around(environ: dict[str, str], expected: str) -> None:
    """Two functions, and two jobs of a scheduler, have different checkpoints."""
    partial = functools.partial(launched.train, launched.Limits(1))
    for function in (launched.train, partial):
        assert launcher.choose_run_id(function, environ) == [f"--rdzv-id={expected}"]


@pytest.mark.parametrize("variable", ["ELASTIC_RESUME_RUN_ID", "PET_RDZV_ID"])
def test_variable_names_the_job_as_for_run(variable: str) -> None:
    """A flag would beat it."""
    assert launcher.choose_run_id(launched.train, {variable: "mine"}) == []


def test_file_names_the_job_as_for_run(tmp_path: Path) -> None:
    """The file is an argument or a variable. Without the key in it, the function names the job."""
    file = tmp_path / "job.yaml"
    file.write_text("keep: 3\n")
    default = ["--rdzv-id=tests.support.launched.train"]
    assert launcher.choose_run_id(launched.train, {}, file) == default
    file.write_text("rdzv-id: mine\n")
    assert launcher.choose_run_id(launched.train, {}, file) == []
    assert launcher.choose_run_id(launched.train, {"ELASTIC_RESUME_CONFIG": str(file)}) == []


def test_name_of_notebook_is_found_or_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two notebooks may have a function of one name."""
    notebook: Any = types.ModuleType("__main__")
    exec("def train():\n    pass\n", notebook.__dict__)  # noqa: S102
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    with pytest.raises(ConfigError, match='rdzv_id="digits"'):
        launcher.choose_run_id(notebook.train, {})
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/My digits.ipynb")
    assert launcher.choose_run_id(notebook.train, {}) == ["--rdzv-id=My-digits.train"]
    notebook.__vsc_ipynb_file__ = "/home/me/other.ipynb"
    assert launcher.choose_run_id(notebook.train, {}) == ["--rdzv-id=other.train"]
    notebook.__file__ = "/home/me/start.py"
    assert launcher.choose_run_id(notebook.train, {}) == ["--rdzv-id=start.train"]


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (3, (), "takes a function, and this is a int"),
        (launched.train, 0.1, r"args is a float: write args=\(VALUE,\)"),
        (launched.train, "ab", "args is a str"),
        (launched.train, (1,), "missing a required argument: 'directory'"),
    ],
)
def test_call_that_no_worker_could_make_is_refused(function: Any, args: Any, message: str) -> None:
    """Before anything starts."""
    with pytest.raises(UsageError, match=message):
        er.launch(function, args, rdzv_id="x")


def test_call_while_script_is_imported_names_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each worker would start a job."""
    monkeypatch.setattr(launcher, "is_importing_script", True)
    with pytest.raises(UsageError, match="if __name__ =="):
        er.launch(launched.die)


def result(generation: int, rank: int, value: object) -> Result:
    """Return what a rank has stored."""
    return Result(generation, rank, pickle.dumps(value))


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([LaunchEnd(0)], {}),
        ([result(1, 1, "b"), result(1, 0, "a"), LaunchEnd(0)], {0: "a", 1: "b"}),
        # Another rank failed after this one had returned, and the next world is smaller.
        ([result(1, 0, "a"), result(1, 1, "b"), result(2, 0, "c"), LaunchEnd(0)], {0: "c"}),
    ],
)
def test_results_are_those_of_last_generation(
    records: list[Result | LaunchEnd], expected: dict[int, str]
) -> None:
    """By rank, in order."""
    read = launcher.read_results(records, 0)
    assert read == expected
    assert list(read) == sorted(read)


@pytest.mark.parametrize(
    ("records", "exit_code", "error", "message"),
    [
        ([LaunchEnd(2, "ConfigError", "--keep is 0.")], 2, ConfigError, "--keep is 0"),
        ([LaunchEnd(74, "MachineError", "no space.")], 74, MachineError, "no space"),
        ([LaunchEnd(1, "", "rank 1 failed.")], 1, LaunchError, "rank 1 failed"),
        ([], -9, LaunchError, "the agent of the job ended with exit code -9"),
        # A worker's result comes, and then the agent is killed.
        ([Result(1, 0, b"")], -9, LaunchError, "exit code -9"),
        (
            [Result(1, 2, b"", "a generator, which …"), LaunchEnd(0)],
            0,
            UsageError,
            "rank 2 has returned a gen",
        ),
        ([Result(1, 0, b"no pickle"), LaunchEnd(0)], 0, UsageError, "cannot be read here"),
    ],
)
def test_failed_job_raises(
    records: list[Result | LaunchEnd], exit_code: int, error: type[Exception], message: str
) -> None:
    """The class is the agent's own if it has not started."""
    with pytest.raises(error, match=message):
        launcher.read_results(records, exit_code)


def test_error_has_root_cause() -> None:
    """For a program that calls `launch`."""
    failure = {"node": "n1", "rank": 3, "type": "ValueError", "frame": "a.py:1 in f"}
    end = LaunchEnd(1, "", "node n1 gave up.", failure, "Traceback …\nValueError: x\n")
    with pytest.raises(LaunchError) as caught:
        launcher.read_results([end], 1)
    error = caught.value
    assert (error.node, error.rank, error.error_type, error.exit_code) == ("n1", 3, "ValueError", 1)
    assert str(error) == "node n1 gave up.\n\nTraceback …\nValueError: x"
