"""Measure a rendezvous of many members: the first view, the detection of a loss, and the next view.

"simulated time": each member has a machine of its own, so the leader's processor limits the job;
see `rendezvous_simulated.py`. A first view waits for one second in any case, because another one may run.

"one process": all members live in one process, on one event loop, over local TCP. So one core does the work
of a leader with a thousand members and that of the members too. Times are an upper bound for a real job.

"started" is from the start of the first member until the last one has a view. A loss is a member, or the
leader, whose sockets close at once (as when its process is killed), or one that stays connected and sends
nothing more. "informed" is from then until the last survivor knows that the view has ended, "started" until
the last has the next view; survivors join at once. Detection is part of both: a closed connection is
tried again and must be refused, and an unreachable member must be so for the node timeout.

Each member makes the view durable before it starts. "disk": it writes a file and syncs it, all members to one
disk, where real nodes have one each. "memory": it does not. Stock is torchelastic's c10d rendezvous with a
process for each member. All join at once: twice with as many members as permitted, so that there is no
last-call timeout, and once without one that was killed. Stock does not notify members of a loss; here they
know it at once.

To measure another state of the code with this file, set PYTHONPATH to a checkout of that state.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import gc
import json
import multiprocessing
import os
import queue
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rendezvous_simulated import simulate

from elastic_resume.rendezvous.core.interface import (
    Effect,
    JoinRequest,
    RendezvousSettings,
    StartWorkers,
    StopWorkers,
)
from elastic_resume.rendezvous.core.messages import JoinSpec
from elastic_resume.rendezvous.core.world import Incarnation, PersistentState
from elastic_resume.rendezvous.net import protocol
from elastic_resume.rendezvous.net.durable_state import DurableStateFile
from elastic_resume.rendezvous.net.server import RendezvousServer, raise_descriptor_limit

LIMIT_S = 60.0
STEADY_S = 3.0
PAUSE_S = 1.0
STOCK_LIMIT_S = 300.0
WORKERS = 8
WRITERS = 6
TOKEN = b"benchmark"
LOSSES = [("member closed", 0.5, False), ("leader closed", 0.0, False), ("member unreachable", 0.4, True)]
"""The name of a loss, its relative rank, and whether the member stays connected."""
ROWS = [
    ("start to all started", ("start", "started_s"), "s"),
    ("  of that, one core's time", ("start", "cpu_s"), "s"),
    ("member closed: all informed", ("member closed", "informed_s"), "s"),
    ("member closed: all started", ("member closed", "started_s"), "s"),
    ("  of that, one core's time", ("member closed", "cpu_s"), "s"),
    ("leader closed: all informed", ("leader closed", "informed_s"), "s"),
    ("leader closed: all started", ("leader closed", "started_s"), "s"),
    ("member unreachable: all informed", ("member unreachable", "informed_s"), "s"),
    ("member unreachable: all started", ("member unreachable", "started_s"), "s"),
    ("stock: first round", ("round 1",), "s"),
    ("stock: second round", ("round 2",), "s"),
    ("stock: third, without one", ("round 3",), "s"),
    ("memory per member", ("start", "kilobytes_of_memory"), "kB"),
    ("messages per member, first", ("start", "messages"), ""),
    ("  bytes", ("start", "kilobytes"), "kB"),
    ("messages per member, next", ("member closed", "messages"), ""),
    ("  bytes", ("member closed", "kilobytes"), "kB"),
    ("heartbeats per member and second", ("steady", "heartbeats_per_s"), ""),
    ("cores busy with heartbeats", ("steady", "cores"), ""),
]
SIMULATED_ROWS = [
    ("start to all joined", ("rendezvous", "joined_s"), "s"),
    ("all joined to all started", ("rendezvous", "started_s"), "s"),
    ("  of that, the leader's processor", ("rendezvous", "started_cpu_s"), "s"),
    ("member closed: all informed", ("member closed", "informed_s"), "s"),
    ("member closed: all started", ("member closed", "started_s"), "s"),
    ("leader closed: all started", ("leader closed", "started_s"), "s"),
    ("sent per member, first view", ("rendezvous", "kilobytes"), "kB"),
    ("sent per member, member closed", ("member closed", "kilobytes"), "kB"),
    ("leader's cores for heartbeats", ("steady", "cores"), " "),
    ("  for each heartbeat", ("steady", "heartbeat_us"), "us"),
    ("node timeout", ("rendezvous", "node_timeout_s"), "s"),
    ("a connection's socket", ("sockets", "connection_us"), "us"),
    ("a message's socket", ("sockets", "message_us"), "us"),
    ("a megabyte's socket", ("sockets", "megabyte_us"), "us"),
]


class MemoryStateFile(DurableStateFile):
    """A state file in memory: the cost of a member without its disk."""

    def write(self, state: PersistentState) -> None:
        """Keep it in memory."""
        self.state = state


class SharedThreads(ThreadPoolExecutor):
    """Writer threads for all members: a thousand threads in one process would distort the times."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ignore it: other members still write."""


