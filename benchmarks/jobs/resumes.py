"""Resume into a model and an optimizer of a new process, from memory, disk and another node.

    resumes.py DIRECTORY MEGABYTES REPETITIONS [own-network]        prints one JSON object

Each resume is a new process, which builds a model of zeros, reports that it is ready, and is timed from then
on: all of `er.resume`, digests included. With two nodes the slower one counts. The loaded state is compared
with the saved one.

    memory     the node's committer is still alive and holds the newest step
    disk       nothing of the checkpoint is in the page cache, and nothing is in memory
    fresh      two processes on gloo, whose nodes share no directory: one holds the newest step, one nothing.
               Both share this machine's cores, which a broadcast over loopback saturates by itself; so it is
               measured again over a link of 10 Gbit/s, as two machines have (tc, in a network namespace: for
               root)
    prepared   the same, but both have touched the memory of the optimizer and of a slot before, as in a
               process that has trained, and in one that waits at `er.resume()` (restore/warm_memory.py)

Limits, from the same kind of process: one memcpy of the state into the model and a new optimizer state; four
reads of 16 MiB at a time past the page cache; gloo's broadcast within touched memory.
"""

# ruff: noqa: D102  what a method does is its name

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it when they are made
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import elastic_resume as er
from elastic_resume import constants
from elastic_resume.checkpoint.catalog import Catalog
from elastic_resume.ranks import rank_context
from elastic_resume.restore import coordinator, warm_memory
from elastic_resume.slots.ipc import SlotClient
from elastic_resume.training import run as _run  # noqa: F401  the fork server has imported it too
from jobs.trained import (
    BLOCK_BYTES,
    NODE,
    ROTATING_BYTES,
    RUN,
    Training,
    aligned_memory,
    forget,
    large,
    read_raw,
    start_committer,
    timed,
)

OBJECT_BYTES = 100 << 20  # broadcast_object_list gets so much of the state: it is slow, and copies it often
OWN_NETWORK = "own-network"
LIMIT_LINK = [
    "tc",
    "qdisc",
    "add",
    "dev",
    "lo",
    "root",
    "tbf",
    "rate",
    "10gbit",
    "burst",
    "4mb",
    "latency",
    "100ms",
]
FORK = multiprocessing.get_context("fork")
LOOK_S = 0.01
REQUESTS_IN_FLIGHT = 4  # a virtual disk gives a sixth less to one reader
EXPECTED, PICKLED, DCP = "expected.json", "state.pt", "dcp"
PREPARED = "prepared"


# ---- in the new process ----------------------------------------------------------------------------------


def train(directory: Path, megabytes: int) -> int:
    """Save a state with each method; return its size in bytes."""
    training = large(megabytes)
    run = er.resume(**training.tracked)
    training.fill()
    run.step()
    if run.save() is None:
        raise SystemExit("the committer did not commit")
    torch.save(training.plain, directory / PICKLED)
    save(training.plain, checkpoint_id=directory / DCP, no_dist=True)
    (directory / EXPECTED).write_text(json.dumps(training.prints()))
    return training.bytes


def prepare(training: Training) -> None:
    """Touch the memory that the restore needs, and let it be used there."""
    client = SlotClient(os.environ[constants.ENV_COMMITTER], 0, is_local_leader=True)
    pool = warm_memory.prepare(training.tracked, 3 * training.bytes, client)  # no state yet: a third of it
    while len(client.list_writable(3 * training.bytes)) < client.slot_count:  # else it goes on meanwhile
        time.sleep(LOOK_S)
    vars(rank_context)["SlotClient"] = lambda *_, **__: client
    coordinator.restore = functools.partial(coordinator.restore, tensor_pool=pool)


def load_torch(training: Training, directory: Path) -> None:
    loaded = torch.load(directory / PICKLED, weights_only=True)
    for name, item in training.tracked.items():
        item.load_state_dict(loaded[name])


def load_dcp(training: Training, directory: Path) -> None:
    training.fill()  # DCP loads in place: the optimizer's state must be there first
    plain = training.plain
    load(plain, checkpoint_id=directory / DCP, no_dist=True)
    for name, item in training.tracked.items():
        item.load_state_dict(plain[name])


