"""Run a script as a rank without an agent, in a process that may have been forked: see `launch_ranks`.

``rank_process.py STDERR SCRIPT [ARGUMENT ...]``. The rank writes its errors to the file STDERR.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from types import SimpleNamespace
from typing import Any

from elastic_resume.agent.workers import forkserver, run_main
from elastic_resume.training import worker_exit

assert worker_exit.__name__ == forkserver.EXIT_MODULE
os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT, 0o600), 2)
faulthandler.dump_traceback_later(100)  # `run_ranks` ends a rank after 120 s, and shows this
request: Any = SimpleNamespace(command=[sys.executable, "-u", *sys.argv[2:]])
run_main.run(forkserver.become_worker(request))
run_main.exit_without_freeing(0)  # freeing torch takes 0.4 s of processor time
