"""The boundaries of ARCHITECTURE.md, checked by reading the source."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "elastic_resume"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Imports go from a later layer to an earlier one, or stay within a package.
LAYERS = """
    constants errors
    units events console background
    policy
    schedulers
    config failpoints
    checkpoint
    snapshot
    rendezvous
    state data
    restore
    capture
    training report
    agent
    testing
    cli
"""
LEVEL = {part: level for level, line in enumerate(LAYERS.split("\n")) for part in line.split()}
WORKER_PACKAGES = {"state", "data", "restore", "capture", "training"}
MAY_IMPORT_TORCH = (
    *(f"{package}/" for package in sorted(WORKER_PACKAGES)),
    "agent/torchelastic.py",
    "agent/workers/forkserver.py",
)
PURE = ("policy/", "rendezvous/core/")
IMPURE = frozenset(
    ["time", "os", "io", "socket", "asyncio", "random", "subprocess", "threading", "pathlib", "secrets"]
)
MAX_FUNCTION_LINES = 70
MAX_MODULE_LINES = 800
# Private words of former versions, each with a standard one in its place: see the table in CHANGELOG.md.
RETIRED = frozenset(
    [
        "zygote",
        "brood",
        "tidings",
        "nursery",
        "mishap",
        "mishaps",
        "bury",
        "buried",
        "elders",
        "heed",
        "heeded",
    ]
)


def relative(path: Path) -> str:
    """Return a file's path below elastic_resume/."""
    return path.relative_to(PACKAGE).as_posix()


def part_of(path: Path) -> str:
    """Return the package of a file, or the name of a module at the root."""
    return relative(path).split("/")[0].removesuffix(".py")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Parse a file once."""
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Yield each module that a file imports, also inside functions."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_name(path: Path) -> str:
    """Return the dotted name of a file."""
    dotted = relative(path).removesuffix(".py").replace("/", ".").removesuffix("__init__").rstrip(".")
    return f"elastic_resume.{dotted}".rstrip(".")


def test_every_module_belongs_to_a_layer() -> None:
    """A new package is put into LAYERS, or its imports would go unchecked."""
    assert {part_of(path) for path in SOURCES} - {"__init__", "__main__"} == set(LEVEL)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_go_down_only(path: Path) -> None:
    """An agent and a training script share what lies below both; neither imports the other."""
    own = part_of(path)
    if own in {"__init__", "__main__"}:
        return
    for name in imports(path):
        match = re.match(r"elastic_resume\.(\w+)", name)
        if match is None or match[1] not in LEVEL or match[1] == own:
            continue
        allowed = LEVEL[match[1]] < LEVEL[own] or (match[1], own) == ("constants", "errors")
        assert allowed, f"{relative(path)} imports {name}, which is not below it"
        assert own != "agent" or match[1] not in WORKER_PACKAGES, f"{relative(path)} imports {name}"


def test_no_modules_import_each_other() -> None:
    """No module is on a circle of imports, whether at its top or inside functions."""
    names = {module_name(path) for path in SOURCES}
    graph = {
        module_name(path): {name for name in imports(path) if name in names} - {module_name(path)}
        for path in SOURCES
        if relative(path) != "__init__.py"  # it imports everything when asked for a name
    }
    for imported in graph.values():  # `from package import module` imports the module
        imported.difference_update({name.rpartition(".")[0] for name in imported} | {"elastic_resume"})
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"modules import each other: {error.args[1]}")


def test_torch_is_imported_by_worker_packages_and_two_modules_of_the_agent() -> None:
    """`elastic-resume ls` and `verify` work on machines without torch."""
    for path in SOURCES:
        if not relative(path).startswith(MAY_IMPORT_TORCH):
            assert not [name for name in imports(path) if name.split(".")[0] == "torch"], relative(path)


def test_only_one_module_imports_torchelastic() -> None:
    """It uses public extension points."""
    users = {relative(path) for path in SOURCES for name in imports(path) if "distributed.elastic" in name}
    assert users == {"agent/torchelastic.py"}
    assert "LocalElasticAgent" not in (PACKAGE / "agent" / "torchelastic.py").read_text()


def test_decisions_are_pure() -> None:
    """No clock, file, socket, process or random number in policy and in the core of the rendezvous."""
    for path in SOURCES:
        if relative(path).startswith(PURE):
            assert not [name for name in imports(path) if name.split(".")[0] in IMPURE], relative(path)


def test_only_atomic_io_makes_files_durable() -> None:
    """fsync, rename and removal of checkpoints go through one module."""
    others = {"checkpoint/atomic_io.py", "testing/cluster.py", "testing/equivalence.py"}
    for path in SOURCES:
        if relative(path) not in others:
            calls = re.findall(
                r"os\.(fsync|rename|replace|unlink|rmdir|remove)\(|shutil\.(?:rmtree|move)\(",
                path.read_text(),
            )
            assert not calls, f"{relative(path)} calls {calls}"


def test_nothing_is_unpickled_or_executed() -> None:
    """Nothing received from network or disk is code."""
    words = (r"\bpickle\b", r"broadcast_object", r"all_gather_object", r"\beval\(", r"\bexec\(")
    for path in SOURCES:
        text = re.sub(r'"""[\s\S]*?"""|#.*', "", path.read_text())
        for word in words:
            if word == r"\bexec\(" and relative(path) == "agent/workers/run_main.py":
                continue  # it runs the script that the user named
            assert not re.search(word, text), f"{relative(path)}: {word}"


def test_torch_files_are_read_as_data_only() -> None:
    """Each call of torch.load says so, whatever the default of torch is."""
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert keywords.get("weights_only") == "True", f"{relative(path)}:{node.lineno}"


def test_modules_and_functions_are_not_too_long() -> None:
    """The docstring of a function does not count."""
    for path in SOURCES:
        assert path.read_text().count("\n") <= MAX_MODULE_LINES, relative(path)
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                documented = ast.get_docstring(node, clean=False) or ""
                lines = (node.end_lineno or 0) - node.lineno + 1 - documented.count("\n")
                assert lines <= MAX_FUNCTION_LINES, (
                    f"{relative(path)}:{node.lineno} {node.name}: {lines} lines"
                )


def test_every_module_has_a_docstring() -> None:
    """Its first paragraph says what the module is for."""
    assert [relative(path) for path in SOURCES if not ast.get_docstring(tree_of(path))] == []


def words_of(identifier: str) -> set[str]:
    """Split snake_case and CamelCase into lower-case words."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)}


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield every name that a module defines or uses, and the text of its messages."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield line, node.name
        elif isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, ast.arg):
            yield line, node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield line, node.value


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_identifier_or_message_uses_a_retired_word(path: Path) -> None:
    """One concept has one name, the one that the field uses."""
    found = [
        f"{relative(path)}:{line}: {word}"
        for line, text in identifiers(tree_of(path))
        for word in sorted(words_of(text) & RETIRED)
    ]
    assert found == []
