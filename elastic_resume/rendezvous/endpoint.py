"""Decide whether this agent is one of the candidates of ``--rdzv-endpoint``, and open its listening socket.

The candidates may lead the rendezvous, so they listen at addresses that every node knows. An agent looks up
their names and compares the addresses with ``--local-addr``, or without it with those of its own machine. It
binds the port of the first candidate that matches. If none matches, it binds any free port and joins as an
ordinary member.

Two agents of one machine are never the same candidate: the second one finds the port in use. Names may
resolve late, as in Kubernetes, so lookups are repeated until a timeout.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from elastic_resume.errors import ConfigError, MachineError
from elastic_resume.units import format_address

logger = logging.getLogger(__name__)

DEFAULT_PORT = 29400  # torchrun's own
LISTEN_BACKLOG = 1024  # all nodes connect at once when the job starts
RESOLVE_TIMEOUT_S = 60.0
"""How long names may take to get an address."""
LOG_LOOKUP_AFTER_S = 3.0
PORT_RETRY_S = 2.0
"""An earlier agent of this job may still be exiting."""
_PORT_PAUSE_S = 0.1
LOOKUP_TIMEOUT_S = 10.0  # then a name that no name server answers for counts as absent
_NO_SUCH_NAME = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
_LOOKUP_PAUSE_S = 0.5  # between two lookups of one name
_HOST_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # getaddrinfo reads such a last label as part of an address
_LOOPBACK_NAME = re.compile(r"localhost[46]?(\.localdomain[46]?)?|ip6-(localhost|loopback)")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
ResolveFunction = Callable[[str], Sequence[str]]

WILDCARD_ADDRESS = ipaddress.IPv6Address("::")
"""All addresses of this machine, of both families."""


@dataclass(frozen=True)
class Endpoint:
    """A host, by name or address, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return format_address(self.host, self.port)


@dataclass(frozen=True)
class ListenEndpoint:
    """The listening socket of this agent, and how other nodes reach it.

    ``host`` is where others reach this node. ``address`` is the ``host:port`` that others connect to; for a
    candidate it is spelled as in the list, with the real port in place of 0. ``candidate_index`` is the
    position in the list, or None.
    """

    listener: socket.socket
    host: str
    address: str
    candidate_index: int | None


# ---- parsing -----------------------------------------------------------------------------------------


def parse_endpoints(text: str, source: str = "--rdzv-endpoint") -> tuple[Endpoint, ...]:
    """Parse ``host[:port],host[:port],...``; IPv6 as ``[::1]:29400``, or without a port as ``::1``.

    ``source`` says for an error where the text is.

    Raises:
        ConfigError: an entry is wrong or repeated.

    """
    parts = [part.strip() for part in text.split(",")]
    endpoints: dict[Endpoint, None] = {}
    for part in parts:
        endpoint = _parse_endpoint(part, source)
        if endpoint in endpoints:
            raise ConfigError(f"{source}: {part} is there twice: name each candidate once.")
        if endpoint.port == 0 and len(parts) > 1:
            raise ConfigError(
                f"{source}: {part} has port 0 (chosen by the kernel), which other nodes cannot know: "
                f"give a port, such as {DEFAULT_PORT}."
            )
        endpoints[endpoint] = None
    return tuple(endpoints)


def _parse_endpoint(text: str, source: str) -> Endpoint:
    bracketed = re.fullmatch(r"(\[[^\[\]]*\])(?:(:)(.*))?", text, re.DOTALL)
    if bracketed is not None:
        host, colon, port = bracketed[1], bracketed[2], bracketed[3]
    else:
        host, colon, port = (text, "", "") if text.count(":") > 1 else text.partition(":")
    if not host:
        raise ConfigError(f"{source}: {text[:80]!r} names no host: write HOST[:PORT],HOST[:PORT],...")
    if colon and (re.fullmatch(r"[0-9]{1,5}", port) is None or int(port) > 65535):
        raise ConfigError(
            f"{source}: {text[:80]!r} has no valid port after the colon: 1 to 65535, or leave it out."
        )
    return Endpoint(_parse_host(host, source), int(port) if colon else DEFAULT_PORT)


