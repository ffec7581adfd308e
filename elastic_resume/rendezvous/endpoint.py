"""Where this agent listens, and whether it is one of the candidates that ``--rdzv-endpoint`` names.

An agent whose address is a candidate's listens there and is that candidate; every other listens on a port
that the kernel chooses. The names are resolved, compared with this machine's own names and addresses, and
bound; ``--local-addr`` decides where those do not tell.

Promise: no two agents of a machine are one candidate (one port of one address has one listener); an agent
that is none is not kept waiting by candidates that are not there yet; nobody waits for a name or for the
holder of a port for longer than asked. `getaddrinfo` may take minutes and cannot be interrupted, so each name
has a daemon thread of its own.

A name that leads to none of this machine's addresses and is not its own, such as that of a Kubernetes service
in front of it, makes it no candidate.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from elastic_resume.errors import ConfigError, MachineError
from elastic_resume.rendezvous.net import protocol

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

# ---- names and addresses -----------------------------------------------------------------------------------


Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str], Sequence[str]]

# A headless service of Kubernetes knows a pod some seconds after its start; more often would be a burden.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 2.0
_DENIED = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
_LOOPBACK_NAME = re.compile(r"localhost[46]?(\.localdomain[46]?)?|ip6-(localhost|loopback)|.+\.localhost")


def lookup(name: str) -> list[str]:
    """Ask the system for a name's addresses, in its order of preference.

    Raises:
        OSError: there are none, or nobody can be asked.

    """
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def read_address(text: str) -> Address | None:
    """Read a numeric address; None for a name. An IPv4 address in IPv6 clothes is the IPv4 address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        return address.ipv4_mapped
    return address


def is_loopback_name(name: str) -> bool:
    """Whether a name means the loopback interface on every machine (RFC 6761), and so no machine."""
    return _LOOPBACK_NAME.fullmatch(_plain(name)) is not None


def own_addresses() -> frozenset[Address]:
    """Give the addresses of this machine's interfaces."""
    texts = (one.address for each in psutil.net_if_addrs().values() for one in each)
    return frozenset(_without_scope(found) for text in texts if (found := read_address(text)) is not None)


def _without_scope(address: Address) -> Address:
    return read_address(str(address).partition("%")[0]) or address


def _plain(name: str) -> str:
    return name.lower().rstrip(".")


@dataclass(frozen=True)
class Known:
    """What is known of names and of this machine at one moment.

    ``found`` holds what a name stands for, ``denied`` the names of which it was said that there are none;
    of a name in neither nothing is known yet. ``own_names`` are plain: lower case, no dot at the end.
    """

    found: Mapping[str, tuple[Address, ...]]
    denied: frozenset[str]
    own_names: frozenset[str]
    own_addresses: frozenset[Address]
    fqdn_known: bool = True

    def is_own(self, address: Address) -> bool:
        """Whether an address is this machine's. All of 127.0.0.0/8 is, though an interface shows but one."""
        return address.is_loopback or _without_scope(address) in self.own_addresses

    def is_own_name(self, name: str) -> bool:
        """Whether a name is this machine's own.

        A short form of the full name counts (Kubernetes: ``job-0.svc`` of ``job-0.svc.ns.svc.cluster.local``)
        unless it is known to lead elsewhere.
        """
        plain = _plain(name)
        if plain in self.own_names:
            return True
        elsewhere = any(not one.is_loopback for one in self.found.get(name, ()))
        return not elsewhere and any(own.startswith(plain + ".") for own in self.own_names)

    def resembles_own_name(self, name: str) -> bool:
        """Whether a name begins as this machine's: until it resolves, nobody can tell whose it is."""
        first = _plain(name).partition(".")[0]
        return any(own.partition(".")[0] == first for own in self.own_names)

    def meant(self, host: str) -> frozenset[Address]:
        """Give the addresses that a host stands for, seen from anywhere; none when that is not known.

        Debian maps a machine's own name to 127.0.1.1, and behind NAT it leads to the gate: where the own
        name gives none of the machine's addresses, it stands for all of them.
        """
        address = read_address(host)
        if address is not None:
            return frozenset({_without_scope(address)})
        found = frozenset(_without_scope(one) for one in self.found.get(host, ()))
        outer = frozenset(one for one in self.own_addresses if not one.is_loopback)
        return found | outer if self.is_own_name(host) and not found & outer else found


