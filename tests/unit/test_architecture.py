"""The boundaries of ARCHITECTURE.md, checked by reading the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "elastic_resume"

# Imports go from a later layer to an earlier one, or stay within a package.
LAYERS = """
    constants errors bytecode linux local_socket shared_page
    units option events background grace
    console machine gpus
    failpoints milestone
    policy
    schedulers
    checkpoint
    slots archive
    rendezvous
    state data
    mechanisms config_file setting_values
    config
    ranks
    proof
    restore capture
    training report
    integrations commands
    agent
    testing
    cli
    torchrun_handler launching
"""
LEVEL = {part: level for level, line in enumerate(LAYERS.split("\n")) for part in line.split()}
WORKER_PACKAGES = {"state", "data", "ranks", "proof", "restore", "capture", "training", "integrations"}
MAY_IMPORT_TORCH = (
    *(f"{package}/" for package in sorted(WORKER_PACKAGES)),
    "config_file.py",  # torchrun's parser, for a process without that of `run`
    "agent/torchelastic.py",
    "agent/workers/forkserver.py",
    "mechanisms/compile_cache/artifact_file.py",
    "mechanisms/compile_cache/sharing.py",
    *(
        f"mechanisms/compute_check/{name}.py"
        for name in ("check", "computation", "device", "plain_state", "recorder", "request")
    ),
    "mechanisms/slow_ranks/own_time.py",
    "mechanisms/mechanism.py",  # for types only
    "torchrun_handler.py",
)
PURE = re.compile(r"policy/|rendezvous/core/|rendezvous/facts|mechanisms/\w+/judge")
IMPURE = frozenset(
    ["time", "os", "io", "socket", "asyncio", "random", "subprocess", "threading", "pathlib", "secrets"]
)
MAX_FUNCTION_LINES = 70
MAX_MODULE_LINES = 800
# For each mechanism: its words, and the files beside its own and the registry that use them. A fault of
# testing/ may have the name of what it causes; a file there counts only if it imports the mechanism.
# The kinds of failures are the core's words, whichever mechanism finds one: a hang, the Xid of a broken GPU,
# and a node that was "preempted", which is any that a signal asked to leave, as schedulers do too. A notice
# is what any mechanism may give a script. An archive is a tier: the mechanism only puts checkpoints there. A
# restore compares replicas too, so --check-replicas is the core's.
MECHANISM_WORDS = {
    "archive": (r"uploader|last[-_ ]?upload|archive[-_](every|keep)", {"archive/store_errors.py"}),
    "collapsed_output": (r"collapsed?[-_ ]output|line[-_ ]?collapser", set()),
    "compile_cache": (r"compile[-_ ]?(cache|artifact)", set()),
    "compute_check": (r"compute[-_ ]?check|check[-_]compute|gradients-differ", set()),
    "curves": (
        r"log[-_]metrics|curve[-_ ]?writer|\bcurves?\b",
        {"training/run.py", "integrations/lightning_loggers.py"},  # the latter has a method of Lightning
    ),
    "gpu_health": (r"gpu[-_ ]?health|gpu[-_ ]?monitor", set()),
    "hangs": (r"hang[-_ ]?(detect|timeout|report)|stack[-_ ]?dump", {"training/run.py"}),
    "on_event": (r"\bon[-_]event\b|notifier", {"launching/launcher.py"}),
    "planned_ends": (r"end[-_ ]?announcer|planned[-_ ]ends", set()),
    "preemption": (r"preempt(?!ed)|notice[-_ ]?watcher", {"__init__.py", "training/run.py"}),
    "replicas": (r"digester|replicas-differ", set()),
    "slow_ranks": (r"\bslow[-_ ]?rank|straggler", set()),
    "standbys": (r"standby", set()),
    "unreachable_peers": (r"unreachable[-_ ]?peer|peer[-_ ]?probe", {"rendezvous/core/leader.py"}),
}
MAX_FILES_OUTSIDE = 3
# Private words of former versions; CHANGELOG.md has the standard words.
RETIRED = frozenset(
    "zygote brood tidings nursery mishap mishaps bury buried elders heed heeded".split()  # noqa: SIM905
)


@dataclass
class Module:
    """What the rules need of one source file."""

    path: str
    text: str
    package: str
    imports: set[str] = field(default_factory=set)
    """Dotted names, also of imports inside functions."""
    words: dict[str, int] = field(default_factory=dict)
    """Identifiers and texts, each with its first line."""
    long_functions: list[str] = field(default_factory=list)
    torch_loads: list[str] = field(default_factory=list)
    has_docstring: bool = False

    @property
    def name(self) -> str:
        """The dotted name."""
        return "elastic_resume." + self.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    """All modules of the package, each parsed once."""
    return [read_module(path) for path in sorted(PACKAGE.rglob("*.py"))]


def read_module(path: Path) -> Module:
    """Parse a file and collect what the rules need."""
    relative, text = path.relative_to(PACKAGE).as_posix(), path.read_text()
    tree = ast.parse(text)
    module = Module(relative, text, relative.split("/")[0].removesuffix(".py"))
    module.has_docstring = bool(ast.get_docstring(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            module.imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            module.imports |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if keywords.get("weights_only") != "True":
                module.torch_loads.append(f"{relative}:{node.lineno}")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            documented = (ast.get_docstring(node, clean=False) or "").count("\n")
            if (node.end_lineno or 0) - node.lineno + 1 - documented > MAX_FUNCTION_LINES:
                module.long_functions.append(f"{relative}:{node.lineno}: {node.name}")
        for word in list_words(node):
            module.words.setdefault(word, getattr(node, "lineno", 0))
    return module


def list_words(node: ast.AST) -> Iterator[str]:
    """Yield the name that a node defines or uses, or its text."""
    for attribute in ("name", "id", "attr", "arg", "value"):
        word = getattr(node, attribute, None)
        if isinstance(word, str):
            yield word


def test_every_module_belongs_to_layer(modules: list[Module]) -> None:
    """The imports of a package that is not in LAYERS would go unchecked."""
    assert {module.package for module in modules} - {"__init__", "__main__"} == set(LEVEL)


def test_imports_go_down_only(modules: list[Module]) -> None:
    """An agent and a training script share what lies below both; neither imports the other."""
    wrong = []
    for module in modules:
        own = module.package
        for name in module.imports if own in LEVEL else ():
            match = re.match(r"elastic_resume\.(\w+)", name)
            other = match[1] if match else own
            if other == own or other not in LEVEL or (other, own) == ("constants", "errors"):
                continue
            if LEVEL[other] >= LEVEL[own] or (own == "agent" and other in WORKER_PACKAGES):
                wrong.append(f"{module.path} imports {name}")
    assert wrong == []


def test_no_modules_import_each_other(modules: list[Module]) -> None:
    """No module is on a circle of imports, whether at its top or inside functions."""
    names = {module.name for module in modules}
    graph = {
        module.name: module.imports & names - {module.name, "elastic_resume"}
        for module in modules
        if module.path != "__init__.py"  # it imports a module when a name of it is used
    }
    for imported in graph.values():  # `from package import module` imports the module
        imported -= {name.rpartition(".")[0] for name in imported}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"modules import each other: {error.args[1]}")


def test_torch_is_imported_by_worker_packages_and_few_modules(modules: list[Module]) -> None:
    """`elastic-resume ls` and `verify` work on machines without torch."""
    users = {m.path for m in modules if "torch" in {name.split(".")[0] for name in m.imports}}
    assert [path for path in sorted(users) if not path.startswith(MAY_IMPORT_TORCH)] == []


def test_only_one_module_imports_torchelastic(modules: list[Module]) -> None:
    """It uses public extension points."""
    users = [m for m in modules if any("distributed.elastic" in name for name in m.imports)]
    assert [module.path for module in users] == ["agent/torchelastic.py"]
    assert "LocalElasticAgent" not in users[0].text


def test_decisions_are_pure(modules: list[Module]) -> None:
    """No clock, file, socket, process or random number in policy and in the core of the rendezvous."""
    pure = [module for module in modules if PURE.match(module.path)]
    assert pure
    assert {m.path: impure for m in pure if (impure := {n.split(".")[0] for n in m.imports} & IMPURE)} == {}


def test_decision_of_views_uses_no_time_link_or_setting(modules: list[Module]) -> None:
    """The argument of `docs/concepts/worlds.md` is to be checked in two modules, without what can fail."""
    core = "elastic_resume.rendezvous.core"
    by_path = {module.path: module for module in modules}
    sequence, world = (by_path[f"rendezvous/core/{name}.py"] for name in ("sequence", "world"))
    assert {
        name for name in sequence.imports if name.startswith(f"{core}.") and ".world" not in name
    } == set()
    assert not any(name.startswith(core) for name in world.imports)
    words = {word for module in (sequence, world) for word in module.words}
    assert {word for word in words if word.endswith(("_at", "_s", "settings", "link"))} == set()


def test_mechanism_is_named_in_three_files_outside_of_its_package() -> None:
    """In code, texts, comments and docstrings: who takes a mechanism out finds the rest of it there."""
    registry = "mechanisms/registry.py"
    texts = read_texts(PACKAGE)
    packages = {
        path.split("/")[1] for path in texts if path.startswith("mechanisms/") and path.count("/") > 1
    }
    found = {
        mechanism: find_files_with_mechanism(texts, mechanism, words)
        for mechanism, (words, _) in MECHANISM_WORDS.items()
    }
    expected = {mechanism: {registry, *files} for mechanism, (_, files) in MECHANISM_WORDS.items()}
    assert MECHANISM_WORDS.keys() == packages
    assert found == expected
    assert max(map(len, expected.values())) <= MAX_FILES_OUTSIDE


def read_texts(package: Path) -> dict[str, str]:
    """Return the text of each source file and template by its path in the package."""
    return {
        path.relative_to(package).as_posix(): path.read_text()
        for path in package.rglob("*")
        if path.suffix in {".py", ".j2", ".css"}
    }


def find_files_with_mechanism(texts: dict[str, str], mechanism: str, words: str) -> set[str]:
    """Return the files that name a mechanism, beside its own."""
    imported = rf"mechanisms\.{mechanism}\b"
    return {
        path
        for path, text in texts.items()
        if not path.startswith(f"mechanisms/{mechanism}/")
        and re.search(imported if path.startswith("testing/") else f"{words}|{imported}", text, re.IGNORECASE)
    }


def test_fault_may_have_the_name_of_a_mechanism() -> None:
    """A mechanism that finds slow disks is not named by the fault that slows one."""
    texts = {
        "testing/faults.py": 'SLOW_DISK = Fault("slow-disk")',
        "testing/cluster.py": "from elastic_resume.mechanisms.slow_disk import judge",
        "policy/restart.py": "# not for a slow disk",
        "mechanisms/slow_disk/judge.py": "slow disk",
        "mechanisms/slow_disks/judge.py": "",
    }
    words = r"\bslow[-_ ]?disk"
    assert find_files_with_mechanism(texts, "slow_disk", words) == {"testing/cluster.py", "policy/restart.py"}


def test_only_atomic_io_makes_files_durable(modules: list[Module]) -> None:
    """fsync, rename and removal of checkpoints go through one module."""
    others = {"checkpoint/atomic_io.py", "testing/cluster.py", "testing/equivalence.py"}
    others |= {"integrations/lost_steps.py", "agent/temporary_dir.py"}  # they hold no checkpoint of ours
    pattern = r"os\.(?:fsync|rename|replace|unlink|rmdir|remove)\(|shutil\.(?:rmtree|move)\("
    calls = {m.path: re.findall(pattern, m.text) for m in modules if m.path not in others}
    assert {path: found for path, found in calls.items() if found} == {}


def test_nothing_is_unpickled_or_executed(modules: list[Module]) -> None:
    """Nothing received from network or disk is code.

    `launch` carries a function of its caller through memory of the caller and its children. What
    torch.compile has made is code; a user must turn its sharing on.
    """
    pattern = r"\bpickle\b|broadcast_object|all_gather_object|\beval\(|\bexec\(|load_cache_artifacts"
    found = {m.path: re.findall(pattern, re.sub(r'"""[\s\S]*?"""|#.*', "", m.text)) for m in modules}
    assert found.pop("agent/workers/run_main.py") == ["exec("]  # it runs the user's script
    assert found.pop("mechanisms/compile_cache/sharing.py") == ["load_cache_artifacts"]
    own_memory = {path for path, calls in found.items() if calls}
    assert own_memory == {f"launching/{name}.py" for name in ("call_memory", "function_worker", "launcher")}


def test_torch_files_are_read_as_data_only(modules: list[Module]) -> None:
    """Each call of torch.load has weights_only=True, whatever torch's default is."""
    assert [call for module in modules for call in module.torch_loads] == []


