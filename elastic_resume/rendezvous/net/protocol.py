"""What goes over a connection: lines of JSON, limited in length, after both sides have proved who they are.

Everything here is a pure function of bytes. A line that is too long, is not JSON, has an unknown type, a
missing, surplus or ill-typed field, or a number out of range raises `WireError` and nothing else: the shell
drops the connection, and the state machine never sees it.

The handshake is mutual, before any message (HMAC-SHA256, RFC 2104; challenge and response as in RFC 2195)::

    dialler   {"elastic_resume": 3, "run": RUN, "nonce": A, "status_only": false}
    acceptor  {"elastic_resume": 3, "nonce": B}
    dialler   {"proof": HMAC(token, "dialler" RUN A B)}
    acceptor  {"proof": HMAC(token, "acceptor" RUN A B)}

The dialler proves itself first. An unauthenticated dialler receives nothing derived from the token. An
eavesdropper, or a fake acceptor, does, hence 16 bytes or more (`token`). A wrong proof is answered with an
empty one, so that the dialler too can say why.
Each side's nonce is in both proofs, so a recorded handshake proves nothing later; the words "acceptor" and
"dialler" keep a proof from being sent back where it came from; the run's name keeps two jobs apart. A dialler
that *looks* wants to be told how the job stands, in one line, and to do nothing. It proves that it holds the
key for that (`look_key`), which is made from the token and opens nothing else.

A dialler that changes its mind before its proof says ``{"abort": HMAC(token, "abort" RUN A "")}``, so that nobody
takes it for a stranger.

What follows a handshake is signed and not encrypted. Each line ends with a digest: HMAC-SHA256, cut to 16
bytes, of the line and of how many went before it in that direction (`Seal`). Each direction has a key of its
own, HMAC(token, "dialler sends" RUN A B) or "acceptor sends". So whoever can write into a connection can end
it, and cannot make, change, repeat, reorder or leave out a line unnoticed; nor can a damaged packet, of which
TCP's own sum lets one in 65,536 pass. Without a token the keys are derived from the run's name. This detects
corruption and misdirected peers only; an attacker who knows the run's name can forge lines.

The run's token: what every agent of a job holds, and nobody else should.

Promise: no error text shows it, whole or in part. Does not know what it is used for; `wire` does.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
import typing
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from elastic_resume.constants import ENV_TOKEN
from elastic_resume.errors import ConfigError
from elastic_resume.rendezvous.core import messages
from elastic_resume.rendezvous.core.messages import Header, Message
from elastic_resume.rendezvous.net.codec import (
    Decode,
    Encode,
    ProtocolError,
    decode_float,
    decode_int,
    dump_json,
    get_codec,
)

__all__ = [
    "MAX_GREETING_BYTES",
    "MAX_LINE_BYTES",
    "AuthenticationError",
    "Handshake",
    "HandshakeAbortedError",
    "HandshakeResult",
    "LineAuthenticator",
    "LineReader",
    "ProtocolError",
    "accept",
    "decode",
    "derive_status_key",
    "dial",
    "encode",
    "encode_abort",
    "encode_body",
    "encode_challenge",
    "encode_greeting",
    "encode_line",
    "encode_proof",
    "from_json_value",
    "parse_challenge",
    "parse_greeting",
    "to_json_value",
    "verify_proof",
]

VERSION = 4
DIGEST_HEX_CHARS = 32
MAX_GREETING_BYTES = 4096  # a line of somebody who has proved nothing yet
MAX_LINE_BYTES = 8 * 1024 * 1024  # what is known of worlds with 10,000 members
NONCE_HEX_CHARS = 64

T = TypeVar("T")


# ---- lines -------------------------------------------------------------------------------------------


class LineReader:
    """Cuts a stream into lines, holding at most one line that is not yet whole."""

    def __init__(self, max_line_bytes: int = MAX_GREETING_BYTES) -> None:
        """``limit`` bytes are the longest line; set it higher once the other side has proved who it is."""
        self.max_line_bytes = max_line_bytes
        self._buffer = bytearray()
        self._scanned_bytes = 0

    def feed(self, data: bytes | bytearray) -> Iterator[bytes]:
        """Take bytes in and yield the lines that are whole now, without their ends.

        Raises:
            WireError: a line grows past the limit.

        """
        self._buffer += data
        while True:
            # Looked up for every line: the limit may have changed with the last one. Nothing is searched
            # twice: a long line that comes byte by byte costs its length, not the square of it.
            end = self._buffer.find(b"\n", self._scanned_bytes, self.max_line_bytes + 1)
            if end < 0:
                self._scanned_bytes = len(self._buffer)
                if len(self._buffer) > self.max_line_bytes:
                    raise ProtocolError(f"a line of more than {self.max_line_bytes} bytes")
                return
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._scanned_bytes = 0
            yield line


# ---- handshake ---------------------------------------------------------------------------------------


class LineAuthenticator:
    """Signs the lines of one direction of a connection, or checks them, in their order."""

    def __init__(self, key: bytes) -> None:
        """``key`` is of this connection and direction alone."""
        self._mac = hmac.new(key, digestmod=hashlib.sha256)
        self._count = 0

    def sign(self, line: bytes) -> bytes:
        """Give a line as it is sent: with its digest."""
        return b"%b%b\n" % (line[:-1], self._compute_digest(line[:-1]))

    def verify(self, line: bytes) -> bytes:
        """Give what was signed. Both without the end of the line.

        Raises:
            WireError: it was changed on its way, or is not the next line of this connection.

        """
        said = line[:-DIGEST_HEX_CHARS]
        if not hmac.compare_digest(line[-DIGEST_HEX_CHARS:], self._compute_digest(said)):
            raise ProtocolError(
                "wrong digest: the line was damaged, or lines were lost or reordered; closing the connection"
            )
        return said

    def _compute_digest(self, line: bytes) -> bytes:
        mac = self._mac.copy()
        mac.update(self._count.to_bytes(8, "big"))
        mac.update(line)
        self._count += 1
        return mac.hexdigest()[:DIGEST_HEX_CHARS].encode()


class HandshakeResult(NamedTuple):
    """The end of a handshake: what is still to be sent, whether the dialler only looks, and the keys.

    Lines of this side are to be signed with ``sends``, those of the other to be checked with ``hears``.
    """

    final_line: bytes
    status_only: bool
    signer: LineAuthenticator
    verifier: LineAuthenticator


Handshake = Generator[bytes, bytes, HandshakeResult]
"""One side of a handshake: yields what to send, is sent the other's lines, and returns a `Proof`.

