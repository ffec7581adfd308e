"""Which candidate an agent is and where it listens: real sockets, injected names."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_resume.errors import ConfigError, MachineError
from elastic_resume.rendezvous import endpoint
from elastic_resume.rendezvous.endpoint import (
    Endpoint,
    ListenEndpoint,
    open_listen_endpoint,
    parse_address,
    parse_endpoints,
)

FOREVER_S = 3600.0  # a test that waited for it would meet pytest's own limit
ELSEWHERE = "198.51.100.7"  # TEST-NET-2 of RFC 5737: nobody's

# Each process of the suite has loopback addresses of its own, so their ports are nobody else's.
_BLOCK = f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250 + 1}"
ONE, TWO, THREE = (f"{_BLOCK}.{number}" for number in (1, 2, 3))


def outer_address() -> str:
    """Return an IPv4 address of this machine that is not loopback."""
    for one in sorted(endpoint.local_addresses(), key=str):
        if one.version == 4 and not one.is_loopback:
            return str(one)
    pytest.skip("this machine has nothing but loopback")


def has_ipv6() -> bool:
    """Return whether ::1 can be bound."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def free_port() -> int:
    """Return a port that is free on all addresses, below the kernel's ephemeral ports."""
    for _ in range(100):
        number = random.SystemRandom().randrange(15000, 32000)
        with contextlib.suppress(endpoint.PortUnavailableError):
            endpoint.listen(endpoint.WILDCARD_ADDRESSES, number).close()
            return number
    pytest.fail("no port is free")


PORT = free_port()
NEXT_PORT = next(number for number in iter(free_port, None) if number != PORT)


@pytest.fixture
def port() -> int:
    """Give another port that is free on all addresses."""
    return free_port()


@pytest.fixture(autouse=True)
def _named_node1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name the machine node1."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")


