"""`archive.store_errors`: each error of obstore has one kind, and a sentence without what the server said."""

from __future__ import annotations

import pytest

from elastic_resume.archive import store_errors
from elastic_resume.errors import ArchiveErrorKind

ANSWER = (
    "Generic S3 error: Error performing GET http://127.0.0.1:1/b/x?X-Amz-Signature=HIDDEN in 9ms - Server "
    "returned non-2xx status code: {status}: <Error><Code>{code}</Code><Message>HIDDEN</Message></Error>\n\n"
    "Debug source:\nGeneric {{ store: S3, inner: Status {{ status: {status} }} }}"
)
SENT = (
    "Generic S3 error: Error performing PUT http://127.0.0.1:1/b/x in 31s, after 4 retries, max_retries: 4, "
    "retry_timeout: 30s  - HTTP error: error sending request\n\nDebug source:\nGeneric {{\n  inner: Http(\n"
    "   HttpError {{\n kind: {kind},\n source: reqwest::Error {{\n kind: Request,\n"
)
METADATA = "Error performing PUT http://169.254.169.254/latest/api/token in 5ms - " + SENT
GOOGLE = (
    "Generic GCS error: Error performing token request: Error performing GET http://169.254.169.254/x - "
    + SENT
)
CASES = [
    (ANSWER.format(status="403 Forbidden", code="AccessDenied"), "forbidden"),
    (ANSWER.format(status="403 Forbidden", code="Whatever"), "forbidden"),
    (ANSWER.format(status="403 Forbidden", code="RequestTimeTooSkewed"), "clock-skew"),
    (ANSWER.format(status="403 Forbidden", code="InvalidObjectState"), "frozen"),
    (ANSWER.format(status="403 Forbidden", code="SignatureDoesNotMatch"), "credentials"),
    (ANSWER.format(status="400 Bad Request", code="ExpiredToken"), "credentials"),
    (ANSWER.format(status="401 Unauthorized", code="X"), "credentials"),
    (ANSWER.format(status="404 Not Found", code="NoSuchBucket"), "missing-bucket"),
    (ANSWER.format(status="404 Not Found", code="ContainerNotFound"), "missing-bucket"),
    (ANSWER.format(status="400 Bad Request", code="AuthorizationHeaderMalformed"), "region"),
    (
        "Received redirect without LOCATION, this normally indicates an incorrectly configured region",
        "region",
    ),
    (ANSWER.format(status="507 Insufficient Storage", code="XMinioStorageFull"), "quota"),
    (ANSWER.format(status="507 Insufficient Storage", code=""), "quota"),
    (ANSWER.format(status="501 Not Implemented", code="NotImplemented"), "unsupported"),
    (ANSWER.format(status="500 Internal Server Error", code="InternalError"), "unavailable"),
    (ANSWER.format(status="503 Slow Down", code="SlowDown"), "unavailable"),
    (SENT.format(kind="Connect"), "unavailable"),
    (SENT.format(kind="Timeout"), "slow"),
    (SENT.format(kind="Interrupted"), "cut"),
    (SENT.format(kind="Request") + "IncompleteMessage", "cut"),
    (METADATA.format(kind="Timeout"), "credentials"),
    (GOOGLE.format(kind="Connect"), "credentials"),
    ("anything else", "unavailable"),
]


REMEDIES = {
    "forbidden": "allow these credentials to",
    "clock-skew": "set it by NTP",
    "frozen": "restore it there",
    "credentials": "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY) or give the nodes a role",
    "missing-bucket": "create it, or correct the address, and AWS_ENDPOINT_URL if it is set.",
    "region": "set AWS_REGION",
    "quota": "free space there",
    "unsupported": "does not implement this request",
    "slow": "check the link to the store (at least 0.5 MB/s",
    "cut": "check the link to the store, and proxies",
}


@pytest.mark.parametrize(("text", "kind"), CASES)
def test_error_has_kind_and_remedy(text: str, kind: str) -> None:
    """The texts are those of obstore 0.12."""
    assert store_errors.classify(text) == kind
    error = store_errors.make_error(ArchiveErrorKind(kind), "s3://b/run", "read x", text)
    assert error.kind == kind
    assert str(error).startswith("s3://b/run: cannot read x: ")
    assert kind == "unavailable" or REMEDIES[kind] in str(error)


@pytest.mark.parametrize(
    ("scheme", "text", "sentence"),
    [
        (
            "s3",
            SENT.format(kind="Connect"),
            "no connection to 127.0.0.1:1: check network and proxy, and AWS_ENDPOINT_URL if it is set.",
        ),
        (
            "gs",
            SENT.format(kind="Connect").replace("http://127.0.0.1:1/b", "https://storage.googleapis.com/b"),
            "no connection to storage.googleapis.com: check network and proxy.",
        ),
        (
            "s3",
            SENT.format(kind="Connect").replace("http://127", "http://user:HIDDEN@127"),
            "no connection to the store: check network and proxy, and AWS_ENDPOINT_URL if it is set.",
        ),
        (
            "s3",
            ANSWER.format(status="500 Internal Server Error", code="InternalError"),
            "500 InternalError: the store itself fails, or has too many requests: if it lasts, ask whoever",
        ),
    ],
)
def test_store_that_fails_is_told_from_one_that_is_not_reached(scheme: str, text: str, sentence: str) -> None:
    """The host is no secret, unlike a password before it."""
    error = str(store_errors.make_error(ArchiveErrorKind.UNAVAILABLE, f"{scheme}://b", "list", text))
    assert sentence in error
    assert "HIDDEN" not in error


@pytest.mark.parametrize(
    ("scheme", "variables"),
    [
        ("s3", " (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY) or"),
        ("gs", " (GOOGLE_APPLICATION_CREDENTIALS) or"),
        ("az", " (AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY) or"),
        ("sftp", "of every node or"),
    ],
)
def test_missing_credentials_name_the_variables_of_their_store(scheme: str, variables: str) -> None:
    """Not those of other clouds."""
    error = str(store_errors.make_error(ArchiveErrorKind.CREDENTIALS, f"{scheme}://b", "log in"))
    assert variables in error
    assert sum(cloud in error for cloud in ("AWS", "GOOGLE", "AZURE")) == (scheme != "sftp")
    assert "HIDDEN" not in str(error)
    assert "http" not in str(error)
    assert str(error).count("\n") == 0


def test_only_missing_object_is_missing() -> None:
    """A missing bucket is an error, not an empty archive."""
    assert store_errors.is_missing(ANSWER.format(status="404 Not Found", code="NoSuchKey"))
    assert store_errors.is_missing(ANSWER.format(status="404 Not Found", code="BlobNotFound"))
    assert not store_errors.is_missing(ANSWER.format(status="404 Not Found", code="NoSuchBucket"))
    assert not store_errors.is_missing(ANSWER.format(status="403 Forbidden", code="AccessDenied"))
