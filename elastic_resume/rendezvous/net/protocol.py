"""Define the wire protocol between agents: JSON lines of limited length after mutual authentication.

Everything but `load_token` is a pure function of bytes. A line that is too long, is not JSON, or has a wrong
type, field or number raises `ProtocolError` and nothing else. Then the connection is dropped, and the state
machine never sees the line.

The handshake precedes all messages (HMAC-SHA256, RFC 2104; challenge and response as in RFC 2195)::

    dialler   {"elastic_resume": 15, "run": RUN, "nonce": A, "status_only": false}
    acceptor  {"elastic_resume": 15, "nonce": B}
    dialler   {"proof": HMAC(token, "dialler" RUN A B V), "view": V}
    acceptor  {"proof": HMAC(token, "acceptor" RUN A B W), "view": W}

- The dialler proves first. An unauthenticated dialler receives nothing derived from the token. An
  eavesdropper or a fake acceptor does, so a token has 16 bytes or more.
- Both nonces are in each proof, so a recorded handshake proves nothing later. "dialler" and "acceptor" keep a
  proof from being reflected. The run's name keeps two jobs apart.
- V and W are digests of the newest views of both sides: see `view_delta`.
- A wrong proof is answered with an empty one, so that the dialler can report the reason too.
- A dialler with ``status_only`` reads one status line. It uses `derive_status_key` in place of the token, and
  that key permits nothing else.

After the handshake each line is signed, not encrypted. It ends with HMAC-SHA256, cut to 16 bytes, of the line
and the number of lines before it (`LineAuthenticator`). In place of a long line it signs the line's header
and the SHA-256 of the rest, which a leader computes once for thousands of receivers. Each direction has its
own key, HMAC(token, "dialler sends" RUN A B) or "acceptor sends". An attacker who can write into the
connection can end it, but cannot forge, change, repeat, reorder or omit a line unnoticed. A damaged packet is
noticed too: TCP's checksum passes 1 in 65,536. Without a user's token the keys are derived from the run's
name. That detects corruption and misdirected peers, but an attacker who knows the name can forge lines.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import os
import re
import stat
import typing
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from elastic_resume.constants import ENV_TOKEN
from elastic_resume.errors import ConfigError
from elastic_resume.rendezvous.core import messages
from elastic_resume.rendezvous.core.messages import Header, Message
from elastic_resume.rendezvous.net import view_delta
from elastic_resume.rendezvous.net.codec import ProtocolError as ProtocolError  # noqa: PLC0414 - re-exported
from elastic_resume.rendezvous.net.codec import decode_int, dump_json, from_json_value, to_json_value
from elastic_resume.rendezvous.net.view_delta import NO_BASE, Base

VERSION = 15
DIGEST_HEX_CHARS = 32
MAX_GREETING_BYTES = 4096  # limit of a line from an unauthenticated peer
MAX_LINE_BYTES = 8 * 1024 * 1024  # enough for the quorum state of views with 10,000 members
NONCE_HEX_CHARS = 64
LONG_LINE_BYTES = 4096  # of a longer line the digest of its body is signed
MAX_REMEMBERED_BYTES = 1024
MAX_REMEMBERED_MESSAGES = 8
_IS_LONG = 1 << 63  # added to the number of a long line, so that no short line has the same digest

# ---- lines -------------------------------------------------------------------------------------------


class LineReader:
    """Splits a stream into lines; holds at most one incomplete line."""

    def __init__(self, max_line_bytes: int = MAX_GREETING_BYTES) -> None:
        """Limit the length of a line; ``max_line_bytes`` may be raised once the peer is authenticated."""
        self.max_line_bytes = max_line_bytes
        self._buffer = bytearray()
        self._scanned_bytes = 0

    def feed(self, data: bytes | bytearray) -> Iterator[bytes]:
        """Add data and yield the lines that are complete now, without their ends.

        Raises:
            ProtocolError: a line exceeds the limit.

        """
        self._buffer += data
        while True:
            # The limit may have changed with the last line. No byte is searched twice, so a long line that
            # arrives byte by byte costs its length and not the square of it.
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


@dataclass(frozen=True)
class Body:
    """The part of a message's line that is the same for every receiver."""

    text: bytes

    @functools.cached_property
    def digest(self) -> bytes:
        """The SHA-256 of the text."""
        return hashlib.sha256(self.text).digest()


