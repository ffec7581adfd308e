"""Carry the function of `launch` to the workers, and their results back.

Both go through unnamed files in memory, which the caller makes and its agent inherits::

    caller --call-->  agent (holds both descriptors)  <--opens /proc/AGENT/fd/N--  worker
    caller <--results (records, appended under a lock)-----------------------------'

So a worker that starts again gets the function and the arguments of the call, whatever the caller has changed
since. Both hold pickles. They are read by processes of one user, of one tree, and nothing of them is ever on
a disk or a network.

A function goes by its name where a worker can import it, as in multiprocessing: a script is imported again as
``__mp_main__``. What only the caller's memory has (a notebook's functions and classes, a lambda) goes by
value, through cloudpickle. A fork of the caller would not do: a notebook that has used torch or CUDA has
threads, without which torch hangs in the fork.
"""

from __future__ import annotations

import fcntl
import io
import linecache
import os
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_resume import constants
from elastic_resume.errors import UsageError
from elastic_resume.units import format_bytes

MAX_RESULT_BYTES = 1 << 28
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Call:
    """What a worker needs to call the function. Each member can be pickled."""

    pickled: bytes
    """The function and its arguments."""
    is_by_value: bool
    """Whether cloudpickle has pickled them."""
    path: list[str]
    """The caller's `sys.path`."""
    argv: list[str] | None
    """The caller's `sys.argv`; None in a notebook, whose own is the kernel's."""
    main: dict[str, str]
    """How to import the caller's script, for `multiprocessing.spawn.prepare`; empty if that is not needed."""
    sources: dict[str, Any]
    """The text of notebook cells, for tracebacks and `inspect.getsource`: members of `linecache.cache`."""


@dataclass(frozen=True)
class Result:
    """What a rank has returned in a generation."""

    generation: int
    rank: int
    pickled: bytes
    problem: str = ""
    """Why it cannot be sent."""


@dataclass(frozen=True)
class LaunchEnd:
    """How the agent has ended, for an exception in the caller."""

    exit_code: int
    error_class: str = ""
    """The class of the error that kept it from starting."""
    message: str = ""
    failure: dict[str, Any] = field(default_factory=dict)
    """The root cause, with the fields of `policy.failure_classification.Failure`; empty if there is none."""
    traceback: str = ""


def encode_call(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Return a `Call` of the function as bytes.

    Raises:
        UsageError: the function or an argument cannot be sent to another process.

    """
    main = _describe_main()
    pickled, is_by_value = _pickle_call(function, tuple(args), is_interactive=not main)
    return pickle.dumps(
        Call(
            pickled,
            is_by_value,
            [entry or os.getcwd() for entry in sys.path],  # noqa: PTH109 - as multiprocessing does
            sys.argv if main else None,
            # Without a name of the script, it need not be imported: it may have no guard around the call.
            main if b"__main__" in pickled else {},
            {name: entry for name, entry in linecache.cache.items() if len(entry) > 1 and entry[1] is None},
        )
    )


def _describe_main() -> dict[str, str]:
    """Return how a worker imports the caller's script; empty if there is none, as in a notebook."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        return {"init_main_from_name": name}
    path = Path(getattr(main, "__file__", None) or "-")
    return {"init_main_from_path": str(path.absolute())} if path.is_file() else {}


def _pickle_call(function: Any, args: tuple[Any, ...], *, is_interactive: bool) -> tuple[bytes, bool]:
    """Pickle by name where workers can import it, else by value; return whether it is by value."""
    try:
        pickled = pickle.dumps((function, args))
        if not is_interactive or b"__main__" not in pickled:
            return pickled, False
        reason = "a notebook's own functions and classes have no file that a worker could import"
    except Exception as error:  # noqa: BLE001 - objects raise what they like
        reason = str(error)
    try:
        return dump_by_value((function, args)), True
    except ImportError:
        raise UsageError(
            f"launch() cannot send the function and its arguments to the workers: {reason}. Run "
            f"{constants.EXTRA_INSTALL.format('notebook')} (cloudpickle), or move the function to the "
            "top of a module and import it from there."
        ) from None
    except Exception as error:
        raise UsageError(
            f"launch() cannot send the function and its arguments to the workers: {error}. Make such objects "
            "(loaders, groups, files, locks) in the function, and pass what they are made of."
        ) from error


def dump_by_value(value: object) -> bytes:
    """Pickle functions and classes that have no module. Their code keeps its file's name, for tracebacks.

    Raises:
        ImportError: cloudpickle is not installed.

    """
    import cloudpickle  # noqa: PLC0415 - an extra

    table = cloudpickle.Pickler.dispatch_table

    def reduce_code(code: types.CodeType) -> tuple[Any, ...]:
        return _make_code, (*table[types.CodeType](code), code.co_filename)

    buffer = io.BytesIO()
    members = {"dispatch_table": ChainMap({types.CodeType: reduce_code}, table)}
    type("Pickler", (cloudpickle.Pickler,), members)(buffer).dump(value)
    return buffer.getvalue()


def _make_code(make: Callable[..., types.CodeType], args: tuple[Any, ...], filename: str) -> types.CodeType:
    return make(*args).replace(co_filename=filename)


def read_call(path: Path) -> Call:
    """Return the call that `encode_call` has written."""
    call = pickle.loads(path.read_bytes())  # noqa: S301 - see the module's docstring
    assert isinstance(call, Call)  # noqa: S101
    return call


def encode_result(value: object, *, by_value: bool) -> Result:
    """Return a function's result for its caller, with the rank and generation of this worker."""
    generation, rank = (int(os.environ.get(name) or 0) for name in (constants.ENV_GENERATION, "RANK"))
    try:
        pickled = dump_by_value(value) if by_value else pickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - objects raise what they like
        return Result(generation, rank, b"", f"a {type(value).__qualname__}, which cannot be sent ({error})")
    if len(pickled) > MAX_RESULT_BYTES:
        size, limit = format_bytes(len(pickled)), format_bytes(MAX_RESULT_BYTES)
        return Result(
            generation, rank, b"", f"a {type(value).__qualname__} of {size}, and {limit} is the most"
        )
    return Result(generation, rank, pickled)


def append(path: Path, record: Result | LaunchEnd) -> None:
    """Append a record. The file begins with the length of all whole ones, so a torn one is written over."""
    data = pickle.dumps(record)
    with path.open("r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")
        view = memoryview(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
        while view:
            written = os.pwrite(file.fileno(), view, end)
            view, end = view[written:], end + written
        os.pwrite(file.fileno(), (end - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little"), 0)


def read_records(descriptor: int) -> list[Result | LaunchEnd]:
    """Return all whole records of the file."""
    found: list[Result | LaunchEnd] = []
    with open(f"/proc/self/fd/{descriptor}", "rb") as file:  # its own offset
        header = file.read(_LENGTH_BYTES)  # empty before the first record
        end = len(header) + int.from_bytes(header, "little")
        while file.tell() < end:
            found.append(pickle.loads(file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little"))))  # noqa: S301
    return found
