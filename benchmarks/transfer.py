"""Measure the transfer of a state between nodes, beside gloo's broadcast of as many bytes in the same run.

Each node is a process, forked from this one. The holder has the state in a slot, and a receiver has a new
slot whose memory a process allocates meanwhile, as the agent does after the loss of a machine. gloo's
broadcast goes into touched memory. Processors are those of the processes, both ends together.

    loopback     one holder, one receiver; both share this machine's cores
    10 Gbit/s    the same over a loopback that is limited to 10 Gbit/s (tc, in a network namespace: for root)
    chain        one holder and --receivers nodes, each in a network namespace with its own link of --link-mb
                 MB/s. The limit is the size of the state over the speed of one link

Medians decide whether a target is met. The systems take turns.
"""

# ruff: noqa: D102  what a method does is its name

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic_resume.restore import transfer
from elastic_resume.restore.streaming import LocalWatermark, StreamingBuffer
from elastic_resume.restore.transfer import BlockSender, BlockServer, BlockTable
from elastic_resume.slots import slot_memory
from elastic_resume.testing.virtual_network import VirtualNetwork

BLOCK_BYTES = 16 << 20
LINK_BYTES_PER_S = 1.25e9
LIMIT_LINK = "tc qdisc add dev lo root tbf rate 10gbit burst 4mb latency 100ms"
IN_NAMESPACE = "--in-namespace"
CLONE_NEWNET = 0x40000000
FORK = multiprocessing.get_context("fork")
Result = dict[str, float]


# ---- one node --------------------------------------------------------------------------------------------


def make_slot(size: int, *, fresh: bool) -> tuple[memoryview, int]:
    """Return the memory of a slot and its descriptor; only a fresh one is not allocated yet."""
    descriptor = slot_memory.create_memory_file("benchmark", size, allocate=not fresh)
    memory = memoryview(mmap.mmap(descriptor, size))
    if not fresh:
        memory[:] = os.urandom(1 << 20) * (size >> 20) + bytes(size & ((1 << 20) - 1))
    return memory, descriptor