def _parse_host(text: str, flag: str) -> str:
    """Return a host in canonical spelling, so that all nodes read the same list."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    address = parse_address(bare)
    if address is not None:
        if address.is_unspecified or address.is_multicast or "%" in bare:
            raise ConfigError(f"{flag}: {text[:80]!r} is not an address that other nodes can reach.")
        return str(address)
    name = text.lower()
    labels = name.removesuffix(".").split(".")
    if not all(map(_HOST_LABEL.fullmatch, labels)) or _NUMBER.fullmatch(labels[-1]) or len(name) > 253:
        raise ConfigError(
            f"{flag}: {text[:80]!r} is neither a host name nor an address (IPv6: [ADDRESS]:PORT)."
        )
    return name


def parse_address(text: str) -> Address | None:
    """Parse a numeric address; None for a name. An IPv6 scope is dropped, a mapped IPv4 address unwrapped."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped or ipaddress.IPv6Address(int(address))
    return address


# ---- names and addresses -----------------------------------------------------------------------------


def resolve_name(name: str) -> list[str]:
    """Return a name's addresses in the system's order of preference.

    Raises:
        OSError: the name has no address, or no name server answers.

    """
    entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def local_addresses() -> frozenset[Address]:
    """Return the addresses of this machine's interfaces."""
    return frozenset(
        _parse_addresses(entry.address for entries in psutil.net_if_addrs().values() for entry in entries)
    )


def _parse_addresses(texts: Iterable[str]) -> tuple[Address, ...]:
    return tuple(address for text in texts if (address := parse_address(text)) is not None)


@dataclass(frozen=True)
class _Hosts:
    """The candidates and ``--local-addr``, compared with the addresses of this machine.

    ``answers`` has an empty entry for a name whose lookup failed, and none before the lookup.
    """

    endpoints: Sequence[Endpoint]
    local_host: str | None
    answers: Mapping[str, tuple[Address, ...]]
    host_name: str
    local: frozenset[Address]

    def expand(self, host: str) -> frozenset[Address]:
        """Return the addresses at which other nodes reach a host, as far as known.

        Debian maps the host name to 127.0.1.1, and NAT leads it to a gateway. So the host name stands for all
        outer addresses of this machine if it leads to none of them.
        """
        literal = parse_address(host)
        addresses = frozenset(self.answers.get(host, ()) if literal is None else (literal,))
        outer = frozenset(address for address in self.local if not address.is_loopback)
        return addresses | outer if self._is_host_name(host) and not addresses & outer else addresses

    def is_own(self, host: str) -> bool:
        """Return whether a host is this machine; all of 127.0.0.0/8 is, though interfaces list one."""
        return self._is_host_name(host) or any(map(self._is_local, self.expand(host)))

    def _is_local(self, address: Address) -> bool:
        return address.is_loopback or address in self.local

    def _is_host_name(self, host: str) -> bool:
        return host.rstrip(".") == self.host_name and _LOOPBACK_NAME.fullmatch(self.host_name) is None

    def match(self) -> list[int]:
        """Return the indexes of the candidates on this node, whatever their ports."""
        # Port 0 means that there is one agent, on this machine, whatever its address is.
        if self.local_host is None or self.endpoints[0].port == 0:
            return [index for index, endpoint in enumerate(self.endpoints) if self.is_own(endpoint.host)]
        own = self.expand(self.local_host)
        return [
            index
            for index, endpoint in enumerate(self.endpoints)
            if endpoint.host == self.local_host or own & self.expand(endpoint.host)
        ]

    def list_awaited(self) -> list[str]:
        """Return the names without which this agent cannot tell whether it is a candidate.

        A candidate whose node is not up yet has no address yet. That must not keep the others from starting.
        """
        if self.local_host is not None and not self.expand(self.local_host):
            return [self.local_host]
        if self.match():
            return []
        missing = [endpoint.host for endpoint in self.endpoints if not self.expand(endpoint.host)]
        if len(missing) == len(self.endpoints):
            return missing
        # A name that begins as the host name may get this machine's address, like that of a Kubernetes pod.
        own_label = self.host_name.partition(".")[0]
        return [host for host in missing if host not in self.answers or host.partition(".")[0] == own_label]

    def bind_address(self, host: str) -> Address:
        """Return the address to bind for a host that is this machine.

        An address is bound exactly, since simulated nodes share a machine. So is a name in ``--local-addr``,
        and localhost. Another name may resolve to another address elsewhere, so all addresses are bound.
        """
        literal = parse_address(host)
        if literal is not None:
            return literal
        if host != self.local_host and not _LOOPBACK_NAME.fullmatch(host):
            return WILDCARD_ADDRESS
        addresses = filter(self._is_local, self.answers.get(host, ()))
        best = min(addresses, key=lambda address: address.is_loopback, default=WILDCARD_ADDRESS)
        return WILDCARD_ADDRESS if best.is_loopback and self._is_host_name(host) else best


