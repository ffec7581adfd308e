"""Parse the settings of one job on one node, and choose each value's source.

An argument of `er.resume()` comes first, then a flag, the environment, the file of ``--config``
(`config_file`), the default.

`OPTIONS` declares each setting once: its name, help, default, parser, and whether it has a flag. Each setting
has a variable ELASTIC_RESUME_NAME. Parsing changes nothing on disk. `setting_values` has the
parsers. torchrun's own flags come in as an argparse parser, so this module does not import torch.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from elastic_resume import config_file, constants
from elastic_resume.config_file import ConfigFile, Entry
from elastic_resume.errors import ConfigError
from elastic_resume.mechanisms.registry import MECHANISM_OPTIONS
from elastic_resume.option import Option, parse_switch
from elastic_resume.policy import going_back, proof
from elastic_resume.policy.checkpoint_interval import AUTO, IntervalSetting
from elastic_resume.schedulers import environment
from elastic_resume.setting_values import (
    ALLOWED_DRAIN_SIGNALS,
    MIN_KEEP,
    parse_absolute_path,
    parse_choice,
    parse_count,
    parse_drain_signals,
    parse_interval,
    parse_keep,
    parse_listen_address,
    parse_names,
    parse_snapshot_memory,
    parse_transfer_address,
    suggest_similar,
    validate_directory_name,
)
from elastic_resume.units import parse_duration

RESUME_MODES = ("auto", "must", "never")
DEFAULT_CKPT_DIR = "./checkpoints"
DEFAULT_KEEP = 3  # MIN_KEEP + 1: one may be corrupt while another is written
DEFAULT_STEP_MARK_S = 5.0  # a report dates the step that a failure interrupted with this precision
DEFAULT = "default"
AGENT_SETTINGS = ("ckpt_dir", "run_id", "node_name")
"""Settings that the agent's flags decide, and the script's arguments do not: see `Settings.for_worker`."""
_UUID = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}", re.IGNORECASE)
CONFIG_HELP = "YAML file with flags, settings, script, script-args and env; or ELASTIC_RESUME_CONFIG"
SHOW_CONFIG_HELP = "print each setting with its source, and exit"
# Flags of a command line that are no keys of a file.
NO_KEYS = {"help", "help_all", "config", "show_config"}
# torchrun's flags of several values.
COMMA_KEYS = {
    "rdzv-endpoint", "local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters",
    "redirects", "tee", "signals-to-handle",
}  # fmt: skip


# ---- the table -----------------------------------------------------------------------------------------


_RESUME_HINT = (
    " To begin with a checkpoint, load it into the model and the optimizer before er.resume(): a first start "
    "takes rank 0's values."
)
_interval_or_off = partial(parse_interval, allow_off=True)
_parse_timeout = partial(parse_duration, max_s=86400)
OPTIONS = (
    Option(
        "ckpt-dir",
        "DIR",
        "root of all checkpoints",
        parse_absolute_path,
        DEFAULT_CKPT_DIR,
        has_flag=True,
    ),
    Option("run-id", "NAME", "", validate_directory_name),  # its flag is torchrun's --rdzv-id
    Option(
        "save-every",
        "N|TIME",
        "interval between checkpoints: steps, time or auto",
        parse_interval,
        AUTO,
        has_flag=True,
        details="auto keeps the cost below a budget",
    ),
    Option(
        "snapshot-every",
        "N|TIME",
        "interval between snapshots: steps, time, auto or off",
        _interval_or_off,
        AUTO,
        has_flag=True,
        details="a snapshot is in memory and outlives a worker",
    ),
    Option(
        "keep",
        "N",
        f"checkpoints kept on each node, {MIN_KEEP} or more",
        parse_keep,
        DEFAULT_KEEP,
        has_flag=True,
    ),
    Option(
        "resume",
        "|".join(RESUME_MODES),
        "auto: from the newest valid state, if any",
        partial(parse_choice, choices=RESUME_MODES, hint=_RESUME_HINT),
        "auto",
        has_flag=True,
        details="must: end with an error if there is none; never: start fresh",
    ),
    Option(
        "resume-from",
        "STATE",
        "go back once: a step, a milestone's name or latest",
        going_back.parse_setting,
        has_flag=True,
        details="or a checkpoint, as g4-s500; newer states stay on disk, in quarantine, and never win again; "
        "the same command goes on from there",
        default_help="the newest state",
    ),
    Option(
        "prove",
        "WHEN",
        f"when to prove a resume: {', '.join(proof.MODES)}",
        partial(parse_choice, choices=(*proof.MODES, proof.REHEARSE)),
        proof.FIRST,
        has_flag=True,
        details="the newest steps are computed again and compared. first: until one resume of the script was "
        "proved; stop: the same, and a resume that is not proved ends the job",
    ),
    Option(
        "node-timeout",
        "TIME",
        "exclude a node unreachable for TIME",
        partial(_parse_timeout, min_s=0.5),
        "3s",
        has_flag=True,
        details="use the same on all nodes",
    ),
    Option(
        "grace",
        "TIME",
        "time for a worker to end before SIGKILL, in a drain",
        _parse_timeout,
        has_flag=True,
        default_help="5s; in a pod half of its terminationGracePeriodSeconds",
    ),
    Option(
        "preload",
        "MODULE,...",
        "modules to import once, ahead of all workers",
        parse_names,
        has_flag=True,
        details="torch is always one of them",
        default_help="none",
    ),
    Option(
        "metrics",
        "[ADDRESS:]PORT",
        "serve metrics for Prometheus",
        parse_listen_address,
        has_flag=True,
        details=f"needs {constants.EXTRA_INSTALL.format('metrics')}; without an address at 127.0.0.1",
        default_help="off",
    ),
    Option("quiet", None, "log warnings and errors only", parse_switch, "false", has_flag=True),
    Option(
        "node-name",
        "NAME",
        "this node's name",
        validate_directory_name,
        default_help="the scheduler's, else the host's",
    ),
    Option(
        "snapshot-memory",
        "auto|off|SIZE",
        "memory of this node for snapshots, as 4GB or 512MiB; auto: at most half of the free memory",
        parse_snapshot_memory,
        "auto",
    ),
    Option(
        "check-replicas",
        "N|auto|off",
        "steps between two comparisons of all replicas",
        partial(_interval_or_off, allow_seconds=False),
        AUTO,
    ),
    Option(
        "drain-signals",
        "NAME,...",
        f"signals that drain this node: {', '.join(ALLOWED_DRAIN_SIGNALS)}; SIGTERM always does",
        parse_drain_signals,
        "SIGTERM,SIGUSR1",
    ),
    Option(
        "max-no-progress",
        "N",
        "end the job after N failed starts in a row without a new step",
        partial(parse_count, minimum=1),
        default_help="3; no limit with --max-restarts",
    ),
    Option(
        "exclude-after",
        "N",
        "exclude a node that alone causes N failures in a row, if --nnodes allows",
        partial(parse_count, minimum=0),
        default_help="0: only if the job would end otherwise",
    ),
    Option(
        "no-warm",
        None,
        "start each worker as a new process, as torchrun does",
        parse_switch,
        "false",
    ),
    *MECHANISM_OPTIONS,
    Option(
        "transfer-addr",
        "ADDRESS|INTERFACE",
        "where other nodes take the state from this one; auto: at the address of the rendezvous",
        parse_transfer_address,
        "auto",
    ),
    Option("step-mark-s", "TIME", "", parse_duration, DEFAULT_STEP_MARK_S),
)
FLAG_OPTIONS = tuple(option for option in OPTIONS if option.has_flag)
SWITCHES = config_file.PLAIN_SWITCHES | {f"--{option.name}" for option in FLAG_OPTIONS if not option.metavar}
"""The flags of ``run`` without a value."""
STEPS_OR_TIME_FLAGS = tuple(f"--{option.name}" for option in FLAG_OPTIONS if option.metavar == "N|TIME")
OPTIONS_WITHOUT_FLAG = tuple(option for option in OPTIONS if option.help and not option.has_flag)


class GivenValue(NamedTuple):
    """A setting's value, the source as an error names it, and the source in a word or two."""

    value: Any
    source: str
    origin: str