def copy_in(training: Training) -> Callable[[], Any]:
    """Copy the state once: a third of it into touched memory, two thirds into fresh memory."""
    parameters: list[Tensor] = list(training.model.parameters())
    targets = [torch.ones_like(parameter) for parameter in parameters]

    def copy() -> list[Tensor]:
        with torch.no_grad():
            torch._foreach_copy_(targets, parameters)
        held = [training.optimizer.state[parameter] for parameter in parameters]
        return [one[name].clone() for one in held for name in ("exp_avg", "exp_avg_sq")]

    return copy


def broadcast(size: int) -> Callable[[], None]:
    """Broadcast that many bytes with gloo, in touched memory."""
    buffer = torch.ones(min(size, ROTATING_BYTES), dtype=torch.uint8)

    def send() -> None:
        for at in range(0, size, len(buffer)):
            dist.broadcast(buffer[: size - at], src=0)

    return send


def broadcast_objects(training: Training) -> Callable[[], None]:
    parts, size = [], 0
    for parameter in training.model.parameters():
        if size + parameter.nbytes <= OBJECT_BYTES:
            parts.append(parameter.detach())
            size += parameter.nbytes

    def send() -> None:
        dist.broadcast_object_list(parts if dist.get_rank() == 0 else [None] * len(parts), src=0)

    return send


