"""Where this agent listens, and whether it is one of the candidates that ``--rdzv-endpoint`` names.

An agent whose address is a candidate's listens there and is that candidate; every other listens on a port
that the kernel chooses. What it promises: no two agents of a machine are one candidate; an agent that is
none is not kept waiting by candidates that are not there yet. Does not know how a name is looked up
(`names`), how a port is listened on (`ports`), nor what is said there.

A name that leads to none of this machine's addresses and is not its own, such as that of a Kubernetes service
in front of it, makes it no candidate.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic_resume.errors import ConfigError, MachineError
from elastic_resume.rendezvous.names import (
    Address,
    Known,
    Lookups,
    Resolve,
    is_loopback_name,
    lookup,
    read_address,
)
from elastic_resume.rendezvous.ports import (
    ANYWHERE,
    TakenError,
    is_of_this_job,
    listen,
    open_socket,
    sockaddr,
)

DEFAULT_PORT = 29400  # torchrun's own
MAX_ENDPOINTS = 1000
SAY_AFTER_S = 3.0
SLOW_ANSWER_S = 10.0
"""How long a name without any answer is waited for when others have one: glibc asks twice for 5 s."""
FQDN_S = 1.0
"""How long this machine's full name is waited for: it matters only where names lead to no interface."""
PORT_PATIENCE_S = 2.0
"""A killed agent of this job may still be dying, an IPv6 address may still be checked for doubles."""
_PAUSE_S = 0.1
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_SCOPE = re.compile(r"[A-Za-z0-9_.-]{1,15}")


@dataclass(frozen=True)
class Endpoint:
    """A host, by name or address, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Seat:
    """Where this agent listens.

    ``host``: where others reach this node. ``address``: what others dial, ``host:port``; for a candidate as
    it was written, with the true port where 0 was asked. ``candidate``: its place in the list, or None.
    ``notice``: a line for people, or "".
    """

    listener: socket.socket
    host: str
    address: str
    candidate: int | None
    notice: str = ""


# ---- what people write -------------------------------------------------------------------------------


def parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    """Read ``host[:port],host[:port],...``; IPv6 as ``[::1]:29400``, or without a port as ``::1``.

    Raises:
        ConfigError: a part of it is wrong, there twice, or there are too many.

    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MAX_ENDPOINTS:
        raise ConfigError(f"--rdzv-endpoint: {len(parts)} candidates; at most {MAX_ENDPOINTS} make sense.")
    found: list[Endpoint] = []
    known: set[Endpoint] = set()
    for part in parts:
        endpoint = _read_endpoint(part)
        if endpoint in known:
            raise ConfigError(f"--rdzv-endpoint: {part} is there twice: name each candidate once.")
        if endpoint.port == 0 and len(parts) > 1:
            raise ConfigError(
                f"--rdzv-endpoint: {part} leaves the port open (0), which the other candidates cannot know: "
                f"give one, such as {DEFAULT_PORT}."
            )
        found.append(endpoint)
        known.add(endpoint)
    return tuple(found)


def _read_endpoint(part: str) -> Endpoint:
    bracketed = re.fullmatch(r"(\[[^\[\]]*\])(?:(:)(.*))?", part, re.DOTALL)
    if bracketed is not None:
        host, colon, port = bracketed[1], bracketed[2] or "", bracketed[3] or ""
    elif part.count(":") > 1:
        host, colon, port = part, "", ""
    else:
        host, colon, port = part.partition(":")
    if not host:
        raise ConfigError(f"--rdzv-endpoint: {_shown(part)} names no host: write HOST[:PORT],HOST[:PORT],...")
    number = _read_port(port, part) if colon else DEFAULT_PORT
    return Endpoint(_read_host(host, "--rdzv-endpoint"), number)


def _read_port(text: str, part: str) -> int:
    if re.fullmatch(r"[0-9]{1,5}", text) is None or int(text) > 65535:
        raise ConfigError(
            f"--rdzv-endpoint: {_shown(part)} has no valid port after the colon: 1 to 65535, or leave it out."
        )
    return int(text)