def find_value(
    option: Option,
    given: Mapping[str, Any],
    sources: Mapping[str, str],
    environ: Mapping[str, str],
    file: Mapping[str, Entry] | None = None,
) -> GivenValue:
    """Return an option's value as it was given, the variable's, the file's, or the default.

    ``given`` has values by field: arguments of `er.resume()`, or flags. ``sources`` says for an error where
    each came from. ``file`` has the entries of `check_keys`.
    """
    value, source = given.get(option.field), sources.get(option.field, option.field)
    if value is not None and not (value == "" and option.parse is validate_directory_name):
        return GivenValue(value, source, source)
    if environ.get(option.variable):
        return GivenValue(environ[option.variable], option.variable, option.variable)
    if file and option.field in file:
        entry = file[option.field]
        return GivenValue(entry.text, entry.source, entry.where)
    return GivenValue(option.default, option.variable, DEFAULT)


def read_option(
    option: Option,
    given: Mapping[str, Any],
    sources: Mapping[str, str],
    environ: Mapping[str, str],
    file: Mapping[str, Entry] | None = None,
) -> Any:
    """Return an option's parsed value; see `find_value`."""
    found = find_value(option, given, sources, environ, file)
    return None if found.value is None else option.parse(found.source, found.value)


_WORKER_OPTIONS = tuple(option for option in MECHANISM_OPTIONS if option.is_for_workers)


