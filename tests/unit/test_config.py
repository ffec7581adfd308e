"""Settings: where each value comes from, and what a wrong one is answered with."""

from __future__ import annotations

import argparse
import dataclasses
import socket
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import config, constants
from elastic_resume.config import Settings
from elastic_resume.errors import ConfigError
from elastic_resume.option import Option
from elastic_resume.policy.checkpoint_interval import IntervalSetting
from elastic_resume.schedulers import environment

OFF, STEPS = IntervalSetting(is_off=True), IntervalSetting(steps=3)


class _Env(argparse.Action):
    """As torch.distributed.argparse_util.env: the default comes from PET_*; here from a fixed table."""

    environ: dict[str, str] = {"role": "from-environment", "standalone": "1"}  # noqa: RUF012

    def __init__(self, dest: str, default: Any = None, **kwargs: Any) -> None:
        super().__init__(dest=dest, default=self.environ.get(dest, default), **kwargs)

    def __call__(self, _parser: Any, namespace: argparse.Namespace, values: Any, _option: Any = None) -> None:
        setattr(namespace, self.dest, True if self.nargs == 0 else values)


def make_parser() -> config.Parser:
    """A parser shaped as torchrun's, with our flags."""
    parser = config.Parser(prog="elastic-resume run")
    parser.add_argument("--nnodes", action=_Env, default="1:1")
    parser.add_argument("--role", action=_Env, default="default")
    parser.add_argument("--rdzv-id", "--rdzv_id", action=_Env, default="none")
    parser.add_argument("--max-restarts", "--max_restarts", action=_Env, type=int, default=0)
    parser.add_argument("--start-method", action=_Env, choices=["spawn", "fork"], default="spawn")
    parser.add_argument("--standalone", action=_Env, nargs=0, default=False)
    parser.add_argument("-m", "--module", action=_Env, nargs=0, default=False)
    parser.add_argument("--duplicate-stdout-filters", type=lambda text: text.split(","), default=[])
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    config.add_flags(parser)
    return parser


def parse(*words: str, **environ: str) -> tuple[argparse.Namespace, set[str]]:
    """Parse a command line."""
    line = [*words, "train.py", "--keep", "of-the-script"]
    return config.parse_flags(make_parser(), line, environ)


def settings_of(*words: str, **environ: str) -> Settings:
    """Settings of a command line and an environment."""
    return Settings.for_agent(parse(*words, **environ)[0], environ)


# ---- precedence ----------------------------------------------------------------------------------------


def test_parser_leaves_arguments_after_script_to_script() -> None:
    """--keep after the script's name is the script's argument."""
    args, given = parse()
    assert args.training_script_args == ["--keep", "of-the-script"]
    assert "keep" not in given


def test_empty_ckpt_dir_flag_is_refused() -> None:
    """An unset shell variable must not become the current directory."""
    with pytest.raises(ConfigError, match="--ckpt-dir is '': write the path of a directory"):
        settings_of("--ckpt-dir=")


