"""Test which checkpoint is archived next, and how nodes share its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from elastic_resume.mechanisms.archive import UPLOADS
from elastic_resume.mechanisms.archive import judge as rules
from elastic_resume.mechanisms.archive.judge import (
    ArchivedVersion,
    ArchiveJudge,
    ArchiveVerdict,
    Begun,
    EndFacts,
    HeldCheckpoint,
    NodeReport,
    Phase,
    Ranges,
    Share,
    Upload,
    decide_last_upload,
    share_parts,
)
from elastic_resume.mechanisms.mechanism import decode_body, encode_body
from elastic_resume.rendezvous.facts import Fact, FactBody, Scope

ATTEMPT = "g000001-s0000000020-0123456789"
HELD = HeldCheckpoint(1, 20, "same", 8)
IDLE = NodeReport(every_s=100.0, step=12, step_s=0.3125)
HOLDS = replace(IDLE, step=20, held=(HELD,))
UPLOAD = Upload(1, 1, 20, "same", 8, "a", 3, ATTEMPT)


class Leader:
    """A judge with its clock; reports go in, and the newest verdict comes out.

    The nodes answer the leader's question for the newest step, and report it also when they are not asked.
    """

    def __init__(self, *members: str, last: ArchiveVerdict | None = None) -> None:
        body = encode_body(last) if last else FactBody("")
        self.judge = ArchiveJudge(Scope(0, (), "a", 3.0, body))
        self.judge.start_view(1, members)
        self.now = 1000.0
        self.query = last.query if last else 0
        self.reports: dict[str, NodeReport] = {}

    def hear(self, **reports: NodeReport) -> ArchiveVerdict:
        """Take a report of each of these nodes."""
        self.reports |= reports
        self._add(reports)
        return self.wait(0.0)

    def wait(self, seconds: float) -> ArchiveVerdict:
        """Judge after this time."""
        self.now += seconds
        verdict = decode_body(ArchiveVerdict, self.judge.judge(self.now).body)
        if verdict.query == self.query:
            return verdict
        self.query = verdict.query
        self._add(self.reports)
        return self.wait(0.0)

    def _add(self, reports: Mapping[str, NodeReport]) -> None:
        for node, report in reports.items():
            body = encode_body(replace(report, query=self.query))
            self.judge.add(node, Fact(UPLOADS.name, 0, body), self.now)

    def begin(self, **reports: NodeReport) -> ArchiveVerdict:
        """Have the nodes hold step 20, and the first one begin its upload."""
        self.hear(**dict.fromkeys(reports, IDLE))
        verdict = self.hear(**reports)
        assert verdict.upload
        first = verdict.upload.owner
        return self.hear(**{first: replace(reports[first], begun=Begun(verdict.turn, 3, ATTEMPT))})


def find_upload(verdict: ArchiveVerdict) -> Upload:
    """Return the upload under way."""
    assert verdict.upload
    return verdict.upload


def test_first_upload_is_due_at_once_and_later_ones_after_interval() -> None:
    """What is wrong with the archive shows at the job's start, and not half an hour later."""
    leader = Leader("a")
    assert leader.hear(a=IDLE).request_step == 20
    leader.begin(a=HOLDS)
    put = replace(HOLDS, attempt=ATTEMPT, put=((0, 8),))
    assert find_upload(leader.hear(a=put)).phase is Phase.COMPLETE
    archived = replace(put, archived=ArchivedVersion(1, 20))
    verdict = leader.hear(a=archived)
    assert (verdict.archived, verdict.upload, verdict.request_step) == (ArchivedVersion(1, 20), None, 0)
    assert leader.wait(99).request_step == 0
    assert leader.wait(1).request_step == 28


def test_an_upload_goes_through_the_phases_in_turn() -> None:
    """Another job's entry ends them for good."""
    leader = Leader("a")
    put = replace(HOLDS, attempt=ATTEMPT, put=((0, 8),))
    archived = replace(put, archived=ArchivedVersion(1, 20))
    assert ArchiveVerdict().phase is Phase.WAITING
    assert leader.hear(a=replace(IDLE, step_s=0.0)).phase is Phase.DUE
    assert leader.hear(a=IDLE).phase is Phase.REQUESTED
    assert leader.hear(a=HOLDS).phase is Phase.CHOSEN
    assert leader.begin(a=HOLDS).phase is Phase.BEGUN
    phases = [leader.hear(a=report).phase for report in (put, archived, replace(archived, refusal="another"))]
    assert phases == [Phase.COMPLETE, Phase.WAITING, Phase.REFUSED]


