"""Which candidate an agent is and where it listens: real sockets, injected names."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_resume.constants import ENV_TOKEN
from elastic_resume.errors import ConfigError, MachineError
from elastic_resume.rendezvous import endpoint
from elastic_resume.rendezvous.endpoint import (
    Endpoint,
    HostTable,
    ListenEndpoint,
    open_listen_endpoint,
    parse_address,
    parse_endpoints,
)
from elastic_resume.rendezvous.net import protocol
from elastic_resume.rendezvous.net.protocol import MAX_TOKEN_BYTES, load_token

RUN, TOKEN = "job", b"open sesame"
FOREVER_S = 3600.0  # a test that waited for it would meet pytest's own limit
ELSEWHERE = "198.51.100.7"  # TEST-NET-2 of RFC 5737: nobody's

# Each process of the suite has loopback addresses of its own, so their ports are nobody else's.
_BLOCK = f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250 + 1}"
ONE, TWO, THREE = (f"{_BLOCK}.{number}" for number in (1, 2, 3))


def outer_address() -> str:
    """An IPv4 address of this machine that is not loopback's."""
    for one in sorted(endpoint.local_addresses(), key=str):
        if one.version == 4 and not one.is_loopback:
            return str(one)
    pytest.skip("this machine has nothing but loopback")


def has_ipv6() -> bool:
    """Whether ::1 can be bound."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def free_port() -> int:
    """A port that nobody of this machine holds, below those that the kernel hands out."""
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
    """One more, of all addresses."""
    return free_port()


@pytest.fixture(autouse=True)
def _named_node1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's name is node1, in full node1.test, however long a thread takes to say so."""
    monkeypatch.setattr(endpoint, "FQDN_TIMEOUT_S", FOREVER_S)
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    monkeypatch.setattr(socket, "getfqdn", lambda: "node1.test")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for a port to become free; the holder has any time to answer."""
    monkeypatch.setattr(endpoint, "PORT_RETRY_S", 0.0)
    monkeypatch.setattr(endpoint, "HANDSHAKE_TIMEOUT_S", 60.0)


@pytest.fixture
def curt(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for a port to become free, and little for an answer that never comes."""
    monkeypatch.setattr(endpoint, "PORT_RETRY_S", 0.0)
    monkeypatch.setattr(endpoint, "HANDSHAKE_TIMEOUT_S", 0.2)


def directory(entries: Mapping[str, Sequence[str]]) -> endpoint.ResolveFunction:
    """Names with their addresses; others have none."""

    def resolve(name: str) -> Sequence[str]:
        if name not in entries:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return entries[name]

    return resolve


class Seats:
    """Seats that are given up when the test ends."""

    def __init__(self) -> None:
        self.taken: list[ListenEndpoint] = []

    def take(
        self,
        text: str,
        local: str | None = None,
        *,
        resolve: endpoint.ResolveFunction | None = None,
        resolve_s: float = FOREVER_S,
        say: Callable[[str], None] | None = None,
    ) -> ListenEndpoint:
        """Take one as an agent of the job does."""
        resolve = resolve or directory({})
        found = parse_endpoints(text)
        seat = open_listen_endpoint(
            found, local, run_id=RUN, token=TOKEN, resolve_timeout_s=resolve_s, resolve=resolve, log=say
        )
        self.taken.append(seat)
        return seat


@pytest.fixture
def seats() -> Iterator[Seats]:
    """Give what takes seats."""
    made = Seats()
    yield made
    for seat in made.taken:
        seat.listener.close()


def bound(seat: ListenEndpoint) -> tuple[str, int]:
    """Where a seat listens."""
    name = seat.listener.getsockname()
    return name[0], name[1]


def reaches(host: str, seat: ListenEndpoint) -> bool:
    """Whether a connection to a host arrives at a seat."""
    try:
        with socket.create_connection((host, bound(seat)[1]), timeout=10) as near:
            far, peer = seat.listener.accept()
            far.close()
            return bool(peer[1] == near.getsockname()[1])
    except ConnectionRefusedError:
        return False


@contextlib.contextmanager
def holder(where: tuple[str, int], talk: Callable[[socket.socket], None] | None = None) -> Iterator[int]:
    """Another program that holds a port; ``talk`` is what it does with a connection, None: not accept it."""
    with socket.create_server(where) as listener:
        thread = threading.Thread(target=_serve, args=(listener, talk))
        if talk is not None:
            thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            if talk is not None:
                listener.shutdown(socket.SHUT_RDWR)
                thread.join()


