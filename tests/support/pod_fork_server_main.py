"""The fork server of simulated pods: its forks enter a pod as children of the pod's first process."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

from elastic_resume.agent.workers import forkserver
from elastic_resume.testing import fork_server_main
from tests.support import namespaces

_set_up_agent = fork_server_main._set_up_agent


def set_up_agent_in_pod(
    parent: int, request: dict[str, Any], output: int, import_environment: dict[str, str]
) -> Callable[[], None]:
    """Enter the namespaces of the pod's first process and become its child."""
    del parent
    if request["group"]:
        Path(request["group"], "cgroup.procs").write_text("0")
    kinds = ("net", "uts", "ipc", "pid", "mnt")
    spaces = [os.open(f"/proc/{request['beside']}/ns/{kind}", os.O_RDONLY) for kind in kinds]
    for space in spaces:
        namespaces.enter_namespace(space)
        os.close(space)
    inside = forkserver.fork()
    if inside:
        os.waitpid(inside, 0)
        os._exit(0)
    # An orphan gets the first process of its parent's pid namespace as parent, so the parent must be inside.
    if forkserver.fork():
        os._exit(0)
    while os.getppid() != 1:
        time.sleep(0.001)
    return _set_up_agent(1, request, output, import_environment)


if __name__ == "__main__":
    fork_server_main._set_up_agent = set_up_agent_in_pod
    with contextlib.suppress(KeyboardInterrupt):
        fork_server_main.main()
