"""Remove each guard of a module in turn, and print those that no test misses.

``make mutate MODULES="elastic_resume/slots elastic_resume/checkpoint/writer.py:164"`` calls it; a number
after a colon takes the mutants of one line. A mutant wraps one expression in a function, so that its value no
longer counts: a condition, an operand of and/or, a comparison, a call such as fsync or close, a flag.

pytest collects once, in a copy of the tree. Each mutant is a fork of it: new code replaces that of the
functions that exist, and the file changes too, for the processes that tests start. All tests that run its
block of statements run, the fastest first, until one fails. A test that takes much longer has failed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import ctypes
import gc
import importlib
import itertools
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import psutil
import pytest

_OWNERS = "../integration/test_checkpoint_dir.py::test_"  # without those that mount: a killed one leaves it
_ARGUMENTS = "../integration/test_earlier_start.py::test_script_arguments_file_"
_LOCK = "../integration/test_dir_lock.py::test_"
_LOCK_TESTS = (  # without the job, which takes long, and the loop of kills
    "second_process_is_refused_until_the_first_releases",
    "directory_of_a_killed_owner_is_taken_over",
    "directory_of_a_reused_process_number_is_taken_over",
    "directory_of_a_lost_machine_is_taken_over_after_its_lease",
    "suspended_owner_that_was_replaced_ends_before_it_writes",
    "suspended_owner_ends_though_its_successor_has_gone",
    "stopped_owner_of_this_machine_keeps_its_directory",
    "lease_that_a_crash_has_cut_is_taken_over",
)
TESTS = {
    "elastic_resume/slots": "slots capture/test_snapshotter.py restore/test_warm_memory.py",
    "elastic_resume/checkpoint": "checkpoint slots/test_committer.py",
    "elastic_resume/checkpoint/node_dir": f"{_OWNERS}claim_names_present_owner"
    f" {_OWNERS}second_claim_by_owner_is_usage_error {_OWNERS}forked_child_cannot_release_lock"
    f" {_ARGUMENTS}drops_oversized_arguments {_ARGUMENTS}masks_secrets",
    "elastic_resume/checkpoint/dir_lock": " ".join(f"{_LOCK}{name}" for name in _LOCK_TESTS),
    "elastic_resume/rendezvous/net": "rendezvous/net",
    "elastic_resume/shared_page": "test_shared_page.py slots agent/workers/test_lease_page.py",
    "elastic_resume/local_socket": "agent/workers/test_worker_request.py slots/test_ipc.py",
    "elastic_resume/agent/workers": "agent/workers mechanisms/standbys ../integration/test_launcher_shim.py",
    "elastic_resume/state": "state",
    "elastic_resume/restore": "restore",
    "elastic_resume/background": "test_background.py",
    "elastic_resume/archive": "archive mechanisms/archive/test_uploader.py",
    "elastic_resume/archive/archive": "../integration/test_archive.py",
    "elastic_resume/mechanisms/archive": "mechanisms/archive archive/test_archive.py",
}
_NEVER_NONE = "it is never None there, which the type checker does not know"
_CACHE = "it saves reading the log, which finds the same"
_NEXT_WAIT = "the next wait finds no child, and ends at once"
_RACE = "a page that grows between two reads: the test of that race passes by chance"
_WINDOW = "the worker would have to end by itself between two system calls"
_UNALIGNED = "the kernel refuses what is not aligned, and it is written without O_DIRECT"
ACCEPTED = {  # module: what is removed: why no test needs to notice
    "elastic_resume/archive/archive.py": {
        "operand: isinstance(entry.error, TornError)": "the log is listed once more",
        "not called: pool.shutdown(cancel_futures=True)": "the threads end when they are collected",
        "never: data is not None": "what None has is suppressed too",
        "operand: data is not None": "an object that is deleted between two reads of it",
        "never: not any(entries.parse_attempt_id(name) == version for name in self.list_attempts())": _CACHE,
        "comparison true: entries.parse_attempt_id(name) == version": _CACHE,
        "never: self._put_entry(attempt.number, data)": "the entry is there, and is that of the attempt",
        "filter: attempt_id not in known": _CACHE,
        "never: not candidates": _CACHE,
        "filter: header is not None": "the caller has returned if one is None",
        "operand: header is not None": "no header that is pruned is None",
        'operand: b""': "bytes(False) is empty too",
        'filter: name.endswith(".jsonl")': "no object has the name with another ending",
    },
    "elastic_resume/checkpoint/atomic_io.py": {
        "operand: size == 0": "writing nothing returns 0 too",
        "operand: os.lseek(descriptor, 0, os.SEEK_CUR) % DIRECT_IO_ALIGNMENT": _UNALIGNED,
        "never: memory_address(view) % DIRECT_IO_ALIGNMENT": _UNALIGNED,
        "not called: fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)": "it changes the speed",
        "never: end - start >= _WRITE_CHUNK_BYTES": "advice to the kernel changes the speed",
    },
    "elastic_resume/restore/transfer.py": {
        "filter: (error := task.join()) is not None": "each task has failed if the state is incomplete",
        "operand: not self._in_flight": "a thread ends early, and another one receives the rest",
    },
    "elastic_resume/slots/progress_page.py": {
        "operand: len(steps) == count * _STEP_WORDS * 8": _RACE,
    },
    "elastic_resume/slots/ipc.py": {
        "never: self.reserve(needed, is_estimate=True, all_now=False) == 0": "no slot is large enough then",
    },
    "elastic_resume/agent/workers/worker_request.py": {
        "never: signal.getsignal(signal.SIGINT) is not signal.SIG_IGN": "exec resets the handler too",
    },
    "elastic_resume/agent/workers/supervisor.py": {
        "never: self._lease_expired and not self._stop_requested and self._wait_for_agent()": _WINDOW,
        "operand: self._wait_for_agent()": _WINDOW,
        "never: os.waitid(os.P_PID, self._worker, os.WEXITED | os.WNOHANG | os.WNOWAIT)": _WINDOW,
        "not called: listener.close()": "it is no longer polled, and closes with the process",
        "not called: connection.close()": "the process ends at once",
        "not called: os.close(descriptor)": "it closes with the process, which opens few",
        "never: self._state == COPYING": "the end of a copy is noticed later",
        "never: self._state in {RUNNING, STOPPING}": "the end of a lease is noticed later",
        "never: not self._link.receive()": "it would poll without a pause",
    },
    "elastic_resume/agent/workers/worker_events.py": {
        'operand: name[3] != "_"': "the names of signals are sorted before SIG_IGN and the like",
    },
    "elastic_resume/agent/workers/children.py": {
        "never: _wait_for_end(min(grace_s, LEFTOVERS_GRACE_S), is_urgent)": _NEXT_WAIT,
        "never: _wait_for_end(LEFTOVERS_TERM_S, is_urgent, signal.SIGTERM)": _NEXT_WAIT,
    },
    "elastic_resume/slots/slot_pool.py": {
        "operand: planned > 1": "a thread finds no slot to create",
        "operand: is_large": "a thread finds no slot to create",
    },
    "elastic_resume/rendezvous/net/server.py": {
        "operand: self._timer_due_s > due": "a new timer for each event costs time only",
    },
    "elastic_resume/restore/attempt.py": {
        "operand: client is not None": _NEVER_NONE,
        "operand: opened.slot is not None": _NEVER_NONE,
        "operand: opened.manifest is not None": _NEVER_NONE,
        "never: opened.manifest is not None": _NEVER_NONE,
        "operand: opened is None": _NEVER_NONE,
        "operand: opened is not None": _NEVER_NONE,
        "operand: opened.manifest is None": _NEVER_NONE,
        "operand: manifest is not None": _NEVER_NONE,
        "comparison true: None in slot_ids.values()": "it saves two collectives",
        "never: not exchange.commits_received": "it saves two collectives",
        "never: not values.names": "it saves a broadcast of nothing",
        "operand: tensor_pool": "without touched memory a restore takes longer",
    },
}
EMPTY = {"{}", "[]", "()", "''", "0", "None"}  # "or {}" has no mutant
NEVER, ALWAYS = "(({}) and False)", "(({}) or True)"
EFFECT = re.compile(
    r"_*(f?sync|unlink|rmdir|rename|replace|remove|rmtree|f?truncate|f?chmod|fchown|umask|flock|fcntl|add_seals"
    r"|close|shutdown|kill|send_signal|set_?timeout|setblocking|setsockopt|set_inheritable|prctl|setsid|dup2"
    r"|flush|barrier|memory_barrier|check|verify|validate|require|reject|cancel|drop|discard|release|stop|reap)"
)
FLAGS = {"O_EXCL", "O_NOFOLLOW", "O_DIRECTORY", "O_APPEND", "O_TRUNC", "O_NONBLOCK", "MFD_ALLOW_SEALING"}
JUMPS = (ast.Raise, ast.Return, ast.Continue, ast.Break)
MARK = "import posix; _ = posix.open({!r}, 1025); posix.write(_, {!r}); posix.close(_)"
VERSIONS = itertools.count(10)
Block = tuple[str, int]
"""A module, and the line of the first statement of a block."""


@dataclass(frozen=True)
class Mutant:
    """A module with one expression wrapped."""

    block: Block
    line: int
    what: str
    source: bytes


# ---- mutants ---------------------------------------------------------------------------------------------


def find_mutants(path: str) -> list[Mutant]:
    """Return the mutants of a module, in the order of its lines."""
    source = Path(path).read_bytes()
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    mutants = []
    for node, block in _walk(ast.parse(source), 0):
        for name, target, wrapper in _list_edits(node) if block else ():
            start = starts[target.lineno - 1] + target.col_offset
            stop = starts[(target.end_lineno or 0) - 1] + (target.end_col_offset or 0)
            text = source[start:stop].decode()
            mutated = source[:start] + wrapper.format(text).encode() + source[stop:]
            what = f"{name}: {' '.join(text.split())[:90]}"
            mutants.append(Mutant((path, block), target.lineno, what, mutated))
    return sorted(mutants, key=lambda mutant: mutant.line)


def _walk(node: ast.AST, block: int) -> Iterator[tuple[ast.AST, int]]:
    """Yield each node with its block: 0 outside of functions. Leave out what only type checkers read."""
    for name, field in ast.iter_fields(node):
        for child in field if isinstance(field, list) else [field]:
            if (
                not isinstance(child, ast.AST)
                or "TYPE_CHECKING" in ast.unparse(getattr(child, "test", child))[:20]
            ):
                continue
            is_block = isinstance(child, ast.stmt) and (block or isinstance(node, ast.FunctionDef))
            inner = field[0].lineno if is_block and name != "decorator_list" else block
            yield child, inner
            yield from _walk(child, inner)


def _list_edits(node: ast.AST) -> Iterator[tuple[str, ast.expr, str]]:
    """Yield what is lost, the expression, and the text to replace it by."""
    if isinstance(node, ast.BoolOp):
        is_and = isinstance(node.op, ast.And)
        for operand in node.values:
            if is_and or ast.unparse(operand) not in EMPTY:
                yield "operand", operand, ALWAYS if is_and else NEVER
    elif isinstance(node, ast.If | ast.IfExp):
        test = node.test
        if not isinstance(test, ast.BoolOp) or isinstance(test.op, ast.And):
            yield "never", test, NEVER
    elif isinstance(node, ast.comprehension):
        yield from (("filter", test, ALWAYS) for test in node.ifs if not isinstance(test, ast.BoolOp))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = ast.unparse(node.value.func).rpartition(".")[2]
        if EFFECT.match(called):
            yield "not called", node.value, "(None if True else ({}))"
    elif isinstance(node, ast.Attribute) and node.attr in FLAGS:
        yield "flag", node, "(({}) & 0)"
    elif isinstance(node, ast.Constant) and node.value in {0o600, 0o700, 0o400}:
        yield "permission", node, "({} | 0o077)"
    elif isinstance(value := getattr(node, "value", getattr(node, "elt", None)), ast.Compare):
        yield from (("comparison false", value, NEVER), ("comparison true", value, ALWAYS))


# ---- runs ------------------------------------------------------------------------------------------------


class MutationRun:
    """The pytest plugin that runs mutants in place of the tests."""

    def __init__(self, mutants: list[Mutant], directory: Path) -> None:
        self.mutants, self.directory = mutants, directory
        self.counts: Counter[str] = Counter()
        self._functions: dict[str, list[FunctionType]] = defaultdict(list)
        """The functions of each file."""
        self._seconds: dict[pytest.Item, float] = {}
        """How long each test takes that passes without a mutant."""
        self._covering: dict[Block, set[pytest.Item]] = defaultdict(set)
        """The tests that run a block, in any process."""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Measure the tests, then run each mutant."""
        importlib.import_module("torch._dynamo")  # the first step of an optimizer would, in each fork
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: to find what tests leave
        gc.unfreeze()
        for function in gc.get_objects():
            if type(function) is FunctionType:  # isinstance would ask proxies for their class
                self._functions[function.__code__.co_filename].append(function)
        self._measure(session)
        total_s = sum(self._seconds.values())
        print(f"{len(self.mutants)} mutants; {len(self._seconds)} tests take {total_s:.0f} s", flush=True)
        for path, mutants in itertools.groupby(self.mutants, key=lambda mutant: mutant.block[0]):
            counts = Counter(self._judge(mutant, session) for mutant in mutants)
            self.counts += counts
            print(format_row(path, counts), flush=True)
        return True

    def _judge(self, mutant: Mutant, session: pytest.Session) -> str:
        """Run the tests of a mutant; return a column of the table."""
        items = sorted(self._covering[mutant.block], key=self._seconds.__getitem__)
        if items and self._is_killed(mutant, session, items):
            return "killed"
        if mutant.what in ACCEPTED.get(mutant.block[0], {}):
            return "accepted"
        line = Path(mutant.block[0]).read_text().splitlines()[mutant.line - 1].strip()
        print(f"{mutant.block[0]}:{mutant.line} [{len(items)} tests] {mutant.what} | {line}", flush=True)
        return "survivors"

    def _measure(self, session: pytest.Session) -> None:
        """Run all tests in a fork; record how long each takes, and which blocks it runs.

        Each block writes its name into a file first: a coverage tool would lose what a killed process did.
        """
        names, result = self.directory / "names", self.directory / "measured"
        self.directory.chmod(0o711)
        names.touch()
        names.chmod(0o666)  # processes of other users write there too
        with contextlib.ExitStack() as stack:
            trees = {path: _mark_blocks(path, names) for path in {mutant.block[0] for mutant in self.mutants}}
            for path, tree in trees.items():
                stack.enter_context(_changed(path, ast.unparse(tree).encode()))
            pid = os.fork()
            if pid == 0:
                _detach(self.directory / "measured.log")
                for path, tree in trees.items():
                    self._replace_code(path, compile(tree, path, "exec", dont_inherit=True))
                measured = []
                for number, item in enumerate(session.items):
                    names.write_text("")
                    start, failed = time.monotonic(), session.testsfailed
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                    if session.testsfailed == failed:
                        blocks = {tuple(line.split()) for line in names.read_text().splitlines()}
                        measured.append((number, time.monotonic() - start, blocks))
                result.write_bytes(pickle.dumps(measured))
                os._exit(0)
            os.waitpid(pid, 0)
        for number, seconds, blocks in pickle.loads(result.read_bytes()):  # noqa: S301 - our own
            self._seconds[session.items[number]] = seconds
            for path, line in blocks:
                self._covering[path, int(line)].add(session.items[number])

    def _is_killed(self, mutant: Mutant, session: pytest.Session, items: list[pytest.Item]) -> bool:
        """Whether a test fails with this mutant, or takes much longer."""
        path = mutant.block[0]
        with _changed(path, mutant.source):
            pid = os.fork()
            if pid == 0:
                _detach(self.directory / "mutant.log")
                try:
                    self._replace_code(path, compile(mutant.source, path, "exec", dont_inherit=True))
                    for item in items:
                        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                        if session.testsfailed:
                            break
                finally:
                    os._exit(0 if sys.exc_info()[0] is None and not session.testsfailed else 1)
            end = time.monotonic() + 10 + 3 * sum(self._seconds[item] for item in items)
            while time.monotonic() < end:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    return status != 0
                time.sleep(0.005)
            return True

    def _replace_code(self, path: str, code: CodeType) -> None:
        """Replace the code of a file's functions, which their name and first line identify."""
        for inner in (constant for constant in code.co_consts if isinstance(constant, CodeType)):
            for function in self._functions[str(Path(path).absolute())]:
                old = function.__code__
                if (old.co_name, old.co_firstlineno) == (inner.co_name, inner.co_firstlineno):
                    function.__code__ = inner.replace(co_filename=old.co_filename)
            self._replace_code(path, inner)


