"""Send, load and save compile artifacts in a worker, in one generation.

At the start of a generation, before the first forward pass, the ranks compare what each of them has. A rank
without artifacts of its `Origin` receives those of a peer in pieces, over the collectives that restores use.
It compares their digest and their HMAC, loads them, and keeps them. Later a rank saves what it has compiled:
at the steps 1, 2, 4, ... of the generation, then at each `MAX_INTERVAL_STEPS`, and only if torch has more
than before. On a CPU the ranks of a node compile the same, so the first of them saves. On GPUs torch's keys
contain the device, so each rank has artifacts of its own.

All that fails here costs a compilation, and never the job.
"""

from __future__ import annotations

import hmac
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from elastic_resume import constants
from elastic_resume.background import lower_priority
from elastic_resume.errors import CorruptError, MachineError
from elastic_resume.mechanisms.compile_cache.artifact_file import MAX_BYTES, ArtifactFile, Origin, digest
from elastic_resume.mechanisms.mechanism import StepObserver, WorkerContext
from elastic_resume.units import format_bytes

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
MAX_INTERVAL_STEPS = 1024
CLOSE_TIMEOUT_S = 1.0  # a worker that stays has 2 s to leave its world


class Offer(NamedTuple):
    """What a rank has, and what it needs, at the start of a generation."""

    origin: str
    """The digest of its `Origin`."""
    local_rank: int
    lacks: bool
    """It wants artifacts."""
    size: int = 0
    """Bytes of the artifacts that it can send; 0: none."""
    sha256: str = ""
    proof: str = ""
    """The HMAC of the origin's and the artifacts' digests, in hex."""


class Sending(NamedTuple):
    """One rank sends its artifacts, and others receive them."""

    source_rank: int
    receivers: tuple[int, ...]


def plan_sendings(offers: Sequence[Offer]) -> list[Sending]:
    """Choose a source for each rank that lacks artifacts: of its local rank if possible, then the lowest."""
    receivers: dict[int, list[int]] = {}
    for rank, offer in enumerate(offers):
        if not offer.lacks:
            continue
        sources = [
            (other.local_rank != offer.local_rank, source)
            for source, other in enumerate(offers)
            if 0 < other.size <= MAX_BYTES and other.origin == offer.origin
        ]
        if sources:
            receivers.setdefault(min(sources)[1], []).append(rank)
    return [Sending(source, tuple(ranks)) for source, ranks in sorted(receivers.items())]


class _Process:
    """What this process has loaded and saved: it may live for several generations."""

    def __init__(self) -> None:
        self.has_started = False
        self.known = Counter[tuple[str, str]]()
        """Artifacts by kind and key, those that a file has."""
        self.writer: threading.Thread | None = None
        self.warned: set[str] = set()


_process = _Process()


def observe(context: WorkerContext, takes_part: bool) -> CompileCache:
    """Exchange and load artifacts, and save those of this generation.

    A rank that does not take part waits with the others, and neither sends, loads nor saves any.
    """
    cache = CompileCache(context, takes_part=takes_part)
    cache.exchange()
    return cache


