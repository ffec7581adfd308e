"""The wheel and the sdist: what they hold, and that the installed wheel works without the source tree."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from elastic_resume import __version__
from tests.support.paths import ROOT

pytestmark = pytest.mark.cluster

PACKAGE = "elastic_resume"
# Rank 1 dies once at step 5. A line of rank 0 says where each life of the workers begins.
TRAIN = """
import os
from pathlib import Path

import torch
import elastic_resume as er

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
batches = er.GlobalBatches(64, global_batch=8, seed=0)
loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_sampler=batches)
run = er.resume(model=model, optimizer=optimizer, data=batches)
ddp = run.ddp(model)
if run.rank == 0:
    print(f"begin at step {run.position.step} in {er.__file__}", flush=True)
for epoch in run.epochs(2):
    for samples in loader:
        loss = ddp(samples).square().mean() * run.loss_weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step()
        if run.rank == 1 and run.position.step == 5 and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), 9)
if run.rank == 0:
    print(f"end at step {run.position.step}", flush=True)
run.close()
"""


def call(command: Sequence[str | Path], cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Run a command to its end and return its output. An exit code other than 0 fails the test."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the sdist, and from it the wheel; hatchling comes from the running environment."""
    directory = tmp_path_factory.mktemp("dist")
    call([sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, ROOT])
    [sdist], [wheel] = directory.glob("*.tar.gz"), directory.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def sdist_files(archives: tuple[Path, Path]) -> dict[str, bytes]:
    """Return the files of the sdist, by path below its top directory."""
    files = {}
    with tarfile.open(archives[0]) as archive:
        for member in archive.getmembers():
            content = archive.extractfile(member)
            if content is not None:
                files[member.name.partition("/")[2]] = content.read()
    return files


@pytest.fixture(scope="module")
def wheel_files(archives: tuple[Path, Path]) -> dict[str, bytes]:
    """Return the files of the wheel that was built from the sdist."""
    with zipfile.ZipFile(archives[1]) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


class Environment:
    """A venv that holds the wheel. Dependencies are links to the running environment's packages."""

    def __init__(self, directory: Path, wheel: Path) -> None:
        self.directory = directory
        self.bin = directory / "venv" / "bin"
        self.python = self.bin / "python"
        call([sys.executable, "-m", "venv", "--without-pip", directory / "venv"])
        links = directory / "dependencies"
        links.mkdir()
        for name in ("purelib", "platlib"):
            for entry in Path(sysconfig.get_path(name)).iterdir():
                ours = entry.name.startswith(
                    (PACKAGE, f"_editable_impl_{PACKAGE}", f"__editable__.{PACKAGE}")
                )
                if not ours and entry.suffix != ".pth" and not (links / entry.name).exists():
                    (links / entry.name).symlink_to(entry)
        [site] = (directory / "venv" / "lib").glob("python*/site-packages")
        (site / "dependencies.pth").write_text(f"{links}\n")
        self.site = site
        install: list[str | Path] = ["install", "--no-deps", "--no-index", wheel]
        call([sys.executable, "-m", "pip", "--python", self.python, *install])

    def call(self, *command: str, cwd: Path) -> str:
        """Run a command of the venv; nothing in its environment leads to the source tree."""
        private = ("PYTHON", "PYTEST", "COVERAGE", "VIRTUAL_ENV", "ELASTIC_RESUME", "COLUMNS")
        env = {name: value for name, value in os.environ.items() if not name.startswith(private)}
        env["PATH"] = f"{self.bin}{os.pathsep}{env['PATH']}"
        return call([self.bin / command[0], *command[1:]], cwd, env)


@pytest.fixture(scope="module")
def environment(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Install the wheel into a fresh venv."""
    return Environment(tmp_path_factory.mktemp("environment"), archives[1])


def test_wheel_holds_every_file_of_the_package_and_no_other(wheel_files: dict[str, bytes]) -> None:
    """Templates, style sheets and py.typed among them; no tests, benchmarks or examples."""
    expected = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in (ROOT / PACKAGE).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert f"{PACKAGE}/py.typed" in expected
    assert {name: data for name, data in wheel_files.items() if ".dist-info/" not in name} == expected


def test_sdist_holds_every_tracked_file(sdist_files: dict[str, bytes]) -> None:
    """So the tests run from it."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout: the list of tracked files is missing")
    tracked = set(call(["git", "ls-files", "-z"]).split("\0")) - {""}
    deleted = set(call(["git", "ls-files", "-z", "--deleted"]).split("\0"))
    assert tracked - deleted <= set(sdist_files)


def test_metadata_passes_index_check_and_registers_pytest_plugin(
    archives: tuple[Path, Path], wheel_files: dict[str, bytes]
) -> None:
    """The description is the README, torch comes with few other packages, and pytest finds the plugin."""
    call([sys.executable, "-m", "twine", "check", "--strict", *archives])
    [metadata] = (data for name, data in wheel_files.items() if name.endswith(".dist-info/METADATA"))
    message = Parser().parsestr(metadata.decode())
    assert message["Version"] == __version__
    assert message["Description-Content-Type"] == "text/markdown"
    assert str(message.get_payload()).strip() == (ROOT / "README.md").read_text().strip()
    plain = {line for line in message.get_all("Requires-Dist", []) if "extra ==" not in line}
    needed = [*map(Requirement, plain)]
    assert {each.name for each in needed} == {"torch", "psutil", "pyyaml", "xxhash", "jinja2"}
    for each in needed:
        assert each.specifier.contains(importlib.metadata.version(each.name), prereleases=True), each
    [entry_points] = (data for name, data in wheel_files.items() if name.endswith("/entry_points.txt"))
    assert "[pytest11]\nelastic_resume = elastic_resume.testing\n" in entry_points.decode() + "\n"


def test_installed_wheel_continues_after_a_killed_worker(environment: Environment, tmp_path: Path) -> None:
    """The run's report is rendered too: its template and style sheet come from the wheel."""
    (tmp_path / "train.py").write_text(TRAIN)
    flags = ["--nproc-per-node", "2", "--snapshot-every", "1", "--prove", "off"]
    run = ["elastic-resume", "run", *flags, "train.py"]
    where = re.escape(str(environment.site / PACKAGE / "__init__.py"))
    output = environment.call(*run, cwd=tmp_path)
    first, second = re.findall(rf"begin at step (\d+) in {where}", output)
    assert int(first) == 0
    assert int(second) in {4, 5}, "the copy of step 5 may not have been complete"
    assert "end at step 16" in output
    environment.call("elastic-resume", "report", "--html", "page.html", "checkpoints/train", cwd=tmp_path)
    assert "<style>" in (tmp_path / "page.html").read_text()
