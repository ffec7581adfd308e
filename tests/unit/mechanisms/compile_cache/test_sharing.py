"""Test who sends artifacts to whom, what a receiver refuses, and when torch's artifacts are saved."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.compiler._cache import CacheInfo

from elastic_resume import constants
from elastic_resume.mechanisms.compile_cache import COMPILE_CACHE, artifact_file, sharing
from elastic_resume.mechanisms.compile_cache.artifact_file import ArtifactFile, Origin
from elastic_resume.mechanisms.compile_cache.sharing import CompileCache, Offer, Sending, plan_sendings
from elastic_resume.mechanisms.mechanism import WorkerContext
from tests.support.agent_parts import make_worker_context
from tests.support.thread_ranks import ThreadCollectives, run_ranks

ARTIFACTS = bytes(range(256)) * 4
Event = tuple[str, dict[str, Any]]


def make_info(*keys: str) -> CacheInfo:
    """Return torch's own record of artifacts."""
    info = CacheInfo()
    info.artifacts["inductor"] += keys
    return info


class FakeTorch:
    """Records what torch loads, and saves what a test says; a real compilation takes seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loaded: list[bytes] = []
        self.saved: tuple[bytes, CacheInfo] | None = None
        self.info: CacheInfo | None = make_info("a")
        self.saves = 0
        self.error: Exception | None = None
        monkeypatch.setattr(torch.compiler, "load_cache_artifacts", self.load)
        monkeypatch.setattr(torch.compiler, "save_cache_artifacts", self.save)
        monkeypatch.setitem(sys.modules, "torch._dynamo", torch)  # as in a process that has compiled

    def load(self, artifacts: bytes) -> CacheInfo | None:
        """Load."""
        if self.error is not None:
            raise self.error
        self.loaded.append(artifacts)
        return self.info

    def save(self) -> tuple[bytes, CacheInfo] | None:
        """Save."""
        if self.error is not None:
            raise self.error
        self.saves += 1
        return self.saved


@pytest.fixture(name="fake_torch")
def make_fake_torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """In a process that has loaded nothing."""
    return FakeTorch(monkeypatch)


def node_dir(directory: Path, node: int) -> Path:
    """Return the directory of a node."""
    path = directory / "job" / f"n{node}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def open_file(directory: Path, node: int) -> ArtifactFile:
    """Return the file of its first rank."""
    return ArtifactFile(node_dir(directory, node), 0, Origin.here("job"))


def make_context(
    directory: Path, collectives: ThreadCollectives, events: list[Event], *, local_rank: int = 0
) -> WorkerContext:
    """Return the context of a rank on a node of its own, or of the second one on a node."""

    def broadcast(tensors: Any, source_rank: int) -> None:
        for tensor in tensors:
            assert tensor.nbytes <= sharing.PIECE_BYTES
            collectives.broadcast(tensor, source_rank)

    return make_worker_context(
        node_dir(directory, collectives.rank - local_rank),
        rank=collectives.rank,
        local_rank=local_rank,
        world_size=collectives.size,
        generation=2,
        step=7,
        settings={"share_compile_cache": True},
        emit=lambda kind, **fields: events.append((kind, fields)),
        gather=collectives.gather,
        broadcast_tensors=broadcast,
    )


def exchange(directory: Path, ranks: int, *, second: int = -1, unwilling: int = -1) -> list[list[Event]]:
    """Let ranks begin a generation; each has its own node, but ``second`` is on that of the rank before.

    ``unwilling`` has no flag.
    """
    found: list[list[Event]] = [[] for _ in range(ranks)]

    def run(collectives: ThreadCollectives) -> None:
        rank = collectives.rank
        context = make_context(directory, collectives, found[rank], local_rank=int(rank == second))
        cache = CompileCache(context, sharing._Process(), takes_part=rank != unwilling)
        cache.exchange()
        cache.close()

    run_ranks(ranks, run)
    return found


def test_rank_without_artifacts_receives_those_of_the_lowest(
    tmp_path: Path, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces; it keeps them. The others load their own."""
    monkeypatch.setattr(sharing, "PIECE_BYTES", 100)
    open_file(tmp_path, 1).write(ARTIFACTS)
    open_file(tmp_path, 2).write(b"others")
    events = exchange(tmp_path, 3)
    assert [[fields["source_rank"] for _, fields in of_rank] for of_rank in events] == [[1], [None], [None]]
    assert events[0][0][0] == "compile-cache"
    assert (events[0][0][1]["bytes"], events[0][0][1]["artifacts"]) == (len(ARTIFACTS), 1)
    assert sorted(fake_torch.loaded) == sorted([ARTIFACTS, ARTIFACTS, b"others"])
    assert open_file(tmp_path, 0).read() == ARTIFACTS
    assert open_file(tmp_path, 2).read() == b"others"