It raises `WireError` when the other does not belong to this job, and `PartedError` when it does and has left.
"""


class HandshakeAbortedError(Exception):
    """The other side has changed its mind before the handshake was over."""


class AuthenticationError(ProtocolError):
    """The dialler does not hold the token; ``last`` is to be sent, so that it learns why it is dropped."""

    rejection_line = b'{"proof":""}\n'


def derive_status_key(token: bytes) -> bytes:
    """Give the key that lets its holder look at a job of this token, and do nothing else."""
    return hmac.new(token, b"elastic_resume looks", hashlib.sha256).digest()


def dial(token: bytes, run_id: str, nonce: str, *, status_only: bool = False) -> Handshake:
    """Be the dialler, with a nonce of 32 random bytes in hexadecimal that was never used before.

    Who ``looks`` gives the `look_key` as the token.
    """
    line = yield encode_greeting(run_id, nonce, status_only=status_only)
    theirs = parse_challenge(line)
    line = yield encode_proof(token, "dialler", run_id, (nonce, theirs))
    verify_proof(line, token, "acceptor", run_id, (nonce, theirs))
    sends, hears = _make_authenticators(token, run_id, (nonce, theirs))
    return HandshakeResult(b"", status_only, sends, hears)


def accept(token: bytes, run_id: str, nonce: str) -> Handshake:
    """Be the acceptor, with a nonce of the same kind."""
    line = yield b""
    theirs, looks = parse_greeting(line, run_id)
    key = derive_status_key(token) if looks else token
    line = yield encode_challenge(nonce)
    if hmac.compare_digest(line + b"\n", encode_abort(key, run_id, theirs)):
        raise HandshakeAbortedError
    try:
        verify_proof(line, key, "dialler", run_id, (theirs, nonce))
    except ProtocolError as error:
        raise AuthenticationError(str(error)) from error
    hears, sends = _make_authenticators(key, run_id, (theirs, nonce))
    return HandshakeResult(encode_proof(key, "acceptor", run_id, (theirs, nonce)), looks, sends, hears)


def encode_abort(token: bytes, run_id: str, nonce: str) -> bytes:
    """Give the last line of a dialler that leaves before the handshake is over."""
    return _encode_json_line({"abort": _compute_mac(token, "abort", run_id, (nonce, "")).hex()})


def encode_greeting(run_id: str, nonce: str, *, status_only: bool = False) -> bytes:
    """Give the dialler's first line."""
    return _encode_json_line(
        {"elastic_resume": VERSION, "run": run_id, "nonce": nonce, "status_only": status_only}
    )


