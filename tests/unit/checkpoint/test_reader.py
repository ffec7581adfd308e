"""Test that only whole checkpoints are loaded, and that errors name what is wrong and where."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume import constants
from elastic_resume.checkpoint import reader
from elastic_resume.checkpoint.atomic_io import Disk
from elastic_resume.checkpoint.catalog import Catalog
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.checkpoint.reader import (
    allocate_memory,
    checkpoint_name,
    deep_check,
    map_image,
    open_regular,
    parse_checkpoint_name,
    quick_check,
    read_exact,
    read_image,
    translate_read_errors,
)
from elastic_resume.checkpoint.writer import CheckpointTransaction, CheckpointWriter, RetentionPolicy
from elastic_resume.errors import (
    CheckpointError,
    CorruptError,
    ForeignError,
    MachineError,
    NewerFormatError,
    TornError,
    UnreadableError,
)
from elastic_resume.milestone import MAX_WAYS_BACK, WayBack
from tests.support.checkpoint_samples import (
    RUN,
    SMALL_BLOCK,
    flip_bits,
    make_image,
    make_manifest,
    save_checkpoint,
    save_image,
)

STATE, MANIFEST = constants.STATE_FILE, constants.MANIFEST_FILE
WAY = {"request": "500", "generation": 4, "step": 500, "new_generation": 5}
NEWER = b'{"kind":"elastic_resume checkpoint","format":99,"all":["new"]}'


@given(st.integers(0, 10**15), st.integers(0, 10**15))
def test_checkpoint_name_parses_to_its_version(generation: int, step: int) -> None:
    """For any numbers."""
    assert parse_checkpoint_name(checkpoint_name(generation, step)) == (generation, step)


@pytest.mark.parametrize(
    "name",
    [
        "g000001-s000000001",
        "g0000001-s0000000001",
        "g000001-s00000000001",
        "g000001-s0000000001.tmp",
        ".tmp-g000001-s0000000001-7-00000000",
        "g00000\u0661-s0000000001",
        "g000001-s0000000001\n",
        "G000001-s0000000001",
        "g-00001-s0000000001",
        "g9999999999999999-s0000000001",
        "g000001-s9007199254740993",
        "",
    ],
)
def test_other_spellings_are_no_checkpoint_names(name: str) -> None:
    """Such directories are left alone."""
    assert parse_checkpoint_name(name) is None


def test_image_is_read_back_byte_for_byte(tmp_path: Path) -> None:
    """Into new memory, into a given buffer and as a private mapping."""
    path = save_checkpoint(tmp_path, 3, 14)
    assert path == tmp_path / "g000003-s0000000014"
    found = deep_check(path, RUN)
    assert found == replace(
        make_manifest(3, 14), file_bytes=len(make_image()), block_bytes=SMALL_BLOCK, blocks=found.blocks
    )
    assert len(found.blocks) > 3
    assert read_image(path, found) == make_image(14)
    into = memoryview(bytearray(found.file_bytes))
    assert read_image(path, found, into) == into == make_image(14)
    mapped = map_image(path, found)
    assert mapped == make_image(14)
    mapped[-1] ^= 1  # private: the file does not change
    assert deep_check(path, RUN) == found


def test_blocks_do_not_depend_on_sizes_of_writes(tmp_path: Path) -> None:
    """The digests are equal."""
    whole = deep_check(save_checkpoint(tmp_path, 1, 7), RUN)
    with CheckpointTransaction(tmp_path, 2, 7, block_bytes=SMALL_BLOCK) as writer:
        view, at = make_image(7), 0
        for size in [1, 2047, 1, 4096, 5000, 0, len(view)]:
            writer.write(view[at : at + size])
            at += size
        pieces = deep_check(writer.commit(make_manifest(2, 7, state={"step": 7})), RUN)
    assert pieces.blocks == whole.blocks
    assert pieces.content_digest == whole.content_digest


def test_content_digest_covers_image_and_state_only(tmp_path: Path) -> None:
    """Writer, time and generation do not change it."""
    first = quick_check(save_checkpoint(tmp_path), RUN)
    other = replace(first, node="other", rank=1, written_at=1.0, generation=9)
    assert other.content_digest == first.content_digest
    assert replace(first, state={"step": 2}).content_digest != first.content_digest
    assert replace(first, blocks=(*first.blocks[:-1], "0" * 32)).content_digest != first.content_digest


def test_uncommitted_transaction_leaves_nothing(tmp_path: Path) -> None:
    """Neither after an exception nor without one."""
    with CheckpointTransaction(tmp_path, 1, 1) as writer:
        writer.write(make_image())
    writer = CheckpointTransaction(tmp_path, 1, 1)
    writer.abort()
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_second_commit_of_equal_content_changes_nothing(tmp_path: Path) -> None:
    """The commit succeeds and the old files stay."""
    path = save_checkpoint(tmp_path)
    before = (path / STATE).stat().st_ino
    assert save_checkpoint(tmp_path) == path
    assert (path / STATE).stat().st_ino == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("damage", ["content", "flipped", "foreign"])
def test_commit_quarantines_other_content_under_its_name(tmp_path: Path, damage: str) -> None:
    """Other content, damaged content or any other file is kept there."""
    target = tmp_path / checkpoint_name(1, 1)
    if damage == "foreign":
        target.mkdir()
        (target / "notes.txt").write_text("mine")
    else:
        save_checkpoint(tmp_path, seed=5)
        if damage == "flipped":
            flip_bits(target / STATE, -3)
    save_checkpoint(tmp_path)
    assert read_image(target, quick_check(target, RUN)) == make_image(1)
    (quarantined,) = Catalog(tmp_path, RUN).list_quarantined()
    assert list(quarantined.iterdir())
    record = json.loads((quarantined.parent / f"{quarantined.name}.reason.json").read_text())
    assert record["was"] == target.name
    assert record["reason"]


@pytest.mark.parametrize(
    ("before", "after", "seeds", "kept"),
    [
        ((0, 8), (1, 0), (0, 1), 0),
        ((0, 8), (1, 0), (1, 1), 0),  # the script's end-of-epoch code changed nothing
        ((1, 0), (0, 8), (0, 1), 1),
        ((0, 8), (0, 8), (0, 1), 1),
    ],
)
def test_commit_deletes_same_step_earlier_in_epoch(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int], seeds: tuple[int, int], kept: int
) -> None:
    """Any other whole checkpoint stays, because nothing tells which is right."""
    for seed, (epoch, steps) in zip(seeds, (before, after), strict=True):
        manifest = make_manifest(1, 8, state={"seed": seed})
        position = replace(manifest.position, epoch=epoch, step_in_epoch=steps)
        path = save_image(tmp_path, replace(manifest, position=position), make_image(seed))
    assert deep_check(path, RUN).position == position
    assert read_image(path, deep_check(path, RUN)) == make_image(1)
    assert len(Catalog(tmp_path, RUN).list_quarantined()) == kept
    assert len(list((tmp_path / constants.QUARANTINE_DIR).iterdir())) == 2 * kept
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, constants.QUARANTINE_DIR}


def test_writer_trusts_only_what_it_wrote_at_that_position(tmp_path: Path) -> None:
    """Neither another's checkpoint, nor one that was removed, nor the other position of its step."""
    manifest = make_manifest(1, 1)
    later = replace(manifest.position, epoch=1, step_in_epoch=0)
    save_checkpoint(tmp_path)
    writer = CheckpointWriter(tmp_path, RUN, lambda *_, **__: None)
    assert not writer.has_trusted((1, 1), manifest.position)
    writer.start_generation(RetentionPolicy((1, 1)))
    assert writer.has_trusted((1, 1), manifest.position)
    assert not writer.has_trusted((1, 1), later)
    shutil.rmtree(tmp_path / checkpoint_name(1, 1))
    assert not writer.has_trusted((1, 1), manifest.position)