@pytest.mark.parametrize("option", config.OPTIONS, ids=lambda option: option.name)
def test_each_setting_has_variable_and_maybe_flag(option: Option, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag beats the variable."""
    seen: list[tuple[str, str]] = []
    probe = dataclasses.replace(option, parse=lambda source, text: seen.append((source, str(text))))
    monkeypatch.setattr(config, "OPTIONS", (probe,))
    parse(**{option.variable: "true"})
    assert seen == [(option.variable, "true")]
    seen.clear()
    flag = [f"--{option.name}", *([] if option.metavar is None else ["true"])]
    if option.has_flag:
        parse(*flag, **{option.variable: "off"})
        assert seen == [(f"--{option.name}", "true")]
    else:
        said = f"{option.name} has no flag: set {option.variable}." if option.help else "unknown flag"
        with pytest.raises(ConfigError, match=f"^{said}"):
            parse(*flag)


def test_misspelled_variable_is_named_with_similar_setting() -> None:
    """Variables that agents and manifests set are known; names unlike any setting are left alone."""
    environ = {
        "ELASTIC_RESUME_GRACE_S": "5",
        "ELASTIC_RESUME_NODES": "3",
        "ELASTIC_RESUME_AGENT_PID": "1",
        "ELASTIC_RESUME_CHAOS_SEED": "1",
        "ELASTIC_RESUME_KEEP": "3",
    }
    assert config.find_misspelled_variables(environ) == [
        "ELASTIC_RESUME_GRACE_S is not a setting: did you mean ELASTIC_RESUME_GRACE?"
    ]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--kepe", r"unknown flag --kepe. Did you mean --keep"),
        ("--save-evry=3", r"unknown flag --save-evry. Did you mean --save-every"),
        ("--xyzzy", r"unknown flag --xyzzy. \(see elastic-resume run --help\)"),
        ("--start-method=thread", "invalid choice: 'thread'"),
    ],
)
def test_unknown_flag_error_suggests_similar_names(word: str, said: str) -> None:
    """The message has one line, without argparse's usage."""
    with pytest.raises(ConfigError, match=said) as caught:
        parse(word)
    assert "\n" not in str(caught.value)


# ---- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1", "0", "-3"])
def test_keep_below_two_is_refused(text: str) -> None:
    """The only checkpoint may be the corrupt one."""
    with pytest.raises(ConfigError, match="turns out corrupt leaves nothing to resume from"):
        settings_of(f"--keep={text}")


@pytest.mark.parametrize("bad", ["a/b", "..", "-x", "", "a b", "é", "x" * 129])
def test_name_that_is_no_directory_name_is_refused(bad: str) -> None:
    """The message has the allowed characters; an empty name counts as not given."""
    if not bad:
        assert Settings.for_worker({}, "t.py", run_id=bad).run_id == "t"
        return
    with pytest.raises(ConfigError, match="at most 128 letters, digits"):
        Settings.for_worker({}, "t.py", run_id=bad)
    with pytest.raises(ConfigError, match="node_name is"):
        Settings.for_worker({}, "t.py", node_name=bad)


def test_resume_mode_error_suggests_mode_and_explains_paths() -> None:
    """Earlier versions accepted a path."""
    with pytest.raises(ConfigError, match="Did you mean auto"):
        Settings.for_worker({}, "t.py", resume="atuo")
    with pytest.raises(
        ConfigError, match=r"resume is 'model.pt': write auto, must or never.*load it into the model"
    ):
        Settings.for_worker({}, "t.py", resume="model.pt")


@pytest.mark.parametrize(
    ("words", "environ", "run_id"),
    [
        ((), {}, "train"),
        (("--rdzv-id", "flag"), {"ELASTIC_RESUME_RUN_ID": "env"}, "flag"),
        ((), {"ELASTIC_RESUME_RUN_ID": "env"}, "env"),
        (("-m",), {}, "py"),  # a module named train.py: its last name
    ],
)
def test_run_id_under_agent_prefers_flag_then_variable_then_script(
    words: tuple[str, ...], environ: dict[str, str], run_id: str
) -> None:
    """The flag is --rdzv-id."""
    assert settings_of(*words, **environ).run_id == run_id


@pytest.mark.parametrize(
    ("words", "environ", "run_id"),
    [
        ((), {}, "slurm-7-train"),
        ((), {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "1"}, "slurm-6_1-train"),
        (("--rdzv-id", "flag"), {}, "flag"),
        ((), {"ELASTIC_RESUME_RUN_ID": "env"}, "env"),
    ],
)
def test_run_id_of_slurm_job_contains_script_name(
    words: tuple[str, ...], environ: dict[str, str], run_id: str
) -> None:
    """Otherwise a second script would resume from the checkpoints of the first."""
    environ = {"SLURM_JOB_ID": "7", **environ}
    args = parse(*words, **environ)[0]
    assert Settings.for_agent(args, environ, environment.read_context(environ)).run_id == run_id


@pytest.mark.parametrize(
    ("environ", "argv0", "run_id"),
    [
        ({}, "/x/train-v1.py", "train-v1"),
        ({}, "/x/my pkg/__main__.py", "my-pkg"),
        ({}, "-c", "c"),
        ({}, "", "job"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "t.py", "t"),
        ({"TORCHELASTIC_RUN_ID": "0f5e0f5e-0f5e-0f5e-0f5e-0f5e0f5e0f5e"}, "t.py", "t"),
        ({"TORCHELASTIC_RUN_ID": "night-7"}, "t.py", "night-7"),
        ({"TORCHELASTIC_RUN_ID": "night-7", "ELASTIC_RESUME_RUN_ID": "e"}, "t.py", "e"),
    ],
)
def test_run_id_in_worker_ignores_uuid_of_standalone(
    environ: dict[str, str], argv0: str, run_id: str
) -> None:
    """A uuid that torchrun invents at each start would never be found again."""
    assert Settings.for_worker(environ, argv0).run_id == run_id


def test_worker_settings_prefer_arguments_over_environment() -> None:
    """Arguments may be typed values or text."""
    found = Settings.for_worker(
        {"ELASTIC_RESUME_KEEP": "5", "ELASTIC_RESUME_CKPT_DIR": "/env"},
        "t.py",
        keep=2,
        save_every=IntervalSetting(steps=7),
        ckpt_dir=None,
    )
    assert (found.keep, found.save_every.steps, found.ckpt_dir) == (2, 7, Path("/env"))


def test_settings_defaults_are_valid_and_absolute() -> None:
    """The script may change its working directory."""
    found = Settings.for_worker({}, "t.py")
    assert found.ckpt_dir == Path.cwd() / "checkpoints"
    assert (found.keep, found.save_every, found.resume) == (3, IntervalSetting(), "auto")
    assert (found.snapshot_every, found.snapshot_memory, found.check_replicas) == (
        IntervalSetting(),
        None,
        IntervalSetting(),
    )


@pytest.mark.parametrize(
    "agent",
    [
        Settings(Path("/c"), "job", "n1", IntervalSetting(seconds=1.5), 4, "never", 0.1),
        Settings(Path("/c"), "job", "n1", IntervalSetting(), 2, "auto", 5.0, OFF, 0, OFF),
        Settings(Path("/c"), "job", "n1", IntervalSetting(), 2, "auto", 5.0, STEPS, 2**53 + 1, STEPS),
    ],
)
def test_settings_survive_environment_round_trip(agent: Settings) -> None:
    """to_env and for_worker are inverse for every setting."""
    assert Settings.for_worker(agent.to_env(), "other.py") == agent
    assert len(agent.to_env()) == len(dataclasses.fields(Settings))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("auto", None),
        ("off", 0),
        ("0", 0),
        ("4GB", 4 * 10**9),
        ("4 gb", 4 * 10**9),
        ("512MiB", 512 * 2**20),
        ("512Mi", 512 * 2**20),
        ("1.5G", 3 * 2**29),
        ("100k", 100 * 2**10),
        ("2T", 2**41),
        ("1234567", 1234567),
    ],
)
def test_snapshot_memory_accepts_sizes(text: str, size: int | None) -> None:
    """Bytes, or a number with a unit."""
    assert settings_of(ELASTIC_RESUME_SNAPSHOT_MEMORY=text).snapshot_memory == size


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("SNAPSHOT_MEMORY", "-4G", "write a size .4GB, 512MiB, 1.5G., auto or off"),
        ("SNAPSHOT_MEMORY", "1.5", "SNAPSHOT_MEMORY is '1.5': write a size"),
        ("SNAPSHOT_MEMORY", "50%", "write a size"),
        ("SNAPSHOT_MEMORY", "4B", "write a size"),
        ("SNAPSHOT_MEMORY", "1e9", "write a size"),
        ("SNAPSHOT_MEMORY", "autos", "Did you mean auto"),
        ("SNAPSHOT_MEMORY", "9" * 19, "more than any node has"),
        ("SNAPSHOT_MEMORY", "9" * 5000, "write a size"),
        ("SNAPSHOT_MEMORY", "2000000T", "more than any node has"),
        (
            "SNAPSHOT_EVERY",
            "never",
            r"write a number of steps \(100\), a time \(30s, 5m\), auto or off",
        ),
        ("SAVE_EVERY", "off", r"SAVE_EVERY is 'off': .* a time \(30s, 5m\) or auto"),
        ("CHECK_REPLICAS", "30s", r"CHECK_REPLICAS is '30s': write a number of steps \(100\), auto or off"),
        ("TRANSFER_ADDR", "192.0.2.7", "no address and no network interface of this machine: .*lo"),
        ("TRANSFER_ADDR", "ib9", "write one of its addresses, one of its interfaces"),
        ("NO_WARM", "3", "NO_WARM is '3': write true or false"),
    ],
)
def test_setting_error_shows_accepted_forms(name: str, text: str, said: str) -> None:
    """The message is short and names the setting's source."""
    variable = f"ELASTIC_RESUME_{name}"
    with pytest.raises(ConfigError, match=said) as caught:
        settings_of(**{variable: text})
    assert str(caught.value).startswith(f"{variable} is")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("bad", ["abc", "-1", "nan", "inf"])