def parse_greeting(line: bytes, run_id: str) -> tuple[str, bool]:
    """Give the dialler's nonce, and whether it looks.

    Raises:
        WireError: another protocol, version or job.

    """
    said = _parse_object(line, {"elastic_resume", "run", "nonce", "status_only"})
    if said["run"] != run_id:
        raise ProtocolError(f"it belongs to job {str(said['run'])[:128]!r}, this is {run_id!r}")
    if not isinstance(said["status_only"], bool):
        raise ProtocolError("it does not say whether it looks")
    return _parse_nonce(said["nonce"]), said["status_only"]


def encode_challenge(nonce: str) -> bytes:
    """Give the acceptor's first line. Nothing in it is made from the token: the dialler is a stranger yet."""
    return _encode_json_line({"elastic_resume": VERSION, "nonce": nonce})


def parse_challenge(line: bytes) -> str:
    """Give the acceptor's nonce.

    Raises:
        WireError: it speaks otherwise.

    """
    return _parse_nonce(_parse_object(line, {"elastic_resume", "nonce"})["nonce"])


def encode_proof(token: bytes, role: str, run_id: str, nonces: tuple[str, str]) -> bytes:
    """Give the line by which ``side`` proves itself: "dialler" or "acceptor", whose nonces these are."""
    return _encode_json_line({"proof": _compute_mac(token, role, run_id, nonces).hex()})


def verify_proof(line: bytes, token: bytes, role: str, run_id: str, nonces: tuple[str, str]) -> None:
    """Check the line of `proof`.

    Raises:
        WireError: that side does not hold the token.

    """
    said = _parse_object(line, {"proof"})["proof"]
    expected = _compute_mac(token, role, run_id, nonces).hex()
    # Half of a surrogate pair is JSON and a str, and has no encoding: only ASCII may reach the comparison.
    if not isinstance(said, str) or not said.isascii() or not hmac.compare_digest(said, expected):
        raise ProtocolError("it does not hold the run's token (--rdzv-token-file, ELASTIC_RESUME_TOKEN)")


def _make_authenticators(
    token: bytes, run_id: str, nonces: tuple[str, str]
) -> tuple[LineAuthenticator, LineAuthenticator]:
    """Give the seals of what the dialler sends, and of what the acceptor does."""
    dialler, acceptor = (
        _compute_mac(token, f"{side} sends", run_id, nonces) for side in ("dialler", "acceptor")
    )
    return LineAuthenticator(dialler), LineAuthenticator(acceptor)


def _compute_mac(token: bytes, label: str, run_id: str, nonces: tuple[str, str]) -> bytes:
    text = json.dumps([label, run_id, *nonces]).encode()
    return hmac.digest(token, text, "sha256")


def _check_version(fields: dict[str, Any]) -> None:
    if fields["elastic_resume"] != VERSION:
        raise ProtocolError(
            f"it speaks version {str(fields['elastic_resume'])[:16]!r}, this is version {VERSION}"
        )


def _parse_nonce(value: Any) -> str:
    if (
        not isinstance(value, str)
        or len(value) != NONCE_HEX_CHARS
        or not set(value) <= set("0123456789abcdef")
    ):
        raise ProtocolError("its nonce is not 32 bytes in hexadecimal")
    return value


# ---- messages ----------------------------------------------------------------------------------------


def encode_body(message: Message) -> bytes:
    """Give the part of a message's line that is the same for every receiver."""
    kind = type(message)
    if message == _EMPTY_HEARTBEAT:
        return _EMPTY_HEARTBEAT_JSON
    return dump_json({"type": kind.__name__, "body": _CODECS[kind][0](message)})[1:]


def encode_line(header: Header, body: bytes) -> bytes:
    """Give a whole line: a stamp, which is each connection's own, and a body."""
    # By hand: json takes longer for these four numbers than a leader has for a heartbeat.
    head = f'{{"header":[{header.seq},{header.ack},{header.generation},{header.lease_s!r}],'
    return head.encode() + body + b"\n"


def encode(header: Header, message: Message) -> bytes:
    """Give the line of one message."""
    return encode_line(header, encode_body(message))


def decode(line: bytes) -> tuple[Header, Message]:
    """Read one message.

    Raises:
        WireError: it is not one.

    """
    if line.endswith(b"," + _EMPTY_HEARTBEAT_JSON):  # nearly every line is one
        said = _parse_object(line[: -len(_EMPTY_HEARTBEAT_JSON) - 1] + b"}", {"header"})
        return _parse_header(said["header"]), _EMPTY_HEARTBEAT
    said = _parse_object(line, {"header", "type", "body"})
    kind = _MESSAGE_TYPES.get(said["type"]) if isinstance(said["type"], str) else None
    if kind is None:
        raise ProtocolError(f"there is no message {str(said['type'])[:64]!r}")
    return _parse_header(said["header"]), _CODECS[kind][1](said["body"], kind.__name__)


