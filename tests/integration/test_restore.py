"""A few real ranks resume from every tier."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_resume import constants
from elastic_resume.checkpoint import reader
from elastic_resume.errors import CorruptError, PeerFailedError
from elastic_resume.restore.streaming import (
    WATERMARK_FAILED,
    BackgroundTask,
    LocalWatermark,
    Prefetcher,
    StreamingBuffer,
)
from tests.support import launch_ranks
from tests.support.checkpoint_samples import RUN, flip_bits, make_image, save_checkpoint
from tests.support.paths import SCRIPTS

JOB = SCRIPTS / "resumer.py"


def resume(directory: Path, nodes: list[str], wanted: dict[str, Any], **more: str) -> list[dict[str, Any]]:
    """Run tests/support/scripts/resumer.py with a rank on each of ``nodes``; ``more`` are variables."""
    env = [
        {
            "ELASTIC_RESUME_CKPT_DIR": str(directory / node),  # no node sees the disk of another
            "ELASTIC_RESUME_NODE_NAME": node,
            "LOCAL_RANK": str(nodes[:rank].count(node)),
            **more,
        }
        for rank, node in enumerate(nodes)
    ]
    done = launch_ranks.run_ranks(len(nodes), JOB, json.dumps(wanted), env=env)
    # The gloo of torch 2.10 prints its connections first.
    return [
        json.loads(rank.stdout.splitlines()[-1]) if rank.returncode == 0 else {"stderr": rank.stderr}
        for rank in done
    ]


@pytest.mark.cluster
def test_restore_loads_all_local_ranks_from_slot_filled_from_disk(tmp_path: Path) -> None:
    """Two ranks of one node: the checkpoint is read once, and is a snapshot afterwards."""
    for result in resume(tmp_path, ["a", "a"], {"a": {"disk": [[1, 9]]}}):
        assert (result["source_node"], result["source_tier"]) == ("a", "disk")
        assert (result["values"], result["buffer"], result["held"]) == ([9.0], 100.0, [1, 9])


@pytest.mark.cluster
def test_restore_sends_snapshot_to_lacking_node_which_commits_it(tmp_path: Path) -> None:
    """Its two ranks load while it arrives; older checkpoints are passed over."""
    wanted = {"a": {"memory": [2, 9], "disk": [[2, 5]]}, "b": {"disk": [[1, 5]]}}
    results = resume(tmp_path, ["a", "b", "b"], wanted)
    for result in results:
        assert (result["step"], result["source_tier"], result["receiving_nodes"]) == (9, "memory", ["b"])
        assert (result["values"], result["buffer"], result["held"]) == ([9.0], 100.0, [2, 9])
    assert results[1]["disk"] == [[2, 9], [1, 5]]


@pytest.mark.cluster
@pytest.mark.parametrize("second", ["memory", "disk"])
def test_restore_takes_blocks_from_all_holders_and_buffers_from_source(tmp_path: Path, second: str) -> None:
    """Buffers come from the lowest rank that wrote, also in the snapshots of the nodes that lacked them."""
    wanted = {"a": {"disk": [[1, 9]]}, "b": {"memory": [1, 9]} if second == "memory" else {"disk": [[1, 9]]}}
    results = resume(tmp_path, ["a", "b", "c", "d"], wanted)
    for result in results:
        assert (result["source_node"], result["receiving_nodes"]) == ("a", ["c", "d"])
        assert (result["values"], result["buffer"], result["held"]) == ([9.0], 100.0, [1, 9])
    assert [result["held_buffer"] for result in results] == [100.0, 101.0, 100.0, 100.0]


@pytest.mark.cluster
def test_restore_goes_on_after_lost_connection_and_damaged_block(tmp_path: Path) -> None:
    """The state is received once, and the plan stays."""
    wanted = {
        "a": {"disk": [[1, 9]], "fail": "transfer.send=raise@2"},
        "b": {"disk": [[1, 9]], "fail": "transfer.block=flip@3"},
    }
    for result in resume(tmp_path, ["a", "b", "c", "d"], wanted):
        assert (result["source_node"], result["receiving_nodes"], result["rejected"]) == ("a", ["c", "d"], [])
        assert (result["values"], result["buffer"], result["held"]) == ([9.0], 100.0, [1, 9])


@pytest.mark.cluster
def test_restore_without_slots_maps_checkpoints_and_commits_received_state(tmp_path: Path) -> None:
    """The lacking node's second rank reads the committed checkpoint."""
    none = {"slots": False}
    results = resume(tmp_path, ["a", "a", "b", "b"], {"a": {"disk": [[1, 9]], **none}, "b": none})
    for result in results:
        assert (result["values"], result["buffer"], result["held"]) == ([9.0], 100.0, None)
    assert (results[2]["disk"], results[2]["on_disk"]) == ([[1, 9]], True)