def child(  # noqa: PLR0917  a process gets them as a tuple
    line: Connection, methods: list[str], directory: Path, megabytes: int, log: Path, environ: dict[str, str]
) -> None:
    """For each method: prepare, load on request, and print the seconds."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.update(environ)
    warnings.simplefilter("ignore")
    if methods == ["train"]:
        line.send(train(directory, megabytes))
        os._exit(0)
    if "RANK" in environ:
        dist.init_process_group("gloo")
    training = large(megabytes)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.zero_()
    if PREPARED in environ:
        prepare(training)
    ways: dict[str, Callable[[], Callable[[], Any]]] = {
        "ours": lambda: lambda: er.resume(**training.tracked),
        "torch.load": lambda: lambda: load_torch(training, directory),
        "dcp.load": lambda: lambda: load_dcp(training, directory),
        "memcpy": lambda: copy_in(training),
        "broadcast": lambda: broadcast(training.bytes),
        "broadcast_object_list": lambda: broadcast_objects(training),
    }
    for number, method in enumerate(methods):
        way = ways[method]()
        if dist.is_initialized():
            dist.barrier()
        line.send("ready")
        line.recv()
        line.send(timed(way))
        if not number and training.prints() != json.loads((directory / EXPECTED).read_text()):
            raise SystemExit(f"{method}: what was loaded is not what was saved")
    os._exit(0)


# ---- what starts it --------------------------------------------------------------------------------------


class Child:
    """A process that resumes, forked from this one, because importing torch takes longer than most methods.

    This process computes nothing before the fork, so that no thread pool is missing in a child.
    """

    def __init__(self, methods: str, directory: Path, megabytes: int, environ: dict[str, str]) -> None:
        self._methods = methods
        self._log = directory / "log.txt"
        self._line, line = FORK.Pipe()
        self._process = FORK.Process(
            target=child, args=(line, methods.split(","), directory, megabytes, self._log, environ)
        )
        self._process.start()
        line.close()

    def receive(self) -> Any:
        """Wait for its next message."""
        try:
            return self._line.recv()
        except EOFError:
            self._process.join()
            raise SystemExit(f"{self._methods} has failed:\n{self._log.read_text()[-4000:]}") from None

    def go(self) -> None:
        self._line.send("go")

    def memory(self) -> dict[str, int]:
        """Return the bytes of its own memory and of mapped files, without those shared with its committer."""
        found = {"RssAnon": 0, "RssFile": 0}
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in found:
                found[name] = int(rest.split()[0]) * 1024
        return found

    def end(self) -> None:
        self._process.join()
        self._line.close()


class Watch:
    """Measures the peak memory of a resuming process, beyond what it must hold in the end.

    That is its memory before, and two thirds of the state, which are the optimizer's. It is sampled every
    `LOOK_S`, at a cost of 1 % of the machine.
    """

    def __init__(self, child: Child, state_bytes: int) -> None:
        before = child.memory()
        self._own = before["RssAnon"] + state_bytes * 2 // 3
        self._files = before["RssFile"]
        self.extra_bytes = self.file_bytes = 0
        self._child = child
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live)
        self._thread.start()

    def _live(self) -> None:
        while not self._over.wait(LOOK_S):
            now = self._child.memory()
            self.extra_bytes = max(self.extra_bytes, now["RssAnon"] - self._own)
            self.file_bytes = max(self.file_bytes, now["RssFile"] - self._files)

    def end(self) -> None:
        self._over.set()
        self._thread.join()


class Bench:
    """All measurements for one size."""

    def __init__(self, directory: Path, megabytes: int, repetitions: int) -> None:
        self.directory = directory
        self.megabytes = megabytes
        self.repetitions = repetitions
        self.seconds: dict[str, list[float]] = {}
        self.peak: dict[str, dict[str, int]] = {}
        self.bytes = 0

    def resume(self, row: str, methods: str, *environs: dict[str, str]) -> None:
        """Time the methods, the first of which loads, on as many nodes as there are environments."""
        children = [Child(methods, self.directory, self.megabytes, environ) for environ in environs]
        for number, method in enumerate(methods.split(",")):
            for one in children:
                one.receive()
            watch = None if number else Watch(children[-1], self.bytes)  # of two nodes the one that lacks it
            for one in children:
                one.go()
            took = max(one.receive() for one in children)
            if watch is not None:
                watch.end()
                self._note(f"{row} {method}", watch)
            self.seconds.setdefault(f"{row} {method}", []).append(took)
        for one in children:
            one.end()

    def _note(self, row: str, watch: Watch) -> None:
        peak = self.peak.setdefault(row, {"extra_bytes": 0, "file_bytes": 0})
        for name in peak:
            peak[name] = max(peak[name], getattr(watch, name))

    def prepare(self, environ: dict[str, str]) -> None:
        trainer = Child("train", self.directory, self.megabytes, environ)
        self.bytes = trainer.receive()
        trainer.end()

    def from_memory(self, environ: dict[str, str]) -> None:
        for _ in range(self.repetitions):
            self.resume("memory", "ours,memcpy", environ)

    def to_fresh_node(self, environ: dict[str, str], row: str, methods: str, **more: str) -> None:
        for _ in range(self.repetitions):
            shutil.rmtree(self.directory / "other", ignore_errors=True)
            with start_committer(self.directory / "other", "fresh") as fresh:
                self.resume(row, methods, *_ranks([environ | more, fresh | more]))

    def from_disk(self) -> None:
        (newest, *_) = Catalog(self.directory / RUN / NODE, RUN).list_valid()
        buffers = [aligned_memory(BLOCK_BYTES) for _ in range(REQUESTS_IN_FLIGHT)]
        path = newest.path / constants.STATE_FILE
        for _ in range(self.repetitions):
            forget(self.directory)
            self.seconds.setdefault("disk limit", []).append(timed(lambda: read_raw(path, buffers)))
            with start_committer(self.directory) as environ:
                forget(self.directory)
                self.resume("disk", "ours", environ)
            for method in ("torch.load", "dcp.load"):
                forget(self.directory)
                self.resume("disk", method, {})


def _ranks(environs: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the environment of each rank of one gloo group, one rank per node."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    group["WORLD_SIZE"] = str(len(environs))
    return [{**environ, **group, "RANK": str(rank)} for rank, environ in enumerate(environs)]


def main() -> None:
    if OWN_NETWORK in sys.argv:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    bench = Bench(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    with start_committer(bench.directory) as environ:
        bench.prepare(environ)
        bench.from_memory(environ)
        bench.to_fresh_node(environ, "fresh", "ours,broadcast,broadcast_object_list")
        bench.to_fresh_node(environ, PREPARED, "ours,broadcast", prepared="1")
        if OWN_NETWORK in sys.argv:
            subprocess.run(LIMIT_LINK, check=True)
            bench.to_fresh_node(environ, "10 Gbit/s", "ours,broadcast")
    bench.from_disk()
    found = {"bytes": bench.bytes, "object_bytes": min(OBJECT_BYTES, bench.bytes // 3)}
    print(json.dumps({**found, "seconds": bench.seconds, "peak": bench.peak}))


if __name__ == "__main__":
    main()