def to_json_value(value: Any) -> Any:
    """Give a frozen dataclass as plain data, as it would be sent."""
    return get_codec(type(value))[0](value)


def from_json_value(kind: type[T], value: Any) -> T:
    """Read what `to_plain` gave.

    Raises:
        WireError: it is not one.

    """
    read: T = get_codec(kind)[1](value, kind.__name__)
    return read


def _encode_json_line(value: Any) -> bytes:
    return dump_json(value) + b"\n"


def _parse_object(line: bytes, keys: set[str]) -> dict[str, Any]:
    try:
        said = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a line that is not JSON") from error
    if isinstance(said, dict) and "elastic_resume" in keys & said.keys():
        _check_version(said)  # first: other versions have other fields
    if not isinstance(said, dict) or said.keys() != keys:
        raise ProtocolError(f"a line without just the fields {', '.join(sorted(keys))}")
    return said


def _parse_header(value: Any) -> Header:
    if not isinstance(value, list) or len(value) != 4:
        raise ProtocolError("its header is not four numbers")
    counts = [decode_int(one, "header") for one in value[:3]]
    return Header(counts[0], counts[1], counts[2], decode_float(value[3], "header"))


_EMPTY_HEARTBEAT_JSON = b'"type":"Heartbeat","body":[null,null]}'
_EMPTY_HEARTBEAT = messages.Heartbeat()
_MESSAGE_TYPES: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(messages.Message)}
_CODECS: dict[type, tuple[Encode, Decode]] = {kind: get_codec(kind) for kind in _MESSAGE_TYPES.values()}


MIN_TOKEN_BYTES = 16
"""Whoever reads a handshake along can try shorter ones out, on a machine of their own."""
MAX_TOKEN_BYTES = 4096


def load_token(path: Path | None, environ: Mapping[str, str], run_id: str) -> tuple[bytes, bool]:
    """Give the token, and whether it is a secret.

    With neither a file nor the variable it is made from the run's name: that keeps strays out (a job that
    has the wrong port), and no attacker. The file goes before the variable: who writes a flag means it.

    Raises:
        ConfigError: the file may be read by others, or there is no token in what was given, or a short one.

    """
    if path is not None:
        return _validate_token(_read_token_file(path), f"--rdzv-token-file {path}"), True
    if ENV_TOKEN in environ:
        return _validate_token(os.fsencode(environ[ENV_TOKEN]), ENV_TOKEN), True
    return hashlib.sha256(b"elastic_resume run " + run_id.encode(errors="surrogateescape")).digest(), False


def _validate_token(text: bytes, source: str) -> bytes:
    token = text.strip()
    if not token:
        # Set and empty is a secret that somebody failed to fill in: to go on would be to go without one.
        raise ConfigError(f"{source} holds no token: write one (openssl rand -hex 32), or leave it out.")
    if len(token) < MIN_TOKEN_BYTES:
        raise ConfigError(
            f"{source} is shorter than {MIN_TOKEN_BYTES} bytes, so it can be guessed: give all nodes a random "
            "one (openssl rand -hex 32)."
        )
    if len(text) > MAX_TOKEN_BYTES:
        raise ConfigError(f"{source} is longer than {MAX_TOKEN_BYTES} bytes: a token is a line of text.")
    return token


def _read_token_file(path: Path) -> bytes:
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:
            # Of the open file, not of the path: it cannot be exchanged in between.
            _check_permissions(os.fstat(file.fileno()), path)
            return file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--rdzv-token-file {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # a NUL in the path
        raise ConfigError(f"--rdzv-token-file {path} cannot be read: {error}.") from error


def _open_nonblocking(path: str, flags: int) -> int:
    """Open without waiting for a pipe's writer. Links are followed: Kubernetes mounts secrets as such."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _check_permissions(status: os.stat_result, path: Path) -> None:
    """Refuse what somebody else may know."""
    where = f"--rdzv-token-file {path}"
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{where} is not a regular file.")
    if status.st_uid not in {os.geteuid(), 0}:
        raise ConfigError(f"{where} belongs to another user (uid {status.st_uid}), who knows it then.")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"{where} is open to other users (mode {mode:04o}): chmod 600 {path}")