@pytest.fixture
def no_port_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for a port in use."""
    monkeypatch.setattr(endpoint, "PORT_RETRY_S", 0.0)


def directory(entries: Mapping[str, Sequence[str]]) -> endpoint.ResolveFunction:
    """Return a resolver of these names; others do not exist."""

    def resolve(name: str) -> Sequence[str]:
        if name not in entries:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return entries[name]

    return resolve


class Agents:
    """Opens listening endpoints, and closes them when the test ends."""

    def __init__(self) -> None:
        self.opened: list[ListenEndpoint] = []

    def listen(
        self,
        text: str,
        local: str | None = None,
        *,
        resolve: endpoint.ResolveFunction | None = None,
        timeout_s: float = FOREVER_S,
        log: Callable[[str], None] | None = None,
        single_node: bool = False,
    ) -> ListenEndpoint:
        """Open one as an agent does."""
        opened = open_listen_endpoint(
            parse_endpoints(text),
            local,
            single_node=single_node,
            resolve_timeout_s=timeout_s,
            resolve=resolve or directory({}),
            log=log,
        )
        self.opened.append(opened)
        return opened


@pytest.fixture
def agents() -> Iterator[Agents]:
    """Give what opens endpoints."""
    opener = Agents()
    yield opener
    for opened in opener.opened:
        opened.listener.close()


def bound(opened: ListenEndpoint) -> tuple[str, int]:
    """Return the address and port that an endpoint listens on."""
    name = opened.listener.getsockname()
    return name[0], name[1]


def reaches(host: str, opened: ListenEndpoint) -> bool:
    """Return whether a connection to a host arrives at an endpoint."""
    try:
        with socket.create_connection((host, bound(opened)[1]), timeout=10) as near:
            far, peer = opened.listener.accept()
            far.close()
            return bool(peer[1] == near.getsockname()[1])
    except ConnectionRefusedError:
        return False


# ---- parsing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1", [("node1", 29400)]),
        ("node1:1234", [("node1", 1234)]),
        (" Node1 , node2.Example.org:2 ", [("node1", 29400), ("node2.example.org", 2)]),
        ("10.0.0.1:65535,10.0.0.1:1", [("10.0.0.1", 65535), ("10.0.0.1", 1)]),
        ("[::1]:29401", [("::1", 29401)]),
        ("[FD00::0:1]", [("fd00::1", 29400)]),
        ("fd00::1,fd00::2", [("fd00::1", 29400), ("fd00::2", 29400)]),
        ("[fe80::1]:5", [("fe80::1", 5)]),
        ("::ffff:10.0.0.1", [("10.0.0.1", 29400)]),
        ("my_job_node-0.svc.", [("my_job_node-0.svc.", 29400)]),
        ("localhost:0", [("localhost", 0)]),
    ],
)
def test_parse_endpoints_reads_names_and_addresses(text: str, expected: list[tuple[str, int]]) -> None:
    """Names and both address families, with and without a port, are read and written in one spelling."""
    found = parse_endpoints(text)
    assert [(one.host, one.port) for one in found] == expected
    assert parse_endpoints(",".join(map(str, found))) == found


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "names no host"),
        ("a,,b", "names no host"),
        ("a,", "names no host"),
        (":29400", "':29400'"),
        ("a:", "'a:'"),
        ("a:http", "'a:http'"),
        ("a:65536", "'a:65536'"),
        ("a:-1", "'a:-1'"),
        ("a:+1", "'a:+1'"),
        ("a:1_0", "'a:1_0'"),
        ("a:\u0661", "'a:\u0661'"),
        ("a:000000000000001", "'a:000000000000001'"),
        ("a b", "'a b'"),
        ("tcp://a:1", "'tcp://a:1'"),
        ("tcp://a", "'tcp://a'"),
        ("a/b", "'a/b'"),
        ("-a", "'-a'"),
        ("a..b", "'a..b'"),
        ("é", "'é'"),
        ("x" * 64, "xxx"),
        ("a." * 127 + "a", "a.a.a"),
        ("29400", "'29400'"),
        ("10.0.0", "'10.0.0'"),
        ("10.0.0.256", "'10.0.0.256'"),
        ("0x7f.1", "'0x7f.1'"),
        ("0.0.0.0:29400", "'0.0.0.0'"),
        ("[::]:29400", "'[::]'"),
        ("224.0.0.1", "'224.0.0.1'"),
        ("[a]:1", "'[a]'"),
        ("[::1", "'[::1'"),
        ("[::1]1", "'[::1]1'"),
        ("[::1]:", "'[::1]:'"),
        ("fe80::1%a b", "'fe80::1%a b'"),
        ("[fe80::1%eth0]:5", "not an address that other nodes"),
        ("::1:29400", "[ADDRESS]:PORT"),
        ("a,b,A:29400", "A:29400 is there twice"),
        ("::1,[0::1]", "[0::1] is there twice"),
        ("a:0,b", "a:0 leaves the port open"),
    ],
)
def test_parse_endpoints_names_the_wrong_entry(text: str, named: str) -> None:
    """The message quotes the entry and stays short."""
    with pytest.raises(ConfigError) as caught:
        parse_endpoints(text)
    assert named in str(caught.value)
    assert len(str(caught.value)) < 220
    assert "\n" not in str(caught.value)


def test_parse_endpoints_refuses_more_than_a_thousand() -> None:
    """A longer list is a mistake."""
    assert len(parse_endpoints(",".join(f"n{number}" for number in range(1000)))) == 1000
    with pytest.raises(ConfigError, match="1001 candidates"):
        parse_endpoints(",".join(f"n{number}" for number in range(1001)))


@given(st.text(max_size=40) | st.text("0123456789abf:.,[]% -xn", max_size=40))
@example("[" * 40)
@example("fe80::1%\x00")
@example("\ud800:1")
def test_parse_endpoints_of_garbage_raises_only_config_errors(text: str) -> None:
    """An accepted text round-trips."""
    with contextlib.suppress(ConfigError):
        found = parse_endpoints(text)
        assert parse_endpoints(",".join(map(str, found))) == found


# ---- who is a candidate, and where it listens --------------------------------------------------------


def test_candidate_by_address_binds_that_address_alone(agents: Agents) -> None:
    """The address is bound exactly, and spelled as in the list."""
    opened = agents.listen(f"{ELSEWHERE},{ONE}:{PORT}")
    assert (opened.candidate_index, opened.host, opened.address, opened.warning) == (
        1,
        ONE,
        f"{ONE}:{PORT}",
        "",
    )
    assert bound(opened) == (ONE, PORT)
    assert opened.listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


def test_listener_does_not_share_its_port(agents: Agents) -> None:
    """SO_REUSEADDR is set because old connections linger; SO_REUSEPORT is not."""
    listener = agents.listen(f"{ONE}:{PORT}").listener
    assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 1
    assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) == 0


def test_local_addr_tells_simulated_nodes_apart(agents: Agents) -> None:
    """The nodes share a machine and a port, and have an address each."""
    text = f"{ONE}:{PORT},{TWO}:{PORT},{THREE}:{PORT}"
    for index, host in enumerate((ONE, TWO, THREE)):
        opened = agents.listen(text, host)
        assert (opened.candidate_index, opened.address, bound(opened)) == (
            index,
            f"{host}:{PORT}",
            (host, PORT),
        )


def test_local_addr_of_no_candidate_makes_an_ordinary_member(agents: Agents) -> None:
    """Another address of this machine is a candidate's, and is not compared."""
    opened = agents.listen(f"{ONE}:{PORT},{TWO}:{PORT}", THREE)
    assert (opened.candidate_index, opened.host, opened.warning) == (None, THREE, "")
    assert opened.address == f"{THREE}:{bound(opened)[1]}"
    assert bound(opened)[0] == THREE