def read_worker_options(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of mechanisms' options that a training process reads, by their fields."""
    file = _read_file_of_worker(environ) if _WORKER_OPTIONS else {}
    return {option.field: read_option(option, {}, {}, environ, file) for option in _WORKER_OPTIONS}


def export_worker_options(args: argparse.Namespace) -> dict[str, str]:
    """Return the variables from which `read_worker_options` reads the values of `parse_flags`."""
    given = {option.variable: args.origins[option.field][0] for option in _WORKER_OPTIONS}
    return {variable: "" if value is None else str(value) for variable, value in given.items()}


def describe_missing_flag(name: str) -> str:
    """Return how to give a setting that has no flag; empty if there is no such setting."""
    variables = {option.field: option.variable for option in OPTIONS_WITHOUT_FLAG}
    variable = variables.get(name.replace("-", "_"))
    if not variable:
        return ""
    return f"{name} has no flag: set {variable}, or write {name.replace('_', '-')} in the file of --config."


def find_misspelled_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a message for each unknown variable ELASTIC_RESUME_* whose name resembles a setting's."""
    fields_by_word = {option.field.upper(): option.variable for option in OPTIONS}
    known = {*fields_by_word.values(), *(v for k, v in vars(constants).items() if k.startswith("ENV_"))}
    known.update(*environment.KUBERNETES_VARIABLES.values())
    messages = []
    for name in sorted(environ):
        if name.startswith(constants.ENV_PREFIX) and name not in known:
            word = name.removeprefix(constants.ENV_PREFIX)
            similar = difflib.get_close_matches(word, fields_by_word, 1, 0.75)
            messages += [f"{name} is not a setting: did you mean {fields_by_word[s]}?" for s in similar]
    return messages


def mask_command(words: Sequence[str]) -> list[str]:
    """Return a command line with the values of our flags as `Option.show` shows them."""
    shown = {f"--{option.name}": option.show for option in FLAG_OPTIONS if option.show is not str}
    masked: list[str] = []
    for previous, word in zip(["", *words], words, strict=False):
        flag, equals, value = word.partition("=")
        before = shown.get(previous.replace("_", "-"))
        own = shown.get(flag.replace("_", "-")) if equals else None
        masked.append(before(word) if before else f"{flag}={own(value)}" if own else word)
    return masked


# ---- an agent around this process ----------------------------------------------------------------------

# What an agent sets for its workers, beside the settings.
_AGENT_VARIABLES = (
    constants.ENV_RUN_ID, constants.ENV_AGENT_PID, constants.ENV_EVENTS_PATH, constants.ENV_EVIDENCE,
    constants.ENV_GENERATION, constants.ENV_LAST_STEP, constants.ENV_LOCAL_HOST, constants.ENV_LEASE_PAGE,
    constants.ENV_FORK_SERVER, constants.ENV_MAX_RESTARTS, constants.ENV_EARLY_START, constants.ENV_PARKED,
    constants.ENV_STATE_BYTES, constants.ENV_NEW_PROCESS, constants.ENV_SUPERVISOR_FD, constants.ENV_SLOTS,
    constants.ENV_LOCAL_RANK, constants.ENV_COMMITTER, constants.ENV_MTBF_S, constants.ENV_LAUNCH,
    constants.ENV_WORKER_KEY, constants.ENV_NOTICE_PAGE,
)  # fmt: skip


def forget_outer_agent(environ: MutableMapping[str, str]) -> bool:
    """Remove the variables of an agent whose worker has started this job; return whether there is one.

    An evaluation that a worker starts by a launcher of its own is another job, on this node alone. Its
    default run id names the outer job and its local rank, since both may run the same script.
    """
    if constants.ENV_AGENT_PID not in environ:
        return False
    outer, rank = environ.get(constants.ENV_RUN_ID, "job"), environ.get(constants.ENV_LOCAL_RANK, "0")
    environ[constants.ENV_OUTER_JOB] = f"{outer}-r{rank}"
    for name in (*_AGENT_VARIABLES, constants.ENV_RESUME_FROM):  # it names a state of the outer job
        environ.pop(name, None)
    return True


def forget_agent_around_torchrun(environ: MutableMapping[str, str]) -> None:
    """Forget an agent whose worker has started a torchrun, whose worker this process is."""
    run_id = environ.get(constants.ENV_RUN_ID)
    if environ.get("TORCHELASTIC_RUN_ID", run_id) != run_id:
        forget_outer_agent(environ)


# ---- settings ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What a user decides about one job on one node. Every instance is valid."""

    ckpt_dir: Path
    run_id: str
    node_name: str
    save_every: IntervalSetting
    keep: int
    resume: str
    step_mark_s: float = DEFAULT_STEP_MARK_S  # minimum seconds between a rank's `step` events; 0: each step
    snapshot_every: IntervalSetting = AUTO
    snapshot_memory: int | None = None  # bytes for this node's snapshots; None: auto, 0: off
    check_replicas: IntervalSetting = AUTO  # steps or auto, not time: all nodes compare the same step
    transfer_addr: str | None = None  # where other nodes take the state from this one; None: auto
    prove: str = proof.FIRST
    resume_from: str | None = None  # the state to which the job goes back; None: no request
    archive: str = ""  # address of the tier that outlives all nodes; empty: none

    @property
    def node_dir(self) -> Path:
        """The node's directory."""
        return self.ckpt_dir / self.run_id / self.node_name

    def to_env(self) -> dict[str, str]:
        """Return the environment variables from which `for_worker` reads the same settings."""
        return {
            constants.ENV_PREFIX + name.upper(): _NONE_TEXTS.get(name, "auto")
            if value is None
            else str(value)
            for name, value in vars(self).items()
        }

    @classmethod
    def for_agent(
        cls,
        args: argparse.Namespace,
        environ: Mapping[str, str],
        scheduler: environment.SchedulerContext | None = None,
    ) -> Settings:
        """Build the settings of ``elastic-resume run``.

        ``args`` are from `parse_flags`. The scheduler's name of the job is the fallback for the run id.
        """
        script = args.training_script.rpartition(".")[2] if args.module else args.training_script
        # torchrun's default for --rdzv-id is the word "none"; PET_RDZV_ID may have replaced it.
        fallback = args.rdzv_id if args.rdzv_id != "none" else None
        if fallback is None and scheduler is not None:
            fallback = scheduler.job
            if scheduler.scheduler == "slurm":
                # Two training scripts in one allocation must not resume from each other's checkpoints.
                fallback = environment.sanitize_name(f"{fallback}-{Path(script).stem}", fallback)
        return cls._complete({name: getattr(args, name) for name in _FIELDS}, environ, fallback, script)

    @classmethod
    def for_worker(cls, environ: Mapping[str, str], argv0: str, **overrides: Any) -> Settings:
        """Build the settings of a training process, under any launcher.

        The stem of ``argv0`` is the last fallback for the run id. ``overrides`` are arguments of
        ``er.resume()``, named as the fields here; None means not given.
        """
        unknown = set(overrides) - set(_FIELDS)
        if unknown:
            raise ConfigError(f"there is no setting {', '.join(sorted(unknown))}.")
        if constants.ENV_AGENT_PID in environ:
            # They name the directory that the agent has locked; another one would have no owner.
            overrides = {k: v for k, v in overrides.items() if k not in AGENT_SETTINGS}
        launcher = environ.get("TORCHELASTIC_RUN_ID", "none")
        # torchrun --standalone invents a uuid at each start; under that name nothing would be found again.
        fallback = None if launcher == "none" or _UUID.fullmatch(launcher) else launcher
        path = Path(argv0)
        script = path.parent.name if path.name == "__main__.py" else argv0
        file = _read_file_of_worker(environ)
        values = {
            option.field: read_option(option, overrides, {}, environ, file)
            for option in OPTIONS
            if option.field in _FIELDS
        }
        return cls._complete(values, environ, fallback, script)

    @classmethod
    def _complete(
        cls, values: dict[str, Any], environ: Mapping[str, str], fallback_run_id: str | None, script: str
    ) -> Settings:
        """Fill in the names that were not given. A launcher's name of the job may be unsuitable."""
        if values["run_id"] is None:
            name = "-".join(filter(None, [environ.get(constants.ENV_OUTER_JOB), Path(script).stem]))
            run_id = fallback_run_id or environment.sanitize_name(name, "job")
            values["run_id"] = validate_directory_name("--rdzv-id", run_id)
        if values["resume"] == "never" and values["resume_from"] is not None:
            raise ConfigError(
                "--resume never starts fresh, and --resume-from goes back to a saved state: give one of them."
            )
        values["node_name"] = values["node_name"] or environment.read_context(environ).name
        return cls(**values)


_NONE_TEXTS = {"resume_from": ""}  # what None is as a variable, where it is not "auto"
# A field whose option is a mechanism's is unknown without that mechanism.
_FIELDS = tuple(field.name for field in fields(Settings) if any(o.field == field.name for o in OPTIONS))


def _read_file_of_worker(environ: Mapping[str, str]) -> dict[str, Entry]:
    """Read the settings of a file that no agent has read: under it they are variables already."""
    path = environ.get(constants.ENV_CONFIG)
    if not path or constants.ENV_AGENT_PID in environ:
        return {}
    actions = actions_by_flag(config_file.list_torchrun_flags())
    return check_keys(config_file.read_file(path, environ), actions)


# ---- flags ---------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one-line ConfigErrors that suggest names for unknown flags."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage and exiting with 2."""
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            unknown = [word for word in message[len(prefix) :].split() if word.startswith("-")]
            flag = (unknown or [message[len(prefix) :]])[0].partition("=")[0]
            known = actions_by_flag(self)
            message = describe_missing_flag(flag.removeprefix("--")) if "--save-every" in known else ""
            kind = "flag" if unknown else "argument"
            if flag == "--archive" and "--save-every" not in known:
                message = (
                    "this command has no --archive: give the address alone, as s3://BUCKET/PREFIX/RUN_ID."
                )
            message = message or f"unknown {kind} {flag}.{suggest_similar(flag, known)}"
        elif unknown_command := re.fullmatch(
            r"argument COMMAND: invalid choice: '(.*)' \(choose from (.*)\)", message
        ):
            name, names = unknown_command.groups()
            message = (
                f"unknown command {name}.{suggest_similar(name, names.replace(chr(39), '').split(', '))}"
            )
        elif invalid := re.fullmatch(
            r"argument (?:-\w/)?(--[\w-]+)\S*: invalid (int|float) value: (.*)", message
        ):
            flag, kind, value = invalid.groups()
            message = f"{flag} is {value}: write a {'whole ' if kind == 'int' else ''}number."
        raise ConfigError(f"{message} (see {self.prog} --help)")


def actions_by_flag(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return each option string of ``parser`` with its action; argparse has no public accessor."""
    return {flag: action for action in parser._actions for flag in action.option_strings}  # noqa: SLF001


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add elastic_resume's flags to torchrun's parser, in their own group. None means not given."""
    group = parser.add_argument_group(
        "elastic_resume",
        "A flag beats the environment (ELASTIC_RESUME_*, PET_*), which beats the file of --config. An "
        "argument of er.resume() beats them all, except for ckpt-dir, rdzv-id and node-name. TIME is a "
        "number of seconds, or has a unit: 500ms, 30s, 5m, 1.5h. For "
        f"{', '.join(STEPS_OR_TIME_FLAGS[:-1])} and {STEPS_OR_TIME_FLAGS[-1]} a bare number is steps.",
    )
    for option in FLAG_OPTIONS:
        text = option.help + (f"; {option.details}" if option.details else "")
        names = dict.fromkeys([f"--{option.name}", f"--{option.field}"])
        if option.metavar is None:
            group.add_argument(*names, help=text, action="store_const", const="true")
        else:
            text += f" (default {option.default_text})"
            group.add_argument(*names, help=text, metavar=option.metavar)
    group.add_argument(config_file.FLAG, metavar="FILE", help=CONFIG_HELP)
    group.add_argument("--show-config", "--show_config", action="store_true", help=SHOW_CONFIG_HELP)


def check_keys(file: ConfigFile, actions: Mapping[str, argparse.Action]) -> dict[str, Entry]:
    """Return the entries of a file by destination; ``actions`` are those of torchrun's parser, or of `run`.

    Raises:
        ConfigError: a key is unknown, or its value has the wrong form.

    """
    ours = {option.name: option for option in OPTIONS if option.help}
    known = {
        flag.removeprefix("--"): action
        for flag, action in actions.items()
        if flag.startswith("--") and "_" not in flag and action.dest not in NO_KEYS
    }
    entries = {}
    for name, entry in file.settings.items():
        if name not in ours and name not in known:
            names = [*ours, *known, config_file.SCRIPT, config_file.SCRIPT_ARGS, config_file.ENV]
            similar = " Write rdzv-id." if name == "run-id" else suggest_similar(name, names)
            raise ConfigError(
                f"{entry.where}: unknown key {entry.key!r}.{similar} (keys are flags without dashes; see "
                "elastic-resume run --help-all)"
            )
        has_commas = name in COMMA_KEYS or (name in ours and (ours[name].metavar or "").endswith(",..."))
        allowed = {
            "scalar",
            *(["sequence"] if has_commas else []),
            *(["mapping"] if name == "rdzv-conf" else []),
        }
        if entry.shape not in allowed:
            raise ConfigError(f"{entry.source} is a {entry.shape}: write one value.")
        if name in ours:
            ours[name].parse(entry.source, entry.text)
        elif known[name].nargs == 0:
            parse_switch(entry.source, entry.text)
        entries[name.replace("-", "_")] = entry
    _check_variables(file.env)
    return entries


def _check_variables(env: Mapping[str, Entry]) -> None:
    """Refuse variables of the workers that are settings, or that an agent sets."""
    keys = {option.variable: option.name for option in OPTIONS if option.help}
    keys[constants.ENV_RUN_ID] = "rdzv-id"
    for name, entry in env.items():
        key = keys.get(name) or (name[4:].lower().replace("_", "-") if name.startswith("PET_") else "")
        if key:
            raise ConfigError(f"{entry.source}: write {key}: at the top of the file instead.")
        if name in {*_AGENT_VARIABLES, constants.ENV_CONFIG}:
            raise ConfigError(f"{entry.source} is no setting: an agent sets it. Remove it.")


def parse_given(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """Parse the flags; return those that are given, by destination, and whether a script is.

    Raises:
        ConfigError: they are wrong, apart from a missing script.

    """
    missing = object()
    dests = {action.dest for action in actions_by_flag(parser).values()}

    def parse(words: Sequence[str]) -> dict[str, Any]:
        args = parser.parse_args(words, argparse.Namespace(**dict.fromkeys(dests, missing)))
        return {dest: value for dest in dests if (value := getattr(args, dest)) is not missing}

    try:
        return parse(argv), True
    except ConfigError:
        with contextlib.suppress(ConfigError):
            return parse([*argv, config_file.SCRIPT]), False
        raise


def parse_flags(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    file: ConfigFile | None = None,
) -> tuple[argparse.Namespace, set[str]]:
    """Parse the flags and the file of ``--config``, and read every setting of ours.

    ``file`` is what was read already: a pipe can be read once, and a file may change.

    Returns the values, and the names of those given by flag or file; the others come from the environment or
    are defaults. Our settings are parsed, and torchrun's are as its parser returns them. ``args.run_id`` and
    ``args.node_name`` are None if not given. ``args.sources`` says for an error where each given value is,
    ``args.origins`` has the text and the source of each given value of flag, variable or file, and
    ``args.file`` is the `ConfigFile`.
    """
    flags, has_script = parse_given(parser, argv)
    path = flags["config"] if "config" in flags else environ.get(constants.ENV_CONFIG) or None
    if file is not None and file.path != (path or ""):
        raise ConfigError(f"write {config_file.FLAG} in full: the file's env is read before the other flags.")
    if file is None:
        file = ConfigFile() if path is None else config_file.read_file(path, environ)
    entries = check_keys(file, actions_by_flag(parser))
    sources = {dest: f"--{dest.replace('_', '-')}" for dest in flags}
    words = _list_torchrun_words(parser, entries)
    for dest in [dest for dest in words if dest in flags or f"PET_{dest.upper()}" in environ]:
        words[dest] = ""
        if dest != "rdzv_conf":
            del entries[dest]
    if not has_script and file.script is not None:
        argv = [*argv, file.script.text, *(entry.text for entry in file.script_args)]
        sources["training_script"] = file.script.where
    elif not has_script and path is not None:
        raise ConfigError(
            f"{path} names no script: write script: train.py in it, or name it behind the flags."
        )
    args = parser.parse_args([*filter(None, words.values()), *argv])
    if "rdzv_conf" in entries and not words["rdzv_conf"]:
        # One key of a flag leaves the file's other keys, such as the secret.
        args.rdzv_conf = f"{entries['rdzv_conf'].text},{args.rdzv_conf}".rstrip(",")
    values = {option.field: flags[option.field] for option in FLAG_OPTIONS if option.field in flags}
    if "rdzv_id" in flags:
        values["run_id"], sources["run_id"] = args.rdzv_id, sources["rdzv_id"]
    of_file = {**entries, **({"run_id": entries["rdzv_id"]} if "rdzv_id" in entries else {})}
    args.origins = {}
    for option in OPTIONS:
        found = find_value(option, values, sources, environ, of_file)
        args.origins[option.field] = (found.value, found.origin)
        setattr(args, option.field, None if found.value is None else option.parse(found.source, found.value))
    args.sources = {**{dest: entry.source for dest, entry in entries.items()}, **sources}
    args.file, args.file_entries = file, entries
    return args, flags.keys() | entries.keys()


def _list_torchrun_words(parser: argparse.ArgumentParser, entries: Mapping[str, Entry]) -> dict[str, str]:
    """Return a word for each entry of torchrun's flags; empty for a switch that is off."""
    ours = {option.field for option in OPTIONS}
    words = {}
    for dest, entry in entries.items():
        if dest in ours:
            continue
        flag = f"--{dest.replace('_', '-')}"
        is_switch = actions_by_flag(parser)[flag].nargs == 0
        words[dest] = f"{flag}={entry.text}"
        if is_switch:
            words[dest] = flag if parse_switch(entry.source, entry.text) else ""
        try:
            parser.parse_known_args([*filter(None, [words[dest]]), config_file.SCRIPT])
        except ConfigError as error:
            raise ConfigError(f"{entry.where}: {error}") from error
    return words
