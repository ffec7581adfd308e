"""Where simulated nodes get their agents from: forks of one process that has imported torch for all of them.

Promise: what is given back is a process like one that was started with the same command, environment and
output; where no fork can be had, None. Nurseries live as long as this process, and end with it, as do
all that came from them. Does not know how a fork is made into an agent (`brood.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from elastic_resume import contract
from elastic_resume.agent import preflight
from elastic_resume.faults import brood, ending

BROOD = Path(brood.__file__)
MOST = 3  # of one process, 300 MB each; one for each set of what only a new process heeds
PATIENCE_S = 120.0  # for the first agent, which waits for the imports


class Nursery:
    """One process that forks agents. Make it through `start`."""

    def __init__(self, env: Mapping[str, str], program: Path | None = None) -> None:
        """Start it; it imports while its first agent is asked for. ``program``: default `brood`."""
        self._line, its = socket.socketpair()
        self._lock = threading.Lock()
        with its:
            self._process = ending.start_to_last(
                lambda: subprocess.Popen(
                    [sys.executable, "-u", program or BROOD, str(its.fileno()), str(os.getpid())],
                    pass_fds=(its.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env=env,
                    start_new_session=True,
                )
            )
        self._line.settimeout(PATIENCE_S)

    def fork(
        self,
        command: list[str],
        env: Mapping[str, str],
        output: int,
        *,
        cwd: Path,
        network: str = "",
        **more: object,
    ) -> brood.Forked:
        """Fork an agent; ``more`` is for programs other than `brood`.

        Raises:
            OSError, EOFError: the process is gone.

        """
        asked = {
            "command": command,
            "env": {
                os.fsencode(k).decode("latin-1"): os.fsencode(v).decode("latin-1") for k, v in env.items()
            },
            "cwd": str(cwd),
            "network": network,
            **more,
        }
        return brood.Forked(int(self._ask(asked, [output])["pid"]), self._reap)

    def _reap(self, pid: int) -> int | None:
        if self.alive and brood.ended(pid) is False:  # a thousand looks need not be answered over there
            return None
        try:
            code: int | None = self._ask({"reap": pid})["code"]
        except (OSError, EOFError):
            return -9  # it took all that it had forked along
        return code

    def _ask(self, what: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Send a question, and receive its answer.

        One that is interrupted in between, by Ctrl-C or a test's time limit, ends the nursery: the next would
        take that answer for its own, and what was forked would be nobody's.
        """
        with self._lock:
            try:
                brood.send(self._line, what, descriptors)
                return brood.receive(self._line)[0]
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End the process, and with it all that it has forked."""
        self._process.kill()
        self._process.wait()
        self._line.close()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None


_nurseries: dict[frozenset[tuple[str, str]], Nursery] = {}
_lock = threading.Lock()


def start(
    command: list[str],
    env: Mapping[str, str],
    output: IO[bytes],
    *,
    cwd: Path | None = None,
    network: str = "",
) -> brood.Forked | None:
    """Fork ``command``, which is ``python -m …``; None where it has to be started as a new process.

    Args:
        command: what is run.
        env: its environment.
        output: where it prints to.
        cwd: the folder in which it is to run; None: this process's.
        network: path of the network namespace in which it is to run; empty: this process's.

    """
    heeded = {
        name: value
        for name, value in env.items()
        if name.startswith(preflight.READ_AT_START) and name != contract.ENV_FAILPOINTS
    }
    with _lock:
        nursery = _nurseries.get(frozenset(heeded.items()))
        if nursery is None or not nursery.alive:
            if nursery is None and len(_nurseries) >= MOST:
                return None
            kept = {k: v for k, v in env.items() if not k.startswith("ELASTIC_RESUME_") and k != "TMPDIR"}
            kept.update({k: v for k, v in os.environ.items() if k == "TMPDIR"})  # it outlives those nodes
            nursery = _nurseries[frozenset(heeded.items())] = Nursery(kept)
            atexit.register(nursery.close)
    with contextlib.suppress(OSError, EOFError):
        return nursery.fork(command, env, output.fileno(), cwd=cwd or Path.cwd(), network=network)
    return None