@pytest.mark.parametrize(
    ("report", "step"),
    [
        (IDLE, 20),  # two and a half seconds ahead
        (replace(IDLE, step_s=0.01), 262),
        (replace(IDLE, step_s=60.0), 14),
        (replace(IDLE, step_s=0.0), 0),  # not measured
        (replace(IDLE, every_steps=10), 20),
        (replace(IDLE, every_steps=19), 20),  # 19 is too near: the first one is rather late than left out
        (replace(IDLE, every_steps=19, archived=ArchivedVersion(1, 1)), 38),  # later ones are multiples
        (replace(IDLE, every_steps=7), 21),  # as soon as can be, whatever the interval
    ],
)
def test_requested_step_is_ahead_of_all_nodes(report: NodeReport, step: int) -> None:
    """A node that has passed it before it knows does not hold it."""
    behind = replace(report, step=max(0, report.step - 1))
    assert Leader("a", "b").hear(a=behind, b=report).request_step == step


def test_interval_goes_on_with_the_next_leader() -> None:
    """Leaders that die more often than the interval would archive nothing, or too often."""
    archived = ArchivedVersion(1, 20)
    for age_s, is_due in ((90.0, False), (100.0, True)):
        leader = Leader("a", last=ArchiveVerdict(archived=archived, age_s=age_s))
        assert bool(leader.hear(a=IDLE).request_step) == is_due
    assert leader.wait(10).age_s == 110


def test_first_node_of_view_is_waited_for_and_its_contents_count() -> None:
    """As in a resume. Nodes with other contents put nothing."""
    leader = Leader("b", "a", "c")
    other = replace(HOLDS, held=(replace(HELD, digest="other"),))
    leader.hear(a=IDLE, b=IDLE, c=IDLE)
    assert leader.hear(a=other, c=other).upload is None
    assert leader.wait(rules.HOLD_WAIT_S - 1).upload is None
    upload = find_upload(leader.hear(b=HOLDS))
    assert (upload.owner, upload.digest) == ("b", "same")
    begun = leader.hear(b=replace(HOLDS, begun=Begun(1, 3, ATTEMPT)))
    assert find_upload(begun).shares == (Share("b", ((0, 8),)),)


def test_first_node_without_the_step_is_waited_for_only_so_long() -> None:
    """Its disk may be full."""
    leader = Leader("b", "a")
    leader.hear(a=IDLE, b=IDLE)
    leader.hear(a=HOLDS)
    assert find_upload(leader.wait(rules.HOLD_WAIT_S)).owner == "a"


def test_newest_checkpoint_counts_when_no_node_holds_the_requested_step() -> None:
    """All nodes may have passed it before they knew."""
    leader = Leader("a")
    leader.hear(a=IDLE)
    passed = replace(IDLE, step=30, held=(replace(HELD, step=18), replace(HELD, step=9)))
    leader.hear(a=replace(passed, step=15))
    assert leader.wait(2 * rules.REQUEST_WAIT_S).upload is None, "the step is still to come"
    leader.hear(a=passed)
    assert leader.wait(rules.REQUEST_WAIT_S - 1).upload is None
    leader.hear(a=replace(passed, commit_s=10.0))
    assert leader.wait(20).upload is None, "a commit may take longer"
    assert find_upload(leader.wait(1)).step == 18


@pytest.mark.parametrize(
    ("a", "b", "request_step"),
    [(12, 12, 20), (12, 3, 20), (13, 13, 20), (0, 0, 20), (11, 11, 0), (3, 3, 0), (3, 0, 0)],
)
def test_request_is_dropped_once_all_nodes_are_behind_where_it_was_made(
    a: int, b: int, request_step: int
) -> None:
    """After a way back the step may be hours ahead. No worker runs at 0. The next leader knows it too."""
    leader = Leader("a", "b", last=Leader("a").hear(a=IDLE))
    verdict = leader.hear(a=replace(IDLE, step=a), b=replace(IDLE, step=b))
    assert verdict.request_step == request_step
    assert leader.wait(0.0).request_step == (request_step or a + 8)


