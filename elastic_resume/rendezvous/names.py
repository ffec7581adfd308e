"""From names to addresses, and what this machine is called itself.

Promise: nobody waits here for longer than asked. `getaddrinfo` may take minutes and cannot be interrupted, so
each name has a daemon thread of its own, which asks again until there is an answer or nobody wants it any
more. Does not know what an address is for, and opens no socket.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

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
