"""What nodes compare of the training script, and the workers' grace."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_resume import config, constants
from elastic_resume.agent import torchelastic
from elastic_resume.agent.options import (
    MAX_ARGUMENT_CHARS,
    describe_script_arguments,
    identify_script,
    resolve_grace_s,
)
from elastic_resume.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--lr", "0.1", "a b"], "--lr 0.1 'a b'"), (["--token", "abc"], "--token '***'")],
)
def test_arguments_are_quoted_and_leave_out_secrets(arguments: list[str], text: str) -> None:
    """They are one line."""
    assert describe_script_arguments(arguments) == text


def test_long_arguments_still_differ_if_their_ends_do() -> None:
    """The text is cut, and a digest of all of it follows."""
    first, second = (describe_script_arguments(["x" * 5000 + end]) for end in "ab")
    assert first != second
    assert len(first) < MAX_ARGUMENT_CHARS + 20


def test_script_is_its_name_and_content(tmp_path: Path) -> None:
    """The directory may differ between nodes; a module has a name only."""
    paths = [tmp_path / name / "train.py" for name in "abc"]
    for path, text in zip(paths, ("1", "1", "2"), strict=True):
        path.parent.mkdir()
        path.write_text(text)
    same, equal, other = map(identify_script, map(str, paths))
    assert same == equal != other
    assert same.startswith("train.py (")
    assert identify_script("package.train") == "package.train"


@pytest.mark.parametrize(
    ("words", "environ", "seconds"),
    [
        ([], {}, None),
        ([], {constants.ENV_TERMINATION_GRACE_S: "120"}, 60),
        (["--grace=7"], {constants.ENV_TERMINATION_GRACE_S: "120"}, 7),
        (["--shutdown-timeout=9"], {constants.ENV_TERMINATION_GRACE_S: "120"}, 9),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "8", constants.ENV_TERMINATION_GRACE_S: "120"}, 8),
        (["--shutdown-timeout=9"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "8"}, 9),
        (["--grace=7", "--shutdown-timeout=9"], {}, 7),
    ],
)
def test_worker_grace_defaults_to_half_of_pods_grace(
    words: list[str], environ: dict[str, str], seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent commits in the other half. torchrun's flag and variable come before it, and ours first."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    parser = torchelastic.build_parser()
    if "SHUTDOWN" in f"{words} {environ}".upper() and "--shutdown-timeout" not in parser.format_help():
        pytest.skip("this torch has no --shutdown-timeout")
    args, _ = config.parse_flags(parser, [*words, "train.py"], environ)
    assert resolve_grace_s(args, environ) == seconds


@pytest.mark.parametrize("words", [["--save", "out"], ["--ckpt=x"], ["--nproc", "3"], ["--save-every", "3"]])
def test_flags_of_the_script_may_begin_like_flags_of_ours(words: list[str]) -> None:
    """Argparse refuses a prefix of several flags even behind the script, where torchrun passes it on."""
    args, given = config.parse_flags(torchelastic.build_parser(), ["--keep", "3", "train.py", *words], {})
    assert args.training_script_args == words
    assert {"keep", "save_every", "nproc_per_node"} & given == {"keep"}
    with pytest.raises(ConfigError, match=r"unknown flag --save\. Did you mean --save-every"):
        config.parse_flags(torchelastic.build_parser(), ["--save", "3", "train.py"], {})
