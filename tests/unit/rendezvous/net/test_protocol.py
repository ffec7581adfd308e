"""The run's token: which files and values are accepted, and that no error shows it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_resume.constants import ENV_TOKEN
from elastic_resume.errors import ConfigError
from elastic_resume.rendezvous.net.protocol import MAX_TOKEN_BYTES, load_token

RUN = "job"


SECRET = "9f2c-very-secret"  # noqa: S105


def token_file(folder: Path, text: bytes = SECRET.encode(), mode: int = 0o600) -> Path:
    """Write a file with a token."""
    path = folder / "token"
    path.write_bytes(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_token_file_of_the_user_is_read(tmp_path: Path, mode: int) -> None:
    """It precedes the variable. White space around it is dropped. Kubernetes mounts secrets as links."""
    link = tmp_path / "link"
    link.symlink_to(token_file(tmp_path, b" \n" + SECRET.encode() + b"\r\n", mode))
    assert load_token(link, {ENV_TOKEN: "another"}, RUN) == (SECRET.encode(), True)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o666])
def test_token_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    """Others may know the token."""
    with pytest.raises(ConfigError, match=rf"open to other users \(mode {mode:04o}\): chmod 600") as caught:
        load_token(token_file(tmp_path, mode=mode), {}, RUN)
    assert SECRET not in str(caught.value)


def test_token_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That user knows the token and can change it."""
    path = token_file(tmp_path)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        load_token(path, {}, RUN)


def test_token_path_that_is_not_a_file_is_refused(tmp_path: Path) -> None:
    """A directory, a missing file or a pipe, which must not block."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        load_token(pipe, {}, RUN)
    for path in (tmp_path, tmp_path / "absent", tmp_path / "nul\0"):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_token(path, {}, RUN)


def test_token_of_the_environment_is_read() -> None:
    """The bytes are those that a file would hold."""
    assert load_token(None, {ENV_TOKEN: f" {SECRET}\n"}, RUN) == (SECRET.encode(), True)
    assert load_token(None, {ENV_TOKEN: "\udcff" * 16}, RUN) == (b"\xff" * 16, True)


@pytest.mark.parametrize(
    ("token", "problem"),
    [
        (b"", "holds no token"),
        (b" \n\t", "holds no token"),
        (b"x", r"shorter than 16 bytes.*openssl rand -hex 32"),
        (SECRET.encode()[:-1] + b" \n", r"shorter than 16 bytes.*openssl rand -hex 32"),
        (SECRET.encode().ljust(MAX_TOKEN_BYTES + 1, b"x"), "longer than 4096 bytes"),
    ],
)
def test_wrong_token_is_refused(tmp_path: Path, token: bytes, problem: str) -> None:
    """The error names the source and does not show the token."""
    path = token_file(tmp_path, token)
    for file, environ, where in (
        (path, {}, f"token file {path}"),
        (None, {ENV_TOKEN: token.decode()}, ENV_TOKEN),
    ):
        with pytest.raises(ConfigError, match=problem) as caught:
            load_token(file, environ, RUN)
        assert str(caught.value).startswith(where)
        assert SECRET[:-1] not in str(caught.value)


def test_default_token_differs_between_jobs() -> None:
    """It is not the user's secret."""
    (one, secret), (other, _) = load_token(None, {}, "a"), load_token(None, {}, "b")
    assert not secret
    assert one != other
    assert len(one) == 32
