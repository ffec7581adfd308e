"""The boundaries of ARCHITECTURE.md, held by reading the source."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "elastic_resume"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Imports go from a later layer to an earlier one, or stay within a part of one.
LAYERS = [
    ["errors", "contract", "durations", "plural"],
    ["failpoints", "events", "policy", "cluster"],
    ["config", "values", "store"],
    ["rendezvous"],  # its core is pure; the shell around it keeps a record on disk
    ["worker", "agent", "report"],
    ["faults"],
    ["cli", "testing"],
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
MAY_IMPORT_TORCH = {"worker", "agent/elastic.py", "agent/handler.py", "agent/zygote.py"}
ROLES = (
    "admitting body calling codec comparing core following forming leading ledger "
    "link messages packing quorum roster seeking steps tidings view wire"
)
PURE = ["policy", *(f"rendezvous/{role}.py" for role in ROLES.split())]
MAX_FUNCTION_LINES = 70
MAX_MODULE_LINES = 800


def relative(path: Path) -> str:
    """Name a file as ARCHITECTURE.md does."""
    return path.relative_to(PACKAGE).as_posix()


def part_of(path: Path) -> str:
    """The part of the package a file belongs to: its folder, or its own name."""
    return relative(path).split("/")[0].removesuffix(".py")


def of_each_part(check: Callable[[Path], None]) -> Callable[[str], None]:
    """One test for each part, of all of its files: one for each file would be 1,400."""

    @pytest.mark.parametrize("part", sorted(set(map(part_of, SOURCES))))
    def test(part: str) -> None:
        for path in SOURCES:
            if part_of(path) == part:
                check(path)

    test.__doc__ = check.__doc__
    return test


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """A file as it is parsed."""
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Each module that a file imports, wherever it does."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@of_each_part
def test_imports_go_in_one_direction(path: Path) -> None:
    """A part knows only what lies below it; worker and agent do not know each other."""
    own = part_of(path)
    if own in {"__init__", "__main__"}:
        return
    for name in imports(path):
        match = re.match(r"elastic_resume\.(\w+)", name)
        if match is None or match[1] not in LEVEL or match[1] == own:
            continue
        assert LEVEL[match[1]] <= LEVEL[own], f"{relative(path)} imports {name}, which lies above it"
        assert {own, match[1]} != {"agent", "worker"}, f"{relative(path)}: agent and worker meet in contract"


@of_each_part
def test_torch_is_imported_only_where_training_or_torchelastic_is(path: Path) -> None:
    """`elastic-resume ls` and `verify` answer at once, on machines without torch too."""
    if part_of(path) in MAY_IMPORT_TORCH or relative(path) in MAY_IMPORT_TORCH:
        return
    assert not [name for name in imports(path) if name.split(".")[0] == "torch"]


def test_two_modules_touch_torchelastic() -> None:
    """Public extension points only, and in one place."""
    users = {relative(p) for p in SOURCES for name in imports(p) if "distributed.elastic" in name}
    allowed = ["agent/elastic.py", "agent/handler.py"]
    assert users <= set(allowed)
    text = "".join((PACKAGE / name).read_text() for name in allowed)
    assert "LocalElasticAgent" not in text


@pytest.mark.parametrize("path", [p for p in SOURCES if relative(p).startswith(tuple(PURE))], ids=relative)
def test_decisions_are_pure(path: Path) -> None:
    """No clock, file, socket, process or chance."""
    forbidden = {
        "time",
        "os",
        "io",
        "socket",
        "asyncio",
        "random",
        "subprocess",
        "threading",
        "pathlib",
        "secrets",
    }
    assert not [name for name in imports(path) if name.split(".")[0] in forbidden]


def test_only_durable_makes_things_durable() -> None:
    """fsync, rename and removal of checkpoints go through one module."""
    for path in SOURCES:
        if relative(path) in {"store/durable.py", "faults/mishaps.py", "faults/same_run.py"}:
            continue
        calls = re.findall(
            r"os\.(fsync|rename|replace|unlink|rmdir|remove)\(|shutil\.(?:rmtree|move)\(", path.read_text()
        )
        assert not calls, f"{relative(path)} calls {calls}"


@of_each_part
def test_nothing_is_unpickled_or_executed(path: Path) -> None:
    """Nothing received from network or disk is code."""
    text = path.read_text()
    for word in (
        r"\bpickle\b",
        r"broadcast_object",
        r"all_gather_object",
        r"\beval\(",
        r"\bexec\(",
    ):
        if word == r"\bexec\(" and relative(path) == "agent/script.py":
            continue  # it runs the script that the user named
        assert not re.search(word, re.sub(r'"""[\s\S]*?"""|#.*', "", text)), f"{relative(path)}: {word}"


def test_torch_files_are_read_as_data_only() -> None:
    """Every call of torch.load says so, whatever torch's default may be."""
    for path in SOURCES:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "torch.load(" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                told = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert told.get("weights_only") == "True", f"{relative(path)}:{node.lineno}"


@of_each_part
def test_functions_fit_a_screen_and_modules_have_one_idea(path: Path) -> None:
    """At most 70 lines and 800."""
    text = path.read_text()
    assert text.count("\n") <= MAX_MODULE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            documented = ast.get_docstring(node, clean=False) or ""
            lines = (node.end_lineno or 0) - node.lineno + 1 - documented.count("\n")
            assert lines <= MAX_FUNCTION_LINES, (
                f"{relative(path)}:{node.lineno} {node.name} has {lines} lines"
            )


@of_each_part
def test_every_module_says_what_it_is_and_no_name_says_nothing(path: Path) -> None:
    """A docstring at the top; no utils, helpers, Manager or Handler of our own."""
    assert ast.get_docstring(tree_of(path))
    assert not re.search(r"utils|helpers|common|misc|base", path.name)
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef):
            assert not re.search(r"Manager$|Handler$|Helper$|Util", node.name)
