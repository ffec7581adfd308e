"""Test that users can import, catch and look up every error that the package raises on purpose."""

from __future__ import annotations

import ast
import builtins
import functools
import subprocess
import sys
from collections.abc import Iterator

import elastic_resume as er
from elastic_resume import errors, testing
from elastic_resume.errors import ElasticResumeError
from tests.support.paths import ROOT

PACKAGE = ROOT / "elastic_resume"
# They pass between two modules of ours, and one of these catches them.
INTERNAL = {
    "_SenderFailedError",  # becomes a PeerFailedError once no node is left
    "AuthenticationError",
    "JobCompleted",
    "NotPlainError",
    "NotCheckable",
    "NoticeQueryError",
    "ProtocolError",
    "RequestRefusedError",
    "StoppedError",
    "TargetUnavailableError",
    "_StaleCacheError",
}


@functools.cache
def list_nodes() -> list[ast.AST]:
    """Return all nodes of the package's syntax trees: two seconds that collecting tests should not take."""
    return [node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]


def iter_names(nodes: list[ast.expr]) -> Iterator[str]:
    """Yield each name in expressions, and the last part of each dotted name."""
    for node in (child for expression in nodes for child in ast.walk(expression)):
        if isinstance(node, (ast.Name, ast.Attribute)):
            yield node.id if isinstance(node, ast.Name) else node.attr


def find_exception_classes() -> set[str]:
    """Return the names of all classes of the package that derive from an exception, directly or not."""
    bases = {n.name: set(iter_names(n.bases)) for n in list_nodes() if isinstance(n, ast.ClassDef)}
    built_in = {
        n for n, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)
    }
    found: set[str] = set()
    while new := {name for name in bases.keys() - found if bases[name] & (found | built_in)}:
        found |= new
    return found


def test_every_error_that_reaches_users_is_exported() -> None:
    """The failures of the pytest plugin's assertions are exported by elastic_resume.testing."""
    raised = {
        n for node in list_nodes() if isinstance(node, ast.Raise) and node.exc for n in iter_names([node.exc])
    }
    classes = find_exception_classes()
    assert {"CorruptError", "PeerFailedError", "TriggerError"} <= raised & classes
    for_users = classes - INTERNAL
    assert for_users - set(testing.__all__) == set(errors.__all__)
    assert raised & classes <= INTERNAL | set(errors.__all__) | set(testing.__all__)


def test_internal_exceptions_are_caught() -> None:
    """A name that no handler mentions would reach the user."""
    caught = {
        name
        for node in list_nodes()
        if isinstance(node, ast.ExceptHandler) and node.type
        for name in iter_names([node.type])
    }
    checked = {
        name
        for node in list_nodes()
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance"
        for name in iter_names(node.args[1:])
    }
    assert find_exception_classes() >= INTERNAL
    assert caught | checked >= INTERNAL


def test_every_exported_error_is_raised_and_documented() -> None:
    """The docstring has a second paragraph with the condition and the remedy; the overview has the name."""
    called = [node.func for node in list_nodes() if isinstance(node, ast.Call)]
    raised = [node.exc for node in list_nodes() if isinstance(node, ast.Raise) and node.exc]
    used = set(iter_names([*called, *raised]))
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, ElasticResumeError) or kind is errors.WorldChanged
        assert name in used or kind.__subclasses__(), f"{name} is never raised"
        assert f" {name} " in (errors.__doc__ or "") or kind is ElasticResumeError
        assert len((kind.__doc__ or "").split("\n\n")) > 1, f"{name}: when is it raised, and what helps?"


def test_errors_are_an_attribute_of_the_package_without_torch() -> None:
    """A script writes er.errors.ConfigError after one import."""
    assert er.errors.ConfigError is errors.ConfigError
    code = "import sys, elastic_resume as er; er.errors.ConfigError; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