def _read_host(text: str, flag: str) -> str:
    """Give a host in its one spelling: every node must read the same list as the same list."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    address = read_address(bare)
    if address is None:
        labels = bare.removesuffix(".").split(".")
        valid = len(bare) <= 253 and all(_LABEL.fullmatch(label) for label in labels)
        if bare is not text or not valid or _NUMBER.fullmatch(labels[-1]):
            hint = "[ADDRESS]:PORT with IPv6" if ":" in text else "no scheme, path or blank"
            raise ConfigError(f"{flag}: {_shown(text)} is neither a host's name nor an address ({hint}).")
        return bare.lower()
    scope = str(address).partition("%")[2]
    if address.is_unspecified or address.is_multicast or (scope and _SCOPE.fullmatch(scope) is None):
        raise ConfigError(f"{flag}: {_shown(text)} is no address at which other nodes could reach one.")
    return str(address)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


# ---- taking a place ----------------------------------------------------------------------------------


def take_seat(
    endpoints: Sequence[Endpoint],
    local_addr: str | None,
    *,
    run_id: str,
    token: bytes,
    resolve_s: float = 60.0,
    resolve: Resolve = lookup,
    say: Callable[[str], None] | None = None,
) -> Seat:
    """Listen: as a candidate if this agent is one, on any port if not.

    Args:
        endpoints: the candidates.
        local_addr: ``--local-addr``: where others reach this node. Without it this machine's own name and
            all its addresses are compared with the candidates.
        run_id: the job's name.
        token: what agents of the job hold.
        resolve_s: how long names may take to get an address.
        resolve: gives a name's addresses; called in threads.
        say: gets a line for people when names take long.

    Raises:
        ConfigError: a name has no address, ``local_addr`` is another machine's, or the port of the only
            candidate is held by another program.
        MachineError: the system lets nobody listen.

    """
    local = _read_host(local_addr, "--local-addr") if local_addr else None
    known = _learn(endpoints, local, resolve_s, resolve, say)
    if local is not None and not _places(known, local, explicit=True):
        raise ConfigError(
            f"--local-addr {local} is not an address of this machine: give one of its own, or leave it out."
        )
    matches = _matches(known, endpoints, local)
    if not matches and endpoints[0].port == 0:
        raise ConfigError(
            f"--rdzv-endpoint {endpoints[0]} is not this machine, and no other can know a port that is left "
            f"open (0): give the port."
        )
    if not matches:
        return _ordinary_seat(known, endpoints, local)
    bids = [_bid(known, index, endpoints[index], local) for index in matches]
    return _candidate_seat(known, bids, run_id, token, others=len(bids) < len(endpoints))


def _learn(
    endpoints: Sequence[Endpoint],
    local: str | None,
    resolve_s: float,
    resolve: Resolve,
    say: Callable[[str], None] | None,
) -> Known:
    """Wait until it is known who this agent is."""
    hosts = [one.host for one in endpoints] + ([local] if local else [])
    lookups = Lookups((host for host in hosts if read_address(host) is None), resolve)
    start = time.monotonic()
    lookups.start()
    try:
        while True:
            known, waited_s = lookups.known(), time.monotonic() - start
            open_names = _open_names(known, endpoints, local, waited_s, resolve_s)
            if not open_names:
                return known
            if waited_s >= resolve_s:
                raise ConfigError(_unresolved_text(known, open_names[0], local, waited_s))
            if say is not None and waited_s >= SAY_AFTER_S:
                more = f" and {len(open_names) - 1} more" if len(open_names) > 1 else ""
                say(f"waiting for an address of {open_names[0]}{more}, for at most {resolve_s:.0f} s.")
                say = None
            lookups.wait(min(_PAUSE_S, resolve_s - waited_s))
    finally:
        lookups.stop()


def _open_names(
    known: Known, endpoints: Sequence[Endpoint], local: str | None, waited_s: float, resolve_s: float
) -> list[str]:
    """Give the names without which nobody can tell whether this agent is a candidate.

    A candidate's node that is not there yet has no address yet: that must not keep the others from starting.
    """
    if local is not None and not known.meant(local):
        return [local]
    if _matches(known, endpoints, local):
        return []
    missing = [one.host for one in endpoints if not known.meant(one.host)]
    if len(missing) == len(endpoints):
        return missing
    alike = [name for name in missing if known.resembles_own_name(name)]
    if alike:
        return alike
    silent = [name for name in missing if name not in known.denied]
    if silent and waited_s < min(SLOW_ANSWER_S, resolve_s):
        return silent
    return ["this machine's full name"] if not known.fqdn_known and waited_s < min(FQDN_S, resolve_s) else []


def _unresolved_text(known: Known, name: str, local: str | None, waited_s: float) -> str:
    """Say which name has no address, and what to do."""
    if name == local:
        return (
            f"--local-addr {name} has no address after {waited_s:.0f} s: give an address instead of a name."
        )
    why = ", and begins as this machine's own name" if known.resembles_own_name(name) else ""
    return (
        f"--rdzv-endpoint: {name} has no address after {waited_s:.0f} s{why}: correct the name, make "
        "it known to this machine (getent hosts NAME), or give an address."
    )


def _matches(known: Known, endpoints: Sequence[Endpoint], local: str | None) -> list[int]:
    """Give the candidates that this agent may be; ports do not count."""
    # A port left open means that there is one agent, on this machine, whatever its address is.
    if local is None or endpoints[0].port == 0:
        own = [
            known.is_own_name(one.host) or any(map(known.is_own, known.meant(one.host))) for one in endpoints
        ]
    else:
        mine = known.meant(local)
        own = [one.host == local or not mine.isdisjoint(known.meant(one.host)) for one in endpoints]
    return [index for index, is_own in enumerate(own) if is_own]


def _places(known: Known, host: str, *, explicit: bool) -> tuple[Address, ...]:
    """Give the addresses to bind so that others reach ``host``, best first; none if it is not this machine.

    An address, and what ``--local-addr`` says, is bound exactly: simulated nodes share a machine, with one
    address each. Another name leads elsewhere for others, perhaps (Debian's 127.0.1.1, two networks, IPv4
    here and IPv6 there): so the machine listens at all its addresses. localhost stays inside.
    """
    address = read_address(host)
    if address is not None:
        return (address,) if known.is_own(address) else ()
    found = [one for one in known.found.get(host, ()) if known.is_own(one)]
    outer = [one for one in found if not one.is_loopback]
    if is_loopback_name(host):
        return tuple(found)
    if explicit and not known.is_own_name(host):
        return tuple(outer or found)
    return tuple(outer) if explicit and outer else ANYWHERE


def _ordinary_seat(known: Known, endpoints: Sequence[Endpoint], local: str | None) -> Seat:
    if local is not None:
        return _open_seat(_places(known, local, explicit=True), local)
    source = _source(known, endpoints)
    return _open_seat((source,), str(source))


def _source(known: Known, endpoints: Sequence[Endpoint]) -> Address:
    """Give the address from which the kernel reaches a candidate; no packet is sent."""
    for one in endpoints:
        literal = read_address(one.host)
        for target in known.found.get(one.host, ()) if literal is None else (literal,):
            with contextlib.suppress(OSError), open_socket(target, socket.SOCK_DGRAM) as probe:
                probe.connect(sockaddr(target, one.port))
                source = read_address(probe.getsockname()[0])
                # Others can do nothing with a loopback address, nor with one that holds for a link.
                if source and (target.is_loopback or not (source.is_loopback or source.is_link_local)):
                    return source
    raise ConfigError(
        f"no network leads from this machine to {endpoints[0]}, nor to any other candidate: "
        "see to its network, or say with --local-addr where others reach it."
    )


@dataclass(frozen=True)
class _Bid:
    """One place that this agent may take: ``asked`` is the candidate, ``places`` what to bind for it."""

    index: int
    asked: Endpoint
    host: str
    places: tuple[Address, ...]


def _bid(known: Known, index: int, asked: Endpoint, local: str | None) -> _Bid:
    host = local or asked.host
    return _Bid(index, asked, host, _places(known, host, explicit=local is not None))


def _candidate_seat(known: Known, bids: Sequence[_Bid], run_id: str, token: bytes, *, others: bool) -> Seat:
    """Take the first of the places that is free, else an ordinary member's on the same host."""
    deadline = time.monotonic() + PORT_PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(TakenError):
            return _first_free(bids)
        time.sleep(_PAUSE_S)
    for bid in bids:
        if is_of_this_job(_answering(known, bid), bid.asked.port, run_id, token):
            return _open_seat(bid.places, bid.host)
    try:
        return _first_free(bids)  # whoever held it may have gone meanwhile
    except TakenError as error:
        first = bids[0]
        if not others:
            raise ConfigError(
                f"--rdzv-endpoint {first.asked}: {error}: make it free, or name another port on all nodes."
            ) from error
        notice = f"this node cannot be the candidate {first.asked}: {error}. It joins through the others."
        return _open_seat(first.places, first.host, notice)


