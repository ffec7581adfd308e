"""Every fenced block of README.md and docs/ runs, or is checked where it cannot run here.

A page is one session in an empty directory, in the page's order:

- A python block whose first line is ``# train.py``, or whose paragraph names ``train.py`` at its end, is
  written to that file. With ``def test_`` pytest runs it. Any other python or diff block is a fragment: it
  runs on two ranks after `PREFACE`, which has the objects that a reader has.
- An sh block runs in bash. If it has `elastic-resume` commands only, they run without a shell, forked from a
  process that has imported torch.
- If the paragraph of an sh block says "second terminal", the block before still runs, in bash. The second
  block is a `pkill`, which is imitated.
- A text block is part of the output before. ``…`` matches any text, a number any number.
- `NOT_RUN` names what cannot run here, with the reason. Its commands are parsed all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import kubernetes_validate as schemas
import psutil
import pytest
import yaml

from elastic_resume import cli, config
from elastic_resume.agent import torchelastic
from elastic_resume.rendezvous import rendezvous_config
from elastic_resume.testing import chaos, fork_server
from elastic_resume.testing.fork_server import AgentProcess
from tests.support import launch_ranks
from tests.support.paths import ROOT, SCRIPTS, preload

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts]
CHECKPOINTS_PAGE = "docs/guides/checkpoints.md"
# A page or a text in a block, the language, and why the block does not run here.
NOT_RUN = (
    (CHECKPOINTS_PAGE, "python", "they run on three ranks, below"),
    ("docs/guides/testing.md", "python", "integration/test_pytest_plugin.py runs these blocks"),
    ("docs/guides/notebooks.md", "python", "integration/test_launch.py runs these blocks in a notebook"),
    (r"^python train\.py\ntorchrun ", "sh", "test_examples.py continues one run by all three launchers"),
    (r"-from transformers import Trainer", "diff", "the file train.py below it is its right side"),
    (r"-from trl import", "diff", "TRL is installed by make soak only, for tests/integration/test_trl.py"),
    (r"dp_replicate_size=", "python", "needs GPUs; integration/test_accelerate.py and test_transformers.py"),
    (r"\(BaseDataLoader\)", "python", "needs torchtitan"),
    (r"assert_same_run\(", "python", "integration/test_equivalence.py runs it, for a minute"),
    ("sbatch |srun |scontrol |scancel |squeue ", "sh", "needs Slurm; system/slurm runs the script"),
    ("kubectl |docker ", "sh", "needs a cluster or an image; system/kubernetes runs the Job"),
    (r"\bnode[012]\b.*\.py|--rdzv-endpoint node|-rdzv-id|getent hosts", "sh", "needs several machines"),
    (r"(--config|--output) job\.yaml", "sh", "the file is of three machines; integration/test_job_file.py"),
    ("pip install|python -m build|git clone", "sh", "needs the network; a test installs the wheel"),
    (r"\bmake ", "sh", "the tests run by it"),
    (r"\$MASTER_ADDR|\$LWS_", "sh", "needs the pods of another controller"),
    ("sky (jobs|volumes) ", "sh", "needs SkyPilot"),
    ("ssh |systemctl ", "sh", "needs another machine"),
    ("preemption-notice|PREEMPTION_NOTICE", "sh", "asks a cloud; unit/mechanisms/preemption"),
    ("--resume-from", "sh", "integration/test_going_back.py goes back, to a milestone"),
    ("elastic-resume chaos", "sh", "integration/test_chaos.py runs it, for a minute"),
    ("elastic-resume rehearse", "sh", "integration/test_rehearsal.py runs it, for a minute"),
    ("elastic-resume status", "sh", "runs until it is interrupted; integration/test_status.py"),
    ("kubeflow", "python", "submits a job to a cluster"),
    ("llamafactory-cli", "sh", "needs LLaMA-Factory"),
    (r"--on-event|python slack\.py", "sh", "sends messages; unit/mechanisms/on_event/test_page.py"),
    ("s3://", "sh", "needs a bucket; integration/test_archive.py and test_archived_jobs.py"),
    ("MlflowClient", "python", "integration/test_own_loggers.py runs such a script"),
    ("--metrics", "sh", "opens a port for all networks; unit/report/test_metrics.py"),
)  # fmt: skip
# Replaced in all blocks, because the machine has two cores and the test should end soon.
SHORTER = (
    (r"(--nproc-per-node[ =])\d+", r"\g<1>2"),
    (r"time\.sleep\(0\.1\)", "time.sleep(0.05)"),
    (r"run\.epochs\(20\)", "run.epochs(1)"),
)
# Sessions of many commands, of what other tests run too: only `make soak` has the time for them.
SLOW_SESSIONS = {
    "docs/getting-started/first-failure.md",
    "docs/guides/lightning.md",
    "docs/guides/several-machines.md",
    "docs/guides/torchrun.md",
    "docs/guides/transformers.md",
}
SECOND_TERMINAL = re.compile(r"(second|another) terminal", re.IGNORECASE)
TIMEOUT_S = 250
FILE_LANGUAGES = {"bash", "python", "yaml"}

PREFACE = """
import contextlib
import glob
import io
import json
import pathlib
import tarfile
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import elastic_resume as er