class CompileCache(StepObserver):
    """Loads artifacts before the first step of a generation, and saves what it compiles."""

    def __init__(
        self, context: WorkerContext, process: _Process | None = None, *, takes_part: bool = True
    ) -> None:
        self._context, self._process, self._takes_part = context, process or _process, takes_part
        run_id = context.node_dir.parent.name
        self._origin = Origin.here(run_id)
        self._key = bytes.fromhex(os.environ.get(constants.ENV_WORKER_KEY, "")) or run_id.encode()
        owner = context.local_rank if torch.cuda.is_initialized() else 0
        self._saves = takes_part and owner == context.local_rank
        self._file = ArtifactFile(context.node_dir, owner, self._origin)
        self._steps = 0

    def exchange(self) -> None:
        """Receive artifacts if this rank lacks them, send them to those that do, and load them once.

        It is a collective of all ranks.
        """
        if not self._takes_part:
            self._warn_once(
                f"node {self._context.node_dir.name} has no --share-compile-cache, which rank 0 has: it "
                "compiles for itself. Give all nodes the same flags."
            )
        artifacts = self._read_file() if self._takes_part else None
        is_new = self._takes_part and not self._process.has_started
        self._process.has_started = True
        offers = [_parse_offer(value) for value in self._context.gather(self._make_offer(artifacts, is_new))]
        source_rank = None
        for sending in plan_sendings(offers):
            received = self._transfer(sending, offers[sending.source_rank], artifacts)
            if self._context.rank in sending.receivers and received is not None:
                artifacts, source_rank = received, sending.source_rank
        if is_new and artifacts is not None:
            is_loaded = self._load(artifacts, source_rank)
            if is_loaded and source_rank is not None:
                self._put(artifacts, self._process.known)

    def end_step(self, step: int) -> None:
        """Save what torch has compiled, at few steps; writing is a thread's work."""
        del step
        self._steps += 1
        is_due = not self._steps & (self._steps - 1) or self._steps % MAX_INTERVAL_STEPS == 0
        if self._saves and is_due and "torch._dynamo" in sys.modules:  # else nothing was compiled
            self._save()

    def close(self) -> None:
        """Wait for the write that has begun, at most `CLOSE_TIMEOUT_S`."""
        if self._process.writer is not None:
            self._process.writer.join(CLOSE_TIMEOUT_S)

    # ---- the start of a generation -----------------------------------------------------------------------

    def _read_file(self) -> bytes | None:
        try:
            return self._file.read()
        except (CorruptError, OSError) as error:
            self._warn_once(
                f"the compile cache {self._file.path} is not used: {error}. The model is compiled."
            )
            return None

    def _make_offer(self, artifacts: bytes | None, is_new: bool) -> list[Any]:
        offer = Offer(self._origin.digest, self._context.local_rank, is_new and artifacts is None)
        if artifacts is not None:
            sha256 = digest(artifacts)
            offer = offer._replace(size=len(artifacts), sha256=sha256, proof=self._prove(sha256))
        return list(offer)

    def _prove(self, sha256: str) -> str:
        return hmac.digest(
            self._key, f"compile cache {self._origin.digest} {sha256}".encode(), "sha256"
        ).hex()

    def _transfer(self, sending: Sending, offer: Offer, artifacts: bytes | None) -> bytes | None:
        """Send or receive; return what a receiver may load."""
        received = bytearray()
        is_receiver = self._context.rank in sending.receivers
        for start in range(0, offer.size, PIECE_BYTES):
            size = min(PIECE_BYTES, offer.size - start)
            if self._context.rank == sending.source_rank and artifacts is not None:
                piece = torch.frombuffer(bytearray(artifacts[start : start + size]), dtype=torch.uint8)
            else:
                piece = torch.empty(size, dtype=torch.uint8)
            self._context.broadcast_tensors([piece], sending.source_rank)
            if is_receiver:
                received += piece.numpy().data
        if not is_receiver:
            return None
        is_genuine = hmac.compare_digest(
            offer.proof.encode(errors="replace"), self._prove(offer.sha256).encode()
        )
        if not is_genuine or digest(received) != offer.sha256:
            reason = "it was damaged on its way" if is_genuine else "it does not prove the job's secret"
            rank = sending.source_rank
            self._warn_once(f"the compile cache of rank {rank} is not used: {reason}. The model is compiled.")
            return None
        return bytes(received)

    def _load(self, artifacts: bytes, source_rank: int | None) -> bool:
        start_s = time.monotonic()
        try:
            info = torch.compiler.load_cache_artifacts(artifacts)
            found = None if info is None else _count(info)
        except Exception as error:  # noqa: BLE001 - whatever torch raises costs a compilation
            found, reason = None, repr(error)
        else:
            reason = "torch cannot read them"
        if found is None:
            size = format_bytes(len(artifacts))
            self._warn_once(f"compile artifacts of {size} were not loaded: {reason}. The model is compiled.")
            return False
        self._process.known = found
        if source_rank is not None:
            size = format_bytes(len(artifacts))
            logger.info("rank %d has compiled code from rank %d: %s", self._context.rank, source_rank, size)
        self._context.emit(
            "compile-cache",
            source_rank=source_rank,
            bytes=len(artifacts),
            artifacts=found.total(),
            seconds=round(time.monotonic() - start_s, 3),
        )
        return True

    # ---- saving ------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Have torch's artifacts written if there are more than in the file."""
        try:
            saved = torch.compiler.save_cache_artifacts()
            if saved is None:
                return
            artifacts, found = saved[0], _count(saved[1])
        except Exception as error:  # noqa: BLE001 - as above
            self._warn_once(f"compile artifacts were not saved: {error!r}.")
            return
        if found <= self._process.known:
            return
        if len(artifacts) > MAX_BYTES:
            size, limit = format_bytes(len(artifacts)), format_bytes(MAX_BYTES)
            self._warn_once(f"compile artifacts of {size} were not saved: at most {limit} are kept.")
            return
        self._put(artifacts, found)

    def _put(self, artifacts: bytes, found: Counter[tuple[str, str]]) -> None:
        """Write in a thread. While one writes, nothing begins: the next due step finds the same again."""
        if not self._saves or (self._process.writer is not None and self._process.writer.is_alive()):
            return
        writer = threading.Thread(
            target=self._write, args=(artifacts, found), name="elastic-resume-compile-cache", daemon=True
        )
        try:
            writer.start()
            self._process.writer = writer
        except RuntimeError as error:  # the process may start no more threads
            self._warn_once(f"compile artifacts were not saved: {error}.")

    def _write(self, artifacts: bytes, found: Counter[tuple[str, str]]) -> None:
        lower_priority()
        try:
            self._file.write(artifacts)
        except (MachineError, OSError) as error:
            self._warn_once(f"compile artifacts were not saved: {error}")
            return
        self._process.known = found

    def _warn_once(self, text: str) -> None:
        if text not in self._process.warned:
            self._process.warned.add(text)
            logger.warning(text)


def _parse_offer(value: Any) -> Offer:
    """Return the offer of a rank; one without artifacts or wishes if it is malformed."""
    kinds = (str, int, bool, int, str, str)
    if isinstance(value, list) and tuple(map(type, value)) == kinds:
        return Offer(*value)
    return Offer("", 0, lacks=False)


def _count(info: Any) -> Counter[tuple[str, str]]:
    """Count the artifacts of torch's `CacheInfo` by kind and key."""
    return Counter((str(kind), str(key)) for kind, keys in info.artifacts.items() for key in keys)