def test_step_mark_error_names_variable(bad: str) -> None:
    """The setting has no flag."""
    with pytest.raises(ConfigError, match=f"^ELASTIC_RESUME_STEP_MARK_S is '{bad}': write a time"):
        Settings.for_worker({"ELASTIC_RESUME_STEP_MARK_S": bad}, "t.py")


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, 5.0), ("", 5.0), ("0", 0.0), ("0.25", 0.25), ("250ms", 0.25)]
)
def test_step_mark_is_read_from_environment(text: str | None, seconds: float) -> None:
    """The default is five seconds."""
    environ = {} if text is None else {"ELASTIC_RESUME_STEP_MARK_S": text}
    assert Settings.for_worker(environ, "t.py").step_mark_s == seconds


@pytest.mark.parametrize(
    ("text", "address"), [("auto", None), ("lo", "127.0.0.1"), ("127.0.0.9", "127.0.0.9"), ("::1", "::1")]
)
def test_transfer_address_is_that_of_interface(text: str, address: str | None) -> None:
    """Workers get the address from the agent and read it again."""
    settings = Settings.for_worker({"ELASTIC_RESUME_TRANSFER_ADDR": text}, "t.py")
    assert settings.transfer_addr == address
    assert Settings.for_worker(settings.to_env(), "t.py").transfer_addr == address


