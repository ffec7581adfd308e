"""transformers' Trainer in this process: what it and its callbacks hold and log survives.

A training is left by an exception, and another Trainer of the same process goes on. Workers that die are in
tests/integration/test_transformers.py.
"""

from __future__ import annotations

import logging
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from elastic_resume.console import PACKAGE_LOGGER
from elastic_resume.errors import UsageError
from elastic_resume.integrations import plain_attributes, trainer_state
from elastic_resume.integrations.trainer_state import STEPS_PER_SWEEP, ChangedAttributes
from elastic_resume.state.diff import MEASURED
from elastic_resume.training import untracked
from tests.support.thread_ranks import ThreadCollectives, run_ranks

pytestmark = pytest.mark.slow  # importing transformers takes seconds


def load() -> Any:
    """Import `trainer_job`. It takes seconds, which only the worker of xdist that runs these tests spends."""
    from tests.support import trainer_job  # noqa: PLC0415

    return trainer_job


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """A job."""
    return load().Job(tmp_path)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What is logged; its handler is in the place of the one that prints."""
    caplog.set_level(logging.INFO, PACKAGE_LOGGER.name)
    monkeypatch.setattr(PACKAGE_LOGGER, "handlers", [caplog.handler])
    monkeypatch.setattr(PACKAGE_LOGGER, "propagate", False)  # else the root logger's handler gets it too
    return caplog


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a training ends with."""
    trainer, callback = load().Job(tmp_path_factory.mktemp("undisturbed")).train()
    assert callback.read()[:3] == [load().STEPS, load().STEPS // 2, load().STEPS * (load().STEPS + 1) / 2]
    return load().read(trainer, callback)


@pytest.mark.parametrize("left_at", ["on_step_end@5", "on_evaluate@4", "on_log@3", "on_epoch_end@4"])
def test_left_training_ends_with_the_same_attributes_and_logs(
    job: Any, undisturbed: Any, left_at: str, log: pytest.LogCaptureFixture
) -> None:
    """Of the Trainer, its model and its callbacks; the log has each entry once."""
    job.train(left_at)
    trainer, callback = job.train()
    assert load().read(trainer, callback) == undisturbed
    assert "a restart loses what it holds" not in log.text
    held = untracked.collect_held(trainer.elastic_run._generation.tracked)
    assert id(callback.average) in held, "no warning says that the average is not tracked"


def test_check_of_the_loss_leaves_no_trace(job: Any) -> None:
    """Each process computes the first batch's loss once more to know its kind."""
    trainer, _ = job.train()
    evaluation = next(entry for entry in trainer.state.log_history if "eval_mean" in entry)
    plain = float(torch.stack([load().Samples()[n]["inputs"] for n in range(16)]).mean())
    assert trainer._elastic_has_sum is False, "the check has run"
    assert evaluation["eval_mean"] == pytest.approx(plain)
    assert trainer._total == load().STEPS * 4


def test_what_cannot_be_kept_is_named_once(job: Any, log: pytest.LogCaptureFixture) -> None:
    """It has changed; what is the same as at the start is no business of ours."""
    base: Any = load().Average

    class Changing(base):
        def __init__(self) -> None:
            super().__init__()
            self.numbers, self.objects = iter(range(99)), list[object]()
            self.made: Any = None
            self.constant = object()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            super().on_step_end(*args, **kwargs)
            next(self.numbers)
            self.objects.append(object())
            self.made = load().Meter()

    job.train("on_step_end@3", average=Changing)
    job.train(average=Changing)
    texts = [record.getMessage() for record in log.records]
    found = [text.split()[1] for text in texts if "a restart loses what it holds" in text]
    assert found == ["Changing.numbers", "Changing.objects", "Changing.made.sum"]


def test_time_of_a_clock_is_not_kept(job: Any) -> None:
    """A throughput after a restart would count the time in which nothing ran."""
    base: Any = load().Counting

    class Timed(base):
        last = 0.0

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.last = time.perf_counter()
            return super().training_step(*args, **kwargs)

    trainer, _ = job.train("on_step_end@3", kind=Timed)
    assert "_total" in str(trainer._elastic_attributes._forms)
    assert "last" not in str(trainer._elastic_attributes._forms)


class Writer:
    """A SummaryWriter that shows what TensorBoard does."""

    points: ClassVar[list[Any]] = []  # (directory, tag, step, value)

    def __init__(self, log_dir: str, purge_step: int | None = None) -> None:
        self._directory = log_dir
        if purge_step is not None:
            Writer.points = [point for point in Writer.points if point[2] is None or point[2] < purge_step]

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Add a point."""
        if not MEASURED.search(tag):
            Writer.points.append((self._directory, tag, step, value))

    def add_text(self, tag: str, text: str, global_step: int | None = None) -> None:
        """Add a point, without a step that of the arguments."""
        del text
        Writer.points.append((self._directory, tag, global_step, ""))

    def flush(self) -> None:
        """Do nothing."""

    close = flush


def test_tensorboard_has_each_point_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the points of the restored step, which may have been followed by those of an epoch's end."""
    utils = "transformers.integrations.integration_utils.is_tensorboard_available"
    monkeypatch.setattr(utils, lambda: True)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    found = []
    for number, places in enumerate([[], ["on_log@3", "on_evaluate@4", "on_epoch_end@4", "on_log@6"]]):
        job, Writer.points = load().Job(tmp_path / str(number)), []
        for place in [*places, ""]:
            trainer, _ = job.train(place, logging_steps=1, loggers=(load().TensorBoardCallback(),))
        trainer.evaluate()
        assert len({directory for directory, *_ in Writer.points}) == 1, "one run"
        found.append(sorted((tag, step or 0, value) for _, tag, step, value in Writer.points))
    assert found[0] == found[1]
    assert len(found[0]) > 5 * load().STEPS


# ---- resume_from_checkpoint ------------------------------------------------------------------------------


def test_own_checkpoint_is_not_read_after_a_restart(
    job: Any, undisturbed: Any, log: pytest.LogCaptureFixture
) -> None:
    """`get_last_checkpoint(output_dir)` finds none at the first start, and one of this job afterwards."""
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    job.train("on_save@4", **saving)
    last = load().get_last_checkpoint(str(job.directory / "output"))
    assert last is not None
    assert load().read(*job.train(start=last, **saving)) == undisturbed
    assert f"resume_from_checkpoint={last!r} is not read: the job continues at step" in log.text
    assert load().read(*job.train(start=True, **saving))[2] == undisturbed[2], "it was over"


def test_new_job_goes_on_after_the_steps_of_another_checkpoint(job: Any, tmp_path: Path) -> None:
    """As the Trainer does: with its weights, optimizer, schedule and step. What is killed then goes on."""
    whole, _ = job.train(save_strategy="steps", save_steps=3)
    path = str(job.directory / "output" / "checkpoint-3")
    ends = []
    for number, left_at in enumerate(["", "on_step_end@6"]):
        other = load().Job(tmp_path / str(number))
        if left_at:
            other.train(left_at, start=path)
        trainer, _ = other.train(start=path)
        assert trainer.state.log_history[0] == whole.state.log_history[0]
        ends.append([trainer.state.log_history[-1]["train_loss"], repr(trainer.model.state_dict())])
    assert ends[0] == ends[1]
    assert ends[0][1] == repr(whole.model.state_dict())


def test_new_job_that_begins_with_the_last_step_says_so(
    job: Any, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """As after `--resume never`, which leaves output_dir as it is."""
    job.train(save_strategy="steps", save_steps=load().STEPS)
    path = load().get_last_checkpoint(str(job.directory / "output"))
    assert "NOTHING IS LEFT TO TRAIN" not in log.text
    load().Job(tmp_path / "new").train(start=path)
    assert (
        f"NOTHING IS LEFT TO TRAIN: that is the last of {load().STEPS} steps. To train anew, give" in log.text
    )


@pytest.mark.parametrize(
    ("start", "text"),
    [(True, "there is no checkpoint in"), ("/nowhere", "is not the same checkpoint on")],
)
def test_missing_checkpoint_is_refused(job: Any, start: Any, text: str) -> None:
    """At the first start."""
    with pytest.raises(UsageError, match=text):
        job.train(start=start)


# ---- one changed import ----------------------------------------------------------------------------------


def test_global_batch_is_that_of_the_first_start(job: Any, log: pytest.LogCaptureFixture) -> None:
    """Per device x ranks x accumulation; other arguments afterwards do not change the order of samples."""
    trainer, _ = job.train("on_step_end@3")
    assert trainer.elastic_global_batch == 4
    trainer, _ = job.train(gradient_accumulation_steps=4)
    assert (trainer.elastic_global_batch, trainer.args.gradient_accumulation_steps) == (4, 2)
    assert "the global batch stays 4 samples, as at the job's first start" in log.text
    assert "1 ranks x 4 accumulation steps would make 8" in log.text


def test_numbers_of_a_dataset_and_of_metrics_are_restored(job: Any, tmp_path: Path) -> None:
    """They are the script's objects, and the Trainer has them."""
    whole, _ = job.train(kind=load().Curriculum)
    other = load().Job(tmp_path / "other")
    other.train("on_step_end@3", kind=load().Curriculum)
    again, _ = other.train(kind=load().Curriculum)
    assert (again.train_dataset.level, again.compute_metrics.count) == (2 * load().STEPS, load().STEPS // 2)
    assert (whole.train_dataset.level, whole.compute_metrics.count) == (2 * load().STEPS, load().STEPS // 2)
    assert repr(again.model.state_dict()) == repr(whole.model.state_dict())
    assert [each.get("eval_calls") for each in again.state.log_history] == [
        each.get("eval_calls") for each in whole.state.log_history
    ]


def test_loader_before_the_training_is_the_plain_one(job: Any) -> None:
    """A script asks for its length, to make a scheduler."""
    base: Any = load().Counting

    class Asking(base):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            assert len(self.get_train_dataloader()) == len(load().Samples()) // 2
            return super().train(*args, **kwargs)

    job.train(kind=Asking)


def test_second_start_of_a_finished_training_writes_the_same_files(job: Any) -> None:
    """Its own times are those of a start without a step."""
    base: Any = load().Counting

    class Measuring(base):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            metrics = super().train(*args, **kwargs).metrics
            self.save_metrics("train", metrics)
            self.save_state()
            return metrics

    def train() -> dict[str, str]:
        job.train(kind=Measuring, save_strategy="steps", save_steps=4)
        return {path.name: path.read_text() for path in (job.directory / "output").glob("*.json")}

    first = train()
    assert {"train_results.json", "trainer_state.json"} <= first.keys()
    assert train() == first


def test_classes_come_under_their_names() -> None:
    """Of transformers; those of TRL are made in the same way, see the page of the Trainer."""
    integration = load().integration
    kind = integration.Seq2SeqTrainer
    assert kind is integration.Seq2SeqTrainer
    assert kind.__mro__[1] is integration.ElasticTrainer
    assert kind.__name__ == "Seq2SeqTrainer"
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = integration.Nothing


# ---- several ranks ---------------------------------------------------------------------------------------


class Rank:
    """A Trainer as `ChangedAttributes` needs it."""

    def __init__(self, ranks: ThreadCollectives) -> None:
        class Args:
            process_index, world_size, device = ranks.rank, ranks.size, torch.device("cpu")

        self.callback_handler: Any = type("Handler", (), {"callbacks": []})()
        self.args, self.model = Args(), nn.Linear(1, 1)
        self.own, self.same, self.large, self.differs = 0.0, [0], torch.zeros(1000), torch.zeros(1000)
        self.attributes = ChangedAttributes(self, frozenset({"args", "callback_handler", "attributes"}), [])

    def step(self, ranks: ThreadCollectives) -> None:
        """Change all of it."""
        self.own += ranks.rank + 0.5
        self.same.append(len(self.same))
        self.large += 1
        self.differs += ranks.rank
        self.attributes.set_rows(ranks.gather(self.attributes.read_own()))


class Metric(nn.Module):
    """Counts as those of torchmetrics do: its state_dict() is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.updates = torch.zeros(()), 0


def test_metric_whose_state_dict_is_empty_goes_on(log: pytest.LogCaptureFixture) -> None:
    """In an attribute and in a dict. One that is made in training changes nothing."""

    def make(ranks: ThreadCollectives) -> Any:
        rank: Any = Rank(ranks)
        rank.metric, rank.metrics = Metric(), {"a": Metric()}
        return rank

    def save(ranks: ThreadCollectives) -> Any:
        rank = make(ranks)
        rank.attributes.begin()
        for metric in (rank.metric, rank.metrics["a"]):
            metric.total, metric.updates = metric.total + 1 + ranks.rank, metric.updates + 1
        rank.made = Metric()
        rank.attributes.set_rows(ranks.gather(rank.attributes.read_own()))
        return rank.attributes.state_dict()

    def load(ranks: ThreadCollectives) -> Any:
        rank = make(ranks)
        rank.attributes.load_state_dict(states[0])
        rank.attributes.begin()
        return [(float(one.total), one.updates) for one in (rank.metric, rank.metrics["a"])]

    states = run_ranks(2, save)
    assert run_ranks(2, load) == [[(1.0, 1)] * 2, [(2.0, 1)] * 2]
    assert "a restart loses what it holds" not in log.text


class Proxy:
    """A proxy outside of its context."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        pass

    def __len__(self) -> int:
        raise RuntimeError


def test_odd_values_do_not_end_the_job(log: pytest.LogCaptureFixture) -> None:
    """Also if no question can be asked."""

    def save(ranks: ThreadCollectives) -> None:
        rank: Any = Rank(ranks)
        rank.proxy = Proxy()
        rank.attributes.begin()
        rank.attributes.set_rows(ranks.gather(rank.attributes.read_own()))

    run_ranks(2, save)
    assert "a restart loses what it holds" not in log.text


def test_activations_files_and_dates_are_not_named(log: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Also an activation of an evaluation, which has no gradient."""

    def save(ranks: ThreadCollectives) -> Any:
        rank: Any = Rank(ranks)
        rank.file = rank.logged = rank.weights = rank.hidden = None
        rank.attributes.begin()
        for needs_grad in (True, False):
            rank.file, rank.logged = (tmp_path / "log").open("a"), datetime.now(timezone.utc)
            rank.weights = torch.full((10, 10), float(ranks.rank), requires_grad=needs_grad) * 2
            rank.hidden = {"layers": [rank.weights]}
            rank.attributes.set_rows(ranks.gather(rank.attributes.read_own()))
            rank.file.close()
        return rank.attributes.state_dict()

    assert run_ranks(2, save)[0] == {"values": [{}, {}], "shared": {}, "named": []}
    assert "a restart loses what it holds" not in log.text


def test_long_set_is_shared_in_any_order(log: pytest.LogCaptureFixture) -> None:
    """The order of texts in a set depends on the process."""

    def save(ranks: ThreadCollectives) -> Any:
        rank: Any = Rank(ranks)
        rank.seen = {"ids": set[int]()}
        rank.attributes.begin()
        numbers = [1024 * number for number in range(999)]  # they collide, so the first one comes first
        rank.seen["ids"].update(numbers if ranks.rank else reversed(numbers))
        orders = ranks.gather(list(map(str, rank.seen["ids"])))
        rank.attributes.set_rows(ranks.gather(rank.attributes.read_own()))
        return orders[0] != orders[1], [*rank.attributes.state_dict()["shared"]]

    assert run_ranks(2, save)[0] == (True, ["Rank.seen"])
    assert "a restart loses what it holds" not in log.text


def test_attribute_that_changes_late_is_found() -> None:
    """Most at once, and all ranks find a change within a long list at the same step, by a sweep."""

    def save(ranks: ThreadCollectives) -> Any:
        rank: Any = Rank(ranks)
        rank.late, rank.short, rank.rows, rank.constant = 0, [[0]], [[n] for n in range(999)], [[0]] * 999
        rank.attributes.begin()
        found = []
        for step in range(1, STEPS_PER_SWEEP + 1):
            if step > 5:
                rank.late, rank.short[0][0], rank.rows[7][0], rank.large = step, step, step, rank.large + 1
                setattr(rank, f"made{ranks.rank}", step)  # rank 0 alone looks for others
            rank.attributes.set_rows(ranks.gather(rank.attributes.read_own()))
            state = rank.attributes.state_dict()
            found.append(sorted({*state["values"][0], *state["shared"]}))
        return found, state["shared"]["Rank.rows"][7], state["values"][1]["Rank.late"]["value"]

    found, row, late = run_ranks(2, save)[0]
    at_once = ["Rank.large", "Rank.late", "Rank.made0", "Rank.short"]
    assert found == [[]] * 5 + [at_once] * 44 + [sorted([*at_once, "Rank.rows"])]
    assert (row, late) == ([STEPS_PER_SWEEP], STEPS_PER_SWEEP)


def test_unchanged_attributes_are_not_read_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of many layers, and a long list."""

    def count(ranks: ThreadCollectives) -> int:
        rank: Any = Rank(ranks)
        rank.rows = [[n] for n in range(999)]
        rank.attributes.begin()
        for _ in range(5):
            rank.own += 1
            reads.clear()
            rank.attributes.read_own()
        return len(reads)

    reads: list[Any] = []

    def read(value: Any) -> Any:
        reads.append(value)
        return plain_attributes.read(value)

    monkeypatch.setattr(trainer_state, "read", read)
    assert run_ranks(1, count)[0] == 3, "own, the short list and the short state of the model"


def test_large_tensor_that_comes_to_differ_is_named(log: pytest.LogCaptureFixture) -> None:
    """Also after boundaries at which all ranks had the same; no rank gets that of another."""

    def save(ranks: ThreadCollectives) -> list[set[str]]:
        rank, shared = Rank(ranks), []
        rank.attributes.begin()
        for factor in (0, 0, 1):
            rank.large += 1 + factor * ranks.rank
            rank.attributes.set_rows(ranks.gather(rank.attributes.read_own()))
            shared.append({*rank.attributes.state_dict()["shared"]})
        return shared

    assert run_ranks(2, save)[0] == [{"Rank.large"}, {"Rank.large"}, set()]
    assert "Rank.large has changed since train() began" in log.text


def test_each_rank_gets_its_own_numbers_and_all_what_they_share(log: pytest.LogCaptureFixture) -> None:
    """A large tensor that differs between ranks is named; in another world rank r gets those of r modulo."""

    def save(ranks: ThreadCollectives) -> Any:
        rank = Rank(ranks)
        rank.attributes.begin()
        for _ in range(3):
            rank.step(ranks)
        return rank.attributes.state_dict()

    states = run_ranks(2, save)
    assert states[0]["values"] == states[1]["values"]
    assert "Rank.differs has changed since train() began" in log.text
    assert "large, and differs between ranks" in log.text

    def load(ranks: ThreadCollectives) -> Any:
        rank = Rank(ranks)
        rank.attributes.set_rows(ranks.gather(rank.attributes.read_own()))
        rank.attributes.load_state_dict(states[0])
        rank.attributes.set_rows(ranks.gather(rank.attributes.read_own()))
        rank.attributes.begin()
        return rank.own, rank.same, float(rank.large.sum()), rank.attributes.state_dict()["values"]

    first, second = run_ranks(2, load)
    assert first[:3] == (1.5, [0, 1, 2, 3], 3000.0)
    assert second[:3] == (4.5, [0, 1, 2, 3], 3000.0)
    assert first[3] == states[0]["values"]
    assert [found[0] for found in run_ranks(3, load)] == [1.5, 4.5, 1.5]
    assert "the number of ranks has changed from 2 to 3" in log.text


def test_values_of_another_step_are_not_logged_again() -> None:
    """A callback or an own log() may call on_log without an entry in the history, whose newest is older."""
    from elastic_resume.integrations.transformers import _RunLog  # noqa: PLC0415 - takes seconds

    logged: list[tuple[dict[str, float], bool]] = []
    progress = SimpleNamespace(position=SimpleNamespace(step=4))
    generation = SimpleNamespace(
        progress=progress, log=lambda values, of_last_step, **_: logged.append((values, of_last_step))
    )
    run: Any = SimpleNamespace(_generation=generation)
    state = SimpleNamespace(log_history=[{"loss": 1.0, "step": 2}], global_step=4)
    callback = _RunLog(run)
    callback.on_log(None, state, None, logs={"own": 3.0})
    state.log_history.append({"loss": 0.5, "step": 4})
    callback.on_log(None, state, None, logs={})
    assert logged == [({"own": 3.0}, True), ({"loss": 0.5}, True)]
