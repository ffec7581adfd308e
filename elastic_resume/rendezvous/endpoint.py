"""Decide whether this agent is one of the candidates of ``--rdzv-endpoint``, and open its listening socket.

The candidates may lead the rendezvous, so they listen at addresses that every node knows. An agent looks up
the candidates' names and compares them with the addresses of its own machine. It binds the port of the first
candidate that matches; if none matches, it binds any free port and joins as an ordinary member.
``--local-addr`` says which address is this node's where the comparison cannot tell.

Two agents of one machine are never the same candidate: the second one finds the port in use. Names may
resolve late, as in Kubernetes, so lookups are repeated until a timeout.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from elastic_resume.errors import ConfigError, MachineError

DEFAULT_PORT = 29400  # torchrun's own
MAX_ENDPOINTS = 1000
LISTEN_BACKLOG = 1024  # all nodes connect at once when the job starts
LOG_LOOKUP_AFTER_S = 3.0
LOOKUP_TIMEOUT_S = 10.0
"""Time for a name server that does not answer at all; glibc asks twice for 5 s."""
PORT_RETRY_S = 2.0
"""An earlier agent of this job may still be exiting; IPv6 may still check a new address for duplicates."""
_POLL_INTERVAL_S = 0.1
_MIN_RETRY_S, _MAX_RETRY_S = 0.2, 2.0  # between two lookups of one name
_HOST_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_LOOPBACK_NAME = re.compile(r"localhost[46]?(\.localdomain[46]?)?|ip6-(localhost|loopback)")
_NAME_NOT_FOUND = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
_ADDRESS_UNAVAILABLE = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
ResolveFunction = Callable[[str], Sequence[str]]

WILDCARD_ADDRESSES: tuple[Address, ...] = (ipaddress.IPv6Address("::"), ipaddress.IPv4Address("0.0.0.0"))  # noqa: S104
"""All addresses of this machine: one socket for both families, or IPv4 where the kernel has no IPv6."""


class PortUnavailableError(Exception):
    """A port cannot be bound now; the text says why, without a full stop."""


@dataclass(frozen=True)
class Endpoint:
    """A host, by name or address, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class ListenEndpoint:
    """The listening socket of this agent, and how other nodes reach it.

    ``host`` is where others reach this node. ``address`` is the ``host:port`` that others connect to; for a
    candidate it is spelled as in the list, with the real port in place of 0. ``candidate_index`` is the
    position in the list, or None. ``warning`` is a line for the log, or "".
    """

    listener: socket.socket
    host: str
    address: str
    candidate_index: int | None
    warning: str = ""


# ---- parsing -----------------------------------------------------------------------------------------


def parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    """Parse ``host[:port],host[:port],...``; IPv6 as ``[::1]:29400``, or without a port as ``::1``.

    Raises:
        ConfigError: an entry is wrong or repeated, or there are too many.

    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MAX_ENDPOINTS:
        raise ConfigError(f"--rdzv-endpoint: {len(parts)} candidates; at most {MAX_ENDPOINTS} make sense.")
    endpoints: dict[Endpoint, None] = {}
    for part in parts:
        endpoint = _parse_endpoint(part)
        if endpoint in endpoints:
            raise ConfigError(f"--rdzv-endpoint: {part} is there twice: name each candidate once.")
        if endpoint.port == 0 and len(parts) > 1:
            raise ConfigError(
                f"--rdzv-endpoint: {part} leaves the port open (0), which the other candidates cannot know: "
                f"give one, such as {DEFAULT_PORT}."
            )
        endpoints[endpoint] = None
    return tuple(endpoints)


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
    if colon and (re.fullmatch(r"[0-9]{1,5}", port) is None or int(port) > 65535):
        raise ConfigError(
            f"--rdzv-endpoint: {_quote(text)} has no valid port after the colon: 1 to 65535, or leave it out."
        )
    return Endpoint(_parse_host(host, "--rdzv-endpoint"), int(port) if colon else DEFAULT_PORT)


def _parse_host(text: str, flag: str) -> str:
    """Return a host in canonical spelling, so that all nodes read the same list."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    address = parse_address(bare)
    if address is None:
        labels = bare.removesuffix(".").split(".")
        valid = len(bare) <= 253 and all(_HOST_LABEL.fullmatch(label) for label in labels)
        if bare is not text or not valid or _NUMBER.fullmatch(labels[-1]):
            hint = "[ADDRESS]:PORT with IPv6" if ":" in text else "no scheme, path or blank"
            raise ConfigError(f"{flag}: {_quote(text)} is neither a host name nor an address ({hint}).")
        return bare.lower()
    if address.is_unspecified or address.is_multicast or "%" in bare:
        raise ConfigError(f"{flag}: {_quote(text)} is not an address that other nodes can reach.")
    return str(address)


