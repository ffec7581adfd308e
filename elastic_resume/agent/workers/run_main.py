"""Run a script or module in this process as `python -u` would run it in a new one, and end the same way.

A process that was forked from the fork server calls this: it has imported modules, but has run no script
yet. The script must see the same ``__main__``, arguments and search path, and uncaught exceptions must print
the same traceback, exit code and signal as under plain Python.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.machinery
import io
import os
import pkgutil
import runpy
import signal
import sys
import threading
import types
import weakref
from pathlib import Path
from typing import NoReturn

PR_SET_NAME = 15


def parse_python_command(command: list[str]) -> tuple[bool, list[str]]:
    """Split ``python -u [-m] NAME ARGS...``; return whether NAME is a module, and the words from NAME on.

    Raises:
        ValueError: it is another command.

    """
    if command[1:2] != ["-u"] or len(command) < 3:
        raise ValueError(f"this is not `python -u SCRIPT`: {command[:3]}")
    is_module = command[2] == "-m"
    words = command[3:] if is_module else command[2:]
    if not words:
        raise ValueError("the command names neither script nor module")
    return is_module, words


def first_path_entry(is_module: bool, name: str) -> str:
    """Return what Python puts first on its search path."""
    if is_module:
        return os.getcwd()  # noqa: PTH109
    path = Path(os.path.realpath(name))
    return str(path) if path.is_dir() or _is_archive(path) else str(path.parent)


def _is_archive(path: Path) -> bool:
    import zipfile  # noqa: PLC0415 - rarely needed

    return path.suffix != ".py" and zipfile.is_zipfile(path)


_path_entries_set: list[str] = []  # the entry that `set_argv_and_path` has put first on the search path


def adopt_path_entry() -> None:
    """Let `set_argv_and_path` replace what Python itself put first on this process's search path."""
    if not _path_entries_set and not getattr(sys.flags, "safe_path", False):
        _path_entries_set.append(sys.path[0])


def set_argv_and_path(command: list[str]) -> None:
    """Set arguments and search path for ``command``, in place of those of an earlier command."""
    is_module, words = parse_python_command(command)
    sys.argv = ["-m", *words[1:]] if is_module else list(words)
    sys.orig_argv = list(command)
    if getattr(sys.flags, "safe_path", False):
        return
    first = first_path_entry(is_module, words[0])
    # Searched by value, since an imported module may have put other entries before it.
    index = next((index for index, entry in enumerate(sys.path) if entry in _path_entries_set), None)
    if index is None:
        sys.path.insert(0, first)
    else:
        sys.path[index] = first
    _path_entries_set[:] = [first]


def run(command: list[str]) -> None:
    """Run the command as ``__main__``. Return or raise SystemExit, so that the interpreter exits normally."""
    is_module, words = parse_python_command(command)
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # its name in children of multiprocessing
        sys.modules["__mp_main__"] = main
    uncaught: BaseException | None = None
    try:
        if is_module:
            # `python -m` calls this too; runpy.run_module would remove __main__ before atexit runs.
            runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]  # noqa: SLF001
        elif os.path.realpath(words[0]) in _path_entries_set:  # a directory or an archive
            runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]  # noqa: SLF001
        else:
            _run_file(words[0], main)
    except SystemExit as end:
        if end.code:  # functions of atexit ask whether an error has ended the script
            sys.last_value = end
        raise
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        uncaught = error
    if uncaught is not None:  # outside the except clause: an error in a hook must not get it as its context
        _exit_with_exception(uncaught)


def _run_file(name: str, main: types.ModuleType) -> None:
    path = os.path.abspath(name)  # noqa: PTH100 - like Python, follows no links
    main.__dict__.update(
        __file__=path, __cached__=None, __loader__=importlib.machinery.SourceFileLoader("__main__", path)
    )
    with io.open_code(path) as file:
        code = pkgutil.read_code(file) if name.endswith(".pyc") else None
        code = code or compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102 - the user's own script


def _exit_with_exception(error: BaseException) -> None:
    """Print an uncaught exception without our own frames, and exit as the interpreter would."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
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
        # The interpreter ends by this signal after threads and atexit functions.
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        atexit._run_exitfuncs()  # noqa: SLF001
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(1) from None


def _print_exception(error: BaseException, trace: types.TracebackType | None) -> None:
    sys.__excepthook__(type(error), error.with_traceback(trace), trace)


def exit_without_freeing(exit_code: int) -> NoReturn:
    """End this process as the interpreter would, but leave its memory to the kernel: torch's takes 0.2 s."""
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - as the interpreter does, in this order
    _leave_out_torch_finalizers()
    atexit._run_exitfuncs()  # noqa: SLF001
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed, or its reader is gone
            stream.flush()
    os._exit(exit_code & 0xFF)


def _leave_out_torch_finalizers() -> None:
    """Let the exit not remove torch's operators one by one: it takes 0.05 s, and the process ends anyway."""
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # noqa: SLF001
        found = each.peek()
        if found is not None and getattr(found[1], "__module__", "") == "torch.library":
            each.atexit = False


def set_process_name(name: str) -> None:
    """Set the name that ``top`` and ``ps -o comm`` show, at most 15 bytes."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
