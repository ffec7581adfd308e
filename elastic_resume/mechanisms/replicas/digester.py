"""Hash this node's snapshots for the leader, while they lie in their slots.

A snapshot that is overwritten meanwhile is skipped. Tensors that may differ between ranks
(`Manifest.rank0_tensors`) are left out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection

import xxhash

from elastic_resume.background import OfferQueue
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.errors import CheckpointError
from elastic_resume.mechanisms.mechanism import AgentContext, AgentPart, decode_body, encode_body
from elastic_resume.mechanisms.replicas.description import DivergenceVerdict
from elastic_resume.mechanisms.replicas.judge import DIGESTS, StateDigest
from elastic_resume.policy.restart import JudgedFailure
from elastic_resume.rendezvous.client import RendezvousClient
from elastic_resume.rendezvous.facts import FactBody
from elastic_resume.slots.committer import POLL_S
from elastic_resume.slots.slot_memory import Slot, decode_snapshot_id

TIMEOUT_S = 1.0
"""How long to wait for local ranks that copy a snapshot to digest."""
CHUNK_BYTES = 16 << 20
"""Hashing one takes 2 ms; `is_current` is checked for each."""


def digest_image(
    image: memoryview,
    layout: Layout,
    excluded: Collection[str],
    *,
    is_current: Callable[[], bool] = lambda: True,
) -> str | None:
    """Digest an image without the ``excluded`` tensors; return None once ``is_current`` is false.

    The caller must check again afterwards that the snapshot was not overwritten.
    """
    digest = xxhash.xxh3_128()
    for name, extent in layout.extents.items():
        if name in excluded:
            continue
        digest.update(f"{name} {extent.dtype} {extent.shape} ".encode())
        for start in range(extent.start, extent.stop, CHUNK_BYTES):
            if not is_current():
                return None
            digest.update(image[start : min(start + CHUNK_BYTES, extent.stop)])
    return digest.hexdigest()


class SnapshotDigester(AgentPart):
    """Digests the snapshots that the local leader offers, in a thread, from `start` to `close`."""

    def __init__(self, context: AgentContext) -> None:
        self._committer, self._emit = context.committer, context.emit
        self._slot_pool = context.committer.slot_pool
        # It takes the view's generation too: a snapshot's own is greater if it resumed another job's state.
        self._offers = OfferQueue("elastic-resume-digest", self._digest)
        self._cached_layout: tuple[int, Layout, frozenset[str]] | None = None  # plan id, layout, excluded

    def start(self, client: RendezvousClient) -> None:
        """Start the thread, and take offers."""
        self._client = client
        self._offers.start()
        self._committer.snapshot_listeners.append(self._offers.put)

    def close(self) -> None:
        """Stop the thread, and emit an event if the job has ended because replicas differ."""
        self._offers.close()
        end = self._client.job_end
        if end and isinstance(end.reason, JudgedFailure) and end.reason.topic == DIGESTS.name:
            verdict = decode_body(DivergenceVerdict, FactBody(end.reason.body))
            self._emit(
                "replicas-differ",
                generation=end.reason.generation,
                step=verdict.step,
                agreed_step=verdict.agreed_step,
                nodes=[list(group) for group in verdict.groups],
                diverged_nodes=list(verdict.diverged),
            )

    def _digest(self, snapshot_id: int, generation: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline and not self._offers.is_closing:
            states = self._slot_pool.control_block.read_slots()
            state = next((state for state in states if state.snapshot_id == snapshot_id), None)
            if state is None:
                return
            if state.complete:
                digest = None
                with (
                    contextlib.suppress(CheckpointError, ValueError),  # damaged; the commit reports it
                    self._slot_pool.pin(state, hard=False) as slot,
                ):
                    digest = self._digest_slot(slot, snapshot_id) if slot is not None else None
                if digest is not None:
                    body = encode_body(StateDigest(decode_snapshot_id(snapshot_id)[1], digest))
                    self._client.send_fact(DIGESTS.name, generation, body)
                return
            time.sleep(POLL_S)

    def _digest_slot(self, slot: Slot, snapshot_id: int) -> str | None:
        def is_current() -> bool:
            return not self._offers.is_closing and slot.record.complete_snapshot_id() == snapshot_id

        cpu_start = time.thread_time()
        image, control = slot.image(), self._slot_pool.control_block
        plan_id = slot.record.get("plan_id")
        cached = self._cached_layout
        if cached is None or cached[0] != plan_id:
            excluded = slot.read_snapshot(snapshot_id)[0].rank0_tensors
            cached = (plan_id, Layout.parse(image, len(image)), frozenset(excluded))
        digest = digest_image(image, *cached[1:], is_current=is_current)
        cpu_us = int((time.thread_time() - cpu_start) * 1e6)
        if digest is None or not is_current():  # overwritten, so the layout may be torn too
            control.set("read_cpu_us", max(control.get("read_cpu_us"), cpu_us))  # a lower bound
            return None
        self._cached_layout = cached
        control.set("read_cpu_us", cpu_us)
        return digest
