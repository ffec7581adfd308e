"""Runs a script or module in this process as `python -u` would in a new one, which ends the same way.

For a process that was forked in the middle of another program, which has imported modules and nothing else.
Does not know where the process comes from.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import io
import os
import pkgutil
import runpy
import signal
import sys
import types
from pathlib import Path

PR_SET_NAME = 15


def parse_python_command(command: list[str]) -> tuple[bool, list[str]]:
    """Split ``python -u [-m] NAME ARGS…``: whether it is a module, and the words from its name on.

    Raises:
        ValueError: it is something else.

    """
    if command[1:2] != ["-u"] or len(command) < 3:
        raise ValueError(f"not `python -u SCRIPT`: {command[:3]}")
    is_module = command[2] == "-m"
    words = command[3:] if is_module else command[2:]
    if not words:
        raise ValueError("neither script nor module")
    return is_module, words


def first_path_entry(is_module: bool, name: str) -> str:
    """What Python puts first on its search path."""
    if is_module:
        return os.getcwd()  # noqa: PTH109
    path = Path(os.path.realpath(name))
    return str(path) if path.is_dir() or _is_archive(path) else str(path.parent)


def _is_archive(path: Path) -> bool:
    import zipfile  # noqa: PLC0415 - almost never needed

    return path.suffix != ".py" and zipfile.is_zipfile(path)


_path_entries_set: list[str] = []  # what `enter` has put first on the search path


def set_argv_and_path(command: list[str]) -> None:
    """Set arguments and search path as ``command`` has them, in the place of an earlier command's."""
    is_module, words = parse_python_command(command)
    sys.argv = ["-m", *words[1:]] if is_module else list(words)
    sys.orig_argv = list(command)
    if getattr(sys.flags, "safe_path", False):
        return
    first = first_path_entry(is_module, words[0])
    # By its value: a module that was imported in between may have put others before it.
    at = (
        sys.path.index(_path_entries_set[0])
        if _path_entries_set and _path_entries_set[0] in sys.path
        else None
    )
    sys.path[slice(at or 0, 0 if at is None else at + 1)] = [first]
    _path_entries_set[:] = [first]


def run(command: list[str]) -> None:
    """Run it as ``__main__``. Returns, or raises SystemExit, for the interpreter to end as it always does."""
    is_module, words = parse_python_command(command)
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # how multiprocessing's children call it
        sys.modules["__mp_main__"] = main
    died: BaseException | None = None
    try:
        if is_module:
            # What `python -m` calls itself; runpy.run_module would take __main__ away before atexit runs.
            runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]  # noqa: SLF001
        elif os.path.realpath(words[0]) in _path_entries_set:  # a directory or an archive
            runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]  # noqa: SLF001
        else:
            _run_file(words[0], main)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        died = error
    if died is not None:  # outside of the except clause, or the error of a hook would have it for its context
        _exit_with_exception(died)


def _run_file(name: str, main: types.ModuleType) -> None:
    path = os.path.abspath(name)  # noqa: PTH100 - as Python: without following links
    main.__dict__.update(
        __file__=path, __cached__=None, __loader__=importlib.machinery.SourceFileLoader("__main__", path)
    )
    with io.open_code(path) as file:
        code = pkgutil.read_code(file) if name.endswith(".pyc") else None
        code = code or compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102 - that is what we are for


def _exit_with_exception(error: BaseException) -> None:
    """Say what an uncaught exception was, without our own frames, and end as the interpreter would."""
    trace = error.__traceback__
    here = __file__
    while trace is not None and trace.tb_frame.f_code.co_filename == here:
        trace = trace.tb_next
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except SystemExit:
        raise
    except BaseException as other:  # noqa: BLE001
        print("Error in sys.excepthook:", file=sys.stderr)
        _print_exception(other, other.__traceback__ and other.__traceback__.tb_next)
        print("\nOriginal exception was:", file=sys.stderr)
        _print_exception(error, trace)
    if isinstance(error, KeyboardInterrupt):
        # The interpreter ends by the signal once all else is done: so does this, as the last atexit call.
        import atexit  # noqa: PLC0415
        import threading  # noqa: PLC0415

        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        atexit._run_exitfuncs()  # noqa: SLF001
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(1) from None


def _print_exception(error: BaseException, trace: types.TracebackType | None) -> None:
    sys.__excepthook__(type(error), error.with_traceback(trace), trace)


def set_process_name(name: str) -> None:
    """Name this process for ``top`` and ``ps -o comm``; 15 bytes of ``text`` count."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
