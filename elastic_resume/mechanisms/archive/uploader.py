"""Upload this node's share of the checkpoint that the leader has chosen, in a thread of low priority.

Commits and training never wait for it. An error of the archive is logged at once and then every minute, and
the request is repeated with growing pauses; training goes on. At the end of the job one node uploads the last
checkpoint alone (`judge.decide_last_upload`).

At most one part is in memory. The bytes come from a committed checkpoint, and are verified first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

from elastic_resume import constants, failpoints
from elastic_resume.archive.archive import Archive, open_archive
from elastic_resume.archive.entries import Attempt, is_outdated, make_attempt_id, merge_milestones
from elastic_resume.background import BackgroundThread, lower_priority
from elastic_resume.checkpoint.catalog import Catalog, choose_milestones
from elastic_resume.checkpoint.reader import parse_checkpoint_name
from elastic_resume.console import ByteProgress
from elastic_resume.errors import ArchiveError, CheckpointError, MachineError, SecondWriterError
from elastic_resume.events import Event
from elastic_resume.mechanisms.archive.description import ArchiveStatus
from elastic_resume.mechanisms.archive.judge import (
    UPLOADS,
    ArchivedVersion,
    ArchiveVerdict,
    Begun,
    EndFacts,
    HeldCheckpoint,
    LogStart,
    NodeReport,
    Upload,
    Version,
    decide_last_upload,
    iter_parts,
    to_ranges,
)
from elastic_resume.mechanisms.archive.pinned_checkpoint import PinnedCheckpoint
from elastic_resume.mechanisms.mechanism import AgentContext, AgentPart, decode_body, encode_body
from elastic_resume.policy.checkpoint_interval import IntervalSetting
from elastic_resume.policy.restart import JudgedFailure
from elastic_resume.rendezvous.client import RendezvousClient
from elastic_resume.rendezvous.core.interface import StartWorkers
from elastic_resume.slots.progress_page import read_own_records
from elastic_resume.units import format_count

logger = logging.getLogger(__name__)

POLL_S = 0.2
FIRST_PAUSE_S = 2.0
MAX_PAUSE_S = 300.0
LOG_REPEAT_S = 60.0
MAX_KEPT = 2
MAX_NAMED = 4
"""So many of the newest checkpoints, and of the oldest milestones, stay open beside what is uploaded."""
RATE_WINDOW_S = 20.0
DEFAULT_GRACE_S = 5.0
LAST_UPLOAD_LIMIT_S = 3600.0
LAST_FAILURE_LIMIT_S = 120.0
"""So long the last checkpoint is tried again while every request fails."""
CLOSE_TIMEOUT_S = 1.0
MAX_EVENTS_BYTES = 16 << 20
"""Of a node's newest events, which go to the archive too."""


class ArchiveFailures:
    """The failures of the archive in a row: when to try again, and when to log."""

    def __init__(self) -> None:
        self.count = 0
        self.text = ""
        self.retry_at = self.began_at = self._logged_at = 0.0

    def add(self, error: Exception) -> None:
        """Note a failure, and log it unless a line about this series is recent."""
        now, self.text = time.monotonic(), str(error)
        if not self.count:
            self.began_at = self._logged_at = now
            logger.warning("%s Training continues, and this node tries again.", self.text)
        elif now - self._logged_at >= LOG_REPEAT_S:
            self._logged_at = now
            logger.warning("uploads to the archive still fail: %s", self.text)
        self.retry_at = now + min(FIRST_PAUSE_S * 2.0 ** min(self.count, 20), MAX_PAUSE_S)
        self.count += 1

    def clear(self) -> None:
        """Note a success."""
        if self.count:
            logger.warning("uploads to the archive work again.")
        self.count, self.text, self.retry_at = 0, "", 0.0