EPOCHS = 1
dataset = TensorDataset(torch.randn(192, 8), torch.arange(192) % 2)
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
batches = er.GlobalBatches(len(dataset), global_batch=96, micro_batch=8)
loader = DataLoader(dataset, batch_sampler=batches)
loss_of = nn.functional.cross_entropy

shards = range(6)

def read(shard):
    yield from torch.utils.data.Subset(dataset, range(shard, 192, 7))

def evaluate(model):
    model.eval()

class HubDataset:  # in the place of a Hugging Face IterableDataset, of which these methods are used
    def __init__(self, rows=range(48), num_shards=6):
        self.rows, self.num_shards = rows, num_shards

    def shard(self, num_shards, index):
        return HubDataset(self.rows[index::num_shards], 1)

    def skip(self, count):
        return HubDataset(self.rows[count:], 1)

    def __iter__(self):  # divides its only shard among the workers that it sees, as datasets does
        info = torch.utils.data.get_worker_info()
        assert not info, info
        return ({"text": f"row {row}"} for row in self.rows)

def load_dataset(*args, **kwargs):
    return HubDataset()

def write_shards(kind, number, write):  # both ranks write the same file
    path = pathlib.Path("data", f"{number}.{kind}")
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(f".{dist.get_rank()}")
    write(part)
    part.rename(path)

def write_lines(path):
    path.write_text(json.dumps({"inputs": [0.5] * 8, "label": 1}) + "\\n")

def write_tar(path):
    with tarfile.open(path, "w") as tar:
        for kind, data in (("pth", io.BytesIO()), ("cls", io.BytesIO(b"1"))):
            if kind == "pth":
                torch.save(torch.ones(8), data)
            entry = tarfile.TarInfo(f"sample-0.{kind}")
            entry.size = len(data.getvalue())
            tar.addfile(entry, io.BytesIO(data.getvalue()))

for number in range(4):
    write_shards("jsonl", number, write_lines)
    write_shards("tar", number, write_tar)
"""
RESUMED = """
run = er.resume(model=model, optimizer=optimizer, scheduler=scheduler, data=batches)
model = run.ddp(model)
"""

TRAIN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import elastic_resume as er

samples = TensorDataset(torch.randn(120, 8), torch.arange(120) % 2)
batches = er.GlobalBatches(len(samples), global_batch=12, seed=0)
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = er.resume(model=model, optimizer=optimizer, data=batches)
ddp = run.ddp(model)
for epoch in run.epochs(2):
    for inputs, labels in DataLoader(samples, batch_sampler=batches):
        loss = nn.functional.cross_entropy(ddp(inputs), labels) * run.loss_weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step()
run.close()
"""

# Imported once for the jobs of a page, by the process that forks their agents.
IMPORTS = {
    "docs/guides/lightning.md": "lightning.pytorch",
    "docs/guides/transformers.md": "transformers.trainer",
}


@dataclass(frozen=True)
class Block:
    """One fenced block: its page, line, language and text, and the paragraph before it."""

    page: str
    line: int
    language: str
    text: str
    paragraph: str

    @property
    def reason(self) -> str:
        """Why the block does not run here, or an empty text."""
        for pattern, language, reason in NOT_RUN:
            if language == self.language and (pattern == self.page or re.search(pattern, self.text)):
                return reason
        return ""

    @property
    def file(self) -> str:
        """The file that the block is the content of, or an empty text."""
        if self.language not in FILE_LANGUAGES:
            return ""
        first = re.match(r"# ([\w./-]+\.(?:py|yaml|sbatch|sh))$", self.text.partition("\n")[0])
        if first is not None:
            return first[1]
        named = re.findall(r"`([\w./-]+\.(?:py|yaml|sbatch|sh))`", self.paragraph)
        is_named = re.search(r"`[\w./-]+\.\w+`[^`]*:$", self.paragraph)
        return named[-1] if named and is_named else ""

    @property
    def is_fragment(self) -> bool:
        """Whether `PREFACE` has to stand before it."""
        return self.language in {"python", "diff"} and not (self.file or self.reason or self.is_test)

    @property
    def is_test(self) -> bool:
        """Whether pytest runs it."""
        return self.language == "python" and "def test_" in self.text

    @property
    def code(self) -> str:
        """The text, shortened; of a diff the side after the change."""
        text = self.text
        if self.language == "diff":
            lines = [line for line in text.splitlines() if not line.startswith("-")]
            text = "\n".join(line[1:] for line in lines if not re.search(r"= \.\.\.( +#.*)?$", line)) + "\n"
        for pattern, replacement in SHORTER:
            text = re.sub(pattern, replacement, text)
        return text


