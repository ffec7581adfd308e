"""Start a job for a function, from a script or a notebook, and return what its ranks return.

The caller's process keeps its threads, signal handlers and environment: the agent is a child, in a session of
its own, and prints through the caller's streams::

    caller (launch) --> agent_process (elastic-resume run) --> … --> function_worker (the function)

An interrupt of the caller is passed on, as a terminal does. When the caller dies, the kernel sends the agent
SIGTERM, and the workers save their last step.
"""

from __future__ import annotations

import codecs
import contextlib
import inspect
import os
import pickle
import selectors
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TextIO, TypeVar

from elastic_resume import config, config_file, constants, errors, linux
from elastic_resume.errors import ConfigError, LaunchError, UsageError
from elastic_resume.launching import call_memory
from elastic_resume.launching.call_memory import LaunchEnd, Result
from elastic_resume.schedulers import environment

T = TypeVar("T")

AGENT_MODULE = "elastic_resume.launching.agent_process"
WORKER_MODULE = "elastic_resume.launching.function_worker"
POLL_INTERVAL_S = 0.1  # for the end of an agent whose output another process keeps open
# Flags that say what the script is.
_SCRIPT_FLAGS = frozenset({"module", "no_python", "run_path", "training_script"})
_CALL = (
    "import importlib, json, sys; sys.path.insert(0, sys.argv[1]); "
    "getattr(importlib.import_module(sys.argv[2]), sys.argv[3])(json.load(sys.stdin))"
)
is_importing_script = False  # in a worker: a call of `launch` meanwhile has no guard


def launch(function: Callable[..., T], args: Sequence[Any] = (), **settings: Any) -> dict[int, T]:
    """Run ``function(*args)`` as the workers of an elastic_resume job, and wait for its end.

    ::

        results = er.launch(train, args=(0.1,), nproc_per_node=2, rdzv_id="digits")

    It is ``elastic-resume run`` for a function: the workers are new processes with ranks, and one that fails
    starts again with the same function and arguments. The same call on each machine makes a job of several
    nodes. The same call again continues the job, as the same command does: ``resume="never"`` starts over.
    Workers import a script again, so a script calls `launch` under ``if __name__ == "__main__":``. What is
    defined in a notebook needs ``pip install '.[notebook]'``. An interrupt (Ctrl-C, or a
    notebook's stop button) ends the job after its last step was saved.

    Args:
        function: what each worker calls. It trains as a script does, with `epochs` or `resume`.
        args: its arguments. They and the function are those of the call, whatever changes later.
        settings: flags of ``elastic-resume run`` without dashes (``nproc_per_node=2``, ``nnodes="2:3"``,
            ``snapshot_every="30s"``), and the settings without a flag. A list stands for a value with commas,
            True for a flag without a value, a function for a command (``on_event=notify``). ``rdzv_id`` names
            the job and its checkpoints; by default it is the script's or module's name and the function's.

    Returns:
        What the ranks of this node have returned, by rank; empty on a node that was not needed at the end.
        A result has at most 256 MiB.

    Raises:
        ConfigError: a setting is unknown or out of range.
        UsageError: the function, an argument or a result cannot be sent to another process.
        MachineError: the agent cannot start here.
        LaunchError: the job ended without success; it has the root cause and its traceback.
        KeyboardInterrupt: it was interrupted.

    """
    if is_importing_script:
        raise UsageError(
            "launch() was called while a worker imports the script: put the call under if __name__ == "
            '"__main__":, since each worker imports the script for its functions.'
        )
    _check_arguments(function, args)
    words, variables = list_words(settings)
    if not settings.get("rdzv_id"):
        words += choose_run_id(function, os.environ, settings.get("config"))
    call = call_memory.encode_call(function, args)
    with contextlib.ExitStack() as stack:
        memory = [linux.create_anonymous_file(f"elastic_resume-{name}") for name in ("call", "results")]
        for descriptor in memory:
            stack.callback(os.close, descriptor)
        Path(f"/proc/self/fd/{memory[0]}").write_bytes(call)
        command = [sys.executable, "-u", "-m", AGENT_MODULE, str(os.getpid()), *words]
        command += ["-m", WORKER_MODULE, describe_function(function), *map(_describe_argument, args)]
        environ = {**os.environ, **variables}
        config.forget_outer_agent(environ)  # of a worker that calls this
        environ[constants.ENV_LAUNCH] = ",".join(map(str, memory))
        exit_code = run_agent(command, environ, memory)
        return read_results(call_memory.read_records(memory[1]), exit_code)