class DiskThatFailsToClose(Disk):
    """As some network file systems that report a full disk late."""

    def close(self, descriptor: int, path: Path) -> None:
        """Close, and fail if it was the image."""
        super().close(descriptor, path)
        if path.name == STATE:
            raise MachineError("cannot close: No space left on device")


@pytest.mark.parametrize(("disk", "is_whole"), [(Disk(), True), (DiskThatFailsToClose(), False)])
def test_commit_closes_data_before_checkpoint_exists(tmp_path: Path, disk: Disk, is_whole: bool) -> None:
    """An aborted or failed commit leaves neither a file nor a descriptor."""
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    with CheckpointTransaction(tmp_path, 1, 1, disk) as writer:
        writer.write(b"x")
    with (
        contextlib.nullcontext() if is_whole else pytest.raises(MachineError, match="No space"),
        CheckpointTransaction(tmp_path, 1, 1, disk) as writer,
    ):
        with pytest.raises(ValueError, match=r"manifest of \(1, 2\)"):
            writer.commit(make_manifest(1, 2))
        writer.write(make_image(1))
        writer.commit(make_manifest(1, 1))
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(1, 1)] * is_whole
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


@pytest.mark.parametrize("manifest", [None, make_manifest(run_id="other").to_bytes(), NEWER])
def test_commit_fails_if_name_is_taken(tmp_path: Path, manifest: bytes | None) -> None:
    """A file, another run's checkpoint and a newer format's are neither moved nor replaced."""
    target = tmp_path / checkpoint_name(1, 1)
    if manifest is None:
        target.write_text("mine")
    else:
        save_checkpoint(tmp_path)
        (target / MANIFEST).write_bytes(manifest)
    with pytest.raises(MachineError, match=r"the name is taken.*Move it elsewhere"):
        save_checkpoint(tmp_path, seed=5)
    assert list(tmp_path.iterdir()) == [target]