def test_ranks_of_a_node_without_gpu_share_a_file(tmp_path: Path, fake_torch: FakeTorch) -> None:
    """They compile the same. The first writes it, and both load it."""
    open_file(tmp_path, 2).write(ARTIFACTS)
    exchange(tmp_path, 3, second=1)
    assert fake_torch.loaded == [ARTIFACTS] * 3
    assert [path.name for path in (node_dir(tmp_path, 0) / artifact_file.DIRECTORY).iterdir()] == ["rank0"]


def test_nobody_has_artifacts_and_nothing_is_sent(tmp_path: Path, fake_torch: FakeTorch) -> None:
    """The first start of a job."""
    assert exchange(tmp_path, 2) == [[], []]
    assert fake_torch.loaded == []


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda _: {"proof": "0" * 64}, "it does not prove the job's secret"),
        (lambda offer: {"sha256": "0" * 64, "proof": offer.proof}, "it does not prove the job's secret"),
        (lambda _: {"proof": ""}, "it does not prove the job's secret"),
        (lambda _: {"proof": "\u00e9"}, "it does not prove the job's secret"),
    ],
)
def test_artifacts_without_proof_are_not_loaded(
    tmp_path: Path,
    fake_torch: FakeTorch,
    damage: Any,
    reason: str,
    *,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither torch's gloo nor its store authenticates; the key is of the job's secret."""
    open_file(tmp_path, 1).write(ARTIFACTS)
    original = CompileCache._make_offer

    def make(cache: CompileCache, artifacts: bytes | None, is_new: bool) -> list[Any]:
        offer = Offer(*original(cache, artifacts, is_new))
        return list(offer._replace(**damage(offer)) if offer.size else offer)

    monkeypatch.setattr(CompileCache, "_make_offer", make)
    with caplog.at_level(logging.WARNING):
        exchange(tmp_path, 2)
    assert fake_torch.loaded == [ARTIFACTS]  # the source's own
    assert [record.message for record in caplog.records] == [
        f"the compile cache of rank 1 is not used: {reason}. The model is compiled."
    ]
    assert open_file(tmp_path, 0).read() is None


def test_piece_that_changes_on_its_way_is_noticed(
    tmp_path: Path, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its digest has the source's proof."""
    open_file(tmp_path, 1).write(ARTIFACTS)
    original = ThreadCollectives.broadcast

    def broadcast(collectives: ThreadCollectives, tensor: torch.Tensor, source_rank: int) -> None:
        original(collectives, tensor, source_rank)
        if collectives.rank == 0:
            tensor[5] += 1

    monkeypatch.setattr(ThreadCollectives, "broadcast", broadcast)
    exchange(tmp_path, 2)
    assert fake_torch.loaded == [ARTIFACTS]
    assert "the compile cache of rank 1 is not used: it was damaged on its way." in caplog.text


def test_proof_depends_on_key_of_the_jobs_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an agent the key is the job's name, which anybody may know."""
    proofs = []
    for key in ("", "ab" * 32, "cd" * 32):
        monkeypatch.setenv(constants.ENV_WORKER_KEY, key)
        context = make_context(tmp_path, run_ranks(1, lambda collectives: collectives)[0], [])
        proofs.append(CompileCache(context)._prove("digest"))
    assert len(set(proofs)) == 3


def offer(origin: str = "here", local_rank: int = 0, *, lacks: bool = False, size: int = 0) -> Offer:
    """Return what a rank offers."""
    return Offer(origin, local_rank, lacks, size)


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ([], []),
        ([offer(lacks=True), offer(lacks=True)], []),
        ([offer(size=9), offer(lacks=True), offer(lacks=True)], [Sending(0, (1, 2))]),
        ([offer("other", size=9), offer(lacks=True), offer(size=8)], [Sending(2, (1,))]),
        ([offer("other", size=9), offer(lacks=True)], []),
        (  # GPUs: of its own local rank, else of the lowest rank
            [offer(size=9), offer(size=9, local_rank=1), offer(lacks=True), offer(lacks=True, local_rank=1)],
            [Sending(0, (2,)), Sending(1, (3,))],
        ),
        ([offer(size=9), offer(lacks=True, local_rank=3)], [Sending(0, (1,))]),
        ([offer(size=artifact_file.MAX_BYTES + 1), offer(lacks=True)], []),
        ([offer(size=-1), offer(lacks=True)], []),
    ],
)
def test_source_is_of_the_same_origin(offers: list[Offer], expected: list[Sending]) -> None:
    """All ranks compute the same."""
    assert plan_sendings(offers) == expected


