"""How fast many members form a world, notice a loss and form the next one, over real TCP on this machine.

All members of a measurement live in one process, on one event loop, so one core does the work of all: what a
leader does for a thousand members, and what a thousand members do each on a machine of their own. Times are
an upper bound for a real job, in which only the leader's part grows with the number of members.

"begin" is from the first member's start until the last one is told its world. A loss is a member, or the
leader, whose sockets close at once (as a killed process's do), or one that stays connected and says nothing
more. "told" is from then until the last survivor hears that the world is over, "begun" until the last is
told the next one; every survivor asks to join the moment it hears. Detection is part of both: a closed
connection is called again and the call must be refused, and silence must last for the node timeout.

Each member makes the world durable before it begins. "disk": it writes a file and syncs it, all of them to
one disk, where real nodes have one each. "memory": it does not. Stock is torchelastic's c10d rendezvous with
every member a process. All ask at once: twice with as many members as it may have, so that it waits for no
last call, and once without one that was killed. Stock tells nobody of a loss; here they know it at once.
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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from elastic_resume.rendezvous.core.events import (
    Effect,
    JoinRequested,
    KillWorkers,
    PersistentState,
    RestartWorkers,
    Settings,
    StartWorkers,
)
from elastic_resume.rendezvous.core.messages import JoinSpec
from elastic_resume.rendezvous.core.quorum import Incarnation
from elastic_resume.rendezvous.net import protocol
from elastic_resume.rendezvous.net.durable_state import DurableStateFile
from elastic_resume.rendezvous.net.server import RendezvousServer, raise_descriptor_limit

LIMIT_S = 60.0
CALM_S = 3.0
PAUSE_S = 1.0
STOCK_LIMIT_S = 300.0
WORKERS = 8
WRITERS = 6
TOKEN = b"benchmark"
LOSSES = [("member closed", 0.5, False), ("leader closed", 0.0, False), ("member silent", 0.4, True)]
"""What is lost, by its place among the ranks."""
ROWS = [
    ("start to begin", ("begin", "begun_s"), "s"),
    ("  of that, one core's time", ("begin", "cpu_s"), "s"),
    ("member closed: all told", ("member closed", "told_s"), "s"),
    ("member closed: next begun", ("member closed", "begun_s"), "s"),
    ("  of that, one core's time", ("member closed", "cpu_s"), "s"),
    ("leader closed: all told", ("leader closed", "told_s"), "s"),
    ("leader closed: next begun", ("leader closed", "begun_s"), "s"),
    ("member silent: all told", ("member silent", "told_s"), "s"),
    ("member silent: next begun", ("member silent", "begun_s"), "s"),
    ("stock: first round", ("round 1",), "s"),
    ("stock: second round", ("round 2",), "s"),
    ("stock: third, without one", ("round 3",), "s"),
    ("memory per member", ("begin", "kilobytes_of_memory"), "kB"),
    ("messages per member, first", ("begin", "messages"), ""),
    ("  bytes", ("begin", "kilobytes"), "kB"),
    ("messages per member, next", ("member closed", "messages"), ""),
    ("  bytes", ("member closed", "kilobytes"), "kB"),
    ("heartbeats per member and second", ("calm", "beats_per_s"), ""),
    ("cores busy with heartbeats", ("calm", "cores"), ""),
]


class Unwritten(DurableStateFile):
    """A record that forgets: what a member costs without its disk."""

    def write(self, state: PersistentState) -> None:
        """Keep it in memory."""
        self.memory = state


class Shared(ThreadPoolExecutor):
    """The threads that write: each node's process has one, which a thousand nodes in one process cannot."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stay: others write yet."""


class AtOnce(Shared):
    """Does on the spot what it is given: where nothing is written, there is nothing to wait for."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Do it."""
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


@dataclass
class Traffic:
    """Lines sent, by type of message, by all members."""

    lines: collections.Counter[str] = field(default_factory=collections.Counter)
    bytes: collections.Counter[str] = field(default_factory=collections.Counter)

    def count(self) -> None:
        """Count from now on, in this process."""
        line_of = protocol.encode_line

        def counted(header: Any, body: bytes) -> bytes:
            line = line_of(header, body)
            kind = body[8 : body.index(b'"', 8)].decode()
            self.lines[kind] += 1
            self.bytes[kind] += len(line)
            return line

        protocol.encode_line = counted

    def take(self, members: int) -> dict[str, float]:
        """Say what was sent per member since the last time, heartbeats apart, and begin again."""
        beats, beat_bytes = self.lines.pop("Heartbeat", 0), self.bytes.pop("Heartbeat", 0)
        said = {
            "messages": sum(self.lines.values()) / members,
            "kilobytes": sum(self.bytes.values()) / members / 1e3,
            "beats": beats / members,
            "beat_bytes": beat_bytes / max(1, beats),
        }
        self.lines.clear()
        self.bytes.clear()
        return said


