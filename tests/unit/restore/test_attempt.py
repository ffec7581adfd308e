"""The ranks of a world restore from every tier, or refuse to."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from elastic_resume import constants
from elastic_resume.archive.archive import Archive
from elastic_resume.archive.entries import ArchivedCheckpoint
from elastic_resume.checkpoint import reader
from elastic_resume.checkpoint.layout import header_size
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.console import ByteProgress
from elastic_resume.errors import CorruptError, MachineError, UnreadableError
from elastic_resume.policy.resume_plan import SavedState
from elastic_resume.ranks.collectives import Collectives
from elastic_resume.restore import attempt, coordinator
from elastic_resume.restore.attempt import RestoreAttempt, _StateLoader
from elastic_resume.restore.sources import ArchiveSource, DiskSource, OpenedState
from elastic_resume.restore.streaming import StreamingBuffer
from elastic_resume.restore.transfer import BlockReader, BlockServer, BlockTable
from elastic_resume.slots.ipc import SlotClient
from elastic_resume.slots.slot_memory import Slot
from elastic_resume.state import state_dict
from tests.support import resumer
from tests.support.processes import wait_for
from tests.support.thread_ranks import run_ranks

pytestmark = pytest.mark.slow

Results = list[dict[str, Any]]  # of each rank
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Case:
    """One restore: the states on each node before it, and a check of all ranks' results.

    `nodes` has one letter per rank: `aab` is two ranks on node a, one on b.
    """

    nodes: str
    states_by_node: dict[str, Any]
    env: dict[str, str]
    check: Callable[[Results, Path], None]


CASES: dict[str, Case] = {}


def case(
    nodes: str, states_by_node: dict[str, Any], env: dict[str, str] | None = None
) -> Callable[[Any], Any]:
    """Add a case with the decorated check."""

    def add(check: Any) -> Any:
        CASES[f"{check.__name__}-{len(CASES)}"] = Case(nodes, states_by_node, env or {}, check)
        return check

    return add


@case("aa", {"a": {"disk": [[1, 9]]}})
def all_local_ranks_load_from_slot_filled_from_disk(results: Results, _: Path) -> None:
    """The checkpoint is read once, and is a snapshot afterwards."""
    for result in results:
        assert (result["source_node"], result["source_tier"]) == ("a", "disk")
        assert (result["manifest_step"], result["on_disk"]) == (9, True)
        assert (result["values"], result["buffer"], result["held"]) == ([9.0], 100.0, [1, 9])


@case("aabb", {"a": {"memory": [2, 9], "disk": [[2, 5]]}, "b": {"disk": [[1, 5]]}})
def lacking_node_receives_snapshot_and_commits_it(results: Results, _: Path) -> None:
    """Its two ranks load while it arrives; older checkpoints are passed over."""
    for result in results:
        assert (result["step"], result["source_tier"], result["receiving_nodes"]) == (9, "memory", ["b"])
        assert (result["values"], result["buffer"], result["held"]) == ([9.0], 100.0, [2, 9])
    assert results[2]["disk"] == [[2, 9], [1, 5]]
    assert [result["commit_requested"] for result in results] == [False, False, True, True]


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


@case("aa", {"a": {"disk": [[1, 9]], "slots": False}})
def all_local_ranks_map_checkpoint_without_slots(results: Results, _: Path) -> None:
    """Each verifies it."""
    for result in results:
        assert (result["values"], result["buffer"], result["held"]) == ([9.0], 100.0, None)


@case("aabbc", {"a": {"disk": [[1, 9]], "slots": False}, "b": {"slots": False}, "c": {}})
def node_without_slots_maps_checkpoint_and_commits_received_state(results: Results, _: Path) -> None:
    """The lacking node's second rank reads the committed checkpoint. A node with slots commits later."""
    for result in results:
        assert (result["values"], result["buffer"]) == ([9.0], 100.0)
    assert [result["held"] for result in results] == [None] * 4 + [[1, 9]]
    assert [result["on_disk"] for result in results] == [True] * 4 + [False]
    assert results[2]["disk"] == [[1, 9]]


@case("abc", {"a": {"disk": [[1, 9]]}, "b": {"slots": False, "fail": "commit.before-rename=raise"}})
def failing_disk_of_receiver_without_slot_fails_all_ranks(results: Results, directory: Path) -> None:
    """The transfer completes first, also to the other receiver; no file is left, and no rank waits."""
    for result in results:
        assert "the device fails" in result["error"]
    assert not list((directory / "b" / "job" / "b").glob("*s000*"))


