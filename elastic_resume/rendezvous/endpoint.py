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
LOG_LOOKUP_AFTER_S = 3.0
LOOKUP_TIMEOUT_S = 10.0
"""How long a name without any answer is waited for when others have one: glibc asks twice for 5 s."""
FQDN_TIMEOUT_S = 1.0
"""How long this machine's full name is waited for: it matters only where names lead to no interface."""
PORT_RETRY_S = 2.0
"""A killed agent of this job may still be dying, an IPv6 address may still be checked for doubles."""
_POLL_INTERVAL_S = 0.1
_HOST_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_SCOPE_ID = re.compile(r"[A-Za-z0-9_.-]{1,15}")

# ---- names and addresses -----------------------------------------------------------------------------------


Address = ipaddress.IPv4Address | ipaddress.IPv6Address
ResolveFunction = Callable[[str], Sequence[str]]

# A headless service of Kubernetes knows a pod some seconds after its start; more often would be a burden.
_MIN_RETRY_S, _MAX_RETRY_S = 0.2, 2.0
_NAME_NOT_FOUND = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
_LOOPBACK_NAME = re.compile(r"localhost[46]?(\.localdomain[46]?)?|ip6-(localhost|loopback)|.+\.localhost")


def resolve_name(name: str) -> list[str]:
    """Ask the system for a name's addresses, in its order of preference.

    Raises:
        OSError: there are none, or nobody can be asked.

    """
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def parse_address(text: str) -> Address | None:
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
    return _LOOPBACK_NAME.fullmatch(_normalize_name(name)) is not None


def local_addresses() -> frozenset[Address]:
    """Give the addresses of this machine's interfaces."""
    texts = (one.address for each in psutil.net_if_addrs().values() for one in each)
    return frozenset(_strip_scope(found) for text in texts if (found := parse_address(text)) is not None)


def _strip_scope(address: Address) -> Address:
    return parse_address(str(address).partition("%")[0]) or address


def _normalize_name(name: str) -> str:
    return name.lower().rstrip(".")


@dataclass(frozen=True)
class HostTable:
    """What is known of names and of this machine at one moment.

    ``found`` holds what a name stands for, ``denied`` the names of which it was said that there are none;
    of a name in neither nothing is known yet. ``own_names`` are plain: lower case, no dot at the end.
    """

    addresses: Mapping[str, tuple[Address, ...]]
    nonexistent: frozenset[str]
    local_names: frozenset[str]
    local_addresses: frozenset[Address]
    is_fqdn_known: bool = True

    def is_local_address(self, address: Address) -> bool:
        """Whether an address is this machine's. All of 127.0.0.0/8 is, though an interface shows but one."""
        return address.is_loopback or _strip_scope(address) in self.local_addresses

    def is_local_name(self, name: str) -> bool:
        """Whether a name is this machine's own.

        A short form of the full name counts (Kubernetes: ``job-0.svc`` of ``job-0.svc.ns.svc.cluster.local``)
        unless it is known to lead elsewhere.
        """
        plain = _normalize_name(name)
        if plain in self.local_names:
            return True
        elsewhere = any(not one.is_loopback for one in self.addresses.get(name, ()))
        return not elsewhere and any(own.startswith(plain + ".") for own in self.local_names)

    def resembles_local_name(self, name: str) -> bool:
        """Whether a name begins as this machine's: until it resolves, nobody can tell whose it is."""
        first = _normalize_name(name).partition(".")[0]
        return any(own.partition(".")[0] == first for own in self.local_names)

    def expand_host(self, host: str) -> frozenset[Address]:
        """Give the addresses that a host stands for, seen from anywhere; none when that is not known.

        Debian maps a machine's own name to 127.0.1.1, and behind NAT it leads to the gate: where the own
        name gives none of the machine's addresses, it stands for all of them.
        """
        address = parse_address(host)
        if address is not None:
            return frozenset({_strip_scope(address)})
        found = frozenset(_strip_scope(one) for one in self.addresses.get(host, ()))
        outer = frozenset(one for one in self.local_addresses if not one.is_loopback)
        return found | outer if self.is_local_name(host) and not found & outer else found


