"""Test what a node remembers of proofs: of which script, and how many did not end well."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elastic_resume import constants
from elastic_resume.config import Settings
from elastic_resume.events import EventLog
from elastic_resume.policy.proof import MAX_PROOFS, NOT_PROVED, PROVED, ROUNDING
from elastic_resume.proof import record
from elastic_resume.ranks.collectives import Collectives
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.slots.slot_memory import ControlBlock


class Client:
    """The part of a `SlotClient` that holds the control block."""

    def __init__(self, block: ControlBlock) -> None:
        self.control_block = block


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankContext:
    """Return the context of a node that runs train.py."""
    script = tmp_path / "train.py"
    script.write_text("pass")
    monkeypatch.setattr(sys, "argv", [str(script), "--lr", "1"])
    settings = Settings.for_worker({}, str(script), ckpt_dir=tmp_path, run_id="job", node_name="a")
    (tmp_path / "job" / "a").mkdir(parents=True)
    return RankContext(
        Collectives(0, 1, None), settings, EventLog(tmp_path / constants.EVENTS_FILE, node="a")
    )


@pytest.mark.parametrize(
    ("kind", "tries", "wants"),
    [
        (PROVED, 1, False),
        (ROUNDING, 1, False),
        (NOT_PROVED, 1, True),
        (NOT_PROVED, MAX_PROOFS, False),
        ("", 9, True),
    ],
)
def test_proofs_end_with_the_first_good_one_or_after_some(
    context: RankContext, kind: str, tries: int, wants: bool
) -> None:
    """A good one at the beginning of an epoch, which is recorded without its kind, does not end them."""
    client = Client(ControlBlock(ControlBlock.create()))
    for _ in range(tries):
        record.record_replay(context.node_dir, client, (3, 7))  # type: ignore[arg-type]
        record.record_verdict(context.node_dir, kind)
    assert record.wants_proof(context) is wants
    assert record.replayed_version(client) == (3, 7)  # type: ignore[arg-type]


def test_tries_that_end_without_a_verdict_count(context: RankContext) -> None:
    """A script that always dies meanwhile costs no more restarts than a few."""
    client = Client(ControlBlock(ControlBlock.create()))
    for step in range(MAX_PROOFS):
        assert record.wants_proof(context)
        record.record_replay(context.node_dir, client, (3, step))  # type: ignore[arg-type]
    assert not record.wants_proof(context)


@pytest.mark.parametrize("change", ["argument", "file", "damage"])
def test_another_script_is_proved_anew(context: RankContext, change: str) -> None:
    """Its arguments and its text count. What cannot be read counts as nothing."""
    record.record_verdict(context.node_dir, PROVED)
    assert not record.wants_proof(context)
    if change == "argument":
        sys.argv.append("--more")
    elif change == "file":
        Path(sys.argv[0]).write_text("import torch")
    else:
        (context.node_dir / record.PROOF_FILE).write_text("[" * 100_000)
    assert record.wants_proof(context)