def test_checkpoint_is_not_archived_twice() -> None:
    """A step that the archive has is never written again."""
    leader = Leader("a", last=ArchiveVerdict(archived=ArchivedVersion(1, 20), age_s=1000.0))
    assert leader.hear(a=replace(HOLDS, step=15)).request_step
    leader.hear(a=replace(HOLDS, step=40))
    assert leader.wait(rules.REQUEST_WAIT_S).upload is None


NAMED = replace(HELD, step=5, is_named=True)
NAMES = replace(HOLDS, held=(HELD, NAMED))


def test_milestones_are_archived_at_once_the_oldest_first() -> None:
    """Nothing else is due, and a newer checkpoint is archived, so the upload is over when a node says so."""
    leader = Leader("a", last=ArchiveVerdict(archived=ArchivedVersion(1, 20), age_s=0.0))
    also = replace(NAMED, step=7)
    verdict = leader.hear(a=replace(NAMES, held=(HELD, also, NAMED)))
    assert find_upload(verdict).version == (1, 5)
    assert find_upload(leader.wait(0)).turn == 1, "the archive has a newer one, which does not end it"
    done = replace(NAMES, held=(HELD, also, NAMED), done_turn=1)
    assert leader.hear(a=done).upload is None
    assert leader.wait(0).upload is None, "the node has not looked since then whether it is archived"
    checked = replace(done, held=(HELD, also), checked_turn=1)
    assert find_upload(leader.hear(a=checked)).version == (1, 7)
    assert verdict.archived == leader.wait(0).archived


def test_milestone_of_the_first_node_is_waited_for() -> None:
    """Its contents count, as of any other checkpoint. A node may have failed to name it."""
    last = ArchiveVerdict(archived=ArchivedVersion(1, 20), age_s=0.0)
    for first, owner in ((replace(NAMES, held=(replace(NAMED, digest="other"),)), "a"), (HOLDS, "b")):
        leader = Leader("a", "b", last=last)
        leader.hear(a=HOLDS)
        assert leader.hear(b=NAMES).upload is None
        assert leader.wait(rules.HOLD_WAIT_S - 1).upload is None
        leader.hear(a=first)
        assert find_upload(leader.wait(1)).owner == owner


@pytest.mark.parametrize(("step", "request_step"), [(5, 20), (20, 0), (21, 0)])
def test_milestone_replaces_requested_step_unless_it_is_older(step: int, request_step: int) -> None:
    """One upload of what is as new is enough."""
    leader = Leader("a")
    assert leader.hear(a=IDLE).request_step == 20
    verdict = leader.hear(a=replace(IDLE, held=(replace(NAMED, step=step),)))
    assert (find_upload(verdict).step, verdict.request_step) == (step, request_step)


def test_upload_goes_on_when_view_node_and_leader_change() -> None:
    """The new leader has all of it from the verdict: also the parts of a node that is gone."""
    leader = Leader("a", "b", "c")
    verdict = leader.begin(a=HOLDS, b=HOLDS, c=HOLDS)
    shares = {share.node: share.parts for share in find_upload(verdict).shares}
    assert shares == {"a": ((0, 2),), "b": ((2, 5),), "c": ((5, 8),)}
    verdict = leader.hear(
        a=replace(HOLDS, attempt=ATTEMPT, put=((0, 1),)), b=replace(HOLDS, attempt=ATTEMPT, put=((2, 4),))
    )
    successor = Leader("b", "c", last=verdict)
    upload = find_upload(successor.hear(b=HOLDS, c=HOLDS))
    assert (upload.owner, upload.number, upload.attempt) == ("b", 3, ATTEMPT)
    assert upload.put == ((0, 1), (2, 4))
    assert {share.node: share.parts for share in upload.shares} == {"b": ((4, 5),), "c": ((1, 2), (5, 8))}
    successor.judge.start_view(0, ())
    assert find_upload(successor.wait(0)) == upload