def _serve(listener: socket.socket, talk: Callable[[socket.socket], None]) -> None:
    while True:
        try:
            conn, _ = listener.accept()
        except OSError:
            return
        with conn, contextlib.suppress(OSError, protocol.ProtocolError):
            conn.settimeout(10)
            talk(conn)


def agent_of(run_id: str, token: bytes, proven: list[bool] | None = None) -> Callable[[socket.socket], None]:
    """The acceptor's side of the handshake, as an agent holds it; ``proven`` gets one entry for each held."""

    def talk(conn: socket.socket) -> None:
        ours = secrets.token_hex(32)
        with conn.makefile("rb") as file:
            theirs, _ = protocol.parse_greeting(file.readline()[:-1], run_id)
            conn.sendall(protocol.encode_challenge(ours))
            protocol.verify_proof(file.readline()[:-1], token, "dialler", run_id, (theirs, ours))
            conn.sendall(protocol.encode_proof(token, "acceptor", run_id, (theirs, ours)))
        if proven is not None:
            proven.append(True)

    return talk


def says(data: bytes) -> Callable[[socket.socket], None]:
    """A program that says the same to everybody, and waits."""

    def talk(conn: socket.socket) -> None:
        conn.recv(4096)
        conn.sendall(data)
        conn.recv(4096)

    return talk


# ---- what people write -------------------------------------------------------------------------------


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
        ("[fe80::1%eth0]:5", [("fe80::1%eth0", 5)]),
        ("::ffff:10.0.0.1", [("10.0.0.1", 29400)]),
        ("my_job_node-0.svc.", [("my_job_node-0.svc.", 29400)]),
        ("localhost:0", [("localhost", 0)]),
    ],
)
def test_endpoints_are_read(text: str, expected: list[tuple[str, int]]) -> None:
    """Names and both kinds of address, with and without a port, in one spelling."""
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
        ("::1:29400", "[ADDRESS]:PORT"),
        ("a,b,A:29400", "A:29400 is there twice"),
        ("::1,[0::1]", "[0::1] is there twice"),
        ("a:0,b", "a:0 leaves the port open"),
    ],
)
def test_what_is_wrong_in_a_list_of_endpoints_is_named(text: str, named: str) -> None:
    """The part, in a line or two."""
    with pytest.raises(ConfigError) as caught:
        parse_endpoints(text)
    assert named in str(caught.value)
    assert len(str(caught.value)) < 220
    assert "\n" not in str(caught.value)


def test_a_thousand_endpoints_are_the_most() -> None:
    """A list that is longer is a mistake."""
    assert len(parse_endpoints(",".join(f"n{number}" for number in range(1000)))) == 1000
    with pytest.raises(ConfigError, match="1001 candidates"):
        parse_endpoints(",".join(f"n{number}" for number in range(1001)))


@given(st.text(max_size=40) | st.text("0123456789abf:.,[]% -xn", max_size=40))
@example("[" * 40)
@example("fe80::1%\x00")
@example("\ud800:1")
def test_only_config_errors_come_of_garbage(text: str) -> None:
    """And whatever is taken is written back as the same."""
    with contextlib.suppress(ConfigError):
        found = parse_endpoints(text)
        assert parse_endpoints(",".join(map(str, found))) == found


# ---- who is a candidate, and where it listens --------------------------------------------------------


def test_a_candidate_by_address_listens_there_alone(seats: Seats) -> None:
    """An address is bound exactly, and told as it was written."""
    seat = seats.take(f"{ELSEWHERE},{ONE}:{PORT}")
    assert (seat.candidate_index, seat.host, seat.address, seat.warning) == (1, ONE, f"{ONE}:{PORT}", "")
    assert bound(seat) == (ONE, PORT)
    assert seat.listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


def test_a_port_has_one_listener(seats: Seats) -> None:
    """SO_REUSEADDR, since the last agent's connections linger; never SO_REUSEPORT."""
    listener = seats.take(f"{ONE}:{PORT}").listener
    assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 1
    assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) == 0


def test_simulated_nodes_are_each_their_own_candidate(seats: Seats) -> None:
    """One machine, one port, an address each."""
    text = f"{ONE}:{PORT},{TWO}:{PORT},{THREE}:{PORT}"
    for index, host in enumerate((ONE, TWO, THREE)):
        seat = seats.take(text, host)
        assert (seat.candidate_index, seat.address, bound(seat)) == (index, f"{host}:{PORT}", (host, PORT))


