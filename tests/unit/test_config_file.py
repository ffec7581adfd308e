"""The file of ``--config``: each key is read, each mistake has its line, each source its place."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import yaml
from torch.distributed.run import get_args_parser

from elastic_resume import cli, config, config_file, constants
from elastic_resume.agent import options, torchelastic
from elastic_resume.commands import doctor, job_file
from elastic_resume.config import Settings
from elastic_resume.errors import ConfigError
from elastic_resume.mechanisms.registry import MECHANISM_OPTIONS
from elastic_resume.option import Option
from elastic_resume.schedulers import environment
from elastic_resume.testing import rehearsal
from tests.support import job_schema
from tests.support.paths import ROOT

PARSER = torchelastic.build_parser()
OURS = {option.name: option for option in config.OPTIONS if option.help}
TORCHRUNS = {
    action.dest.replace("_", "-"): action
    for action in config.actions_by_flag(get_args_parser()).values()
    if action.dest not in config.NO_KEYS
}
SCHEMA = job_schema.build_schema(PARSER)
VALIDATOR = jsonschema.validators.validator_for(SCHEMA)(SCHEMA)  # jsonschema.validate checks the schema too


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a script; no variable of this machine counts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "1").write_text("")
    return tmp_path


def write(text: str | bytes) -> None:
    """Write job.yaml."""
    Path("job.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())


def parse(text: str, *words: str, **environ: str) -> Any:
    """Parse a command line with a file of this text; give what argparse would give."""
    write(text)
    return config.parse_flags(PARSER, ["--config", "job.yaml", *words], environ)[0]


# ---- keys ----------------------------------------------------------------------------------------------

# A value other than the default for each key, as the file has it.
VALUES: dict[str, str] = {
    "check-compute-every": "500",
    "archive": "s3://bucket/jobs", "archive-every": "1h", "archive-keep": "5",
    "nnodes": "1:3", "nproc-per-node": "2", "rdzv-backend": "c10d", "rdzv-endpoint": "[n0, n1]",
    "rdzv-id": "17", "rdzv-conf": "{join_timeout: 5m, strict: true}", "standalone": "true",
    "max-restarts": "4", "monitor-interval": "0.5", "start-method": "fork", "event-log-handler": "console",
    "role": "trainer", "module": "true", "no-python": "true", "run-path": "true", "log-dir": "logs",
    "redirects": "['0:1', '1:3']", "tee": "3", "local-ranks-filter": "[0, 1]",
    "duplicate-stdout-filters": "[loss, step]", "duplicate-stderr-filters": "[error]", "node-rank": "1",
    "master-addr": "n0", "master-port": "29501", "local-addr": "127.0.0.2", "logs-specs": "default",
    "numa-binding": "node", "signals-to-handle": "[SIGTERM, SIGINT]", "shutdown-timeout": "40",
    "virtual-local-rank": "on", "ckpt-dir": "/x",  "save-every": "30s", "snapshot-every": "off", "keep": "5",
    "resume": "must", "resume-from": "best", "prove": "always", "node-timeout": "5s", "hang-timeout": "2m",
    "grace": "9", "preload": "[json, math]", "metrics": "127.0.0.1:9400", "quiet": "yes", "node-name": "a",
    "on-event": "/bin/true now", "log-metrics": "csv:/x/loss.csv",
    "snapshot-memory": "4GB", "check-replicas": "50", "drain-signals": "[SIGTERM, SIGUSR2]",
    "max-no-progress": "7", "exclude-after": "2", "no-warm": "true", "preemption-notice": "aws",
    "collapse-output": "true",
    "share-compile-cache": "true",
    "transfer-addr": "127.0.0.1",
}  # fmt: skip


def test_table_names_every_key() -> None:
    """A new flag or setting belongs into the table above; an older torch has fewer."""
    assert (OURS.keys() | TORCHRUNS.keys()) - VALUES.keys() == set()


def flag_text(key: str) -> str:
    """The text of a flag that means the same as the value in the table."""
    value = yaml.load(VALUES[key], Loader=yaml.BaseLoader)  # noqa: S506  texts only
    if isinstance(value, dict):
        return ",".join(f"{name}={text}" for name, text in value.items())
    return ",".join(value) if isinstance(value, list) else str(value)


def make_words(key: str) -> list[str]:
    """The flag with that text; of a switch alone."""
    action = config.actions_by_flag(PARSER)[f"--{key}"]
    return [f"--{key}"] if action.nargs == 0 else [f"--{key}={flag_text(key)}"]


@pytest.mark.parametrize("key", sorted(OURS.keys() | TORCHRUNS.keys()))
@pytest.mark.parametrize("written", [str, lambda key: key.replace("-", "_")], ids=["dashes", "underscores"])
def test_key_means_what_its_flag_or_variable_means(key: str, written: Any) -> None:
    """Each key of the reference is read; the value is not the default."""
    dest = key.replace("-", "_")
    found = getattr(parse(f"script: train.py\n{written(key)}: {VALUES[key]}\n"), dest)
    if key in OURS and not OURS[key].has_flag:
        expected, _ = config.parse_flags(PARSER, ["train.py"], {OURS[key].variable: flag_text(key)})
    else:
        expected, _ = config.parse_flags(PARSER, [*make_words(key), "train.py"], {})
    default, _ = config.parse_flags(PARSER, ["train.py"], {})
    assert repr(found) == repr(getattr(expected, dest)) != repr(getattr(default, dest))


def test_script_and_its_arguments_are_read_and_those_of_the_command_line_replace_both() -> None:
    """Words that YAML would make numbers, switches or empty stay as they are."""
    text = "script: train.py\nscript-args: [--epochs, 3, --half, no, '', 1:30, $$x, '${DATA}/a']\n"
    args = parse(text, DATA="/data")
    assert args.training_script == "train.py"
    assert args.training_script_args == ["--epochs", "3", "--half", "no", "", "1:30", "$x", "/data/a"]
    args = parse(text, "other.py", "--config", "its-own.yaml", DATA="/data")
    assert (args.training_script, args.training_script_args) == ("other.py", ["--config", "its-own.yaml"])


def test_env_sets_what_the_environment_has_not() -> None:
    """A secret comes from a variable."""
    write(
        "env: {NCCL_DEBUG: INFO, OMP_NUM_THREADS: 4, EMPTY: '', HF_TOKEN: '${HF_TOKEN}', "
        "TOKENIZERS_PARALLELISM: no}"
    )
    environ = {"NCCL_DEBUG": "WARN", "HF_TOKEN": "abc"}
    config_file.read_file("job.yaml", environ).set_environment(environ)
    assert environ == {
        "NCCL_DEBUG": "WARN",
        "HF_TOKEN": "abc",
        "OMP_NUM_THREADS": "4",
        "EMPTY": "",
        "TOKENIZERS_PARALLELISM": "no",
    }


# ---- wrong files ---------------------------------------------------------------------------------------

SECRET = {"WANDB_API_KEY": "abc", "DIR": ""}
WRONG: list[tuple[str | bytes, str]] = [
    ("kep: 3\n", "job.yaml:1: unknown key 'kep'. Did you mean keep?"),
    (
        "keep: 3\nsave-evry: 3\n",
        "job.yaml:2: unknown key 'save-evry'. Did you mean save-every or ",
    ),
    ("nodes: 3\n", "job.yaml:1: unknown key 'nodes'. Did you mean nnodes"),
    ("scrip: a.py\n", "job.yaml:1: unknown key 'scrip'. Did you mean script"),
    ("run-id: x\n", "job.yaml:1: unknown key 'run-id'. Write rdzv-id."),
    ("config: other.yaml\n", "job.yaml:1: unknown key 'config'."),
    ("--keep: 3\n", "job.yaml:1: unknown key '--keep'. Did you mean keep"),
    ("keep: 3\nrole: a\nkeep: 4\n", "job.yaml:3: keep is given twice, first at job.yaml:1: remove one."),
    ("ckpt-dir: a\nckpt_dir: b\n", "job.yaml:2: ckpt_dir is given twice, first at job.yaml:1"),
    ("keep: many\n", "job.yaml:1: keep is 'many': write a whole number of checkpoints, 2 or more."),
    ("\n\nkeep: 1\n", "job.yaml:3: keep is 1, which is too few"),
    ("keep: true\n", "job.yaml:1: keep is 'true': write a whole number"),
    ("keep: [2, 3]\n", "job.yaml:1: keep is a sequence: write one value."),
    ("keep: {a: 1}\n", "job.yaml:1: keep is a mapping: write one value."),
    ("keep:\n", "job.yaml:1: keep has no value: write one, or leave the key out."),
    ('ckpt-dir: ""\n', "job.yaml:1: ckpt-dir has no value"),
    ("preload: []\n", "job.yaml:1: preload has no value"),
    ("preload: [a, [b]]\n", "job.yaml:1: preload is a sequence: write one value."),
    ("save-every: off\n", "job.yaml:1: save-every is 'off': write a number of steps"),
    (
        "hang-timeout: soon\n",
        "job.yaml:1: hang-timeout is 'soon': write a time in seconds (30) or with a unit",
    ),
    ("snapshot-memory: 50%\n", "job.yaml:1: snapshot-memory is '50%': write a size (4GB"),
    ("resume: atuo\n", "job.yaml:1: resume is 'atuo': write auto, must or never. Did you mean auto?"),
    ("no-warm: 3\n", "job.yaml:1: no-warm is '3': write true or false."),
    ("standalone: maybe\n", "job.yaml:1: standalone is 'maybe': write true or false."),
    ("role: a\nmax-restarts: many\n", "job.yaml:2: --max-restarts is 'many': write a whole number."),
    (
        "start-method: thread\n",
        "job.yaml:1: argument --start-method/--start_method: invalid",
    ),
    ("nnodes: 3:1\n", "job.yaml:1: nnodes is '3:1': write N or MIN:MAX with 1 <= MIN <= MAX."),
    ("tee: 9\n", "job.yaml:1: tee is '9': torchrun takes 0, 1, 2 or 3"),
    ("keep: !!python/object/apply:os.system ['true']\n", "job.yaml:1: keep is a sequence: write one value."),
    ("keep: !!python/name:os.system 3\n", "job.yaml:1: keep has the tag tag:yaml.org,2002:python/name"),
    ("- keep\n", "job.yaml: the file must have lines of the form KEY: VALUE."),
    ("keep 3\n", "job.yaml: the file must have lines of the form KEY: VALUE."),
    ("role: a\nkeep: 3: 4\n", "job.yaml:2: is not YAML: mapping values are not allowed in this context"),
    ("keep: 3\n\trole: a\n", "job.yaml:2: is not YAML:"),
    ("keep: [1\n", "job.yaml:2: is not YAML:"),
    ("keep: 3\n---\nkeep: 4\n", "job.yaml:2: is not YAML:"),
    ("keep: *other\n", "job.yaml:1: is not YAML: found undefined alias"),
    (b"keep: 3\nrole: \xff\n", "job.yaml:2: is not text in UTF-8."),
    ("role: a\x01\n", "job.yaml: is not YAML:"),
    ("? [a, b]\n: 3\n", "job.yaml:1: a key must be a plain name, and not a list or mapping."),
    ("ckpt-dir: ${NOWHERE}/x\n", "job.yaml:1: ckpt-dir needs the variable NOWHERE, which is not set"),
    ("ckpt-dir: $DIR\n", "job.yaml:1: ckpt-dir has a $ without a name: write ${NAME} for a variable, $$ for"),
    ("ckpt-dir: ${DIR:-/x}\n", "job.yaml:1: ckpt-dir has a $ without a name"),
    ("ckpt-dir: ${DIR}\n", "job.yaml:1: ckpt-dir is '': write the path of a directory."),
    ("env:\n  WANDB_API_KEY: abc\n", "job.yaml:2: env WANDB_API_KEY is a secret: keep it out of the file."),
    (
        "script-args:\n- a\n- ${WANDB_API_KEY}\n",
        "job.yaml:3: script-args would show the secret WANDB_API_KEY",
    ),
    ("env: [A]\n", "job.yaml:1: env must have lines of the form KEY: VALUE."),
    ("env: {A-B: c}\n", "job.yaml:1: 'A-B' is no name of a variable: use letters, digits and _."),
    ("env: {A: }\n", "job.yaml:1: env A has no value"),
    (
        "env: {ELASTIC_RESUME_KEEP: 3}\n",
        "job.yaml:1: env ELASTIC_RESUME_KEEP: write keep: at the top of the file",
    ),
    ("env: {PET_NNODES: 3}\n", "job.yaml:1: env PET_NNODES: write nnodes: at the top of the file"),
    ("env: {ELASTIC_RESUME_AGENT_PID: 3}\n", "job.yaml:1: env ELASTIC_RESUME_AGENT_PID is no setting"),
    (
        "nproc-per-node: two\n",
        "job.yaml:1: nproc-per-node is 'two': write a number, or auto, cpu, gpu or xpu",
    ),
    ("rdzv-endpoint: 'a:b:c:d'\n", "job.yaml:1: rdzv-endpoint: 'a:b:c:d' is neither a host name nor"),
    ("rdzv-endpoint: [a, 'b:x']\n", "job.yaml:1: rdzv-endpoint: 'b:x' has no valid port after the colon"),
    ('env: {MY_TOKEN: "pa$$word"}\n', "job.yaml:1: env MY_TOKEN is a secret: keep it out of the file"),
    ("env: {PGPASSWORD: abc}\n", "job.yaml:1: env PGPASSWORD is a secret: keep it out of the file"),
    ("env: {HF_TOKEN_2: abc}\n", "job.yaml:1: env HF_TOKEN_2 is a secret: keep it out of the file"),
    ('script-args: ["a\\0b"]\n', "job.yaml:1: script-args has a null character"),
    ("script-args: --epochs 3\n", "job.yaml:1: script-args must be a list: write [--epochs, 3]"),
    ("script: [a.py]\n", "job.yaml:1: script is a sequence: write one value."),
    ("script: nowhere.py\n", "job.yaml:1: there is no training script 'nowhere.py' in "),
    (
        "rdzv-conf: {join_timeot: 5m}\n",
        "job.yaml:1: rdzv-conf: unknown key join_timeot. Did you mean join_timeout?",
    ),
    ("keep: 3\n", "job.yaml names no script: write script: train.py in it, or name it behind the flags."),
    ("script: train.py\n" + "#" * (1 << 20), "job.yaml: the file of --config has more than 1 MiB"),
]
# The file says something else than a start would need, but nothing that a schema could see.
BEYOND_SCHEMA = re.compile(
    r"twice|names no script|nnodes is|tee is|no training script|not YAML|UTF-8|MiB|secret|the variable"
    r"|has the tag|plain name|without a name|ckpt-dir is ''|at the top|is no setting|is 'two'|null character"
    r"|a host name|valid port"
)


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[message[:60] for _, message in WRONG])
def test_wrong_file_is_named_with_line_and_remedy(
    text: str | bytes, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, and nothing is started; doctor says the same."""
    for name, value in SECRET.items():
        monkeypatch.setenv(name, value)
    needs_script = (
        b"script" not in (text if isinstance(text, bytes) else text.encode()) and "no script" not in message
    )
    if needs_script and isinstance(text, str) and ": " in text and not text.startswith(("-", "?")):
        text += "" if text.endswith("#") or "YAML" in message else "script: train.py\n"
    write(text)
    assert cli.main(["run", "--config", "job.yaml"]) == constants.EXIT_USAGE
    error = capsys.readouterr().err
    assert error.startswith(f"elastic-resume: error: {message}")
    assert error.count("\n") == 1
    assert not Path("checkpoints").exists()
    if isinstance(text, str) and "!!" not in text and not BEYOND_SCHEMA.search(message):
        with pytest.raises(jsonschema.ValidationError):
            VALIDATOR.validate(load(text))


