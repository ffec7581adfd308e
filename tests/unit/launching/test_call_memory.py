"""What crosses the processes of a launched job, without starting one."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import linux
from elastic_resume.errors import UsageError
from elastic_resume.launching import call_memory
from elastic_resume.launching.call_memory import Call, LaunchEnd, Result
from tests.support.launched import Limits


@pytest.fixture
def memory() -> Iterator[int]:
    """Return an unnamed file, as the caller makes it."""
    descriptor = linux.create_anonymous_file("elastic_resume-test")
    yield descriptor
    os.close(descriptor)


def path_of(descriptor: int) -> Path:
    """Return the name by which other processes open it."""
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


def decode(encoded: bytes) -> tuple[Call, Any]:
    """Return a call, and its function and arguments."""
    call = pickle.loads(encoded)  # noqa: S301
    assert isinstance(call, Call)
    return call, pickle.loads(call.pickled)  # noqa: S301


def test_function_of_module_goes_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from a notebook; and the script is not imported for it."""
    for main in (sys.modules["__main__"], types.ModuleType("__main__")):
        monkeypatch.setitem(sys.modules, "__main__", main)
        call, (function, args) = decode(call_memory.encode_call(os.path.join, ["a", "b"]))
        assert (function, args) == (os.path.join, ("a", "b"))
        assert not call.is_by_value
        assert call.main == {}
        assert b"posixpath" in call.pickled


def test_function_of_notebook_goes_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the globals that it uses, as they are at the call, and its cell's name for tracebacks."""
    notebook = types.ModuleType("__main__")
    code = compile("factor = 2\ndef double(x):\n    return factor * x\n", "cell.py", "exec")
    exec(code, notebook.__dict__)  # noqa: S102
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    encoded = call_memory.encode_call(notebook.double, (4,))
    notebook.factor = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    call, (function, args) = decode(encoded)
    assert call.is_by_value
    assert call.argv is None
    assert function(*args) == 8
    assert function.__code__.co_filename == "cell.py"


def test_function_of_script_goes_by_name_and_names_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Workers import the script again; a module that was started by -m by its name."""
    script: Any = types.ModuleType("__main__")
    script.__file__ = str(tmp_path / "train.py")
    (tmp_path / "train.py").touch()
    exec("def train():\n    pass\n", script.__dict__)  # noqa: S102
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert decode(call_memory.encode_call(script.train, ()))[0].main == {
        "init_main_from_path": str(tmp_path / "train.py")
    }
    script.__spec__ = types.SimpleNamespace(name="package.train")
    assert decode(call_memory.encode_call(script.train, ()))[0].main == {
        "init_main_from_name": "package.train"
    }


@pytest.mark.parametrize("argument", [threading.Lock(), (i for i in range(3))])
def test_argument_that_cannot_be_sent_is_named(argument: object) -> None:
    """By its type, as pickle names it."""
    with pytest.raises(UsageError, match=f"cannot pickle '.*{type(argument).__name__}' object"):
        call_memory.encode_call(print, [argument])


def test_missing_cloudpickle_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function in a function has no name by which it can be imported."""
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UsageError, match=r"pip install '\.\[notebook\]' in the clone"):
        call_memory.encode_call(lambda: None, ())


def test_result_has_rank_and_generation_or_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that cannot be sent is no error of the job, which is done."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("ELASTIC_RESUME_GENERATION", "2")
    assert call_memory.encode_result([1], by_value=False) == Result(2, 3, pickle.dumps([1]))
    problem = call_memory.encode_result((i for i in "a"), by_value=False).problem
    assert problem.startswith("a generator, which cannot be sent")
    monkeypatch.setattr(call_memory, "MAX_RESULT_BYTES", 1000)
    assert "is the most" in call_memory.encode_result(bytes(2000), by_value=True).problem


def test_records_of_many_writers_are_whole_and_torn_one_is_written_over(memory: int) -> None:
    """A writer that was killed has not updated the length."""
    threads = [
        threading.Thread(
            target=call_memory.append, args=(path_of(memory), Result(1, rank, bytes(rank * 10_000)))
        )
        for rank in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end = os.fstat(memory).st_size
    os.pwrite(memory, b"torn" * 100, end)
    call_memory.append(path_of(memory), LaunchEnd(0))
    *results, last = call_memory.read_records(memory)
    assert sorted(r.rank for r in results if isinstance(r, Result)) == list(range(8))
    assert all(isinstance(r, Result) and len(r.pickled) == r.rank * 10_000 for r in results)
    assert last == LaunchEnd(0)


def test_agent_that_was_killed_early_leaves_no_record(memory: int) -> None:
    """It may end before anybody has written."""
    assert call_memory.read_records(memory) == []


def test_partial_and_class_of_module_go_by_name() -> None:
    """What a caller passes in place of keyword arguments."""
    function = functools.partial(os.path.join, "a")
    call, (decoded, args) = decode(call_memory.encode_call(function, (Limits(3),)))
    assert not call.is_by_value
    assert decoded("b") == "a/b"
    assert args[0].steps == 3