def find_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page; Sphinx's own, in braces, are left to it."""
    text = page.read_text()
    found = []
    for match in re.finditer(r"^( *)(```+)(\S*)[^\n]*\n(.*?)^\1\2$", text, re.MULTILINE | re.DOTALL):
        indent, _, language, code = match.groups()
        paragraph = " ".join(text[: match.start()].rstrip().rpartition("\n\n")[2].split())
        code = re.sub(f"^{indent}", "", code, flags=re.MULTILINE)
        line = text[: match.start()].count("\n") + 1
        if not language.startswith("{"):
            found.append(Block(str(page.relative_to(ROOT)), line, language, code, paragraph))
    return found


BLOCKS = [block for page in PAGES for block in find_blocks(page)]


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell block."""
    text = re.sub(r"\\\n", " ", text)
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if word and set(word) <= set("|&;()"):
                yield words
                words = []
            else:
                words.append(word)
        yield words


# ---- what runs -----------------------------------------------------------------------------------------


class Session:
    """The commands of one page, in a directory that begins with ``train.py`` alone."""

    def __init__(self, directory: Path, find_copies: Callable[[], Path], imports: str) -> None:
        """``find_copies`` returns checkpoints of two nodes, for pages that begin with them."""
        self.directory = directory
        self.output = directory.parent / "output"
        self.job: AgentProcess | None = None
        self._find_copies = find_copies
        directory.mkdir()
        (directory / "train.py").write_text(TRAIN)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("ELASTIC_RESUME_", "PET_"))}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environ = {**kept, "PATH": path, "OMP_NUM_THREADS": "1"}
        if imports:
            self._environ |= preload(imports)

    def run_shell(self, block: Block, *, stays: bool) -> None:
        """Run a block. If it ``stays``, return when its job has committed a checkpoint, else at its end."""
        if not (self.directory / "checkpoints").exists() and re.search(r"\bcheckpoints\b", block.text):
            (self.directory / "checkpoints").symlink_to(self._find_copies())
        if self.job is not None and SECOND_TERMINAL.search(block.paragraph):
            self._kill(*commands(block.text))
            return
        script = [words for words in commands(block.code) if words]
        is_forked = not stays and all(words[0] == "elastic-resume" for words in script)
        with self.output.open("wb") as file:
            # A job that stays is bash's own process, so that its end is the end of the job.
            for command in script if is_forked else [["bash", "-e", "-c", block.code]]:
                self.finish()
                self.job = self._start(command, file)
        if stays:
            # At the first step of one rank no snapshot may be whole, and a kill then starts the job afresh.
            manifests = "checkpoints/*/*/g*/manifest.json"
            self.wait_for("a checkpoint", lambda: any(self.directory.glob(manifests)))
        else:
            self.finish()

    def _start(self, command: list[str], output: IO[bytes]) -> AgentProcess:
        """Start a process; one of ours is forked if possible, which saves its imports."""
        forked = None
        if command[0] == "elastic-resume":
            own = [sys.executable, "-m", "elastic_resume", *command[1:]]
            forked = fork_server.start(own, self._environ, output, cwd=self.directory)
        return forked or subprocess.Popen(
            command, cwd=self.directory, env=self._environ, stdout=output, stderr=subprocess.STDOUT
        )

    def _kill(self, words: list[str]) -> None:
        """Do what pkill does, with the processes of this session only."""
        choose = {"--newest": max, "--oldest": min}[words[3]]
        assert words[:-1] == ["pkill", "--signal", "KILL", words[3], "--full"]
        assert self.job is not None
        found = psutil.Process(self.job.pid).children(recursive=True)
        found = [process for process in found if words[-1] in " ".join(process.cmdline())]
        choose(found, key=lambda process: (process.create_time(), process.pid)).kill()

    def wait_for(self, description: str, condition: Callable[[], object]) -> None:
        """Wait until the condition holds; the job's end is the last chance."""
        assert self.job is not None
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            ended = self.job.poll() is not None
            if condition():
                return
            assert not ended, f"no {description} before the end: {self.output.read_text()}"
            assert time.monotonic() < deadline, f"no {description}: {self.output.read_text()}"
            time.sleep(0.05)

    def expect(self, block: Block) -> None:
        """Wait until the output has the lines of a text block, in their order."""
        lines = [
            re.sub(r"\d+(\\\.\d+)?", r"\\d+(\\.\\d+)?", re.escape(line)) for line in block.text.splitlines()
        ]
        pattern = re.compile(r"\n(?:.*\n)*?".join(line.replace("…", ".*") for line in lines))
        self.wait_for(repr(block.text), lambda: pattern.search(self.output.read_text()))

    def finish(self) -> None:
        """Wait for the running block."""
        if self.job is not None:
            assert self.job.wait(TIMEOUT_S) == 0, self.output.read_text()

    def close(self) -> None:
        """Kill what is left of a failed session."""
        if self.job is not None and self.job.poll() is None:
            for process in psutil.Process(self.job.pid).children(recursive=True):
                process.kill()
            self.job.kill()
            self.job.wait()

    def run_pytest(self, block: Block) -> None:
        """Run a block of tests in this process, so that its nodes fork without importing torch again."""
        # pytest imports a module once by its name, and another page has tests too.
        path = self.directory / f"test_{self.directory.parent.name}.py"
        path.write_text(block.code)
        off = [f"-pno:{plugin}" for plugin in ("cacheprovider", "faulthandler", "timeout", "xdist")]
        base = ["--import-mode", "importlib", "--basetemp", str(self.directory.parent / "base")]
        assert pytest.main(["-q", *off, *base, str(path)]) == 0