def append_byte(path: Path) -> None:
    """Append a byte to the image."""
    with open(path / STATE, "ab") as file:
        file.write(b"x")


def zero_page(path: Path) -> None:
    """Zero a page of the image, as a lost write does."""
    data = bytearray((path / STATE).read_bytes())
    data[4096:8192] = bytes(len(data[4096:8192]))
    (path / STATE).write_bytes(data)


def replace_by_pipe(path: Path) -> None:
    """Put a named pipe in the place of the image."""
    (path / STATE).unlink()
    os.mkfifo(path / STATE)


def replace_by_directory(path: Path) -> None:
    """Put a directory in the place of the manifest."""
    (path / MANIFEST).unlink()
    (path / MANIFEST).mkdir()


# Damage of image or manifest that `quick_check` finds: action, error, text.
QUICK_DAMAGE: dict[str, tuple[Callable[[Path], object], type[CheckpointError], str]] = {
    "state truncated": (lambda p: os.truncate(p / STATE, 5000), TornError, "5000 bytes of"),
    "state empty": (lambda p: os.truncate(p / STATE, 0), TornError, "0 bytes of"),
    "state missing": (lambda p: (p / STATE).unlink(), TornError, "state.safetensors is missing"),
    "state grown": (append_byte, CorruptError, "instead of"),
    "state is a pipe": (replace_by_pipe, ForeignError, "not a regular file"),
    "manifest truncated": (lambda p: os.truncate(p / MANIFEST, 300), TornError, "ends after 300 bytes"),
    "manifest empty": (lambda p: os.truncate(p / MANIFEST, 0), TornError, "ends after 0 bytes"),
    "manifest missing": (lambda p: (p / MANIFEST).unlink(), TornError, "manifest.json is missing"),
    "manifest is a directory": (replace_by_directory, ForeignError, "not a regular file"),
    "manifest zeroed": (lambda p: (p / MANIFEST).write_bytes(bytes(700)), CorruptError, "not JSON"),
    "manifest nested": (lambda p: (p / MANIFEST).write_bytes(b"[" * 1_000_000), CorruptError, "not JSON"),
    "manifest of another kind": (lambda p: (p / MANIFEST).write_text("{}"), ForeignError, "not an"),
    "manifest with a damaged kind": (
        lambda p: (p / MANIFEST).write_bytes(
            (p / MANIFEST).read_bytes().replace(b"elastic_resume c", b"elastic_rEsume c", 1)
        ),
        CorruptError,
        "digest does not match",
    ),
    "manifest a list": (lambda p: (p / MANIFEST).write_text("[1]"), ForeignError, "not an elastic"),
    "directory missing": (shutil.rmtree, ForeignError, "not a checkpoint directory"),
}
# Damage of the image that only reading all data finds: the flipped byte (None: a zeroed page), text.
DEEP_DAMAGE = {
    "header": (60, r"bytes 0 to 2048 do not match their digest\."),
    "header length": (7, r"bytes 0 to 2048 do not match their digest\."),
    "padding": (4000, r"bytes 2048 to 4096 do not match their digest\."),
    "data": (4097, r"bytes 4096 to 6144 do .* \(they hold optimizer\.step and 1 more\)\."),
    "data of one tensor": (7000, r"bytes 6144 to 8192 do .* \(they hold model\.weight\)\."),
    "last byte": (-1, r"bytes 8192 to 8977 do .* \(they hold model\.weight and 3 more\)\."),
    "page": (None, "bytes 4096 to 6144"),
}