class BackgroundResolver:
    """Looks up names, all at once, from `start` to `stop`."""

    def __init__(self, names: Iterable[str], resolve: ResolveFunction = resolve_name) -> None:
        """``resolve`` is called in threads, any number of times; OSError means not now."""
        self._names = list(dict.fromkeys(names))
        self._resolve = resolve
        self._condition = threading.Condition()
        self._stopped = threading.Event()
        self._addresses: dict[str, tuple[Address, ...]] = {}
        self._nonexistent: set[str] = set()
        self._local_names = {_normalize_name(socket.gethostname())}
        self._fqdn_known = not self._names  # where there are only numbers nothing is compared with it

    def start(self) -> None:
        """Start to ask."""
        if self._names:
            _start_daemon_thread(self._resolve_fqdn)
        for name in self._names:
            _start_daemon_thread(self._resolve_until_found, name)

    def stop(self) -> None:
        """Ask no more; a question that hangs is left behind."""
        self._stopped.set()

    def get_results(self) -> HostTable:
        """Give what is known now."""
        with self._condition:
            names = frozenset(name for name in self._local_names if name and not is_loopback_name(name))
            found, denied = dict(self._addresses), frozenset(self._nonexistent)
            return HostTable(found, denied, names, local_addresses(), self._fqdn_known)

    def wait(self, timeout_s: float) -> None:
        """Wait for an answer, or for so long."""
        with self._condition:
            self._condition.wait(timeout_s)

    def _resolve_fqdn(self) -> None:
        name = socket.getfqdn()
        with self._condition:
            self._local_names.add(_normalize_name(name))
            self._fqdn_known = True
            self._condition.notify_all()

    def _resolve_until_found(self, name: str) -> None:
        pause_s = _MIN_RETRY_S
        while not self._stopped.is_set():
            addresses: list[Address] = []
            denied = False
            try:
                addresses = [one for text in self._resolve(name) if (one := parse_address(text)) is not None]
            except UnicodeError:  # from the codec for international names: it never can be one
                denied = True
            except OSError as error:
                denied = error.errno in _NAME_NOT_FOUND
            with self._condition:
                if addresses:
                    self._addresses[name] = tuple(addresses)
                elif denied:
                    self._nonexistent.add(name)
                self._condition.notify_all()
            if addresses:
                return
            self._stopped.wait(pause_s)
            pause_s = min(2 * pause_s, _MAX_RETRY_S)


def _start_daemon_thread(target: Callable[..., None], *arguments: str) -> None:
    threading.Thread(target=target, args=arguments, name="elastic-resume-lookup", daemon=True).start()


# ---- ports -------------------------------------------------------------------------------------------------


LISTEN_BACKLOG = 1024  # all nodes dial at once when the job starts
HANDSHAKE_TIMEOUT_S = 5.0
"""How long the holder of a port has to show who it is; as long as `shell.Limits` gives the other side."""
WILDCARD_ADDRESSES: tuple[Address, ...] = (ipaddress.IPv6Address("::"), ipaddress.IPv4Address("0.0.0.0"))  # noqa: S104
"""All addresses of this machine: both families by one socket, or IPv4 where the kernel has no IPv6."""
_ADDRESS_UNAVAILABLE = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL}


class PortUnavailableError(Exception):
    """A port cannot be had at this moment; the text says why, without a full stop."""


def listen(addresses: Iterable[Address], port: int) -> socket.socket:
    """Listen at the first of the places that this machine has; 0 lets the kernel choose the port.

    Raises:
        TakenError: the port is held there, and a later place is not tried (two agents would both believe
            that they have it); or the machine has none of the places, yet.
        ConfigError: the port is root's.
        MachineError: the system lets nobody listen.

    """
    absent = "this machine has no address to listen at"
    for place in addresses:
        listener: socket.socket | None = None
        try:
            listener = open_socket(place, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if place.version == 6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not place.is_unspecified)
            listener.bind(to_sockaddr(place, port))
            listener.listen(LISTEN_BACKLOG)
            return listener
        except OSError as error:
            if listener is not None:
                listener.close()
            absent = f"this machine cannot listen at {place}, port {port}: {error.strerror}"
            if error.errno == errno.EADDRINUSE:
                raise PortUnavailableError(
                    f"port {port} of this machine is held by another program, or by an agent of another job "
                    "or token"
                ) from error
            if error.errno == errno.EACCES:
                raise ConfigError(
                    f"--rdzv-endpoint: only root may listen on port {port}: choose one above 1023."
                ) from error
            if error.errno not in _ADDRESS_UNAVAILABLE:
                raise MachineError(f"{absent}.") from error
    raise PortUnavailableError(absent)


def open_socket(address: Address, kind: socket.SocketKind) -> socket.socket:
    """Open a socket of the address's family."""
    return socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, kind)


def to_sockaddr(address: Address, port: int) -> tuple[str, int] | tuple[str, int, int, int]:
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