@pytest.fixture(scope="session")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a run on two nodes, node0 and node1."""
    directory = tmp_path_factory.mktemp("copies")
    (directory / "train.py").write_text(TRAIN)
    place = {"ELASTIC_RESUME_CKPT_DIR": str(directory / "checkpoints")}
    nodes = [{**place, "ELASTIC_RESUME_NODE_NAME": f"node{rank}"} for rank in range(2)]
    done = launch_ranks.run_ranks(2, directory / "train.py", env=nodes)
    assert [process.returncode for process in done] == [0, 0], done[0].stderr
    return directory / "checkpoints"


def run_blocks(page: str) -> list[Block]:
    """Return the blocks of a page's session.

    The output of a command that does not run is left out, and so is a command that an earlier page has run
    with the same train.py.
    """
    blocks = [block for block in BLOCKS if block.page == page]
    has_files = any(block.file for block in blocks)
    earlier = {b.text for b in BLOCKS[: BLOCKS.index(blocks[0])] if b.language == "sh" and not has_files}
    kept: list[Block] = []
    skipped = False
    for block in blocks:
        if block.language == "sh":
            skipped = bool(block.reason) or block.text in earlier
        if not (block.reason or block.is_fragment or (block.language in {"sh", "text"} and skipped)):
            kept.append(block)
    return kept


def pages_with_session() -> list[Any]:
    """Return the pages that have a command or a test to run."""
    return [
        pytest.param(page, marks=pytest.mark.soak if page in SLOW_SESSIONS else ())
        for page in dict.fromkeys(block.page for block in BLOCKS)
        if any(block.language == "sh" or block.is_test for block in run_blocks(page))
    ]


@pytest.mark.cluster
@pytest.mark.parametrize("page", pages_with_session())
def test_session_of_page_runs(
    page: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, commands, their output, and tests."""
    blocks = run_blocks(page)
    session = Session(tmp_path / "session", lambda: request.getfixturevalue("copies"), IMPORTS.get(page, ""))
    # `run_pytest` runs in this process, and a page's tests name their scripts without a directory.
    monkeypatch.chdir(session.directory)
    try:
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            if block.file:
                (session.directory / block.file).write_text(block.code)
            elif block.language == "sh":
                stays = following is not None and bool(SECOND_TERMINAL.search(following.paragraph))
                session.run_shell(block, stays=stays)
            elif block.language == "text":
                session.expect(block)
            elif block.is_test:
                session.finish()
                session.run_pytest(block)
        session.finish()
    finally:
        session.close()