def test_a_local_address_that_is_no_candidates_makes_an_ordinary_member(seats: Seats) -> None:
    """Though another address of this machine is a candidate's."""
    seat = seats.take(f"{ONE}:{PORT},{TWO}:{PORT}", THREE)
    assert (seat.candidate_index, seat.host, seat.warning) == (None, THREE, "")
    assert seat.address == f"{THREE}:{bound(seat)[1]}"
    assert bound(seat)[0] == THREE


def test_without_a_local_address_any_own_one_counts(seats: Seats, port: int) -> None:
    """The addresses of this machine's interfaces."""
    own = outer_address()
    seat = seats.take(f"{ELSEWHERE},{own}:{port}")
    assert (seat.candidate_index, seat.host, bound(seat)) == (1, own, (own, port))


@needs_ipv6
@pytest.mark.parametrize("local", [None, "::1", "[::1]", "0:0::1"])
def test_an_ipv6_candidate(seats: Seats, port: int, local: str | None) -> None:
    """Bound for IPv6 alone; the port of the same number stays free for IPv4."""
    seat = seats.take(f"[::1]:{port}", local)
    assert (seat.candidate_index, seat.host, seat.address) == (0, "::1", f"[::1]:{port}")
    assert seat.listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 1
    assert reaches("::1", seat)


@needs_ipv6
def test_an_ordinary_member_with_an_ipv6_address(seats: Seats) -> None:
    """The address that others dial has brackets."""
    seat = seats.take(ONE, "::1")
    assert (seat.candidate_index, seat.address) == (None, f"[::1]:{bound(seat)[1]}")


def test_two_agents_of_a_host_take_the_ports_in_their_order(seats: Seats) -> None:
    """Candidates that share the host: the first whose port is free."""
    text = f"{ELSEWHERE},{ONE}:{PORT},{ONE}:{NEXT_PORT}"
    assert [seats.take(text).candidate_index, seats.take(text, ONE).candidate_index] == [1, 2]


def test_a_name_is_listened_for_on_all_addresses(seats: Seats, port: int) -> None:
    """What it leads to here it may not lead to elsewhere."""
    own = outer_address()
    seat = seats.take(f"gpu7:{port}", resolve=directory({"gpu7": [own]}))
    assert (seat.candidate_index, seat.host, seat.address) == (0, "gpu7", f"gpu7:{port}")
    assert reaches(own, seat)
    assert reaches("127.0.0.1", seat)


@needs_ipv6
def test_a_name_is_listened_for_in_both_families(seats: Seats, port: int) -> None:
    """IPv4 here may be IPv6 elsewhere."""
    seat = seats.take(f"gpu7:{port}", resolve=directory({"gpu7": ["127.0.0.1"]}))
    assert reaches("127.0.0.1", seat)
    assert reaches("::1", seat)


