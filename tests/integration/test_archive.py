"""The archive in a real S3 server over HTTP, in a directory and through fsspec: faults, kills, two jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import elastic_resume as er
from elastic_resume import cli, constants
from elastic_resume.archive import obstore_store
from elastic_resume.archive.address import parse_address
from elastic_resume.archive.archive import Archive, open_archive, open_store, try_store
from elastic_resume.archive.entries import ArchivedCheckpoint, BadEntry
from elastic_resume.archive.store import Store, StoredName
from elastic_resume.commands.doctor import check_archive
from elastic_resume.errors import (
    ArchiveError,
    ConfigError,
    CorruptError,
    NoValidCheckpointError,
    TornError,
    UnreadableError,
)
from elastic_resume.milestone import Milestone
from tests.support.archives import archive_step, begin, commit, put_parts
from tests.support.checkpoint_samples import RUN, make_image
from tests.support.s3 import BUCKET, Fault, FaultProxy, s3_environment, serve_s3

pytestmark = pytest.mark.slow

ADDRESS = f"s3://{BUCKET}/some/prefix"
IN_FILES = pytest.param("file", marks=pytest.mark.soak)  # unit/archive/test_archive.py has these in files
# Archive steps beginning with argv[2] until SIGTERM or a second writer; print each that is committed.
WRITER = """
import sys
from elastic_resume.archive.archive import open_archive
from elastic_resume.errors import SecondWriterError
from tests.support.archives import ArchivingJob, commit, put_parts
from tests.support.checkpoint_samples import RUN, make_image
archive, step = open_archive(sys.argv[1], RUN), int(sys.argv[2])
job = ArchivingJob(archive)
print("started", flush=True)
sys.stdin.readline()
while step < int(sys.argv[3]):
    try:
        attempt = job.begin(step)
        put_parts(archive, attempt, make_image(step))
        candidates = archive.list_attempts()
        commit(archive, attempt)
    except SecondWriterError:
        print("second-writer", flush=True)
        break
    print(step, flush=True)
    archive.sweep(candidates)
    archive.prune(3)
    step += 2
"""


LASTING_RETRIES = obstore_store._LASTING_RETRIES


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    """A server for all tests here; each has a prefix of its own."""
    with serve_s3() as port:
        yield port


@pytest.fixture
def proxy(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before the server, to which the variables of this process point; retries are few and short."""
    monkeypatch.setattr(obstore_store, "_RETRIES", 1)
    monkeypatch.setattr(obstore_store, "_LASTING_RETRIES", 1)
    proxy = FaultProxy(s3_port)
    with proxy.serve() as port:
        for name, text in s3_environment(port).items():
            monkeypatch.setenv(name, text)
        yield proxy


@pytest.fixture
def archive(proxy: FaultProxy, tmp_path: Path) -> Archive:
    """An archive in S3 with step 5."""
    assert proxy.port
    archive = open_archive(f"{ADDRESS}/{tmp_path.name}", RUN)
    archive_step(archive, 5)
    return archive


@pytest.fixture(params=["s3", "file", "memory"])
def address(request: pytest.FixtureRequest, proxy: FaultProxy, tmp_path: Path) -> str:
    """An address of each kind of store."""
    assert proxy.port
    (tmp_path / "archive").mkdir()
    return {
        "s3": f"s3://{BUCKET}/{tmp_path.name}",
        "file": f"file://{tmp_path}/archive",
        "memory": f"memory://{tmp_path.name}/archive",
    }[request.param]


def steps(archive: Archive) -> list[int]:
    """Return the steps that a reader sees, newest first, each read whole."""
    entries = archive.list_checkpoints(64)
    assert not [entry for entry in entries if isinstance(entry, BadEntry)]
    found = [entry for entry in entries if isinstance(entry, ArchivedCheckpoint)]
    assert all(archive.read_image(entry) == make_image(entry.version[1]) for entry in found)
    return [entry.version[1] for entry in found]


def get(store: Store, name: str, start: int = 0, size: int = 10) -> bytes:
    """Return bytes of an object that exists."""
    data = store.get_range(name, start, size)
    assert data is not None
    return bytes(data)