def _mark_blocks(path: str, names: Path) -> ast.Module:
    """Return a module in which each block in a function writes its name into a file."""
    tree = ast.parse(Path(path).read_bytes())
    for node, block in list(_walk(tree, 0)):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list) and body and (block or isinstance(node, ast.FunctionDef)):
                mark = ast.parse(MARK.format(str(names), f"{path} {body[0].lineno}\n".encode())).body
                for inserted in (inner for statement in mark for inner in ast.walk(statement)):
                    ast.copy_location(inserted, body[0])
                body[0:0] = mark
    return tree


@contextlib.contextmanager
def _changed(path: str, source: bytes) -> Iterator[None]:
    """Change a file inside the block, and its time: mutants of one size may share a compiled file."""
    file = Path(path)
    original, times = file.read_bytes(), file.stat()
    file.write_bytes(source)
    os.utime(file, (times.st_atime, times.st_mtime + next(VERSIONS)))
    try:
        yield
    finally:
        file.write_bytes(original)
        os.utime(file, (times.st_atime, times.st_mtime))
        while children := psutil.Process().children(recursive=True):  # what tests have left
            for child in children:
                with contextlib.suppress(psutil.Error):
                    child.kill()
            psutil.wait_procs(children, timeout=0.5)


def _detach(log: Path) -> None:
    os.setsid()
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)