def test_lost_or_failing_writer_is_replaced_within_attempt() -> None:
    """A failing node is used again when all fail: it tries less and less often."""
    leader = Leader("a", "b")
    leader.begin(a=HOLDS, b=HOLDS)
    failing = replace(HOLDS, failures=rules.MAX_FAILURES)
    upload = find_upload(leader.hear(a=failing))
    assert (upload.owner, upload.attempt) == ("b", ATTEMPT)
    assert upload.share_of("a") == ()
    assert find_upload(leader.hear(b=failing)).share_of("a") != ()
    leader.judge.remove("b")
    assert find_upload(leader.wait(0)).share_of("a") == ((0, 8),)


def test_writer_that_dies_before_it_begins_is_replaced() -> None:
    """What another writer or another turn has begun does not count."""
    leader = Leader("a", "b")
    leader.hear(a=IDLE, b=IDLE)
    leader.hear(a=HOLDS, b=replace(HOLDS, begun=Begun(7, 9, "g000001-s0000000020-ffffffff")))
    leader.judge.remove("a")
    upload = find_upload(leader.wait(0))
    assert (upload.owner, upload.attempt) == ("b", "")
    upload = find_upload(leader.hear(b=replace(HOLDS, begun=Begun(upload.turn, 3, ATTEMPT))))
    assert (upload.number, upload.attempt) == (3, ATTEMPT)


def test_upload_without_progress_or_holder_is_dropped_for_newer_checkpoint() -> None:
    """The next one is due at once, and has another turn."""
    leader = Leader("a")
    leader.begin(a=HOLDS)
    leader.wait(rules.STALL_S - 1)
    assert leader.hear(a=replace(HOLDS, attempt=ATTEMPT, put=((0, 1),))).upload
    assert leader.wait(rules.STALL_S - 1).upload
    assert leader.wait(1).upload is None
    assert leader.wait(1).request_step == 28
    newer = replace(HOLDS, step=28, held=(replace(HELD, step=28),))
    assert find_upload(leader.hear(a=newer)).turn == 2
    assert leader.hear(a=replace(newer, held=())).upload, "a new leader may not have all reports yet"
    assert leader.wait(rules.HOLD_WAIT_S).upload is None


def test_upload_whose_number_is_taken_is_dropped() -> None:
    """A former leader of this job may have used it. The next turn begins anew."""
    leader = Leader("a")
    leader.begin(a=HOLDS)
    verdict = leader.hear(a=replace(HOLDS, outdated_turn=1))
    assert (verdict.upload, verdict.turn) == (None, 1)
    leader.wait(0)
    assert find_upload(leader.hear(a=replace(HOLDS, step=28, held=(replace(HELD, step=28),)))).turn == 2


def test_all_leaders_of_job_have_the_same_writer() -> None:
    """It tells this job's entries from those of another one."""
    leader = Leader("a", "b")
    assert leader.hear(b=replace(IDLE, nonce="b" * 16)).writer == "b" * 16
    verdict = leader.hear(a=replace(IDLE, nonce="a" * 16))
    assert verdict.writer == "b" * 16
    assert Leader("c", last=verdict).hear(c=replace(IDLE, nonce="c" * 16)).writer == "b" * 16


def test_second_writer_stops_all_archiving() -> None:
    """Also under the next leader."""
    leader = Leader("a", "b")
    leader.begin(a=HOLDS, b=HOLDS)
    verdict = leader.hear(b=replace(HOLDS, refusal="another job"))
    assert (verdict.upload, verdict.refusal) == (None, "another job")
    verdict = Leader("a", "b", last=verdict).hear(a=HOLDS, b=HOLDS)
    assert (verdict.upload, verdict.request_step, verdict.refusal) == (None, 0, "another job")


