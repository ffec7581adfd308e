"""Parse addresses of archives. Pure.

An address is ``s3://BUCKET/PREFIX``, ``gs://…``, ``az://CONTAINER/PREFIX``, ``file:///DIRECTORY``, a plain
path, or one of another scheme that fsspec knows. It never contains a secret.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from elastic_resume import constants
from elastic_resume.checkpoint.reader import parse_checkpoint_name
from elastic_resume.errors import ConfigError

OBJECT_SCHEMES = ("s3", "gs", "az")
MAX_ADDRESS_CHARS = 700  # a name in S3 has at most 1024
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


@dataclass(frozen=True)
class Address:
    """An archive's place. ``scheme`` is "file" for a directory, whose ``bucket`` is empty."""

    scheme: str
    bucket: str
    path: str

    def __str__(self) -> str:
        if self.scheme == "file":
            return self.path
        return f"{self.scheme}://{self.bucket}" + (f"/{self.path}" if self.path else "")


def parse_address(setting: str, text: str) -> Address:
    """Parse the address of an archive; ``setting`` is the flag or argument, for the error message.

    Raises:
        ConfigError: it is malformed, or contains a secret. The text does not repeat a secret.

    """
    match = _SCHEME.match(text)
    scheme, rest = (match[1].lower(), text[match.end() :]) if match else ("file", text)
    if match and (("@" in rest.partition("/")[0]) or "?" in rest or "#" in rest):
        raise ConfigError(
            f"{setting} has a user, password, signature or other part that does not belong into an address: "
            f"write {scheme}://BUCKET/PREFIX, and give credentials in the environment."
        )
    if not text or len(text) > MAX_ADDRESS_CHARS or not text.isprintable():
        raise ConfigError(
            f"{setting} is {text[:100]!r}: write s3://BUCKET/PREFIX, gs://…, az://… or a directory."
        )
    if scheme == "file":
        if match and not rest.startswith("/"):
            raise ConfigError(f"{setting} is {text[:100]!r}: write file:///DIRECTORY, with three slashes.")
        return Address("file", "", rest if rest == "/" else rest.rstrip("/"))
    bucket, _, path = rest.partition("/")
    parts = path.strip("/").split("/")
    if not _BUCKET.fullmatch(bucket) or any(part in {"", ".", ".."} for part in parts if path.strip("/")):
        raise ConfigError(
            f"{setting} is {text[:100]!r}: write {scheme}://BUCKET/PREFIX without empty names or dots."
        )
    return Address(scheme, bucket, "/".join(parts))


def parse_archive_setting(setting: str, value: object) -> str:
    """Return a setting's address, that of a directory as an absolute path; empty for ``off``."""
    if str(value).strip() in {"", "off"}:
        return ""
    address = parse_address(setting, str(value).strip())
    if address.scheme == "file":
        return str(Path(address.path).expanduser().absolute())
    return str(address)


def has_scheme(text: str) -> bool:
    """Whether ``text`` is an address with a scheme, not a path."""
    return _SCHEME.match(text) is not None


def split_last(address: Address) -> tuple[Address, str]:
    """Return the address without its last component, and that component, "" if there is none."""
    parent, _, name = address.path.rpartition("/")
    if address.scheme == "file" and not parent and address.path.startswith("/"):
        parent = "/"
    return replace(address, path=parent), name


def is_run_id(name: str) -> bool:
    """Whether ``name`` may be a run's."""
    return re.fullmatch(constants.SAFE_NAME_PATTERN, name) is not None and not parse_checkpoint_name(name)