class LineAuthenticator:
    """Signs or verifies the lines of one direction of a connection, in order."""

    def __init__(self, key: bytes) -> None:
        """Use a key of this connection and direction alone."""
        self._mac = hmac.new(key, digestmod=hashlib.sha256)
        self._count = 0

    def sign(self, line: bytes) -> bytes:
        """Return a line with its digest, as it is sent."""
        return self.sign_message(*_split(line[:-1]))

    def sign_message(self, head: bytes, body: Body) -> bytes:
        """Return the line of a message with its digest; ``head`` is from `encode_head`."""
        line = head + body.text
        if len(line) > LONG_LINE_BYTES:
            return b"%b%b\n" % (line, self._compute_digest(head + body.digest, _IS_LONG))
        return b"%b%b\n" % (line, self._compute_digest(line))

    def verify(self, line: bytes) -> bytes:
        """Return what was signed; neither text has the end of the line.

        Raises:
            ProtocolError: the line was changed, or is not the next line of this connection.

        """
        signed = line[:-DIGEST_HEX_CHARS]
        if len(signed) > LONG_LINE_BYTES:
            head, body = _split(signed)
            digest = self._compute_digest(head + body.digest, _IS_LONG)
        else:
            digest = self._compute_digest(signed)
        if not hmac.compare_digest(line[-DIGEST_HEX_CHARS:], digest):
            raise ProtocolError(
                "wrong digest: the line was damaged, or lines were lost or reordered; closing the connection"
            )
        return signed

    def _compute_digest(self, text: bytes, is_long: int = 0) -> bytes:
        mac = self._mac.copy()
        mac.update((self._count + is_long).to_bytes(8, "big") + text)
        self._count += 1
        return mac.hexdigest()[:DIGEST_HEX_CHARS].encode()


def _split(line: bytes) -> tuple[bytes, Body]:
    """Return a long line without its end as head and body."""
    end = line.find(_HEAD_END) + len(_HEAD_END)
    return line[:end], Body(line[end:])


class HandshakeResult(NamedTuple):
    """The end of a handshake; ``final_line`` must still be sent.

    ``signer`` is for the lines of this side, ``verifier`` for those of the peer. ``peer_view`` is the digest
    of the peer's newest view, or empty.
    """

    final_line: bytes
    status_only: bool
    signer: LineAuthenticator
    verifier: LineAuthenticator
    peer_view: str


Handshake = Generator[bytes, bytes, HandshakeResult]
"""One side of a handshake: it yields lines to send, receives the peer's lines, and returns a result.

It raises `ProtocolError` if the peer does not belong to this job.
"""


class AuthenticationError(ProtocolError):
    """The dialler does not hold the token; ``rejection_line`` tells it the reason."""

    rejection_line = b'{"proof":"","view":""}\n'


def derive_status_key(token: bytes) -> bytes:
    """Return the key that permits reading the status of a job, and nothing else."""
    return hmac.new(token, b"elastic_resume looks", hashlib.sha256).digest()


def derive_worker_key(token: bytes) -> bytes:
    """Return the key by which workers of one job prove to each other what they send."""
    return hmac.new(token, b"elastic_resume workers", hashlib.sha256).digest()


def dial(token: bytes, run_id: str, nonce: str, *, status_only: bool = False, view: str = "") -> Handshake:
    """Run the dialler's side; ``nonce`` is 32 fresh random bytes in hexadecimal.

    With ``status_only`` the token is the key of `derive_status_key`. ``view`` is the digest of this side's
    newest view.
    """
    line = yield encode_greeting(run_id, nonce, status_only=status_only)
    theirs = parse_challenge(line)
    line = yield encode_proof(token, "dialler", run_id, (nonce, theirs), view)
    peer_view = verify_proof(line, token, "acceptor", run_id, (nonce, theirs))
    signer, verifier = _make_authenticators(token, run_id, (nonce, theirs))
    return HandshakeResult(b"", status_only, signer, verifier, peer_view)


def accept(token: bytes, run_id: str, nonce: str, *, view: str = "") -> Handshake:
    """Run the acceptor's side; the arguments are as in `dial`. A status client learns of no view."""
    line = yield b""
    theirs, status_only = parse_greeting(line, run_id)
    key = derive_status_key(token) if status_only else token
    line = yield encode_challenge(nonce)
    try:
        peer_view = verify_proof(line, key, "dialler", run_id, (theirs, nonce))
    except ProtocolError as error:
        raise AuthenticationError(str(error)) from error
    verifier, signer = _make_authenticators(key, run_id, (theirs, nonce))
    final_line = encode_proof(key, "acceptor", run_id, (theirs, nonce), "" if status_only else view)
    return HandshakeResult(final_line, status_only, signer, verifier, peer_view)


def encode_greeting(run_id: str, nonce: str, *, status_only: bool = False) -> bytes:
    """Return the dialler's first line."""
    return _encode_json_line(
        {"elastic_resume": VERSION, "run": run_id, "nonce": nonce, "status_only": status_only}
    )