class ImmediateExecutor(SharedThreads):
    """Runs a call at once: without a disk there is nothing to wait for."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the call."""
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


@dataclass
class Traffic:
    """Lines sent by all members, by type of message."""

    lines: collections.Counter[str] = field(default_factory=collections.Counter)
    bytes: collections.Counter[str] = field(default_factory=collections.Counter)

    def count(self) -> None:
        """Count all lines of this process from now on."""
        sign_message = protocol.LineAuthenticator.sign_message

        def counted(signer: protocol.LineAuthenticator, head: bytes, body: protocol.Body) -> bytes:
            kind = body.text[8 : body.text.index(b'"', 8)].decode()
            self.lines[kind] += 1
            self.bytes[kind] += len(head) + len(body.text)
            return sign_message(signer, head, body)

        protocol.LineAuthenticator.sign_message = counted  # type: ignore[method-assign,assignment]

    def take(self, members: int) -> dict[str, float]:
        """Return what was sent per member since the last call, heartbeats apart."""
        heartbeats, heartbeat_bytes = self.lines.pop("Heartbeat", 0), self.bytes.pop("Heartbeat", 0)
        sent = {
            "messages": sum(self.lines.values()) / members,
            "kilobytes": sum(self.bytes.values()) / members / 1e3,
            "heartbeats": heartbeats / members,
            "heartbeat_bytes": heartbeat_bytes / max(1, heartbeats),
        }
        self.lines.clear()
        self.bytes.clear()
        return sent


class Member:
    """One node of the job, whose workers stop at once."""

    def __init__(self, job: Job, index: int) -> None:
        self.job = job
        self.index = index
        self.generation = 0
        self.rank = -1
        address = job.addresses[index]
        self.join = JoinRequest(JoinSpec(address, WORKERS, index))
        self.node = RendezvousServer(
            job.settings,
            Incarnation(f"node{index:05}", secrets.token_hex(8), 1, address, index if index < 3 else None),
            listener=job.listeners[index],
            run_id="benchmark",
            token=TOKEN,
            state_file=job.record(index),
            on_effect=self.carry_out,
        )
        self.node._disk_thread = job.writers  # noqa: SLF001  jobs cannot choose it

    async def start(self) -> None:
        """Start, and ask for a view."""
        await self.node.open()
        self.node.handle_event(self.join)

    def carry_out(self, effect: Effect) -> None:
        """Record views; join again as soon as one ends."""
        if isinstance(effect, StartWorkers):
            self.generation, self.rank = effect.generation, effect.rank
            self.job.started[effect.generation].add(self.index)
            self.job.changed.set()
        elif isinstance(effect, StopWorkers):
            self.job.informed[effect.generation].add(self.index)
            self.job.changed.set()
            asyncio.get_running_loop().call_soon(self.node.handle_event, self.join)

    def become_unreachable(self) -> None:
        """Keep every connection open and send nothing more."""
        self.node._closing = True  # noqa: SLF001  no public way to hang a node