def _quote(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


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
    texts = (entry.address for entries in psutil.net_if_addrs().values() for entry in entries)
    return frozenset(address for text in texts if (address := parse_address(text)) is not None)


@dataclass(frozen=True)
class _Hosts:
    """The lookups so far, compared with this machine's host name and addresses.

    ``answers`` has no entry for a name without an answer, and an empty one for a name that does not exist.
    """

    answers: Mapping[str, tuple[Address, ...]]
    host_name: str
    local: frozenset[Address]

    def is_local(self, address: Address) -> bool:
        """Return whether an address is this machine's; all of 127.0.0.0/8 is, though interfaces list one."""
        return address.is_loopback or address in self.local

    def is_own_name(self, host: str) -> bool:
        """Return whether a host is this machine's host name."""
        return host.rstrip(".") == self.host_name and _LOOPBACK_NAME.fullmatch(self.host_name) is None

    def may_be_own(self, name: str) -> bool:
        """Return whether a name without an address may become this machine's, as of a Kubernetes pod."""
        return name.partition(".")[0] == self.host_name.partition(".")[0]

    def expand(self, host: str) -> frozenset[Address]:
        """Return the addresses at which other nodes reach a host, as far as known.

        Debian maps the host name to 127.0.1.1, and NAT leads it to a gateway. So the host name stands for all
        outer addresses of this machine if it leads to none of them.
        """
        literal = parse_address(host)
        addresses = frozenset(self.answers.get(host, ()) if literal is None else (literal,))
        outer = frozenset(address for address in self.local if not address.is_loopback)
        return addresses | outer if self.is_own_name(host) and not addresses & outer else addresses

    def match(self, endpoints: Sequence[Endpoint], local_host: str | None) -> list[int]:
        """Return the indexes of the candidates on this node, whatever their ports."""
        # An open port means that there is one agent, on this machine, whatever its address is.
        if local_host is None or endpoints[0].port == 0:
            is_own = [
                self.is_own_name(candidate.host) or any(map(self.is_local, self.expand(candidate.host)))
                for candidate in endpoints
            ]
        else:
            own = self.expand(local_host)
            is_own = [
                candidate.host == local_host or not own.isdisjoint(self.expand(candidate.host))
                for candidate in endpoints
            ]
        return [index for index, matches in enumerate(is_own) if matches]

    def bind_addresses(self, host: str, *, exact: bool) -> tuple[Address, ...]:
        """Return the addresses to bind for ``host``, best first; () if it is another machine.

        A numeric address is bound exactly, since simulated nodes share a machine. So is ``--local-addr``
        (``exact``). Another name may resolve to another address elsewhere, so all addresses are bound.
        localhost binds loopback alone.
        """
        literal = parse_address(host)
        answers = self.answers.get(host, ()) if literal is None else (literal,)
        addresses = tuple(address for address in answers if self.is_local(address))
        outer = tuple(address for address in addresses if not address.is_loopback)
        if literal is not None or _LOOPBACK_NAME.fullmatch(host) or (exact and not self.is_own_name(host)):
            return outer or addresses
        return outer if exact and outer else WILDCARD_ADDRESSES


def _resolve_hosts(
    endpoints: Sequence[Endpoint],
    local_host: str | None,
    timeout_s: float,
    resolve: ResolveFunction,
    log: Callable[[str], None] | None,
) -> _Hosts:
    """Look names up until it is known whether this agent is a candidate.

    Each name has a daemon thread: getaddrinfo can take minutes and cannot be interrupted.
    """
    hosts = [*(endpoint.host for endpoint in endpoints), *([local_host] if local_host else [])]
    answers: dict[str, tuple[Address, ...]] = {}
    known = _Hosts(answers, socket.gethostname().lower().rstrip("."), local_addresses())
    results: queue.SimpleQueue[tuple[str, tuple[Address, ...]]] = queue.SimpleQueue()
    stopped = threading.Event()
    for name in {host for host in hosts if parse_address(host) is None}:
        arguments = (name, resolve, results, stopped)
        threading.Thread(target=_look_up, args=arguments, name="elastic-resume-lookup", daemon=True).start()
    start = time.monotonic()
    try:
        while True:
            waited_s = time.monotonic() - start
            awaited = _list_awaited(known, endpoints, local_host, waited_s, timeout_s)
            if not awaited:
                return known
            if waited_s >= timeout_s:
                flag = "--local-addr" if awaited[0] == local_host else "--rdzv-endpoint"
                raise ConfigError(
                    f"{flag}: {awaited[0]} has no address after {waited_s:.0f} s: correct the name, make it "
                    "known to this machine (getent hosts NAME), or give an address."
                )
            if log is not None and waited_s >= LOG_LOOKUP_AFTER_S:
                more = f" and {len(awaited) - 1} more" if len(awaited) > 1 else ""
                log(f"waiting for an address of {awaited[0]}{more}, for at most {timeout_s:.0f} s.")
                log = None
            with contextlib.suppress(queue.Empty):
                name, addresses = results.get(timeout=min(_POLL_INTERVAL_S, timeout_s - waited_s))
                answers[name] = addresses
    finally:
        stopped.set()


def _look_up(
    name: str,
    resolve: ResolveFunction,
    results: queue.SimpleQueue[tuple[str, tuple[Address, ...]]],
    stopped: threading.Event,
) -> None:
    """Look one name up until it has an address."""
    pause_s = _MIN_RETRY_S
    while not stopped.is_set():
        try:
            texts = resolve(name)
            addresses = tuple(address for text in texts if (address := parse_address(text)) is not None)
            results.put((name, addresses))
            if addresses:
                return
        except UnicodeError:  # from the codec for international names
            results.put((name, ()))
        except OSError as error:
            if error.errno in _NAME_NOT_FOUND:
                results.put((name, ()))
        stopped.wait(pause_s)
        pause_s = min(2 * pause_s, _MAX_RETRY_S)


def _list_awaited(
    hosts: _Hosts, endpoints: Sequence[Endpoint], local_host: str | None, waited_s: float, timeout_s: float
) -> list[str]:
    """Return the names without which this agent cannot tell whether it is a candidate.

    A candidate whose node is not up yet has no address yet. That must not keep the others from starting.
    """
    if local_host is not None and not hosts.expand(local_host):
        return [local_host]
    if hosts.match(endpoints, local_host):
        return []
    missing = [endpoint.host for endpoint in endpoints if not hosts.expand(endpoint.host)]
    own = [name for name in missing if hosts.may_be_own(name)]
    if own or len(missing) == len(endpoints):
        return own or missing
    unanswered = [name for name in missing if name not in hosts.answers]
    return unanswered if waited_s < min(LOOKUP_TIMEOUT_S, timeout_s) else []


# ---- listening ---------------------------------------------------------------------------------------


def open_listen_endpoint(
    endpoints: Sequence[Endpoint],
    local_addr: str | None,
    *,
    single_node: bool = False,
    resolve_timeout_s: float = 60.0,
    resolve: ResolveFunction = resolve_name,
    log: Callable[[str], None] | None = None,
) -> ListenEndpoint:
    """Listen: at a candidate's port if this agent is one, else at any free port.

    Args:
        endpoints: the candidates.
        local_addr: ``--local-addr``, where others reach this node; without it all addresses of this machine
            and its host name are compared with the candidates.
        single_node: no other agent of this job exists, so a port in use belongs to another program.
        resolve_timeout_s: how long names may take to get an address.
        resolve: returns a name's addresses; called in threads.
        log: called with a line when names take long.

    Raises:
        ConfigError: a name has no address, ``local_addr`` is another machine's, or a port cannot be used.
        MachineError: the system refuses to listen.

    """
    local_host = _parse_host(local_addr, "--local-addr") if local_addr else None
    hosts = _resolve_hosts(endpoints, local_host, resolve_timeout_s, resolve, log)
    if local_host is not None and not hosts.bind_addresses(local_host, exact=True):
        raise ConfigError(
            f"--local-addr {local_host} is not an address of this machine: give one of its own, or leave it "
            "out."
        )
    matches = hosts.match(endpoints, local_host)
    if matches:
        return _listen_as_candidate(hosts, endpoints, matches, local_host, single_node=single_node)
    if endpoints[0].port == 0:
        raise ConfigError(
            f"--rdzv-endpoint {endpoints[0]} is not this machine, and no other can know a port that is left "
            f"open (0): give the port."
        )
    if local_host is not None:
        return _listen_on_any_port(hosts.bind_addresses(local_host, exact=True), local_host)
    source = _find_source_address(hosts, endpoints)
    return _listen_on_any_port((source,), str(source))


def _listen_as_candidate(
    hosts: _Hosts,
    endpoints: Sequence[Endpoint],
    matches: Sequence[int],
    local_host: str | None,
    *,
    single_node: bool,
) -> ListenEndpoint:
    """Bind the first matching candidate whose port is free; else join as an ordinary member."""
    deadline = time.monotonic() + PORT_RETRY_S
    while True:
        reasons: list[str] = []
        for index in matches:
            candidate = endpoints[index]
            host = local_host or candidate.host
            addresses = hosts.bind_addresses(host, exact=local_host is not None)
            try:
                listener = listen(addresses, candidate.port)
            except PortUnavailableError as error:
                reasons.append(f"{candidate}: {error}")
                continue
            # No other node knows an open port yet, so the address may be --local-addr.
            address = candidate if candidate.port else Endpoint(host, listener.getsockname()[1])
            return ListenEndpoint(listener, host, str(address), index)
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_INTERVAL_S)
    if single_node:
        raise ConfigError(f"--rdzv-endpoint {reasons[0]}: choose another port.")
    warning = (
        f"this node is not the candidate {reasons[0]}. It joins through the agent that listens there, or "
        "through another candidate. If another program holds the port, give all nodes another port."
    )
    return _listen_on_any_port(addresses, host, warning)