def test_file_from_a_pipe_is_read_once(capsys: pytest.CaptureFixture[str]) -> None:
    """As by ``--config <(sops -d job.yaml)``."""
    Path("train.py").touch()
    reading, writing = os.pipe()
    os.write(writing, b"script: train.py\nkeep: 9\n")
    os.close(writing)
    try:
        words = ["run", "--show-config", "--config", f"/proc/self/fd/{reading}"]
        assert cli.main(words) == constants.EXIT_SUCCESS
    finally:
        os.close(reading)
    assert re.search(r"^keep: 9 ", capsys.readouterr().out, re.MULTILINE)


def test_abbreviated_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Variables of the file would be set too late."""
    write("script: train.py\n")
    assert cli.main(["run", "--conf", "job.yaml"]) == constants.EXIT_USAGE
    assert "write --config in full" in capsys.readouterr().err


def test_init_names_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    """The file is for git."""
    assert cli.main(["init", "train.py", "--api-key", "abc"]) == constants.EXIT_SUCCESS
    assert "looks like a secret, and is there in clear" in capsys.readouterr().out


def test_there_are_thirty_wrong_files() -> None:
    """Each with a message of its own."""
    assert len({message for _, message in WRONG}) >= 30


@pytest.mark.parametrize("path", ["nowhere.yaml", ".", "a\0b"])
def test_file_that_cannot_be_read_is_named(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The message has the operating system's reason."""
    assert cli.main(["run", "--config", path]) == constants.EXIT_USAGE
    assert f"{path}: the file of --config cannot be read: " in capsys.readouterr().err


