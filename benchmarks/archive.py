"""Put and get a state through the archive, obstore and s3fs in turn, against one server.

The server is moto's, in a process of its own on the loopback; it is the slowest part, so the client's
processor time says more than the seconds. The archive computes and compares digests; the others do not.
Several nodes are processes that get the state at once; those of the archive read it together.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import obstore
import s3fs
import xxhash
from obstore.store import S3Store

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from elastic_resume.archive.archive import open_archive
from elastic_resume.archive.entries import choose_part_bytes
from elastic_resume.checkpoint.layout import Layout, TensorSpec
from elastic_resume.checkpoint.manifest import BLOCK_BYTES, Manifest, Position
from elastic_resume.checkpoint.reader import allocate_memory
from elastic_resume.restore.sources import ArchiveReader
from elastic_resume.restore.streaming import LocalWatermark, StreamingBuffer
from elastic_resume.restore.transfer import BlockSender, BlockServer, BlockTable, SharedReading, receive
from tests.support.s3 import BUCKET, s3_environment, serve_s3

RUN = "benchmark"


def make_image(mebibytes: int) -> memoryview:
    """Return an image of random bytes."""
    layout = Layout.build([TensorSpec("weights", "U8", (mebibytes << 20,))])
    image = allocate_memory(layout.total_bytes)
    image[: len(layout.header)] = layout.header
    for start in range(len(layout.header), len(image), 1 << 24):
        piece = image[start : start + (1 << 24)]
        piece[:] = os.urandom(len(piece))
    return image


def make_manifest(image: memoryview, step: int) -> Manifest:
    """Return its manifest with all digests, which a job has computed before it uploads."""
    blocks = [
        xxhash.xxh3_128_hexdigest(image[at : at + BLOCK_BYTES]) for at in range(0, len(image), BLOCK_BYTES)
    ]
    manifest = Manifest(RUN, "n0", 0, 1, 1, Position(0, step, step, step), time.time(), "benchmark", {})
    return replace(manifest, file_bytes=len(image), blocks=tuple(blocks))


def archive_pair(image: memoryview) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return what puts and gets the image through the archive; older ones are pruned at once."""
    archive = open_archive(f"s3://{BUCKET}/archive", RUN)
    step = 0
    manifest = make_manifest(image, 0)
    part_bytes = choose_part_bytes(len(image), BLOCK_BYTES)
    into = allocate_memory(len(image))

    def put() -> None:
        nonlocal step
        step += 1
        attempt = archive.begin((1, step), secrets.token_hex(8))
        if attempt is None:
            raise RuntimeError(f"step {step} is archived already")
        for index, start in enumerate(range(0, len(image), part_bytes)):
            archive.put_part(attempt.id, index, image[start : start + part_bytes])
        archive.commit(
            attempt, replace(manifest, position=Position(0, step, step, step)).to_bytes(), part_bytes
        )
        archive.prune(1)

    def get() -> None:
        (number,) = archive.list_numbers()
        archive.read_image(archive.read_entry(number), into)

    return put, get


def obstore_pair(image: memoryview) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return obstore's own put, a multipart upload with 12 requests at once, and its get."""
    store = S3Store(BUCKET, client_options={"allow_http": True, "timeout": "10min"})
    return lambda: obstore.put(store, "obstore", image), lambda: obstore.get(store, "obstore").bytes()


def s3fs_pair(image: memoryview) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return s3fs' own put and get."""
    files = s3fs.S3FileSystem(config_kwargs={"read_timeout": 900})  # moto joins parts slowly
    data = bytes(image)
    return lambda: files.pipe_file(f"{BUCKET}/s3fs", data), lambda: files.cat_file(f"{BUCKET}/s3fs")


def read_on_node(line: Connection, name: str, index: int, nodes: int) -> None:
    """Get the state on one of several nodes, a process of its own; report seconds and processor seconds.

    The archive's nodes read it together; the others get all of it each.
    """
    get: Callable[[], object]
    if name == "archive":
        archive = open_archive(f"s3://{BUCKET}/archive", RUN)
        (number,) = archive.list_numbers()
        archived = archive.read_entry(number)
        manifest = archived.manifest
        buffer = StreamingBuffer(allocate_memory(manifest.file_bytes), LocalWatermark())
        server = BlockServer(BlockTable(buffer, BLOCK_BYTES, manifest.blocks), f"n{index}", "127.0.0.1")
        line.send(server.sender.to_json())
        encoded = line.recv()
        senders = [
            BlockSender.from_json(f"n{other}", encoded[other]) if other != index else None
            for other in range(nodes)
        ]
        shared = SharedReading(ArchiveReader(archive, archived), tuple(senders))
        others = [sender for sender in senders if sender is not None]
        get = functools.partial(receive, server.table, others, len(others), shared)
    else:
        get = {"obstore": obstore_pair, "s3fs": s3fs_pair}[name](memoryview(b""))[1]
        line.send(None)
        line.recv()
    line.send(measure(get))
    line.recv()  # the others have got it too
    os._exit(0)


def measure_nodes(name: str, nodes: int) -> tuple[float, float]:
    """Return the seconds until all nodes have the state, and the sum of their processor seconds."""
    spawn = multiprocessing.get_context("spawn")
    lines, processes = [], []
    for index in range(nodes):
        line, other = spawn.Pipe()
        processes.append(spawn.Process(target=read_on_node, args=(other, name, index, nodes)))
        processes[-1].start()
        lines.append(line)
    encoded = [line.recv() for line in lines]
    for line in lines:
        line.send(encoded)
    taken = [line.recv() for line in lines]
    for line in lines:
        line.send(None)
    for process in processes:
        process.join()
    return max(seconds for seconds, _ in taken), sum(processor for _, processor in taken)


def measure(operation: Callable[[], object]) -> tuple[float, float]:
    """Return seconds and this process's processor seconds."""
    started, processor = time.perf_counter(), time.process_time()
    operation()
    return time.perf_counter() - started, time.process_time() - processor


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=3, help="nodes that get the state at once, besides one")
    args = parser.parse_args()
    image = make_image(args.mebibytes)
    with serve_s3() as port:
        os.environ |= s3_environment(port)
        pairs = {
            "archive": archive_pair(image),
            "obstore": obstore_pair(image),
            "s3fs": s3fs_pair(image),
        }
        results: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for _ in range(args.pairs):
            for index, operation in enumerate(("put", "get")):
                for name, pair in pairs.items():
                    results.setdefault((operation, name), []).append(measure(pair[index]))
            for name in pairs:
                results.setdefault((f"get {args.nodes}x", name), []).append(measure_nodes(name, args.nodes))
    print(f"{args.mebibytes} MiB, median of {args.pairs}")
    for (operation, name), taken in results.items():
        seconds, processor = (statistics.median(column) for column in zip(*taken, strict=True))
        print(f"{operation:6} {name:8} {seconds:6.2f} s, {processor:6.2f} s of processor time")


if __name__ == "__main__":
    main()
