"""Which candidate an agent is and where it listens: real sockets, injected names."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
from collections.abc import Callable, Iterator

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_resume.errors import ConfigError, MachineError
from elastic_resume.rendezvous import endpoint
from elastic_resume.rendezvous.endpoint import (
    ListenEndpoint,
    open_listen_endpoint,
    parse_address,
    parse_endpoints,
)

ELSEWHERE = "198.51.100.7"  # TEST-NET-2 of RFC 5737: no machine has it

# Each process of the suite has loopback addresses of its own, so their ports are free.
_BLOCK = f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250 + 1}"
FIRST, SECOND, THIRD = (f"{_BLOCK}.{number}" for number in (1, 2, 3))

NOT_FOUND = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
Answers = dict[str, list[list[str]]]
"""The answers to the lookups of each name, the last one repeated; an empty answer is `NOT_FOUND`."""
Listen = Callable[..., ListenEndpoint]


def outer_address() -> str:
    """Return an IPv4 address of this machine that is not loopback."""
    for address in sorted(endpoint.local_addresses(), key=str):
        if address.version == 4 and not address.is_loopback:
            return str(address)
    pytest.skip("this machine has nothing but loopback")


needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


@pytest.fixture
def port() -> int:
    """Return a port that is free on all addresses, below the kernel's ephemeral ports."""
    for _ in range(100):
        number = random.SystemRandom().randrange(15000, 32000)
        with contextlib.suppress(OSError):
            endpoint.listen(endpoint.WILDCARD_ADDRESS, number).close()
            return number
    pytest.fail("no port is free")


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Name the machine node1, replace name lookups, and do not wait for a port in use."""
    found: Answers = {}

    def resolve(name: str) -> list[str]:
        queue = found.get(name, [[]])
        addresses = queue.pop(0) if len(queue) > 1 else queue[0]
        if not addresses:
            raise NOT_FOUND
        return addresses

    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    monkeypatch.setattr(endpoint, "resolve_name", resolve)
    monkeypatch.setattr(endpoint, "_LOOKUP_PAUSE_S", 0.001)
    monkeypatch.setattr(endpoint, "PORT_RETRY_S", 0.0)
    return found


@pytest.fixture
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up on names soon."""
    monkeypatch.setattr(endpoint, "RESOLVE_TIMEOUT_S", 0.05)


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Return a function that opens listening endpoints; close them after the test."""
    with contextlib.ExitStack() as stack:

        def open_one(
            text: str, local_addr: str | None = None, *, single_node: bool = False
        ) -> ListenEndpoint:
            opened = open_listen_endpoint(parse_endpoints(text), local_addr, single_node=single_node)
            stack.callback(opened.listener.close)
            return opened

        yield open_one


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
    assert [(entry.host, entry.port) for entry in found] == expected
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
        ("a:0,b", "a:0 has port 0"),
    ],
)
def test_parse_endpoints_names_the_wrong_entry(text: str, named: str) -> None:
    """The message quotes the entry and stays short."""
    with pytest.raises(ConfigError) as caught:
        parse_endpoints(text)
    assert named in str(caught.value)
    assert len(str(caught.value)) < 220
    assert "\n" not in str(caught.value)


@given(st.text(max_size=40) | st.text("0123456789abf:.,[]% -xn", max_size=40))
@example("[" * 40)
@example("fe80::1%\x00")
@example("\ud800:1")
def test_parse_endpoints_of_garbage_raises_only_config_errors(text: str) -> None:
    """An accepted text round-trips."""
    with contextlib.suppress(ConfigError):
        found = parse_endpoints(text)
        assert parse_endpoints(",".join(map(str, found))) == found


# ---- which candidate, and where it listens ------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "local", "names", "index", "host", "address"),
    [
        pytest.param("ELSEWHERE,A:P", None, {}, 1, "A", "A:P", id="own address"),
        pytest.param("A:P,B:P,C:P", "B", {}, 1, "B", "B:P", id="simulated nodes share a machine and a port"),
        pytest.param("A:P,[fd00::77]:1,ELSEWHERE", "A", {}, 0, "A", "A:P", id="numbers are not looked up"),
        pytest.param("gpu8:P,gpu7:P", "GPU7", {"gpu8": "B", "gpu7": "A"}, 1, "gpu7", "gpu7:P", id="own name"),
        pytest.param("gone:P,gpu7:P", "A", {"gpu7": "A"}, 1, "A", "gpu7:P", id="another name does not exist"),
        pytest.param("A:0", None, {}, 0, "A", "A:*", id="open port"),
        pytest.param("localhost:0", "B", {"localhost": "127.0.0.1"}, 0, "B", "B:*", id="open port elsewhere"),
        pytest.param("A:P,B:P", "C", {}, None, "C", "C:*", id="no candidate"),
        pytest.param(
            "node1:1", "B", {"node1": "127.0.1.1"}, None, "B", "B:*", id="simulated node's host name"
        ),
        pytest.param("node3:1,node2:1", "B", {"node2": "ELSEWHERE"}, None, "B", "B:*", id="absent candidate"),
    ],
)
def test_listen_by_numeric_address_binds_it_exactly(
    listen: Listen,
    answers: Answers,
    port: int,
    *,
    text: str,
    local: str | None,
    names: dict[str, str],
    index: int | None,
    host: str,
    address: str,
) -> None:
    """A to C stand for loopback addresses, P for a free port and * for the port that was bound."""
    letters = {"ELSEWHERE": ELSEWHERE, "A": FIRST, "B": SECOND, "C": THIRD}

    def fill(template: str) -> str:
        for letter, value in letters.items():
            template = template.replace(f"{letter}:", f"{value}:").replace(f"{letter},", f"{value},")
        return letters.get(template, template).replace(":P", f":{port}")

    answers.update({name: [[letters.get(target, target)]] for name, target in names.items()})
    opened = listen(fill(text), fill(local) if local else None)
    assert (opened.candidate_index, opened.host) == (index, fill(host))
    assert opened.address == fill(address).replace("*", str(bound(opened)[1]))
    assert bound(opened)[0] == letters.get(host, FIRST)
    assert opened.listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    assert opened.listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 1
    assert opened.listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) == 0


def test_listen_without_local_addr_matches_any_address_of_the_machine(listen: Listen, port: int) -> None:
    """The addresses of all interfaces are compared."""
    own = outer_address()
    opened = listen(f"{ELSEWHERE},{own}:{port}")
    assert (opened.candidate_index, opened.host, bound(opened)) == (1, own, (own, port))


@needs_ipv6
@pytest.mark.parametrize("local", [None, "::1", "[::1]", "0:0::1"])
def test_listen_at_ipv6_address_binds_ipv6_alone(listen: Listen, port: int, local: str | None) -> None:
    """The same port stays free for IPv4."""
    opened = listen(f"[::1]:{port}", local)
    assert (opened.candidate_index, opened.host, opened.address) == (0, "::1", f"[::1]:{port}")
    assert opened.listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 1


@needs_ipv6
def test_listen_by_name_binds_all_addresses_of_both_families(
    listen: Listen, answers: Answers, port: int
) -> None:
    """The name may resolve to another address of this machine elsewhere."""
    answers["gpu7"] = [["127.0.0.1"]]
    opened = listen(f"gpu7:{port}")
    assert (opened.candidate_index, opened.host, opened.address) == (0, "gpu7", f"gpu7:{port}")
    assert reaches("127.0.0.1", opened)
    assert reaches("::1", opened)


def test_listen_by_name_without_ipv6_binds_ipv4(
    listen: Listen, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel started with ipv6.disable=1 has no such sockets."""
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    assert bound(listen(f"node1:{port}")) == ("0.0.0.0", port)  # noqa: S104


