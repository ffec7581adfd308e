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


@pytest.mark.parametrize(("text", "kind"), CASES)
def test_error_has_kind_and_remedy(text: str, kind: str) -> None:
    """The texts are those of obstore 0.12."""
    assert store_errors.classify(text) == kind
    error = store_errors.make_error(ArchiveErrorKind(kind), "s3://b/run", "read x", text)
    assert error.kind == kind
    assert str(error).startswith("s3://b/run: cannot read x: ")
    assert "HIDDEN" not in str(error)
    assert "http" not in str(error)
    assert str(error).count("\n") == 0


def test_only_missing_object_is_missing() -> None:
    """A missing bucket is an error, not an empty archive."""
    assert store_errors.is_missing(ANSWER.format(status="404 Not Found", code="NoSuchKey"))
    assert store_errors.is_missing(ANSWER.format(status="404 Not Found", code="BlobNotFound"))
    assert not store_errors.is_missing(ANSWER.format(status="404 Not Found", code="NoSuchBucket"))
    assert not store_errors.is_missing(ANSWER.format(status="403 Forbidden", code="AccessDenied"))