class Member:
    """One node of the job; its workers stop at once."""

    def __init__(self, crowd: Crowd, index: int) -> None:
        self.crowd = crowd
        self.index = index
        self.generation = 0
        self.rank = -1
        address = crowd.addresses[index]
        self.join = JoinRequested(JoinSpec(address, WORKERS, index))
        self.node = RendezvousServer(
            crowd.settings,
            Incarnation(f"node{index:05}", secrets.token_hex(8), address, index if index < 3 else None),
            listener=crowd.listeners[index],
            run_id="benchmark",
            token=TOKEN,
            state_file=crowd.record(index),
            on_effect=self.carry_out,
        )
        self.node._disk_thread = crowd.writers  # noqa: SLF001  not a thing to choose in a job

    async def start(self) -> None:
        """Start, and ask for a world."""
        await self.node.open()
        self.node.handle_event(self.join)

    def carry_out(self, effect: Effect) -> None:
        """Note worlds; ask for the next as soon as one is over."""
        if isinstance(effect, StartWorkers):
            self.generation, self.rank = effect.generation, effect.rank
            self.crowd.begun[effect.generation].add(self.index)
            self.crowd.changed.set()
        elif isinstance(effect, (RestartWorkers, KillWorkers)):
            self.crowd.told[effect.generation].add(self.index)
            self.crowd.changed.set()
            asyncio.get_running_loop().call_soon(self.node.handle_event, self.join)

    def fall_silent(self) -> None:
        """Keep every connection open and say nothing more."""
        self.node._closing = True  # noqa: SLF001  no node can be asked to hang


class Crowd:
    """All members, on one loop."""

    def __init__(self, members: int, directory: Path | None) -> None:
        self.listeners = [socket.create_server(("127.0.0.1", 0), backlog=1024) for _ in range(members)]
        self.addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in self.listeners]
        self.settings = Settings(candidates=tuple(self.addresses[:3]), max_nodes=members)
        self.directory = directory
        self.begun: dict[int, set[int]] = collections.defaultdict(set)
        self.told: dict[int, set[int]] = collections.defaultdict(set)
        self.changed = asyncio.Event()
        self.writers = AtOnce(1) if directory is None else Shared(WRITERS)
        self.traffic = Traffic()
        self.members: dict[int, Member] = {}

    def record(self, index: int) -> DurableStateFile:
        """Give a member its record."""
        if self.directory is None:
            return Unwritten(Path(tempfile.gettempdir()) / "no-such-directory")
        place = self.directory / str(index)
        place.mkdir()
        return DurableStateFile(place)

    async def until(self, what: Callable[[], bool]) -> float:
        """Wait for it; give the time at which it was seen."""
        limit = time.monotonic() + LIMIT_S
        while not what():
            self.changed.clear()
            if time.monotonic() > limit:
                raise SystemExit(f"not within {LIMIT_S:g} s: {self.state()}")
            await asyncio.wait_for(self.changed.wait(), LIMIT_S)
        return time.monotonic()

    def state(self) -> str:
        """Say how far it got."""
        return ", ".join(f"generation {one}: {len(who)}" for one, who in self.begun.items())

    def together(self, newer_than: int) -> bool:
        """Whether all who are left are in one world."""
        newest = max(self.begun, default=0)
        return newest > newer_than and self.begun[newest] >= self.members.keys()

    @property
    def generation(self) -> int:
        """The newest begun."""
        return max(self.begun, default=0)

    async def begin(self) -> dict[str, float]:
        """Start everybody."""
        size = psutil.Process().memory_info().rss
        self.traffic.count()
        start, cpu = time.monotonic(), time.process_time()
        for index in range(len(self.listeners)):
            self.members[index] = Member(self, index)
            await self.members[index].start()
        end = await self.until(lambda: self.together(0))
        used = time.process_time() - cpu
        grown = psutil.Process().memory_info().rss - size
        count = len(self.members)
        return {
            "begun_s": end - start,
            "cpu_s": used,
            "kilobytes_of_memory": grown / count / 1e3,
            **self.traffic.take(count),
        }

    async def calm(self) -> dict[str, float]:
        """Let the world run, and see what heartbeats cost."""
        generation, cpu, start = self.generation, time.process_time(), time.monotonic()
        self.traffic.take(1)
        await asyncio.sleep(CALM_S)
        elapsed = time.monotonic() - start
        if self.generation != generation or not self.together(generation - 1):
            raise SystemExit(f"the world did not hold: {self.state()}")
        said = self.traffic.take(len(self.members))
        return {"cores": (time.process_time() - cpu) / elapsed, "beats_per_s": said["beats"] / elapsed}

    async def lose(self, index: int, *, silently: bool = False) -> dict[str, float]:
        """Lose a member; all others go on."""
        generation = self.generation
        lost = self.members.pop(index)
        self.traffic.take(1)
        start, cpu = time.monotonic(), time.process_time()
        if silently:
            lost.fall_silent()
        else:
            await lost.node.close(0.0)
        told = await self.until(lambda: self.told[generation] >= self.members.keys())
        end = await self.until(lambda: self.together(generation))
        said = {
            "told_s": told - start,
            "begun_s": end - start,
            "cpu_s": time.process_time() - cpu,
            "generations": self.generation - generation,
            **self.traffic.take(len(self.members)),
        }
        if silently:
            await lost.node.close(0.0)
        return said

    def ranked(self, rank: int) -> int:
        """Whose rank that is."""
        return next(one.index for one in self.members.values() if one.rank == rank)