# ---- sources -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [option for option in config.OPTIONS if option.help], ids=lambda o: o.name)
def test_flag_then_variable_then_file_then_default(option: Option, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same order for all settings; an error names the source that counts."""
    seen: list[tuple[str, str]] = []
    probe = dataclasses.replace(option, parse=lambda source, text: seen.append((source, str(text))))
    monkeypatch.setattr(config, "OPTIONS", (probe,))
    text = f"script: train.py\n{option.name}: file\n"
    parse(text)
    assert seen[-1] == (f"job.yaml:2: {option.name}", "file")
    parse(text, **{option.variable: "variable"})
    assert seen[-1] == (option.variable, "variable")
    if option.has_flag:
        words = [f"--{option.name}"] if option.metavar is None else [f"--{option.name}=flag"]
        args = parse(text, *words, **{option.variable: "variable"})
        assert seen[-1][0] == args.origins[option.field][1] == f"--{option.name}"


def test_variable_of_torchrun_beats_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a switch that is off; a flag beats both."""
    monkeypatch.setenv("PET_ROLE", "variable")
    monkeypatch.setenv("PET_STANDALONE", "0")
    monkeypatch.setattr(__name__ + ".PARSER", torchelastic.build_parser())
    environ = {"PET_ROLE": "variable", "PET_STANDALONE": "0"}
    text = "script: train.py\nrole: file\nstandalone: true\n"
    args = parse(text, **environ)
    assert (args.role, args.standalone) == ("variable", False)
    assert parse(text, "--role", "flag", **environ).role == "flag"


def test_file_beats_the_scheduler() -> None:
    """Slurm's three nodes are what the file does not say."""
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_NODEID": "0",
        "SLURM_STEP_ID": "0",
    }
    here = environment.read_context(environ)
    for text, nnodes in (("", "1:3"), ("nnodes: 2:3\n", "2:3")):
        write(f"script: train.py\n{text}")
        args, given = config.parse_flags(PARSER, ["--config", "job.yaml"], {})
        options.fill_from_scheduler(args, given, here, share_token=False)
        assert args.nnodes == nnodes