def test_modules_and_functions_are_not_too_long(modules: list[Module]) -> None:
    """The docstring of a function does not count."""
    assert [m.path for m in modules if m.text.count("\n") > MAX_MODULE_LINES] == []
    assert [function for module in modules for function in module.long_functions] == []


def test_every_module_has_docstring(modules: list[Module]) -> None:
    """Its first paragraph gives the module's purpose."""
    assert [module.path for module in modules if not module.has_docstring] == []


def test_no_identifier_or_message_uses_retired_word(modules: list[Module]) -> None:
    """One concept has one name, the field's own."""
    pattern = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # the parts of snake_case and CamelCase
    found = [
        f"{module.path}:{line}: {word}"
        for module in modules
        for text, line in module.words.items()
        for word in sorted({part.lower() for part in pattern.findall(text)} & RETIRED)
    ]
    assert found == []


def test_names_of_modules_and_classes_are_unique(modules: list[Module]) -> None:
    """A reader who meets a name has one place to look. Lightning has two packages with equal names.

    The packages of mechanisms have the same shape, so the same names of modules.
    """
    places: dict[str, list[str]] = {}
    for module in modules:
        stem = module.path.rsplit("/")[-1]
        classes = [node.name for node in ast.parse(module.text).body if isinstance(node, ast.ClassDef)]
        for name in classes if module.path.startswith(("integrations/", "mechanisms/")) else [*classes, stem]:
            places.setdefault(name, []).append(module.path)
    repeated = {
        name: paths
        for name, paths in places.items()
        if len(paths) > 1 and name != "__init__.py" and not all("lightning" in path for path in paths)
    }
    assert repeated == {}