class StepRate:
    """The newest step of this node's workers, and the seconds between two of them."""

    def __init__(self, node_dir: Path, local_world_size: int) -> None:
        self._node_dir, self._local_world_size = node_dir, local_world_size
        self._steps: deque[tuple[float, int]] = deque()
        self.step, self.step_s = 0, 0.0

    def update(self) -> None:
        """Read the newest step; 0 while no worker runs."""
        now, records = time.monotonic(), read_own_records(self._node_dir, self._local_world_size)
        generation = max((record.generation for record in records), default=0)
        steps = [record.step for record in records if record.generation == generation]
        step = max(steps, default=0)
        if step < self.step or not self.step:  # a generation begins, which takes longer than a step
            self._steps.clear()
        self.step = step
        self._steps.append((now, step))
        while len(self._steps) > 2 and self._steps[1][0] <= now - RATE_WINDOW_S:
            self._steps.popleft()
        began_at, began = self._steps[0]
        if step > began > 0:
            self.step_s = (now - began_at) / (step - began)


class ArchiveUploader(AgentPart):
    """Uploads of one agent, from `start` to `close`. Without an address it does nothing."""

    def __init__(self, context: AgentContext) -> None:
        """Raise ConfigError if a package that the address needs is missing."""
        settings, self._node_dir = context.settings, context.node_dir
        self._run_id, self._node = self._node_dir.parent.name, self._node_dir.name
        address = settings.get("archive")
        self._archive: Archive | None = open_archive(address, self._run_id) if address else None
        self._every: IntervalSetting = settings["archive_every"] if address else IntervalSetting()
        self._keep: int | None = settings.get("archive_keep")
        self._committer, self._emit = context.committer, context.emit
        self._rate = StepRate(self._node_dir, context.local_world_size)
        self._thread = BackgroundThread("elastic-resume-archive", self._work, retry_s=LOG_REPEAT_S)
        self._client: RendezvousClient | None = None
        self._nonce = secrets.token_hex(8)
        self._world: StartWorkers | None = None
        self._stopping_at: float | None = None
        self._wakeup = threading.Event()  # a signal to stop
        self._committed: deque[Path] = deque(maxlen=MAX_KEPT)  # checkpoints that the thread opens
        self._has_new_names = True  # on this node's disk, as far as is known; the thread looks
        self._archived_at = 0.0  # of `_verdict.archived`, on this machine's clock
        self._verdict, self._verdict_body = ArchiveVerdict(), ""
        self._sent_body = ""
        # Only the thread writes these, and opens and closes checkpoints.
        self._held: dict[Version, PinnedCheckpoint] = {}
        self._named: dict[Version, Path] = {}  # checkpoints whose milestones are not archived
        self._reported: tuple[HeldCheckpoint, ...] = ()
        self._failures = ArchiveFailures()
        self._log_start: LogStart | None = None
        self._begun: Begun | None = None
        self._begun_at = 0.0
        self._attempt, self._put = "", frozenset[int]()
        self._archived: ArchivedVersion | None = None
        self._done_turn = self._outdated_turn = 0
        self._checked_turn = 0  # names were compared with the archive after this turn
        self._refusal = ""
        self._put_bytes, self._put_s = 0, 0.0
        self._archived_events: ArchivedVersion | None = None  # `put_events` was called after it

    # ---- the agent's other threads --------------------------------------------------------------------

    def start(self, client: RendezvousClient) -> None:
        """Take offers of checkpoints, beginning with the newest on the disk."""
        self._client = client
        if self._archive is not None:
            self._committed.extend(self._find_newest())
            self._committer.checkpoint_readers.append(self._committed.append)
            self._thread.start()

    def begin_generation(self, world: StartWorkers) -> None:
        """Keep the newest view: its first node archives the last checkpoint."""
        self._world = world

    def observe(self, event: Event) -> None:
        """Note that a worker has named a checkpoint."""
        if event.get("event") == "milestone":
            self._has_new_names = True

    def begin_stop(self) -> None:
        """Note that this node has to end soon."""
        if self._stopping_at is None:
            self._stopping_at = time.monotonic()
        self._wakeup.set()

    def update(self, client: RendezvousClient) -> ArchiveStatus | None:
        """Report the newest step, and return what is archived."""
        del client
        if self._archive is None:
            return None
        self._rate.update()
        self._send_report()
        upload, archived = self._verdict.upload, self._verdict.archived
        return ArchiveStatus(
            self._archive.description,
            archived.step if archived else None,
            round(time.monotonic() - self._archived_at, 3) if archived else 0.0,
            upload.step if upload else None,
            len(set(iter_parts(upload.put))) if upload else 0,
            upload.parts if upload else 0,
            (self._verdict.refusal or self._failures.text)[:500],
        )

    def close(self) -> None:
        """Upload the job's last checkpoint if that is up to this node, and end the thread."""
        if self._archive is None or self._client is None:
            return
        self._thread.request_close()
        named = self._list_last_named(self._archive)
        for path in {**dict.fromkeys(named), **dict.fromkeys(self._find_newest())}:
            with contextlib.suppress(CheckpointError):  # the committer has logged that nothing was saved
                checkpoint = PinnedCheckpoint(path, self._run_id)
                is_due, text = decide_last_upload(self._describe_end(checkpoint, is_named=path in named))
                if text:
                    logger.warning("%s", text)
                if is_due:
                    logger.info("archiving step %d before this node ends.", checkpoint.manifest.step)
                    self._upload_last(checkpoint, self._archive)
        if self._stopping_at is None and not self._failures.count:
            self._put_events()
        self._thread.close(CLOSE_TIMEOUT_S)

    def _find_newest(self) -> list[Path]:
        with contextlib.suppress(MachineError):
            return [entry.path for entry in Catalog(self._node_dir, self._run_id).list_valid()[:1]]
        return []

    def _read_verdict(self) -> ArchiveVerdict:
        fact = self._client.verdicts.get(UPLOADS.name) if self._client else None
        if fact is not None and fact.body != self._verdict_body:
            self._verdict_body, before = fact.body, self._verdict.archived
            self._verdict = verdict = decode_body(ArchiveVerdict, fact.body)
            if verdict.archived != before:
                self._archived_at = time.monotonic() - verdict.age_s
        return self._verdict

    def _send_report(self) -> None:
        upload = self._verdict.upload
        report = NodeReport(
            nonce=self._nonce,
            every_s=self._every.seconds or 0.0,
            every_steps=self._every.steps or 0,
            step=self._rate.step,
            step_s=round(self._rate.step_s, 6),
            commit_s=round(self._committer.last_commit_s, 3),
            bytes_per_s=round(self._put_bytes / self._put_s) if self._put_s else 0.0,
            held=self._reported,
            begun=self._begun,
            log_start=self._log_start,
            attempt=self._attempt,
            put=to_ranges(self._put),
            archived=self._archived,
            failures=self._failures.count if upload else 0,
            checked_turn=self._checked_turn,
            done_turn=self._done_turn,
            outdated_turn=self._outdated_turn,
            refusal=self._refusal,
        )
        body = encode_body(report)
        if body != self._sent_body and self._client:
            self._sent_body = body
            self._client.send_fact(UPLOADS.name, 0, body)

    # ---- the thread -----------------------------------------------------------------------------------

    def _work(self) -> float:
        """Hand the requested step to the workers, and do one thing for the upload under way.

        Return the seconds until the next one.
        """
        lower_priority()
        verdict = self._read_verdict()
        if time.monotonic() >= self._failures.retry_at and not verdict.upload:
            self._find_new_names()
        self._committer.slot_pool.control_block.set("commit_step", verdict.request_step)
        self._open_committed(verdict.upload)
        checkpoint = self._held.get(verdict.upload.version) if verdict.upload else None
        if not verdict.upload or not checkpoint or time.monotonic() < self._failures.retry_at:
            if verdict.archived != self._archived_events:
                self._archived_events = verdict.archived
                self._put_events()
            self._send_report()
            return POLL_S
        if checkpoint.held.digest != verdict.upload.digest:
            return POLL_S
        has_acted = False
        try:
            has_acted = self._advance(verdict.upload, checkpoint)
            if has_acted:
                self._failures.clear()
        except CheckpointError as error:
            self._held.pop(verdict.upload.version).close()
            logger.warning("this node uploads no part of step %d: %s", verdict.upload.step, error)
        except SecondWriterError as error:
            own = verdict.upload.attempt or make_attempt_id(verdict.upload.version, self._make_nonce())
            if self._is_outdated(own, error):
                self._outdated_turn = verdict.upload.turn
            else:
                self._refuse(error)
        except ArchiveError as error:
            self._note_failure(error)
        self._send_report()
        return 0.0 if has_acted else POLL_S

    def _open_committed(self, upload: Upload | None) -> None:
        """Open the checkpoints that were committed, and close those that are not needed any more."""
        while self._committed:
            path = self._committed.popleft()
            with contextlib.suppress(CheckpointError):  # pruned meanwhile
                opened = PinnedCheckpoint(path, self._run_id)
                if replaced := self._held.pop(opened.held.version, None):
                    replaced.close()
                self._held[opened.held.version] = opened
        named = sorted(self._named)[:MAX_NAMED]
        for version in named:
            if version not in self._held:
                try:
                    self._held[version] = PinnedCheckpoint(self._named[version], self._run_id)
                except CheckpointError:  # another one of that name is better now
                    del self._named[version]
        kept = {*sorted(self._held)[-MAX_KEPT:], *named, upload.version if upload else (0, 0)}
        for version in self._held.keys() - kept:
            self._held.pop(version).close()
        self._reported = tuple(
            replace(self._held[version].held, is_named=version in self._named)
            for version in sorted(self._held, reverse=True)
        )

    def _find_new_names(self) -> None:
        """Find this node's milestones that are not archived, after each upload and each new name."""
        if self._archive is None or not (self._named or self._has_new_names):
            return
        if self._checked_turn == self._verdict.turn and not self._has_new_names:
            return
        self._has_new_names = False
        try:
            self._named = self._list_named(self._archive)
        except ArchiveError as error:
            self._has_new_names = True
            self._note_failure(error)
        else:
            self._failures.clear()
            self._checked_turn = self._verdict.turn

    def _list_named(self, archive: Archive) -> dict[Version, Path]:
        """Return the checkpoints of this node's disk whose milestones are not archived."""
        with contextlib.suppress(MachineError):
            labels = choose_milestones(Catalog(self._node_dir, self._run_id).list_valid())
            archived = archive.list_milestones() if labels else {}
            versions = {path: parse_checkpoint_name(path.name) or (0, 0) for path in labels}
            return {
                versions[path]: path
                for path, own in labels.items()
                if versions[path] not in archived
                or merge_milestones(archived[versions[path]], own) != archived[versions[path]]
            }
        return {}

    def _advance(self, upload: Upload, checkpoint: PinnedCheckpoint) -> bool:
        """Begin the upload, put the next part of this node's share, or put the entry; or nothing."""
        archive, node = self._archive, self._node
        if archive is None or upload.turn in {self._done_turn, self._outdated_turn}:
            return False
        if not upload.attempt:
            if upload.owner != node or (self._begun and self._begun.turn == upload.turn):
                return False
            attempt = self._begin(archive, checkpoint)
            if attempt is None:
                archive.add_milestones(upload.version, self._make_nonce(), checkpoint.read_milestones())
                self._note_archived(upload.version)
                self._done_turn = upload.turn
            else:
                self._begun = Begun(upload.turn, attempt.number, attempt.id)
            return True
        if upload.attempt != self._attempt:
            self._attempt, self._put, self._begun_at = upload.attempt, frozenset(), time.monotonic()
        known = self._put.union(iter_parts(upload.put))
        part = next((part for part in iter_parts(upload.share_of(node)) if part not in known), None)
        if part is not None:
            failpoints.hit("archive.put-part")
            self._put_part(archive, upload.attempt, checkpoint, part)
            self._put |= {part}
            failpoints.hit("archive.part-put")
            return True
        if not upload.is_complete or upload.owner != node:
            return False
        self._commit(archive, Attempt(upload.number, upload.attempt, upload.version), checkpoint)
        self._done_turn = upload.turn
        return True

    def _begin(self, archive: Archive, checkpoint: PinnedCheckpoint) -> Attempt | None:
        """Begin an attempt; None if the checkpoint is archived already."""
        writer, first_number = self._verdict.writer or self._nonce, self._verdict.first_number
        if not first_number:  # no node of this job has begun one
            if self._log_start is None or self._log_start.writer != writer:
                self._log_start = LogStart(writer, archive.find_next_number())
            first_number = self._log_start.number
        manifest = checkpoint.manifest
        return archive.begin(manifest.version, self._make_nonce(), first_number, manifest.blocks)

    def _note_archived(self, version: Version) -> None:
        if self._archived is None or version > self._archived.version:
            self._archived = ArchivedVersion(*version)

    def _put_part(self, archive: Archive, attempt: str, checkpoint: PinnedCheckpoint, part: int) -> None:
        data = checkpoint.read_part(part)
        began = time.monotonic()
        archive.put_part(attempt, part, data)
        self._put_bytes, self._put_s = self._put_bytes + len(data), self._put_s + time.monotonic() - began

    def _commit(self, archive: Archive, attempt: Attempt, checkpoint: PinnedCheckpoint) -> None:
        """Put the entry, and delete what is not needed any more; an error of that is logged only."""
        missing = set(range(checkpoint.held.parts)) - archive.list_parts(attempt.id)
        if missing:
            raise ArchiveError(
                f"{archive.description}: {format_count(len(missing), 'part')} of step {attempt.version[1]} "
                "that other nodes have put are not there: give all nodes the same --archive, and a directory "
                "that all of them see."
            )
        candidates = archive.list_attempts()
        labels = checkpoint.read_milestones()
        archive.commit(attempt, checkpoint.manifest_bytes, checkpoint.part_bytes, labels)
        manifest = checkpoint.manifest
        self._note_archived(attempt.version)
        seconds = round(time.monotonic() - self._begun_at, 3)
        self._emit(
            "archived",
            step=manifest.step,
            checkpoint_generation=manifest.generation,
            number=attempt.number,
            bytes=manifest.file_bytes,
            seconds=seconds,
            archive=archive.description,
        )
        logger.info(
            "step %d is archived in %s (entry %d).", manifest.step, archive.description, attempt.number
        )
        self._send_report()
        try:
            archive.sweep([candidate for candidate in candidates if candidate != attempt.id])
            if self._keep is not None:
                archive.prune(self._keep)
        except (ArchiveError, CheckpointError) as error:
            logger.warning("step %d is archived, but older data were not deleted: %s", manifest.step, error)

    def _put_events(self) -> None:
        """Put this node's events beside the checkpoints, for ``report``; an error is not worth a line."""
        with (
            contextlib.suppress(OSError, ArchiveError),
            open(self._node_dir / constants.EVENTS_FILE, "rb") as file,
        ):
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_EVENTS_BYTES))
            if self._archive is not None:
                self._archive.put_events(self._node, file.read(MAX_EVENTS_BYTES))

    def _note_failure(self, error: ArchiveError) -> None:
        if not self._failures.count:
            self._emit("archive-failed", error=str(error)[:1000])
        self._failures.add(error)

    def _make_nonce(self) -> str:
        return (self._verdict.writer or self._nonce) + secrets.token_hex(8)

    def _is_outdated(self, attempt: str, error: SecondWriterError) -> bool:
        """Return whether a next attempt may follow the one whose number is taken."""
        winner = error.attempt
        with contextlib.suppress(CheckpointError):
            winner = winner or (
                self._archive.read_entry(error.number).header.attempt if self._archive else ""
            )
        return is_outdated(attempt, winner)

    def _refuse(self, error: SecondWriterError) -> None:
        self._refusal = str(error)[:500]
        self._emit("archive-refused", error=self._refusal)
        logger.error("%s", error)

    # ---- the end of the job ---------------------------------------------------------------------------

    def _list_last_named(self, archive: Archive) -> list[Path]:
        """Return the milestones that are not archived, oldest first, if that is up to this node."""
        if self._world is None or self._world.rank != 0 or self._refusal or self._read_verdict().refusal:
            return []
        try:
            return [path for _, path in sorted(self._list_named(archive).items())]
        except ArchiveError as error:
            logger.warning("milestones may be missing in the archive: %s", error)
            return []

    def _describe_end(self, last: PinnedCheckpoint, *, is_named: bool) -> EndFacts:
        verdict, world = self._read_verdict(), self._world
        end = self._client.job_end if self._client else None
        known = [each.version for each in (verdict.archived, self._archived) if each]
        return EndFacts(
            newest=last.held.version if not (self._refusal or verdict.refusal) else None,
            archived=None if is_named else max(known, default=None),
            is_rejected=end is not None and isinstance(end.reason, JudgedFailure),
            rank=world.rank if world else 1,
            left_s=self._find_left_s(),
            file_bytes=last.manifest.file_bytes,
            bytes_per_s=self._put_bytes / self._put_s if self._put_s else verdict.bytes_per_s,
        )

    def _find_left_s(self) -> float | None:
        """Return how long this node may take after a signal to stop; None without one."""
        if self._stopping_at is None:
            return None
        try:
            grace_s = float(os.environ.get(constants.ENV_GRACE, ""))
        except ValueError:
            grace_s = DEFAULT_GRACE_S
        return self._stopping_at + grace_s - time.monotonic()

    def _upload_last(self, checkpoint: PinnedCheckpoint, archive: Archive) -> None:
        """Upload a checkpoint without the other nodes; give up when time is over, and log what is missing."""
        began, done, failures = time.monotonic(), 0, ArchiveFailures()
        self._begun_at = began
        manifest, attempt, part = checkpoint.manifest, None, 0
        what = f"archiving step {manifest.step}"
        with ByteProgress(what, manifest.file_bytes, lambda: done):
            while True:
                try:
                    attempt = attempt or self._begin(archive, checkpoint)
                    while attempt and part < checkpoint.held.parts:
                        self._put_part(archive, attempt.id, checkpoint, part)
                        part, done = part + 1, done + checkpoint.part_bytes
                    if attempt:
                        self._commit(archive, attempt, checkpoint)
                    else:
                        labels = checkpoint.read_milestones()
                        archive.add_milestones(manifest.version, self._make_nonce(), labels)
                    return
                except SecondWriterError as error:
                    own = attempt.id if attempt else make_attempt_id(manifest.version, self._make_nonce())
                    if not self._is_outdated(own, error):
                        self._refuse(error)
                        return
                    attempt, part, done = None, 0, 0
                    continue
                except (ArchiveError, CheckpointError) as error:
                    failures.add(error)
                    now, left_s = time.monotonic(), self._find_left_s()
                    is_late = now - began > LAST_UPLOAD_LIMIT_S or (left_s is not None and left_s <= 0)
                    if is_late or now - failures.began_at > LAST_FAILURE_LIMIT_S:
                        text = "step %d is not archived, and is on this node's disk: %s"
                        logger.warning(text, manifest.step, error)
                        return
                self._wakeup.clear()
                self._wakeup.wait(max(0.0, failures.retry_at - time.monotonic()))