def belongs_to_job(targets: Iterable[Address], port: int, run_id: str, token: bytes) -> bool:
    """Whether one who listens at one of the addresses proves to be an agent of this job."""
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
    for target in targets:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        with (
            contextlib.suppress(OSError, protocol.ProtocolError),
            open_socket(target, socket.SOCK_STREAM) as sock,
        ):
            sock.settimeout(left_s)
            sock.connect(to_sockaddr(target, port))
            if _authenticate_holder(sock, run_id, token, deadline):
                return True
    return False


def _authenticate_holder(sock: socket.socket, run_id: str, token: bytes, deadline: float) -> bool:
    """Be the dialler of a handshake, to its end: whoever leaves before is told of as a stranger."""
    side = protocol.dial(token, run_id, secrets.token_hex(32))
    sock.sendall(next(side))
    lines = protocol.LineReader()
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
class ListenEndpoint:
    """Where this agent listens.

    ``host``: where others reach this node. ``address``: what others dial, ``host:port``; for a candidate as
    it was written, with the true port where 0 was asked. ``candidate``: its place in the list, or None.
    ``notice``: a line for people, or "".
    """

    listener: socket.socket
    host: str
    address: str
    candidate_index: int | None
    warning: str = ""


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
        endpoint = _parse_endpoint(part)
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


def _parse_endpoint(text: str) -> Endpoint:
    bracketed = re.fullmatch(r"(\[[^\[\]]*\])(?:(:)(.*))?", text, re.DOTALL)
    if bracketed is not None:
        host, colon, port = bracketed[1], bracketed[2] or "", bracketed[3] or ""
    elif text.count(":") > 1:
        host, colon, port = text, "", ""
    else:
        host, colon, port = text.partition(":")
    if not host:
        raise ConfigError(f"--rdzv-endpoint: {_quote(text)} names no host: write HOST[:PORT],HOST[:PORT],...")
    number = _parse_port(port, text) if colon else DEFAULT_PORT
    return Endpoint(_parse_host(host, "--rdzv-endpoint"), number)


def _parse_port(text: str, endpoint_text: str) -> int:
    if re.fullmatch(r"[0-9]{1,5}", text) is None or int(text) > 65535:
        raise ConfigError(
            f"--rdzv-endpoint: {_quote(endpoint_text)} has no valid port after the colon: 1 to 65535, or leave it out."
        )
    return int(text)


