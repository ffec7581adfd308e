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
    """White space around the token is dropped."""
    path = token_file(tmp_path, b" \n" + SECRET.encode() + b"\r\n", mode)
    assert load_token(path, {}, RUN) == (SECRET.encode(), True)


def test_token_file_may_be_a_link(tmp_path: Path) -> None:
    """Kubernetes mounts secrets as links."""
    link = tmp_path / "link"
    link.symlink_to(token_file(tmp_path))
    assert load_token(link, {}, RUN) == (SECRET.encode(), True)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620, 0o602, 0o610, 0o601, 0o666])
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


@pytest.mark.parametrize("text", [b"", b" \n\t"])
def test_empty_token_file_is_refused(tmp_path: Path, text: bytes) -> None:
    """The job does not start without a token."""
    with pytest.raises(ConfigError, match="holds no token"):
        load_token(token_file(tmp_path, text), {}, RUN)


def test_token_longer_than_a_page_is_refused(tmp_path: Path) -> None:
    """The flag names a wrong file."""
    most = SECRET.encode().ljust(MAX_TOKEN_BYTES, b"x")
    assert load_token(token_file(tmp_path, most), {}, RUN) == (most, True)
    with pytest.raises(ConfigError, match="longer than 4096 bytes") as caught:
        load_token(token_file(tmp_path, most + b"x"), {}, RUN)
    assert SECRET not in str(caught.value)


def test_token_path_that_is_not_a_file_is_refused(tmp_path: Path) -> None:
    """A directory, a missing file or a pipe, which must not block."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        load_token(pipe, {}, RUN)
    for path in (tmp_path, tmp_path / "absent", tmp_path / "nul\0"):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_token(path, {}, RUN)


def test_token_file_precedes_the_variable(tmp_path: Path) -> None:
    """A variable may be left over from another job."""
    assert load_token(token_file(tmp_path), {ENV_TOKEN: "another"}, RUN) == (SECRET.encode(), True)


def test_token_of_the_environment_is_read() -> None:
    """The bytes are those that a file would hold."""
    assert load_token(None, {ENV_TOKEN: f" {SECRET}\n"}, RUN) == (SECRET.encode(), True)
    assert load_token(None, {ENV_TOKEN: "\udcff" * 16}, RUN) == (b"\xff" * 16, True)


@pytest.mark.parametrize("token", [b"x", SECRET.encode()[:-1], SECRET.encode()[:-1] + b" \n"])
def test_short_token_is_refused(tmp_path: Path, token: bytes) -> None:
    """The error says what to do, and does not show the token."""
    path = token_file(tmp_path, token)
    for file, environ, where in (
        (path, {}, f"token file {path}"),
        (None, {ENV_TOKEN: token.decode()}, ENV_TOKEN),
    ):
        with pytest.raises(ConfigError, match=r"shorter than 16 bytes.*openssl rand -hex 32") as caught:
            load_token(file, environ, RUN)
        assert str(caught.value).startswith(where)
        assert SECRET[:-1] not in str(caught.value)


@pytest.mark.parametrize("text", ["", " ", SECRET * 1000])
def test_malformed_token_variable_is_refused(text: str) -> None:
    """It is empty or too long."""
    with pytest.raises(ConfigError, match=ENV_TOKEN) as caught:
        load_token(None, {ENV_TOKEN: text}, RUN)
    assert SECRET not in str(caught.value)


def test_default_token_differs_between_jobs() -> None:
    """It is not the user's secret."""
    (one, secret), (other, _) = load_token(None, {}, "a"), load_token(None, {}, "b")
    assert not secret
    assert one != other
    assert len(one) == 32