def parse_greeting(line: bytes, run_id: str) -> tuple[str, bool]:
    """Return the dialler's nonce, and whether it is a status client.

    Raises:
        ProtocolError: another protocol, version or job.

    """
    fields = _parse_object(line, {"elastic_resume", "run", "nonce", "status_only"})
    if fields["run"] != run_id:
        raise ProtocolError(f"it belongs to job {str(fields['run'])[:128]!r}, this is {run_id!r}")
    if not isinstance(fields["status_only"], bool):
        raise ProtocolError("status_only is neither true nor false")
    return _parse_nonce(fields["nonce"]), fields["status_only"]


def encode_challenge(nonce: str) -> bytes:
    """Return the acceptor's first line. Nothing in it is derived from the token."""
    return _encode_json_line({"elastic_resume": VERSION, "nonce": nonce})


def parse_challenge(line: bytes) -> str:
    """Return the acceptor's nonce.

    Raises:
        ProtocolError: another protocol or version.

    """
    return _parse_nonce(_parse_object(line, {"elastic_resume", "nonce"})["nonce"])


def encode_proof(token: bytes, role: str, run_id: str, nonces: tuple[str, str], view: str = "") -> bytes:
    """Return the proof of a role, "dialler" or "acceptor"; ``nonces`` are in that order."""
    return _encode_json_line(
        {"proof": _compute_mac(token, role, run_id, (*nonces, view)).hex(), "view": view}
    )


def verify_proof(line: bytes, token: bytes, role: str, run_id: str, nonces: tuple[str, str]) -> str:
    """Verify a line of `encode_proof`; return the view in it.

    Raises:
        ProtocolError: the peer does not hold the token.

    """
    fields = _parse_object(line, {"proof", "view"})
    proof, view = fields["proof"], fields["view"]
    if not isinstance(view, str):
        raise ProtocolError("the digest of its view is not a text")
    expected = _compute_mac(token, role, run_id, (*nonces, view)).hex()
    # compare_digest raises for text that is not ASCII.
    if not isinstance(proof, str) or not proof.isascii() or not hmac.compare_digest(proof, expected):
        raise ProtocolError("it does not hold the run's token (the token file, or ELASTIC_RESUME_TOKEN)")
    return view


def _make_authenticators(
    token: bytes, run_id: str, nonces: tuple[str, str]
) -> tuple[LineAuthenticator, LineAuthenticator]:
    """Return the authenticators of the dialler's lines and of the acceptor's."""
    dialler, acceptor = (
        _compute_mac(token, f"{role} sends", run_id, nonces) for role in ("dialler", "acceptor")
    )
    return LineAuthenticator(dialler), LineAuthenticator(acceptor)


def _compute_mac(token: bytes, label: str, run_id: str, texts: tuple[str, ...]) -> bytes:
    text = json.dumps([label, run_id, *texts]).encode()
    return hmac.digest(token, text, "sha256")


def _parse_nonce(value: Any) -> str:
    if (
        not isinstance(value, str)
        or len(value) != NONCE_HEX_CHARS
        or not set(value) <= set("0123456789abcdef")
    ):
        raise ProtocolError("its nonce is not 32 bytes in hexadecimal")
    return value


# ---- messages ----------------------------------------------------------------------------------------


def encode_body(message: Message, base: Base = NO_BASE) -> Body:
    """Return the part of a message's line that is the same for every receiver with the same base."""
    value, view = to_json_value(message), view_delta.find_view(message)
    if view is not None:
        value = view_delta.shorten(value, view, base)
    return Body(dump_json({"type": type(message).__name__, "body": value})[1:])


def encode_head(header: Header) -> bytes:
    """Return the beginning of a message's line, which each connection has its own of."""
    # Format by hand, because json takes too long for each heartbeat of a leader.
    return f'{{"header":[{header.seq},{header.ack},{header.generation}'.encode() + _HEAD_END


def encode(header: Header, message: Message) -> bytes:
    """Return the line of one message."""
    return encode_head(header) + encode_body(message).text + b"\n"


def decode(line: bytes, base: Base = NO_BASE) -> tuple[Header, Message]:
    """Parse one message; ``base`` is that of its direction.

    Raises:
        ProtocolError: the line is not a message.

    """
    head = _HEAD.match(line)
    if head is None:
        _parse_object(line, {"header", "type", "body"})  # it names what else is wrong
        raise ProtocolError("its header is not three numbers")
    header = Header(*(decode_int(int(number), "header") for number in head.groups()))
    body = line[head.end() :]
    if b'"base":' in body:
        return header, _decode_body(body, functools.partial(view_delta.restore, base=base))
    return header, _decode_short_body(body) if len(body) <= MAX_REMEMBERED_BYTES else _decode_body(body)


def _decode_body(body: bytes, restore: Callable[[dict[str, Any]], Any] | None = None) -> Message:
    # A decoder with a hook is made anew for each line, which takes longer than most lines.
    fields = _parse_object(b"{" + body, {"type", "body"}, restore)
    kind = _MESSAGE_TYPES.get(fields["type"]) if isinstance(fields["type"], str) else None
    if kind is None:
        raise ProtocolError(f"there is no message {str(fields['type'])[:64]!r}")
    return from_json_value(kind, fields["body"])