def _first_free(bids: Sequence[_Bid]) -> Seat:
    """Take the first place that is free; raise what kept the first bid from its own."""
    reasons: list[TakenError] = []
    for bid in bids:
        try:
            listener = listen(bid.places, bid.asked.port)
        except TakenError as error:
            reasons.append(error)
            continue
        # A port left open is known to nobody yet: so the address may be the one that was told.
        port = listener.getsockname()[1]
        address = bid.asked if bid.asked.port else Endpoint(bid.host, port)
        return Seat(listener, bid.host, str(address), bid.index)
    raise reasons[0]


def _answering(known: Known, bid: _Bid) -> list[Address]:
    """Give this machine's addresses at which whoever keeps us from a place may answer."""
    if bid.places != ANYWHERE:
        return list(bid.places)
    named = [one for one in known.found.get(bid.asked.host, ()) if known.is_own(one)]
    loopback = [one for text in ("127.0.0.1", "::1") if (one := read_address(text)) is not None]
    return list(dict.fromkeys([*named, *loopback, *sorted(known.own_addresses, key=str)]))


def _open_seat(places: Sequence[Address], host: str, notice: str = "") -> Seat:
    """Listen on a port that the kernel chooses."""
    try:
        listener = listen(places, 0)
    except TakenError as error:
        raise MachineError(f"no port is free to listen on at {host}: {error}.") from error
    port = listener.getsockname()[1]
    return Seat(listener, host, str(Endpoint(host, port)), None, notice)