# ---- the six verbs -------------------------------------------------------------------------------------


def test_every_store_has_the_same_verbs(address: str) -> None:
    """What one store does at the edges, all do."""
    store: Store = open_store(parse_address("--archive", address))
    assert store.list("a") == []
    assert store.head("a/x") is None
    assert store.get_range("a/x", 0, 10) is None
    store.delete("a/x")
    store.put("a/x", memoryview(b"0123456789"))
    store.put("a/b/y", b"")
    assert store.head("a/x") == 10
    assert store.list("a") == [StoredName("b", True), StoredName("x", False)]
    assert store.list("") == [StoredName("a", True)]
    for start, size, wanted in (
        (2, 3, b"234"),
        (2, 100, b"23456789"),
        (10, 5, b""),
        (50, 5, b""),
        (3, 0, b""),
    ):
        assert get(store, "a/x", start, size) == wanted
    store.put("a/x", b"new")
    assert get(store, "a/x") == b"new"
    if try_store(store):
        assert not store.put_if_absent("a/x", b"other")
        assert store.put_if_absent("a/z", b"first")
        assert not store.put_if_absent("a/z", b"second")
        assert get(store, "a/z") == b"first"
        store.delete("a/z")
    store.delete("a/x")
    store.delete("a/b/y")
    assert store.list("a") == []


def test_every_store_holds_an_archive(address: str) -> None:
    """Archive, list, read, sweep and prune."""
    archive = open_archive(address, RUN)
    for step in (1, 2, 3):
        put_parts(archive, begin(archive, 100 + step), make_image(0))
        candidates = archive.list_attempts()
        archive_step(archive, step)
        assert len(archive.sweep(candidates)) == 1
    assert archive.prune(2) == [1]
    assert steps(archive) == [3, 2]
    assert len(archive.list_attempts()) == 2


# ---- faults --------------------------------------------------------------------------------------------


def test_doctor_names_what_is_wrong(proxy: FaultProxy) -> None:
    """An address, a bucket, or a store that keeps no promise."""
    assert proxy.port
    problems = {
        "s3:/bucket": "two slashes",
        "s3://no-such-bucket": "404 NoSuchBucket: there is no such bucket",
        "/proc/nowhere": "mount the file system, or create the directory with mkdir",
    }
    for address, problem in problems.items():
        (finding,) = check_archive(address)
        assert problem in finding.problem
    proxy.faults.append(Fault("GET", ".doctor/", "wrong"))
    (finding,) = check_archive(f"s3://{BUCKET}")
    assert "returns other bytes than it was given; choose another store" in finding.problem


@pytest.mark.parametrize(
    ("action", "kind", "remedy"),
    [
        ("403 AccessDenied", "forbidden", "403 AccessDenied: access denied: allow these credentials"),
        ("403 RequestTimeTooSkewed", "clock-skew", "set it by NTP"),
        ("400 ExpiredToken", "credentials", "renew expired ones"),
        ("404 NoSuchBucket", "missing-bucket", "create it, or correct the address"),
        ("500 InternalError", "unavailable", "the store itself fails"),
        ("507 XMinioStorageFull", "quota", "free space there, or set --archive-keep"),
        ("lost", "cut", "check the link"),
    ],
)
def test_fault_has_kind_and_remedy(
    archive: Archive, proxy: FaultProxy, action: str, kind: str, remedy: str
) -> None:
    """When writing, when listing and when reading; what the server says is not repeated."""
    (entry,) = archive.list_checkpoints(64)
    assert isinstance(entry, ArchivedCheckpoint)
    proxy.faults.append(Fault("*", "", action))
    for request in (lambda: archive.put_part(entry.header.parts, 0, make_image()), archive.list_numbers):
        with pytest.raises(ArchiveError, match=remedy) as caught:
            request()
        assert caught.value.kind == kind
        assert "HIDDEN" not in str(caught.value)
        assert "127.0.0.1" not in str(caught.value)
    with pytest.raises(UnreadableError, match=remedy):
        archive.read_image(entry)


