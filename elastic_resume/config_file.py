"""Read the YAML file of ``--config``: keys, their texts, and the line of each.

A value stays the text that a flag would have: YAML 1.1 reads ``1:3`` as 63 and ``no`` as false. So only the
node tree is built, which has the lines too, and no object of any tag. `config.parse_flags` knows the keys.

``${NAME}`` stands for a variable of the environment, ``$$`` for a dollar. Secrets come from variables or
files: a text in the file may be in git, and a word of the script in the list of processes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from elastic_resume import constants
from elastic_resume.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    import yaml

MAX_BYTES = 1 << 20
FLAG = "--config"
SCRIPT, SCRIPT_ARGS, ENV = "script", "script-args", "env"
# Flags without a value that are no settings, for `find_path`: torchrun's, as torch is not imported yet, and
# ours. `config.SWITCHES` has those of settings too.
PLAIN_SWITCHES = frozenset({
    "-m", "-h", "--help", "--help-all", "--module", "--no-python", "--run-path", "--show-config",
    "--standalone", "--virtual-local-rank",
})  # fmt: skip
_DOLLAR = re.compile(r"\$(?:(\$)|\{([A-Za-z_]\w*)\})?")
_SECRET_NAME = re.compile(
    r"(?:(?:^|_)(?:API_?KEY|KEY|PASS|PAT)|TOKEN|SECRET|PASSWORD|PASSWD)(?:_?[0-9]+)?$", re.IGNORECASE
)
_ONE_VARIABLE = re.compile(r"\$\{[A-Za-z_]\w*\}")
# A tag that YAML gives to a value, and no tag in the file that asks for an object.
_PLAIN_TAG = re.compile(r"tag:yaml\.org,2002:[a-z]+")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Entry(NamedTuple):
    """A key with its value as a flag's text, and where it stands: ``FILE:LINE``."""

    key: str
    text: str
    where: str
    shape: str = "scalar"
    """``scalar``, ``sequence`` (then ``text`` has commas) or ``mapping`` (``NAME=VALUE`` with commas)."""
    raw: str = ""
    """The text before variables were replaced: it has no secret."""

    @property
    def source(self) -> str:
        """The source as an error names it."""
        return f"{self.where}: {self.key}"


@dataclass(frozen=True)
class ConfigFile:
    """The content of a file; `config` checks the names and values of ``settings``, by key with dashes."""

    path: str = ""
    settings: Mapping[str, Entry] = field(default_factory=dict)
    script: Entry | None = None
    script_args: tuple[Entry, ...] = ()
    env: Mapping[str, Entry] = field(default_factory=dict)

    def set_environment(self, environ: MutableMapping[str, str]) -> None:
        """Set the variables of ``env``, unless the environment has them."""
        for name, entry in self.env.items():
            environ.setdefault(name, entry.text)


def find_path(words: Sequence[str], environ: Mapping[str, str], switches: Collection[str]) -> str:
    """Return the file that the flags of ``run`` or a variable name; empty if none.

    ``switches`` are the flags without a value. The script's own words do not count.
    """
    found = environ.get(constants.ENV_CONFIG, "")
    waits_for = ""
    for word in words:
        if waits_for:
            found = word if waits_for == FLAG else found
            waits_for = ""
        elif not word.startswith("-") or word == "--":
            break
        else:
            name, has_value, value = word.partition("=")
            name = name.replace("_", "-")
            if name == FLAG and has_value:
                found = value
            is_short = re.match(r"-[a-z].", word) is not None
            is_switch = any(switch.startswith(name) for switch in switches)
            waits_for = "" if has_value or is_short or is_switch else name
    return found