@pytest.mark.cluster
def test_restore_without_slot_fails_on_all_ranks_if_disk_fails(tmp_path: Path) -> None:
    """The transfer completes first, because all ranks load before the commit; no file is left."""
    wanted = {"a": {"disk": [[1, 9]]}, "b": {"slots": False, "fail": "commit.before-rename=raise"}}
    for result in resume(tmp_path, ["a", "b"], wanted):
        assert "the device fails" in result["error"]
    assert not list((tmp_path / "b" / "job" / "b").glob("*s000*"))


@pytest.mark.cluster
@pytest.mark.parametrize("slots", [True, False])
def test_restore_switches_to_second_holder_after_corrupt_block(tmp_path: Path, slots: bool) -> None:
    """The source finds the block while it sends; the corrupt checkpoint is quarantined."""
    wanted = {
        "a": {"disk": [[1, 9]], "flip": 0.9, "slots": slots},
        "b": {"disk": [[1, 9]], "slots": slots},
        "c": {"slots": slots},
    }
    for result in resume(tmp_path, ["a", "b", "c"], wanted):
        assert (result["source_node"], result["receiving_nodes"]) == ("b", ["a", "c"])
        assert [(copy["node"], "digest" in copy["reason"]) for copy in result["rejected"]] == [("a", True)]
        assert (result["values"], result["buffer"]) == ([9.0], 101.0)
        assert result["held"] == ([1, 9] if slots else None)
    aside = [path.name for path in (tmp_path / "a" / "job" / "a" / "quarantine").iterdir()]
    assert reader.checkpoint_name(1, 9) in aside


@pytest.mark.cluster
@pytest.mark.parametrize("older", [[[1, 5]], []])
def test_restore_after_corrupt_block_uses_older_checkpoint_or_fails(
    tmp_path: Path, older: list[list[int]]
) -> None:
    """Tensors of the corrupt one are overwritten, and no slot holds it. No rank waits or starts fresh."""
    for result in resume(tmp_path, ["a", "b"], {"a": {"disk": [*older, [1, 9]], "flip": 0.9}, "b": {}}):
        if older:
            assert (result["step"], [copy["step"] for copy in result["rejected"]]) == (5, [9])
            assert (result["values"], result["held"]) == ([5.0], [1, 5])
        else:
            assert "none can be loaded" in result["error"]
            assert result["held"] is None


@pytest.mark.cluster
def test_restore_rejects_damaged_snapshot_and_uses_other_copy(tmp_path: Path) -> None:
    """Its metadata is invalid, and no other node's copy is blamed."""
    wanted = {"a": {"memory": [2, 9], "disk": [[2, 5]], "hurt": "static_offset"}, "b": {"disk": [[2, 9]]}}
    for result in resume(tmp_path, ["a", "b"], wanted):
        assert (result["source_node"], result["receiving_nodes"], result["values"]) == ("b", ["a"], [9.0])
        assert [(copy["node"], copy["step"]) for copy in result["rejected"]] == [("a", 9)]
        assert result["held"] == [2, 9]


@pytest.mark.cluster
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_restore_discards_minority_replica_under_resume_from_majority(tmp_path: Path, tier: str) -> None:
    """The minority includes the lowest rank. Otherwise an error names the flag."""
    order = {"memory": [2, 9]} if tier == "memory" else {"disk": [[2, 9]]}
    wanted = {"a": {**order, "value": 7.0}, "b": order, "c": order}
    for result in resume(tmp_path / "stop", ["a", "b", "c"], wanted):
        assert "rank 0 against rank 1, 2" in result["error"]
        assert "ELASTIC_RESUME_ON_DIVERGENCE=resume-from-majority" in result["error"]
    majority = {constants.ENV_ON_DIVERGENCE: "resume-from-majority"}
    for result in resume(tmp_path / "go", ["a", "b", "c"], wanted, **majority):
        assert (result["source_node"], result["receiving_nodes"], result["values"]) == ("b", ["a"], [9.0])
        assert [(copy["node"], "most nodes" in copy["reason"]) for copy in result["rejected"]] == [
            ("a", True)
        ]
        assert result["held"] == [2, 9]


@pytest.mark.cluster
def test_restore_uses_source_values_with_check_replicas_off(tmp_path: Path) -> None:
    """Nodes that round differently always differ; nothing is called corrupt."""
    wanted = {"a": {"disk": [[2, 9]], "value": 7.0}, "b": {"disk": [[2, 9]]}}
    for result in resume(tmp_path, ["a", "b"], wanted, **{constants.ENV_CHECK_REPLICAS: "off"}):
        assert (result["source_node"], result["receiving_nodes"], result["values"]) == ("a", ["b"], [7.0])
        assert result["disk"] == [[2, 9]]