class Job:
    """All members, on one event loop."""

    def __init__(self, members: int, directory: Path | None) -> None:
        self.listeners = [socket.create_server(("127.0.0.1", 0), backlog=1024) for _ in range(members)]
        self.addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in self.listeners]
        self.settings = RendezvousSettings(candidates=tuple(self.addresses[:3]), max_nodes=members)
        self.directory = directory
        self.started: dict[int, set[int]] = collections.defaultdict(set)
        self.informed: dict[int, set[int]] = collections.defaultdict(set)
        self.changed = asyncio.Event()
        self.writers = ImmediateExecutor(1) if directory is None else SharedThreads(WRITERS)
        self.traffic = Traffic()
        self.members: dict[int, Member] = {}

    def record(self, index: int) -> DurableStateFile:
        """Return the state file of a member."""
        if self.directory is None:
            return MemoryStateFile(Path(tempfile.gettempdir()) / "no-such-directory")
        place = self.directory / str(index)
        place.mkdir()
        return DurableStateFile(place)

    async def wait_until(self, what: Callable[[], bool]) -> float:
        """Wait for a condition; return the time at which it was true."""
        limit = time.monotonic() + LIMIT_S
        while not what():
            self.changed.clear()
            if time.monotonic() > limit:
                raise SystemExit(f"not within {LIMIT_S:g} s: {self.state()}")
            await asyncio.wait_for(self.changed.wait(), LIMIT_S)
        return time.monotonic()

    def state(self) -> str:
        """Return how many members started each generation."""
        return ", ".join(f"generation {one}: {len(indexes)}" for one, indexes in self.started.items())

    def all_in_one_view(self, newer_than: int) -> bool:
        """Return whether all remaining members are in one view."""
        newest = max(self.started, default=0)
        return newest > newer_than and self.started[newest] >= self.members.keys()

    @property
    def generation(self) -> int:
        """Return the newest generation."""
        return max(self.started, default=0)

    async def start(self) -> dict[str, float]:
        """Start all members."""
        size = psutil.Process().memory_info().rss
        self.traffic.count()
        start, cpu = time.monotonic(), time.process_time()
        for index in range(len(self.listeners)):
            self.members[index] = Member(self, index)
            await self.members[index].start()
        end = await self.wait_until(lambda: self.all_in_one_view(0))
        used = time.process_time() - cpu
        grown = psutil.Process().memory_info().rss - size
        count = len(self.members)
        return {
            "started_s": end - start,
            "cpu_s": used,
            "kilobytes_of_memory": grown / count / 1e3,
            **self.traffic.take(count),
        }

    async def steady(self) -> dict[str, float]:
        """Let the view run, and measure the cost of heartbeats."""
        generation, cpu, start = self.generation, time.process_time(), time.monotonic()
        self.traffic.take(1)
        await asyncio.sleep(STEADY_S)
        elapsed = time.monotonic() - start
        if self.generation != generation or not self.all_in_one_view(generation - 1):
            raise SystemExit(f"the view ended: {self.state()}")
        sent = self.traffic.take(len(self.members))
        return {
            "cores": (time.process_time() - cpu) / elapsed,
            "heartbeats_per_s": sent["heartbeats"] / elapsed,
        }

    async def lose(self, index: int, *, stays_connected: bool = False) -> dict[str, float]:
        """Lose a member; all others continue."""
        generation = self.generation
        lost = self.members.pop(index)
        self.traffic.take(1)
        start, cpu = time.monotonic(), time.process_time()
        if stays_connected:
            lost.become_unreachable()
        else:
            await lost.node.close(0.0)
        informed = await self.wait_until(lambda: self.informed[generation] >= self.members.keys())
        end = await self.wait_until(lambda: self.all_in_one_view(generation))
        result = {
            "informed_s": informed - start,
            "started_s": end - start,
            "cpu_s": time.process_time() - cpu,
            "generations": self.generation - generation,
            **self.traffic.take(len(self.members)),
        }
        if stays_connected:
            await lost.node.close(0.0)
        return result

    def index_of_rank(self, rank: int) -> int:
        """Return the index of the member with a rank."""
        return next(one.index for one in self.members.values() if one.rank == rank)


async def measure(members: int, directory: Path | None) -> dict[str, Any]:
    """Measure one job."""
    gc.disable()  # it would walk the objects of a thousand agents; a real process has one
    job = Job(members, directory)
    result: dict[str, Any] = {"start": await job.start(), "steady": await job.steady()}
    for loss, rank, stays_connected in LOSSES:
        result[loss] = await job.lose(
            job.index_of_rank(int(rank * (members - 1))), stays_connected=stays_connected
        )
        await asyncio.sleep(PAUSE_S)  # members that missed the last view join
    for one in job.members.values():
        one.become_unreachable()  # otherwise the rest would start view after view
    for one in job.members.values():
        await one.node.close(0.0)
    return result


# ---- stock -------------------------------------------------------------------------------------------


def stock_member(index: int, members: int, port: int, ready: Any, rounds: Any) -> None:
    """Join three rounds as torchelastic's agent does; the last member is killed before the third."""
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters  # noqa: PLC0415
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler  # noqa: PLC0415

    parameters = RendezvousParameters(
        "c10d", f"127.0.0.1:{port}", "benchmark", members - 1, members, "127.0.0.1", is_host=index == 0
    )
    rendezvous = get_rendezvous_handler(parameters)
    for turn in range(3):
        ready.wait()
        if turn == 2 and index == members - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        rendezvous.next_rendezvous()
        rounds.put((turn, start, time.monotonic()))
    time.sleep(STOCK_LIMIT_S)  # the host serves the store


