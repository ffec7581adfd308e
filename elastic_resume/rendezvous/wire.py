"""What goes over a connection: lines of JSON, limited in length, after both sides have proved who they are.

Everything here is a pure function of bytes. A line that is too long, is not JSON, has an unknown type, a
missing, surplus or ill-typed field, or a number out of range raises `WireError` and nothing else: the shell
drops the connection, and the state machine never sees it.

The handshake is mutual, before any message (HMAC-SHA256, RFC 2104; challenge and response as in RFC 2195)::

    dialler   {"elastic_resume": 1, "run": RUN, "nonce": A}
    acceptor  {"elastic_resume": 1, "nonce": B, "proof": HMAC(token, "acceptor" RUN A B)}
    dialler   {"proof": HMAC(token, "dialler" RUN A B)}

Each side's nonce is in both proofs, so a recorded handshake proves nothing later; the words "acceptor" and
"dialler" keep a proof from being sent back where it came from; the run's name keeps two jobs apart. What
follows is neither encrypted nor signed: the token keeps out strays and strangers, not whoever can rewrite
packets between two nodes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import math
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from elastic_resume.rendezvous import messages
from elastic_resume.rendezvous.messages import Message, Stamp

VERSION = 1
MAX_GREETING_BYTES = 4096  # a line of somebody who has proved nothing yet
MAX_LINE_BYTES = 8 * 1024 * 1024  # what is known of worlds with 10,000 members
NONCE_HEX = 64
_MAX_INT = 1 << 53
_MAX_TEXT = 4096
_MAX_ITEMS = 100_000

T = TypeVar("T")
Encode = Callable[[Any], Any]
Decode = Callable[[Any, str], Any]


class WireError(Exception):
    """What the other side sent is not part of the protocol; the text says what, for the log."""


# ---- lines -------------------------------------------------------------------------------------------


class Lines:
    """Cuts a stream into lines, holding at most one line that is not yet whole."""

    def __init__(self, limit: int = MAX_GREETING_BYTES) -> None:
        """``limit`` bytes are the longest line; set it higher once the other side has proved who it is."""
        self.limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take bytes in and yield the lines that are whole now, without their ends.

        Raises:
            WireError: a line grows past the limit.

        """
        self._rest += data
        while True:
            # Looked up for every line: the limit may have changed with the last one.
            end = self._rest.find(b"\n", 0, self.limit + 1)
            if end < 0:
                if len(self._rest) > self.limit:
                    raise WireError(f"a line of more than {self.limit} bytes")
                return
            line = bytes(self._rest[:end])
            del self._rest[: end + 1]
            yield line


# ---- handshake ---------------------------------------------------------------------------------------


def greeting(run_id: str, nonce: str) -> bytes:
    """Give the dialler's first line."""
    return _line({"elastic_resume": VERSION, "run": run_id, "nonce": nonce})


def read_greeting(line: bytes, run_id: str) -> str:
    """Give the dialler's nonce.

    Raises:
        WireError: another protocol, version or job.

    """
    said = _object(line, {"elastic_resume", "run", "nonce"})
    _check_version(said)
    if said["run"] != run_id:
        raise WireError(f"it belongs to job {str(said['run'])[:128]!r}, this is {run_id!r}")
    return _nonce(said["nonce"])


def answer(token: bytes, run_id: str, theirs: str, ours: str) -> bytes:
    """Give the acceptor's line: its nonce, and the proof that it holds the token."""
    proof = _proof(token, "acceptor", run_id, theirs, ours)
    return _line({"elastic_resume": VERSION, "nonce": ours, "proof": proof})


def read_answer(line: bytes, token: bytes, run_id: str, ours: str) -> bytes:
    """Check the acceptor's proof; give the dialler's last line of the handshake.

    Raises:
        WireError: it does not hold the token, or speaks otherwise.

    """
    said = _object(line, {"elastic_resume", "nonce", "proof"})
    _check_version(said)
    theirs = _nonce(said["nonce"])
    _check_proof(said["proof"], _proof(token, "acceptor", run_id, ours, theirs))
    return _line({"proof": _proof(token, "dialler", run_id, ours, theirs)})


def read_proof(line: bytes, token: bytes, run_id: str, theirs: str, ours: str) -> None:
    """Check the dialler's proof.

    Raises:
        WireError: it does not hold the token.

    """
    said = _object(line, {"proof"})
    _check_proof(said["proof"], _proof(token, "dialler", run_id, theirs, ours))


def _proof(token: bytes, side: str, run_id: str, dialler: str, acceptor: str) -> str:
    text = json.dumps([side, run_id, dialler, acceptor]).encode()
    return hmac.new(token, text, hashlib.sha256).hexdigest()


def _check_proof(said: Any, expected: str) -> None:
    # Half of a surrogate pair is JSON and a str, and has no encoding: only ASCII may reach the comparison.
    if not isinstance(said, str) or not said.isascii() or not hmac.compare_digest(said, expected):
        raise WireError("it does not hold the run's token (--rdzv-token-file, ELASTIC_RESUME_TOKEN)")


def _check_version(said: dict[str, Any]) -> None:
    if said["elastic_resume"] != VERSION:
        raise WireError(f"it speaks version {str(said['elastic_resume'])[:16]}, this is version {VERSION}")


def _nonce(value: Any) -> str:
    if not isinstance(value, str) or len(value) != NONCE_HEX or not set(value) <= set("0123456789abcdef"):
        raise WireError("its nonce is not 32 bytes in hexadecimal")
    return value