@pytest.mark.cluster
def test_restore_uses_chosen_interface_and_fails_clearly_without_address(tmp_path: Path) -> None:
    """A node that cannot listen ends the attempt on all ranks."""
    wanted: dict[str, Any] = {"a": {"disk": [[1, 9]]}, "b": {}}
    chosen = {constants.ENV_TRANSFER_ADDR: "lo", constants.ENV_LOCAL_HOST: "192.0.2.7"}
    for result in resume(tmp_path, ["a", "b"], wanted, **chosen):
        assert (result["values"], result["receiving_nodes"]) == ([9.0], ["b"])
    for result in resume(tmp_path / "2", ["a", "b"], wanted, **{constants.ENV_LOCAL_HOST: "192.0.2.7"}):
        assert "cannot listen at 192.0.2.7 to send the state" in result["error"]


@pytest.mark.cluster
def test_restore_ends_receivers_if_source_is_killed(tmp_path: Path) -> None:
    """The receivers fail with a connection error."""
    wanted = {"a": {"disk": [[1, 9]], "fail": "transfer.send=kill@9"}}
    results = resume(tmp_path, ["a", "b", "c"], wanted)
    for result in results[1:]:
        assert "onnection" in result["stderr"]


# ---- a buffer that is being filled ------------------------------------------------------------


@pytest.fixture
def arriving() -> Iterator[StreamingBuffer]:
    """Give a buffer of which nothing has arrived."""
    buffer = StreamingBuffer(memoryview(bytearray(make_image(1))), LocalWatermark())
    yield buffer
    buffer.fail(PeerFailedError("over"))


def test_streaming_buffer_returns_tensor_after_its_last_byte(arriving: StreamingBuffer) -> None:
    """It does not wait for later bytes; the shape is available after the header."""
    seen: list[object] = []
    header = len(make_image(1)) - 1  # more than the header, less than all
    reader = BackgroundTask("test", lambda: seen.append(float(arriving.get_tensor("model.weight").sum())))
    last = BackgroundTask("test", lambda: seen.append(arriving.get_tensor("model.mask").shape))
    stop = 4096 + 8 + 40 * 30 * 4
    arriving.advance(stop - 1)
    assert arriving.peek_tensor("model.weight").shape == (40, 30)
    assert not seen
    arriving.advance(stop)
    assert reader.join() is None
    assert len(seen) == 1
    arriving.advance(header + 1)
    assert last.join() is None
    assert len(seen) == 2


def test_streaming_buffer_raises_fillers_error_in_all_readers(arriving: StreamingBuffer) -> None:
    """Other processes see the failed watermark and raise a PeerFailedError."""
    error = CorruptError("block 3")
    readers = [BackgroundTask("test", lambda: arriving.get_tensor("model.mask")) for _ in range(2)]
    arriving.fail(error)
    assert [reader.join() for reader in readers] == [error, error]
    elsewhere = StreamingBuffer(arriving.memory, LocalWatermark(WATERMARK_FAILED))
    with pytest.raises(PeerFailedError, match="local leader"):
        elsewhere.wait_for_bytes(1)


def test_prefetcher_returns_separate_copies_and_raises_fillers_error(arriving: StreamingBuffer) -> None:
    """Objects with tied tensors do not share them."""
    copies = Prefetcher(["model.weight", "model.mask"], arriving.get_tensor)
    arriving.advance(len(arriving.memory) - 1)
    first, second = copies.make_tensor("model.weight"), copies.make_tensor("model.weight")
    first.zero_()
    kept = arriving.get_tensor("model.weight")
    assert torch.equal(second.view(torch.uint8), kept.view(torch.uint8))
    arriving.fail(CorruptError("block 3"))
    with pytest.raises(CorruptError, match="block 3"):
        copies.make_tensor("model.mask")
    copies.close()


def test_read_image_reports_progress_and_stops_at_corrupt_block(tmp_path: Path) -> None:
    """Reported bytes are verified; a cancelled buffer stops the read."""
    before = set(threading.enumerate())
    path = save_checkpoint(tmp_path, 1, 1)
    found = reader.quick_check(path, RUN)
    progress: list[int] = []
    into = memoryview(bytearray(found.file_bytes))
    reader.read_image(path, found, into, progress.append)
    assert progress == [*range(2048, found.file_bytes, 2048), found.file_bytes]
    assert into == make_image(1)
    flip_bits(path / "state.safetensors", 4 * 2048)
    progress.clear()
    with pytest.raises(CorruptError, match="bytes 8192 to 8977"):
        reader.read_image(path, found, into, progress.append)
    assert progress == [2048, 4096, 6144, 8192]
    stopped = StreamingBuffer(into, LocalWatermark())
    stopped.cancel()
    with pytest.raises(PeerFailedError):
        reader.read_image(path, found, into, stopped.advance)
    assert set(threading.enumerate()) <= before