@pytest.mark.parametrize("case", QUICK_DAMAGE)
def test_quick_check_finds_damage_of_manifest_or_size(tmp_path: Path, case: str) -> None:
    """The text names the path; a deep check raises the same."""
    damage, error, text = QUICK_DAMAGE[case]
    path = save_checkpoint(tmp_path)
    damage(path)
    descriptors = os.listdir("/proc/self/fd")  # noqa: PTH208
    for check in (quick_check, deep_check):
        with pytest.raises(error, match=text) as caught:
            check(path, RUN)
        assert str(path) in str(caught.value)
    assert set(os.listdir("/proc/self/fd")) <= set(descriptors)  # noqa: PTH208 - other tests' may be closed


def test_damage_is_described_although_the_header_is_read_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads read, and the names of the tensors are in the first block."""
    path = save_checkpoint(tmp_path)
    manifest = quick_check(path, RUN)
    flip_bits(path / STATE, 7000)
    read_exact, are_others_read = reader.read_exact, threading.Event()

    def read_first_block_last(descriptor: int, offset: int, into: memoryview) -> None:
        if offset == 0:
            assert are_others_read.wait(10)
        if offset == 8192:
            are_others_read.set()
        read_exact(descriptor, offset, into)

    # One thread reads the first block, the other the rest: at the last block the damaged one is judged.
    monkeypatch.setattr(reader, "_READ_THREADS", 2)
    monkeypatch.setattr(reader, "_open_direct", lambda _: -1)
    monkeypatch.setattr(reader, "read_exact", read_first_block_last)
    with pytest.raises(CorruptError, match=r"they hold model\.weight"):
        read_image(path, manifest)


@pytest.mark.parametrize("case", DEEP_DAMAGE)
def test_damaged_data_is_never_returned(tmp_path: Path, case: str) -> None:
    """The text names the path and the bytes."""
    offset, text = DEEP_DAMAGE[case]
    path = save_checkpoint(tmp_path)
    manifest = quick_check(path, RUN)
    zero_page(path) if offset is None else flip_bits(path / STATE, offset)
    assert quick_check(path, RUN) == manifest
    for read in (
        lambda: deep_check(path, RUN),
        lambda: read_image(path, manifest),
        lambda: map_image(path, manifest),
    ):
        with pytest.raises(CorruptError, match=text) as caught:
            read()
        assert str(path) in str(caught.value)


LOCAL_ERRORS = ("ENOMEM", "EMFILE", "ENFILE", "EIO", "ESTALE", "EACCES", "ELOOP", "")


@pytest.mark.parametrize("call", ["open", "preadv"])
@pytest.mark.parametrize("name", LOCAL_ERRORS)
def test_read_error_is_unreadable_and_not_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, name: str
) -> None:
    """An error of this machine proves nothing about the bytes."""
    path = save_checkpoint(tmp_path)
    number = getattr(errno, name, 0)

    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number), "manifest.json") if name else MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(UnreadableError, match="cannot be read now") as caught:
            quick_check(path, RUN)
    assert str(path) in str(caught.value)
    assert deep_check(path, RUN)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (OSError("of a library"), "of a library"),
        (MemoryError(), "out of memory"),
    ],
)
def test_read_error_names_its_reason(tmp_path: Path, error: Exception, reason: str) -> None:
    """An OSError without a number has its text only."""
    with (
        pytest.raises(UnreadableError, match=rf"cannot be read now \({reason}\)"),
        translate_read_errors(tmp_path),
    ):
        raise error


def test_read_beyond_end_of_file_is_torn(tmp_path: Path) -> None:
    """The file may shrink after its size was read."""
    (tmp_path / "file").write_bytes(b"12345")
    with (
        open_regular(tmp_path / "file") as descriptor,
        pytest.raises(TornError, match="ends at byte 5"),
    ):
        read_exact(descriptor, 2, memoryview(bytearray(4)))


def test_huge_manifest_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged size of the file could exhaust the memory."""
    path = save_checkpoint(tmp_path)
    monkeypatch.setattr(reader, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(CorruptError, match="more than the limit of 100"):
        quick_check(path, RUN)


@pytest.mark.parametrize("more", [-1, 1])
def test_buffer_of_other_size_is_refused(tmp_path: Path, more: int) -> None:
    """The caller has another manifest than it believes."""
    path = save_checkpoint(tmp_path)
    manifest = quick_check(path, RUN)
    with pytest.raises(ValueError, match="a buffer of"):
        read_image(path, manifest, memoryview(bytearray(manifest.file_bytes + more)))


def test_checkpoint_without_image_bytes_is_torn(tmp_path: Path) -> None:
    """Even an image without tensors has a header."""
    with CheckpointTransaction(tmp_path, 1, 1) as writer:
        path = writer.commit(make_manifest())
    with pytest.raises(TornError, match="is empty"):
        deep_check(path, RUN)


@pytest.mark.parametrize(
    ("is_cached", "number", "direct_reads"),
    [(False, 0, [0, 4096]), (True, 0, []), (False, errno.EINVAL, []), (False, errno.EIO, None)],
)
def test_cold_blocks_are_read_past_page_cache(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_cached: bool,
    number: int,
    direct_reads: list[int] | None,
) -> None:
    """Where the kernel refuses that, they are read as usual; a device that fails is an error at once."""
    if subprocess.check_output(["stat", "-f", "-c", "%T", tmp_path]) == b"tmpfs\n":
        pytest.skip("a tmpfs is a page cache")
    with CheckpointTransaction(tmp_path, 1, 1, block_bytes=4096) as writer:
        writer.write(make_image(1))
        path = writer.commit(make_manifest())
    manifest = quick_check(path, RUN)
    with open(path / STATE, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert len(file.read() if is_cached else b"") in {0, manifest.file_bytes}
    preadv, found = os.preadv, []

    def record(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if buffers[0] and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            found.append(offset)
            if number:
                raise OSError(number, "refused")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", record)
    descriptors = os.listdir("/proc/self/fd")  # noqa: PTH208
    if direct_reads is None:
        with pytest.raises(UnreadableError, match="refused"):
            read_image(path, manifest)
    else:
        assert read_image(path, manifest) == make_image(1)
        assert found if number else sorted(found) == direct_reads  # a cold read reads ahead
    assert os.listdir("/proc/self/fd") == descriptors  # noqa: PTH208


def test_image_is_read_where_direct_reads_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems refuse O_DIRECT."""
    path = save_checkpoint(tmp_path)
    manifest, real = quick_check(path, RUN), os.open

    def refuse(name: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real(name, flags)

    monkeypatch.setattr(os, "open", refuse)
    with open(path / STATE, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert read_image(path, manifest) == make_image(1)


def test_direct_open_of_pipe_returns(tmp_path: Path) -> None:
    """Something may replace the image after its size was read."""
    os.mkfifo(tmp_path / "pipe")
    assert reader._open_direct(tmp_path / "pipe") == -1


def test_dangling_link_is_unreadable_and_not_torn(tmp_path: Path) -> None:
    """Its target may be on an unmounted file system."""
    path = save_checkpoint(tmp_path)
    (path / STATE).rename(tmp_path / "elsewhere")
    (path / STATE).symlink_to(tmp_path / "gone")
    with pytest.raises(UnreadableError, match=r"state.safetensors is a dangling link"):
        quick_check(path, RUN)
    link = tmp_path / checkpoint_name(2, 2)
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(UnreadableError, match="s0000000002 is a dangling link"):
        quick_check(link, RUN)


def test_read_error_of_mapping_raises_instead_of_sigbus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the file is truncated after it was mapped."""
    path = save_checkpoint(tmp_path)
    good = quick_check(path, RUN)
    state = path / STATE
    with mmap.mmap(-1, mmap.PAGESIZE) as probe:
        try:
            probe.madvise(22)
        except OSError:
            pytest.skip("this kernel has no MADV_POPULATE_READ")
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: os.truncate(state, 0))
    with pytest.raises(UnreadableError, match="cannot be read now"):
        map_image(path, good)


def test_flipped_bit_of_manifest_is_always_found(tmp_path: Path) -> None:
    """One bit in each byte: never accepted, never another exception."""
    data = (save_checkpoint(tmp_path) / MANIFEST).read_bytes()
    for at in range(len(data)):
        flipped = bytes([data[at] ^ (1 << at % 8)])
        with pytest.raises(CheckpointError):
            Manifest.parse(data[:at] + flipped + data[at + 1 :])


def resigned(path: Path, **changes: object) -> None:
    """Change fields of a manifest and correct its digest."""
    file = path / MANIFEST
    record = json.loads(file.read_bytes()) | changes
    record.pop("digest")
    record = {name: value for name, value in record.items() if value != "gone"}
    body = json.dumps(record, separators=(",", ":")).encode()[:-1]
    file.write_bytes(body + f',"digest":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode())


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": -1},
        {"world_size": "2"},
        {"generation": 1 << 60},
        {"block_bytes": 0},
        {"blocks": []},
        {"rank0_tensors": None},
        {"rank0_tensors": [7]},
        {"blocks": [None]},
        {"written_at": "x"},
        {"written_at": {"$": ["a"]}},
        {"written_at": -1},
        {"node": 5},
        {"run_id": ["job"]},
        {"writer": None},
        {"position": None},
        {"position": {"epoch": 0, "step": 1, "samples": 0}},
        {"unknown": 1},
        {"ways_back": None},
        {"ways_back": ["500"]},
        {"ways_back": [{**WAY, "request": ""}]},
        {"ways_back": [{**WAY, "step": -1}]},
        {"ways_back": [{**WAY, "new_generation": "5"}]},
        {"ways_back": [{**WAY, "unknown": 1}]},
        {"ways_back": [WAY] * 257},
        {"state": "gone"},
        {"format": 0},
        {"format": "1"},
    ],
)
def test_manifest_with_invalid_field_is_corrupt(tmp_path: Path, changes: dict[str, object]) -> None:
    """Even if its digest is right."""
    path = save_checkpoint(tmp_path)
    resigned(path, **changes)
    with pytest.raises(CorruptError, match="manifest"):
        quick_check(path, RUN)


def test_manifest_keeps_all_ways_back() -> None:
    """Their order too, at the limit of their number."""
    ways = tuple(WayBack("best", number, 1, number + 1) for number in range(1, MAX_WAYS_BACK + 1))
    assert Manifest.parse(replace(make_manifest(), ways_back=ways).to_bytes()).ways_back == ways


def test_manifest_out_of_range_is_not_written() -> None:
    """It could not be read back."""
    with pytest.raises(ValueError, match="rank is -1"):
        replace(make_manifest(), rank=-1).to_bytes()
    with pytest.raises(ValueError, match="Out of range float"):
        replace(make_manifest(), state=float("nan")).to_bytes()


def test_newer_format_is_recognised_by_its_number(tmp_path: Path) -> None:
    """Other fields and digests may differ."""
    path = save_checkpoint(tmp_path)
    (path / MANIFEST).write_bytes(NEWER)
    with pytest.raises(NewerFormatError, match=r"format 99; .* upgrade it"):
        quick_check(path, RUN)


def test_format_1_is_read_and_no_longer_written(tmp_path: Path) -> None:
    """Format 1. Its readers take a sharded tensor for damage, so they must see another number."""
    path = save_checkpoint(tmp_path)
    assert b'"format":1' not in (path / MANIFEST).read_bytes()
    resigned(path, format=1)
    assert quick_check(path, RUN) == deep_check(path, RUN)


DIGEST = b',"digest":"' + b"0" * 32 + b'"}\n'


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b'{"kind":"x","format":1,"blocks":[]' + DIGEST, CorruptError),
        (b'{"kind":"x","format":1,"blocks":[]}\n', ForeignError),
        (b'{"kind":"x","blocks":[]' + DIGEST, ForeignError),
        (b'{"kind":"x","format":1' + DIGEST, ForeignError),
        (b'{"kind":"elastic_resume checkpoint","format":!}\n', CorruptError),
        (b'{"kind":"elastic_resume checkpoint","format":', TornError),
        (b'{"kind":"other","format":', CorruptError),
    ],
)
def test_only_what_was_a_manifest_is_damaged(data: bytes, error: type[CheckpointError]) -> None:
    """A foreign file is not quarantined."""
    with pytest.raises(error) as caught:
        Manifest.parse(data)
    assert type(caught.value) is error


