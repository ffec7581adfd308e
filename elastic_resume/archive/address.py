"""Parse addresses of archives.

An address is ``s3://BUCKET/PREFIX``, ``gs://…``, ``az://CONTAINER/PREFIX``, ``file:///DIRECTORY``, a plain
path, or one of another scheme that fsspec knows. It never contains a secret.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from elastic_resume.errors import ConfigError

OBJECT_SCHEMES = ("s3", "gs", "az")
MAX_ADDRESS_CHARS = 700  # a name in S3 has at most 1024
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ONE_SLASH = re.compile(r"(s3|gs|az|file):/?(?!/)")
_NAME = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._=+,:-]{1,255}")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


@dataclass(frozen=True)
class Address:
    """An archive's place. ``scheme`` is "file" for a directory, whose ``bucket`` is empty."""

    scheme: str
    bucket: str
    path: str

    @property
    def name(self) -> str:
        """The last component; "" if there is none."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Address:
        """The address without its last component."""
        above = self.path.rpartition("/")[0]
        return replace(self, path=above or ("/" if self.scheme == "file" else ""))

    def __truediv__(self, name: str) -> Address:
        return replace(self, path=f"{self.path.rstrip('/')}/{name}" if self.path else name)

    def __str__(self) -> str:
        if self.scheme == "file":
            return f"file://{self.path}"
        return f"{self.scheme}://{self.bucket}" + (f"/{self.path}" if self.path else "")


def parse_address(setting: str, text: str) -> Address:
    """Parse the address of an archive; ``setting`` is the flag or argument, for the error message.

    Raises:
        ConfigError: it is malformed, or contains a secret. The text does not repeat a secret.

    """
    match = _SCHEME.match(text)
    scheme, rest = (match[1].lower(), text[match.end() :]) if match else ("file", text)
    is_url = scheme != "file" or _ONE_SLASH.match(text) is not None
    if is_url and ("?" in text or "#" in text or "@" in (rest.partition("/")[0] if match else text)):
        raise ConfigError(
            f"{setting} has a user, password, signature or other part that does not belong into an address: "
            "write s3://BUCKET/PREFIX, and give credentials in the environment."
        )
    if not text.strip() or len(text) > MAX_ADDRESS_CHARS or not text.isprintable():
        raise ConfigError(
            f"{setting} is {text[:100]!r}: write s3://BUCKET/PREFIX, gs://BUCKET/…, az://CONTAINER/… or a "
            "directory."
        )
    if _ONE_SLASH.match(text):
        raise ConfigError(
            f"{setting} is {text[:100]!r}: write two slashes behind the colon, as in s3://BUCKET/PREFIX."
        )
    if scheme in {"http", "https"}:
        raise ConfigError(
            f"{setting} is {text[:100]!r}: write s3://BUCKET/PREFIX, and give the store's own address in "
            "AWS_ENDPOINT_URL."
        )
    if scheme == "file":
        if match and not rest.startswith("/"):
            raise ConfigError(f"{setting} is {text[:100]!r}: write file:///DIRECTORY, with three slashes.")
        return Address("file", "", rest.rstrip("/") or "/")
    bucket, _, path = rest.partition("/")
    names = path.strip("/").split("/") if path.strip("/") else []
    if not _BUCKET.fullmatch(bucket) or not all(_NAME.fullmatch(name) for name in names):
        raise ConfigError(
            f"{setting} is {text[:100]!r}: write {scheme}://BUCKET/PREFIX of letters, digits and the signs "
            "._=+,:-"
        )
    return Address(scheme, bucket, "/".join(names))


def parse_archive_setting(setting: str, value: object) -> str:
    """Return a setting's address, that of a directory as an absolute path; empty for ``off``.

    Raises:
        ConfigError: as `parse_address`; or it is a relative path, and there is no such directory.

    """
    if str(value).strip() in {"", "off"}:
        return ""
    text = str(value).strip()
    address = parse_address(setting, text)
    if address.scheme == "file":
        path = Path(address.path).expanduser()
        is_bucket = not path.is_absolute() and not text.startswith(".") and not path.is_dir()
        if is_bucket and _BUCKET.fullmatch(path.parts[0] if path.parts else ""):
            raise ConfigError(
                f"{setting} is {text[:100]!r}: there is no such directory. For a bucket write "
                f"s3://{text[:100]}, or gs:// or az://; for a directory its whole path."
            )
        return str(path.absolute())
    return str(address)


def parse_source(text: str | os.PathLike[str]) -> Path | Address:
    """Return the address of an archive, or of what is in it, or the path of something else.

    A directory without a scheme is an archive if it, or one of the runs in it, has entries and parts.

    Raises:
        ConfigError: as `parse_address`.

    """
    text = os.fspath(text)
    path = Path(text)
    if _SCHEME.match(text) or (_ONE_SLASH.match(text) and not path.exists()):
        return parse_address("the address", text)
    return Address("file", "", str(path.absolute())) if _is_in_archive(path) else path


def _is_in_archive(path: Path) -> bool:
    try:
        if not path.exists():
            return _is_archived_run(path.parent)  # a checkpoint is no directory there
        return _is_archived_run(path) or any(map(_is_archived_run, path.iterdir()))
    except OSError:  # whoever reads it says why
        return False


def _is_archived_run(path: Path) -> bool:
    return (path / "log").is_dir() and (path / "parts").is_dir()
