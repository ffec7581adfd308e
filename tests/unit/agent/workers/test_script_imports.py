"""Imports of a forked worker's script find what is there, unless the environment has changed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import signal
import site
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_resume.agent.workers import children, forkserver_manager, script_imports, worker_request
from elastic_resume.constants import ENV_EARLY_START, ENV_NEW_PROCESS, EXIT_NEEDS_GENERATION

KILL_ALL = children.kill_all


class StartedAgain(Exception):  # noqa: N818
    """The process would execute its command."""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """Import a package with a submodule as a fork server would, and hide it; return executed commands."""
    (tmp_path / "loaded").mkdir()
    (tmp_path / "loaded" / "__init__.py").write_text("number = 1")
    (tmp_path / "loaded" / "part.py").write_text("number = 2")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    import loaded.part  # type: ignore[import-not-found]  # noqa: PLC0415

    monkeypatch.setattr(script_imports, "LIKELY_FIRST", {"loaded.part"})
    loaded.number = loaded.part.number = 7  # a second import would lose these
    executed: list[list[str]] = []

    def execute(command: list[str]) -> None:
        executed.append(command)
        raise StartedAgain

    monkeypatch.setattr(worker_request, "execute", execute)
    monkeypatch.setattr(children, "kill_all", lambda *_, **__: None)  # this process may have others'
    script_imports.hide(["loaded"], ["python", "-u", "train.py"], set())
    assert not {"loaded", "loaded.part"} & sys.modules.keys()
    yield executed
    for name in ("loaded", "loaded.part"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "code",
    [
        "import loaded",
        "from loaded import part",
        "import loaded.part as part; import loaded",
        "from loaded.part import number; assert number == 7; import loaded",
        "import importlib; part = importlib.import_module('loaded.part'); import loaded",
    ],
)
def test_each_way_to_import_finds_what_is_there(package: list[list[str]], code: str) -> None:
    """Nothing runs a second time, and the finder is gone."""
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102
    loaded = sys.modules["loaded"]
    assert (loaded.number, loaded.part.number) == (7, 7)
    assert loaded.__spec__ is not None
    assert loaded.__spec__.origin is not None
    assert not any(isinstance(finder, script_imports._HiddenPackages) for finder in sys.meta_path)
    assert not package


def test_spec_of_a_hidden_package_names_its_files(package: list[list[str]], tmp_path: Path) -> None:
    """A script may look for a library there, before it imports the package."""
    spec = importlib.util.find_spec("loaded")
    assert spec is not None
    assert spec.origin == str(tmp_path / "loaded" / "__init__.py")
    assert list(spec.submodule_search_locations or []) == [str(tmp_path / "loaded")]
    assert "loaded" not in sys.modules
    assert not package


def test_changed_variable_starts_the_script_again(
    package: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the environment of its first start, and a note of what was changed."""
    monkeypatch.setenv("OMP_NUM_THREADS", "31")
    monkeypatch.setenv("UNRELATED", "1")
    with pytest.raises(StartedAgain):
        import loaded  # noqa: F401, PLC0415
    assert package == [["python", "-u", "train.py"]]
    assert os.environ.pop(ENV_NEW_PROCESS).split()[1:] == ["OMP_NUM_THREADS"]
    assert "UNRELATED" not in os.environ


