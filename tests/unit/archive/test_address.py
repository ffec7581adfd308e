"""`archive.address`: what is an address, and that none with a secret is accepted or repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_resume.archive.address import Address, parse_address, parse_source
from elastic_resume.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "address", "printed"),
    [
        ("s3://bucket", Address("s3", "bucket", ""), "s3://bucket"),
        ("s3://bucket/", Address("s3", "bucket", ""), "s3://bucket"),
        ("S3://bucket/a/b.c=1/", Address("s3", "bucket", "a/b.c=1"), "s3://bucket/a/b.c=1"),
        ("gs://bucket/a", Address("gs", "bucket", "a"), "gs://bucket/a"),
        ("az://container/a", Address("az", "container", "a"), "az://container/a"),
        ("sftp://host/a", Address("sftp", "host", "a"), "sftp://host/a"),
        ("file:///mnt/a b/", Address("file", "", "/mnt/a b"), "file:///mnt/a b"),
        ("/mnt/shared", Address("file", "", "/mnt/shared"), "file:///mnt/shared"),
    ],
)
def test_address_is_parsed_and_printed(text: str, address: Address, printed: str) -> None:
    """What is printed is an address again."""
    assert parse_address("--archive", text) == address
    assert str(address) == printed
    assert parse_address("--archive", printed) == address


@pytest.mark.parametrize(
    "text",
    [
        "s3://AKIA1:TOPSECRET@bucket/a",
        "s3://TOPSECRET@bucket/a",
        "s3:/AKIA1:TOPSECRET@bucket/a",
        "sftp://user:TOPSECRET@host/a",
        "az://container/a?sig=TOPSECRET",
        "https://account.blob.core.windows.net/c?sv=1&sig=TOPSECRET",
        "s3://bucket/a#TOPSECRET",
    ],
)
def test_secret_is_refused_and_not_repeated(text: str) -> None:
    """The message goes to logs and terminals."""
    with pytest.raises(ConfigError, match="give credentials in the environment") as caught:
        parse_address("--archive", text)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("", "or a directory"),
        ("s3://", "s3://BUCKET/PREFIX"),
        ("s3:///a", "s3://BUCKET/PREFIX"),
        ("s3://bucket/a//b", "s3://BUCKET/PREFIX"),
        ("s3://bucket/../b", "s3://BUCKET/PREFIX"),
        ("s3://bucket/a b", "s3://BUCKET/PREFIX"),
        ("s3:/bucket/a", "two slashes"),
        ("s3:bucket/a", "two slashes"),
        ("file://host/a", "three slashes"),
        ("s3://bucket/" + "a" * 800, "or a directory"),
        ("s3://bucket/a\n", "or a directory"),
    ],
)
def test_malformed_address_is_refused(text: str, remedy: str) -> None:
    """A typing error never becomes a directory of that name."""
    with pytest.raises(ConfigError, match=remedy):
        parse_address("--archive", text)


def test_commands_take_paths_and_addresses() -> None:
    """What has no scheme is a path, also one with a colon."""
    assert parse_source("checkpoints/a:b") == Path("checkpoints/a:b")
    assert parse_source(Path("/mnt/x")) == Path("/mnt/x")
    assert parse_source("file:///mnt/x") == Address("file", "", "/mnt/x")
    run = parse_source("s3://bucket/a/run")
    assert (str(run.parent), run.name, str(run / "x")) == ("s3://bucket/a", "run", "s3://bucket/a/run/x")
    assert str(Address("s3", "bucket", "run").parent) == "s3://bucket"
    assert str(Address("file", "", "/run").parent) == "file:///"
