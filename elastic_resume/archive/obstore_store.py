"""Keep the archive in S3, Google Cloud Storage or Azure Blob Storage, through obstore.

Credentials come from the environment, as the store's own tools take them. Every request has a limit of time:
`_BASE_S`, and as long as its bytes take at `MIN_BYTES_PER_S`. obstore repeats a request that failed: a put or
read for `_RETRY_S`, others a few times within a second or two, as their callers have limits of their own. It
does not repeat a create-only put whose answer was lost: `Archive.commit` handles that.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from elastic_resume.archive import store_errors
from elastic_resume.archive.address import Address
from elastic_resume.archive.store import MIN_BYTES_PER_S, StoredName
from elastic_resume.errors import ArchiveErrorKind, ConfigError

_CONNECT_S = 5
_BASE_S = 30
_PROBE_S = 4  # of a service that gives a machine its credentials, and answers at once if there is one
_RETRIES = 4
_RETRY_S = 30
_LASTING_RETRIES = 1000  # `_RETRY_S` ends them
_FIRST_PAUSE_S, _MAX_PAUSE_S, _PAUSE_GROWTH = 0.25, 5.0, 3  # each pause is random, up to its growth
_CREDENTIAL_VARIABLES = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE"),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY"),
    "az": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_FEDERATED_TOKEN_FILE"),
}
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")


class ObstoreStore:
    """A `Store` in a bucket, below a prefix."""

    def __init__(self, address: Address, environ: Mapping[str, str] = os.environ) -> None:
        """Prepare the clients; nothing is requested yet.

        Raises:
            ConfigError: a variable of the store in the environment is missing or wrong.

        """
        self.description = str(address)
        self._address = address
        self._allows_http = any(environ.get(name, "").startswith("http://") for name in _ENDPOINT_VARIABLES)
        names = _CREDENTIAL_VARIABLES[address.scheme]
        self._has_credentials = any(environ.get(name) for name in names)
        self._clients: dict[tuple[int, int], Any] = {}  # by limit of time in seconds, and retries
        self._lock = threading.Lock()
        try:
            self._clients[_BASE_S, _RETRIES] = self._make_client(_BASE_S, _RETRIES)
        except (BaseError, ValueError) as error:
            reason = str(error).partition("\n")[0][:200]
            if "Account must be specified" in reason:
                reason = "AZURE_STORAGE_ACCOUNT_NAME is not set, the name of the storage account"
            raise ConfigError(
                f"{self.description}: {reason}; correct the store's variables in the environment."
            ) from error

    def put(self, name: str, data: bytes | memoryview) -> None:
        """See `Store`. It is one request: an unfinished multipart upload would cost money unseen."""
        with self._translate_errors(f"write {name}"):
            obstore.put(self._client(len(data), _LASTING_RETRIES), name, data, use_multipart=False)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """See `Store`."""
        with self._translate_errors(f"write {name}"):
            try:
                obstore.put(self._client(len(data)), name, data, mode="create")
            except AlreadyExistsError:  # 412, or 409 while another request for the name is in progress
                return False
        return True

    def get_range(self, name: str, start: int, size: int) -> memoryview | None:
        """See `Store`."""
        if size == 0:
            return memoryview(b"") if self.head(name) is not None else None
        with self._translate_errors(f"read {name}"):
            try:
                client = self._client(size, _LASTING_RETRIES)
                return memoryview(obstore.get_range(client, name, start=start, length=size))
            except FileNotFoundError as error:
                if not store_errors.is_missing(str(error)):
                    raise
                return None
            except BaseError as error:
                if "status code: 416" not in str(error):
                    raise
                return memoryview(b"")  # the object ends before `start`

    def head(self, name: str) -> int | None:
        """See `Store`."""
        with self._translate_errors(f"read {name}"):
            try:
                return int(obstore.head(self._client(0), name)["size"])
            except FileNotFoundError:
                return None

    def list(self, prefix: str) -> list[StoredName]:
        """See `Store`."""
        with self._translate_errors(f"list {prefix}".rstrip()):
            found = obstore.list_with_delimiter(self._client(0), prefix)
        names = [StoredName(path.rstrip("/").rpartition("/")[2], True) for path in found["common_prefixes"]]
        names += [StoredName(meta["path"].rpartition("/")[2], False) for meta in found["objects"]]
        return sorted(names, key=lambda stored: stored.name)

    def delete(self, name: str) -> None:
        """See `Store`."""
        with self._translate_errors(f"delete {name}"):
            try:
                obstore.delete(self._client(0), name)
            except FileNotFoundError as error:
                if not store_errors.is_missing(str(error)):
                    raise

    def _client(self, nbytes: int, retries: int | None = None) -> Any:
        """Return a client whose requests may take as long as ``nbytes`` need; limits are a client's."""
        self._check_credentials()
        retries = _RETRIES if retries is None else retries
        timeout_s = _BASE_S
        while timeout_s < _BASE_S + nbytes / MIN_BYTES_PER_S:
            timeout_s *= 2
        with self._lock:
            key = (timeout_s, retries)
            if key not in self._clients:
                self._clients[key] = self._make_client(timeout_s, retries)
            return self._clients[key]

    def _check_credentials(self) -> None:
        """Ask once for the machine's own credentials, with a short limit, if the environment has none.

        Outside of a cloud the request for them has no answer, and would be repeated for minutes.
        """
        with self._lock:
            if self._has_credentials:
                return
            try:
                obstore.head(self._make_client(_PROBE_S, 0), "probe")
            except (BaseError, OSError) as error:
                if store_errors.classify(str(error)) == ArchiveErrorKind.CREDENTIALS:
                    raise store_errors.make_error(
                        ArchiveErrorKind.CREDENTIALS, self.description, "log in"
                    ) from None
            self._has_credentials = True

    def _make_client(self, timeout_s: int, retries: int) -> Any:
        options: dict[str, Any] = {
            "timeout": timedelta(seconds=timeout_s),
            "connect_timeout": timedelta(seconds=_CONNECT_S),
            "allow_http": self._allows_http,
        }
        retry: dict[str, Any] = {"max_retries": retries, "retry_timeout": timedelta(seconds=_RETRY_S)}
        if retries == _LASTING_RETRIES:
            first, longest = timedelta(seconds=_FIRST_PAUSE_S), timedelta(seconds=_MAX_PAUSE_S)
            retry["backoff"] = {"init_backoff": first, "max_backoff": longest, "base": _PAUSE_GROWTH}
        make: dict[str, Callable[..., Any]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
        # Not every store that speaks S3 has the request that deletes many objects.
        config = {"disable_bulk_delete": True} if self._address.scheme == "s3" else {}
        return make[self._address.scheme](
            self._address.bucket,
            prefix=self._address.path or None,
            config=config,
            client_options=options,
            retry_config=retry,
        )

    @contextlib.contextmanager
    def _translate_errors(self, operation: str) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            text = str(error)
            kind = store_errors.classify(text)
            # Without the cause: its text has the request.
            raise store_errors.make_error(kind, self.description, operation, text) from None