@case("aabc", {"a": {"disk": [[1, 9]], "flip": 0.9}, "b": {"disk": [[1, 9]]}})
def second_holder_replaces_corrupt_block(results: Results, directory: Path) -> None:
    """The source finds the block while it sends; the corrupt checkpoint is quarantined."""
    check_second_holder(results, directory, held=[1, 9])


NO_SLOTS = {"slots": False}


@case(
    "aabc",
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
        assert (result["values"], result["buffer"], result["held"]) == ([9.0], 102.0, held)
    aside = [path.name for path in (directory / "a" / "job" / "a" / "quarantine").iterdir()]
    assert sum(not name.endswith(".json") for name in aside) == 1
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


@case("ab", {"a": {**CHECKPOINT, "value": 7.0}, "b": CHECKPOINT}, {"ELASTIC_RESUME_CHECK_REPLICAS": "off"})
def source_values_are_used_with_check_replicas_off(results: Results, _: Path) -> None:
    """Nodes that round differently always differ; nothing is called corrupt."""
    for result in results:
        assert (result["source_node"], result["receiving_nodes"], result["values"]) == ("a", ["b"], [7.0])
    assert [result["disk"] for result in results] == [[[2, 9]]] * 2


OTHER_HOST = {constants.ENV_LOCAL_HOST: "192.0.2.7"}


@case("ab", {"a": {"disk": [[1, 9]]}, "b": {}}, {**OTHER_HOST, "ELASTIC_RESUME_TRANSFER_ADDR": "lo"})
def chosen_interface_is_used(results: Results, _: Path) -> None:
    """The host's own address would be wrong."""
    for result in results:
        assert (result["values"], result["receiving_nodes"]) == ([9.0], ["b"])


@case("abb", {"a": {"disk": [[1, 9]]}, "b": {}}, OTHER_HOST)
def node_that_cannot_listen_fails_all_ranks(results: Results, _: Path) -> None:
    """The error names the address. The second rank of a node that receives waits for no byte."""
    for result in results[:2]:
        assert "cannot listen at 192.0.2.7 to send the state" in result["error"]
    assert "the local leader could not bring the state" in results[2]["error"]


def run_case(case: Case, directory: Path) -> Results:
    """Return the results of all ranks; no server of blocks is left."""

    def resume(collectives: Collectives) -> dict[str, Any]:
        node = case.nodes[collectives.rank]
        own = {"ELASTIC_RESUME_CKPT_DIR": str(directory / node), "ELASTIC_RESUME_NODE_NAME": node}
        return resumer.resume(collectives, {**case.env, **own}, case.states_by_node)  # of separate disks

    results = run_ranks(len(case.nodes), resume)
    wait_for(lambda: not any("elastic-resume-serve" in t.name for t in threading.enumerate()), "the servers")
    return results


@pytest.mark.parametrize("name", CASES)
def test_ranks_restore_or_refuse(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the case says."""
    case = CASES[name]
    for key, value in case.env.items():
        monkeypatch.setenv(key, value)
    case.check(run_case(case, tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("nodes", "broken"), [("a", ""), ("aa", ""), ("aabc", ""), ("aabc", "b"), ("aabc", "c")]
)
def test_nodes_read_an_archived_state_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: str, broken: str
) -> None:
    """Each block is read once, by different nodes; the first reads what a node of `broken` cannot."""
    reads: list[tuple[str, int]] = []
    find_reader, read_block = ArchiveSource.find_reader, Archive.read_block
    nodes_by_archive = {}

    def note_node(source: ArchiveSource, key: str) -> BlockReader | None:
        nodes_by_archive[source._archive] = source._context.node
        return find_reader(source, key)

    def note_read(archive: Archive, archived: ArchivedCheckpoint, index: int, into: memoryview) -> None:
        node = nodes_by_archive.get(archive, "a")
        if node == broken:
            raise UnreadableError("made up")
        reads.append((node, index))
        read_block(archive, archived, index, into)

    monkeypatch.setattr(ArchiveSource, "find_reader", note_node)
    monkeypatch.setattr(Archive, "read_block", note_read)
    (tmp_path / "store").mkdir()
    env = {"ELASTIC_RESUME_ARCHIVE": str(tmp_path / "store")}
    for result in run_case(Case(nodes, {"a": {"archive": [1, 9]}}, env, lambda *_: None), tmp_path):
        assert (result["source_node"], result["source_tier"], result["step"]) == ("a", "archive", 9)
        assert (result["values"], result["buffer"], result["held"]) == ([9.0], 100.0, [1, 9])
    others = sorted(set(nodes) - {"a", broken})
    assert sorted(index for _, index in reads) == list(range(len(reads)))
    assert sorted({node for node, _ in reads}) == ["a", *others]


def test_start_waits_for_an_archived_state_that_cannot_be_read_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The older one on a disk would lose steps; after minutes the start ends, and nothing has changed."""
    (tmp_path / "store").mkdir()
    env = {"ELASTIC_RESUME_ARCHIVE": str(tmp_path / "store")}
    states = {"a": {"disk": [[1, 5]], "archive": [1, 9]}}
    failures = iter([True] * 3)
    read_block = Archive.read_block

    def fail(archive: Archive, archived: ArchivedCheckpoint, index: int, into: memoryview) -> None:
        if next(failures, False):
            raise UnreadableError("503 SlowDown")
        read_block(archive, archived, index, into)

    monkeypatch.setattr(Archive, "read_block", fail)
    monkeypatch.setattr("elastic_resume.restore.coordinator.time.sleep", lambda _: None)
    caplog.set_level("INFO", "elastic_resume")
    for result in run_case(Case("ab", states, env, lambda *_: None), tmp_path):
        assert (result["source_tier"], result["step"], result["rejected"]) == ("archive", 9, [])
    assert "a newer state may be there: g000001-s0000000009 (in the archive): 503" in caplog.text
    assert "the archive can be read again." in caplog.text
    failures = iter([True] * 3)
    monkeypatch.setattr(coordinator, "ARCHIVE_PATIENCE_S", 0.0)
    states = {"c": {"disk": [[1, 5]], "archive": [2, 9]}}
    for result in run_case(Case("cd", states, env, lambda *_: None), tmp_path):
        assert "the archive could not be read for 0 min" in result["error"]
        assert result["disk"] in ([[1, 5]], [])


def test_archived_state_with_a_damaged_block_fails_on_all_nodes(tmp_path: Path) -> None:
    """Whoever reads it; the next older state is taken."""
    (tmp_path / "store").mkdir()
    env = {"ELASTIC_RESUME_ARCHIVE": str(tmp_path / "store")}
    states = {"a": {"disk": [[1, 5]], "archive": [1, 9], "flip_archived": 5}}
    for result in run_case(Case("abc", states, env, lambda *_: None), tmp_path):
        assert (result["source_node"], result["source_tier"], result["step"]) == ("a", "disk", 5)
        assert "do not match their digest" in str(result["rejected"])


@pytest.mark.parametrize("failing", ["open_for_peers", "BlockServer", "map_slot"])
def test_node_that_cannot_send_or_receive_fails_all_ranks(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has no memory, or cannot listen; or a rank cannot map the slot of its local leader."""
    map_slot = SlotClient.map_slot

    def fail(*_: object) -> NoReturn:
        raise MachineError("made up")

    def fail_on_b(table: BlockTable, node: str, host: str) -> BlockServer:
        return fail() if node == "b" else BlockServer(table, node, host)

    def map_on_leader(client: SlotClient, index: int, serial: int | None = None) -> Slot | None:
        return map_slot(client, index, serial) if client.is_local_leader else None

    if failing == "map_slot":
        monkeypatch.setattr(SlotClient, "map_slot", map_on_leader)
    else:
        monkeypatch.setattr(attempt, failing, fail if failing == "open_for_peers" else fail_on_b)
    states = {"a": {"disk": [[1, 9]]}, "b": {"disk": [[1, 9]]}}
    for result in run_case(Case("aabc", states, {}, lambda *_: None), tmp_path):
        text = "cannot map the snapshots of its node a" if failing == "map_slot" else "made up"
        assert text in result["error"]


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda running, _: running._errors.append(CorruptError("made up")), "made up"),
        (lambda _, loader: loader.tracked["model"][0].bias.data.zero_(), "rank 0 against rank 1"),
    ],
)
def test_damage_on_a_node_that_receives_ends_the_restore(
    damage: Callable[[RestoreAttempt, Any], None], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds no state to exclude, and the next plan would be the same. check-replicas is off."""
    load = RestoreAttempt._load_and_join_tasks

    def load_damaged(running: RestoreAttempt, opened: OpenedState | None, loader: _StateLoader) -> None:
        load(running, opened, loader)
        if running._context.node == "b":
            damage(running, loader)

    monkeypatch.setattr(RestoreAttempt, "_load_and_join_tasks", load_damaged)
    env = {"ELASTIC_RESUME_CHECK_REPLICAS": "off"}
    for result in run_case(Case("ab", {"a": {"disk": [[1, 9]]}}, env, lambda *_: None), tmp_path):
        assert error in result["error"]


def test_full_disk_is_logged_where_a_state_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training continues."""

    def refuse(node_dir: NodeDir, _: int) -> None:
        if node_dir.path.name == "b":
            raise MachineError("made up.")

    monkeypatch.setattr(NodeDir, "ensure_free_space", refuse)
    for result in run_case(Case("ab", {"a": {"disk": [[1, 9]]}}, {}, lambda *_: None), tmp_path):
        assert result["values"] == [9.0]
    assert [text[:16] for text in caplog.messages if "Training continues" in text] == ["node b: made up."]


def test_rank_that_is_alone_digests_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison with itself would delay the restart."""
    monkeypatch.setattr(state_dict, "digest_leaves", None)
    (result,) = run_case(Case("a", {"a": {"disk": [[1, 9]]}}, {}, lambda *_: None), tmp_path)
    assert result["values"] == [9.0]


@pytest.fixture
def may_advance(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have the reads of files stop behind the header, until the event is set."""
    read, event = reader.read_image, threading.Event()

    def read_slowly(path: Path, manifest: Manifest, memory: memoryview, advance: Advance) -> None:
        read(path, manifest, memory, lambda _: None)
        advance(header_size(memory[:8], len(memory)))
        assert event.wait(30)
        advance(len(memory))

    monkeypatch.setattr(reader, "read_image", read_slowly)
    return event


def test_local_ranks_use_no_byte_before_it_was_verified(
    may_advance: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the slot that they have mapped."""
    load, seen = _StateLoader.load, list[int]()

    def load_and_look(loader: _StateLoader, buffer: StreamingBuffer) -> None:
        if loader.local_rank == 1:
            seen.append(buffer.arrived_bytes() - len(buffer.layout.header))
            may_advance.set()
        load(loader, buffer)

    monkeypatch.setattr(_StateLoader, "load", load_and_look)
    for result in run_case(Case("aa", {"a": {"disk": [[1, 9]]}}, {}, lambda *_: None), tmp_path):
        assert result["values"] == [9.0]
    assert seen == [0]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (
            {"a": {"disk": [[1, 9]]}},
            {"node a: sending step 9 to b": True, "node b: receiving step 9 from node a": True},
        ),
        (
            {"a": {"disk": [[1, 9]]}, "b": {"memory": [1, 9]}},
            {"node a: loading step 9 from its disk": True, "node b: loading step 9 from its memory": False},
        ),
    ],
)
def test_each_node_shows_what_arrives_or_is_loaded(
    states: Any,
    expected: dict[str, bool],
    may_advance: threading.Event,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From memory it is the tensors, which are not all of the bytes."""
    shown: dict[str, tuple[Callable[[], int], int]] = {}

    def show(what: str, total_bytes: int, read_done: Callable[[], int]) -> ByteProgress:
        shown[what] = read_done, total_bytes
        if len(shown) == 2:
            may_advance.set()
        return ByteProgress(what, total_bytes, read_done)

    monkeypatch.setattr(attempt, "ByteProgress", show)
    run_case(Case("aab", states, {}, lambda *_: None), tmp_path)
    assert {what: read_done() == total for what, (read_done, total) in shown.items()} == expected


def test_one_rank_of_a_node_reads_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others use its slot."""
    open_state, opened = DiskSource.open, Counter[str]()

    def open_and_count(source: DiskSource, saved_state: SavedState) -> OpenedState:
        opened[source._context.node] += 1
        return open_state(source, saved_state)

    monkeypatch.setattr(DiskSource, "open", open_and_count)
    states = {"a": {"disk": [[1, 9]]}, "b": {"disk": [[1, 9]]}}
    for result in run_case(Case("aab", states, {}, lambda *_: None), tmp_path):
        assert (result["values"], result["buffer"]) == ([9.0], 100.0)
    assert opened == {"a": 1, "b": 1}


def test_failed_attempt_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would write into a slot that the next attempt may take."""
    read, run, reads, alive = reader.read_image, RestoreAttempt.run, Counter[str](), list[bool]()

    def read_until_cancelled(path: Path, manifest: Manifest, memory: memoryview, advance: Advance) -> None:
        reads[path.parent.name] += 1
        if path.parent.name == "a":
            raise CorruptError("made up")
        read(path, manifest, memory, lambda _: None)
        while reads["b"] == 1:
            advance(len(memory) - 1)
        advance(len(memory))

    def run_and_look(running: RestoreAttempt, tracked: Any) -> Any:
        result = run(running, tracked)
        alive.extend(task._thread.is_alive() for task in running._tasks)
        return result

    monkeypatch.setattr(reader, "read_image", read_until_cancelled)
    monkeypatch.setattr(RestoreAttempt, "run", run_and_look)
    states = {"a": {"disk": [[1, 9]]}, "b": {"disk": [[1, 9]]}}
    for result in run_case(Case("ab", states, {}, lambda *_: None), tmp_path):
        assert (result["source_node"], result["values"]) == ("b", [9.0])
    assert reads == {"a": 1, "b": 2}
    assert len(alive) > 2
    assert not any(alive)