@pytest.mark.parametrize("value", [None, [], ["a", 1, True, 5, "b"], ["a", 1, 1, 5, "b", "c"], {"a": 1}])
def test_malformed_offer_counts_as_none(value: Any) -> None:
    """It is JSON of a peer."""
    assert sharing._parse_offer(value) == Offer("", 0, lacks=False)


class Job:
    """A single rank with a generation after the other in one process."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.events, self.process = directory, list[Event](), sharing._Process()
        self.cache = self.begin()

    def begin(self) -> CompileCache:
        """Begin a generation."""
        collectives = run_ranks(1, lambda collectives: collectives)[0]
        self.cache = CompileCache(make_context(self.directory, collectives, self.events), self.process)
        self.cache.exchange()
        return self.cache

    def read(self) -> bytes | None:
        """Return what is on disk once all writes are done."""
        self.cache.close()
        return open_file(self.directory, 0).read()


def test_artifacts_are_saved_when_torch_has_new_ones(tmp_path: Path, fake_torch: FakeTorch) -> None:
    """At the steps 1, 2, 4, ...; equal ones are not written again. They are loaded once per process."""
    job = Job(tmp_path)
    job.cache.end_step(1)
    assert job.read() is None  # nothing was compiled
    fake_torch.saved = b"first", make_info("a")
    job.cache.end_step(2)
    assert job.read() == b"first"
    fake_torch.saved = b"not written", make_info("a")
    for step in range(3, 1025):
        job.cache.end_step(step)
    assert job.read() == b"first"
    assert fake_torch.saves == 11  # of 1024 steps
    fake_torch.saved = b"second", make_info("a", "b")
    for step in range(1025, 2049):
        job.cache.end_step(step)
    assert job.read() == b"second"
    assert fake_torch.saves == 12
    job.begin()
    assert fake_torch.loaded == []
    fake_torch.saved = b"third", make_info("a", "b", "c")
    job.begin().end_step(2050)
    assert job.read() == b"third"


def test_new_process_loads_the_nodes_own_and_keeps_what_it_does_not_use_yet(
    tmp_path: Path, fake_torch: FakeTorch
) -> None:
    """An evaluation is compiled late: the training step alone must not replace the file."""
    open_file(tmp_path, 0).write(ARTIFACTS)
    fake_torch.info = make_info("step", "evaluation")
    job = Job(tmp_path)
    assert fake_torch.loaded == [ARTIFACTS]
    fake_torch.saved = b"less", make_info("step")
    job.cache.end_step(1)
    assert job.read() == ARTIFACTS
    assert [fields["source_rank"] for _, fields in job.events] == [None]


def test_failures_cost_a_compilation_and_not_the_job(
    tmp_path: Path, fake_torch: FakeTorch, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch may raise anything, and the disk may be full. Each is logged once."""
    open_file(tmp_path, 0).write(ARTIFACTS)
    fake_torch.error = KeyError("kind")
    job = Job(tmp_path)
    for step in (1, 2):
        job.cache.end_step(step)
    fake_torch.error, fake_torch.info = None, None
    job.process = sharing._Process()
    job.begin()
    fake_torch.saved = b"x" * 101, make_info("a")
    monkeypatch.setattr(sharing, "MAX_BYTES", 100)
    job.cache.end_step(1)
    monkeypatch.setattr(sharing, "MAX_BYTES", 1000)
    path = open_file(tmp_path, 0).path
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("a file")
    job.cache.end_step(2)
    job.cache.close()
    assert job.events == []
    beginnings = [
        "compile artifacts of 1.02 kB were not loaded: KeyError('kind'). The model is compiled.",
        "compile artifacts were not saved: KeyError('kind').",
        "compile artifacts of 1.02 kB were not loaded: torch cannot read them. The model is compiled.",
        "compile artifacts of 101 B were not saved: at most 100 B are kept.",
        "compile artifacts were not saved: cannot create",
    ]
    messages = [record.message for record in caplog.records]
    assert len(messages) == len(beginnings)
    assert [text[: len(start)] for text, start in zip(messages, beginnings, strict=True)] == beginnings


