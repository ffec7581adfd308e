"""Each flag, variable, exit code and command that the documents name exists, and the site names them all."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_resume import cli, config, constants
from elastic_resume.rendezvous.rendezvous_config import CONF_KEYS
from elastic_resume.schedulers import environment
from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "docs" / "_ext"))
reference_pages = pytest.importorskip("reference_pages", reason="Sphinx is in the extra docs")

README = ROOT / "README.md"
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts]
DEPLOY = [path for path in sorted((ROOT / "deploy").rglob("*")) if path.is_file()]
TEXTS = [README, *PAGES, *DEPLOY]
# Flags in the documents that belong to Slurm, kubectl, docker, Apptainer, Accelerate, torch 2.14, our
# benchmarks and example scripts.
FOREIGN = {
    "--busy-core", "--model",
    "--array", "--bind", "--container-image", "--container-mounts", "--container-workdir", "--cpus-per-gpu",
    "--cpus-per-task", "--dry-run", "--epochs", "--export", "--filename", "--follow", "--from-literal",
    "--full", "--gpus-per-node", "--grace-period", "--ipc", "--job-name", "--kill-on-bad-exit", "--kills",
    "--kustomize", "--multi-gpu", "--newest", "--no-kill", "--no-requeue", "--nodelist",
    "--ntasks-per-node", "--num-machines", "--num-processes", "--nv", "--oldest", "--only", "--open-mode",
    "--output", "--patch", "--prefix", "--print-completion", "--privileged", "--pwd", "--requeue",
    "--secret", "--selector", "--setup", "--signal", "--step-delay", "--time", "--trainer", "--wait",
}  # fmt: skip
# Settings of the tests in the Makefile and in docs/benchmarks.md.
FOREIGN_VARIABLES = {
    "ELASTIC_RESUME_CHAOS_S", "ELASTIC_RESUME_FUZZ_CASES", "ELASTIC_RESUME_POWER_CUTS",
    "ELASTIC_RESUME_SOAK_KILLS",
}  # fmt: skip
# Of a worker or an agent that a signal ended, as a scheduler reports it: SIGBUS, SIGKILL, SIGTERM.
SIGNAL_CODES = {135, 137, 143}
FORMER = "upgrading.md"  # names the flags and variables of earlier versions
FORMER_VARIABLES = {"ELASTIC_RESUME_GRACE_S"}


def flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield every flag of a parser and of its subcommands."""
    for action in parser._actions:  # argparse has no public way to ask
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from flags_of(subparser)


def user_variables() -> set[str]:
    """Return the variables that `constants` marks as a user's, and those of pods."""
    source = Path(constants.__file__).read_text()
    marked = re.findall(r'^ENV_\w+ = "(\w+)".*\(user\)', source, re.MULTILINE)
    pods = {name for names in environment.KUBERNETES_VARIABLES.values() for name in names}
    return {*marked, *(name for name in pods if name.startswith(constants.ENV_PREFIX))}


def former_flags() -> set[str]:
    """Return the flags of earlier versions: for settings that have no flag now, and for a file of them."""
    return {"--config", *(f"--{option.name}" for option in config.OPTIONS if not option.has_flag)}


