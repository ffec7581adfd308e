"""Upload this node's share of the checkpoint that the leader has chosen, in a thread of low priority.

Commits and training never wait for it. An error of the archive is logged at once and then every minute, and
the request is repeated with growing pauses; training goes on. At the end of the job the thread of one node
uploads the last checkpoint alone (`judge.decide_last_upload`, `last_upload`).

At most one part is in memory. The bytes come from a committed checkpoint, and are verified first.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

from elastic_resume import failpoints
from elastic_resume.archive.archive import open_archive
from elastic_resume.archive.entries import Attempt
from elastic_resume.background import BackgroundThread, lower_priority
from elastic_resume.errors import ArchiveError, CheckpointError, SecondWriterError
from elastic_resume.events import Event
from elastic_resume.mechanisms.archive import UPLOADS
from elastic_resume.mechanisms.archive.description import ArchiveStatus
from elastic_resume.mechanisms.archive.failures import ArchiveFailures
from elastic_resume.mechanisms.archive.held_checkpoints import HeldCheckpoints
from elastic_resume.mechanisms.archive.judge import (
    ArchivedVersion,
    ArchiveVerdict,
    Begun,
    EndFacts,
    NodeReport,
    Phase,
    Upload,
    decide_last_upload,
    iter_parts,
    to_ranges,
)
from elastic_resume.mechanisms.archive.last_upload import LastUpload
from elastic_resume.mechanisms.archive.pinned_checkpoint import PinnedCheckpoint
from elastic_resume.mechanisms.archive.writer import ArchiveWriter
from elastic_resume.mechanisms.mechanism import AgentContext, AgentPart, decode_body, encode_body
from elastic_resume.milestone import Version
from elastic_resume.policy.checkpoint_interval import IntervalSetting
from elastic_resume.policy.reasons import JobFinished
from elastic_resume.policy.restart import JudgedFailure
from elastic_resume.rendezvous.client import RendezvousClient
from elastic_resume.rendezvous.core.interface import StartWorkers
from elastic_resume.slots.progress_page import read_own_records

logger = logging.getLogger(__name__)

POLL_S = 0.2
RETRY_S = 60.0  # after a defect
MAX_QUERY_S = 5.0
RATE_WINDOW_S = 20.0


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


@dataclass(frozen=True, slots=True)
class OwnShare:
    """What this node has put for an attempt, and when it began, by CLOCK_MONOTONIC."""

    attempt: str = ""
    begun_at: float = 0.0
    put: frozenset[int] = frozenset()


class ArchiveUploader(AgentPart):
    """Uploads of one agent, from `start` to `close`."""

    def __init__(self, context: AgentContext) -> None:
        """Raise ConfigError if a package that the address needs is missing."""
        settings, self._node_dir, self._emit = context.settings, context.node_dir, context.emit
        self._run_id, self._node = self._node_dir.parent.name, self._node_dir.name
        archive = open_archive(settings["archive"], self._run_id)
        self._writer = ArchiveWriter(archive, settings["archive_keep"], context.emit)
        self._every: IntervalSetting = settings["archive_every"]
        self._committer = context.committer
        self._held = HeldCheckpoints(self._node_dir, self._run_id)
        self._rate = StepRate(self._node_dir, context.local_world_size)
        self._last = LastUpload(context.emit, self._node_dir)
        self._thread = BackgroundThread("elastic-resume-archive", self._work, retry_s=RETRY_S)
        # Other threads write these, and the thread reads them.
        self._client: RendezvousClient | None = None
        self._view: StartWorkers | None = None
        self._report_lock = threading.Lock()  # guards the body that was sent last
        self._sent_body = ""
        # Only the thread writes these, and opens and closes checkpoints. Others read immutable values.
        self._verdict, self._verdict_body = ArchiveVerdict(), ""
        self._archived_at = 0.0  # of `_verdict.archived`, on this machine's clock
        self._failures = ArchiveFailures(context.emit)
        self._begun: Begun | None = None
        self._share = OwnShare()
        self._done_turn = self._outdated_turn = 0
        self._archived_events: ArchivedVersion | None = None  # `put_events` was called after it

    # ---- the agent's other threads --------------------------------------------------------------------

    def find_generation(self) -> int:
        """See AgentPart. Without an answer within `MAX_QUERY_S`, agents count without the archive."""
        found = [0]

        def ask() -> None:
            with contextlib.suppress(ArchiveError):
                newest = self._writer.archive.find_newest()
                found.append(newest[0] if newest else 0)

        thread = threading.Thread(target=ask, name="elastic-resume-archive-query", daemon=True)
        thread.start()
        thread.join(MAX_QUERY_S)
        return found[-1]

    def start(self, client: RendezvousClient) -> None:
        """Take offers of checkpoints, beginning with the newest on the disk."""
        self._client = client
        self._held.start()
        self._committer.checkpoint_listeners.append(self._held.note_commit)
        self._thread.start()

    def begin_generation(self, view: StartWorkers) -> None:
        """Keep the newest view: its first node archives the last checkpoint."""
        self._view = view

    def observe(self, event: Event) -> None:
        """Note that a worker has named a checkpoint."""
        if event.get("event") == "milestone":
            self._held.note_milestone()

    def begin_stop(self) -> None:
        """Note that this node has to end soon."""
        self._last.begin_stop()

    def update(self, client: RendezvousClient) -> ArchiveStatus:
        """Report the newest step, and return what is archived."""
        del client
        self._rate.update()
        self._send_report()
        upload, archived, now = self._verdict.upload, self._verdict.archived, time.monotonic()
        series, refusal = self._failures.series, self._verdict.refusal
        return ArchiveStatus(
            self._writer.archive.description,
            archived.step if archived else None,
            round(now - self._archived_at, 3) if archived else 0.0,
            upload.step if upload else None,
            len(set(iter_parts(upload.put))) if upload else 0,
            upload.parts if upload else 0,
            (refusal or (series.text if series else ""))[:500],
            round(now - series.began_at, 3) if series and not refusal else None,
            round(max(0.0, series.retry_at - now), 3) if series and not refusal else None,
        )

    def close(self) -> None:
        """Have the thread upload the job's last checkpoint if that is up to this node, and end."""
        if self._client is not None:
            is_first = self._view is not None and self._view.rank == 0
            self._last.wait(is_first=is_first, find_archived=self._find_archived, put_s=self._writer.put_s)
            self._thread.request_close()

    def _find_archived(self) -> Version | None:
        """Return the newest checkpoint of which this node knows that it is archived."""
        known = (self._verdict.archived, self._writer.archived)
        return max((each.version for each in known if each), default=None)

    def _send_report(self) -> None:
        verdict, writer, share = self._verdict, self._writer, self._share
        step, step_s = self._describe_step(verdict)
        report = NodeReport(
            nonce=writer.nonce,
            every_s=self._every.seconds or 0.0,
            every_steps=self._every.steps or 0,
            query=verdict.query,
            step=step,
            step_s=step_s,
            commit_s=round(self._committer.last_commit_s, 3),
            bytes_per_s=round(writer.bytes_per_s),
            held=self._held.offered,
            begun=self._begun,
            log_start=writer.log_start,
            attempt=share.attempt,
            put=to_ranges(share.put),
            archived=writer.archived,
            failures=self._failures.count if verdict.upload else 0,
            checked_turn=self._held.checked_turn,
            done_turn=self._done_turn,
            outdated_turn=self._outdated_turn,
            refusal=writer.refusal,
        )
        body = encode_body(report)
        with self._report_lock:
            if body != self._sent_body and self._client:
                self._sent_body = body
                self._client.send_fact(UPLOADS.name, 0, body)

    def _describe_step(self, verdict: ArchiveVerdict) -> tuple[int, float]:
        """Return `NodeReport.step` and `step_s`: a thousand nodes must not send a fact at each step."""
        step, step_s = self._rate.step, self._rate.step_s
        if verdict.asks_step:
            return step, round(step_s, 6)
        if not (verdict.request_step and step):
            return 0, 0.0
        if step >= verdict.request_step:
            return verdict.request_step, 0.0
        return verdict.requested_at - (step < verdict.requested_at), 0.0

    # ---- the thread -----------------------------------------------------------------------------------

    def _work(self) -> float | None:
        """Hand the requested step to the workers, and do one thing for the upload under way.

        Return the seconds until the next one; None at the end of the job, after the last uploads.
        """
        lower_priority()
        writer, verdict = self._writer, self._read_verdict()
        if self._last.is_requested:
            try:
                self._upload_last()
            finally:
                self._last.finish()
            return None
        if not (self._failures.is_pausing or verdict.upload):
            self._find_new_names()
        self._committer.slot_pool.control_block.set("commit_step", verdict.request_step)
        self._held.open_committed(verdict.upload.version if verdict.upload else None)
        checkpoint = self._held.get(verdict.upload.version) if verdict.upload else None
        has_acted = False
        if verdict.upload and checkpoint and not self._failures.is_pausing:
            if checkpoint.held.digest == verdict.upload.digest:
                has_acted = self._try_to_advance(verdict.upload, checkpoint)
        elif verdict.archived != self._archived_events:
            self._archived_events = verdict.archived
            writer.put_events(self._node_dir)
        self._send_report()
        return 0.0 if has_acted else POLL_S

    def _read_verdict(self) -> ArchiveVerdict:
        writer = self._writer
        fact = self._client.verdicts.get(UPLOADS.name) if self._client else None
        if fact is not None and fact.body != self._verdict_body:
            self._verdict_body, before = fact.body, self._verdict.archived
            self._verdict = verdict = decode_body(ArchiveVerdict, fact.body)
            writer.job_nonce, writer.first_number = verdict.writer, verdict.first_number
            if verdict.archived != before:
                self._archived_at = time.monotonic() - verdict.age_s
        return self._verdict

    def _try_to_advance(self, upload: Upload, checkpoint: PinnedCheckpoint) -> bool:
        """Do one thing for an upload; return whether there was one, and it has succeeded."""
        try:
            has_acted = self._advance(upload, checkpoint)
            if has_acted:
                self._failures.clear()
            return has_acted
        except CheckpointError as error:
            self._give_up(upload, error)
        except SecondWriterError as error:
            if self._writer.may_follow(upload.version, upload.attempt, error):
                self._outdated_turn = upload.turn
        except ArchiveError as error:
            self._failures.add(error)
        return False

    def _give_up(self, upload: Upload, error: CheckpointError) -> None:
        """Offer a damaged checkpoint no more in this start. A node with a good copy goes on."""
        self._held.give_up(upload.version)
        logger.warning(
            "this node uploads no part of step %d: %s A node with a good copy uploads it; "
            "elastic-resume verify --deep finds what is damaged.",
            upload.step,
            error,
        )
        self._emit("archive-damaged", step=upload.step, error=str(error)[:1000])

    def _find_new_names(self) -> None:
        try:
            has_asked = self._held.find_new_names(self._writer.archive, self._verdict.turn)
        except ArchiveError as error:
            self._failures.add(error)
        else:
            if has_asked:
                self._failures.clear()

    def _advance(self, upload: Upload, checkpoint: PinnedCheckpoint) -> bool:
        """Begin the upload, put the next part of this node's share, or put the entry; or nothing."""
        writer = self._writer
        if upload.turn in {self._done_turn, self._outdated_turn}:
            return False
        if upload.phase is Phase.CHOSEN:
            if upload.owner != self._node or (self._begun and self._begun.turn == upload.turn):
                return False
            attempt = writer.begin(checkpoint)
            if attempt is None:
                writer.add_milestones(checkpoint)
                self._done_turn = upload.turn
            else:
                self._begun = Begun(upload.turn, attempt.number, attempt.id)
            return True
        if upload.attempt != self._share.attempt:
            self._share = OwnShare(upload.attempt, time.monotonic())
        known = self._share.put.union(iter_parts(upload.put))
        part = next((part for part in iter_parts(upload.share_of(self._node)) if part not in known), None)
        if part is not None:
            failpoints.hit("archive.put-part")
            writer.put_part(upload.attempt, checkpoint, part)
            self._share = replace(self._share, put=self._share.put | {part})
            failpoints.hit("archive.part-put")
            return True
        if upload.phase is not Phase.COMPLETE or upload.owner != self._node:
            return False
        attempt = Attempt(upload.number, upload.attempt, upload.version)
        old = writer.commit(attempt, checkpoint, self._share.begun_at)
        self._send_report()
        writer.delete_old(old, upload.step)
        self._done_turn = upload.turn
        return True

    # ---- the thread, at the end of the job --------------------------------------------------------------

    def _upload_last(self) -> None:
        named, writer = self._list_last_named(), self._writer
        for path in {**dict.fromkeys(named), **dict.fromkeys(self._held.find_newest())}:
            try:
                checkpoint = PinnedCheckpoint(path, self._run_id)
            except CheckpointError:  # the committer has logged that nothing was saved
                continue
            end = self._describe_end(checkpoint, is_named=path in named)
            is_due, text = decide_last_upload(end)
            if text:
                self._last.note_missing(checkpoint, text)
            if is_due and self._last.upload(checkpoint, writer):
                self._failures.clear()
            checkpoint.close()
        if self._last.find_left_s() is None and not self._failures.count:
            writer.put_events(self._node_dir)

    def _list_last_named(self) -> list[Path]:
        """Return the milestones that are not archived, oldest first, if that is up to this node."""
        if not self._has_trained or self._view is None or self._view.rank != 0:
            return []
        if self._writer.refusal or self._verdict.refusal:
            return []
        try:
            return [path for _, path in sorted(self._held.list_named(self._writer.archive).items())]
        except ArchiveError as error:
            logger.warning("milestones may be missing in the archive: %s", error)
            return []

    @property
    def _has_trained(self) -> bool:
        """Whether this start has something to archive: one that failed at once has not."""
        end = self._client.job_end if self._client else None
        return self._held.has_committed or (end is not None and isinstance(end.reason, JobFinished))

    def _describe_end(self, last: PinnedCheckpoint, *, is_named: bool) -> EndFacts:
        verdict, view, writer = self._verdict, self._view, self._writer
        end = self._client.job_end if self._client else None
        may_write = self._has_trained and not (writer.refusal or verdict.refusal)
        return EndFacts(
            newest=last.held.version if may_write else None,
            archived=None if is_named else self._find_archived(),
            is_rejected=end is not None and isinstance(end.reason, JudgedFailure),
            rank=view.rank if view else 1,
            left_s=self._last.find_left_s(),
            file_bytes=last.manifest.file_bytes,
            bytes_per_s=writer.bytes_per_s or verdict.bytes_per_s,
        )