def _parse_host(text: str, flag: str) -> str:
    """Give a host in its one spelling: every node must read the same list as the same list."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    address = parse_address(bare)
    if address is None:
        labels = bare.removesuffix(".").split(".")
        valid = len(bare) <= 253 and all(_HOST_LABEL.fullmatch(label) for label in labels)
        if bare is not text or not valid or _NUMBER.fullmatch(labels[-1]):
            hint = "[ADDRESS]:PORT with IPv6" if ":" in text else "no scheme, path or blank"
            raise ConfigError(f"{flag}: {_quote(text)} is neither a host's name nor an address ({hint}).")
        return bare.lower()
    scope = str(address).partition("%")[2]
    if address.is_unspecified or address.is_multicast or (scope and _SCOPE_ID.fullmatch(scope) is None):
        raise ConfigError(f"{flag}: {_quote(text)} is no address at which other nodes could reach one.")
    return str(address)


def _quote(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


# ---- taking a place ----------------------------------------------------------------------------------


def open_listen_endpoint(
    endpoints: Sequence[Endpoint],
    local_addr: str | None,
    *,
    run_id: str,
    token: bytes,
    resolve_timeout_s: float = 60.0,
    resolve: ResolveFunction = resolve_name,
    log: Callable[[str], None] | None = None,
) -> ListenEndpoint:
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
    local = _parse_host(local_addr, "--local-addr") if local_addr else None
    known = _resolve_hosts(endpoints, local, resolve_timeout_s, resolve, log)
    if local is not None and not _choose_bind_addresses(known, local, explicit=True):
        raise ConfigError(
            f"--local-addr {local} is not an address of this machine: give one of its own, or leave it out."
        )
    matches = _match_candidates(known, endpoints, local)
    if not matches and endpoints[0].port == 0:
        raise ConfigError(
            f"--rdzv-endpoint {endpoints[0]} is not this machine, and no other can know a port that is left "
            f"open (0): give the port."
        )
    if not matches:
        return _listen_as_ordinary(known, endpoints, local)
    bids = [_make_bind_option(known, index, endpoints[index], local) for index in matches]
    return _listen_as_candidate(known, bids, run_id, token, has_other_candidates=len(bids) < len(endpoints))


def _resolve_hosts(
    endpoints: Sequence[Endpoint],
    local_host: str | None,
    resolve_timeout_s: float,
    resolve: ResolveFunction,
    log: Callable[[str], None] | None,
) -> HostTable:
    """Wait until it is known who this agent is."""
    hosts = [one.host for one in endpoints] + ([local_host] if local_host else [])
    lookups = BackgroundResolver((host for host in hosts if parse_address(host) is None), resolve)
    start = time.monotonic()
    lookups.start()
    try:
        while True:
            known, waited_s = lookups.get_results(), time.monotonic() - start
            open_names = _list_unresolved(known, endpoints, local_host, waited_s, resolve_timeout_s)
            if not open_names:
                return known
            if waited_s >= resolve_timeout_s:
                raise ConfigError(_format_unresolved(known, open_names[0], local_host, waited_s))
            if log is not None and waited_s >= LOG_LOOKUP_AFTER_S:
                more = f" and {len(open_names) - 1} more" if len(open_names) > 1 else ""
                log(
                    f"waiting for an address of {open_names[0]}{more}, for at most {resolve_timeout_s:.0f} s."
                )
                log = None
            lookups.wait(min(_POLL_INTERVAL_S, resolve_timeout_s - waited_s))
    finally:
        lookups.stop()


def _list_unresolved(
    hosts: HostTable,
    endpoints: Sequence[Endpoint],
    local_host: str | None,
    waited_s: float,
    resolve_timeout_s: float,
) -> list[str]:
    """Give the names without which nobody can tell whether this agent is a candidate.

    A candidate's node that is not there yet has no address yet: that must not keep the others from starting.
    """
    if local_host is not None and not hosts.expand_host(local_host):
        return [local_host]
    if _match_candidates(hosts, endpoints, local_host):
        return []
    missing = [one.host for one in endpoints if not hosts.expand_host(one.host)]
    if len(missing) == len(endpoints):
        return missing
    alike = [name for name in missing if hosts.resembles_local_name(name)]
    if alike:
        return alike
    silent = [name for name in missing if name not in hosts.nonexistent]
    if silent and waited_s < min(LOOKUP_TIMEOUT_S, resolve_timeout_s):
        return silent
    return (
        ["this machine's full name"]
        if not hosts.is_fqdn_known and waited_s < min(FQDN_TIMEOUT_S, resolve_timeout_s)
        else []
    )


def _format_unresolved(hosts: HostTable, name: str, local_host: str | None, waited_s: float) -> str:
    """Say which name has no address, and what to do."""
    if name == local_host:
        return (
            f"--local-addr {name} has no address after {waited_s:.0f} s: give an address instead of a name."
        )
    why = ", and begins as this machine's own name" if hosts.resembles_local_name(name) else ""
    return (
        f"--rdzv-endpoint: {name} has no address after {waited_s:.0f} s{why}: correct the name, make "
        "it known to this machine (getent hosts NAME), or give an address."
    )


def _match_candidates(hosts: HostTable, endpoints: Sequence[Endpoint], local_host: str | None) -> list[int]:
    """Give the candidates that this agent may be; ports do not count."""
    # A port left open means that there is one agent, on this machine, whatever its address is.
    if local_host is None or endpoints[0].port == 0:
        own = [
            hosts.is_local_name(one.host) or any(map(hosts.is_local_address, hosts.expand_host(one.host)))
            for one in endpoints
        ]
    else:
        mine = hosts.expand_host(local_host)
        own = [
            one.host == local_host or not mine.isdisjoint(hosts.expand_host(one.host)) for one in endpoints
        ]
    return [index for index, is_own in enumerate(own) if is_own]


def _choose_bind_addresses(hosts: HostTable, host: str, *, explicit: bool) -> tuple[Address, ...]:
    """Give the addresses to bind so that others reach ``host``, best first; none if it is not this machine.

    An address, and what ``--local-addr`` says, is bound exactly: simulated nodes share a machine, with one
    address each. Another name leads elsewhere for others, perhaps (Debian's 127.0.1.1, two networks, IPv4
    here and IPv6 there): so the machine listens at all its addresses. localhost stays inside.
    """
    address = parse_address(host)
    if address is not None:
        return (address,) if hosts.is_local_address(address) else ()
    found = [one for one in hosts.addresses.get(host, ()) if hosts.is_local_address(one)]
    outer = [one for one in found if not one.is_loopback]
    if is_loopback_name(host):
        return tuple(found)
    if explicit and not hosts.is_local_name(host):
        return tuple(outer or found)
    return tuple(outer) if explicit and outer else WILDCARD_ADDRESSES


def _listen_as_ordinary(
    hosts: HostTable, endpoints: Sequence[Endpoint], local_host: str | None
) -> ListenEndpoint:
    if local_host is not None:
        return _listen_on_any_port(_choose_bind_addresses(hosts, local_host, explicit=True), local_host)
    source = _find_source_address(hosts, endpoints)
    return _listen_on_any_port((source,), str(source))


def _find_source_address(hosts: HostTable, endpoints: Sequence[Endpoint]) -> Address:
    """Give the address from which the kernel reaches a candidate; no packet is sent."""
    for one in endpoints:
        literal = parse_address(one.host)
        for target in hosts.addresses.get(one.host, ()) if literal is None else (literal,):
            with contextlib.suppress(OSError), open_socket(target, socket.SOCK_DGRAM) as probe:
                probe.connect(to_sockaddr(target, one.port))
                source = parse_address(probe.getsockname()[0])
                # Others can do nothing with a loopback address, nor with one that holds for a link.
                if source and (target.is_loopback or not (source.is_loopback or source.is_link_local)):
                    return source
    raise ConfigError(
        f"no network leads from this machine to {endpoints[0]}, nor to any other candidate: "
        "see to its network, or say with --local-addr where others reach it."
    )


@dataclass(frozen=True)
class _BindOption:
    """One place that this agent may take: ``asked`` is the candidate, ``places`` what to bind for it."""

    index: int
    candidate: Endpoint
    host: str
    addresses: tuple[Address, ...]


def _make_bind_option(
    hosts: HostTable, index: int, candidate: Endpoint, local_host: str | None
) -> _BindOption:
    host = local_host or candidate.host
    return _BindOption(
        index, candidate, host, _choose_bind_addresses(hosts, host, explicit=local_host is not None)
    )


def _listen_as_candidate(
    hosts: HostTable, options: Sequence[_BindOption], run_id: str, token: bytes, *, has_other_candidates: bool
) -> ListenEndpoint:
    """Take the first of the places that is free, else an ordinary member's on the same host."""
    deadline = time.monotonic() + PORT_RETRY_S
    while time.monotonic() < deadline:
        with contextlib.suppress(PortUnavailableError):
            return _listen_at_first_free(options)
        time.sleep(_POLL_INTERVAL_S)
    for bid in options:
        if belongs_to_job(_list_holder_addresses(hosts, bid), bid.candidate.port, run_id, token):
            return _listen_on_any_port(bid.addresses, bid.host)
    try:
        return _listen_at_first_free(options)  # whoever held it may have gone meanwhile
    except PortUnavailableError as error:
        first = options[0]
        if not has_other_candidates:
            raise ConfigError(
                f"--rdzv-endpoint {first.candidate}: {error}: make it free, or name another port on all nodes."
            ) from error
        notice = f"this node cannot be the candidate {first.candidate}: {error}. It joins through the others."
        return _listen_on_any_port(first.addresses, first.host, notice)


