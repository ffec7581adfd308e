"""A few real ranks resume from every tier."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


Results = list[dict[str, Any]]  # of each rank


@dataclass(frozen=True)
class Case:
    """One restore: the states on each node before it, and a check of all ranks' results.

    `nodes` has one letter per rank: `aab` is two ranks on node a, one on b.
    """

    nodes: str
    states_by_node: dict[str, Any]
    env: dict[str, str]
    check: Callable[[Results, Path], None]
    ends_processes: bool


CASES: dict[str, Case] = {}


def case(
    nodes: str,
    states_by_node: dict[str, Any],
    env: dict[str, str] | None = None,
    *,
    ends_processes: bool = False,
) -> Callable[[Any], Any]:
    """Add a case with the decorated check. Processes do the cases of their number of ranks in turn."""

    def add(check: Any) -> Any:
        name = f"{check.__name__}-{len(CASES)}"
        CASES[name] = Case(nodes, states_by_node, env or {}, check, ends_processes)
        return check

    return add


@pytest.mark.cluster
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_restore_or_refuse_as_each_case_says(tmp_path: Path, size: int) -> None:
    """Each case has directories of its own. A case that ends the processes is the last one."""
    cases = [(name, case) for name, case in CASES.items() if len(case.nodes) == size]
    cases.sort(key=lambda item: item[1].ends_processes)
    encoded = []
    for name, case in cases:
        env = [
            {
                "ELASTIC_RESUME_CKPT_DIR": str(tmp_path / name / node),  # no node sees another's disk
                "ELASTIC_RESUME_NODE_NAME": node,
                "LOCAL_RANK": str(case.nodes[:rank].count(node)),
                **case.env,
            }
            for rank, node in enumerate(case.nodes)
        ]
        encoded.append({"states_by_node": case.states_by_node, "env": env})
    done = launch_ranks.run_ranks(size, JOB, json.dumps(encoded))
    # The gloo of torch 2.10 prints its connections too.
    found = [[json.loads(line) for line in rank.stdout.splitlines() if line.startswith("{")] for rank in done]
    for number, (name, case) in enumerate(cases):
        results = [
            results[number] if number < len(results) else {"stderr": rank.stderr}
            for results, rank in zip(found, done, strict=True)
        ]
        try:
            case.check(results, tmp_path / name)
        except Exception as error:
            raise AssertionError(f"case {name}: {type(error).__name__}: {error}") from error


@case("aa", {"a": {"disk": [[1, 9]]}})
def all_local_ranks_load_from_slot_filled_from_disk(results: Results, _: Path) -> None:
    """The checkpoint is read once, and is a snapshot afterwards."""
    for result in results:
        assert (result["source_node"], result["source_tier"]) == ("a", "disk")
        assert (result["values"], result["buffer"], result["held"]) == ([9.0], 100.0, [1, 9])


@case("abb", {"a": {"memory": [2, 9], "disk": [[2, 5]]}, "b": {"disk": [[1, 5]]}})
def lacking_node_receives_snapshot_and_commits_it(results: Results, _: Path) -> None:
    """Its two ranks load while it arrives; older checkpoints are passed over."""
    for result in results:
        assert (result["step"], result["source_tier"], result["receiving_nodes"]) == (9, "memory", ["b"])
        assert (result["values"], result["buffer"], result["held"]) == ([9.0], 100.0, [2, 9])
    assert results[1]["disk"] == [[2, 9], [1, 5]]


@case("abcd", {"a": {"disk": [[1, 9]]}, "b": {"memory": [1, 9]}})
@case("abcd", {"a": {"disk": [[1, 9]]}, "b": {"disk": [[1, 9]]}})
def blocks_come_from_all_holders_and_buffers_from_source(results: Results, _: Path) -> None:
    """Buffers come from the lowest rank that wrote, also in the snapshots of the nodes that lacked them."""
    for result in results:
        assert (result["source_node"], result["receiving_nodes"]) == ("a", ["c", "d"])
        assert (result["values"], result["buffer"], result["held"]) == ([9.0], 100.0, [1, 9])
    assert [result["held_buffer"] for result in results] == [100.0, 101.0, 100.0, 100.0]


@case(
    "abcd",
    {
        "a": {"disk": [[1, 9]], "fail": "transfer.send=raise@2"},
        "b": {"disk": [[1, 9]], "fail": "transfer.block=flip@3"},
    },
)
def lost_connection_and_damaged_block_do_not_change_plan(results: Results, _: Path) -> None:
    """The state is received once."""
    for result in results:
        assert (result["source_node"], result["receiving_nodes"], result["rejected"]) == ("a", ["c", "d"], [])
        assert (result["values"], result["buffer"], result["held"]) == ([9.0], 100.0, [1, 9])


@case("aabb", {"a": {"disk": [[1, 9]], "slots": False}, "b": {"slots": False}})
def node_without_slots_maps_checkpoint_and_commits_received_state(results: Results, _: Path) -> None:
    """The lacking node's second rank reads the committed checkpoint."""
    for result in results:
        assert (result["values"], result["buffer"], result["held"]) == ([9.0], 100.0, None)
    assert (results[2]["disk"], results[2]["on_disk"]) == ([[1, 9]], True)


