"""Remove each guard of a module in turn, and print those that no test misses.

``make mutate MODULES="elastic_resume/slots elastic_resume/checkpoint/writer.py:164"`` calls it; a number
after a colon takes the mutants of one line. A mutant wraps one expression, so that its value no longer counts:
a condition, an operand of and/or, a comparison, a call such as fsync or close, a flag or a permission.

pytest collects once, in a copy of the tree. Each mutant is a fork of it: new code replaces that of the
functions that exist, and the file changes too, for the processes that tests start. First run the tests that
cover the line, the fastest first, then those of `TESTS` that start processes. A timeout counts as a failure.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import ctypes
import gc
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import NoReturn

import coverage
import psutil
import pytest

BUDGET_S = 8.0  # of the tests that cover a line, those that take this long together
INTEGRATION = "tests/integration/test_{}.py"
TESTS: dict[str, tuple[str, str]] = {
    # module: tests whose coverage is measured; integration tests, which run for what these have not found
    "elastic_resume/slots": ("slots capture/test_snapshotter.py restore/test_warm_memory.py", ""),
    "elastic_resume/checkpoint": ("checkpoint slots/test_committer.py", ""),
    "elastic_resume/rendezvous/net": ("rendezvous/net", ""),
    "elastic_resume/agent/workers": ("agent/workers", "launcher_shim"),
    "elastic_resume/state": ("state", ""),
    "elastic_resume/restore": ("restore training/test_run.py", ""),
}
ACCEPTED: dict[tuple[str, str, str], str] = {
    # (module, function, what was removed): why no test can miss it
}
NEVER, ALWAYS = "(({}) and False)", "(({}) or True)"
EFFECT = re.compile(
    r"_*(f?sync|unlink|rmdir|rename|replace|remove|rmtree|f?truncate|f?chmod|fchown|umask|flock|fcntl|add_seals"
    r"|close|shutdown|kill|send_signal|set_?timeout|setblocking|setsockopt|set_inheritable|prctl|setsid|dup2"
    r"|flush|barrier|memory_barrier|check|verify|validate|require|reject|cancel|drop|discard|release|stop|reap)"
)
WRITE_NAME = "import posix; _fd = posix.open({!r}, 1025); posix.write(_fd, {!r}); posix.close(_fd)"
FLAGS = {"O_EXCL", "O_NOFOLLOW", "O_DIRECTORY", "O_APPEND", "O_TRUNC", "O_NONBLOCK", "MFD_ALLOW_SEALING"}
VERSIONS = itertools.count(10)
JUMPS = (ast.Raise, ast.Return, ast.Continue, ast.Break)


Measured = tuple[dict[str, float], list[tuple[tuple[str, str], set[str]]]]
"""The seconds of each test, and the tests that run each part of a module."""


@dataclass(frozen=True)
class Mutant:
    """A module with one expression wrapped; ``lines`` are those of the statement up to it."""

    path: str
    lines: range
    function: str
    what: str
    source: bytes

    @property
    def place(self) -> str:
        """File and line of the expression."""
        return f"{self.path}:{self.lines[-1]}"

    @property
    def is_in_function(self) -> bool:
        """Whether it runs later than the import of its module."""
        return "()" in self.function


# ---- mutants ---------------------------------------------------------------------------------------------


def find_mutants(path: str, *, always: bool = False) -> list[Mutant]:
    """Return the mutants of a module, in the order of its lines; ``always``: conditions that hold, too."""
    source = Path(path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    mutants = []
    for node, statement, function in _walk(ast.parse(source), None, ""):
        for name, target, wrapper in _list_edits(node, always=always):
            start = starts[target.lineno - 1] + target.col_offset
            stop = starts[(target.end_lineno or 0) - 1] + (target.end_col_offset or 0)
            text = source[start:stop].decode()
            mutated = source[:start] + wrapper.format(text).encode() + source[stop:]
            lines = range(statement.lineno if statement else target.lineno, target.lineno + 1)
            what = f"{name}: {' '.join(text.split())[:90]}"
            mutants.append(Mutant(path, lines, function, what, mutated))
    return sorted(mutants, key=lambda mutant: mutant.lines[-1])


def _walk(
    node: ast.AST, statement: ast.stmt | None, function: str
) -> Iterator[tuple[ast.AST, ast.stmt | None, str]]:
    """Yield each node below ``node`` with its statement and function, without code for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and re.search("TYPE_CHECKING|__main__", ast.unparse(child.test)):
            continue
        inner = child if isinstance(child, ast.stmt) else statement
        name = function
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = f"{function}.{child.name}".lstrip(".") + ("" if isinstance(child, ast.ClassDef) else "()")
        yield child, inner, name
        yield from _walk(child, inner, name)


