"""Read and write one run's part of an archive; the package's docstring has layout and protocol."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import xxhash

from elastic_resume import constants, failpoints, milestone
from elastic_resume.archive import entries
from elastic_resume.archive.address import OBJECT_SCHEMES, Address, parse_address
from elastic_resume.archive.directory_store import DirectoryStore
from elastic_resume.archive.entries import (
    ArchivedCheckpoint,
    Attempt,
    BadEntry,
    EntryHeader,
    Moment,
)
from elastic_resume.archive.store import Store, StoredName
from elastic_resume.background import map_in_daemon_threads
from elastic_resume.checkpoint.layout import MAX_HEADER_BYTES, Layout
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.checkpoint.reader import allocate_memory
from elastic_resume.errors import (
    ArchiveError,
    ArchiveErrorKind,
    CheckpointError,
    ConfigError,
    CorruptError,
    SecondWriterError,
    TornError,
    UnreadableError,
)
from elastic_resume.milestone import Milestone, Version

MAX_EVENTS_BYTES = 16 << 20  # of a node's newest events
_THREADS = 8  # requests in flight
_CONFLICT_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 2.0)

_LOGGER = logging.getLogger(__name__)


def open_archive(address: str, run_id: str) -> Archive:
    """Open the part of ``run_id`` of the archive at ``address``; nothing is read or written yet.

    Raises:
        ConfigError: the address is malformed, or a package that it needs is missing.

    """
    if not re.fullmatch(constants.SAFE_NAME_PATTERN, run_id):
        raise ConfigError(f"the run id {run_id[:100]!r} cannot be a name in an archive.")
    return Archive(open_store(parse_address("--archive", address)), run_id)


def open_store(address: Address) -> Store:
    """Return the store at ``address``; raise ConfigError if a package that it needs is missing."""
    if address.scheme == "file":
        return DirectoryStore(Path(address.path).absolute())
    if address.scheme in OBJECT_SCHEMES:
        try:
            from elastic_resume.archive.obstore_store import ObstoreStore  # noqa: PLC0415  an extra
        except ImportError as error:
            raise ConfigError(
                f"{address}: takes the package obstore, which is not installed here: "
                f"{constants.EXTRA_INSTALL.format('remote')} (on Python 3.11 or newer)."
            ) from error
        return ObstoreStore(address)
    try:
        from elastic_resume.archive.fsspec_store import FsspecStore  # noqa: PLC0415  imports asyncio
    except ImportError as error:
        raise ConfigError(
            f"{address}: takes the package fsspec, which is not installed here: pip install fsspec."
        ) from error
    return FsspecStore(address)


def _ignore_progress(_: int) -> None:
    pass


def list_names(store: Store) -> list[str]:
    """Return the names of what is directly below an archive's address, such as runs.

    Raises:
        ArchiveError: it cannot be listed, or the address is that of one run: a job would begin an archive
            within it.

    """
    names = [stored.name for stored in store.list("") if stored.is_prefix]
    if {"log", "parts"} <= set(names):
        raise ArchiveError(
            f"{store.description} is the address of one run of an archive: give --archive what stands before "
            "the run's name.",
            kind=ArchiveErrorKind.MISPLACED,
        )
    return names


def try_store(store: Store) -> bool:
    """Put, get, list and delete an object; return whether the store can create one only if there is none.

    Raises:
        ArchiveError: a request fails, or its answer is wrong; or the address is that of one run.

    """
    list_names(store)
    directory, name, data = ".doctor", secrets.token_hex(8), secrets.token_bytes(1000)
    path = f"{directory}/{name}"
    store.put(path, data)
    try:
        received = store.get_range(path, 10, 100)
        is_listed = any(stored.name == name for stored in store.list(directory))
        can_create = True
        try:
            is_replaced = store.put_if_absent(path, data)
        except ArchiveError as error:
            if error.kind != ArchiveErrorKind.UNSUPPORTED:
                raise
            can_create = is_replaced = False
    finally:
        store.delete(path)
    wrong = {
        "it returns other bytes than it was given": bytes(received or b"") != data[10:110],
        "it does not list what was just put": not is_listed,
        "it replaces an object that it is told to keep": is_replaced,
    }
    for problem in (problem for problem, is_wrong in wrong.items() if is_wrong):
        raise ArchiveError(f"{store.description}: {problem}; choose another store.")
    return can_create


class Archive:
    """One run's archived checkpoints. Methods that read one raise CheckpointErrors, as `checkpoint.reader`.

    All others raise ArchiveError if the store cannot be reached, or refuses. Any thread may use it.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self.run_id = run_id
        # Entries never change. But if a person removes them, their numbers are given to others.
        self._headers: dict[int, EntryHeader] = {}
        self._has_warned = self._has_warned_of_entry = False
        self.description = f"{store.description.rstrip('/')}/{run_id}"

    # ---- reading ---------------------------------------------------------------------------------------

    def list_numbers(self) -> list[int]:
        """Return the numbers of all entries, newest first; raise ArchiveError if it cannot list them."""
        return sorted((number for number, stored in self._list_log() if not stored.is_prefix), reverse=True)

    def _list_log(self) -> list[tuple[int, StoredName]]:
        names = self._store.list(f"{self.run_id}/log")
        numbers = [(entries.parse_number(stored.name), stored) for stored in names]
        found = [(number, stored) for number, stored in numbers if number is not None]
        for removed in set(self._headers).difference(number for number, _ in found):
            self._headers.pop(removed, None)
        return found

    def list_other_names(self) -> list[str]:
        """Return what is beside this run; see `list_names`."""
        return [name for name in list_names(self._store) if name != self.run_id]

    def read_entry(self, number: int) -> ArchivedCheckpoint:
        """Read one entry of the log.

        Raises:
            CheckpointError: what is wrong with it; UnreadableError if the store cannot be reached.

        """
        with self._translate_errors(f"entry {number}"):
            data = self._store.get_range(self._entry_name(number), 0, entries.MAX_ENTRY_BYTES + 1)
            if data is None:
                raise TornError("does not exist any more.")
            return entries.parse_entry(number, data, self.run_id)

    def find_newest(self) -> Moment | None:
        """Return the greatest (generation, step, epoch) in the log, with two requests.

        It is zeros without any entry, and None if only all entries together can tell.

        Raises:
            ArchiveError: the log cannot be listed or read.

        """
        numbers = self.list_numbers()
        if not numbers:
            return (0, 0, 0)
        with contextlib.suppress(CheckpointError):
            header = self._read_header(numbers[0])
            return header.newest if header is not None else None
        return None

    def find_numbers(self, is_wanted: Callable[[EntryHeader], bool]) -> list[int]:
        """Return the numbers of the checkpoints that are wanted, newest first; raise ArchiveError."""
        headers = sorted(self._read_headers(self.list_numbers()).items())
        current = {header.parts: number for number, header in headers if header is not None}
        return [
            n
            for n, header in reversed(headers)
            if header and current[header.parts] == n and is_wanted(header)
        ]

    def list_milestones(self) -> dict[Version, tuple[Milestone, ...]]:
        """Return the milestones of each archived (generation, step); raise ArchiveError."""
        headers = sorted(self._read_headers(self.list_numbers()).items())
        return {header.version: header.milestones for _, header in headers if header is not None}

    def list_checkpoints(self, limit: int) -> list[ArchivedCheckpoint | BadEntry]:
        """Return the checkpoints of the newest ``limit`` entries, newest first.

        Raises:
            ArchiveError: the log cannot be listed.

        """
        return self.read_checkpoints(self.list_numbers()[:limit])

    def read_checkpoints(self, numbers: Iterable[int]) -> list[ArchivedCheckpoint | BadEntry]:
        """Read these entries, newest first; those deleted meanwhile are left out.

        Of the entries of one checkpoint the newest counts, which has the milestones of the others.

        Raises:
            ArchiveError: the log cannot be listed.

        """

        def read(number: int) -> ArchivedCheckpoint | BadEntry:
            try:
                return self.read_entry(number)
            except CheckpointError as error:
                return self._describe_bad_entry(number, error)

        with ThreadPoolExecutor(_THREADS, "elastic-resume-archive") as threads:
            found = list(threads.map(read, sorted(numbers, reverse=True)))
        if any(isinstance(entry, BadEntry) and isinstance(entry.error, TornError) for entry in found):
            remaining = set(self.list_numbers())
            found = [entry for entry in found if entry.number in remaining]
        parts = [entry.header.parts if isinstance(entry, ArchivedCheckpoint) else None for entry in found]
        return [
            entry
            for index, entry in enumerate(found)
            if parts[index] is None or parts.index(parts[index]) == index
        ]

    def _describe_bad_entry(self, number: int, error: CheckpointError) -> BadEntry:
        """Return what can be known of an entry that cannot be read."""
        version: Version | None = None
        names: tuple[str, ...] = ()
        with contextlib.suppress(ArchiveError, CheckpointError):
            data = self._store.get_range(self._entry_name(number), 0, entries.MAX_LINE_BYTES)
            if data is not None:
                version = entries.find_version(data)
                names = entries.parse_header(data)[0].names
        return BadEntry(number, error, version, names)

    def read_image(
        self,
        archived: ArchivedCheckpoint,
        into: memoryview | None = None,
        on_verified: Callable[[int], object] = _ignore_progress,
        threads: int = _THREADS,
    ) -> memoryview:
        """Read the image into ``into`` (of exactly its size) or new memory, and verify every byte.

        ``on_verified`` gets the number of verified bytes from the image's start, after each block.
        ``threads`` is the number of requests in flight.

        Raises:
            CheckpointError: naming the part and its bytes; the content of ``into`` must not be used.

        """
        manifest = archived.manifest
        image = allocate_memory(manifest.file_bytes) if into is None else into.cast("B")
        if len(image) != manifest.file_bytes:
            raise ValueError(f"a buffer of {len(image)} bytes for an image of {manifest.file_bytes}")

        def read(index: int) -> int:
            start = index * manifest.block_bytes
            block = image[start : start + manifest.block_bytes]
            self.read_block(archived, index, block)
            return start + len(block)

        pool = ThreadPoolExecutor(threads, "elastic-resume-archive")
        try:
            for verified in pool.map(read, range(len(manifest.blocks))):
                on_verified(verified)
        finally:
            pool.shutdown(cancel_futures=True)
        with self._translate_errors(archived.header.parts):
            Layout.parse(image, manifest.file_bytes)
        return image

    def verify_image(
        self, archived: ArchivedCheckpoint, on_verified: Callable[[int], object] = _ignore_progress
    ) -> None:
        """Read the image and verify every byte, without memory for all of it; as `read_image`."""
        manifest, header = archived.manifest, bytearray()
        size = manifest.block_bytes * _THREADS
        memory = allocate_memory(min(size, manifest.file_bytes))
        with ThreadPoolExecutor(_THREADS, "elastic-resume-archive") as threads:
            for start in range(0, manifest.file_bytes, size):
                batch = memory[: manifest.file_bytes - start]
                offsets = range(0, len(batch), manifest.block_bytes)
                blocks = [batch[offset : offset + manifest.block_bytes] for offset in offsets]
                first = start // manifest.block_bytes
                numbers = range(first, first + len(blocks))
                for _ in threads.map(functools.partial(self.read_block, archived), numbers, blocks):
                    pass
                if len(header) < MAX_HEADER_BYTES:
                    header += batch
                on_verified(start + len(batch))
        with self._translate_errors(archived.header.parts):
            Layout.parse(header, manifest.file_bytes)

    def read_block(self, archived: ArchivedCheckpoint, index: int, into: memoryview) -> None:
        """Read and verify one block.

        It is read again before it counts as damaged: the network may have done it.

        Raises:
            CheckpointError: naming the part and its bytes; the content of ``into`` must not be used.

        """
        part, offset = divmod(index * archived.manifest.block_bytes, archived.header.part_bytes)
        name = self._part_name(archived.header.parts, part)
        with self._translate_errors(f"part {part} of {archived.header.parts}"):
            for is_last_try in (False, True):
                try:
                    into[:] = self._get_block(name, offset, len(into), archived.manifest.blocks[index])
                except (TornError, CorruptError):
                    if is_last_try:
                        raise
                else:
                    return

    def _get_block(self, name: str, offset: int, size: int, digest: str) -> memoryview:
        data = self._store.get_range(name, offset, size)
        if data is None:
            raise TornError("is missing.")
        if len(data) < size:
            raise TornError(f"ends at byte {offset + len(data)}.")
        if xxhash.xxh3_128_hexdigest(data) != digest:
            raise CorruptError(f"bytes {offset} to {offset + size} do not match their digest.")
        return data

    # ---- writing ---------------------------------------------------------------------------------------

    def find_next_number(self) -> int:
        """Return the number of the log's next entry: the first free one behind its last entry.

        Raises:
            ArchiveError: the log cannot be listed or read, or has no free number.

        """
        log = self._list_log()
        taken = {number for number, _ in log}
        number = 1 + self._find_last(number for number, stored in log if not stored.is_prefix)
        while number in taken:
            number += 1
        if number > entries.MAX_NUMBER:
            raise ArchiveError(
                f"{self.description}: the log has an entry {entries.MAX_NUMBER}, so none can follow it. "
                "Was it copied there? Move it elsewhere."
            )
        return number

    def _find_last(self, numbers: Iterable[int]) -> int:
        """Return the greatest of these numbers whose object is an entry; 0 without one."""
        return next(filter(self._is_entry, sorted(numbers, reverse=True)), 0)

    def _is_entry(self, number: int) -> bool:
        """Return whether an object is an entry of any format, also a damaged one."""
        with contextlib.suppress(CheckpointError):
            return self._read_header(number) is not None
        data = self._store.get_range(self._entry_name(number), 0, entries.MAX_LINE_BYTES)
        return data is not None and entries.begins_as_entry(data)

    def begin(
        self,
        version: Version,
        nonce: str,
        first_number: int | None = None,
        manifest: Manifest | None = None,
    ) -> Attempt | None:
        """Begin an attempt to archive ``version``, whose number is fixed now; None if it is archived already.

        Nothing is written. ``nonce`` makes the attempt's id unique: 32 random hexadecimal digits, of which
        the first half is the job's. ``first_number`` is what `find_next_number` returned when the job began
        to archive; other jobs that put an entry since run beside this one. ``manifest`` is that of the
        checkpoint. None: what is archived is not compared with it.

        Raises:
            SecondWriterError: another job of an equal or newer generation archives too, or has archived
                another content of this version. This job must archive no more.

        """
        attempt = Attempt(self.find_next_number(), entries.make_attempt_id(version, nonce), version)
        if first_number is not None:
            numbers = (number for number in self.list_numbers() if number >= first_number)
            for number, header in self._read_headers(numbers).items():
                # Passing over one that cannot be read loses nothing: its number is taken, it stops deletions
                # of parts, and if another job has put it, the next entry of that job is noticed.
                if header is not None and not entries.is_outdated(attempt.id, header.attempt):
                    raise self._second_writer(number, header.attempt)
        if not any(entries.parse_attempt_id(name) == version for name in self.list_attempts()):
            return attempt
        self._headers.clear()  # as in `sweep`
        archived = self.find_numbers(lambda header: header.version == version)
        for number in archived:
            self._check_content(number, attempt, manifest)
        return None if archived else attempt

    def _check_content(self, number: int, attempt: Attempt, manifest: Manifest | None) -> None:
        """Raise SecondWriterError if another job has archived another content of the attempt's version.

        Nodes of one job may differ, as in what each rank's objects hold, so its own entry counts whatever its
        content is. An earlier start of the job has another writer. But a node does not differ from itself.
        """
        header = self._headers[number]
        if manifest is None or entries.find_writer(header.attempt) == entries.find_writer(attempt.id):
            return
        try:
            archived = self.read_entry(number).manifest
        except UnreadableError as error:
            raise ArchiveError(str(error)) from error
        except CheckpointError:
            return  # damaged, so what it was is not known
        if archived.node == manifest.node and archived.blocks != manifest.blocks:
            raise self._second_writer(number, header.attempt)

    def add_milestones(self, version: Version, nonce: str, milestones: Iterable[Milestone]) -> None:
        """Name a checkpoint that is archived already: entries never change, so a further one is put.

        Raises:
            SecondWriterError: see `commit`.
            CheckpointError: its entry cannot be read.

        """
        next_number = self.find_next_number()
        self._headers.clear()  # as in `sweep`
        with self._translate_errors(f"the entry of step {version[1]}"):
            numbers = self.find_numbers(lambda header: header.version == version)
            if not numbers:
                raise TornError("does not exist any more.")
            header = self._headers[numbers[0]]
            if (merged := entries.merge_milestones(header.milestones, milestones)) == header.milestones:
                return
            data = self._store.get_range(self._entry_name(numbers[0]), 0, entries.MAX_ENTRY_BYTES + 1)
            if data is None:
                raise TornError("does not exist any more.")
            entries.parse_entry(numbers[0], data, self.run_id)
        manifest_bytes = bytes(data[entries.parse_header(data)[1] :])
        attempt = Attempt(next_number, entries.make_attempt_id(version, nonce), version)
        self._put(attempt, replace(header, attempt=attempt.id, milestones=merged), manifest_bytes)

    def put_part(self, attempt_id: str, index: int, data: memoryview) -> None:
        """Store part ``index`` of an attempt; to store it twice is harmless."""
        self._store.put(self._part_name(attempt_id, index), data)
        failpoints.hit("archive.part-stored")

    def commit(
        self,
        attempt: Attempt,
        manifest_bytes: bytes,
        part_bytes: int,
        milestones: Iterable[Milestone] = (),
    ) -> None:
        """Make the attempt an archived checkpoint; all its parts must be stored.

        Raises:
            SecondWriterError: another attempt has its number. This job must archive no more.

        """
        manifest = Manifest.parse(manifest_bytes)
        labels = entries.merge_milestones((), milestones)
        history = entries.describe_history(manifest)
        header = EntryHeader(
            attempt.id, part_bytes, attempt.id, manifest.position.epoch, None, labels, history
        )
        self._put(attempt, header, manifest_bytes)

    def _put(self, attempt: Attempt, header: EntryHeader, manifest_bytes: bytes) -> None:
        """Put an entry under the attempt's number, if there is none."""
        others = self._read_headers(self.list_numbers()).values()
        moments = [other.moment for other in others if other is not None]
        newest = max([*moments, header.moment]) if len(moments) == len(others) else None
        data = entries.encode_header(replace(header, newest=newest)) + manifest_bytes
        failpoints.hit("archive.before-entry")
        self._headers.pop(attempt.number, None)
        for pause_s in _CONFLICT_PAUSES_S:
            if self._put_entry(attempt.number, data):
                break
            try:
                winner = self._read_header(attempt.number)
            except CheckpointError as error:
                raise self._second_writer(attempt.number, "") from error
            if winner is not None and winner.attempt == attempt.id:
                break  # the answer to an earlier request was lost
            if winner is not None:
                raise self._second_writer(attempt.number, winner.attempt)
            time.sleep(pause_s)  # another request for this name is in progress
        else:
            raise ArchiveError(
                f"{self.description}: entry {attempt.number} is neither there nor accepted; try again later."
            )
        failpoints.hit("archive.after-entry")
        self._check_end_of_log(attempt.number + 1)

    def check_number(self, attempt: Attempt) -> None:
        """Raise SecondWriterError if another attempt has this one's number."""
        self._check_end_of_log(attempt.number)

    def _check_end_of_log(self, number: int) -> None:
        """Raise SecondWriterError if the log has an entry of this number or a greater one."""
        if last := self._find_last(each for each in self.list_numbers() if each >= number):
            header = self._headers.get(last)
            raise self._second_writer(last, header.attempt if header is not None else "")

    def list_attempts(self) -> list[str]:
        """Return the ids of all attempts of which there are parts, also unfinished ones."""
        names = self._store.list(f"{self.run_id}/parts")
        return [s.name for s in names if s.is_prefix and entries.parse_attempt_id(s.name) is not None]

    def list_parts(self, attempt_id: str) -> set[int]:
        """Return the indices of the parts of an attempt that are stored."""
        names = self._store.list(f"{self.run_id}/parts/{attempt_id}")
        return {int(stored.name) for stored in names if stored.name.isdecimal()}

    def sweep(self, candidates: Iterable[str]) -> list[str]:
        """Delete the attempts of ``candidates`` that no entry names; return their ids.

        Call it after a commit, with attempts that `list_attempts` returned before that commit; or if the
        store is full, with attempts that were there when the present one began, and are outdated by it.
        """
        known = {header.parts for header in self._read_headers(self.list_numbers()).values() if header}
        candidates = [attempt_id for attempt_id in candidates if attempt_id not in known]
        if not candidates:
            return []
        self._headers.clear()  # a number may have another entry now, whose parts must stay
        headers = self._read_headers(self.list_numbers())
        if not self._can_read_all(headers):
            return []
        named = {header.parts for header in headers.values() if header is not None}
        removed = [attempt_id for attempt_id in candidates if attempt_id not in named]
        for attempt_id in removed:
            self._delete_attempt(attempt_id)
        return removed

    def prune(self, keep: int) -> list[int]:
        """Delete checkpoints as `entries.choose_pruned` says; return the numbers of their entries.

        Call it after a commit, or if the store is full.
        """
        self._headers.clear()  # as in `sweep`
        headers = self._read_headers(self.list_numbers())
        readable = [(number, header) for number, header in headers.items() if header is not None]
        pruned, can_delete_parts = entries.choose_pruned(readable, keep), self._can_read_all(headers)
        named = {header.parts for number, header in readable if number not in pruned}
        for number in pruned:
            self._store.delete(self._entry_name(number))
            failpoints.hit("archive.entry-pruned")
            header = headers[number]
            if header is not None and header.parts not in named and can_delete_parts:
                self._delete_attempt(header.parts)
        return pruned

    def _can_read_all(self, headers: Mapping[int, EntryHeader | None]) -> bool:
        """Return whether all entries can be read: one that cannot may name the parts of any attempt."""
        unreadable = sorted(number for number, header in headers.items() if header is None)
        if unreadable and not self._has_warned_of_entry:
            self._has_warned_of_entry = True
            _LOGGER.warning(
                "%s/log/%08d is no entry that can be read, so parts that are not needed any more stay in the "
                "archive: see it with elastic-resume ls, and move it elsewhere.",
                self.description,
                unreadable[0],
            )
        return not unreadable

    def put_events(self, node: str, data: bytes) -> None:
        """Store the newest events of a node, for ``report``."""
        self._store.put(f"{self.run_id}/events/{node}.jsonl", data)

    def read_events(self) -> dict[str, memoryview]:
        """Return the newest events of each node, by its name; raise ArchiveError."""
        names = [stored.name for stored in self._store.list(f"{self.run_id}/events")]
        nodes = [name.removesuffix(".jsonl") for name in names if name.endswith(".jsonl")]
        found = {
            node: self._store.get_range(f"{self.run_id}/events/{node}.jsonl", 0, MAX_EVENTS_BYTES)
            for node in nodes
            if re.fullmatch(constants.SAFE_NAME_PATTERN, node)
        }
        return {node: data for node, data in found.items() if data is not None}

    def _put_entry(self, number: int, data: bytes) -> bool:
        name = self._entry_name(number)
        try:
            return self._store.put_if_absent(name, data)
        except ArchiveError as error:
            if error.kind != ArchiveErrorKind.UNSUPPORTED:
                raise
            if not self._has_warned:
                self._has_warned = True
                _LOGGER.warning(
                    "%s: this store cannot create an object only if it does not exist, so a second job of "
                    "the same run id is not surely noticed; start one job at a time.",
                    self.description,
                )
        if self._store.head(name) is not None:
            return False
        self._store.put(name, data)
        return True

    def _read_headers(self, numbers: Iterable[int]) -> dict[int, EntryHeader | None]:
        """Return the first line of each entry that exists; None for one that cannot be read."""

        def read(number: int) -> tuple[int, EntryHeader | None, bool]:
            try:
                header = self._read_header(number)
            except CheckpointError:
                return number, None, True
            return number, header, header is not None

        found = map_in_daemon_threads(read, numbers, _THREADS)  # an agent that must end waits for none
        return {number: header for number, header, exists in found if exists}

    def _read_header(self, number: int) -> EntryHeader | None:
        """Return the first line of an entry; None if it does not exist."""
        header = self._headers.get(number)  # another thread may empty it
        if header is None:
            data = self._store.get_range(self._entry_name(number), 0, entries.MAX_LINE_BYTES)
            if data is None:
                return None
            header, _ = entries.parse_header(data)
            self._headers[number] = header
        return header

    def _delete_attempt(self, attempt_id: str) -> None:
        prefix = f"{self.run_id}/parts/{attempt_id}"
        for stored in self._store.list(prefix):
            self._store.delete(f"{prefix}/{stored.name}")

    def _second_writer(self, number: int, attempt_id: str) -> SecondWriterError:
        who, what = "another job", f"entry {number}"
        with contextlib.suppress(CheckpointError):  # pruned meanwhile
            manifest = self.read_entry(number).manifest
            who = f"node {manifest.node} of another job"
            what += f", {milestone.format_short_version(manifest.version)}"
        return SecondWriterError(
            f"{self.description}: {who} archives under this run id too ({what}). This job archives no more, "
            "and trains on. Stop one of them, or give it another --rdzv-id.",
            number=number,
            attempt=attempt_id,
        )

    # ---- names and errors ------------------------------------------------------------------------------

    def _entry_name(self, number: int) -> str:
        return f"{self.run_id}/log/{number:08d}"

    def _part_name(self, attempt_id: str, index: int) -> str:
        return f"{self.run_id}/parts/{attempt_id}/{index:05d}"

    @contextlib.contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        """Prefix a CheckpointError with its place; turn an ArchiveError into an UnreadableError."""
        try:
            yield
        except CheckpointError as error:
            raise type(error)(f"{self.description}: {what}: {error}") from error
        except ArchiveError as error:
            raise UnreadableError(str(error)) from error