def test_flag_of_one_rendezvous_key_leaves_the_others_of_the_file() -> None:
    """A timeout on the command line must not drop the file's secret."""
    text = "script: train.py\nrdzv-conf: {token_file: token, last_call_timeout: 7s}\n"
    conf = parse(text, "--rdzv-conf", "last_call_timeout=9s").rdzv_conf
    assert dict(part.split("=") for part in conf.split(",")) == {
        "token_file": "token",
        "last_call_timeout": "9s",
    }


def test_worker_without_agent_reads_the_file() -> None:
    """Under plain torchrun: the argument, the variable, the file. torchrun's keys are not for it."""
    write("script: train.py\nnproc-per-node: 2\nkeep: 5\nsave-every: 30s\nresume: must\n")
    environ = {constants.ENV_CONFIG: "job.yaml", "ELASTIC_RESUME_SAVE_EVERY": "40s"}
    found = Settings.for_worker(environ, "train.py", resume="never")
    assert (found.keep, str(found.save_every), found.resume) == (5, "40s", "never")
    write("kep: 5\n")
    with pytest.raises(ConfigError, match=r"job.yaml:1: unknown key 'kep'. Did you mean keep"):
        Settings.for_worker(environ, "train.py")
    # An agent has made variables of it.
    assert Settings.for_worker({**environ, constants.ENV_AGENT_PID: "7"}, "train.py").keep == 3


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("--config a.yaml", "a.yaml"),
        ("--config=a.yaml --config b.yaml train.py", "b.yaml"),
        ("--standalone --nnodes 1 -r3 -t 3 -m --config a.yaml", "a.yaml"),
        ("--standal --nproc_per_node=2 --show_config --config a.yaml", "a.yaml"),
        ("train.py --config a.yaml", "variable.yaml"),
        ("--keep 3 train.py --config a.yaml", "variable.yaml"),
        ("--quiet train.py --config a.yaml", "variable.yaml"),
        *(
            (f"--{switch.name} --config a.yaml", "a.yaml")
            for switch in MECHANISM_OPTIONS
            if switch.has_flag and not switch.metavar
        ),
        ("--keep --config", "variable.yaml"),
    ],
)
def test_file_is_found_before_torch_is_imported(line: str, path: str) -> None:
    """The script's own --config is another one."""
    environ = {constants.ENV_CONFIG: "variable.yaml"}
    assert config_file.find_path(line.split(), environ, config.SWITCHES) == path