def test_without_local_addr_any_address_of_the_machine_matches(agents: Agents, port: int) -> None:
    """The addresses of all interfaces are compared."""
    own = outer_address()
    opened = agents.listen(f"{ELSEWHERE},{own}:{port}")
    assert (opened.candidate_index, opened.host, bound(opened)) == (1, own, (own, port))


@needs_ipv6
@pytest.mark.parametrize("local", [None, "::1", "[::1]", "0:0::1"])
def test_ipv6_candidate_binds_ipv6_alone(agents: Agents, port: int, local: str | None) -> None:
    """The same port stays free for IPv4."""
    opened = agents.listen(f"[::1]:{port}", local)
    assert (opened.candidate_index, opened.host, opened.address) == (0, "::1", f"[::1]:{port}")
    assert opened.listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 1
    assert reaches("::1", opened)


@needs_ipv6
def test_ordinary_member_with_ipv6_has_brackets_in_its_address(agents: Agents) -> None:
    """Others connect to ``[address]:port``."""
    opened = agents.listen(ONE, "::1")
    assert (opened.candidate_index, opened.address) == (None, f"[::1]:{bound(opened)[1]}")


def test_two_agents_of_a_host_take_candidate_ports_in_order(agents: Agents) -> None:
    """Each takes the first candidate whose port is free."""
    text = f"{ELSEWHERE},{ONE}:{PORT},{ONE}:{NEXT_PORT}"
    assert [agents.listen(text).candidate_index, agents.listen(text, ONE).candidate_index] == [1, 2]


def test_candidate_by_name_binds_all_addresses(agents: Agents, port: int) -> None:
    """The name may resolve to another address of this machine elsewhere."""
    own = outer_address()
    opened = agents.listen(f"gpu7:{port}", resolve=directory({"gpu7": [own]}))
    assert (opened.candidate_index, opened.host, opened.address) == (0, "gpu7", f"gpu7:{port}")
    assert reaches(own, opened)
    assert reaches("127.0.0.1", opened)


@needs_ipv6
def test_candidate_by_name_binds_both_families(agents: Agents, port: int) -> None:
    """The name may be IPv4 here and IPv6 elsewhere."""
    opened = agents.listen(f"gpu7:{port}", resolve=directory({"gpu7": ["127.0.0.1"]}))
    assert reaches("127.0.0.1", opened)
    assert reaches("::1", opened)