def _list_edits(node: ast.AST, *, always: bool) -> Iterator[tuple[str, ast.expr, str]]:
    """Yield what is lost, the expression, and the text to replace it by."""
    if isinstance(node, ast.BoolOp):
        is_and = isinstance(node.op, ast.And)
        for operand in node.values:
            yield "operand", operand, ALWAYS if is_and else NEVER
    elif isinstance(node, ast.If | ast.IfExp):
        test = node.test
        if not isinstance(test, ast.BoolOp) or isinstance(test.op, ast.And):
            yield "never", test, NEVER
        is_guard = isinstance(node, ast.If) and isinstance(node.body[-1], JUMPS)
        if always and not isinstance(test, ast.BoolOp) and not is_guard:
            yield "always", test, ALWAYS
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

    def __init__(self, mutants: list[Mutant], integration: dict[str, list[str]], directory: Path) -> None:
        """``integration``: for each module the test files whose processes run it."""
        self.mutants, self.integration, self.directory = mutants, integration, directory
        self.survivors: list[Mutant] = []
        self._seconds: dict[str, float] = {}
        """How long each test takes that passes without a mutant."""
        self._covering: dict[tuple[str, str], set[str]] = defaultdict(set)
        """The tests that run a line in their own process, or a function in another one."""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Measure the tests, then run each mutant."""
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: to find what tests leave
        gc.unfreeze()
        functions: dict[str, list[FunctionType]] = defaultdict(list)
        for function in gc.get_objects():
            if type(function) is FunctionType:  # isinstance would ask proxies for their class
                functions[function.__code__.co_filename].append(function)
        started = {path for paths in self.integration.values() for path in paths}
        unit = [item for item in session.items if item.nodeid.partition("::")[0] not in started]
        later = [item for item in session.items if item.nodeid.partition("::")[0] in started]
        self._measure(session, unit, _measure_lines)
        if later:
            self._measure(session, later, _measure_functions)
        total = sum(self._seconds.values())
        print(f"{len(self.mutants)} mutants; {len(self._seconds)} tests take {total:.0f} s", flush=True)
        for mutant in self.mutants:
            live = functions[str(Path(mutant.path).absolute())] if mutant.is_in_function else None
            chosen, others = (self._choose(mutant, items) for items in (unit, later))
            if not (
                self._is_killed(mutant, session, chosen, live)
                or self._is_killed(mutant, session, others, live)
            ):
                self.survivors.append(mutant)
                line = Path(mutant.path).read_text().splitlines()[mutant.lines[-1] - 1].strip()
                tests = f"{len(chosen)}+{len(others)} tests"
                print(f"{mutant.place} {mutant.function} [{tests}] {mutant.what} | {line}", flush=True)
        return True

    def _measure(
        self,
        session: pytest.Session,
        items: list[pytest.Item],
        measure: Callable[[pytest.Session, list[pytest.Item], list[str]], Measured],
    ) -> None:
        """Run the tests in a fork; record how long each takes, and what it runs."""
        result = self.directory / "measured.pickle"
        pid = os.fork()
        if pid == 0:
            _detach(self.directory / "measured.log")
            paths = sorted({mutant.path for mutant in self.mutants})
            result.write_bytes(pickle.dumps(measure(session, items, paths)))
            os._exit(0)
        os.waitpid(pid, 0)
        _kill_children()
        seconds, covering = pickle.loads(result.read_bytes())  # noqa: S301 - our own
        self._seconds |= seconds
        for key, nodes in covering:
            self._covering[key] |= nodes & set(seconds)

    def _choose(self, mutant: Mutant, items: list[pytest.Item]) -> list[pytest.Item]:
        """Return the fastest tests that run the line or function, within the budget."""
        parts = (str(mutant.lines[-1]), mutant.function)
        nodes: set[str] = set()
        for (path, part), covering in self._covering.items():
            if path == mutant.path and (part in parts or not mutant.is_in_function):
                nodes |= covering
        chosen, left_s = [], BUDGET_S
        for item in sorted(items, key=lambda item: self._seconds.get(item.nodeid, 0)):
            if item.nodeid in nodes:
                left_s -= self._seconds[item.nodeid]
                chosen += [item] if left_s > 0 or not chosen else []
        return chosen

    def _is_killed(
        self,
        mutant: Mutant,
        session: pytest.Session,
        items: list[pytest.Item],
        live: list[FunctionType] | None,
    ) -> bool:
        """Whether a test fails with this mutant, or takes much longer."""
        if not items:
            return False
        with _changed(mutant.path, mutant.source):
            pid = os.fork()
            if pid == 0:
                _detach(self.directory / "mutant.log")
                _run_mutant(mutant, session, items, live)
            end = time.monotonic() + 15 + 4 * sum(self._seconds[item.nodeid] for item in items)
            while time.monotonic() < end:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    return status != 0
                time.sleep(0.005)
            return True


def _measure_lines(session: pytest.Session, items: list[pytest.Item], paths: list[str]) -> Measured:
    """Record which lines each test runs in this process."""
    cover = coverage.Coverage(data_file=None, include=paths, config_file=False, messages=False)
    cover.start()
    seconds = {
        item.nodeid: s for item, s in _run_tests(session, items, lambda i: cover.switch_context(i.nodeid))
    }
    cover.stop()
    data = cover.get_data()
    return seconds, [
        ((path, str(line)), set(nodes))
        for path in paths
        for line, nodes in data.contexts_by_lineno(str(Path(path).absolute())).items()
    ]


def _measure_functions(session: pytest.Session, items: list[pytest.Item], paths: list[str]) -> Measured:
    """Record which functions run in the processes of each test: each writes its name into a file.

    A coverage tool would lose what a killed process did.
    """
    names = Path("mutation-names").absolute()
    with contextlib.ExitStack() as stack:
        for path in paths:
            tree = ast.parse(Path(path).read_bytes())
            for node, _, function in list(_walk(tree, None, "")):
                if isinstance(node, ast.FunctionDef):
                    line = f"{path} {function}\n".encode()
                    start = 1 if ast.get_docstring(node) and len(node.body) > 1 else 0
                    node.body[start:start] = ast.parse(WRITE_NAME.format(str(names), line)).body
            stack.enter_context(_changed(path, ast.unparse(ast.fix_missing_locations(tree)).encode()))
        seconds, found = {}, []
        for item, duration in _run_tests(session, items, lambda _: names.write_bytes(b"")):
            seconds[item.nodeid] = duration
            found += [((*line.split(" "),), {item.nodeid}) for line in set(names.read_text().splitlines())]
    return seconds, found


def _run_tests(
    session: pytest.Session, items: list[pytest.Item], prepare: Callable[[pytest.Item], object] | None
) -> Iterator[tuple[pytest.Item, float]]:
    """Run tests in this process; yield those that pass, with their seconds. Without ``prepare``, end early."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        failed, start = session.testsfailed, time.monotonic()
        if prepare:
            prepare(item)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed == failed:
            yield item, time.monotonic() - start
        elif not prepare:
            return


