"""A start that resumes an earlier run logs where that run is, what differs, and how to start from scratch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic_resume import constants, testing
from elastic_resume.checkpoint import node_dir
from elastic_resume.checkpoint.atomic_io import Disk
from elastic_resume.checkpoint.catalog import scan_run
from elastic_resume.report import summary
from elastic_resume.report.checkpoints import find_node_dirs
from elastic_resume.report.loader import load_run
from elastic_resume.training.announce import describe_difference
from tests.support import launch_ranks

SCRIPT = """
import os, sys
import torch
import elastic_resume as er

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = er.resume(model=model, optimizer=optimizer)
for epoch in run.epochs(int(sys.argv[1])):
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        run.step()
        if "once" in sys.argv and run.position.step == 2 and run.plan.kind == "cold":
            os._exit(9)
"""


def run(directory: Path, *args: str, size: int = 1, **env: str) -> list[str]:
    """Run a world without an agent; return the notices that its ranks have printed."""
    ranks = launch_ranks.run_ranks(size, directory / "train.py", *args, env=[env] * size)
    assert [rank.returncode for rank in ranks] == [0] * size, ranks[0].stderr
    return find_notices("".join(rank.stderr for rank in ranks))


def find_notices(text: str) -> list[str]:
    """Return the lines about an earlier run."""
    return [line for line in text.splitlines() if "AN EARLIER RUN" in line]


@pytest.mark.slow
def test_start_on_earlier_run_logs_difference_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the notice a second start might silently train nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    assert run(tmp_path, "1", "--lr", "0.1") == []

    (line,) = run(tmp_path, "1", "--lr", "0.1")
    assert f"from {tmp_path / 'checkpoints' / 'train'} at step 3 (epoch 1)" in line
    assert "Same arguments and number of ranks. NOTHING IS LEFT TO TRAIN: epoch 1 of 1 is over." in line
    assert line.endswith("To start from scratch: --resume never, or ELASTIC_RESUME_RESUME=never.")

    (line,) = run(tmp_path, "2", "--lr", "0.5", size=2)
    assert (
        "at step 3 (epoch 1). Arguments then: 1 --lr 0.1; now: 2 --lr 0.5. Ranks then: 1; now: 2. To" in line
    )

    assert run(tmp_path, "1", ELASTIC_RESUME_RESUME="never") == []
    monkeypatch.setenv("SECRET_OF_THE_USER", "hunter2")
    (line,) = run(tmp_path, "3")
    assert "Arguments then: 1; now: 3. To start" in line
    kept = (tmp_path / "checkpoints" / "train" / "n0" / node_dir.SCRIPT_ARGUMENTS_FILE).read_text()
    assert '"3"' in kept
    assert "hunter2" not in kept


@pytest.mark.cluster
def test_restart_logs_no_notice_and_next_start_does(tmp_path: Path) -> None:
    """Only a new start may surprise a person. Secrets stay masked.

    Then a start with `never` moves the run aside, and its own restart continues.
    """
    (tmp_path / "train.py").write_text(SCRIPT)
    with testing.Cluster(tmp_path / "cluster", nodes=2, flags=["--save-every", "1"]) as cluster:
        cluster.start(str(tmp_path / "train.py"), "2", "once")
        assert cluster.wait_exit(120) == [0, 0]
        assert find_notices(cluster.output(0) + cluster.output(1)) == []
        resumes = [event["kind"] for event in cluster.events("resume")]
        assert resumes == ["cold", "resumed"]
        cluster.start(str(tmp_path / "train.py"), "2", "once", "--api-key", "hunter2")
        assert cluster.wait_exit(120) == [0, 0]
        files = [path for node in cluster.nodes for path in node.directory.iterdir() if path.is_file()]
        assert {"events.jsonl", "lock-owner.json"} <= {path.name for path in files}
        assert [path for path in files if b"hunter2" in path.read_bytes()] == []
        (line,) = find_notices(cluster.output(0) + cluster.output(1))
        assert "Arguments then: 2 once; now: 2 once --api-key '***'. NOTHING IS LEFT TO TRAIN" in line

        cluster.env["ELASTIC_RESUME_RESUME"] = "never"
        trained = scan_run(cluster.run_dir, None)
        cluster.start(str(tmp_path / "train.py"), "1", "once")
        assert cluster.wait_exit(120) == [0, 0]
        resumes = cluster.events("resume")
        assert [event["kind"] for event in resumes] == ["cold", "resumed"]
        for node in cluster.nodes:
            entries = trained[node.name]
            assert resumes[0]["generation"] > entries[0].generation
            run_dir = node.directory.parent
            moved = scan_run(run_dir.with_name(f"{run_dir.name}.old-1"), None)[node.name]
            assert [entry.version for entry in moved] == [entry.version for entry in entries]
            assert {found.run_id for found in find_node_dirs(run_dir.parent).node_dirs} == {
                run_dir.name,
                f"{run_dir.name}.old-1",
            }
        report = summary.build_run_report(load_run([cluster.run_dir]).events)
    assert [generation.resume_kind for generation in report.history.generations] == ["cold", "resumed"]
    assert " 1 failure, " in report.verdict.text, "those of the earlier run do not count"


CRASHES = """
import os, pathlib, sys
import torch
import elastic_resume as er

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = er.resume(model=model, optimizer=optimizer)
if not pathlib.Path("crashed").exists() and run.plan.kind == "resumed":
    pathlib.Path("crashed").touch()
    os._exit(9)
