"""Run the function of `launch` in a worker, and store what it returns.

The agent of `launching.agent_process` starts ``python -u -m elastic_resume.launching.function_worker``, by a
fork of its fork server where it can.
"""

from __future__ import annotations

import linecache
import os
import pickle
import sys
import types
from multiprocessing import spawn
from pathlib import Path

from elastic_resume import constants
from elastic_resume.launching import call_memory, launcher


def run_function() -> None:
    """Call the function as in the process that has called `launch`, and store the result."""
    call_path, results_path = find_memory(int(os.environ[constants.ENV_AGENT_PID]))
    call = call_memory.read_call(call_path)
    linecache.cache.update(call.sources)
    # The words after the module name the function and its plain arguments, for logs and messages.
    argv = sys.argv[1:] if call.argv is None else call.argv
    launcher.is_importing_script = True
    spawn.prepare({"sys_path": call.path, "sys_argv": argv, **call.main})
    launcher.is_importing_script = False
    if call.is_by_value and not call.main:
        sys.modules["__main__"] = types.ModuleType("__main__")  # as empty of files as the notebook's
    try:
        function, args = pickle.loads(call.pickled)  # noqa: S301 - see call_memory
    except (AttributeError, ImportError) as error:
        sys.stderr.write(
            f"elastic_resume: a worker does not find what launch() was called with: {error}. Define it at "
            'the top level of its module, above if __name__ == "__main__":.\n'
        )
        sys.exit(2)  # The launcher does not try again.
    try:
        value = function(*args)
    except Exception as error:  # noqa: BLE001 - printed as the interpreter does, without this frame
        trace = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)
    call_memory.append(results_path, call_memory.encode_result(value, by_value=call.is_by_value))


def find_memory(agent: int) -> tuple[Path, Path]:
    """Return the names of the call and of the results, in the agent's process."""
    call, results = os.environ[constants.ENV_LAUNCH].split(",")
    return Path(f"/proc/{agent}/fd/{call}"), Path(f"/proc/{agent}/fd/{results}")


if __name__ == "__main__":
    # The function replaces __main__, so what runs it is in a module of another name.
    from elastic_resume.launching import function_worker  # noqa: PLW0406

    function_worker.run_function()