def _resolve_hosts(endpoints: Sequence[Endpoint], local_host: str | None) -> _Hosts:
    """Look names up until it is known whether this agent is a candidate."""
    answers: dict[str, tuple[Address, ...]] = {}
    hosts = _Hosts(
        endpoints, local_host, answers, socket.gethostname().lower().rstrip("."), local_addresses()
    )
    start, is_logged, is_repeated = time.monotonic(), False, False
    while awaited := hosts.list_awaited():
        waited_s = time.monotonic() - start
        if waited_s >= RESOLVE_TIMEOUT_S:
            flag = "--local-addr" if awaited[0] == local_host else "--rdzv-endpoint"
            raise ConfigError(
                f"{flag}: {awaited[0]} has no address after {waited_s:.0f} s: correct the name, make it "
                "known to this machine (getent hosts NAME), or give an address."
            )
        if waited_s >= LOG_LOOKUP_AFTER_S and not is_logged:
            is_logged, names = True, ", ".join(awaited[:3])
            logger.info("waiting for an address of %s, for at most %.0f s.", names, RESOLVE_TIMEOUT_S)
        if is_repeated:
            time.sleep(_LOOKUP_PAUSE_S)
        is_repeated = True
        for name in awaited:
            try:
                answers[name] = _parse_addresses(resolve_name(name))
            except UnicodeError:  # of IDNA
                answers[name] = ()
            except OSError as error:
                # Any other error, as of a name server that does not answer, may pass.
                if error.errno in _NO_SUCH_NAME or time.monotonic() - start >= LOOKUP_TIMEOUT_S:
                    answers[name] = ()
            # A name server that does not answer takes 10 s for each name.
            if hosts.match() or time.monotonic() - start >= RESOLVE_TIMEOUT_S:
                break
    return hosts


# ---- listening ---------------------------------------------------------------------------------------


def open_listen_endpoint(
    endpoints: Sequence[Endpoint], local_addr: str | None, *, single_node: bool = False
) -> ListenEndpoint:
    """Listen: at a candidate's port if this agent is one, else at any free port.

    Args:
        endpoints: the candidates.
        local_addr: ``--local-addr``, where others reach this node; without it all addresses of this machine
            and its host name are compared with the candidates.
        single_node: no other agent of this job exists, so a port in use belongs to another program.

    Raises:
        ConfigError: a name has no address, ``local_addr`` is another machine's, or a port is in use.
        MachineError: the system refuses to listen.

    """
    local_host = _parse_host(local_addr, "--local-addr") if local_addr else None
    hosts = _resolve_hosts(endpoints, local_host)
    if not single_node and any(_LOOPBACK_NAME.fullmatch(endpoint.host) for endpoint in endpoints):
        logger.warning(
            "--rdzv-endpoint has localhost, which is another machine on each node: agents of other machines "
            "cannot join. Give names or addresses that all nodes reach."
        )
    if local_host is not None and not hosts.is_own(local_host):
        raise ConfigError(
            f"--local-addr {local_host} is not an address of this machine: give one of its own, or leave it "
            "out."
        )
    matches = hosts.match()
    if not matches and endpoints[0].port == 0:
        raise ConfigError(
            f"--rdzv-endpoint {endpoints[0]} is not this machine, and this node cannot know a port that the "
            "kernel chooses there (0): give the port."
        )
    try:
        candidate = _listen_as_candidate(hosts, matches, single_node=single_node) if matches else None
        if candidate is not None:
            return candidate
        host = endpoints[matches[0]].host if matches else str(_find_source_address(hosts))
        host = local_host or host
        listener = listen(hosts.bind_address(host), 0)
    except OSError as error:
        raise MachineError(f"this agent cannot listen: {error.strerror}.") from error
    return ListenEndpoint(listener, host, str(Endpoint(host, listener.getsockname()[1])), None)


