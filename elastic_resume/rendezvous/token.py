"""The run's token: what every agent of a job holds, and nobody else should.

Promise: no error text shows it, whole or in part. Does not know what it is used for; `wire` does.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from elastic_resume.contract import ENV_TOKEN
from elastic_resume.errors import ConfigError

MIN_TOKEN_BYTES = 16
"""Whoever reads a handshake along can try shorter ones out, on a machine of their own."""
MAX_TOKEN_BYTES = 4096


def read_token(path: Path | None, environ: Mapping[str, str], run_id: str) -> tuple[bytes, bool]:
    """Give the token, and whether it is a secret.

    With neither a file nor the variable it is made from the run's name: that keeps strays out (a job that
    has the wrong port), and no attacker. The file goes before the variable: who writes a flag means it.

    Raises:
        ConfigError: the file may be read by others, or there is no token in what was given, or a short one.

    """
    if path is not None:
        return _checked(_read_file(path), f"--rdzv-token-file {path}"), True
    if ENV_TOKEN in environ:
        return _checked(os.fsencode(environ[ENV_TOKEN]), ENV_TOKEN), True
    return hashlib.sha256(b"elastic_resume run " + run_id.encode(errors="surrogateescape")).digest(), False


def _checked(text: bytes, where: str) -> bytes:
    token = text.strip()
    if not token:
        # Set and empty is a secret that somebody failed to fill in: to go on would be to go without one.
        raise ConfigError(f"{where} holds no token: write one (openssl rand -hex 32), or leave it out.")
    if len(token) < MIN_TOKEN_BYTES:
        raise ConfigError(
            f"{where} is shorter than {MIN_TOKEN_BYTES} bytes, so it can be guessed: give all nodes a random "
            "one (openssl rand -hex 32)."
        )
    if len(text) > MAX_TOKEN_BYTES:
        raise ConfigError(f"{where} is longer than {MAX_TOKEN_BYTES} bytes: a token is a line of text.")
    return token


def _read_file(path: Path) -> bytes:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            # Of the open file, not of the path: it cannot be exchanged in between.
            _check(os.fstat(file.fileno()), path)
            return file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--rdzv-token-file {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # a NUL in the path
        raise ConfigError(f"--rdzv-token-file {path} cannot be read: {error}.") from error


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for a pipe's writer. Links are followed: Kubernetes mounts secrets as such."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _check(status: os.stat_result, path: Path) -> None:
    """Refuse what somebody else may know."""
    where = f"--rdzv-token-file {path}"
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{where} is not a regular file.")
    if status.st_uid not in {os.geteuid(), 0}:
        raise ConfigError(f"{where} belongs to another user (uid {status.st_uid}), who knows it then.")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"{where} is open to other users (mode {mode:04o}): chmod 600 {path}")