def test_switches_are_those_of_run() -> None:
    """A flag that is missing there would take the word behind it for its value."""
    actions = config.actions_by_flag(PARSER).items()
    switches = {flag for flag, action in actions if action.nargs == 0 and "_" not in flag}
    assert switches <= config.SWITCHES
    assert not {flag for flag, action in actions if action.nargs != 0} & config.SWITCHES


def test_show_config_names_each_source_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it prints is a file of the same meaning; defaults are comments."""
    monkeypatch.setenv("ELASTIC_RESUME_KEEP", "7")
    monkeypatch.setenv("HF_TOKEN", "hidden-1")
    write(
        "script: train.py\nscript-args: [--lr, 0.1, --api-key=hidden-2, $$a]\nsave-every: 30s\nkeep: 5\n"
        "env: {HF_TOKEN: '${HF_TOKEN}'}\n"
    )
    assert cli.main(["run", "--config", "job.yaml", "--grace", "9", "--show-config"]) == 0
    shown = capsys.readouterr().out
    lines = dict(re.findall(r"^(?:# )?([a-z-]+): .*?  # (.*)$", shown, re.MULTILINE))
    assert lines["keep"] == "ELASTIC_RESUME_KEEP"
    assert (lines["grace"], lines["save-every"], lines["resume"]) == ("--grace", "job.yaml:3", "default")
    assert lines.keys() >= OURS.keys() | TORCHRUNS.keys()
    assert "hidden" not in shown
    assert not Path("checkpoints").exists()
    again = parse(shown, HF_TOKEN="x")  # noqa: S106
    assert (again.keep, str(again.save_every), again.grace) == (7, "30s", 9)
    assert again.training_script_args[-1] == "$a"


# ---- init ----------------------------------------------------------------------------------------------

WITH_FLAG = sorted(key for key in OURS.keys() | TORCHRUNS.keys() if key in TORCHRUNS or OURS[key].has_flag)


def test_file_of_init_means_the_same() -> None:
    """All flags at once, and a script with odd words."""
    odd = [
        "--lr",
        "1e-3",
        "$HOME ${X} $$",
        "",
        "null",
        "a: b",
        "# c",
        "- d",
        "ü\n\t'\"",
        "*",
        "1:30",
        "\x7f",
        "--",
    ]
    words = [word for key in WITH_FLAG for word in make_words(key)]
    assert cli.main(["init", *words, "train.py", *odd]) == 0
    expected, given = config.parse_flags(PARSER, [*words, "train.py", *odd], {})
    text = Path(job_file.DEFAULT_PATH).read_text()
    found, given_again = config.parse_flags(PARSER, ["--config", job_file.DEFAULT_PATH], {})
    assert given_again == given - {"config"} | {"config"}
    ignored = {"sources", "origins", "file", "file_entries", "config"}
    assert {k: v for k, v in vars(found).items() if k not in ignored} == {
        k: v for k, v in vars(expected).items() if k not in ignored
    }
    VALIDATOR.validate(load(text))
    assert text.count("\n# ") >= len(WITH_FLAG)  # each has its help


def test_init_overwrites_on_demand_only(capsys: pytest.CaptureFixture[str]) -> None:
    """And says what is wrong with a flag before it writes."""
    assert cli.main(["init", "--output", "a.yaml", "--keep", "4"]) == 0
    assert "# script: train.py" in Path("a.yaml").read_text()
    assert cli.main(["init", "--output", "a.yaml", "--keep", "5"]) == constants.EXIT_USAGE
    assert "a.yaml is there: give --overwrite to replace it, or another --output." in capsys.readouterr().err
    assert cli.main(["init", "--output", "a.yaml", "--overwrite", "--keep", "1"]) == constants.EXIT_USAGE
    assert "keep: 4" in Path("a.yaml").read_text()
    assert cli.main(["init", "--output", "a.yaml", "--overwrite", "--keep", "5"]) == 0
    assert "keep: 5" in Path("a.yaml").read_text()
    assert cli.main(["init", "--config", "a.yaml"]) == constants.EXIT_USAGE
    assert "init writes a file of flags: leave --config and --show-config out." in capsys.readouterr().err
    assert cli.main(["init", "--output", "no/a.yaml"]) == constants.EXIT_USAGE
    assert "--output no/a.yaml: cannot be written" in capsys.readouterr().err


def test_doctor_checks_a_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started."""
    monkeypatch.setattr(doctor, "_TORCH_PROBE", "print(2, 0)")  # importing torch would take seconds
    write("script: train.py\nkeep: 4\nckpt-dir: /proc/none\n")
    assert cli.main(["doctor", "--config", "job.yaml"]) == constants.EXIT_JOB_ERROR
    said = capsys.readouterr().out
    assert re.search(r"^keep +4 +job.yaml:2$", said, re.MULTILINE)
    assert "A start with --config job.yaml would fail here:" in said
    assert "/proc" in said
    write("script: train.py\nkeep: 1\n")
    assert cli.main(["doctor", "--config", "job.yaml"]) == constants.EXIT_JOB_ERROR
    assert "job.yaml:2: keep is 1, which is too few" in capsys.readouterr().out
    write("script: train.py\nnproc-per-node: two\n")
    assert cli.main(["doctor", "--config", "job.yaml"]) == constants.EXIT_JOB_ERROR
    assert "job.yaml:2: nproc-per-node is 'two': write a number" in capsys.readouterr().out