def _listen_as_candidate(
    hosts: _Hosts, matches: Sequence[int], *, single_node: bool
) -> ListenEndpoint | None:
    """Bind the first matching candidate whose port is free; None if other agents hold them all."""
    deadline = time.monotonic() + PORT_RETRY_S
    while True:
        for index in matches:
            candidate = hosts.endpoints[index]
            host = hosts.local_host or candidate.host
            try:
                listener = listen(hosts.bind_address(host), candidate.port)
            except OSError as error:
                if error.errno == errno.EACCES and 0 < candidate.port < 1024:
                    raise ConfigError(
                        f"--rdzv-endpoint {candidate}: only root may listen at port {candidate.port}: choose "
                        "one above 1023."
                    ) from error
                # IPv6 checks a new address for duplicates, and meanwhile nobody can bind it.
                if error.errno not in {errno.EADDRINUSE, errno.EADDRNOTAVAIL}:
                    raise
                continue
            # No other node knows a port that the kernel has just chosen, so the address may be --local-addr.
            address = candidate if candidate.port else Endpoint(host, listener.getsockname()[1])
            return ListenEndpoint(listener, host, str(address), index)
        if time.monotonic() >= deadline:
            break
        time.sleep(_PORT_PAUSE_S)
    first = hosts.endpoints[matches[0]]
    problem = f"{first}: port {first.port} of this machine is in use"
    if single_node:
        raise ConfigError(f"--rdzv-endpoint {problem}: choose another port.")
    logger.warning(
        "this node is not the candidate %s. It joins through the agent that listens there, or through "
        "another candidate. If another program holds the port, give all nodes another port.",
        problem,
    )
    return None


def _find_source_address(hosts: _Hosts) -> Address:
    """Return the address from which the kernel reaches a candidate; no packet is sent."""
    for endpoint in hosts.endpoints:
        for target in hosts.expand(endpoint.host):
            with contextlib.suppress(OSError), socket.socket(_family(target), socket.SOCK_DGRAM) as probe:
                probe.connect((str(target), endpoint.port))
                source = parse_address(probe.getsockname()[0])
                # Other nodes cannot use a loopback or link-local address.
                if source and (target.is_loopback or not (source.is_loopback or source.is_link_local)):
                    return source
    raise ConfigError(
        f"there is no network route from this machine to {hosts.endpoints[0]}, nor to any other candidate: "
        "check its network, or say with --local-addr where others reach it."
    )


def find_interface(host: str, endpoints: Sequence[Endpoint]) -> str | None:
    """Return the network interface at which other nodes reach this node's ``host``; None if it is not known.

    Gloo announces the address of the machine's name, which Debian maps to 127.0.1.1. The name then tells
    nothing, and the route to another candidate does.
    """
    outer = frozenset(address for address in local_addresses() if not address.is_loopback)
    own = [address for address in _look_up(host) if address in outer]
    for other in endpoints if not own else ():
        answers = _look_up(other.host)
        if answers and not any(address.is_loopback or address in outer for address in answers):
            with contextlib.suppress(ConfigError):  # there is no route to it
                own = [_find_source_address(_Hosts([other], None, {other.host: answers}, "", frozenset()))]
                break
    for name, entries in psutil.net_if_addrs().items():
        if set(own) & set(_parse_addresses(entry.address for entry in entries)):
            return name
    return None


def _look_up(host: str) -> tuple[Address, ...]:
    literal = parse_address(host)
    if literal is not None:
        return (literal,)
    try:
        return _parse_addresses(resolve_name(host))
    except (OSError, UnicodeError):
        return ()


def listen(address: Address, port: int) -> socket.socket:
    """Listen at an address; port 0 lets the kernel choose. Raises OSError."""
    dual_stack = address.is_unspecified and socket.has_dualstack_ipv6()
    if address.is_unspecified and not dual_stack:
        address = ipaddress.IPv4Address(0)  # the kernel has no IPv6
    return socket.create_server(
        (str(address), port), family=_family(address), backlog=LISTEN_BACKLOG, dualstack_ipv6=dual_stack
    )


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6