@pytest.mark.parametrize("path", [README, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_document_names_only_flags_that_exist(path: Path) -> None:
    """Of our commands, and of the programs beside them."""
    known = {*flags_of(cli.build_parser()), *FOREIGN}
    if path.name == FORMER:
        known |= former_flags()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", path.read_text()))
    assert named - known == set()


@pytest.mark.parametrize("path", DEPLOY, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_to_copy_names_no_former_flag(path: Path) -> None:
    """test_deploy.py parses its commands; this reads the comments too."""
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", path.read_text())) & former_flags() - FOREIGN == set()


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document_names_only_variables_that_exist(path: Path) -> None:
    """Those of constants.py, of settings, and of pods."""
    known = {getattr(constants, name) for name in dir(constants) if name.startswith("ENV_")}
    known |= {option.variable for option in config.OPTIONS} | user_variables() | FOREIGN_VARIABLES
    if path.name == FORMER:
        known |= FORMER_VARIABLES
    named = set(re.findall(r"ELASTIC_RESUME_[A-Z_]*[A-Z]", path.read_text()))
    assert named - known == set()


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document_names_only_commands_that_exist(path: Path) -> None:
    """The word after the program, in code."""
    known = set(reference_pages.subcommands())
    named = re.findall(r"(?:^ *|`|[;&|] *)elastic-resume ([a-z][a-z-]*)\b", path.read_text(), re.MULTILINE)
    assert set(named) - known == set()


def known_exit_codes() -> dict[int, str]:
    """Return the exit codes of `constants` by number, without the base of those of signals."""
    found = {value: name for name, value in vars(constants).items() if name.startswith("EXIT_")}
    for code in (constants.EXIT_SIGNAL_BASE, constants.EXIT_PARKED, constants.EXIT_NEEDS_GENERATION):
        del found[code]  # the last two are a launcher shim's
    return found


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document_names_only_exit_codes_that_exist(path: Path) -> None:
    """In running text; tables of Slurm and Kubernetes have tests of their own."""
    named = re.findall(r"\b(?:exit code|exits with|ends? with) `?(\d+)\b(?! ?%)", path.read_text())
    assert {int(code) for code in named} - {*known_exit_codes(), *SIGNAL_CODES} == set()


def test_page_of_exit_codes_has_each_code() -> None:
    """One row for each code of ``run``; that of ``chaos`` is in the text below."""
    page = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    rows = re.findall(r"^\| (\d+)( \+ n)? \|", page, re.MULTILINE)
    assert (str(constants.EXIT_SIGNAL_BASE), " + n") in rows
    codes = {int(code) for code, is_base in rows if not is_base}
    assert codes == known_exit_codes().keys() - {constants.EXIT_NO_FAULT}


def test_site_names_every_flag_setting_and_variable() -> None:
    """The generated pages have what the parsers have; the other variables of a user are in a table."""
    commands = "\n".join(reference_pages.command_lines())
    ours = {flag for flag in flags_of(cli.build_parser()) if flag.startswith("--") and "_" not in flag}
    assert {flag for flag in ours if f"`{flag}" not in commands} <= {"--help", "--version"}
    settings = "\n".join(reference_pages.settings_lines())
    keys = {option.name for option in config.OPTIONS if option.help}
    assert len(keys) >= 20
    assert [key for key in keys if f"| `{key}`<br>" not in settings] == []
    assert [key for key in CONF_KEYS if f"`{key}`" not in "\n".join(reference_pages.rendezvous_lines())] == []
    by_hand = (ROOT / "docs" / "reference" / "settings.md").read_text()
    assert [name for name in user_variables() if f"`{name}`" not in settings + by_hand] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a Markdown page, made as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title)) for title in titles)
    return {title.strip().lower().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_of_page_outside_the_site_lead_somewhere(name: str) -> None:
    """Files, folders, pictures and anchors. Sphinx checks those of the site."""
    page = ROOT / name
    if not page.exists():
        pytest.skip(f"{name} is not there")
    text = page.read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = ROOT / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_extras_are_installed_as_the_readme_installs() -> None:
    """Nothing is on PyPI: a name there would install something else. The extras of the messages exist."""
    assert "pip install ." in README.read_text()
    product = [*sorted((ROOT / "elastic_resume").rglob("*.py")), *sorted((ROOT / "docs").rglob("*.json"))]
    texts = {path: path.read_text() for path in [*TEXTS, *product, ROOT / "CHANGELOG.md"]}
    assert [path.name for path, text in texts.items() if "elastic-resume[" in text] == []
    named = {name for text in texts.values() for name in re.findall(r"EXTRA_INSTALL.format\('(\w+)'\)", text)}
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {"metrics", "notebook", "nvidia", "remote"} == named
    assert named <= set(extras)