# ---- command ---------------------------------------------------------------------------------------------


def run_in_copy(modules: list[str], directory: Path) -> int:
    """Run the mutants of ``modules``; print survivors and a table; return how many are not accepted."""
    mutants: list[Mutant] = []
    for module in modules:
        path, _, line = module.partition(":")
        for file in [path] if path.endswith(".py") else sorted(map(str, Path(path).rglob("*.py"))):
            mutants += [mutant for mutant in find_mutants(file) if line in {"", str(mutant.line)}]
    paths = sorted({mutant.block[0] for mutant in mutants})
    names = [name for path in paths for key in TESTS if path.startswith(key) for name in TESTS[key].split()]
    run = MutationRun(mutants, directory)
    options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={directory / 'tests'}"]
    status = pytest.main([*options, *(f"tests/unit/{name}" for name in sorted(set(names)))], plugins=[run])
    if status:
        return 1
    print(format_row("total", run.counts))
    return run.counts["survivors"]


def format_row(name: str, counts: Counter[str]) -> str:
    """Return a row of the table."""
    columns = (f"{counts[column]} {column}" for column in ("killed", "accepted", "survivors"))
    return f"{name}: {counts.total()} mutants, {', '.join(columns)}"


def main() -> int:
    """Copy the tree, and run there; return 1 if a mutant survives."""
    parser = argparse.ArgumentParser(prog="mutation", description=__doc__)
    parser.add_argument("modules", nargs="+")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.directory:
        return min(1, run_in_copy(options.modules, options.directory))
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        tree = Path(directory, "tree")
        listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "-z"], text=True)
        for name in filter(os.path.isfile, listed.split("\0")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, tree / name)
        command = [sys.executable, "-m", "tests.support.mutation", "--directory", directory, *sys.argv[1:]]
        environ = os.environ | {"PYTHONPATH": str(tree)}
        return subprocess.run(command, cwd=tree, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