@pytest.mark.parametrize(
    ("put", "shares", "nodes", "expected"),
    [
        ((), {}, "abc", {"a": ((0, 2),), "b": ((2, 5),), "c": ((5, 8),)}),
        ((), {}, "a", {"a": ((0, 8),)}),
        (((0, 7),), {}, "abc", {"c": ((7, 8),)}),
        # The share of a lost node goes to the others.
        (((0, 1),), {"a": ((0, 4),), "b": ((4, 8),)}, "bc", {"b": ((1, 2), (4, 8)), "c": ((2, 4),)}),
        # A node that is done takes the second half of the longest share.
        (((0, 2),), {"a": ((0, 2),), "b": ((2, 8),)}, "ab", {"b": ((2, 5),), "a": ((5, 8),)}),
        # A single part is not taken from the node that puts it.
        (((0, 7),), {"a": ((0, 4),), "b": ((4, 8),)}, "ab", {"b": ((7, 8),)}),
        (((0, 8),), {"a": ((0, 8),)}, "a", {}),
    ],
)
def test_parts_are_shared_over_nodes(
    put: Ranges, shares: dict[str, Ranges], nodes: str, expected: dict[str, Ranges]
) -> None:
    """Each missing part belongs to one node."""
    upload = replace(UPLOAD, put=put, shares=tuple(Share(*share) for share in shares.items()))
    found = share_parts(upload, tuple(nodes))
    assert {share.node: share.parts for share in found} == expected
    again = share_parts(replace(upload, shares=found), tuple(nodes))
    assert {share.node: share.parts for share in again} == expected, "a share changes only for a reason"


OVER = EndFacts((1, 30), (1, 20), file_bytes=1000)
STOPPED = replace(OVER, left_s=20.0, bytes_per_s=100.0)


@pytest.mark.parametrize(
    ("end", "uploads", "text"),
    [
        (OVER, True, ""),
        (replace(OVER, rank=1), False, ""),
        (replace(OVER, archived=(1, 30)), False, ""),
        (replace(OVER, archived=None), True, ""),
        (replace(OVER, newest=None), False, ""),
        (replace(OVER, is_rejected=True), False, ""),
        (STOPPED, True, ""),
        (replace(STOPPED, rank=1), False, ""),
        (replace(STOPPED, left_s=14.0), False, "Its upload would take 15 s, and --grace leaves 14 s"),
        (replace(STOPPED, left_s=-1.0), False, "--grace leaves 0 s"),
        (replace(STOPPED, bytes_per_s=0.0), False, "The speed of the archive was not measured"),
        (replace(OVER, left_s=5.0, bytes_per_s=1.0), False, "Its upload would take 1500 s"),
    ],
)
def test_last_checkpoint_is_archived_by_one_node(end: EndFacts, uploads: bool, text: str) -> None:
    """After a signal only if there is time. The reason against it is logged."""
    decided, reason = decide_last_upload(end)
    assert decided == uploads
    assert text in reason
    assert bool(text) == bool(reason)


def test_slowest_node_counts_for_last_upload() -> None:
    """The node that finishes may have put no part itself."""
    leader = Leader("a", "b")
    fast, slow = (replace(HOLDS, bytes_per_s=speed) for speed in (200.0, 100.0))
    verdict = leader.hear(a=HOLDS, b=fast, c=slow)
    assert verdict.bytes_per_s == 100
    assert Leader("a", last=verdict).hear(a=HOLDS).bytes_per_s == 100


@pytest.mark.parametrize(
    "report",
    [
        replace(HOLDS, held=(replace(HELD, parts=rules.MAX_PARTS + 1),)),
        replace(HOLDS, held=(replace(HELD, parts=0),)),
        replace(HOLDS, nonce="../.."),
        replace(HOLDS, held=(HELD,) * (rules.MAX_HELD + 1)),
    ],
)
def test_impossible_report_is_refused(report: NodeReport) -> None:
    """A huge number would cost the leader its memory."""
    with pytest.raises(ValueError, match="impossible"):
        Leader("a").hear(a=report)


def test_parts_out_of_range_are_ignored() -> None:
    """A report may be of another version of this program."""
    leader = Leader("a")
    leader.begin(a=HOLDS)
    upload = find_upload(leader.hear(a=replace(HOLDS, attempt=ATTEMPT, put=((7, 1 << 40),))))
    assert upload.put == ((7, 8),)


def test_start_of_the_log_goes_from_leader_to_leader() -> None:
    """It is that of the job's writer; a node may remember another job, which this one has replaced."""
    start = rules.LogStart("a" * 16, 7)
    leader = Leader("a", "b")
    assert leader.hear(a=replace(IDLE, nonce="a" * 16)).first_number == 0
    other = replace(IDLE, log_start=rules.LogStart("b" * 16, 3))
    assert leader.hear(b=other).first_number == 0
    verdict = leader.hear(b=replace(IDLE, log_start=start))
    assert verdict.first_number == 7
    assert Leader("b", last=verdict).hear(b=replace(IDLE, nonce="b" * 16)).first_number == 7