def stock(members: int) -> dict[str, float]:
    """Return the seconds of torchelastic's rounds; rounds beyond the limit are left out."""
    # Imported once, before the fork.
    import torch.distributed.elastic.rendezvous.registry  # noqa: F401, PLC0415

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ready, rounds = fork.Barrier(members), fork.Queue()
    processes = [
        fork.Process(target=stock_member, args=(index, members, port, ready, rounds), daemon=True)
        for index in range(members)
    ]
    for process in processes:
        process.start()
    times: dict[int, list[tuple[float, float]]] = {0: [], 1: [], 2: []}
    limit = time.monotonic() + STOCK_LIMIT_S
    with contextlib.suppress(queue.Empty):
        while len(times[2]) < members - 1:
            turn, start, end = rounds.get(timeout=max(0.0, limit - time.monotonic()))
            times[turn].append((start, end))
    for process in processes:
        process.kill()
        process.join()
    return {
        f"round {turn + 1}": max(end for _, end in done) - min(start for start, _ in done)
        for turn, done in times.items()
        if len(done) >= members - (turn == 2)
    }


# ---- the table ---------------------------------------------------------------------------------------


def run_in_subprocess(what: str, members: int, directory: str) -> dict[str, Any]:
    """Measure in a process of its own, so that memory is measured separately."""
    command = [sys.executable, __file__, "--only", what, "--members", str(members), "--dir", directory]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {}
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def run_one(what: str, members: int, directory: str) -> dict[str, Any]:
    """Run one measurement in this process."""
    raise_descriptor_limit(6 * members + 512)
    if what == "stock":
        return stock(members)
    if what == "simulated":
        return simulate(members)
    if what == "memory":
        return asyncio.run(measure(members, None))
    with tempfile.TemporaryDirectory(dir=directory, prefix="rendezvous-scale-") as place:
        return asyncio.run(measure(members, Path(place)))


def median(runs: list[dict[str, Any]], *path: str) -> float | None:
    """Return the median of a value of the runs; None if a run did not finish."""
    found = []
    for run in runs:
        value: Any = run
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is None:
            return None
        found.append(float(value))
    return statistics.median(found)


def show(
    results: dict[str, list[dict[str, Any]]], rows: Sequence[tuple[str, tuple[str, ...], str]], title: str
) -> None:
    """Print a table with a column for each measurement."""
    names = list(results)
    print(
        f"{title + ', median of ' + str(len(results[names[0]])):34}" + "".join(f"{one:>17}" for one in names)
    )
    for label, path, unit in rows:
        values = [median(results[name], *path) for name in names]
        cells = [
            "-" if value is None else f"{value:.{1 if unit in {'', 'kB', 'us'} else 2}f} {unit}"
            for value in values
        ]
        print(f"{label:34}" + "".join(f"{cell:>17}" for cell in cells))


def show_ratios(results: dict[str, list[dict[str, Any]]], stock_members: int) -> None:
    """Print how much longer stock takes."""
    for turn, words in (("round 2", "second round"), ("round 3", "round after a loss")):
        base = median(results.get("stock", []), turn) if results.get("stock") else None
        for name, runs in results.items():
            ours = median(runs, "member closed", "started_s")
            if base and ours:
                ratio = f"{base / ours:.1f} times as long as {name}'s rendezvous after a loss"
                print(f"stock's {words} with {stock_members} takes {ratio}, its detection included")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--members", type=int, default=1000, help="members of the large job; 0: none")
    parser.add_argument(
        "--simulated", type=int, nargs="*", default=[100, 1000, 10_000], help="members in simulated time"
    )
    parser.add_argument("--stock", type=int, default=64, help="members of torchelastic's; 0: none")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each measurement")
    parser.add_argument("--dir", default=".", help="where the members' records are written")
    parser.add_argument("--json", type=Path, help="write every run's numbers there")
    parser.add_argument("--only", choices=["memory", "disk", "simulated", "stock"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(run_one(args.only, args.members, args.dir)))
        return
    plan = {f"{members}": ("simulated", members) for members in args.simulated}
    if args.members:
        plan |= {f"{args.members} {kind}": (kind, args.members) for kind in ("memory", "disk")}
    if args.stock:
        plan[f"{args.stock} disk"] = ("disk", args.stock)
        plan["stock"] = ("stock", args.stock)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in plan}
    for _ in range(args.repeat):
        for name, (kind, members) in plan.items():
            results[name].append(run_in_subprocess(kind, members, args.dir))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    simulated = {name: runs for name, runs in results.items() if plan[name][0] == "simulated"}
    measured = {name: runs for name, runs in results.items() if name not in simulated}
    if simulated:
        show(simulated, SIMULATED_ROWS, "simulated time")
    if measured:
        show(measured, ROWS, "one process")
        show_ratios(measured, args.stock)
    if args.json:
        machine = {"cpus": os.cpu_count(), "python": sys.version.split()[0], "load": os.getloadavg()}
        args.json.write_text(json.dumps({"machine": machine, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
