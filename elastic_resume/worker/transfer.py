"""From one rank that holds a verified image to those who lack it.

Only the source and the receivers take part. The image goes block by block, in the manifest's own
blocks, straight into memory that was allocated once; a receiver checks each block's digest as it comes
and writes it to its disk at the same time, so that its node ends with a checkpoint of its own.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import torch
import xxhash

from elastic_resume import failpoints
from elastic_resume.errors import CorruptError, MachineError
from elastic_resume.store import committed
from elastic_resume.store.checkpoint import Writer, fresh_memory
from elastic_resume.store.layout import Layout
from elastic_resume.store.manifest import Manifest
from elastic_resume.worker.image import Image
from elastic_resume.worker.world import Channel


def send(channel: Channel, image: Image, manifest: Manifest, source_rank: int) -> None:
    """Send the whole of a verified ``image``, block by block."""
    for block in _blocks(image.memory, manifest):
        failpoints.hit("transfer.send")
        channel.broadcast(torch.frombuffer(block, dtype=torch.uint8), source_rank)


def receive(channel: Channel, manifest: Manifest, source_rank: int, node_dir: Path) -> Image:
    """Receive an image, verify it, and commit it under this node's own name.

    Whatever goes wrong here, all blocks are received first: the source and the other receivers are in the
    same broadcasts and would wait for this rank.

    Raises:
        CorruptError: a block arrived with another digest than the manifest's; nothing was committed.
        MachineError: this node's disk refused it.

    """
    memory = fresh_memory(manifest.file_bytes)
    wrong: list[int] = []
    refusal: MachineError | None = None
    writer: Writer | None = None
    with contextlib.ExitStack() as stack:
        try:
            writer = stack.enter_context(Writer(node_dir, manifest.generation, manifest.step))
        except MachineError as error:
            refusal = error
        for index, block in enumerate(_blocks(memory, manifest)):
            channel.broadcast(torch.frombuffer(block, dtype=torch.uint8), source_rank)
            failpoints.hit("transfer.receive")
            if xxhash.xxh3_128_hexdigest(block) != manifest.blocks[index]:
                wrong.append(index)
            elif writer is not None and refusal is None:
                try:
                    writer.write(block)
                except MachineError as error:
                    refusal = error
        if wrong:
            raise CorruptError(
                f"generation {manifest.generation} step {manifest.step}: "
                f"{len(wrong)} of {len(manifest.blocks)} blocks from rank {source_rank} arrived damaged, "
                f"the first at byte {wrong[0] * manifest.block_bytes}; nothing was kept."
            )
        if refusal is not None:
            raise refusal
        if writer is not None:
            writer.commit(replace(manifest, node=node_dir.name))
            committed.note(node_dir, manifest.generation)
    return Image(Layout.parse(memory, manifest.file_bytes), memory)


def _blocks(memory: memoryview, manifest: Manifest) -> list[memoryview]:
    step = manifest.block_bytes
    return [memory[at : at + step] for at in range(0, manifest.file_bytes, step)]