@contextlib.contextmanager
def _changed(path: str, source: bytes) -> Iterator[None]:
    """Change a file inside the block, with a time that no compiled file has: sizes of mutants are equal."""
    file = Path(path)
    original, times = file.read_bytes(), file.stat()
    file.write_bytes(source)
    os.utime(file, (times.st_atime, times.st_mtime + next(VERSIONS)))
    try:
        yield
    finally:
        file.write_bytes(original)
        os.utime(file, (times.st_atime, times.st_mtime))
        _kill_children()


def _detach(log: Path) -> None:
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def _run_mutant(
    mutant: Mutant, session: pytest.Session, items: list[pytest.Item], live: list[FunctionType] | None
) -> NoReturn:
    """Run tests in this process; exit with 1 at the first that fails."""
    try:
        if live is None:  # code that ran when the module was imported
            files = sorted({item.nodeid.partition("::")[0] for item in items})
            os.execv(
                sys.executable, [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", *files]
            )
        _replace_code(
            compile(mutant.source, str(Path(mutant.path).absolute()), "exec", dont_inherit=True), live
        )
        os._exit(0 if len(list(_run_tests(session, items, None))) == len(items) else 1)
    finally:
        os._exit(1)


def _replace_code(code: CodeType, live: list[FunctionType]) -> None:
    for inner in (constant for constant in code.co_consts if isinstance(constant, CodeType)):
        for function in live:
            old = function.__code__
            if (old.co_name, old.co_firstlineno) == (inner.co_name, inner.co_firstlineno):
                function.__code__ = inner
        _replace_code(inner, live)


def _kill_children() -> None:
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, timeout=0.5)


