"""A process with a fork server that is forked from it, as an agent's is; it prints the server's name."""

from __future__ import annotations

import os
import signal
import sys

from elastic_resume import constants
from elastic_resume.agent.workers import forkserver_manager
from elastic_resume.agent.workers.forkserver_manager import ForkServerManager

preforked = forkserver_manager.prefork()
assert preforked is not None
manager = ForkServerManager([sys.executable, "-u", "x.py"], preforked=preforked)
manager.start()
print(os.environ[constants.ENV_FORK_SERVER], flush=True)
while True:
    signal.pause()
