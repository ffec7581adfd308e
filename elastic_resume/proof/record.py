"""Remember on each node whether a resume of this script was proved.

``proof.json`` in the node's directory holds a digest of the script and its arguments, the newest verdict, and
how many proofs have not ended well.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import xxhash

from elastic_resume.checkpoint import node_dir
from elastic_resume.checkpoint.atomic_io import DISK
from elastic_resume.errors import MachineError
from elastic_resume.policy import proof
from elastic_resume.policy.resume_plan import Inventory
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.slots import slot_memory
from elastic_resume.slots.ipc import SlotClient

PROOF_FILE = "proof.json"
MAX_SCRIPT_BYTES = 4 << 20


def wants_proof(context: RankContext) -> bool:
    """Return whether this node wants the next resume to be proved."""
    mode = context.settings.prove
    if mode in {proof.OFF, proof.ALWAYS, proof.REHEARSE}:
        return mode != proof.OFF
    verdict, tries = _read(context.node_dir)
    return verdict not in {proof.PROVED, proof.ROUNDING} and tries < proof.MAX_PROOFS


def add_wish(inventory: Inventory, context: RankContext, client: SlotClient | None) -> Inventory:
    """Add to a node's inventory whether it wants a proof, and what was computed again before."""
    return replace(
        inventory,
        wants_proof=wants_proof(context),
        proves_any_size=context.settings.prove == proof.REHEARSE,
        replayed_version=replayed_version(client),
    )


def replayed_version(client: SlotClient | None) -> tuple[int, int]:
    """Return the version of the newest snapshot of this node that was computed again, or was to be."""
    word = client.control_block.get("replayed_id") if client is not None else 0
    return slot_memory.decode_snapshot_id(word)


def record_replay(directory: Path, client: SlotClient, version: tuple[int, int]) -> None:
    """Record, before the first step, that the snapshot of ``version`` is about to be computed again.

    A generation that ends before the verdict is followed by one without a proof.
    """
    client.control_block.set("replayed_id", slot_memory.encode_snapshot_id(*version))
    _write(directory, "", _read(directory)[1] + 1)


def record_verdict(directory: Path, kind: str) -> None:
    """Record the verdict of the try that `record_replay` has counted."""
    _write(directory, kind, _read(directory)[1] if kind == proof.NOT_PROVED else 0)


def _write(directory: Path, verdict: str, tries: int) -> None:
    """Write the record; a failing disk is ignored, and a later resume is proved again."""
    record = {"command": _digest_command(), "verdict": verdict, "tries": tries}
    with contextlib.suppress(MachineError):
        DISK.write_atomic(directory / PROOF_FILE, json.dumps(record).encode())


def _read(directory: Path) -> tuple[str, int]:
    """Return the newest verdict about this script with these arguments, and how many did not end well."""
    record = node_dir.read_json(directory / PROOF_FILE) or {}
    tries = record.get("tries")
    if record.get("command") != _digest_command() or not isinstance(tries, int):
        return "", 0
    return str(record.get("verdict")), tries


def _digest_command() -> str:
    """Digest the script's file and its arguments. Another file has to be proved anew."""
    digest = xxhash.xxh3_128(json.dumps(sys.argv).encode())
    with contextlib.suppress(OSError), open(sys.argv[0], "rb") as file:
        digest.update(file.read(MAX_SCRIPT_BYTES))
    return digest.hexdigest()