def processor_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def run_node(line: Connection, host: str, namespace: str, size: int, role: str) -> None:
    """Hold or receive the state: report the own address, get those of the sources, report the figures."""
    if namespace:
        descriptor = os.open(namespace, os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    memory, slot = make_slot(size, fresh=role == "fresh")
    buffer = StreamingBuffer(memory, LocalWatermark(size if role == "holder" else 0))
    table = BlockTable(buffer, BLOCK_BYTES)
    server = BlockServer(table, role, host)
    line.send(server.sender.to_json())
    sources = [BlockSender.from_json("node", encoded) for encoded in line.recv()]
    before, start = processor_seconds(), time.perf_counter()
    if sources:
        if role == "fresh" and os.fork() == 0:
            slot_memory.allocate_memory_file(slot, size)
            os._exit(0)
        transfer.receive(table, sources, 1)
    seconds = time.perf_counter() - start
    if sources and role == "fresh":
        os.wait()
    line.send("received")
    line.recv()  # the others have received too
    line.send({"seconds": seconds, "processors": processor_seconds() - before, "sent": server.sent_bytes})
    os._exit(0)


def run_broadcast(line: Connection, host: str, rank: int, port: int, size: int) -> None:
    """Take part in gloo's broadcast among two ranks."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR=host, MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    tensor = torch.ones(size, dtype=torch.uint8)
    dist.barrier()
    before, start = processor_seconds(), time.perf_counter()
    dist.broadcast(tensor, src=0)
    dist.barrier()
    seconds = time.perf_counter() - start
    line.send({"seconds": seconds, "processors": processor_seconds() - before})
    os._exit(0)


# ---- all nodes -------------------------------------------------------------------------------------------


class Node:
    """A forked process and the connection to it."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._line, line = FORK.Pipe()
        self._process = FORK.Process(target=target, args=(line, *arguments))
        self._process.start()
        line.close()

    def receive(self) -> Any:
        try:
            return self._line.recv()
        except EOFError:
            raise SystemExit("a node of the benchmark has failed") from None

    def send(self, value: Any) -> None:
        self._line.send(value)

    def end(self) -> None:
        self._process.join()


def measure_transfer(size: int, hosts: list[str], namespaces: list[str], role: str = "fresh") -> Result:
    """Send the state from the first node along a chain of the others."""
    roles = ["holder", *[role] * (len(hosts) - 1)]
    nodes = [
        Node(run_node, host, namespace, size, role)
        for host, namespace, role in zip(hosts, namespaces, roles, strict=True)
    ]
    sources = [node.receive() for node in nodes]
    for index, node in enumerate(nodes):
        node.send(sources[index - 1 : index] if index else [])
    for node in nodes:
        node.receive()
    for node in nodes:
        node.send("end")
    results: list[Result] = [node.receive() for node in nodes]
    for node in nodes:
        node.end()
    seconds = max(result["seconds"] for result in results)
    return {
        "seconds": seconds,
        "processors": sum(result["processors"] for result in results),
        "most sent": max(result["sent"] for result in results) / size,
    }


def measure_broadcast(size: int, port: int) -> Result:
    nodes = [Node(run_broadcast, "127.0.0.1", rank, port, size) for rank in range(2)]
    results: list[Result] = [node.receive() for node in nodes]
    for node in nodes:
        node.end()
    return {key: max(r[key] for r in results) if key == "seconds" else sum(r[key] for r in results)
            for key in ("seconds", "processors")}  # fmt: skip


def print_row(name: str, results: list[Result], size: int) -> Result:
    row = {key: statistics.median(result[key] for result in results) for key in results[0]}
    row["GB/s"] = size / 1e9 / row["seconds"]
    print(f"  {name:32}{row['seconds']:9.3f}{row['GB/s']:9.2f}{row['processors']:12.2f}", flush=True)
    return row


def verdict(what: str, value: float, target: float, *, at_most: bool = False) -> None:
    is_met = value <= target if at_most else value >= target
    sign = "<=" if at_most else ">="
    print(f"  target: {what}, {value:.2f}: {'met' if is_met else 'MISSED'} ({sign} {target:g})", flush=True)


def compare(title: str, options: argparse.Namespace) -> dict[str, Result]:
    """Compare with the broadcast, on this process's loopback."""
    size = options.megabytes * 10**6
    found: dict[str, list[Result]] = {"ours": [], "ours, allocated slot": [], "gloo broadcast": []}
    for repetition in range(options.repetitions):
        found["ours"].append(measure_transfer(size, ["127.0.0.1"] * 2, [""] * 2))
        found["gloo broadcast"].append(measure_broadcast(size, 29_600 + repetition))
        found["ours, allocated slot"].append(measure_transfer(size, ["127.0.0.1"] * 2, [""] * 2, "touched"))
    print(f"\n{title}, {options.megabytes} MB{'seconds':>20}{'GB/s':>9}{'processors':>12}")
    rows = {name: print_row(name, results, size) for name, results in found.items()}
    ratio = statistics.median(
        gloo["seconds"] / ours["seconds"]
        for ours, gloo in zip(found["ours"], found["gloo broadcast"], strict=True)
    )
    verdict("of gloo's broadcast", ratio, 0.7)
    if title != "loopback":
        verdict("of the link", rows["ours"]["GB/s"] * 1e9 / LINK_BYTES_PER_S, 0.9)
    else:
        verdict("processors for 623 MB", rows["ours"]["processors"] * 623e6 / size, 0.5, at_most=True)
    return rows


def measure_chain(options: argparse.Namespace) -> Result:
    """Send the state to several receivers of one holder over links of the same speed."""
    size, link = options.megabytes * 10**6, options.link_mb * 1e6
    results = []
    for _ in range(options.repetitions):
        with VirtualNetwork(1 + options.receivers) as network:
            indices = range(len(network))
            for index in indices:
                network.limit_rate(index, link)
            hosts = [network.address(index) for index in indices]
            results.append(measure_transfer(size, hosts, [network.namespace_path(i) for i in indices]))
    print(
        f"\nchain of {options.receivers}, {options.link_mb} MB/s{'seconds':>24}{'GB/s':>9}{'processors':>12}"
    )
    row = print_row("ours", results, size)
    verdict("of the link", row["GB/s"] * 1e9 / link, 0.6)
    verdict("copies over the busiest link", row["most sent"], 1.1, at_most=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=623, help="of the state (default 623)")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--receivers", type=int, default=8, help="of the chain (default 8)")
    parser.add_argument("--link-mb", type=int, default=125, help="MB/s of the chain's links (default 125)")
    parser.add_argument("--only", default="loopback,link,chain", help="loopback,link,chain")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument(IN_NAMESPACE, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_namespace:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        subprocess.run(LIMIT_LINK.split(), check=True)
        compare("10 Gbit/s", options)
        return 0
    rows: dict[str, Any] = {}
    has_tools = os.geteuid() == 0 and all(map(shutil.which, ("unshare", "ip", "tc")))
    if "loopback" in options.only:
        rows["loopback"] = compare("loopback", options)
    if "link" in options.only and has_tools:
        subprocess.run(["unshare", "--net", sys.executable, *sys.argv, IN_NAMESPACE], check=True)
    if "chain" in options.only and has_tools:
        rows["chain"] = measure_chain(options)
    with contextlib.suppress(TypeError):
        options.json.write_text(json.dumps(rows, indent=1) + "\n") if options.json else None
    return 0


if __name__ == "__main__":
    sys.exit(main())