async def measure(members: int, directory: Path | None) -> dict[str, Any]:
    """One crowd's life."""
    gc.disable()  # it would walk the objects of a thousand agents, which a real agent has one of
    crowd = Crowd(members, directory)
    said: dict[str, Any] = {"begin": await crowd.begin(), "calm": await crowd.calm()}
    for loss, rank, silently in LOSSES:
        said[loss] = await crowd.lose(crowd.ranked(int(rank * (members - 1))), silently=silently)
        await asyncio.sleep(PAUSE_S)  # those who came late to the last world, if any, are taken in
    for one in crowd.members.values():
        one.fall_silent()  # or the last ones would lead the shrinking rest, again and again
    for one in crowd.members.values():
        await one.node.close(0.0)
    return said


# ---- stock -------------------------------------------------------------------------------------------


def stock_member(index: int, members: int, port: int, ready: Any, told: Any) -> None:
    """Join three rounds as torchelastic's agent does; the last member is not there for the third."""
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
        told.put((turn, start, time.monotonic()))
    time.sleep(STOCK_LIMIT_S)  # the host serves the others


def stock(members: int) -> dict[str, float]:
    """Give the seconds of torchelastic's rounds; those not done by the limit are left out."""
    # Once, before the fork; our own measurements do without it.
    import torch.distributed.elastic.rendezvous.registry  # noqa: F401, PLC0415

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ready, told = fork.Barrier(members), fork.Queue()
    processes = [
        fork.Process(target=stock_member, args=(index, members, port, ready, told), daemon=True)
        for index in range(members)
    ]
    for process in processes:
        process.start()
    times: dict[int, list[tuple[float, float]]] = {0: [], 1: [], 2: []}
    limit = time.monotonic() + STOCK_LIMIT_S
    with contextlib.suppress(queue.Empty):
        while len(times[2]) < members - 1:
            turn, start, end = told.get(timeout=max(0.0, limit - time.monotonic()))
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


def in_a_process(what: str, members: int, directory: str) -> dict[str, Any]:
    """Measure in a process of its own, so that one's memory is not the other's."""
    command = [sys.executable, __file__, "--only", what, "--members", str(members), "--dir", directory]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {}
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def only(what: str, members: int, directory: str) -> dict[str, Any]:
    """Measure one thing in this process."""
    raise_descriptor_limit(6 * members + 512)
    if what == "stock":
        return stock(members)
    if what == "memory":
        return asyncio.run(measure(members, None))
    with tempfile.TemporaryDirectory(dir=directory, prefix="rendezvous-scale-") as place:
        return asyncio.run(measure(members, Path(place)))


def median(runs: list[dict[str, Any]], *path: str) -> float | None:
    """The middle of what the runs say there; None where one of them came to no end."""
    found = []
    for run in runs:
        value: Any = run
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is None:
            return None
        found.append(float(value))
    return statistics.median(found)


def show(results: dict[str, list[dict[str, Any]]], stock_members: int) -> None:
    """Print the table: one column for each measurement."""
    names = list(results)
    print(
        f"{'median of ' + str(len(results[names[0]])) + ' runs':34}" + "".join(f"{one:>17}" for one in names)
    )
    for label, path, unit in ROWS:
        values = [median(results[name], *path) for name in names]
        cells = ["-" if value is None else f"{value:.{2 if unit == 's' else 1}f} {unit}" for value in values]
        print(f"{label:34}" + "".join(f"{cell:>17}" for cell in cells))
    for turn, words in (("round 2", "second round"), ("round 3", "round after a loss")):
        base = median(results.get("stock", []), turn) if results.get("stock") else None
        for name in names:
            ours = median(results[name], "member closed", "begun_s")
            if base and ours:
                ratio = f"{base / ours:.1f} times as long as {name}'s re-formation after a loss"
                print(f"stock's {words} with {stock_members} takes {ratio}, its detection included")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--members", type=int, default=1000, help="members of the large job")
    parser.add_argument("--stock", type=int, default=64, help="members of torchelastic's; 0: none")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each measurement")
    parser.add_argument("--dir", default=".", help="where the members' records are written")
    parser.add_argument("--json", type=Path, help="write every run's numbers there")
    parser.add_argument("--only", choices=["memory", "disk", "stock"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(only(args.only, args.members, args.dir)))
        return
    plan = {f"{args.members} {kind}": (kind, args.members) for kind in ("memory", "disk")}
    if args.stock:
        plan[f"{args.stock} disk"] = ("disk", args.stock)
        plan["stock"] = ("stock", args.stock)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in plan}
    for _ in range(args.repeat):
        for name, (kind, members) in plan.items():
            results[name].append(in_a_process(kind, members, args.dir))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    show(results, args.stock)
    if args.json:
        machine = {"cpus": os.cpu_count(), "python": sys.version.split()[0], "load": os.getloadavg()}
        args.json.write_text(json.dumps({"machine": machine, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