_decode_short_body = functools.lru_cache(maxsize=16)(_decode_body)
"""Heartbeats, votes and acknowledgements of 10,000 members are equal but for their heads."""


class BodyEncoder:
    """Encodes messages, each once for all receivers that have the same base."""

    def __init__(self) -> None:
        self._newest: dict[int, tuple[Message, dict[str, Body]]] = {}
        """By identity: a leader sends several in turns, such as requests for votes and heartbeats."""

    def encode(self, message: Message, base: Base) -> Body:
        """Return the body of a message for a direction with that base."""
        known = self._newest.get(id(message))
        if known is None:
            if len(self._newest) >= MAX_REMEMBERED_MESSAGES:
                del self._newest[next(iter(self._newest))]
            known = self._newest[id(message)] = message, {}
        body = known[1].get(base.digest)
        if body is None:
            body = known[1][base.digest] = encode_body(message, base)
        return body


def _encode_json_line(value: Any) -> bytes:
    return dump_json(value) + b"\n"


def _parse_object(
    line: bytes, keys: set[str], restore: Callable[[dict[str, Any]], Any] | None = None
) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode(), object_hook=restore)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a line that is not JSON") from error
    if isinstance(fields, dict) and "elastic_resume" in keys & fields.keys():
        version = fields["elastic_resume"]  # checked first: other versions have other fields
        if version != VERSION:
            raise ProtocolError(
                f"it speaks protocol version {str(version)[:16]!r}, this is version {VERSION}: install the "
                "same elastic_resume on all nodes"
            )
    if not isinstance(fields, dict) or fields.keys() != keys:
        raise ProtocolError(f"a line that does not have exactly the fields {', '.join(sorted(keys))}")
    return fields


_HEAD_END = b"],"
_HEAD = re.compile(rb'\{"header":\[(0|[1-9]\d{0,15}),(0|[1-9]\d{0,15}),(0|[1-9]\d{0,15})\],')
_MESSAGE_TYPES: dict[str, type[Message]] = {kind.__name__: kind for kind in typing.get_args(messages.Message)}


# ---- the token ---------------------------------------------------------------------------------------


MIN_TOKEN_BYTES = 16
"""An eavesdropper on a handshake can find shorter tokens by trial."""
MAX_TOKEN_BYTES = 4096


def load_token(path: Path | None, environ: Mapping[str, str], run_id: str) -> tuple[bytes, bool]:
    """Return the token of the run, and whether it is the user's. No error shows any part of it.

    The token file (``token_file`` of ``--rdzv-conf``) precedes the environment variable. With neither the
    token is derived from the run's name, which keeps out agents of other jobs but no attacker.

    Raises:
        ConfigError: other users can read the file, or the token is missing or too short.

    """
    if path is not None:
        return _validate_token(_read_token_file(path), f"token file {path}"), True
    if ENV_TOKEN in environ:
        return _validate_token(os.fsencode(environ[ENV_TOKEN]), ENV_TOKEN), True
    return hashlib.sha256(b"elastic_resume run " + run_id.encode(errors="surrogateescape")).digest(), False


def _validate_token(text: bytes, source: str) -> bytes:
    token = text.strip()
    if not token:
        # A variable that is set and empty is a mistake; without this check the job would run without a token.
        raise ConfigError(f"{source} holds no token: write one (openssl rand -hex 32), or leave it out.")
    if len(token) < MIN_TOKEN_BYTES:
        raise ConfigError(
            f"{source} is shorter than {MIN_TOKEN_BYTES} bytes, so it can be guessed: give all nodes a "
            "random one (openssl rand -hex 32)."
        )
    if len(text) > MAX_TOKEN_BYTES:
        raise ConfigError(f"{source} is longer than {MAX_TOKEN_BYTES} bytes: a token is a line of text.")
    return token


def _read_token_file(path: Path) -> bytes:
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:
            # Checked on the open file, which cannot be replaced in between, unlike the path.
            _check_permissions(os.fstat(file.fileno()), path)
            return file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"token file {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # a NUL in the path
        raise ConfigError(f"token file {path} cannot be read: {error}.") from error


def _open_nonblocking(path: str, flags: int) -> int:
    """Open without waiting for a pipe's writer. Links are followed: Kubernetes mounts secrets as links."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _check_permissions(status: os.stat_result, path: Path) -> None:
    """Refuse a file that other users can read or write."""
    where = f"token file {path}"
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{where} is not a regular file.")
    if status.st_uid not in {os.geteuid(), 0}:
        raise ConfigError(f"{where} belongs to another user (uid {status.st_uid}), who can read it.")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"{where} is open to other users (mode {mode:04o}): chmod 600 {path}")