def test_damaged_file_is_refused_and_replaced(
    tmp_path: Path, fake_torch: FakeTorch, caplog: pytest.LogCaptureFixture
) -> None:
    """The node lacks artifacts then, as an empty one does."""
    file = open_file(tmp_path, 0)
    file.write(ARTIFACTS)
    file.path.write_bytes(file.path.read_bytes()[:-1])
    job = Job(tmp_path)
    assert fake_torch.loaded == []
    assert f"the compile cache {file.path} is not used: it is damaged" in caplog.text
    fake_torch.saved = b"new", make_info("a")
    job.cache.end_step(1)
    assert job.read() == b"new"


@pytest.mark.parametrize("has_file", [False, True])
def test_node_without_the_flag_runs_no_code_of_others(
    tmp_path: Path, fake_torch: FakeTorch, caplog: pytest.LogCaptureFixture, has_file: bool
) -> None:
    """Rank 0's flag lets all ranks meet; it does not decide for another node what that one executes."""
    open_file(tmp_path, 0).write(ARTIFACTS)
    if has_file:
        open_file(tmp_path, 1).write(b"others")
    events = exchange(tmp_path, 3, unwilling=1)
    assert [len(of_rank) for of_rank in events] == [1, 0, 1]
    assert fake_torch.loaded == [ARTIFACTS] * 2
    assert (open_file(tmp_path, 1).read() == b"others") is has_file
    assert "node n1 has no --share-compile-cache" in caplog.text


@pytest.mark.parametrize(
    ("variable", "of_rank0", "expected"),
    [
        (None, True, True),
        ("true", True, True),
        ("", True, False),
        ("off", True, False),
        ("true", False, None),
    ],
)
def test_rank_takes_part_with_a_flag_of_its_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    of_rank0: bool,
    expected: bool | None,
) -> None:
    """An agent without the flag sets an empty variable."""
    asked: list[bool] = []
    monkeypatch.setattr(sharing, "observe", lambda _, takes_part: asked.append(takes_part))
    name = "ELASTIC_RESUME_SHARE_COMPILE_CACHE"
    monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(name, variable)
    context = make_context(tmp_path, ThreadCollectives(0, [None], threading.Barrier(1)), [])
    assert COMPILE_CACHE.make_observer is not None
    COMPILE_CACHE.make_observer(context._replace(settings={"share_compile_cache": of_rank0}))
    assert asked == ([] if expected is None else [expected])