@pytest.mark.parametrize("host_name", ["node1", "localhost.localdomain"])
@pytest.mark.parametrize("local", [None, "localhost"])
def test_listen_at_localhost_binds_loopback_alone(
    listen: Listen,
    answers: Answers,
    port: int,
    *,
    local: str | None,
    host_name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Other machines cannot connect, also if a container is named localhost. The user is warned of it."""
    monkeypatch.setattr(socket, "gethostname", lambda: host_name)
    answers["localhost"] = [["127.0.0.1"]]
    opened = listen(f"localhost:{port}", local)
    assert (opened.candidate_index, opened.host, bound(opened)) == (0, "localhost", ("127.0.0.1", port))
    assert "--rdzv-endpoint has localhost, which is another machine on each node" in caplog.text


@pytest.mark.parametrize("name", ["node1", "NODE1", "node1."])
@pytest.mark.parametrize("target", [[], ["127.0.1.1"], [ELSEWHERE]], ids=["none", "debian", "gateway"])
def test_listen_by_host_name_matches_wherever_it_resolves(
    listen: Listen, answers: Answers, port: int, name: str, target: list[str]
) -> None:
    """The name may not resolve, or to Debian's 127.0.1.1, or to a NAT gateway; all addresses are bound."""
    spelled = name.lower()
    answers[spelled] = [target]
    opened = listen(f"{name}:{port},{ELSEWHERE}")
    assert (opened.candidate_index, opened.host, opened.address) == (0, spelled, f"{spelled}:{port}")
    assert reaches("127.0.0.1", opened)


def test_host_name_on_loopback_stands_for_the_outer_address(
    listen: Listen, answers: Answers, port: int
) -> None:
    """--local-addr is a number and the candidate a name, or the other way round."""
    own = outer_address()
    answers["node1"] = [["127.0.1.1"]]
    by_number = listen(f"node1:{port}", own)
    assert (by_number.candidate_index, by_number.host, bound(by_number)) == (0, own, (own, port))
    assert by_number.address == f"node1:{port}"
    by_number.listener.close()
    by_name = listen(f"{own}:{port}", "node1")
    assert (by_name.candidate_index, by_name.host, by_name.address) == (0, "node1", f"{own}:{port}")
    assert reaches(own, by_name)


def test_ordinary_member_uses_the_source_address_towards_a_candidate(
    listen: Listen, answers: Answers
) -> None:
    """The kernel picks the source address; it is never loopback."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((ELSEWHERE, 1))
            own = probe.getsockname()[0]
    except OSError:
        pytest.skip("no network leads out of this machine")
    answers["further"] = [[ELSEWHERE]]
    opened = listen("far:1,further:1")
    assert (opened.candidate_index, opened.host) == (None, own)
    assert (opened.address, bound(opened)[0]) == (f"{own}:{bound(opened)[1]}", own)


# ---- errors --------------------------------------------------------------------------------------------


def raise_on_open(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Let every socket fail with an error."""

    def fail(*_: object, **__: object) -> socket.socket:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(socket, "socket", fail)


def test_no_route_to_any_candidate_asks_for_local_addr(
    listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the first candidate."""
    raise_on_open(monkeypatch, errno.ENETUNREACH)
    with pytest.raises(ConfigError, match=rf"no network route from this machine to {ELSEWHERE}.*local-addr"):
        listen(ELSEWHERE)


@pytest.mark.usefixtures("short_timeout")
@pytest.mark.parametrize(
    ("text", "local", "named"),
    [
        (f"{ELSEWHERE}:0", None, rf"{ELSEWHERE}:0 is not this machine"),
        (FIRST, ELSEWHERE, rf"--local-addr {ELSEWHERE} is not an address of this machine"),
        (FIRST, "far", "--local-addr far is not an address of this machine"),
        (FIRST, "nobody", r"--local-addr: nobody has no address after \d+ s"),
        (FIRST, "0.0.0.0", r"--local-addr: '0.0.0.0' is not an address"),  # noqa: S104
        (FIRST, "::1:29400", "--local-addr: '::1:29400' is neither"),
        (FIRST, "a b", "--local-addr: 'a b' is neither"),
        ("gpu8,gpu9", None, r"--rdzv-endpoint: gpu8 has no address after \d+ s: correct the name.*getent"),
        ("node1.svc,far", None, "--rdzv-endpoint: node1.svc has no address after"),
    ],
    ids=map(str, range(9)),  # the addresses differ between the processes of a test run
)
def test_wrong_host_is_refused(
    listen: Listen, answers: Answers, text: str, local: str | None, named: str
) -> None:
    """Other nodes could not reach this one, or no candidate would start; the error names the host."""
    answers["far"] = [[ELSEWHERE]]
    with pytest.raises(ConfigError, match=named):
        listen(text, local)


def test_listed_address_that_cannot_be_bound_is_a_machine_error(
    listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the system's reason."""
    address = parse_address(ELSEWHERE)
    assert address is not None
    monkeypatch.setattr(endpoint, "local_addresses", lambda: frozenset({address}))
    with pytest.raises(MachineError, match=rf"this agent cannot listen: Cannot assign.*{ELSEWHERE}"):
        listen(ELSEWHERE)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES])