@pytest.mark.slow
@pytest.mark.parametrize("library", ["", pytest.param("lightning", marks=pytest.mark.soak)])
def test_fragments_run_on_two_ranks(tmp_path: Path, library: str) -> None:
    """With the objects that a reader's script has. Lightning's import takes as long as all others."""
    fragments = [b for b in BLOCKS if b.is_fragment and ("import lightning" in b.text) == bool(library)]
    resumes = re.compile(r"er\.(resume|epochs|steps)\(")
    code = [(block.code if resumes.search(block.code) else RESUMED + block.code) for block in fragments]
    code = [text.replace("dist.init_process_group()\n", "") for text in code]  # page.py has called it
    numbered = [[0, PREFACE], *([1000 * number, text] for number, text in enumerate(code, 1))]
    (tmp_path / "blocks").write_text(json.dumps(numbered))
    words = ["fragment", str(tmp_path / "blocks"), str(tmp_path)]
    env = [{"ELASTIC_RESUME_CHECK_REPLICAS": "off"}] * 2  # a fragment may leave the wrapping to the reader
    done = launch_ranks.run_ranks(2, SCRIPTS / "page.py", *words, env=env)
    places = [f"{1000 * number}: {block.page}:{block.line}" for number, block in enumerate(fragments, 1)]
    assert [process.returncode for process in done] == [0, 0], "\n".join([*places, done[0].stderr])


@pytest.mark.slow
def test_blocks_of_checkpoints_page_run_on_three_ranks(tmp_path: Path) -> None:
    """One after another in one world, each in its own folder."""
    blocks = [[b.line, b.text] for b in BLOCKS if (b.page, b.language) == (CHECKPOINTS_PAGE, "python")]
    (tmp_path / "blocks").write_text(json.dumps(blocks))
    words = [CHECKPOINTS_PAGE, str(tmp_path / "blocks"), str(tmp_path)]
    done = launch_ranks.run_ranks(3, SCRIPTS / "page.py", *words)
    assert [process.returncode for process in done] == [0, 0, 0], done[0].stderr
    assert done[0].stdout.splitlines()[-1] == f"all {len(blocks) - 1} blocks"


# ---- what is only checked ------------------------------------------------------------------------------


def test_every_block_has_a_language_that_is_checked() -> None:
    """A command or an output without one would never be run."""
    strange = [b for b in BLOCKS if b.language not in {"sh", "diff", "text", "dockerfile", *FILE_LANGUAGES}]
    strange += [b for b in BLOCKS if b.language == "bash" and not b.file]
    assert [f"{block.page}:{block.line} {block.language!r}" for block in strange] == []
    assert len(BLOCKS) > 40


@pytest.mark.parametrize(
    "block",
    [b for b in BLOCKS if b.language in {"sh", "dockerfile"}],
    ids=lambda block: f"{block.page}:{block.line}",
)
def test_commands_of_shell_block_parse(block: Block) -> None:
    """Our commands by our parsers; a file of the repository is there."""
    parser = cli.build_parser()
    for words in commands(block.text):
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            del words[0]
        if words[:1] == ["elastic-resume"] or (
            words[:1] in (["srun"], ["exec"], ["RUN"]) and "elastic-resume" in words
        ):
            check_command(parser, words[words.index("elastic-resume") + 1 :])
        for word in words:
            if re.match(r"(deploy|examples|benchmarks|tests)/[\w/.-]+$", word):
                assert (ROOT / word).exists(), word


def check_command(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Parse the words after ``elastic-resume``."""
    if words[0] == "run" and "--config" in words:
        assert config.parse_given(torchelastic.build_parser(), words[1:])[0]["config"] == "job.yaml"
    elif words[0] == "run":
        args, _ = config.parse_flags(torchelastic.build_parser(), words[1:], {})
        assert args.training_script
        check_rendezvous_keys(args.rdzv_conf)
    elif words[0] == "init":
        assert config.parse_given(cli._build_init_parser(), words[1:])[1]
    elif words[0] == "chaos":
        chaos.build_parser().parse_known_args(words[1 : words.index("--")])
    elif words[0] not in {"--help", "--version"} and "--help" not in words:
        parser.parse_args(words)


def check_rendezvous_keys(conf: str) -> None:
    """Check the keys of ``--rdzv-conf``."""
    assert {entry.partition("=")[0] for entry in conf.split(",") if entry} <= set(rendezvous_config.CONF_KEYS)


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "yaml"], ids=lambda block: f"{block.page}:{block.line}"
)
def test_yaml_block_is_valid(block: Block) -> None:
    """A Kubernetes object by its schema."""
    for document in yaml.safe_load_all(block.text):
        if "script" in document:
            continue  # a file of --config, which tests/unit/test_config_file.py reads
        if isinstance(document, list):
            assert all({"alert", "expr"} <= set(rule) <= {"alert", "expr", "for"} for rule in document)
        else:
            schemas.validate(document, "1.37", strict=True)
