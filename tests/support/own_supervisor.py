"""Lets a worker be its own supervisor: `scripts/kinds.py` begins and ends several worlds in one process."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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

    def reach(self, script: Any, moment: str, moments: Sequence[str], place: int) -> None:
        """End the world if that is planned at this moment; ``place`` chooses among ``moments``.

        The first world ends in its second step, the second world in its first.
        """
        if self.worlds > 1 or moment != moments[(place + self.worlds) % len(moments)]:
            return
        if moment != "start" and script.run.position.step - script.entered != 1 - self.worlds:
            return
        if moment == "torn":
            script.tear()
        self.end_world()
        if moment == "saving":
            script.run.save()
        while moment != "step":  # in which an interrupt waits
            time.sleep(60)

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


def compare_kinds(compare: Callable[..., Any], directory: Path, kinds: Iterable[tuple[int, str]]) -> Any:
    """Return the result of ``compare`` for each kind, or its error: the test names that kind."""
    torch.set_num_threads(1)
    use_own_store_per_world()
    supervisor = Supervisor()
    results = {}
    for number, name in kinds:
        try:
            results[name] = compare(name, directory, number, supervisor)
        except Exception:  # noqa: BLE001  the other kinds continue
            results[name] = {"error": traceback.format_exc()}
    return results


def leave(run: Any) -> None:
    """Leave the process groups of a run; a close() would save the end."""
    run._release()
    run._collectives.leave()
    if dist.is_initialized():  # by the script
        dist.destroy_process_group()


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