SENTENCE_READERS = frozenset(
    "startswith endswith removeprefix removesuffix partition rpartition split find index "  # noqa: SIM905
    "search match fullmatch findall sub".split()
)
SENTENCE_FIELDS = frozenset({"message", "text", "reason", "detail"})
# These read texts from outside: the exception of a worker, or an error of the system.
OUTSIDE_TEXTS = {
    ("mechanisms/unreachable_peers/probe.py", "handle_failure"),
    ("policy/failure_classification.py", "signature"),
    ("policy/failure_classification.py", "_refine_kind"),
}


def find_parsed_sentences(tree: ast.Module, makers: frozenset[str]) -> list[tuple[str, int]]:
    """Return the functions, and lines, that take a sentence apart or compare it.

    A sentence is the result of a function of `makers`, a variable of the same function that is assigned such
    a result, or a field named as in `SENTENCE_FIELDS`. To parse means a method or a regular expression of
    `SENTENCE_READERS`, ``in`` and a comparison, for fields a comparison with a literal. A sentence that was
    passed as an argument, kept in another field, or stored in a container in between is not seen: for these
    there are the tests with random words.
    """

    def is_made(node: ast.AST, names: frozenset[str]) -> bool:
        return any(
            (isinstance(part, ast.Call) and ast.unparse(part.func).rpartition(".")[2] in makers)
            or (isinstance(part, ast.Name) and part.id in names)
            for part in ast.walk(node)
        )

    def is_field(node: ast.AST) -> bool:
        named = isinstance(node, ast.Attribute) and node.attr in SENTENCE_FIELDS
        keys = [node.slice] if isinstance(node, ast.Subscript) else getattr(node, "args", [])[:1]
        return named or any(isinstance(key, ast.Constant) and key.value in SENTENCE_FIELDS for key in keys)

    def is_text(node: ast.AST) -> bool:
        return isinstance(node, (ast.Constant, ast.JoinedStr)) and getattr(node, "value", "f") not in {
            "",
            None,
        }

    found = []
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for function in functions:
        names: frozenset[str] = frozenset()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and is_made(node.value, names):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                read = [node.func.value, *node.args] if node.func.attr in SENTENCE_READERS else []
                parses = any(is_made(part, names) or any(map(is_field, ast.walk(part))) for part in read)
            elif isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                parses = any(is_made(side, names) for side in sides)
                parses |= any(map(is_field, sides)) and any(map(is_text, sides))
            else:
                continue
            if parses:
                found.append((function.name, node.lineno))
    return found


def test_no_sentence_is_parsed(modules: list[Module]) -> None:
    """What is decided depends on kinds and fields; see `find_parsed_sentences` for what this cannot see."""
    wording = next(module for module in modules if module.path == "policy/wording.py")
    makers = frozenset(
        node.name for node in ast.parse(wording.text).body if isinstance(node, ast.FunctionDef)
    )
    found = {
        (module.path, function, line)
        for module in modules
        if module.package in {"policy", "agent", "mechanisms", "rendezvous", "report"}
        and module is not wording
        for function, line in find_parsed_sentences(ast.parse(module.text), makers)
    }
    assert {row for row in found if row[:2] not in OUTSIDE_TEXTS} == set()
    assert {row[:2] for row in found} == OUTSIDE_TEXTS, "an exception that is not needed any more"


def test_no_test_limits_the_process_that_it_shares() -> None:
    """Such a test may break another one, or what it imports for the first time. Give it its own process.

    Scripts are other processes; so are texts that a test starts, which are no calls here.
    """
    limiting = {"setrlimit", "prlimit", "umask", "clock_settime", "settimeofday", "setpriority"}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "tests").rglob("*.py")
        if "scripts" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in limiting
    ]
    assert found == []