def test_fault_that_passes_is_not_noticed(archive: Archive, proxy: FaultProxy) -> None:
    """One answer of 500 or 503, one lost answer, one that is cut or damaged, for each verb."""
    for step, action in enumerate(("500 InternalError", "503 SlowDown", "lost"), start=6):
        for method, path in (("PUT", "/parts/"), ("GET", "/parts/"), ("GET", "list-type"), ("GET", "/log/")):
            proxy.faults.append(Fault(method, path, action, times=1))
        archive_step(archive, step)
        assert steps(archive) == list(range(step, 4, -1))
    for action in ("cut", "wrong", "truncated"):
        proxy.faults.append(Fault("GET", "/parts/", action, times=1))
        assert steps(archive) == [8, 7, 6, 5]
    assert {fault.times for fault in proxy.faults} == {0}


@pytest.mark.parametrize("verb", ["PUT", "GET"])
def test_put_and_read_are_repeated_for_a_time(
    proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """An outage of half a minute costs nothing. One that lasts ends them, however often they are tried."""
    monkeypatch.setattr(obstore_store, "_LASTING_RETRIES", LASTING_RETRIES)
    monkeypatch.setattr(obstore_store, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(obstore_store, "_MAX_PAUSE_S", 0.02)
    store = open_store(parse_address("--archive", f"s3://{BUCKET}/{tmp_path.name}"))
    store.put("a/x", b"another")

    def request() -> None:
        if verb == "PUT":
            store.put("a/x", b"0123456789")
        else:
            get(store, "a/x")

    proxy.faults.append(Fault(verb, "/a/x", "503 SlowDown", times=30))
    request()
    assert get(store, "a/x") == (b"0123456789" if verb == "PUT" else b"another")
    assert proxy.faults[0].times == 0
    monkeypatch.setattr(obstore_store, "_RETRY_S", 0.5)
    store = open_store(parse_address("--archive", f"s3://{BUCKET}/{tmp_path.name}"))
    proxy.faults.append(Fault(verb, "/a/x", "503 SlowDown"))
    with pytest.raises(ArchiveError, match="the store itself fails"):
        request()


@pytest.mark.parametrize(
    ("action", "error"),
    [("wrong", CorruptError), ("truncated", TornError), ("cut", UnreadableError)],
)
def test_damaged_answer_is_never_returned(
    archive: Archive, proxy: FaultProxy, action: str, error: type[Exception]
) -> None:
    """Wrong bytes and short answers are found by digest and length."""
    (entry,) = archive.list_checkpoints(64)
    assert isinstance(entry, ArchivedCheckpoint)
    proxy.faults.append(Fault("GET", "/parts/", action))
    with pytest.raises(error):
        archive.read_image(entry)


@pytest.mark.parametrize("action", ["409 ConditionalRequestConflict", "lost", "500 InternalError"])
def test_entry_is_committed_once_whatever_its_request_meets(
    archive: Archive, proxy: FaultProxy, action: str
) -> None:
    """A create-only put is not repeated blindly; `commit` may be called again, as the agent does."""
    attempt = begin(archive, 6)
    put_parts(archive, attempt, make_image(6))
    proxy.faults.append(Fault("PUT", "/log/", action, times=1))
    try:
        commit(archive, attempt)
    except ArchiveError:
        commit(archive, attempt)
    assert steps(archive) == [6, 5]
    assert archive.list_numbers() == [2, 1]


def test_store_without_create_only_is_used_with_warning(
    archive: Archive, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """501 answers the header If-None-Match; the entry is put without it."""
    proxy.faults.append(Fault("PUT", "/log/", "501 NotImplemented", times=2))  # it is repeated once
    archive_step(archive, 6)
    assert steps(archive) == [6, 5]
    assert "a second job of the same run id is not surely noticed" in caplog.text


def test_slow_link_ends_with_its_own_error(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests have a limit of time, which grows with their bytes."""
    monkeypatch.setattr(obstore_store, "_BASE_S", 1)
    monkeypatch.setattr(obstore_store, "_LASTING_RETRIES", 0)
    slow = open_archive(f"{ADDRESS}/slow", RUN)
    attempt = begin(slow, 6)
    proxy.faults.append(Fault("PUT", "/parts/", "slow"))
    with pytest.raises(ArchiveError, match=r"the transfer took too long: .*at least 0.5 MB/s") as caught:
        slow.put_part(attempt.id, 0, memoryview(bytes(400_000)))
    assert caught.value.kind == "slow"
    monkeypatch.setattr(obstore_store, "MIN_BYTES_PER_S", 10_000)
    monkeypatch.setattr(obstore_store, "_LASTING_RETRIES", 1)
    open_archive(f"{ADDRESS}/slow", RUN).put_part(attempt.id, 1, memoryview(bytes(200_000)))
    proxy.faults.append(Fault("GET", "", "hang"))
    with pytest.raises(ArchiveError, match="the transfer took too long"):
        slow.list_numbers()


def test_missing_credentials_end_soon(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a cloud, nobody answers the request for the machine's own; it is not repeated."""
    proxy.faults.append(Fault("*", "/latest/", "lost"))
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", endpoint)
    with pytest.raises(ArchiveError, match="no valid credentials: set") as caught:
        open_archive(ADDRESS, RUN).list_numbers()
    assert caught.value.kind == "credentials"
    assert len([request for request in proxy.requests if "/latest/" in request]) == 1


def test_secret_is_in_no_message(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the request, which has a signature."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "TOPSECRETKEY")
    proxy.faults.append(Fault("*", "", "403 SignatureDoesNotMatch"))
    with pytest.raises(ArchiveError) as caught:
        open_archive(ADDRESS, RUN).list_numbers()
    shown = repr(caught.value) + str(caught.value.__cause__) + str(caught.value)
    assert "TOPSECRET" not in shown
    assert "Signature=" not in shown


def test_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Azure needs the account's name."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match=r"az://container: AZURE_STORAGE_ACCOUNT_NAME is not set"):
        open_archive("az://container", RUN)


# ---- kills and two jobs --------------------------------------------------------------------------------


def start_writer(address: str, first: int, last: int, **environ: str) -> subprocess.Popen[str]:
    """Start a process that archives; it waits for a line on its standard input."""
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, address, str(first), str(last)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )


def finish_writer(process: subprocess.Popen[str]) -> list[str]:
    """Let a writer begin; return the lines that it printed until its end."""
    output, _ = process.communicate("go\n", timeout=120)
    return output.split()[1:]


@pytest.mark.parametrize("kind", ["s3", IN_FILES])
@pytest.mark.parametrize(
    ("point", "newest"),
    [
        pytest.param("archive.part-stored=kill@2", 5, marks=pytest.mark.soak),
        ("archive.before-entry=kill", 5),
        ("archive.after-entry=kill", 7),
        pytest.param("archive.entry-pruned=kill", 7, marks=pytest.mark.soak),
    ],
)
def test_killed_writer_leaves_the_step_before_or_this_one(
    proxy: FaultProxy, tmp_path: Path, kind: str, point: str, newest: int
) -> None:
    """And a job after it goes on, and deletes what is left of it."""
    assert proxy.port
    address = f"{ADDRESS}/{tmp_path.name}" if kind == "s3" else str(tmp_path)
    archive = open_archive(address, RUN)
    for step in (1, 3, 5):
        archive_step(archive, step)
    process = start_writer(address, 7, 8, **{constants.ENV_FAILPOINTS: point})
    finish_writer(process)
    assert process.returncode == -signal.SIGKILL
    assert steps(archive)[0] == newest
    assert finish_writer(start_writer(address, 9, 10)) == ["9"]
    assert steps(archive)[:2] == [9, newest]
    assert len(archive.list_attempts()) == len(steps(archive)) == 3


@pytest.mark.parametrize("kind", ["s3", IN_FILES])
def test_two_jobs_at_once_lose_nothing(proxy: FaultProxy, tmp_path: Path, kind: str) -> None:
    """One is refused and stops, wherever it is; what was committed is whole."""
    assert proxy.port
    for number in range(2):
        address = f"{ADDRESS}/{tmp_path.name}/{number}" if kind == "s3" else str(tmp_path / str(number))
        (tmp_path / str(number)).mkdir()
        writers = [start_writer(address, first, 20 + first) for first in (1, 2)]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "started\n"
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        lines = [writer.communicate(timeout=120)[0].split() for writer in writers]
        assert [writer.returncode for writer in writers] == [0, 0]
        refused = [output for output in lines if "second-writer" in output]
        survivors = [output for output in lines if "second-writer" not in output]
        assert (len(refused), len(survivors)) == (1, 1)
        assert len(survivors[0]) == 10, "it committed all it had"
        committed = {int(line) for output in lines for line in output if line.isdigit()}
        left = steps(open_archive(address, RUN))
        assert len(left) == 3
        assert set(left) <= committed
        assert left[0] == int(survivors[0][-1])


# ---- commands ------------------------------------------------------------------------------------------


def test_commands_take_addresses(address: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An archive, a run in it, and one checkpoint."""
    archive = open_archive(address, RUN)
    archive_step(archive, 5, milestones=[Milestone("best", 0.5)])
    archive_step(archive, 6, generation=2, milestones=[Milestone("best", 0.25), Milestone("good")])
    run = f"{address}/{RUN}"

    def command(*words: str) -> tuple[int, str]:
        code = cli.main(words)
        output = capfd.readouterr()
        return code, output.out + output.err

    code, text = command("ls", address)
    assert code == 0
    assert [line.split()[:3] for line in text.splitlines()[-2:]] == [
        ["node-a", "2", "6"],
        ["node-a", "1", "5"],
    ]
    names = [line.removesuffix("yes").rstrip() for line in text.splitlines()[-2:]]
    assert [name.rpartition("  ")[2] for name in names] == ["good", "best 0.5"]
    assert command("verify", "--deep", run)[1].startswith("ok   g000002-s0000000006")
    code, text = command("verify", f"{run}/g000001-s0000000005")
    assert (code, text.splitlines()[-1]) == (0, "1 valid, 0 bad (quick check; --deep reads all data)")
    code, text = command("diff", run, f"{run}/g000001-s0000000005")
    assert code == 1, text
    assert f"A: {run}/g000002-s0000000006 (generation 2, step 6)" in text
    assert command("diff", run, run)[0] == 0
    there = f"no archived checkpoints here. {address} has: {RUN}."
    assert command("ls", f"{address}/other") == (1, f"elastic-resume: error: {address}/other: {there}\n")
    missing = f"{run}: no checkpoint 'g1-s9' in this run. There is: g2-s6 (good), g1-s5 (best)."
    assert command("verify", f"{run}/g1-s9") == (1, f"elastic-resume: error: {missing}\n")
    for name in ("g1-s5", "5", "best"):  # as --resume-from takes them
        assert f"A: {run}/g000001-s0000000005 (" in command("diff", f"{run}/{name}", run)[1]
    assert f"A: {run}/g000002-s0000000006 (" in command("diff", f"{run}/latest", run)[1]
    code, text = command("report", run)
    assert (code, "no events of the run" in text) == (1, True)
    archive.put_events("node-a", b'{"t":1.0,"event":"agent-start","node":"node-a","run_id":"run-1"}\n')
    code, text = command("report", run)
    assert (code, "2 checkpoints in the archive, newest: step 6" in text) == (0, True), text
    page = tmp_path / "report.html"
    assert command("report", run, "--html", str(page))[0] == 0
    assert "in the archive" in page.read_text()
    (finding,) = check_archive(address)
    assert (finding.value.startswith(f"{address}: answers in"), finding.problem) == (True, "")
    assert er.load(run, name=None) == {"step": 6}
    assert er.load(f"{run}/g000001-s0000000005", name=None) == {"step": 5}
    with pytest.raises(NoValidCheckpointError, match=r"no checkpoint .* in this run\. There is: g2-s6"):
        er.load(f"{run}/g000001-s0000000099")