def _listen_on_any_port(addresses: Sequence[Address], host: str, warning: str = "") -> ListenEndpoint:
    try:
        listener = listen(addresses, 0)
    except PortUnavailableError as error:
        raise MachineError(f"{host}: {error}.") from error
    return ListenEndpoint(listener, host, str(Endpoint(host, listener.getsockname()[1])), None, warning)


def _find_source_address(hosts: _Hosts, endpoints: Sequence[Endpoint]) -> Address:
    """Return the address from which the kernel reaches a candidate; no packet is sent."""
    for endpoint in endpoints:
        for target in hosts.expand(endpoint.host):
            with contextlib.suppress(OSError), open_socket(target, socket.SOCK_DGRAM) as probe:
                probe.connect((str(target), endpoint.port))
                source = parse_address(probe.getsockname()[0])
                # Other nodes cannot use a loopback or link-local address.
                if source and (target.is_loopback or not (source.is_loopback or source.is_link_local)):
                    return source
    raise ConfigError(
        f"no network leads from this machine to {endpoints[0]}, nor to any other candidate: "
        "check its network, or say with --local-addr where others reach it."
    )


def listen(addresses: Iterable[Address], port: int) -> socket.socket:
    """Listen at the first of the addresses that this machine has; port 0 lets the kernel choose.

    Raises:
        PortUnavailableError: the port is in use, or the machine has none of the addresses yet. After a port
            in use no later address is tried: two agents would both become the candidate.
        ConfigError: only root may bind the port.
        MachineError: the system refuses to listen.

    """
    reason = "this machine has no address to listen at"
    for address in addresses:
        listener: socket.socket | None = None
        try:
            listener = open_socket(address, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if address.version == 6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not address.is_unspecified)
            listener.bind((str(address), port))
            listener.listen(LISTEN_BACKLOG)
            return listener
        except OSError as error:
            if listener is not None:
                listener.close()
            reason = f"this machine cannot listen at {address}, port {port}: {error.strerror}"
            if error.errno == errno.EADDRINUSE:
                raise PortUnavailableError(f"port {port} of this machine is in use") from error
            if error.errno == errno.EACCES:
                raise ConfigError(
                    f"--rdzv-endpoint: only root may listen on port {port}: choose one above 1023."
                ) from error
            if error.errno not in _ADDRESS_UNAVAILABLE:
                raise MachineError(f"{reason}.") from error
    raise PortUnavailableError(reason)


def open_socket(address: Address, kind: socket.SocketKind) -> socket.socket:
    """Open a socket of the address's family."""
    return socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, kind)