@case("abc", {"a": {"disk": [[1, 9]]}, "b": {"slots": False, "fail": "commit.before-rename=raise"}})
def failing_disk_of_receiver_without_slot_fails_all_ranks(results: Results, directory: Path) -> None:
    """The transfer completes first, also to the other receiver; no file is left, and no rank waits."""
    for result in results:
        assert "the device fails" in result["error"]
    assert not list((directory / "b" / "job" / "b").glob("*s000*"))


@case("abc", {"a": {"disk": [[1, 9]], "flip": 0.9}, "b": {"disk": [[1, 9]]}})
def second_holder_replaces_corrupt_block(results: Results, directory: Path) -> None:
    """The source finds the block while it sends; the corrupt checkpoint is quarantined."""
    check_second_holder(results, directory, held=[1, 9])


NO_SLOTS = {"slots": False}


@case(
    "abc",
    {"a": {"disk": [[1, 9]], "flip": 0.9, **NO_SLOTS}, "b": {"disk": [[1, 9]], **NO_SLOTS}, "c": NO_SLOTS},
)
def second_holder_replaces_corrupt_block_without_slots(results: Results, directory: Path) -> None:
    """The checkpoints are mapped."""
    check_second_holder(results, directory, held=None)


def check_second_holder(results: Results, directory: Path, held: list[int] | None) -> None:
    """Check that node b was the source, and that node a has quarantined its checkpoint."""
    for result in results:
        assert (result["source_node"], result["receiving_nodes"]) == ("b", ["a", "c"])
        found = [(copy["node"], "digest" in copy["reason"]["detail"]) for copy in result["rejected"]]
        assert found == [("a", True)]
        assert (result["values"], result["buffer"], result["held"]) == ([9.0], 101.0, held)
    aside = [path.name for path in (directory / "a" / "job" / "a" / "quarantine").iterdir()]
    assert reader.checkpoint_name(1, 9) in aside


@case("ab", {"a": {"disk": [[1, 5], [1, 9]], "flip": 0.9}, "b": {}})
def older_checkpoint_replaces_corrupt_one(results: Results, _: Path) -> None:
    """Tensors of the corrupt one are overwritten, and no slot holds it."""
    for result in results:
        assert (result["step"], [copy["step"] for copy in result["rejected"]]) == (5, [9])
        assert (result["values"], result["held"]) == ([5.0], [1, 5])


@case("ab", {"a": {"disk": [[1, 9]], "flip": 0.9}, "b": {}})
def only_corrupt_checkpoint_fails_all_ranks(results: Results, _: Path) -> None:
    """No rank waits or starts fresh."""
    for result in results:
        assert "none can be loaded" in result["error"]
        assert result["held"] is None


@case("ab", {"a": {"memory": [2, 9], "disk": [[2, 5]], "hurt": "static_offset"}, "b": {"disk": [[2, 9]]}})
def other_copy_replaces_damaged_snapshot(results: Results, _: Path) -> None:
    """Its metadata is invalid, and no other node's copy is blamed."""
    for result in results:
        assert (result["source_node"], result["receiving_nodes"], result["values"]) == ("b", ["a"], [9.0])
        assert [(copy["node"], copy["step"]) for copy in result["rejected"]] == [("a", 9)]
        assert result["held"] == [2, 9]


SNAPSHOT, CHECKPOINT = {"memory": [2, 9]}, {"disk": [[2, 9]]}


@case("abc", {"a": {**SNAPSHOT, "value": 7.0}, "b": SNAPSHOT, "c": SNAPSHOT})
def minority_replica_is_refused(results: Results, _: Path) -> None:
    """The error names the ranks on either side."""
    for result in results:
        assert "rank 0 against rank 1, 2" in result["error"]


@case("ab", {"a": {**CHECKPOINT, "value": 7.0}, "b": CHECKPOINT}, {constants.ENV_CHECK_REPLICAS: "off"})
def source_values_are_used_with_check_replicas_off(results: Results, _: Path) -> None:
    """Nodes that round differently always differ; nothing is called corrupt."""
    for result in results:
        assert (result["source_node"], result["receiving_nodes"], result["values"]) == ("a", ["b"], [7.0])
    assert [result["disk"] for result in results] == [[[2, 9]]] * 2


OTHER_HOST = {constants.ENV_LOCAL_HOST: "192.0.2.7"}


@case("ab", {"a": {"disk": [[1, 9]]}, "b": {}}, {**OTHER_HOST, constants.ENV_TRANSFER_ADDR: "lo"})
def chosen_interface_is_used(results: Results, _: Path) -> None:
    """The host's own address would be wrong."""
    for result in results:
        assert (result["values"], result["receiving_nodes"]) == ([9.0], ["b"])


@case("ab", {"a": {"disk": [[1, 9]]}, "b": {}}, OTHER_HOST)
def node_that_cannot_listen_fails_all_ranks(results: Results, _: Path) -> None:
    """The error names the address."""
    for result in results:
        assert "cannot listen at 192.0.2.7 to send the state" in result["error"]


@case("abc", {"a": {"disk": [[1, 9]], "fail": "transfer.send=kill@9"}}, ends_processes=True)
def killed_source_ends_receivers(results: Results, _: Path) -> None:
    """They fail with a connection error."""
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
    copies = Prefetcher(["model.weight", "model.mask"], lambda name: arriving.get_tensor(name).clone())
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