def _check_arguments(function: Any, args: Any) -> None:
    """Raise UsageError for what would fail in each worker."""
    if not callable(function):
        raise UsageError(
            f"launch() takes a function, and this is a {type(function).__qualname__}: pass it uncalled."
        )
    if not isinstance(args, (tuple, list)):
        raise UsageError(
            f"launch(): args is a {type(args).__qualname__}: write args=(VALUE,), with the comma."
        )
    with contextlib.suppress(ValueError):  # it has no signature
        signature = inspect.signature(function)
        try:
            signature.bind(*args)
        except TypeError as error:
            raise UsageError(f"launch() cannot call the function with these args: {error}.") from None


# ---- settings ------------------------------------------------------------------------------------------


def list_words(settings: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Return settings as flags of ``run``, and as variables those that have no flag. Its parser checks them.

    Raises:
        ConfigError: it is a flag that names the script.

    """
    without_flag = {option.field: option.variable for option in config.OPTIONS_WITHOUT_FLAG}
    words: list[str] = []
    variables: dict[str, str] = {}
    for name, value in settings.items():
        if name in _SCRIPT_FLAGS:
            raise ConfigError(
                f"launch() runs a function, so it has no setting {name}: use elastic-resume run."
            )
        if callable(value):
            value = make_command(name, value)  # noqa: PLW2901
        elif isinstance(value, Mapping):
            value = ",".join(f"{key}={each}" for key, each in value.items())  # noqa: PLW2901
        elif isinstance(value, (list, tuple)):
            value = ",".join(map(str, value))  # noqa: PLW2901
        if name in without_flag:
            variables |= {} if value is None else {without_flag[name]: str(value)}
        elif value is True:
            words.append(f"--{name.replace('_', '-')}")
        elif value is not None and value is not False:
            words.append(f"--{name.replace('_', '-')}={value}")
    return words, variables


def make_command(setting: str, function: Any) -> str:
    """Return a command that calls a function with the JSON value on its standard input.

    It imports the function's module, or the script, as workers do.

    Raises:
        ConfigError: a new process cannot import the function.

    """
    module = sys.modules.get(getattr(function, "__module__", ""))
    file, name = getattr(module, "__file__", None), getattr(function, "__qualname__", "?")
    if module is None or file is None or not hasattr(module, name):
        raise ConfigError(
            f"{setting} is a function that a new process cannot import: define it at the top of a script or "
            "module, or write a command."
        )
    path = Path(file).absolute()
    spec = getattr(module, "__spec__", None)
    module_name = spec.name if spec is not None else path.stem
    depth = module_name.count(".") + (path.name == "__init__.py")
    return shlex.join([sys.executable, "-c", _CALL, str(path.parents[depth]), module_name, name])


def describe_function(function: Any) -> str:
    """Return the name of a function and of its module, script or notebook; ``?`` for an unknown notebook."""
    inner = getattr(function, "func", function)  # of functools.partial
    module = getattr(inner, "__module__", None) or "__main__"
    if module == "__main__":
        main = sys.modules["__main__"]
        # VS Code's notebooks, and Jupyter's.
        names = (getattr(main, "__vsc_ipynb_file__", None), os.environ.get("JPY_SESSION_NAME"))
        name = getattr(main, "__file__", None) or next(filter(None, names), None)
        module = Path(name).stem if name else "?"
    return f"{module}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"


def choose_run_id(function: Any, environ: Mapping[str, str], file: Any = None) -> list[str]:
    """Return the flag with the job's default name, which differs between functions.

    Return nothing if a variable or the ``file`` of settings names the job: a flag would beat it.

    Raises:
        ConfigError: a notebook's name is unknown, and others may have a function of this name.

    """
    around = dict(environ)
    config.forget_outer_agent(around)
    if around.get(constants.ENV_RUN_ID) or around.get("PET_RDZV_ID"):
        return []
    path = file or around.get(constants.ENV_CONFIG)
    if path and "rdzv-id" in config_file.read_file(str(path), around).settings:
        return []
    name = describe_function(function)
    if name.startswith("?"):
        raise ConfigError(
            "launch() cannot find the name of this notebook, so it cannot tell its checkpoints from those of "
            'others: give the job a name, as rdzv_id="digits". The same name continues the job.'
        )
    prefix = around.get(constants.ENV_OUTER_JOB) or environment.read_context(around).job
    run_id = environment.sanitize_name("-".join(filter(None, [prefix, name])), "job")
    return [f"--rdzv-id={run_id}"]


def _describe_argument(value: object) -> str:
    """Return a word that tells calls apart in logs. Texts may be secrets or long."""
    is_plain = value is None or isinstance(value, (bool, int, float))
    return repr(value) if is_plain else type(value).__qualname__


# ---- the agent -----------------------------------------------------------------------------------------


def run_agent(command: Sequence[str], environ: Mapping[str, str], descriptors: Sequence[int]) -> int:
    """Run the agent to its end, forward its output and interrupts, and return its exit code.

    Raises:
        KeyboardInterrupt: it was interrupted.

    """
    pipes = [subprocess.PIPE if _needs_forwarding(name) else None for name in ("stdout", "stderr")]
    process = subprocess.Popen(
        command,
        env=environ,
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=pipes[0],
        stderr=pipes[1],
        start_new_session=True,  # an interrupt of this process group reaches it through us, and once
    )
    is_interrupted = False
    with process:  # waits for its end
        try:
            output = _Output([(process.stdout, sys.stdout), (process.stderr, sys.stderr)])
            while True:
                try:
                    output.forward(process)
                    break
                except KeyboardInterrupt:
                    is_interrupted = True
                    process.send_signal(signal.SIGINT)  # the agent takes a second one as "do not wait"
        finally:
            process.terminate()  # it has ended already, unless the caller's own stream has failed
    if is_interrupted:
        raise KeyboardInterrupt
    return process.returncode


def _needs_forwarding(name: str) -> bool:
    """Return whether the caller's stream is no descriptor, as a notebook's; else the agent inherits it."""
    stream = getattr(sys, name)
    if stream is not None:
        stream.flush()  # what is buffered comes first
    return bool(stream is not getattr(sys, f"__{name}__"))


class _Output:
    """The pipes from an agent, and the caller's streams to which they lead; a progress bar has no line."""

    def __init__(self, streams: Sequence[tuple[IO[bytes] | None, TextIO]]) -> None:
        self._selector = selectors.DefaultSelector()
        for pipe, stream in streams:
            if pipe is not None:
                decoder = codecs.getincrementaldecoder("utf-8")("replace")
                self._selector.register(pipe, selectors.EVENT_READ, (stream, decoder))

    def forward(self, process: subprocess.Popen[bytes]) -> None:
        """Forward until the agent has ended and all that it had written is read."""
        while self._selector.get_map():
            has_ended = process.poll() is not None  # what it has written can be read from now on
            ready = self._selector.select(0 if has_ended else POLL_INTERVAL_S)
            for key, _ in ready:
                stream, decoder = key.data
                data = os.read(key.fd, 1 << 16)
                stream.write(decoder.decode(data, final=not data))
                stream.flush()
                if not data:
                    self._selector.unregister(key.fileobj)
            if has_ended and not ready:
                break  # a process that a worker has left keeps the pipe open
        self._selector.close()
        process.wait()


def read_results(records: Sequence[Result | LaunchEnd], exit_code: int) -> dict[int, Any]:
    """Return the results of the last generation by rank.

    Raises:
        UsageError: a result could not be sent, or not be read.
        ElasticResumeError: the job has not started, or has failed.

    """
    end = LaunchEnd(exit_code, message=f"the agent of the job ended with exit code {exit_code}.")
    end = next((record for record in reversed(records) if isinstance(record, LaunchEnd)), end)
    if end.error_class:
        raise getattr(errors, end.error_class)(end.message)
    if end.exit_code or exit_code:
        raise _build_error(end)
    returned = [record for record in records if isinstance(record, Result)]
    generation = max((result.generation for result in returned), default=0)
    sys.modules.setdefault("__mp_main__", sys.modules["__main__"])  # as workers have imported a script
    values = {}
    for result in sorted(returned, key=lambda result: result.rank):
        if result.generation < generation:
            continue  # this rank's worker has started again, or there are fewer now
        if result.problem:
            raise UsageError(
                f"the job is done, but rank {result.rank} has returned {result.problem}. Return plain "
                "values, or write a file."
            )
        try:
            values[result.rank] = pickle.loads(result.pickled)  # noqa: S301 - see call_memory
        except Exception as error:
            raise UsageError(
                f"the job is done, but the result of rank {result.rank} cannot be read here: {error}. Return "
                "plain values."
            ) from error
    return values


def _build_error(end: LaunchEnd) -> LaunchError:
    error = LaunchError("\n\n".join(filter(None, [end.message, end.traceback.rstrip()])))
    error.exit_code, error.traceback = end.exit_code, end.traceback
    error.node, error.rank = str(end.failure.get("node", "")), end.failure.get("rank")
    error.error_type = str(end.failure.get("type", ""))
    return error