for epoch in run.epochs(1):
    optimizer.step()
    run.step()
"""


def test_crash_before_first_step_keeps_earlier_run_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restarted generation resumes the same earlier run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(CRASHES)
    agent = {constants.ENV_AGENT_PID: str(os.getpid())}  # the same in both starts, as in a restart
    ends = []
    for env in ({}, agent, agent):
        (rank,) = launch_ranks.run_ranks(1, tmp_path / "train.py", env=[env])
        ends.append((rank.returncode, len(find_notices(rank.stderr))))
    assert ends == [(0, 0), (9, 0), (0, 1)]


@pytest.mark.parametrize(
    ("before", "now", "sizes", "expected"),
    [
        (["t.py", "--lr", "1"], ["t.py", "--lr", "1"], (2, 2), "Same arguments and number of ranks"),
        (["t.py"], ["t.py", "a b"], (2, 2), "Arguments then: (none); now: 'a b'"),
        (["t.py", "x"], ["u.py", "x"], (2, 2), "Command then: t.py x; now: u.py x"),
        ([], ["t.py"], (2, 3), "Ranks then: 2; now: 3"),
        ([], ["t.py"], (2, 2), ""),
        (["t.py"], ["t.py", "x" * 400], (None, 3), f"Arguments then: (none); now: {'x' * 300}…"),
        (
            ["t.py", "--api-key=a", "x"],
            ["t.py", "--api-key=b", "y"],
            (2, 2),
            "Arguments then: '--api-key=***' x; now: '--api-key=***' y",
        ),
        (["t.py", "--token", "a"], ["t.py", "--token", "b"], (2, 2), "Same arguments and number of ranks"),
    ],
)
def test_describe_difference_names_command_and_ranks(
    before: Sequence[str], now: Sequence[str], sizes: tuple[int | None, int], expected: str
) -> None:
    """Equal parts are left out."""
    assert describe_difference(before, now, *sizes) == expected


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"launcher_id": 1, "words": []}', "\x00", "9" * 70000]
)
def test_damaged_script_arguments_file_is_ignored(tmp_path: Path, text: str) -> None:
    """It only informs people, so it must not end a job."""
    (tmp_path / node_dir.SCRIPT_ARGUMENTS_FILE).write_text(text)
    assert node_dir.read_script_arguments(tmp_path) == ("", [])


class CountingDisk(Disk):
    """Count synced files."""

    syncs = 0

    def sync_file(self, descriptor: int, path: Path) -> None:
        """See base class."""
        self.syncs += 1
        super().sync_file(descriptor, path)


def test_script_arguments_file_drops_oversized_arguments(tmp_path: Path) -> None:
    """A command line may be 2 MB long."""
    node_dir.record_script_arguments(tmp_path, "1 2 boot", ["t.py", "ä \udcff"])
    assert node_dir.read_script_arguments(tmp_path) == ("1 2 boot", ["t.py", "ä \udcff"])
    disk = CountingDisk()
    for words in (["t.py"], ["t.py"], ["t.py"]):
        node_dir.record_script_arguments(tmp_path, "1 2 boot", words, disk)
    assert disk.syncs == 1  # a restart does not wait for the disk
    node_dir.record_script_arguments(tmp_path, "1 2 boot", ["x" * 70_000])
    assert node_dir.read_script_arguments(tmp_path) == ("1 2 boot", [])


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["t.py", "--api-key=a=b", "--lr=1"], ["t.py", "--api-key=***", "--lr=1"]),
        (["--hf_token", "a", "x"], ["--hf_token", "***", "x"]),
        (["--apiKey", "a"], ["--apiKey", "***"]),
        (["db.password=a\nb", "--config=MY_SECRET=a"], ["db.password=***", "--config=MY_SECRET=***"]),
        (["--clientSecretId=", "--access-keys", "a"], ["--clientSecretId=***", "--access-keys", "***"]),
        (["--use-token", "--lr", "1"], ["--use-token", "--lr", "1"]),
        (["--api-key", "-a-b", "-x"], ["--api-key", "***", "-x"]),
        (["--token", "--4f=", "--token", "-"], ["--token", "***", "--token", "***"]),
        (
            ['--json={"a": 1}', '{"hf_token": "a,b", "lr": 1}'],
            ['--json={"a": 1}', '{"hf_token": "***", "lr": 1}'],
        ),
        (["{db: {password: a b}}", "{'key':'a'}"], ['{db: {password: "***"}}', "{'key':\"***\"}"]),
        (["--tokenizer", "bpe", "--max-tokens=9", "--keypoints", "4"], None),
        (["key.py", "data", "--token"], None),
        ([], None),
    ],
)
def test_script_arguments_file_masks_secrets(
    tmp_path: Path, words: list[str], kept: list[str] | None
) -> None:
    """Everybody who reads checkpoints or logs can read the file."""
    node_dir.record_script_arguments(tmp_path, "1 2 boot", words)
    assert node_dir.read_script_arguments(tmp_path)[1] == (words if kept is None else kept)
    assert node_dir.mask_secrets(node_dir.mask_secrets(words)) == node_dir.mask_secrets(words)
