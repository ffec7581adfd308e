"""Milestones and ways back in one process without an agent; test_going_back.py has whole jobs."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_resume as er
from elastic_resume import constants, events, milestone
from elastic_resume.archive.archive import open_archive
from elastic_resume.checkpoint.catalog import Catalog, read_quarantine_reason
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.errors import ConfigError, NoValidCheckpointError, UsageError
from tests.support.checkpoint_samples import flip_bits

BATCHES, SAMPLES = 5, 50


class Job:
    """A job of one rank, of which each `start` is a new process as far as it can tell."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.node_dir = directory / "job" / "n0"
        self.weights: list[float] = []

    @contextlib.contextmanager
    def start(self, **settings: Any) -> Iterator[er.Run]:
        """Resume the job; the script draws random numbers and reads samples."""
        torch.manual_seed(1)
        self.model = nn.Linear(1, 1)
        self.batches = er.GlobalBatches(SAMPLES, BATCHES, seed=2)
        settings = {"save_every": 1000, "keep": 2, **settings}
        with er.resume(
            model=self.model,
            data=self.batches,
            ckpt_dir=self.directory,
            run_id="job",
            node_name="n0",
            **settings,
        ) as run:
            yield run

    def train(self, run: er.Run, until: int, after_step: Callable[[er.Run], object] = lambda _: None) -> None:
        """Train up to a step; the weight becomes a digest of all samples and random numbers."""
        while run.position.step < until:
            run.begin_epoch()
            for batch in self.batches:
                with torch.no_grad():
                    self.model.weight.mul_(0.9).add_(sum(batch) + torch.rand(()))
                run.step()
                after_step(run)
                if run.position.step == until:
                    break
            else:
                run.end_epoch()

    def run_to(self, until: int, save_at: dict[int, tuple[Any, ...]] | None = None, **settings: Any) -> float:
        """Start, train, and save as planned; return the weight."""
        plans = save_at or {}

        def save(run: er.Run) -> None:
            if run.position.step in plans:
                run.save(*plans[run.position.step])

        with self.start(**settings) as run:
            self.train(run, until, save)
            return float(self.model.weight.detach())

    @property
    def milestones(self) -> dict[tuple[int, int], list[tuple[str, float | None]]]:
        """The checkpoints on disk, and how each is named."""
        return {
            entry.version: [(label.name, label.metric) for label in entry.milestones]
            for entry in Catalog(self.node_dir, "job").list_valid()
        }

    def events(self, kind: str) -> list[events.Event]:
        """Return the events of one kind."""
        return [
            event for event in events.read(self.node_dir / constants.EVENTS_FILE) if event["event"] == kind
        ]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job without any state."""
    return Job(tmp_path)


def test_milestones_outlive_pruning_and_only_the_best_of_a_metric_does(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second name of one checkpoint keeps the first, and saving a committed step again names it."""
    saves: dict[int, tuple[Any, ...]] = {2: ("eval",), 3: ("best", 0.5), 4: ("best", torch.tensor(0.25))}
    saves |= {5: ("eval",), 6: ("best", 0.75), 7: ("best", 0.5), 8: (), 9: ()}
    with job.start() as run:

        def save(run: er.Run) -> None:
            if run.position.step in saves:
                run.save()
                run.save(*saves[run.position.step])
                if run.position.step == 6:
                    run.save(milestone="eval")

        job.train(run, 9, save)
        run.save()
    assert job.milestones == {
        (1, 9): [],
        (1, 8): [],
        (1, 6): [("best", 0.75), ("eval", None)],
        (1, 5): [("eval", None)],
        (1, 2): [("eval", None)],
    }
    names = [(event["step"], event["name"], event["metric"]) for event in job.events("milestone")]
    assert names[:3] == [(2, "eval", None), (3, "best", 0.5), (4, "best", 0.25)]
    lines = [line for line in capsys.readouterr().err.splitlines() if "is saved as milestone" in line]
    assert lines[:2] == [
        "elastic_resume: step 2 is saved as milestone 'eval'.",
        "elastic_resume: step 3 is saved as milestone 'best' (metric 0.5).",
    ]
    assert len(lines) == len(names)


def test_loaded_step_can_become_a_milestone(job: Job) -> None:
    """It is committed again in this generation, so that each node names the same checkpoint. So is step 0."""
    with job.start() as run:
        run.save(milestone="start")
        job.train(run, 3)
    with job.start() as run:
        assert run.save() is None
        assert run.save(milestone="third") is not None
    assert job.milestones == {(2, 3): [("third", None)], (1, 3): [], (1, 0): [("start", None)]}


