"""Test that a restore uses the memory that was touched for it, and that a wrong estimate costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from elastic_resume.checkpoint.layout import Layout
from elastic_resume.checkpoint.manifest import Manifest, Position
from elastic_resume.restore import attempt, warm_memory
from elastic_resume.restore.sources import open_for_peers
from elastic_resume.restore.streaming import Prefetcher, StreamingBuffer
from elastic_resume.restore.warm_memory import TensorPool, prepare
from elastic_resume.slots import slot_memory
from elastic_resume.slots.ipc import SlotClient
from elastic_resume.slots.slot_pool import SLOT_COUNT
from elastic_resume.state import state_dict
from elastic_resume.state.state_dict import make_spec
from tests.support.processes import wait_for

BYTES = 1 << 20


def build(seed: int) -> tuple[nn.Linear, torch.optim.Adam]:
    """Build a model and an optimizer without state."""
    torch.manual_seed(seed)
    model = nn.Linear(256, 128)
    return model, torch.optim.Adam(model.parameters())


def step(model: nn.Linear, optimizer: torch.optim.Adam) -> None:
    """Take a training step on the same batch."""
    optimizer.zero_grad()
    model(torch.ones(2, 256)).pow(2).sum().backward()
    optimizer.step()


def write_image(flat: state_dict.FlatState) -> tuple[memoryview, Manifest]:
    """Return the image of a state and its manifest."""
    layout = Layout.build([make_spec(leaf.name, leaf.tensor) for leaf in flat.leaves])
    image = memoryview(bytearray(layout.total_bytes))
    image[: len(layout.header)] = layout.header
    for leaf in flat.leaves:
        extent = layout.extents[leaf.name]
        tensor = torch.frombuffer(image[extent.start : extent.stop], dtype=leaf.tensor.dtype)
        tensor.copy_(leaf.tensor.detach().reshape(-1))
    position = Position(0, 1, 1, 1)
    manifest = Manifest("job", "n0", 0, 1, 1, position, 0.0, "test", flat.structure, file_bytes=len(image))
    return image, manifest


def load(tracked: dict[str, object], pool: TensorPool, more: Sequence[state_dict.Leaf] = ()) -> None:
    """Load a state of one step into ``tracked``, and check that it is that state.

    The image has ``more`` tensors.
    """
    saved = dict(zip(("model", "optimizer"), build(1), strict=True))
    step(*saved.values())  # type: ignore[arg-type]
    flat = state_dict.flatten(saved)
    image, manifest = write_image(replace(flat, leaves=(*flat.leaves, *more)))
    values = attempt.SourceValues(attempt.build_values_layout(Layout.parse(image, len(image)), ()))
    attempt._StateLoader(tracked, manifest, values, pool, 0).load(StreamingBuffer.from_complete(image))
    loaded = state_dict.flatten(tracked)
    assert state_dict.digest_leaves(loaded.leaves) == state_dict.digest_leaves(flat.leaves)
    for each in (saved, tracked):
        step(*each.values())  # type: ignore[arg-type]
    after = [state_dict.digest_leaves(state_dict.flatten(each).leaves) for each in (saved, tracked)]
    assert after[0] == after[1]


@pytest.mark.parametrize(("is_prepared", "reused"), [(True, 2), (False, 0)])
def test_optimizer_state_is_loaded_into_prepared_tensors(
    is_prepared: bool, reused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moments of the weight are; those of the bias are too small."""
    monkeypatch.setattr(attempt, "_MIN_PREFETCH_BYTES", 0)
    model, optimizer = build(2)
    tracked: dict[str, object] = {"model": model, "optimizer": optimizer}
    pool = prepare(tracked, BYTES, None) if is_prepared else TensorPool()
    touched = {tensor.data_ptr() for tensors in pool._tensors.values() for tensor in tensors}
    load(tracked, pool)
    moments = [value for held in optimizer.state.values() for value in held.values()]
    assert len(touched & {tensor.data_ptr() for tensor in moments}) == reused
    assert not any(pool._tensors.values())  # nothing is left, or nothing was prepared


