"""From one rank that holds a verified image to those who lack it.

Only the source and the receivers take part. The image goes block by block, in the manifest's own
blocks, straight into memory that was allocated once; a receiver checks each block's digest as it comes
and writes it to its disk at the same time, so that its node ends with a checkpoint of its own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import xxhash

from elastic_resume import failpoints
from elastic_resume.errors import CorruptError
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

    Raises:
        CorruptError: a block arrived with another digest than the manifest's; nothing was committed. All
            blocks are received nevertheless, so that the other receivers are not held up.
        MachineError: this node's disk refused it.

    """
    memory = fresh_memory(manifest.file_bytes)
    wrong: list[int] = []
    with Writer(node_dir, manifest.generation, manifest.step) as writer:
        for index, block in enumerate(_blocks(memory, manifest)):
            channel.broadcast(torch.frombuffer(block, dtype=torch.uint8), source_rank)
            failpoints.hit("transfer.receive")
            if xxhash.xxh3_128_hexdigest(block) != manifest.blocks[index]:
                wrong.append(index)
            elif not wrong:
                writer.write(block)
        if wrong:
            raise CorruptError(
                f"generation {manifest.generation} step {manifest.step}: "
                f"{len(wrong)} of {len(manifest.blocks)} blocks from rank {source_rank} arrived damaged, "
                f"the first at byte {wrong[0] * manifest.block_bytes}; nothing was kept."
            )
        writer.commit(replace(manifest, node=node_dir.name))
    return Image(Layout.parse(memory, manifest.file_bytes), memory)


def _blocks(memory: memoryview, manifest: Manifest) -> list[memoryview]:
    step = manifest.block_bytes
    return [memory[at : at + step] for at in range(0, manifest.file_bytes, step)]