def test_space_for_checkpoints_to_come_is_needed_besides_milestones(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take no place of those of --keep."""
    needed: list[int] = []
    monkeypatch.setattr(NodeDir, "ensure_free_space", lambda _, count: needed.append(count))
    job.run_to(3, {1: ("a",), 2: ("b",)}, keep=9)
    job.run_to(3, keep=9)
    assert needed[1] * 10 == needed[0] * 9


def test_milestone_at_the_end_of_an_epoch_outlives_the_save_after_it(job: Job) -> None:
    """Without data= the run learns of the end later, and the script's work there replaces the checkpoint."""
    model = nn.Linear(1, 1)
    with er.resume(model=model, ckpt_dir=job.directory, run_id="job", node_name="n0") as run:
        for _ in run.epochs(1):
            run.step()
            run.save(milestone="best", metric=1.0)
            with torch.no_grad():
                model.bias.fill_(7.0)
    assert job.milestones == {(1, 1): [("best", 1.0)]}
    assert float(er.load(job.node_dir)["bias"]) == 7.0


@pytest.mark.parametrize(
    ("name", "metric", "text"),
    [
        ("12", None, "milestone is '12'"),
        ("latest", None, "milestone is 'latest'"),
        ("off", None, "milestone is 'off'"),
        ("g1-s2", None, "milestone is 'g1-s2'"),
        ("a/b", None, "milestone is 'a/b'"),
        (None, 0.5, "milestone is None"),
        ("best", "0.5", "metric is '0.5'"),
        ("best", True, "metric is True"),
        ("best", torch.ones(2), "metric is tensor"),
    ],
)
def test_wrong_milestone_is_refused_before_anything_is_saved(
    job: Job, name: Any, metric: Any, text: str
) -> None:
    """The text says what is accepted."""
    with job.start() as run, pytest.raises(UsageError, match=text):
        run.save(milestone=name, metric=metric)
    assert job.milestones == {}


@pytest.mark.parametrize(("metric", "shown"), [(float("nan"), "nan"), (10**400, "inf"), (-(10**400), "-inf")])
def test_metric_that_is_not_finite_makes_no_milestone_and_ends_nothing(
    job: Job, capsys: pytest.CaptureFixture[str], metric: float, shown: str
) -> None:
    """Such as the loss in a spike."""
    job.run_to(2, {1: ("best", metric), 2: ("best", metric)})
    assert job.milestones == {(1, 2): [], (1, 1): []}
    log = capsys.readouterr().err
    assert f"step 1 is no milestone 'best': its metric is {shown}." in log
    assert "start the same command with --resume-from best. Later ones are not logged." in log
    assert log.count("is no milestone") == 1


def test_metric_that_is_not_finite_names_the_step_that_the_save_ends(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a loop over `er.epochs` the save ends the step, so it is of this step and not of the one before."""
    dataset = TensorDataset(torch.zeros(4, 1))
    loader = DataLoader(dataset, batch_size=2, sampler=er.ElasticSampler(dataset))
    settings: dict[str, Any] = {"ckpt_dir": job.directory, "run_id": "job", "node_name": "n0"}
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    epochs = er.epochs(1, loader, model=model, optimizer=optimizer, **settings)
    for _ in epochs:
        for (inputs,) in loader:
            model(inputs).sum().backward()
            optimizer.step()
            if epochs.run.position.step == 1:
                path = epochs.run.save(milestone="best", metric=math.nan)
                assert path is not None
                assert path.name.endswith("s0000000002")
    assert "step 2 is no milestone 'best': its metric is nan." in capsys.readouterr().err


def test_more_names_than_a_checkpoint_can_have_end_nothing(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """The earlier ones stay."""
    with job.start() as run:
        job.train(run, 1)
        for number in range(milestone.MAX_NAMES + 1):
            run.save(milestone=f"n{number}")
        job.train(run, 2)
    assert len(job.milestones[1, 1]) == milestone.MAX_NAMES
    assert "g000001-s0000000001 is no milestone 'n32': it has 32 names" in capsys.readouterr().err


def test_disk_that_refuses_a_name_keeps_the_checkpoint(
    job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash there has the same end: the file is written by one rename."""
    monkeypatch.setattr(constants, "MILESTONES_FILE", "no-such-directory/milestones.json")
    job.run_to(1, {1: ("best",)})
    assert job.milestones == {(1, 1): []}
    assert "is saved, and is no milestone 'best': cannot create" in capsys.readouterr().err


@pytest.mark.parametrize("record", ["", "{}", '{"milestones":{"a/b":1.0}}', '{"milestones":{"best":1e999}}'])
def test_damaged_names_keep_their_checkpoint(job: Job, record: str) -> None:
    """It may have been a milestone. No request finds it by a name."""
    job.run_to(4, {1: ("best",), 2: (), 3: ()})
    (job.node_dir / "g000001-s0000000001" / constants.MILESTONES_FILE).write_text(record)
    job.run_to(5, {5: ()})
    assert job.milestones[1, 1] == [("?", None)]
    expected = r"--resume-from best: no node .* Milestones: \? \(g1-s1\)"
    with pytest.raises(NoValidCheckpointError, match=expected):
        job.run_to(6, resume_from="best")


def test_going_back_gives_the_bits_of_a_run_that_never_went_further(tmp_path: Path) -> None:
    """In the middle of an epoch, to a milestone, once; the same start later goes on."""
    undisturbed = Job(tmp_path / "undisturbed")
    undisturbed.run_to(13)
    expected = undisturbed.run_to(26)
    job = Job(tmp_path / "job")
    job.run_to(20, {13: ("good",), 14: (), 17: ("later",)})
    assert (job.run_to(26, resume_from="good"), job.run_to(26, resume_from="good")) == (expected, expected)
    starts = [
        (e["generation"], e["step"], e["resume_from"], e["given_up_steps"]) for e in job.events("resume")
    ]
    assert starts == [(1, 0, None, 0), (2, 13, "good", 7), (3, 26, None, 0)]
    assert list(job.milestones) == [(2, 26), (2, 13), (1, 13)]
    moved = Catalog(job.node_dir, "job").list_quarantined()
    assert [path.name for path in moved] == [f"g000001-s00000000{step}" for step in (14, 17, 20)]
    assert read_quarantine_reason(moved[1]).startswith(
        "newer than g000001-s0000000013, to which --resume-from"
    )
    assert job.events("quarantine") == []


def test_start_without_the_flag_passes_the_request_on(job: Job) -> None:
    """It is stored in what is written, so the flag of a later start is still done."""
    job.run_to(6, {3: ()})
    job.run_to(5, resume_from=3, keep=9)
    job.run_to(7, keep=9, resume_from="off")
    job.run_to(8, resume_from=3, keep=9)
    job.run_to(9, resume_from="g2-s3")  # a new request for the same state
    assert [event["step"] for event in job.events("resume")] == [0, 3, 5, 7, 3]
    assert job.events("resume")[-1]["given_up_steps"] == 5


def test_what_an_earlier_way_back_left_is_left_after_a_later_one_too(job: Job) -> None:
    """As what the archive or an absent node has; the manifests carry all ways back."""
    job.run_to(6, {3: ()}, keep=9)
    job.run_to(5, resume_from=3, keep=9)
    job.run_to(8, resume_from=5, keep=9)
    name = "g000001-s0000000006"
    (job.node_dir / constants.QUARANTINE_DIR / name).rename(job.node_dir / name)
    with pytest.raises(NoValidCheckpointError, match="--resume-from 6: no node"):
        job.run_to(9, resume_from=6, keep=9)
    job.run_to(9, keep=9)
    assert (
        job.node_dir / constants.QUARANTINE_DIR / f"{name}.1"
        in Catalog(job.node_dir, "job").list_quarantined()
    )


def test_quarantined_state_comes_back_by_its_name(job: Job) -> None:
    """As the reason of its quarantine says."""
    end = job.run_to(6, {3: ()})
    job.run_to(4, resume_from=3)
    with pytest.raises(NoValidCheckpointError, match=r"Not usable: n0/g000001-s0000000006: newer than"):
        job.run_to(7, resume_from=6)
    name = "g000001-s0000000006"
    (job.node_dir / constants.QUARANTINE_DIR / name).rename(job.node_dir / name)
    assert job.run_to(6, resume_from="g1-s6") == end


def test_going_back_and_starting_over_exclude_each_other(job: Job) -> None:
    """Nothing is moved aside."""
    job.run_to(2)
    with pytest.raises(ConfigError, match="give one of them"):
        job.run_to(3, resume="never", resume_from="2")
    assert job.milestones == {(1, 2): []}


def test_manifest_of_a_way_back_is_not_read_by_older_versions(job: Job) -> None:
    """They would count it as damaged. Others keep the format that they read."""
    job.run_to(3, {2: ()})
    job.run_to(4, resume_from=2, keep=3)
    formats = {
        path.parent.name: json.loads(path.read_bytes())["format"]
        for path in job.node_dir.glob("g*/manifest.json")
    }
    assert formats == {"g000001-s0000000002": 2, "g000002-s0000000002": 3, "g000002-s0000000004": 3}


def test_damaged_newest_state_is_replaced_by_archived_one(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start has not listed it, because the node seemed to have the same."""
    expected = job.run_to(4)
    monkeypatch.setenv("ELASTIC_RESUME_ARCHIVE", str(tmp_path / "store"))
    (tmp_path / "store").mkdir()
    archive = open_archive(str(tmp_path / "store"), "job")
    (entry,) = Catalog(job.node_dir, "job").list_valid()
    image = (entry.path / constants.STATE_FILE).read_bytes()
    attempt = archive.begin(entry.version, "0" * 16)
    assert attempt
    archive.put_part(attempt.id, 0, memoryview(image))
    archive.commit(attempt, (entry.path / constants.MANIFEST_FILE).read_bytes(), 64 << 20)
    flip_bits(entry.path / constants.STATE_FILE, -1)
    with job.start() as run:
        assert (run.plan.step, run.plan.source_tier) == (4, "archive")
        assert float(job.model.weight.detach()) == expected
