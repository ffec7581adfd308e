"""Each block of code in docs/guides/checkpoints.md runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support import launch_ranks
from tests.support.paths import ROOT, SCRIPTS

PAGE = ROOT / "docs" / "guides" / "checkpoints.md"
JOB = SCRIPTS / "page.py"
# Before the script: record what each rank reads in each step, and end all ranks within an epoch.
AROUND = """
import json, os
from elastic_resume.training.run import Run

steps, step = 0, Run.step

def counted(run):
    global steps
    step(run)
    steps += 1
    line = {"step": run.position.step, "epoch": epoch, "numbers": numbers.tolist()}
    os.write(step log, (json.dumps(line) + "\\n").encode())
    if steps == int(os.environ.get("DIES_AFTER", "0")):
        run.save()
        os._exit(9)

Run.step = counted
step log = os.open(f"read-{os.environ['RANK']}-{os.environ['WORLD_SIZE']}", os.O_WRONLY | os.O_CREAT)
"""

PRINT_RATE = """
print(optimizer.param_groups[0].get("initial_lr", optimizer.param_groups[0]["lr"]))
"""


def blocks() -> list[tuple[int, str]]:
    """Return line number and text of each Python block."""
    text = PAGE.read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start()].count("\n") + 1, match[1]) for match in found]


@pytest.mark.slow
def test_every_block_runs_on_three_ranks(tmp_path: Path) -> None:
    """The blocks run one after another in one world, each in its own folder."""
    (tmp_path / "blocks").write_text(json.dumps(blocks()))
    done = launch_ranks.run_ranks(3, JOB, str(PAGE), str(tmp_path / "blocks"), str(tmp_path))
    assert [process.returncode for process in done] == [0, 0, 0], "\n".join(
        process.stderr for process in done
    )
    assert {process.stdout.splitlines()[-1] for process in done} == {f"all {len(blocks()) - 1} blocks"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "steps", "rate"),
    [("er.GlobalBatches(len(samples), 12", 18, 0.1), ("er.ElasticSampler(", 25, 0.1 * 8 / 12)],
)
def test_documented_script_reads_each_sample_once_after_world_shrinks(
    which: str, steps: int, rate: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks end within an epoch, and two continue with the documented learning rate."""
    monkeypatch.chdir(tmp_path)
    preface, *others = (code for _, code in blocks())
    (code,) = (code for code in others if which in code)
    script = tmp_path / "train.py"
    script.write_text(AROUND + preface + code + PRINT_RATE)
    died = launch_ranks.run_ranks(3, script, env=[{"DIES_AFTER": "5"}] * 3)
    assert [process.returncode for process in died] == [9, 9, 9], died[0].stderr
    went_on = launch_ranks.run_ranks(2, script)
    assert [process.returncode for process in went_on] == [0, 0], went_on[0].stderr
    lines = [json.loads(line) for path in tmp_path.glob("read-*") for line in path.read_text().splitlines()]
    for epoch in range(2):
        read = [number for line in lines if line["epoch"] == epoch for number in line["numbers"]]
        assert sorted(read) == [*range(108)]
    assert {line["step"] for line in lines} == set(range(1, steps + 1))
    assert float(went_on[0].stdout) == pytest.approx(rate)