# ---- messages ----------------------------------------------------------------------------------------


def body_of(message: Message) -> bytes:
    """Give the part of a message's line that is the same for every receiver."""
    kind = type(message)
    return _dump({"type": kind.__name__, "body": _CODECS[kind][0](message)})[1:]


def line_of(stamp: Stamp, body: bytes) -> bytes:
    """Give a whole line: a stamp, which is each connection's own, and a body."""
    head = _dump([stamp.seq, stamp.echo, stamp.generation, stamp.lease_s])
    return b'{"stamp":' + head + b"," + body + b"\n"


def encode(stamp: Stamp, message: Message) -> bytes:
    """Give the line of one message."""
    return line_of(stamp, body_of(message))


def decode(line: bytes) -> tuple[Stamp, Message]:
    """Read one message.

    Raises:
        WireError: it is not one.

    """
    said = _object(line, {"stamp", "type", "body"})
    kind = _KINDS.get(said["type"]) if isinstance(said["type"], str) else None
    if kind is None:
        raise WireError(f"there is no message {str(said['type'])[:64]!r}")
    stamp = said["stamp"]
    if not isinstance(stamp, list) or len(stamp) != 4:
        raise WireError("its stamp is not four numbers")
    counts = [_read_int(value, "stamp") for value in stamp[:3]]
    message = _CODECS[kind][1](said["body"], kind.__name__)
    return Stamp(counts[0], counts[1], counts[2], _read_float(stamp[3], "stamp")), message


def to_plain(value: Any) -> Any:
    """Give a frozen dataclass as plain data, as it would be sent."""
    return _codec(type(value))[0](value)


def from_plain(kind: type[T], value: Any) -> T:
    """Read what `to_plain` gave.

    Raises:
        WireError: it is not one.

    """
    read: T = _codec(kind)[1](value, kind.__name__)
    return read


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _line(value: Any) -> bytes:
    return _dump(value) + b"\n"


def _object(line: bytes, keys: set[str]) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError("a line that is not JSON") from error
    if not isinstance(said, dict) or said.keys() != keys:
        raise WireError(f"a line without just the fields {', '.join(sorted(keys))}")
    return said


def _read_int(value: Any, where: str) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_INT:
        raise WireError(f"{where}: not a whole number in range")
    return value


def _read_float(value: Any, where: str) -> float:
    if type(value) not in {int, float} or not math.isfinite(value) or not 0 <= value <= _MAX_INT:
        raise WireError(f"{where}: not a number in range")
    return float(value)


def _read_text(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise WireError(f"{where}: not a text of at most {_MAX_TEXT} characters")
    return value


def _read_bool(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise WireError(f"{where}: neither true nor false")
    return value


_PLAIN: dict[Any, Decode] = {int: _read_int, float: _read_float, str: _read_text, bool: _read_bool}


def _items(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MAX_ITEMS:
        raise WireError(f"{where}: not a list of at most {_MAX_ITEMS}")
    return value


def _codec(kind: Any) -> tuple[Encode, Decode]:
    """Make the two functions for a type hint of a message's field."""
    if kind in _PLAIN:
        return (lambda value: value), _PLAIN[kind]
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass_codec(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in {types.UnionType, typing.Union} and len(arguments) == 2 and type(None) in arguments:
        put, take = _codec(next(one for one in arguments if one is not type(None)))
        return (
            lambda value: None if value is None else put(value),
            lambda value, where: None if value is None else take(value, where),
        )
    if origin is tuple and arguments[1:] == (...,):
        put, take = _codec(arguments[0])
        return (
            lambda value: [put(item) for item in value],
            lambda value, where: tuple(take(item, where) for item in _items(value, where)),
        )
    if origin is tuple:
        return _pair_codec(arguments)
    if origin is frozenset:
        put, take = _codec(arguments[0])
        return (
            lambda value: sorted((put(item) for item in value), key=_dump),
            lambda value, where: frozenset(take(item, where) for item in _items(value, where)),
        )
    raise TypeError(f"no way to send a {kind}")


def _pair_codec(kinds: tuple[Any, ...]) -> tuple[Encode, Decode]:
    codecs = [_codec(kind) for kind in kinds]

    def put(value: Any) -> Any:
        return [codec[0](item) for codec, item in zip(codecs, value, strict=True)]

    def take(value: Any, where: str) -> Any:
        items = _items(value, where)
        if len(items) != len(codecs):
            raise WireError(f"{where}: not {len(codecs)} items")
        return tuple(codec[1](item, where) for codec, item in zip(codecs, items, strict=True))

    return put, take


def _dataclass_codec(kind: type) -> tuple[Encode, Decode]:
    """Fields in their order, as a list: names would be most of a large world's bytes."""
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    codecs = [_codec(hints[name]) for name in names]

    def put(value: Any) -> Any:
        return [codec[0](getattr(value, name)) for name, codec in zip(names, codecs, strict=True)]

    def take(value: Any, where: str) -> Any:
        items = _items(value, where)
        if len(items) != len(names):
            raise WireError(f"{where}: {len(items)} fields instead of {len(names)}")
        read = [
            codec[1](item, f"{where}.{name}") for name, codec, item in zip(names, codecs, items, strict=True)
        ]
        return kind(*read)

    return put, take


_KINDS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(messages.Message)}
_CODECS: dict[type, tuple[Encode, Decode]] = {kind: _dataclass_codec(kind) for kind in _KINDS.values()}