def test_where_the_kernel_has_no_ipv6_a_name_is_listened_for_in_the_other(
    seats: Seats, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel started with ipv6.disable=1 refuses the socket."""

    def open_socket(place: endpoint.Address, kind: socket.SocketKind) -> socket.socket:
        if place.version == 6:
            raise OSError(97, "Address family not supported by protocol")
        return socket.socket(socket.AF_INET, kind)

    monkeypatch.setattr(endpoint, "open_socket", open_socket)
    assert bound(seats.take(f"node1:{port}")) == ("0.0.0.0", port)  # noqa: S104


@pytest.mark.parametrize("local", [None, "localhost"])
def test_localhost_stays_inside(seats: Seats, port: int, local: str | None) -> None:
    """No other machine is asked in."""
    resolve = directory({"localhost": ["127.0.0.1"]})
    seat = seats.take(f"localhost:{port}", local, resolve=resolve)
    assert (seat.candidate_index, seat.host, bound(seat)) == (0, "localhost", ("127.0.0.1", port))


def test_localhost_stays_inside_though_the_machine_calls_itself_so(
    seats: Seats, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers' full name is often localhost."""
    monkeypatch.setattr(socket, "getfqdn", lambda: "localhost.localdomain")
    seat = seats.take(f"localhost:{port}", resolve=directory({"localhost": ["127.0.0.1"]}))
    assert bound(seat) == ("127.0.0.1", port)


@pytest.mark.parametrize("name", ["node1", "NODE1", "node1.test", "node1.test."])
@pytest.mark.parametrize("leads_to", [[], ["127.0.1.1"], [ELSEWHERE]])
def test_the_own_name_is_this_machine_wherever_it_leads(
    seats: Seats, port: int, name: str, leads_to: list[str]
) -> None:
    """Nowhere yet, to Debian's 127.0.1.1, to the gate of a network: others reach it, so it listens to all."""
    resolve = directory({name.lower(): leads_to} if leads_to else {})
    seat = seats.take(f"{name}:{port},{ELSEWHERE}", resolve=resolve)
    assert (seat.candidate_index, seat.host, seat.address) == (0, name.lower(), f"{name.lower()}:{port}")
    assert reaches("127.0.0.1", seat)
    with contextlib.suppress(pytest.skip.Exception):
        assert reaches(outer_address(), seat)


def test_the_own_name_matches_the_own_address_though_debian_maps_it_to_loopback(
    seats: Seats, port: int
) -> None:
    """--local-addr by number and the candidate by name, or the other way round."""
    own = outer_address()
    resolve = directory({"node1": ["127.0.1.1"]})
    by_number = seats.take(f"node1:{port}", own, resolve=resolve)
    assert (by_number.candidate_index, by_number.host, bound(by_number)) == (0, own, (own, port))
    assert by_number.address == f"node1:{port}"
    by_number.listener.close()
    by_name = seats.take(f"{own}:{port}", "node1", resolve=resolve)
    assert (by_name.candidate_index, by_name.host, by_name.address) == (0, "node1", f"{own}:{port}")
    assert reaches(own, by_name)


def test_the_own_name_does_not_make_a_simulated_node_a_candidate(seats: Seats) -> None:
    """All simulated nodes have the machine's name: only --local-addr tells them apart."""
    resolve = directory({"node1": ["127.0.1.1"]})
    assert seats.take("node1:1", TWO, resolve=resolve).candidate_index is None


def test_a_local_name_is_bound_where_it_leads(seats: Seats) -> None:
    """Exactly, as an address is; and told as it was written."""
    resolve = directory({"gpu7-ib0": [ONE], "gpu8-ib0": [TWO]})
    seat = seats.take(f"gpu8-ib0:{PORT},gpu7-ib0:{PORT}", "GPU7-ib0", resolve=resolve)
    assert (seat.candidate_index, seat.host, bound(seat)) == (1, "gpu7-ib0", (ONE, PORT))


def test_an_ordinary_member_is_reached_at_its_way_to_a_candidate(seats: Seats) -> None:
    """The source address that the kernel picks, never loopback."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((ELSEWHERE, 1))
            own = probe.getsockname()[0]
    except OSError:
        pytest.skip("no network leads out of this machine")
    seat = seats.take("far:1,further:1", resolve=directory({"further": [ELSEWHERE]}))
    assert (seat.candidate_index, seat.host) == (None, own)
    assert seat.address == f"{own}:{bound(seat)[1]}"
    assert bound(seat)[0] == own


def test_without_a_way_to_any_candidate_nobody_knows_where_this_node_is(
    seats: Seats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error asks for --local-addr."""

    def unreachable(place: endpoint.Address, kind: socket.SocketKind) -> socket.socket:
        raise OSError(101, f"Network is unreachable: {place} {kind}")

    monkeypatch.setattr(endpoint, "open_socket", unreachable)
    with pytest.raises(
        ConfigError, match=rf"no network leads from this machine to {ELSEWHERE}.*--local-addr"
    ):
        seats.take(ELSEWHERE)


def test_an_open_port_is_told_with_its_number(seats: Seats) -> None:
    """A standalone job: the kernel chooses."""
    seat = seats.take(f"{ONE}:0")
    assert (seat.candidate_index, seat.address) == (0, f"{ONE}:{bound(seat)[1]}")
    assert bound(seat)[1] > 0


def test_an_open_port_goes_with_a_local_address(seats: Seats) -> None:
    """There is one agent, so it is the candidate whatever --local-addr says, and is told at that."""
    seat = seats.take("localhost:0", TWO, resolve=directory({"localhost": ["127.0.0.1"]}))
    assert (seat.candidate_index, seat.host, seat.address) == (0, TWO, f"{TWO}:{bound(seat)[1]}")


def test_an_open_port_of_another_machine_is_refused(seats: Seats) -> None:
    """Nobody could know it."""
    with pytest.raises(ConfigError, match=rf"{ELSEWHERE}:0 is not this machine"):
        seats.take(f"{ELSEWHERE}:0")


@pytest.mark.parametrize(
    ("local", "named"),
    [
        (ELSEWHERE, rf"--local-addr {ELSEWHERE} is not an address of this machine"),
        ("far", "--local-addr far is not an address of this machine"),
        ("nobody", r"--local-addr nobody has no address after \d+ s"),
        ("0.0.0.0", r"--local-addr: '0.0.0.0' is no address"),  # noqa: S104
        ("::1:29400", "--local-addr: '::1:29400' is neither"),
        ("a b", "--local-addr: 'a b' is neither"),
    ],
)
def test_a_local_address_that_is_not_this_machines_is_named(seats: Seats, local: str, named: str) -> None:
    """Instead of a node that nobody reaches."""
    with pytest.raises(ConfigError, match=named):
        wait_s = 0.2 if local == "nobody" else FOREVER_S
        seats.take(ONE, local, resolve=directory({"far": [ELSEWHERE]}), resolve_s=wait_s)


@pytest.mark.usefixtures("impatient")
def test_an_address_that_is_not_there_yet_is_no_other_programs(
    seats: Seats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interface lists it and it cannot be bound: the system's own words."""
    gone = parse_address(ELSEWHERE)
    assert gone is not None
    monkeypatch.setattr(endpoint, "local_addresses", lambda: frozenset({gone}))
    with pytest.raises(ConfigError, match=rf"cannot listen at {ELSEWHERE}, port 29400: Cannot assign"):
        seats.take(ELSEWHERE)


def test_a_port_of_roots_is_refused(seats: Seats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below 1024. To root, as whom tests may run, nothing is refused."""

    def forbidden(place: endpoint.Address, kind: socket.SocketKind) -> socket.socket:
        raise OSError(errno.EACCES, f"Permission denied: {place} {kind}")

    if os.geteuid() == 0:
        monkeypatch.setattr(endpoint, "open_socket", forbidden)
    with pytest.raises(ConfigError, match="only root may listen on port 1:"):
        seats.take(f"{ONE}:1")


def test_an_error_of_the_system_is_no_fault_of_the_flags(
    seats: Seats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is left, say."""

    def full(place: endpoint.Address, kind: socket.SocketKind) -> socket.socket:
        raise OSError(24, f"Too many open files: {place} {kind}")

    monkeypatch.setattr(endpoint, "open_socket", full)
    with pytest.raises(MachineError, match=rf"cannot listen at {ONE}, port 29400: Too many open files"):
        seats.take(ONE)


# ---- names that are slow, late or wrong --------------------------------------------------------------


def test_a_name_that_hangs_does_not_hide_that_another_is_ours(seats: Seats) -> None:
    """All are looked up at once."""
    release = threading.Event()

    def resolve(name: str) -> Sequence[str]:
        if name == "slow":
            release.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [ONE]

    try:
        assert seats.take(f"slow:{PORT},gpu7:{PORT}", ONE, resolve=resolve).candidate_index == 1
    finally:
        release.set()


def test_a_name_that_is_ours_may_come_late(seats: Seats, port: int) -> None:
    """Kubernetes tells a pod's name some seconds after its start."""
    asked: list[str] = []

    def resolve(name: str) -> Sequence[str]:
        asked.append(name)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ["127.0.0.1"]

    assert seats.take(f"gpu7:{port}", resolve=resolve).candidate_index == 0


def test_a_candidate_that_is_not_there_yet_keeps_nobody_from_starting(seats: Seats) -> None:
    """The others go on as soon as they know that its name is not their own."""
    resolve = directory({"node2": [ELSEWHERE]})
    assert seats.take("node3:1,node2:1", TWO, resolve=resolve).candidate_index is None


def test_a_name_without_any_answer_is_not_waited_for_without_end(
    seats: Seats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server that is silent about one name."""
    monkeypatch.setattr(endpoint, "LOOKUP_TIMEOUT_S", 0.1)

    def resolve(name: str) -> Sequence[str]:
        if name == "node2":
            return [ELSEWHERE]
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    assert seats.take("node3:1,node2:1", TWO, resolve=resolve).candidate_index is None


def test_a_name_like_our_own_is_waited_for(seats: Seats, port: int) -> None:
    """Nobody can tell whose it is: as an ordinary member this agent would leave a candidate's place empty."""
    denied = threading.Event()

    def resolve(name: str) -> Sequence[str]:
        if name == "node2":
            return [ELSEWHERE]
        if not denied.is_set():
            denied.set()
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ["127.0.0.1"]

    seat = seats.take(f"node1.svc:{port},node2:{port}", resolve=resolve)
    assert (seat.candidate_index, seat.address) == (0, f"node1.svc:{port}")


def test_a_name_like_our_own_without_an_address_is_an_error(seats: Seats) -> None:
    """It is named, with what to do."""
    with pytest.raises(ConfigError) as caught:
        seats.take("node1.svc,node2", resolve=directory({"node2": [ELSEWHERE]}), resolve_s=0.2)
    text = str(caught.value)
    told = r"--rdzv-endpoint: node1\.svc has no address after \d+ s, and begins as this machine's"
    assert re.match(told, text)
    assert text.endswith("(getent hosts NAME), or give an address.")


def test_a_short_form_of_the_full_name_is_ours_before_it_resolves(
    seats: Seats, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes: a pod knows its full name from the start."""
    monkeypatch.setattr(socket, "gethostname", lambda: "job-0")
    monkeypatch.setattr(socket, "getfqdn", lambda: "job-0.svc.ns.svc.cluster.local")
    seat = seats.take(f"job-0.svc:{port},job-1.svc:{port}")
    assert (seat.candidate_index, seat.address) == (0, f"job-0.svc:{port}")


def test_a_short_form_that_leads_elsewhere_is_another_machines() -> None:
    """Unlike the host's name itself, it is only like it."""
    found = parse_address(ELSEWHERE)
    assert found is not None
    names_ = frozenset({"job-0", "job-0.a.test"})
    assert not HostTable({"job-0.a": (found,)}, frozenset(), names_, frozenset()).is_local_name("job-0.a")
    assert HostTable({"job-0": (found,)}, frozenset(), names_, frozenset()).is_local_name("job-0")


@pytest.mark.parametrize("error", [socket.gaierror(socket.EAI_NONAME, "?"), UnicodeError("label too long")])
def test_without_any_address_the_first_name_is_told(seats: Seats, error: Exception) -> None:
    """After the time that names have."""

    def resolve(_: str) -> Sequence[str]:
        raise error

    with pytest.raises(ConfigError, match=r"--rdzv-endpoint: gpu8 has no address after \d+ s: correct"):
        seats.take("gpu8,gpu9", resolve=resolve, resolve_s=0.2)


def test_a_name_server_that_hangs_is_left_behind(seats: Seats) -> None:
    """A lookup cannot be interrupted."""
    release = threading.Event()

    def resolve(name: str) -> Sequence[str]:
        release.wait()
        return [name]

    try:
        with pytest.raises(ConfigError, match="gpu8 has no address"):
            seats.take("gpu8", resolve=resolve, resolve_s=0.2)
    finally:
        release.set()


def test_a_long_wait_is_told_once(seats: Seats, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the name."""
    monkeypatch.setattr(endpoint, "LOG_LOOKUP_AFTER_S", 0.0)
    said: list[str] = []
    asked: list[str] = []

    def resolve(name: str) -> Sequence[str]:
        asked.extend([name] * len(said))
        if asked.count(name) < 2:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [ELSEWHERE]

    assert seats.take("gpu8,gpu9", TWO, resolve=resolve, say=said.append).candidate_index is None
    assert said == ["waiting for an address of gpu8 and 1 more, for at most 3600 s."]


def test_nobody_asks_any_more_when_the_seat_is_taken(seats: Seats) -> None:
    """The threads end."""
    before = set(threading.enumerate())
    seats.take(f"gpu8:{PORT},gpu7:{PORT}", ONE, resolve=directory({"gpu7": [ONE]}))
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


def test_the_systems_own_lookup_knows_localhost() -> None:
    """Each address once."""
    found = endpoint.resolve_name("localhost")
    assert set(found) <= {"127.0.0.1", "::1"}
    assert len(found) == len(set(found))


def test_numbers_are_not_looked_up(seats: Seats) -> None:
    """A cluster without a name server."""

    def resolve(name: str) -> Sequence[str]:
        raise AssertionError(name)

    assert seats.take(f"{ONE}:{PORT},[fd00::77]:1,{ELSEWHERE}", ONE, resolve=resolve).candidate_index == 0


# ---- a port that is held -----------------------------------------------------------------------------


@pytest.mark.parametrize("local", [None, ONE], ids=["any", "one"])
@pytest.mark.usefixtures("impatient")
def test_beside_an_agent_of_the_same_job_this_one_is_an_ordinary_member(
    seats: Seats, local: str | None
) -> None:
    """Two agents of one host."""
    with holder((ONE, PORT), agent_of(RUN, TOKEN)):
        seat = seats.take(f"{ONE}:{PORT}", local)
    assert (seat.candidate_index, seat.host, seat.warning) == (None, ONE, "")
    assert seat.address == f"{ONE}:{bound(seat)[1]}"


@pytest.mark.usefixtures("impatient")
def test_whoever_asks_an_agent_of_the_same_job_is_no_stranger_to_it(seats: Seats) -> None:
    """The handshake is held to its end: an agent tells people of those who leave before."""
    proven: list[bool] = []
    with holder((ONE, PORT), agent_of(RUN, TOKEN, proven)):
        seats.take(f"{ONE}:{PORT}")
    assert proven == [True]


@pytest.mark.usefixtures("impatient")
def test_an_agent_of_the_same_job_is_found_at_any_address(seats: Seats, port: int) -> None:
    """This one would listen everywhere; the other holds one address of many."""
    with holder((outer_address(), port), agent_of(RUN, TOKEN)):
        seat = seats.take(f"node1:{port}")
    assert (seat.candidate_index, seat.host, seat.warning) == (None, "node1", "")
    assert reaches(outer_address(), seat)


STRANGERS: dict[str, Callable[[socket.socket], None] | None] = {
    "silent": None,
    "accepts and is silent": says(b""),
    "garbage": says(b"\x00\xff" * 100 + b"\n"),
    "garbage without end": says(b"x" * 10000),
    "http": says(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "no line": says(b"{"),
    "echo": lambda conn: conn.sendall(conn.recv(4096)),
    "another job": agent_of("another", TOKEN),
    "another token": agent_of(RUN, b"secret of another"),
}


@pytest.mark.parametrize("talk", STRANGERS.values(), ids=STRANGERS)
@pytest.mark.usefixtures("curt")
def test_a_port_that_a_stranger_holds_is_an_error_for_the_only_candidate(
    seats: Seats, talk: Callable[[socket.socket], None] | None
) -> None:
    """The text names host and port, says what to do, and shows no token."""
    with holder((ONE, PORT), talk), pytest.raises(ConfigError) as caught:
        seats.take(f"{ONE}:{PORT}")
    text = str(caught.value)
    assert text.startswith(
        f"--rdzv-endpoint {ONE}:{PORT}: port {PORT} of this machine is held by another program"
    )
    assert "make it free, or name another port" in text
    assert TOKEN.decode() not in text


@pytest.mark.usefixtures("curt")
def test_a_stranger_on_each_of_the_only_candidates_ports_is_an_error(seats: Seats) -> None:
    """There is no other to carry the rendezvous."""
    with holder((ONE, PORT)), holder((ONE, NEXT_PORT)), pytest.raises(ConfigError, match=f"{ONE}:{PORT}"):
        seats.take(f"{ONE}:{PORT},{ONE}:{NEXT_PORT}")


@pytest.mark.usefixtures("curt")
def test_with_other_candidates_a_stranger_makes_an_ordinary_member(seats: Seats) -> None:
    """And a notice."""
    with holder((ONE, PORT)):
        seat = seats.take(f"{ONE}:{PORT},{TWO}:{PORT}", ONE)
    assert (seat.candidate_index, seat.host) == (None, ONE)
    assert f"cannot be the candidate {ONE}:{PORT}: port {PORT}" in seat.warning
    assert "\n" not in seat.warning


def test_a_port_is_waited_for_while_its_last_holder_dies(
    seats: Seats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder goes after the first try."""
    monkeypatch.setattr(endpoint, "PORT_RETRY_S", FOREVER_S)
    bind = endpoint.listen
    with contextlib.ExitStack() as stack:
        stack.enter_context(holder((ONE, PORT)))

        def listen(places: Sequence[endpoint.Address], port: int) -> socket.socket:
            try:
                return bind(places, port)
            except endpoint.PortUnavailableError:
                stack.close()
                raise

        monkeypatch.setattr(endpoint, "listen", listen)
        assert seats.take(f"{ONE}:{PORT}").candidate_index == 0


@pytest.mark.usefixtures("impatient")
def test_a_holder_that_goes_while_it_is_asked_leaves_the_place(
    seats: Seats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more try before anybody is told."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(holder((ONE, PORT)))

        def ask(*_: object) -> bool:
            stack.close()
            return False

        monkeypatch.setattr(endpoint, "belongs_to_job", ask)
        assert seats.take(f"{ONE}:{PORT}").candidate_index == 0


# ---- the token ---------------------------------------------------------------------------------------

SECRET = "9f2c-very-secret"  # noqa: S105


def token_file(folder: Path, text: bytes = SECRET.encode(), mode: int = 0o600) -> Path:
    """A file with a token."""
    path = folder / "token"
    path.write_bytes(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_token_comes_from_a_file_of_ones_own(tmp_path: Path, mode: int) -> None:
    """White space around it is not part of it."""
    path = token_file(tmp_path, b" \n" + SECRET.encode() + b"\r\n", mode)
    assert load_token(path, {}, RUN) == (SECRET.encode(), True)


def test_a_token_may_be_linked_to(tmp_path: Path) -> None:
    """Kubernetes mounts secrets as links."""
    link = tmp_path / "link"
    link.symlink_to(token_file(tmp_path))
    assert load_token(link, {}, RUN) == (SECRET.encode(), True)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620, 0o602, 0o610, 0o601, 0o666])
def test_a_token_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    """It is no secret any more."""
    with pytest.raises(ConfigError, match=rf"open to other users \(mode {mode:04o}\): chmod 600") as caught:
        load_token(token_file(tmp_path, mode=mode), {}, RUN)
    assert SECRET not in str(caught.value)


def test_a_token_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That user knows it, and can change it."""
    path = token_file(tmp_path)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        load_token(path, {}, RUN)


@pytest.mark.parametrize("text", [b"", b" \n\t"])
def test_a_file_without_a_token_is_refused(tmp_path: Path, text: bytes) -> None:
    """Never on without one, silently."""
    with pytest.raises(ConfigError, match="holds no token"):
        load_token(token_file(tmp_path, text), {}, RUN)


def test_a_token_is_not_longer_than_a_page(tmp_path: Path) -> None:
    """Somebody named the wrong file."""
    most = SECRET.encode().ljust(MAX_TOKEN_BYTES, b"x")
    assert load_token(token_file(tmp_path, most), {}, RUN) == (most, True)
    with pytest.raises(ConfigError, match="longer than 4096 bytes") as caught:
        load_token(token_file(tmp_path, most + b"x"), {}, RUN)
    assert SECRET not in str(caught.value)


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    """A folder, a pipe (which must not make us wait), nothing."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        load_token(pipe, {}, RUN)
    for path in (tmp_path, tmp_path / "absent", tmp_path / "nul\0"):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_token(path, {}, RUN)


def test_the_file_goes_before_the_variable(tmp_path: Path) -> None:
    """Who writes a flag means it; a variable may be left from before."""
    assert load_token(token_file(tmp_path), {ENV_TOKEN: "another"}, RUN) == (SECRET.encode(), True)


def test_a_token_comes_from_the_environment() -> None:
    """As the same bytes that a file would hold."""
    assert load_token(None, {ENV_TOKEN: f" {SECRET}\n"}, RUN) == (SECRET.encode(), True)
    assert load_token(None, {ENV_TOKEN: "\udcff" * 16}, RUN) == (b"\xff" * 16, True)


@pytest.mark.parametrize("token", [b"x", SECRET.encode()[:-1], SECRET.encode()[:-1] + b" \n"])
def test_a_token_that_can_be_guessed_is_refused(tmp_path: Path, token: bytes) -> None:
    """From a file and from the environment, and what to do is said; the token itself is not."""
    path = token_file(tmp_path, token)
    for file, environ, where in (
        (path, {}, f"--rdzv-token-file {path}"),
        (None, {ENV_TOKEN: token.decode()}, ENV_TOKEN),
    ):
        with pytest.raises(ConfigError, match=r"shorter than 16 bytes.*openssl rand -hex 32") as caught:
            load_token(file, environ, RUN)
        assert str(caught.value).startswith(where)
        assert SECRET[:-1] not in str(caught.value)


@pytest.mark.parametrize("text", ["", " ", SECRET * 1000])
def test_a_variable_that_holds_no_token_is_refused(text: str) -> None:
    """A secret that somebody failed to fill in."""
    with pytest.raises(ConfigError, match=ENV_TOKEN) as caught:
        load_token(None, {ENV_TOKEN: text}, RUN)
    assert SECRET not in str(caught.value)


def test_without_a_token_the_jobs_name_keeps_strays_out() -> None:
    """One for each job, and no secret."""
    (one, secret), (other, _) = load_token(None, {}, "a"), load_token(None, {}, "b")
    assert not secret
    assert one != other
    assert len(one) == 32


def test_no_seat_shows_the_token(seats: Seats) -> None:
    """Nor does what it is made of."""
    assert repr(TOKEN)[2:-1] not in repr(seats.take(f"{ONE}:{PORT}"))


def test_an_endpoint_is_shown_as_it_is_dialled() -> None:
    """IPv6 in brackets."""
    assert str(Endpoint("::1", 2)) == "[::1]:2"
    assert str(Endpoint("a", 2)) == "a:2"