def test_other_run_or_renamed_directory_is_foreign(tmp_path: Path) -> None:
    """A checkpoint is valid only under its own name and in its own run."""
    path = save_checkpoint(tmp_path)
    with pytest.raises(ForeignError, match="belongs to the run 'run-1', not to 'other'"):
        quick_check(path, "other")
    assert quick_check(path, None).run_id == RUN
    renamed = path.rename(tmp_path / checkpoint_name(9, 9))
    with pytest.raises(ForeignError, match="g000001-s0000000001; it was copied or renamed"):
        quick_check(renamed, RUN)


def test_invalid_layout_with_right_digest_is_refused(tmp_path: Path) -> None:
    """The layout is checked too."""
    with CheckpointTransaction(tmp_path, 1, 1) as writer:
        writer.write(b"no safetensors at all")
        path = writer.commit(make_manifest())
    with pytest.raises(CheckpointError, match="header"):
        deep_check(path, RUN)
    with pytest.raises(CheckpointError, match="header"):
        read_image(path, quick_check(path, RUN))


def test_manifest_encodes_to_its_own_bytes() -> None:
    """Parsing and encoding again give the same file."""
    data = replace(make_manifest(), file_bytes=1, blocks=("0" * 32,)).to_bytes()
    assert Manifest.parse(data).to_bytes() == data


def test_allocate_memory_beyond_limit_raises_machine_error() -> None:
    """No checkpoint is blamed for it."""
    with pytest.raises(MachineError, match="no memory for the state"):
        allocate_memory(1 << 60)