# ---- the schema ----------------------------------------------------------------------------------------


def load(text: str) -> Any:
    """Load a file as editors do, by YAML 1.2: no sexagesimal numbers, and off is a text."""

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    for tag, pattern, first in (
        ("bool", r"true|false", "tf"),
        ("int", r"[-+]?[0-9]+", "-+0123456789"),
        ("float", r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?", "-+.0123456789"),
        ("null", r"null|~|", ["n", "~", ""]),
    ):
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), list(first))
    return yaml.load(text, Loader=Loader)  # noqa: S506  a subclass of SafeLoader


@pytest.mark.parametrize("key", sorted(VALUES))
def test_schema_takes_each_key(key: str) -> None:
    """With the value of the table, and with a variable."""
    if key in SCHEMA["properties"]:
        value = {"yes": "true", "on": "true"}.get(VALUES[key], VALUES[key])
        VALIDATOR.validate(load(f"script: a.py\n{key}: {value}\n"))
        VALIDATOR.validate({key: "${NAME}"})
    assert "description" in SCHEMA["properties"].get(key, {"description": ""})


def test_schema_in_docs_is_the_generated_one() -> None:
    """Our keys with every torch; torchrun's with the torch of constraints.txt."""
    VALIDATOR.check_schema(SCHEMA)
    written = json.loads(job_schema.PATH.read_text())
    assert {key: written["properties"][key] for key in OURS} == {
        key: SCHEMA["properties"][key] for key in OURS
    }
    if torch.__version__.startswith("2.13."):
        assert job_schema.PATH.read_text() == job_schema.render()


