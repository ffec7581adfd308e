"""Lets a worker be its own supervisor, so that several worlds begin and end in one process."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from elastic_resume import constants


class Supervisor:
    """Ends this rank's world, and begins the next one when the rank has parked."""

    def __init__(self) -> None:
        self._end, workers_end = socket.socketpair()
        os.environ[constants.ENV_SUPERVISOR_FD] = str(workers_end.detach())
        self._is_over = False
        self.worlds = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def ends_here(self, moment: str, moments: Sequence[str], place: int, steps: int) -> bool:
        """Return whether this world ends at this moment.

        The first world ends in its second step, the second world in its first. ``place`` chooses among
        ``moments``; ``steps`` are those taken in this world.
        """
        if self.worlds > 1 or moment != moments[(place + self.worlds) % len(moments)]:
            return False
        return moment == "start" or steps == 1 - self.worlds

    def end_world(self) -> None:
        """Request parking, once in each world."""
        if not self._is_over:
            self._is_over = True
            self._end.sendall(b"park\n")

    def _serve(self) -> None:
        for line in self._end.makefile("rb"):
            if line.startswith(b"waiting "):
                self.end_world()
            elif line == b"parked\n":
                self.worlds += 1
                count_world()
                text = json.dumps(dict(os.environ)).encode()
                self._is_over = False
                self._end.sendall(b"resume %d\n%b" % (len(text), text))


def count_world() -> None:
    """Let the next process group use other keys of the store, as a new store has."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1)


def use_own_store_per_world() -> None:
    """Let each default process group use keys of its own in the store."""
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]  # a function hides the module
    create = rendezvous._create_c10d_store
    rendezvous._create_c10d_store = lambda *args: PrefixStore(
        os.environ["TORCHELASTIC_RESTART_COUNT"], create(*args)
    )
