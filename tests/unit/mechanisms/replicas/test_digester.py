"""What the digest of a snapshot covers, and which snapshots get one."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from elastic_resume.checkpoint.layout import Layout, TensorSpec
from elastic_resume.mechanisms.mechanism import decode_body, encode_body
from elastic_resume.mechanisms.replicas import digester
from elastic_resume.mechanisms.replicas.description import DivergenceVerdict
from elastic_resume.mechanisms.replicas.digester import SnapshotDigester, digest_image
from elastic_resume.mechanisms.replicas.judge import DIGESTS, StateDigest
from elastic_resume.policy.reasons import JobFinished
from elastic_resume.policy.restart import JudgedFailure
from elastic_resume.slots.slot_memory import encode_snapshot_id
from elastic_resume.slots.slot_pool import SlotPool
from tests.support.agent_parts import make_agent_context
from tests.support.processes import wait_for
from tests.support.snapshot_samples import SLOT_BYTES, write_snapshot

DIGEST_SPECS = (
    TensorSpec("fc.weight", "F32", (5, 7)),
    TensorSpec("bn.running_mean", "F32", (7,)),
    TensorSpec("nothing", "F32", (0, 3)),
    TensorSpec("fc.bias", "BF16", (5,)),
    TensorSpec("step", "I64", ()),
    TensorSpec("mask", "BOOL", (3,)),
)
DIGEST_LAYOUT = Layout.build(DIGEST_SPECS)
FOLLOWS = ("bn.running_mean", "scheduler")
ZEROS = DIGEST_LAYOUT.header + bytes(DIGEST_LAYOUT.total_bytes - len(DIGEST_LAYOUT.header))


def digest_of(image: bytes, layout: Layout = DIGEST_LAYOUT) -> str | None:
    """Return the digest of an image that does not change."""
    return digest_image(memoryview(image), layout, FOLLOWS)


def flipped(place: int) -> bytes:
    """Return the image with one flipped bit."""
    return ZEROS[:place] + bytes([ZEROS[place] ^ 1]) + ZEROS[place + 1 :]


@pytest.mark.parametrize("pieces", [1, 3, 1 << 20])
def test_digest_covers_every_byte_of_included_tensors(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on the chunk size."""
    before = digest_of(ZEROS)
    monkeypatch.setattr(digester, "CHUNK_BYTES", pieces)
    assert before
    assert re.fullmatch("[0-9a-f]{32}", before)
    assert digest_of(ZEROS) == before
    for name, extent in DIGEST_LAYOUT.extents.items():
        for place in range(extent.start, extent.stop):
            assert (digest_of(flipped(place)) == before) == (name in FOLLOWS)


def test_digest_differs_for_other_shape_or_dtype() -> None:
    """Two different scripts may hold the same zeros."""
    kinds = [("F32", (6,)), ("F32", (2, 3)), ("F32", (3, 2)), ("I32", (6,))]
    found = set()
    for dtype, shape in kinds:
        layout = Layout.build([TensorSpec("t", dtype, shape)])
        found.add(digest_of(layout.header + bytes(24), layout))
    assert len(found) == len(kinds)


def test_overwritten_snapshot_has_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """`is_current` is checked before every chunk."""
    monkeypatch.setattr(digester, "CHUNK_BYTES", 16)
    current = iter([True, True, True, False])
    assert digest_image(memoryview(ZEROS), DIGEST_LAYOUT, FOLLOWS, is_current=lambda: next(current)) is None
    assert not list(current)


@contextlib.contextmanager
def digest_snapshots(client: Mock, emit: Mock) -> Iterator[Mock]:
    """Run a digester on three slots; yield its committer."""
    committer = Mock(slot_pool=SlotPool(3 * SLOT_BYTES), snapshot_listeners=[])
    committer.slot_pool.reserve(SLOT_BYTES)
    part = SnapshotDigester(make_agent_context(emit=emit, committer=committer))
    part.start(client)
    try:
        yield committer
    finally:
        part.close()
        committer.slot_pool.close()


def test_digester_skips_what_is_missing_late_or_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on with the next snapshot. Equal bytes have equal digests, each under its view's generation."""
    monkeypatch.setattr(digester, "TIMEOUT_S", 0.05)
    client, emit = Mock(**{"job_end.reason": JobFinished()}), Mock()
    with digest_snapshots(client, emit) as committer:
        slots = [committer.slot_pool._owned[index].slot for index in range(3)]
        control, (offer,) = committer.slot_pool.control_block, committer.snapshot_listeners
        offer(encode_snapshot_id(9, 9), 1)
        offer(write_snapshot(slots[0], 1, share_count=2), 1)
        damaged = write_snapshot(slots[1], 2)
        slots[1].memory[slots[1].record.get("dynamic_offset")] = 0
        offer(damaged, 1)
        whole = write_snapshot(slots[2], 3, generation=51)
        offer(whole, 1)
        offer(whole, 2)
        wait_for(lambda: client.send_fact.call_count == 2, "two digests")
        (topic, first, body), (_, second, other) = (call.args for call in client.send_fact.call_args_list)
        assert (topic, first, second) == (DIGESTS.name, 1, 2)
        assert body == other
        assert decode_body(StateDigest, body).step == 3

        def overwrite(*args: Any, **kwargs: Any) -> str | None:
            result = digest_image(*args, **kwargs)
            slots[2].record.set("snapshot_id", 0)
            return result

        monkeypatch.setattr(digester, "digest_image", overwrite)
        control.set("read_cpu_us", 1 << 40)
        offer(whole, 3)
        record = slots[2].record
        wait_for(lambda: not record.get("snapshot_id") and not record.get("soft_pinned"), "the overwriting")
        assert control.get("read_cpu_us") == 1 << 40, "a lower bound"
    assert client.send_fact.call_count == 2
    assert not emit.called


def test_end_for_unlike_replicas_is_an_event() -> None:
    """Each agent writes it, from the reason of the job's end."""
    client, emit = Mock(), Mock()
    verdict = DivergenceVerdict(8, 4, (("a", "b"), ("c",)), ("c",))
    client.job_end.reason = JudgedFailure(DIGESTS.name, 2, encode_body(verdict), "they differ")
    with digest_snapshots(client, emit):
        pass
    emit.assert_called_once_with(
        "replicas-differ",
        generation=2,
        step=8,
        agreed_step=4,
        nodes=[["a", "b"], ["c"]],
        diverged_nodes=["c"],
    )
