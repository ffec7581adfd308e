"""Say in one sentence what a store's error means, and what to do. Pure.

Only status, error code and kind of an error are repeated. A server's text and the request may have secrets.
"""

from __future__ import annotations

import re

from elastic_resume.errors import ArchiveError
from elastic_resume.errors import ArchiveErrorKind as Kind

_STATUS = re.compile(r"status code: (\d{3})")
_HOST = re.compile(r"https?://([A-Za-z0-9.-]+|\[[0-9a-f:.]+\])(:\d{1,5})?(?=[/?\s]|$)")  # no user, no path
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_CREDENTIAL_REQUEST = re.compile(
    r"/latest/(api|meta-data)|computeMetadata|metadata/identity|token request|oauth2|AssumeRole"
    r"|NoCredentials|Unable to locate credentials"
)
_BODY_END = "Debug source"

_KIND_BY_CODE = {
    "AccessDenied": Kind.FORBIDDEN,
    "AllAccessDisabled": Kind.FORBIDDEN,
    "AuthorizationPermissionMismatch": Kind.FORBIDDEN,
    "AuthenticationFailed": Kind.CREDENTIALS,
    "ExpiredToken": Kind.CREDENTIALS,
    "InvalidAccessKeyId": Kind.CREDENTIALS,
    "InvalidToken": Kind.CREDENTIALS,
    "SignatureDoesNotMatch": Kind.CREDENTIALS,
    "TokenRefreshRequired": Kind.CREDENTIALS,
    "NoSuchBucket": Kind.MISSING_BUCKET,
    "ContainerNotFound": Kind.MISSING_BUCKET,
    "AuthorizationHeaderMalformed": Kind.REGION,
    "IllegalLocationConstraintException": Kind.REGION,
    "PermanentRedirect": Kind.REGION,
    "RequestTimeTooSkewed": Kind.CLOCK_SKEW,
    "InvalidObjectState": Kind.FROZEN,
    "QuotaExceeded": Kind.QUOTA,
    "XMinioStorageFull": Kind.QUOTA,
    "InsufficientStorage": Kind.QUOTA,
    "NotImplemented": Kind.UNSUPPORTED,
    "RequestTimeout": Kind.SLOW,
}
_KIND_BY_STATUS = {
    401: Kind.CREDENTIALS,
    403: Kind.FORBIDDEN,
    301: Kind.REGION,
    507: Kind.QUOTA,
    501: Kind.UNSUPPORTED,
}
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
FREE_SPACE = "free space there, or set --archive-keep"
_SENTENCES = {
    Kind.CREDENTIALS: "no valid credentials: set the store's in the environment of every node{credentials} "
    "or give the nodes a role; renew expired ones",
    Kind.FORBIDDEN: "access denied: allow these credentials to list, get, put and delete objects there",
    Kind.MISSING_BUCKET: "there is no such bucket: create it, or correct the address{endpoint}",
    Kind.REGION: "the bucket is in another region: set AWS_REGION to the bucket's",
    Kind.QUOTA: f"its quota or space is used up: {FREE_SPACE}",
    Kind.CLOCK_SKEW: "this node's clock is wrong by minutes, so the store rejects its signatures: set it by "
    "NTP",
    Kind.FROZEN: "a lifecycle rule has moved the object to a class that cannot be read: restore it there",
    Kind.UNAVAILABLE: "no connection to {host}: check network and proxy{endpoint}",
    Kind.SLOW: "the transfer took too long: check the link to the store (at least {rate} is needed)",
    Kind.CUT: "the connection ended within a transfer: check the link to the store, and proxies on the way",
    Kind.UNSUPPORTED: "the store does not implement this request",
}
_FAILING = "the store itself fails, or has too many requests: if it lasts, ask whoever runs it"
MIN_RATE_TEXT = "0.5 MB/s"


def classify(text: str) -> Kind:
    """Return the kind of an obstore error by its text."""
    message, _, debug = text.partition(_BODY_END)
    status, code = _STATUS.search(message), _CODE.search(message)
    if _CREDENTIAL_REQUEST.search(message):
        return Kind.CREDENTIALS
    if code is not None and code[1] in _KIND_BY_CODE:
        return _KIND_BY_CODE[code[1]]
    if status is not None:
        return _KIND_BY_STATUS.get(int(status[1]), Kind.UNAVAILABLE)
    if "incorrectly configured region" in message:
        return Kind.REGION
    if "kind: Timeout" in debug:
        return Kind.SLOW
    if "kind: Interrupted" in debug or "IncompleteMessage" in debug or "body error" in message:
        return Kind.CUT
    return Kind.UNAVAILABLE


def is_missing(text: str) -> bool:
    """Whether the error says that the object does not exist, while the bucket does."""
    message, _, _ = text.partition(_BODY_END)
    status, code = _STATUS.search(message), _CODE.search(message)
    return status is not None and status[1] == "404" and (code is None or _is_missing_key(code[1]))


def _is_missing_key(code: str) -> bool:
    return _KIND_BY_CODE.get(code) != Kind.MISSING_BUCKET


def make_error(kind: Kind, description: str, operation: str, text: str = "") -> ArchiveError:
    """Return the error for an operation on the store that is described as ``description``."""
    message, _, _ = text.partition(_BODY_END)
    status, code = _STATUS.search(message), _CODE.search(message)
    answer = " ".join(match[1] for match in (status, code) if match is not None)
    scheme = description.partition("://")[0]
    host = _HOST.search(message)
    variables = f" ({_CREDENTIALS[scheme]})" if scheme in _CREDENTIALS else ""
    is_failing = kind == Kind.UNAVAILABLE and status is not None
    sentence = (_FAILING if is_failing else _SENTENCES[kind]).format(
        rate=MIN_RATE_TEXT,
        credentials=variables,
        endpoint=", and AWS_ENDPOINT_URL if it is set" if scheme == "s3" else "",
        host=host[0].partition("://")[2] if host is not None else "the store",
    )
    return ArchiveError(
        f"{description}: cannot {operation}: {f'{answer}: ' if answer else ''}{sentence}.", kind=kind
    )
