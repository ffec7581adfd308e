"""Say in one sentence what a store's error means, and what to do. Pure.

Only status, error code and kind of an error are repeated. A server's text and the request may have secrets.
"""

from __future__ import annotations

import re

from elastic_resume.errors import ArchiveError

_STATUS = re.compile(r"status code: (\d{3})")
_HOST = re.compile(r"https?://([A-Za-z0-9.-]+|\[[0-9a-f:.]+\])(:\d{1,5})?(?=[/?\s]|$)")  # no user, no path
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_CREDENTIAL_REQUEST = re.compile(
    r"/latest/(api|meta-data)|computeMetadata|metadata/identity|token request|oauth2|AssumeRole"
    r"|NoCredentials|Unable to locate credentials"
)
_BODY_END = "Debug source"

_KIND_BY_CODE = {
    "AccessDenied": "forbidden",
    "AllAccessDisabled": "forbidden",
    "AuthorizationPermissionMismatch": "forbidden",
    "AuthenticationFailed": "credentials",
    "ExpiredToken": "credentials",
    "InvalidAccessKeyId": "credentials",
    "InvalidToken": "credentials",
    "SignatureDoesNotMatch": "credentials",
    "TokenRefreshRequired": "credentials",
    "NoSuchBucket": "missing-bucket",
    "ContainerNotFound": "missing-bucket",
    "AuthorizationHeaderMalformed": "region",
    "IllegalLocationConstraintException": "region",
    "PermanentRedirect": "region",
    "RequestTimeTooSkewed": "clock-skew",
    "InvalidObjectState": "frozen",
    "QuotaExceeded": "quota",
    "XMinioStorageFull": "quota",
    "InsufficientStorage": "quota",
    "NotImplemented": "unsupported",
    "RequestTimeout": "slow",
}
_KIND_BY_STATUS = {401: "credentials", 403: "forbidden", 301: "region", 507: "quota", 501: "unsupported"}
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_SENTENCES = {
    "credentials": "no valid credentials: set the store's in the environment of every node{credentials} "
    "or give the nodes a role; renew expired ones",
    "forbidden": "access denied: allow these credentials to list, get, put and delete objects there",
    "missing-bucket": "there is no such bucket: create it, or correct the address{endpoint}",
    "region": "the bucket is in another region: set AWS_REGION to the bucket's",
    "quota": "its quota or space is used up: free space there, or set --archive-keep",
    "clock-skew": "this node's clock is wrong by minutes, so the store rejects its signatures: set it by NTP",
    "frozen": "a lifecycle rule has moved the object to a class that cannot be read: restore it there",
    "unavailable": "no connection to {host}: check network and proxy{endpoint}",
    "failing": "the store itself fails, or has too many requests: if it lasts, ask whoever runs it",
    "slow": "the transfer took too long: check the link to the store (at least {rate} is needed)",
    "cut": "the connection ended within a transfer: check the link to the store, and proxies on the way",
    "unsupported": "the store does not implement this request",
}
MIN_RATE_TEXT = "0.5 MB/s"


def classify(text: str) -> str:
    """Return the kind of an obstore error, an ArchiveError's ``kind``, by its text."""
    message, _, debug = text.partition(_BODY_END)
    status, code = _STATUS.search(message), _CODE.search(message)
    if _CREDENTIAL_REQUEST.search(message):
        return "credentials"
    if code is not None and code[1] in _KIND_BY_CODE:
        return _KIND_BY_CODE[code[1]]
    if status is not None:
        return _KIND_BY_STATUS.get(int(status[1]), "unavailable")
    if "incorrectly configured region" in message:
        return "region"
    if "kind: Timeout" in debug:
        return "slow"
    if "kind: Interrupted" in debug or "IncompleteMessage" in debug or "body error" in message:
        return "cut"
    return "unavailable"


def is_missing(text: str) -> bool:
    """Whether the error says that the object does not exist, while the bucket does."""
    message, _, _ = text.partition(_BODY_END)
    status, code = _STATUS.search(message), _CODE.search(message)
    return status is not None and status[1] == "404" and (code is None or _is_missing_key(code[1]))


def _is_missing_key(code: str) -> bool:
    return _KIND_BY_CODE.get(code) != "missing-bucket"


def make_error(kind: str, description: str, operation: str, text: str = "") -> ArchiveError:
    """Return the error for an operation on the store that is described as ``description``."""
    message, _, _ = text.partition(_BODY_END)
    status, code = _STATUS.search(message), _CODE.search(message)
    answer = " ".join(match[1] for match in (status, code) if match is not None)
    scheme = description.partition("://")[0]
    host = _HOST.search(message)
    variables = f" ({_CREDENTIALS[scheme]})" if scheme in _CREDENTIALS else ""
    sentence = _SENTENCES["failing" if kind == "unavailable" and status is not None else kind].format(
        rate=MIN_RATE_TEXT,
        credentials=variables,
        endpoint=", and AWS_ENDPOINT_URL if it is set" if scheme == "s3" else "",
        host=host[0].partition("://")[2] if host is not None else "the store",
    )
    return ArchiveError(
        f"{description}: cannot {operation}: {f'{answer}: ' if answer else ''}{sentence}.", kind=kind
    )