def read_file(path: str, environ: Mapping[str, str]) -> ConfigFile:
    """Read the file at ``path``, relative to the working directory, as a flag's path is.

    Raises:
        ConfigError: not readable, no YAML, not of the right form, or a variable is missing.

    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: the file of {FLAG} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from error
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{path}: the file of {FLAG} has more than {MAX_BYTES >> 20} MiB: is it another one?"
        )
    return parse(path, data, environ)


def parse(path: str, data: bytes, environ: Mapping[str, str]) -> ConfigFile:
    """Parse the content of a file; see `read_file`."""
    root = _compose(path, data)
    if root is None:
        return ConfigFile(path)
    reader = _NodeReader(path, environ)
    settings: dict[str, Entry] = {}
    variables: dict[str, Entry] = {}
    script_args: tuple[Entry, ...] = ()
    script = None
    for key, node in reader.read_mapping(f"{path}: the file", root):
        name = key.key.replace("_", "-")
        if name == SCRIPT:
            script = reader.read_text(key, node)
        elif name == SCRIPT_ARGS:
            script_args = tuple(reader.read_list(key, node))
        elif name == ENV:
            variables = {
                one.key: reader.read_variable(one, node)
                for one, node in reader.read_mapping(key.source, node)
            }
        else:
            settings[name] = reader.read_setting(key, node)
    return ConfigFile(path, settings, script, script_args, variables)


def _compose(path: str, data: bytes) -> yaml.Node | None:
    """Return the tree of nodes, without any object; None for an empty file."""
    import yaml  # noqa: PLC0415 - seldom needed

    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: is not text in UTF-8.") from error
    try:
        root: yaml.Node | None = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(
            f"{path}:{line}: is not YAML: {error.problem}. Write KEY: VALUE in each line."
        ) from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path}: is not YAML: {reason or type(error).__name__}") from error
    return root


def _shape_of(node: yaml.Node) -> str:
    shape: str = node.id  # type: ignore[attr-defined]
    return shape


class _NodeReader:
    """Reads nodes of one file into entries."""

    def __init__(self, path: str, environ: Mapping[str, str]) -> None:
        self._path, self._environ = path, environ

    def read_mapping(self, source: str, node: yaml.Node) -> Iterator[tuple[Entry, yaml.Node]]:
        """Yield each key, as an entry without text, with its value's node."""
        if _shape_of(node) != "mapping":
            raise ConfigError(f"{source} must have lines of the form KEY: VALUE.")
        lines: dict[str, str] = {}
        for key_node, value in node.value:
            where = self._locate(key_node)
            if _shape_of(key_node) != "scalar":
                raise ConfigError(f"{where}: a key must be a plain name, and not a list or mapping.")
            name = str(key_node.value)
            first = lines.setdefault(name.replace("_", "-"), where)
            if first is not where:
                raise ConfigError(f"{where}: {name} is given twice, first at {first}: remove one.")
            yield Entry(name, "", where), value

    def read_text(self, key: Entry, node: yaml.Node, *, may_be_empty: bool = False) -> Entry:
        """Read one value, with its variables replaced."""
        if _shape_of(node) != "scalar":
            raise ConfigError(f"{key.source} is a {_shape_of(node)}: write one value.")
        if not _PLAIN_TAG.fullmatch(node.tag):
            raise ConfigError(f"{key.source} has the tag {node.tag[:100]}: write a plain value.")
        if node.tag.endswith(":null") or not (node.value or may_be_empty):
            raise ConfigError(f"{key.source} has no value: write one, or leave the key out.")
        raw = str(node.value)
        if "\0" in raw:
            raise ConfigError(f"{key.source} has a null character, which no flag or variable can have.")
        return key._replace(text=_DOLLAR.sub(lambda match: self._replace(key, match), raw), raw=raw)

    def read_list(self, key: Entry, node: yaml.Node) -> Iterator[Entry]:
        """Read a list of values, which may be empty texts."""
        if _shape_of(node) != "sequence":
            raise ConfigError(
                f"{key.source} must be a list: write [--epochs, 3], or one word after - in each line."
            )
        for item in node.value:
            yield self.read_text(key._replace(where=self._locate(item)), item, may_be_empty=True)

    def read_setting(self, key: Entry, node: yaml.Node) -> Entry:
        """Read a value, or several joined by commas."""
        if _shape_of(node) == "scalar":
            return self.read_text(key, node)
        if _shape_of(node) == "sequence":
            entries = list(self.read_list(key, node))
        else:
            entries = [self.read_text(one, value) for one, value in self.read_mapping(key.source, node)]
            entries = [one._replace(text=f"{one.key}={one.text}") for one in entries]
        if not all(entry.text for entry in entries) or not entries:
            raise ConfigError(f"{key.source} has no value: write one, or leave the key out.")
        return key._replace(text=",".join(entry.text for entry in entries), shape=_shape_of(node))

    def read_variable(self, key: Entry, node: yaml.Node) -> Entry:
        """Read a variable of the workers."""
        name = key.key
        if not _VARIABLE_NAME.fullmatch(name):
            raise ConfigError(f"{key.where}: {name!r} is no name of a variable: use letters, digits and _.")
        entry = self.read_text(key._replace(key=f"{ENV} {name}"), node, may_be_empty=True)
        if _SECRET_NAME.search(name) and entry.raw and not _ONE_VARIABLE.fullmatch(entry.raw):
            raise ConfigError(
                f"{entry.source} is a secret: keep it out of the file. Write {name}: ${{{name}}}, which "
                "takes it from the environment."
            )
        return entry

    def _replace(self, key: Entry, match: re.Match[str]) -> str:
        dollar, name = match.groups()
        if dollar:
            return "$"
        if name is None:
            raise ConfigError(
                f"{key.source} has a $ without a name: write ${{NAME}} for a variable, $$ for a dollar."
            )
        if name not in self._environ:
            raise ConfigError(f"{key.source} needs the variable {name}, which is not set: export {name}=….")
        if _SECRET_NAME.search(name) and not key.key.startswith(f"{ENV} "):
            raise ConfigError(
                f"{key.source} would show the secret {name} in the list of processes: let the script "
                f"read the variable {name}, or a file."
            )
        return self._environ[name]

    def _locate(self, node: yaml.Node) -> str:
        return f"{self._path}:{node.start_mark.line + 1}"


def list_torchrun_flags() -> argparse.ArgumentParser:
    """Return torchrun's parser, for a process that has no parser of ``run``. It imports torch."""
    from torch.distributed.run import get_args_parser  # noqa: PLC0415 - only with a file

    return get_args_parser()