@pytest.mark.usefixtures("package")
def test_script_starts_again_in_the_directory_of_its_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else its own relative path leads nowhere."""
    directory = Path.cwd()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "31")
    with pytest.raises(StartedAgain):
        import loaded  # noqa: F401, PLC0415
    assert Path.cwd() == directory
    os.environ.pop(ENV_NEW_PROCESS)


@pytest.mark.usefixtures("package")
def test_script_is_not_told_of_its_killed_children() -> None:
    """A DataLoader's handler raises RuntimeError when its worker is killed."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            importlib.import_module("loaded.part")
            script_imports.hide(["loaded"], ["train.py"], set())
            children.kill_all = KILL_ALL
            worker_request.execute = lambda _: os._exit(7)  # type: ignore[assignment]
            os.environ["OMP_NUM_THREADS"] = "31"
            signal.signal(signal.SIGCHLD, lambda *_: os._exit(1))
            if os.fork() == 0:
                time.sleep(600)
            importlib.import_module("loaded")
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_forked_child_is_no_worker(package: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader or a pool that the script forks imports what is there; it would train as a second rank."""
    monkeypatch.setenv("OMP_NUM_THREADS", "31")
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            import loaded  # noqa: PLC0415

            os._exit(0 if loaded.number == 7 and not package else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_standby_ends(
    package: list[list[str]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A new process would not see that its script reads RANK."""

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setenv(ENV_EARLY_START, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "31")
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(SystemExit) as ended:
        import loaded  # noqa: F401, PLC0415
    assert ended.value.code == EXIT_NEEDS_GENERATION
    assert "the script sets OMP_NUM_THREADS, which torch reads at its import" in capfd.readouterr().err
    assert not package


@pytest.mark.parametrize(
    ("name", "begins_again"), [("TORCH_COMPILE_DISABLE", True), ("OMP_NUM_THREADS", False)]
)
@pytest.mark.parametrize("has_group", [False, True])
def test_variable_of_the_compiler_set_after_the_import_starts_the_script_again_at_resume(
    name: str,
    begins_again: bool,
    has_group: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A new process imports torch._dynamo after it, and reads no other variable then."""
    executed: list[list[str]] = []
    monkeypatch.setattr(worker_request, "execute", executed.append)
    monkeypatch.setattr(children, "kill_all", lambda *_, **__: None)  # this process may have others'
    former = signal.getsignal(signal.SIGCHLD)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setitem(sys.modules, "torch._dynamo", torch)
    for known in script_imports.LIKELY_FIRST & sys.modules.keys():
        monkeypatch.setitem(sys.modules, known, sys.modules[known])  # to be put back
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: has_group)
    before_resume = script_imports.hide(["torch"], ["python", "train.py"], set())
    import torch as again  # noqa: PLC0415

    assert again is torch
    monkeypatch.setenv(ENV_NEW_PROCESS, "")  # to be put back
    before_resume()
    monkeypatch.setenv(name, "1")
    before_resume()
    signal.signal(signal.SIGCHLD, former)
    assert executed == ([["python", "train.py"]] if begins_again and not has_group else [])
    is_named = "sets TORCH_COMPILE_DISABLE after it imports torch" in capfd.readouterr().err
    assert is_named == (begins_again and has_group)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({b"TORCH_LOGS": b"+dynamo"}, ["TORCH_LOGS"]),
        ({b"OMP_NUM_THREADS": None}, ["OMP_NUM_THREADS"]),
        (
            {b"TORCHINDUCTOR_CACHE_DIR": b"/x", b"MKL_NUM_THREADS": b"1"},
            ["MKL_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR"],
        ),
        ({b"LOADED_MODE": b"1"}, ["LOADED_MODE"]),
        ({b"HF_HOME": b"/x", b"HF_HUB_OFFLINE": b"1", b"HF_TOKEN": b"x"}, ["HF_HOME", "HF_HUB_OFFLINE"]),
        ({b"CUDA_VISIBLE_DEVICES": b"1", b"NCCL_DEBUG": b"INFO", b"TORCH_NCCL_BLOCKING_WAIT": b"1"}, []),
        ({b"PYTORCH_NVML_BASED_CUDA_CHECK": b"1", b"TORCH_HOME": b"/x"}, []),  # Lightning; read when used
        ({b"PYTHONHASHSEED": b"0", b"TOKENIZERS_PARALLELISM": b"false", b"RANK": b"3"}, []),
        ({}, []),
    ],
)
def test_changed_variables_are_those_that_an_import_reads(
    changes: dict[bytes, bytes | None], names: list[str]
) -> None:
    """A package named by --preload reads those that begin with its name, and imports others."""
    before = {b"OMP_NUM_THREADS": b"1", b"HOME": b"/root"}
    now = {name: value for name, value in (before | changes).items() if value is not None}
    assert script_imports.list_changed(before, now, ["torch", "loaded"]) == names


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("sitecustomize.py", 'import os\nrank = os.environ.get("RANK", "0")\n', True),
        ("sitecustomize.py", "import os\nos.environ['LOCAL_RANK']\n", True),
        ("sitecustomize.py", "FRANK = 1\n", False),
        ("own.pth", "import os; os.environ.get('RANK')\n", True),
        ("own.pth", "# 'RANK'\n/some/path\n", False),
    ],
)
def test_start_hook_that_reads_a_rank_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, found: bool
) -> None:
    """Python runs these files at its start, when a fork server has no rank."""
    (tmp_path / name).write_text(text)
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(tmp_path / "none"))
    if name.endswith(".py"):
        module = type(sys)("sitecustomize")
        module.__file__ = str(tmp_path / name)
        monkeypatch.setitem(sys.modules, "sitecustomize", module)
    assert forkserver_manager.find_start_hook() == (str(tmp_path / name) if found else None)