# ---- command ---------------------------------------------------------------------------------------------


def run_in_copy(modules: list[str], directory: Path, *, always: bool) -> int:
    """Run the mutants of ``modules``; print survivors and a table; return how many are not accepted."""
    mutants: list[Mutant] = []
    for module in modules:
        path, _, line = module.partition(":")
        files = [path] if path.endswith(".py") else sorted(map(str, Path(path).rglob("*.py")))
        found = [mutant for file in files for mutant in find_mutants(file, always=always)]
        mutants += [mutant for mutant in found if line in {"", str(mutant.lines[-1])}]
    entries = {
        path: TESTS[next(key for key in TESTS if path.startswith(key))] for path in {m.path for m in mutants}
    }
    integration = {
        path: [INTEGRATION.format(name) for name in entry[1].split()] for path, entry in entries.items()
    }
    files = sorted({f"tests/unit/{name}" for entry in entries.values() for name in entry[0].split()})
    files += sorted({path for paths in integration.values() for path in paths})
    run = MutationRun(mutants, integration, directory)
    options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", str(directory / "tests")]
    pytest.main([*options, *files], plugins=[run])
    accepted = {m.place for m in run.survivors if (m.path, m.function, m.what) in ACCEPTED}
    total, left = Counter(m.path for m in mutants), Counter(m.path for m in run.survivors)
    print(f"\n{'module':50} mutants  killed  survivors")
    for path in sorted(total):
        print(f"{path:50} {total[path]:7} {total[path] - left[path]:7} {left[path]:10}")
    print(f"{'total':50} {total.total():7} {total.total() - left.total():7} {left.total():10}")
    return len(run.survivors) - len(accepted)


def main() -> int:
    """Copy the tree, and run there; return 1 if a mutant survives."""
    parser = argparse.ArgumentParser(prog="mutation", description=__doc__)
    parser.add_argument("modules", nargs="+")
    parser.add_argument("--always", action="store_true", help="conditions that always hold, too")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.directory:
        return min(1, run_in_copy(options.modules, options.directory, always=options.always))
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        tree = Path(directory, "tree")
        listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "-z"], text=True)
        for name in filter(os.path.isfile, listed.split("\0")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, tree / name)
        command = [sys.executable, "-m", "tests.support.mutation", "--directory", directory, *sys.argv[1:]]
        return subprocess.run(
            command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