class Lookups:
    """Looks up names, all at once, from `start` to `stop`."""

    def __init__(self, names: Iterable[str], resolve: Resolve = lookup) -> None:
        """``resolve`` is called in threads, any number of times; OSError means not now."""
        self._names = list(dict.fromkeys(names))
        self._resolve = resolve
        self._change = threading.Condition()
        self._stopped = threading.Event()
        self._found: dict[str, tuple[Address, ...]] = {}
        self._denied: set[str] = set()
        self._own_names = {_plain(socket.gethostname())}
        self._fqdn_known = not self._names  # where there are only numbers nothing is compared with it

    def start(self) -> None:
        """Start to ask."""
        if self._names:
            _in_thread(self._ask_fqdn)
        for name in self._names:
            _in_thread(self._look_up, name)

    def stop(self) -> None:
        """Ask no more; a question that hangs is left behind."""
        self._stopped.set()

    def known(self) -> Known:
        """Give what is known now."""
        with self._change:
            names = frozenset(name for name in self._own_names if name and not is_loopback_name(name))
            found, denied = dict(self._found), frozenset(self._denied)
            return Known(found, denied, names, own_addresses(), self._fqdn_known)

    def wait(self, timeout_s: float) -> None:
        """Wait for an answer, or for so long."""
        with self._change:
            self._change.wait(timeout_s)

    def _ask_fqdn(self) -> None:
        name = socket.getfqdn()
        with self._change:
            self._own_names.add(_plain(name))
            self._fqdn_known = True
            self._change.notify_all()

    def _look_up(self, name: str) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stopped.is_set():
            addresses: list[Address] = []
            denied = False
            try:
                addresses = [one for text in self._resolve(name) if (one := read_address(text)) is not None]
            except UnicodeError:  # from the codec for international names: it never can be one
                denied = True
            except OSError as error:
                denied = error.errno in _DENIED
            with self._change:
                if addresses:
                    self._found[name] = tuple(addresses)
                elif denied:
                    self._denied.add(name)
                self._change.notify_all()
            if addresses:
                return
            self._stopped.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _in_thread(work: Callable[..., None], *arguments: str) -> None:
    threading.Thread(target=work, args=arguments, name="elastic-resume-lookup", daemon=True).start()


# ---- ports -------------------------------------------------------------------------------------------------


BACKLOG = 1024  # all nodes dial at once when the job starts
ANSWER_S = 5.0
"""How long the holder of a port has to show who it is; as long as `shell.Limits` gives the other side."""
ANYWHERE: tuple[Address, ...] = (ipaddress.IPv6Address("::"), ipaddress.IPv4Address("0.0.0.0"))  # noqa: S104
"""All addresses of this machine: both families by one socket, or IPv4 where the kernel has no IPv6."""
_ABSENT = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL}


class TakenError(Exception):
    """A port cannot be had at this moment; the text says why, without a full stop."""


def listen(places: Iterable[Address], port: int) -> socket.socket:
    """Listen at the first of the places that this machine has; 0 lets the kernel choose the port.

    Raises:
        TakenError: the port is held there, and a later place is not tried (two agents would both believe
            that they have it); or the machine has none of the places, yet.
        ConfigError: the port is root's.
        MachineError: the system lets nobody listen.

    """
    absent = "this machine has no address to listen at"
    for place in places:
        listener: socket.socket | None = None
        try:
            listener = open_socket(place, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if place.version == 6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not place.is_unspecified)
            listener.bind(sockaddr(place, port))
            listener.listen(BACKLOG)
            return listener
        except OSError as error:
            if listener is not None:
                listener.close()
            absent = f"this machine cannot listen at {place}, port {port}: {error.strerror}"
            if error.errno == errno.EADDRINUSE:
                raise TakenError(
                    f"port {port} of this machine is held by another program, or by an agent of another job "
                    "or token"
                ) from error
            if error.errno == errno.EACCES:
                raise ConfigError(
                    f"--rdzv-endpoint: only root may listen on port {port}: choose one above 1023."
                ) from error
            if error.errno not in _ABSENT:
                raise MachineError(f"{absent}.") from error
    raise TakenError(absent)


def open_socket(address: Address, kind: socket.SocketKind) -> socket.socket:
    """Open a socket of the address's family."""
    return socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, kind)


def sockaddr(address: Address, port: int) -> tuple[str, int] | tuple[str, int, int, int]:
    """Give an address as `socket` wants it. An address that holds for one link only names the link.

    Raises:
        OSError: this machine has no such link.

    """
    text, _, scope = str(address).partition("%")
    if address.version == 4:
        return text, port
    if not scope or scope.isdigit():
        return text, port, 0, int(scope or 0)
    return text, port, 0, socket.if_nametoindex(scope)


def is_of_this_job(targets: Iterable[Address], port: int, run_id: str, token: bytes) -> bool:
    """Whether one who listens at one of the addresses proves to be an agent of this job."""
    deadline = time.monotonic() + ANSWER_S
    for target in targets:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        with (
            contextlib.suppress(OSError, protocol.WireError),
            open_socket(target, socket.SOCK_STREAM) as sock,
        ):
            sock.settimeout(left_s)
            sock.connect(sockaddr(target, port))
            if _proves_itself(sock, run_id, token, deadline):
                return True
    return False


def _proves_itself(sock: socket.socket, run_id: str, token: bytes, deadline: float) -> bool:
    """Be the dialler of a handshake, to its end: whoever leaves before is told of as a stranger."""
    side = protocol.call(token, run_id, secrets.token_hex(32))
    sock.sendall(next(side))
    lines = protocol.Lines()
    while (left_s := deadline - time.monotonic()) > 0:
        sock.settimeout(left_s)
        data = sock.recv(4096)
        if not data:
            return False
        for line in lines.feed(data):
            try:
                sock.sendall(side.send(line))
            except StopIteration:
                return True
    return False


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