def list_examples() -> list[tuple[str, str]]:
    """The files of examples and deploy, and the blocks of the documentation that are such files."""
    files = [*(ROOT / "examples").glob("*.yaml"), *(ROOT / "deploy").glob("*.yaml")]
    blocks = [
        (page.name, block)
        for page in (ROOT / "docs").rglob("*.md")
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        if re.search(r"^script: ", block, re.MULTILINE)
    ]
    return [*((path.name, path.read_text()) for path in files), *blocks]


@pytest.mark.parametrize(("name", "text"), list_examples(), ids=[name for name, _ in list_examples()])
def test_examples_are_right(name: str, text: str) -> None:
    """The schema takes them, and so does run."""
    assert name
    VALIDATOR.validate(load(text))
    args = parse(text, DATA="/data", WANDB_API_KEY="abc")
    options.check_torchrun_values(args)
    assert args.training_script.endswith(".py")


def test_examples_are_found() -> None:
    """A file and a page at least."""
    assert {"digits.yaml", "job-file.md"} <= {name for name, _ in list_examples()}


def test_rehearsal_takes_script_and_flags_of_a_file() -> None:
    """The simulated nodes get the file too; what a rehearsal decides beats it."""
    write("script: train.py\nscript-args: [--epochs, 3]\nsnapshot-every: 4\nnproc-per-node: 4\n")
    found = rehearsal.parse_command(["--config", "job.yaml", "--grace", "9"])
    assert found.script == ("train.py", "--epochs", "3")
    assert found.flags == ("--config", "job.yaml", "--grace", "9")
    assert (found.snapshot_every, found.workers_per_node) == ("4", 2)


@pytest.mark.cluster
def test_nothing_of_yaml_is_imported_without_a_file() -> None:
    """A start without --config pays nothing: also what it writes into the node's directory needs no YAML."""
    Path("train.py").write_text("print('trained')")
    code = (
        "import sys; from elastic_resume import cli; code = cli.main(['run', '--quiet', 'train.py']); "
        "sys.exit(code or 'yaml' in sys.modules)"
    )
    environ = {key: text for key, text in os.environ.items() if key != constants.ENV_CONFIG}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environ
    )
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[message[:60] for _, message in WRONG])
def test_reader_without_libyaml_gives_the_same_messages(
    text: str | bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyYAML is built without it where no wheel fits; it words errors of the syntax differently."""
    assert message

    def read() -> str:
        try:
            data = text if isinstance(text, bytes) else text.encode()
            config.check_keys(config_file.parse("job.yaml", data, SECRET), config.actions_by_flag(PARSER))
        except ConfigError as error:
            return str(error).partition("is not YAML")[0]
        return ""

    expected = read()
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    assert read() == expected