@pytest.mark.parametrize(("min_bytes", "is_prefetched"), [(0, True), (1 << 30, False)])
def test_large_tensors_that_objects_keep_are_copied_in_threads(
    min_bytes: int, is_prefetched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules copy by themselves, and other local ranks load their own shards."""
    prefetched: list[str] = []

    class RecordingPrefetcher(Prefetcher):
        def __init__(self, names: Iterable[str], copy_tensor: Callable[[str], torch.Tensor]) -> None:
            prefetched.extend(names)
            super().__init__(names, copy_tensor)

        def close(self) -> None:
            prefetched.append("closed")
            super().close()

    monkeypatch.setattr(attempt, "Prefetcher", RecordingPrefetcher)
    monkeypatch.setattr(attempt, "_MIN_PREFETCH_BYTES", min_bytes)
    model, optimizer = build(2)
    shards = [
        state_dict.Leaf(f"optimizer/m@{rank}of2", torch.ones(2), state_dict.REPLICATED) for rank in (0, 1)
    ]
    load({"model": model, "optimizer": optimizer}, TensorPool(), shards)
    states = [f"optimizer/state/{at}/{key}" for at in (0, 1) for key in ("step", "exp_avg", "exp_avg_sq")]
    names = [*states, "optimizer/m@0of2"] if is_prefetched else []
    assert sorted(prefetched) == sorted([*names, "closed"])


def test_state_that_a_script_has_loaded_is_not_in_the_pool() -> None:
    """A restore that fails has overwritten the pool, and a cold start would begin from that."""
    model, optimizer = build(2)
    step(model, optimizer)
    elsewhere = torch.optim.Adam(nn.Linear(256, 128, device="meta").parameters())  # nor that of a GPU
    assert not prepare({"model": model, "optimizer": optimizer, "other": elsewhere}, BYTES, None)._tensors


def test_tensors_of_another_shape_or_dtype_are_left() -> None:
    """The copy is a new tensor then."""
    pool = TensorPool([torch.zeros(4), torch.zeros(4)])
    first, second = pool.copy(torch.ones(4)), pool.copy(torch.full((4,), 2.0))
    assert (first.tolist(), second.tolist()) == ([1] * 4, [2] * 4)
    for source in (torch.ones(4), torch.ones(2, 2), torch.ones(4, dtype=torch.float64)):
        copy = TensorPool([torch.zeros(5)]).copy(source)
        assert (copy.dtype, copy.shape) == (source.dtype, source.shape)
        assert torch.equal(copy, source)


@pytest.mark.parametrize(
    ("group", "count"),
    [
        ({"betas": (0.9, 0.99)}, 2),
        ({"betas": (0.9, 0.99), "amsgrad": True}, 3),
        ({"momentum": 0}, 0),
        ({"momentum": 0.9}, 1),
        ({"momentum": 0.9, "alpha": 0.99, "centered": True}, 3),
        ({"lr": 1}, 2),
    ],
)
def test_count_state_tensors_of_optimizers(group: dict[str, object], count: int) -> None:
    """An optimizer that is not known counts as Adam."""
    assert warm_memory.count_state_tensors(group) == count


@pytest.mark.parametrize(("expected_bytes", "is_reused"), [(BYTES, True), (BYTES // 2, False)])
def test_received_state_goes_into_prepared_slot(
    expected_bytes: int, is_reused: bool, client: SlotClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that is too small is freed; the restore creates another."""
    monkeypatch.setattr(slot_memory, "SMALL_SLOT_BYTES", 0)
    prepare({}, expected_bytes, client)
    assert client.control_block.read_slots()
    wait_for(lambda: len(client.list_writable(expected_bytes)) == SLOT_COUNT, "the pages of all slots")
    prepared = {(state.index, state.serial) for state in client.control_block.read_slots()}
    manifest = Manifest("job", "n0", 0, 1, 1, Position(0, 1, 1, 1), 0.0, "test", {}, file_bytes=BYTES)
    opened = open_for_peers(client, manifest)
    assert opened.slot is not None
    assert ((opened.slot.index, opened.slot.serial) in prepared) == is_reused
    if not is_reused:
        assert not prepared & {(s.index, s.serial) for s in client.control_block.read_slots()}


def test_only_the_local_leader_reserves_slots(client: SlotClient) -> None:
    """The other ranks of its node map them."""
    client.is_local_leader = False
    prepare({}, BYTES, client)
    assert not client.control_block.read_slots()