def test_refused_socket_is_a_machine_error(
    listen: Listen, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """No descriptor is left, or only root may bind the port."""
    raise_on_open(monkeypatch, code)
    with pytest.raises(MachineError, match=f"cannot listen: {os.strerror(code)}"):
        listen(FIRST)


# ---- names that are late or wrong ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpu7", "node1.svc"])
def test_own_name_that_resolves_late_is_waited_for(
    listen: Listen, answers: Answers, port: int, name: str
) -> None:
    """DNS learns a Kubernetes pod's name some seconds after its start; it begins as the host name."""
    answers[name] = [[], [], ["127.0.0.1"]]
    if name == "node1.svc":
        answers["node2"] = [[ELSEWHERE]]
    opened = listen(f"{name}:{port},node2:{port}")
    assert (opened.candidate_index, opened.address) == (0, f"{name}:{port}")


def test_name_whose_lookup_fails_for_a_moment_is_looked_up_again(
    listen: Listen, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nobody would listen at this candidate's address."""
    failures = iter([socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")])

    def resolve(name: str) -> list[str]:
        if name == "alias-a":
            return [ELSEWHERE]
        for failure in failures:
            raise failure
        return ["127.0.0.1"]

    monkeypatch.setattr(endpoint, "resolve_name", resolve)
    assert listen(f"alias-a:{port},alias-b:{port}").candidate_index == 1


def test_lookups_end_with_the_first_match(listen: Listen, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server may take seconds for each name that it does not know."""
    names: list[str] = []

    def resolve(name: str) -> list[str]:
        names.append(name)
        return ["127.0.0.1"]

    monkeypatch.setattr(endpoint, "resolve_name", resolve)
    assert listen(f"gpu7:{port},gpu8:{port}").candidate_index == 0
    assert names == ["gpu7"]


def test_long_lookup_is_logged_once(
    listen: Listen, answers: Answers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The line has the names and the limit."""
    monkeypatch.setattr(endpoint, "LOG_LOOKUP_AFTER_S", 0.0)
    caplog.set_level("INFO")
    answers["gpu8"] = [[], [], [ELSEWHERE]]
    assert listen("gpu8,gpu9", SECOND).candidate_index is None
    assert caplog.messages == ["waiting for an address of gpu8, gpu9, for at most 60 s."]


def test_resolve_name_returns_each_address_of_localhost_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback addresses without duplicates."""
    monkeypatch.undo()
    found = endpoint.resolve_name("localhost")
    assert set(found) <= {"127.0.0.1", "::1"}
    assert len(found) == len(set(found))


# ---- a port in use -------------------------------------------------------------------------------------


def test_two_agents_of_a_host_take_candidate_ports_in_order(listen: Listen, port: int) -> None:
    """Each takes the first candidate whose port is free."""
    text = f"{ELSEWHERE},{FIRST}:{port},{FIRST}:{port + 1}"
    assert [listen(text).candidate_index, listen(text, FIRST).candidate_index] == [1, 2]


@pytest.mark.parametrize(
    ("host", "local", "holder"),
    [(FIRST, None, FIRST), (FIRST, FIRST, FIRST), ("node1", None, "127.0.0.1")],
    ids=["listed", "listed-and-local", "name"],
)
def test_port_in_use_makes_an_ordinary_member_with_a_warning(
    listen: Listen, port: int, caplog: pytest.LogCaptureFixture, *, host: str, local: str | None, holder: str
) -> None:
    """The holder may be an agent of this job on the same host, and may have bound one address of many."""
    with socket.create_server((holder, port)):
        opened = listen(f"{host}:{port}", local)
    assert (opened.candidate_index, opened.host) == (None, host)
    assert opened.address == f"{host}:{bound(opened)[1]}"
    (warning,) = caplog.messages
    assert f"not the candidate {host}:{port}: port {port} of this machine is in use" in warning


def test_port_in_use_is_an_error_for_a_single_node_job(listen: Listen, port: int) -> None:
    """No other agent of this job exists, so another program holds the port."""
    text = f"--rdzv-endpoint {FIRST}:{port}: port {port} of this machine is in use: choose another port."
    with socket.create_server((FIRST, port)), pytest.raises(ConfigError, match=text):
        listen(f"{FIRST}:{port}", single_node=True)


def test_port_in_use_is_retried_until_its_holder_exits(
    listen: Listen, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder closes after the first attempt."""
    monkeypatch.setattr(endpoint, "PORT_RETRY_S", 3600.0)
    bind = endpoint.listen
    with contextlib.ExitStack() as stack:
        stack.enter_context(socket.create_server((FIRST, port)))

        def bind_and_release(address: endpoint.Address, number: int) -> socket.socket:
            try:
                return bind(address, number)
            except OSError:
                stack.close()
                raise

        monkeypatch.setattr(endpoint, "listen", bind_and_release)
        assert listen(f"{FIRST}:{port}").candidate_index == 0


def interface_of(address: str) -> str:
    """Return the interface that has an address."""
    entries = psutil.net_if_addrs().items()
    return next(name for name, addresses in entries if any(one.address == address for one in addresses))


@pytest.mark.parametrize(
    "addresses",
    [["OWN"], ["127.0.1.1", "OWN"], ["127.0.1.1"], [], [ELSEWHERE]],  # the third is Debian's
)
def test_interface_is_that_at_which_others_reach_this_node(answers: Answers, addresses: list[str]) -> None:
    """Whatever the machine's own name leads to."""
    own = outer_address()
    answers["node1"] = [[own if text == "OWN" else text for text in addresses]]
    answers["node2"] = [[ELSEWHERE]]
    found = endpoint.find_interface("node1", parse_endpoints("node1,node2"))
    assert found == interface_of(own)  # where the name does not tell, the route to node2 does
    assert endpoint.find_interface(own, parse_endpoints(f"{own},{ELSEWHERE}")) == interface_of(own)


def test_interface_is_unknown_where_all_nodes_are_this_machine(answers: Answers) -> None:
    """As in tests, and where the other candidates have no address yet."""
    assert endpoint.find_interface(FIRST, parse_endpoints(f"{FIRST},{SECOND}")) is None
    answers["node1"] = [["127.0.1.1"]]
    assert endpoint.find_interface("node1", parse_endpoints("node1,node2")) is None