def _listen_at_first_free(options: Sequence[_BindOption]) -> ListenEndpoint:
    """Take the first place that is free; raise what kept the first bid from its own."""
    reasons: list[PortUnavailableError] = []
    for bid in options:
        try:
            listener = listen(bid.addresses, bid.candidate.port)
        except PortUnavailableError as error:
            reasons.append(error)
            continue
        # A port left open is known to nobody yet: so the address may be the one that was told.
        port = listener.getsockname()[1]
        address = bid.candidate if bid.candidate.port else Endpoint(bid.host, port)
        return ListenEndpoint(listener, bid.host, str(address), bid.index)
    raise reasons[0]


def _list_holder_addresses(hosts: HostTable, option: _BindOption) -> list[Address]:
    """Give this machine's addresses at which whoever keeps us from a place may answer."""
    if option.addresses != WILDCARD_ADDRESSES:
        return list(option.addresses)
    named = [one for one in hosts.addresses.get(option.candidate.host, ()) if hosts.is_local_address(one)]
    loopback = [one for text in ("127.0.0.1", "::1") if (one := parse_address(text)) is not None]
    return list(dict.fromkeys([*named, *loopback, *sorted(hosts.local_addresses, key=str)]))


def _listen_on_any_port(addresses: Sequence[Address], host: str, warning: str = "") -> ListenEndpoint:
    """Listen on a port that the kernel chooses."""
    try:
        listener = listen(addresses, 0)
    except PortUnavailableError as error:
        raise MachineError(f"no port is free to listen on at {host}: {error}.") from error
    port = listener.getsockname()[1]
    return ListenEndpoint(listener, host, str(Endpoint(host, port)), None, warning)