def test_worker_settings_refuse_unknown_argument() -> None:
    """A setting of a later version is not ignored."""
    with pytest.raises(ConfigError, match="no setting kepe"):
        Settings.for_worker({}, "t.py", kepe=3)


# ---- the node's name -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "gpu-07"}, "gpu-07"),
        ({"KUBERNETES_SERVICE_HOST": "1", "POD_NAME": "train-2-x7gq1", "HOSTNAME": "train-2"}, "train-2"),
        ({"KUBERNETES_SERVICE_HOST": "1", "HOSTNAME": "train-3"}, "train-3"),
        (
            {"SLURMD_NODENAME": "left over from a login shell"},
            environment.sanitize_name(socket.gethostname(), "node"),
        ),
        ({"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "_odd name!"}, "odd-name"),
    ],
)
def test_node_name_defaults_to_schedulers_then_host(environ: dict[str, str], name: str) -> None:
    """Both are made safe for a directory."""
    assert environment.read_context(environ).name == name


def test_worker_settings_under_agent_keep_agents_directory() -> None:
    """The agent holds the lock of the directory that its own flags name."""
    environ = {constants.ENV_CKPT_DIR: "/agent", constants.ENV_RUN_ID: "job", constants.ENV_NODE_NAME: "n"}
    given: dict[str, Any] = {"ckpt_dir": "/script", "run_id": "other", "node_name": "m", "keep": 5}
    alone = Settings.for_worker(environ, "train.py", **given)
    assert (str(alone.ckpt_dir), alone.run_id, alone.node_name) == ("/script", "other", "m")
    held = Settings.for_worker({**environ, constants.ENV_AGENT_PID: "7"}, "train.py", **given)
    assert (str(held.ckpt_dir), held.run_id, held.node_name, held.keep) == ("/agent", "job", "n", 5)


def test_job_within_a_worker_forgets_the_agent_around_it() -> None:
    """Settings stay, such as the directory of checkpoints. Its run id is its own."""
    outer = {
        "ELASTIC_RESUME_RUN_ID": "train",
        "ELASTIC_RESUME_CKPT_DIR": "/ckpt",
        "ELASTIC_RESUME_AGENT_PID": "7",
        "ELASTIC_RESUME_COMMITTER": "x",
        "ELASTIC_RESUME_SUPERVISOR_FD": "3",
        "ELASTIC_RESUME_LOCAL_RANK": "1",
        "ELASTIC_RESUME_RESUME_FROM": "best",  # of the outer job's checkpoints
        "PATH": "/bin",
    }
    environ = dict(outer)
    assert config.forget_outer_agent(environ)
    assert environ == {
        "ELASTIC_RESUME_CKPT_DIR": "/ckpt",
        "PATH": "/bin",
        "ELASTIC_RESUME_OUTER_JOB": "train-r1",
    }
    assert not config.forget_outer_agent(environ)
    assert Settings.for_worker(environ, "train.py").run_id == "train-r1-train"
    assert Settings.for_worker(environ, "train.py", run_id="mine").run_id == "mine"


@pytest.mark.parametrize(
    ("environ", "forgets"),
    [
        ({}, False),
        ({"TORCHELASTIC_RUN_ID": "none"}, False),
        ({"ELASTIC_RESUME_AGENT_PID": "7"}, False),
        ({"ELASTIC_RESUME_AGENT_PID": "7", "TORCHELASTIC_RUN_ID": "a"}, False),
        ({"ELASTIC_RESUME_AGENT_PID": "7", "TORCHELASTIC_RUN_ID": "none"}, True),
    ],
)
def test_torchrun_within_a_worker_is_told_from_the_agent(environ: dict[str, str], forgets: bool) -> None:
    """It sets another run id."""
    environ = environ | {"ELASTIC_RESUME_RUN_ID": "a"}
    before = dict(environ)
    config.forget_agent_around_torchrun(environ)
    assert (environ != before) == forgets
