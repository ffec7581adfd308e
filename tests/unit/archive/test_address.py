"""`archive.address`: what is an address, and that none with a secret is accepted or repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_resume.archive import address
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
        ("http://host:9000/bucket/a", "write s3://.*AWS_ENDPOINT_URL"),
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


def test_directory_that_is_an_archive_needs_no_scheme(tmp_path: Path) -> None:
    """A path of --archive is one of `ls`, too; so are a run in it and a checkpoint of that."""
    run = tmp_path / "store" / "train"
    checkpoint = run / "g000001-s0000000005"
    (run / "log").mkdir(parents=True)
    assert parse_source(run) == run
    (run / "parts").mkdir()
    for path in (run.parent, run, checkpoint):
        assert parse_source(path) == Address("file", "", str(path))
    assert parse_source(tmp_path) == tmp_path


def test_one_slash_after_a_scheme_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless there is one of that name."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="two slashes"):
        parse_source("s3:/bucket")
    Path("s3:/bucket").mkdir(parents=True)
    assert parse_source("s3:/bucket") == Path("s3:/bucket")


def test_bucket_without_a_scheme_is_no_new_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative directory that exists is one, and so is what begins with a dot."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no such directory\. For a bucket write s3://nc63/llm, or gs://"):
        address.parse_archive_setting("--archive", "nc63/llm")
    assert address.parse_archive_setting("--archive", "./nc63/llm") == str(tmp_path / "nc63" / "llm")
    Path("nc63/llm").mkdir(parents=True)
    assert address.parse_archive_setting("--archive", "nc63/llm") == str(tmp_path / "nc63" / "llm")


@pytest.mark.parametrize("directory", ["/home/user@domain/a", "/tmp/a#b", "/tmp/a?b"])  # noqa: S108
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_directory_may_have_signs_of_urls(scheme: str, directory: str) -> None:
    """Also in the setting, which is parsed again where the archive is opened."""
    setting = address.parse_archive_setting("--archive", scheme + directory)
    assert setting == address.parse_address("--archive", setting).path == directory