def test_candidate_by_name_binds_ipv4_where_the_kernel_has_no_ipv6(
    agents: Agents, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel started with ipv6.disable=1 refuses the socket."""

    def open_socket(place: endpoint.Address, kind: socket.SocketKind) -> socket.socket:
        if place.version == 6:
            raise OSError(97, "Address family not supported by protocol")
        return socket.socket(socket.AF_INET, kind)

    monkeypatch.setattr(endpoint, "open_socket", open_socket)
    assert bound(agents.listen(f"node1:{port}")) == ("0.0.0.0", port)  # noqa: S104


@pytest.mark.parametrize("local", [None, "localhost"])
def test_localhost_binds_loopback_alone(agents: Agents, port: int, local: str | None) -> None:
    """Other machines cannot connect."""
    resolve = directory({"localhost": ["127.0.0.1"]})
    opened = agents.listen(f"localhost:{port}", local, resolve=resolve)
    assert (opened.candidate_index, opened.host, bound(opened)) == (0, "localhost", ("127.0.0.1", port))


def test_localhost_binds_loopback_alone_where_it_is_the_host_name(
    agents: Agents, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some containers are named localhost."""
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost.localdomain")
    opened = agents.listen(f"localhost:{port}", resolve=directory({"localhost": ["127.0.0.1"]}))
    assert bound(opened) == ("127.0.0.1", port)


@pytest.mark.parametrize("name", ["node1", "NODE1", "node1."])
@pytest.mark.parametrize("leads_to", [[], ["127.0.1.1"], [ELSEWHERE]])
def test_host_name_matches_wherever_it_resolves(
    agents: Agents, port: int, name: str, leads_to: list[str]
) -> None:
    """The name may not resolve, or to Debian's 127.0.1.1, or to a NAT gateway; all addresses are bound."""
    resolve = directory({name.lower(): leads_to} if leads_to else {})
    opened = agents.listen(f"{name}:{port},{ELSEWHERE}", resolve=resolve)
    assert (opened.candidate_index, opened.host, opened.address) == (
        0,
        name.lower(),
        f"{name.lower()}:{port}",
    )
    assert reaches("127.0.0.1", opened)
    with contextlib.suppress(pytest.skip.Exception):
        assert reaches(outer_address(), opened)


def test_host_name_on_loopback_matches_the_outer_address(agents: Agents, port: int) -> None:
    """--local-addr is a number and the candidate a name, or the other way round."""
    own = outer_address()
    resolve = directory({"node1": ["127.0.1.1"]})
    by_number = agents.listen(f"node1:{port}", own, resolve=resolve)
    assert (by_number.candidate_index, by_number.host, bound(by_number)) == (0, own, (own, port))
    assert by_number.address == f"node1:{port}"
    by_number.listener.close()
    by_name = agents.listen(f"{own}:{port}", "node1", resolve=resolve)
    assert (by_name.candidate_index, by_name.host, by_name.address) == (0, "node1", f"{own}:{port}")
    assert reaches(own, by_name)


def test_host_name_does_not_make_a_simulated_node_a_candidate(agents: Agents) -> None:
    """All simulated nodes share the host name; --local-addr decides."""
    resolve = directory({"node1": ["127.0.1.1"]})
    assert agents.listen("node1:1", TWO, resolve=resolve).candidate_index is None


def test_local_addr_by_name_is_bound_where_it_resolves(agents: Agents) -> None:
    """It is bound exactly, and spelled as it was written."""
    resolve = directory({"gpu7-ib0": [ONE], "gpu8-ib0": [TWO]})
    opened = agents.listen(f"gpu8-ib0:{PORT},gpu7-ib0:{PORT}", "GPU7-ib0", resolve=resolve)
    assert (opened.candidate_index, opened.host, bound(opened)) == (1, "gpu7-ib0", (ONE, PORT))


def test_ordinary_member_uses_the_source_address_towards_a_candidate(agents: Agents) -> None:
    """The kernel picks the source address; it is never loopback."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((ELSEWHERE, 1))
            own = probe.getsockname()[0]
    except OSError:
        pytest.skip("no network leads out of this machine")
    opened = agents.listen("far:1,further:1", resolve=directory({"further": [ELSEWHERE]}))
    assert (opened.candidate_index, opened.host) == (None, own)
    assert opened.address == f"{own}:{bound(opened)[1]}"
    assert bound(opened)[0] == own


def test_no_route_to_any_candidate_asks_for_local_addr(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the first candidate."""

    def unreachable(place: endpoint.Address, kind: socket.SocketKind) -> socket.socket:
        raise OSError(101, f"Network is unreachable: {place} {kind}")

    monkeypatch.setattr(endpoint, "open_socket", unreachable)
    with pytest.raises(
        ConfigError, match=rf"no network leads from this machine to {ELSEWHERE}.*--local-addr"
    ):
        agents.listen(ELSEWHERE)


def test_open_port_is_replaced_by_the_real_one(agents: Agents) -> None:
    """The kernel chooses the port of a standalone job."""
    opened = agents.listen(f"{ONE}:0")
    assert (opened.candidate_index, opened.address) == (0, f"{ONE}:{bound(opened)[1]}")
    assert bound(opened)[1] > 0


def test_open_port_matches_whatever_local_addr_is(agents: Agents) -> None:
    """An open port means one agent; its address is --local-addr."""
    opened = agents.listen("localhost:0", TWO, resolve=directory({"localhost": ["127.0.0.1"]}))
    assert (opened.candidate_index, opened.host, opened.address) == (0, TWO, f"{TWO}:{bound(opened)[1]}")


def test_open_port_of_another_machine_is_refused(agents: Agents) -> None:
    """This node could not learn the port."""
    with pytest.raises(ConfigError, match=rf"{ELSEWHERE}:0 is not this machine"):
        agents.listen(f"{ELSEWHERE}:0")


@pytest.mark.parametrize(
    ("local", "named"),
    [
        (ELSEWHERE, rf"--local-addr {ELSEWHERE} is not an address of this machine"),
        ("far", "--local-addr far is not an address of this machine"),
        ("nobody", r"--local-addr: nobody has no address after \d+ s"),
        ("0.0.0.0", r"--local-addr: '0.0.0.0' is not an address"),  # noqa: S104
        ("::1:29400", "--local-addr: '::1:29400' is neither"),
        ("a b", "--local-addr: 'a b' is neither"),
    ],
)
def test_local_addr_of_another_machine_is_refused(agents: Agents, local: str, named: str) -> None:
    """Other nodes could not reach this one."""
    with pytest.raises(ConfigError, match=named):
        wait_s = 0.2 if local == "nobody" else FOREVER_S
        agents.listen(ONE, local, resolve=directory({"far": [ELSEWHERE]}), timeout_s=wait_s)


@pytest.mark.usefixtures("no_port_retry")
def test_listed_address_that_cannot_be_bound_is_a_machine_error(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the system's reason."""
    gone = parse_address(ELSEWHERE)
    assert gone is not None
    monkeypatch.setattr(endpoint, "local_addresses", lambda: frozenset({gone}))
    with pytest.raises(MachineError, match=rf"cannot listen at {ELSEWHERE}, port 0: Cannot assign"):
        agents.listen(ELSEWHERE)


def test_port_below_1024_is_refused(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses such ports to users other than root."""

    def forbidden(place: endpoint.Address, kind: socket.SocketKind) -> socket.socket:
        raise OSError(errno.EACCES, f"Permission denied: {place} {kind}")

    if os.geteuid() == 0:
        monkeypatch.setattr(endpoint, "open_socket", forbidden)
    with pytest.raises(ConfigError, match="only root may listen on port 1:"):
        agents.listen(f"{ONE}:1")


def test_exhausted_descriptors_are_a_machine_error(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags are not at fault."""

    def full(place: endpoint.Address, kind: socket.SocketKind) -> socket.socket:
        raise OSError(24, f"Too many open files: {place} {kind}")

    monkeypatch.setattr(endpoint, "open_socket", full)
    with pytest.raises(MachineError, match=rf"cannot listen at {ONE}, port 29400: Too many open files"):
        agents.listen(ONE)


# ---- names that are slow, late or wrong --------------------------------------------------------------


def test_hanging_lookup_does_not_delay_a_match_of_another_name(agents: Agents) -> None:
    """All names are looked up at once."""
    release = threading.Event()

    def resolve(name: str) -> Sequence[str]:
        if name == "slow":
            release.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [ONE]

    try:
        assert agents.listen(f"slow:{PORT},gpu7:{PORT}", ONE, resolve=resolve).candidate_index == 1
    finally:
        release.set()


def test_own_name_that_resolves_late_is_waited_for(agents: Agents, port: int) -> None:
    """DNS learns a Kubernetes pod's name some seconds after its start."""
    asked: list[str] = []

    def resolve(name: str) -> Sequence[str]:
        asked.append(name)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ["127.0.0.1"]

    assert agents.listen(f"gpu7:{port}", resolve=resolve).candidate_index == 0


def test_missing_name_of_another_candidate_is_not_waited_for(agents: Agents) -> None:
    """Its node may not be up yet; the others start without it."""
    resolve = directory({"node2": [ELSEWHERE]})
    assert agents.listen("node3:1,node2:1", TWO, resolve=resolve).candidate_index is None


def test_unanswered_lookup_is_waited_for_up_to_its_timeout(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name server never answers for one name."""
    monkeypatch.setattr(endpoint, "LOOKUP_TIMEOUT_S", 0.1)

    def resolve(name: str) -> Sequence[str]:
        if name == "node2":
            return [ELSEWHERE]
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    assert agents.listen("node3:1,node2:1", TWO, resolve=resolve).candidate_index is None


def test_missing_name_that_begins_as_the_host_name_is_waited_for(agents: Agents, port: int) -> None:
    """The name may be this pod's; starting as an ordinary member would leave the candidate missing."""
    denied = threading.Event()

    def resolve(name: str) -> Sequence[str]:
        if name == "node2":
            return [ELSEWHERE]
        if not denied.is_set():
            denied.set()
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ["127.0.0.1"]

    opened = agents.listen(f"node1.svc:{port},node2:{port}", resolve=resolve)
    assert (opened.candidate_index, opened.address) == (0, f"node1.svc:{port}")


def test_missing_name_that_begins_as_the_host_name_is_an_error_in_the_end(agents: Agents) -> None:
    """The error names it and says what to do."""
    with pytest.raises(ConfigError) as caught:
        agents.listen("node1.svc,node2", resolve=directory({"node2": [ELSEWHERE]}), timeout_s=0.2)
    text = str(caught.value)
    assert text.startswith("--rdzv-endpoint: node1.svc has no address after")
    assert text.endswith("(getent hosts NAME), or give an address.")


@pytest.mark.parametrize("error", [socket.gaierror(socket.EAI_NONAME, "?"), UnicodeError("label too long")])
def test_error_names_the_first_candidate_when_none_resolves(agents: Agents, error: Exception) -> None:
    """The lookup timeout has passed."""

    def resolve(_: str) -> Sequence[str]:
        raise error

    with pytest.raises(ConfigError, match=r"--rdzv-endpoint: gpu8 has no address after \d+ s: correct"):
        agents.listen("gpu8,gpu9", resolve=resolve, timeout_s=0.2)


def test_hanging_lookup_ends_with_the_timeout(agents: Agents) -> None:
    """The thread is left behind: a lookup cannot be interrupted."""
    release = threading.Event()

    def resolve(name: str) -> Sequence[str]:
        release.wait()
        return [name]

    try:
        with pytest.raises(ConfigError, match="gpu8 has no address"):
            agents.listen("gpu8", resolve=resolve, timeout_s=0.2)
    finally:
        release.set()


def test_long_lookup_is_logged_once(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line has the name and the limit."""
    monkeypatch.setattr(endpoint, "LOG_LOOKUP_AFTER_S", 0.0)
    said: list[str] = []
    asked: list[str] = []

    def resolve(name: str) -> Sequence[str]:
        asked.extend([name] * len(said))
        if asked.count(name) < 2:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [ELSEWHERE]

    assert agents.listen("gpu8,gpu9", TWO, resolve=resolve, log=said.append).candidate_index is None
    assert said == ["waiting for an address of gpu8 and 1 more, for at most 3600 s."]


def test_lookup_threads_end_after_listening(agents: Agents) -> None:
    """Lookups of other names stop."""
    before = set(threading.enumerate())
    agents.listen(f"gpu8:{PORT},gpu7:{PORT}", ONE, resolve=directory({"gpu7": [ONE]}))
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


def test_resolve_name_returns_each_address_of_localhost_once() -> None:
    """Loopback addresses without duplicates."""
    found = endpoint.resolve_name("localhost")
    assert set(found) <= {"127.0.0.1", "::1"}
    assert len(found) == len(set(found))


def test_numeric_addresses_are_not_looked_up(agents: Agents) -> None:
    """The job needs no name server."""

    def resolve(name: str) -> Sequence[str]:
        raise AssertionError(name)

    assert agents.listen(f"{ONE}:{PORT},[fd00::77]:1,{ELSEWHERE}", ONE, resolve=resolve).candidate_index == 0


# ---- a port that is held -----------------------------------------------------------------------------


@pytest.mark.parametrize("local", [None, ONE], ids=["any", "one"])
@pytest.mark.usefixtures("no_port_retry")
def test_port_in_use_makes_an_ordinary_member_with_a_warning(agents: Agents, local: str | None) -> None:
    """The holder may be an agent of this job on the same host."""
    with socket.create_server((ONE, PORT)):
        opened = agents.listen(f"{ONE}:{PORT}", local)
    assert (opened.candidate_index, opened.host) == (None, ONE)
    assert opened.address == f"{ONE}:{bound(opened)[1]}"
    assert f"not the candidate {ONE}:{PORT}: port {PORT} of this machine is in use" in opened.warning
    assert "\n" not in opened.warning


@pytest.mark.usefixtures("no_port_retry")
def test_port_in_use_on_one_address_makes_an_ordinary_member_by_name(agents: Agents, port: int) -> None:
    """This agent would bind all addresses; the holder has bound one of them."""
    with socket.create_server((outer_address(), port)):
        opened = agents.listen(f"node1:{port}")
    assert (opened.candidate_index, opened.host) == (None, "node1")
    assert reaches(outer_address(), opened)


@pytest.mark.usefixtures("no_port_retry")
def test_port_in_use_is_an_error_for_a_single_node_job(agents: Agents) -> None:
    """No other agent of this job exists, so another program holds the port."""
    with socket.create_server((ONE, PORT)), pytest.raises(ConfigError) as caught:
        agents.listen(f"{ONE}:{PORT}", single_node=True)
    text = f"--rdzv-endpoint {ONE}:{PORT}: port {PORT} of this machine is in use: choose another port."
    assert str(caught.value) == text


def test_port_in_use_is_retried_until_its_holder_exits(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder closes after the first attempt."""
    monkeypatch.setattr(endpoint, "PORT_RETRY_S", FOREVER_S)
    bind = endpoint.listen
    with contextlib.ExitStack() as stack:
        stack.enter_context(socket.create_server((ONE, PORT)))

        def listen(places: Sequence[endpoint.Address], port: int) -> socket.socket:
            try:
                return bind(places, port)
            except endpoint.PortUnavailableError:
                stack.close()
                raise

        monkeypatch.setattr(endpoint, "listen", listen)
        assert agents.listen(f"{ONE}:{PORT}").candidate_index == 0


def test_endpoint_str_has_brackets_around_ipv6() -> None:
    """Names stay as they are."""
    assert str(Endpoint("::1", 2)) == "[::1]:2"
    assert str(Endpoint("a", 2)) == "a:2"
