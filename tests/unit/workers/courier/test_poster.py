"""One try to deliver, against receivers that do as bad receivers do."""

import asyncio
import base64
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import httpx
import pytest

from poc_core.callbacks import CallbackPolicy
from poc_core.state.outbox import Delivery
from workers.courier.poster import UNREACHABLE, End, Poster, Result

SOON_S = 0.5  # of a try that is to be over at its deadline
ALL = "public,private,loopback"
TAKEN = b"HTTP/1.1 200 OK\r\n\r\n"

Behaviour = Callable[[socket.socket], object]
PROMISE = pytest.mark.promise(
    "a receiver",
    "cannot occupy the courier with an endless answer, or send the courier to an unchecked address",
)


@contextmanager
def receiver(behave: Behaviour) -> Iterator[int]:
    """The port of one that does this with each connection, in a thread."""

    def run(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            behave(connection)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=run, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def post(
    url: str,
    body: bytes = b"{}",
    allow: str = ALL,
    addresses: tuple[str, ...] = ("127.0.0.1",),
    lookups: list[str] | None = None,
    transport: httpx.MockTransport | None = None,
    **more: Any,
) -> Result:
    """The result of a try. Every name has these addresses. `more`: arguments for the poster."""

    def look_up(name: str, port: int) -> list[tuple[object, ...]]:
        if lookups is not None:
            lookups.append(name)
        return [(0, 0, 0, "", (address, port)) for address in addresses]

    async def one_try() -> Result:
        client = httpx.AsyncClient(trust_env=False, transport=transport)
        given: dict[str, Any] = {"lookup": look_up, "deadline_s": 60.0} | more
        poster = Poster(client, CallbackPolicy.of(allow), **given)
        result = await poster.post(Delivery("id", "token", url, body, "id-0", 0))
        await poster.close()
        return result

    return asyncio.run(one_try())


def read_request(connection: socket.socket) -> bytes:
    """A small request, whole."""
    received = b""
    while b"\r\n\r\n{}" not in received:
        piece = connection.recv(65536)
        if not piece:
            break
        received += piece
    return received


def answers(text: bytes, requests: list[bytes] | None = None) -> Behaviour:
    """Adds what it was asked to `requests`."""

    def behave(connection: socket.socket) -> None:
        request = read_request(connection)
        if requests is not None:
            requests.append(request)
        connection.sendall(text)

    return behave


def drips(connection: socket.socket) -> None:
    """A byte of its headers now and then: no single read takes long."""
    for byte in b"HTTP/1.1 200 OK\r\nX: " + b"x" * 10_000:
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def is_silent(connection: socket.socket) -> None:
    while connection.recv(65536):  # until the courier hangs up
        pass


def says_nothing_but_continue(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        time.sleep(0.05)


@pytest.mark.parametrize("behave", [drips, is_silent, says_nothing_but_continue])
def test_a_try_is_over_at_its_deadline_whatever_the_receiver_drips(behave: Behaviour) -> None:
    with receiver(behave) as port:
        result = post(f"http://127.0.0.1:{port}/generated", deadline_s=SOON_S)
    assert (result.end, result.said) == (End.SILENT, UNREACHABLE)


@PROMISE
@pytest.mark.parametrize("length", [b"Content-Length: 10000000000", b"X: no length"])
def test_of_an_answer_without_end_nothing_but_its_status_is_read(length: bytes) -> None:
    n_sent: list[int] = []
    over = threading.Event()

    def floods(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n\r\n")
        try:
            while True:
                n_sent.append(connection.send(bytes(1 << 16)))
        finally:
            over.set()

    with receiver(floods) as port:
        result = post(f"http://127.0.0.1:{port}/generated")
        assert over.wait(60)  # the connection was closed
    assert result.end is End.TAKEN
    assert sum(n_sent) < 64 << 20  # of kernels' buffers, not of the courier's memory


def test_a_name_that_nobody_answers_for_has_the_same_deadline() -> None:
    over = threading.Event()

    def look_up(name: str, port: int) -> list[tuple[object, ...]]:
        over.wait(60)
        return []

    async def one_try() -> Result:
        poster = Poster(httpx.AsyncClient(), CallbackPolicy.of(ALL), lookup=look_up, deadline_s=0.1)
        return await poster.post(Delivery("id", "token", "http://name/", b"{}", "id-0", 0))

    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(one_try()).end is End.SILENT
    over.set()
    loop.close()


@pytest.mark.parametrize(
    "behave",
    [
        *(None, lambda connection: None, answers(b"-ERR unknown command\r\n")),
        *(answers(b"SSH-2.0-OpenSSH_9.6\r\n"), is_silent),
    ],
    ids=["a closed port", "hangs up", "a Redis", "an ssh server", "silence"],
)
def test_what_anybody_may_read_does_not_tell_which_ports_are_open(behave: Behaviour | None) -> None:
    with receiver(behave) if behave else nullcontext(1) as port:
        result = post(f"http://127.0.0.1:{port}", deadline_s=SOON_S)
    assert result.said == UNREACHABLE
    assert result.details not in ("", UNREACHABLE)


@pytest.mark.parametrize("status", [300, 301, 302, 307, 308])
def test_a_redirect_is_not_followed_and_not_a_delivery(status: int) -> None:
    followed: list[bytes] = []
    with receiver(answers(TAKEN, followed)) as elsewhere:
        moved = b"HTTP/1.1 %d X\r\nLocation: http://127.0.0.1:%d/\r\n\r\n" % (status, elsewhere)
        with receiver(answers(moved)) as port:
            result = post(f"http://127.0.0.1:{port}/generated")
    assert result.end is End.REFUSED
    assert result.said.endswith(f"/generated answered {status}")
    assert followed == []


@pytest.mark.parametrize(
    ("status", "end"),
    [(200, "TAKEN"), (204, "TAKEN"), (410, "GONE"), (413, "TOO_LARGE"), (500, "REFUSED")],
)
def test_the_status_says_what_came_of_it(status: int, end: str) -> None:
    with receiver(answers(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % status)) as port:
        assert post(f"http://127.0.0.1:{port}").end is End[end]


def test_a_receiver_whose_line_is_too_slow_for_all_of_it_finds_it_too_large() -> None:
    over = threading.Event()
    with receiver(lambda _: over.wait(60)) as port:
        result = post(f"http://127.0.0.1:{port}", b"x" * 50_000_000, deadline_s=4 * SOON_S)
    assert result.end is End.TOO_LARGE
    over.set()


@PROMISE
def test_the_name_is_looked_up_once_and_its_address_connected_to_under_its_own_name() -> None:
    requests: list[bytes] = []
    lookups: list[str] = []
    with receiver(answers(TAKEN, requests)) as port:
        result = post(f"http://aggregator.example:{port}/a%252Fb/generated", lookups=lookups)
    assert (result.end, lookups) == (End.TAKEN, ["aggregator.example"])
    (request,) = requests
    assert request.startswith(b"POST /a%252Fb/generated HTTP/1.1\r\n")
    assert b"\r\nHost: aggregator.example:%d\r\n" % port in request
    assert b"\r\nContent-Length: 2\r\n" in request
    assert b"chunked" not in request


def test_the_courier_alone_uses_the_user_and_password_of_a_url() -> None:
    requests: list[bytes] = []
    with receiver(answers(b"HTTP/1.1 401 X\r\n\r\n", requests)) as port:
        result = post(f"http://user:s%40cret@127.0.0.1:{port}/generated")
    assert b"\r\nAuthorization: Basic " + base64.b64encode(b"user:s@cret") + b"\r\n" in requests[0]
    assert "cret" not in result.said + result.details


def test_a_secret_is_not_in_the_error_of_a_url_that_cannot_be_used() -> None:
    result = post("http://user:secret@ho st/")
    assert (result.end, "secret" in result.details) == (End.SILENT, False)


@pytest.mark.parametrize(
    ("url", "allow", "addresses"),
    [
        ("http://rebound.example:9", ALL, ("169.254.169.254",)),
        ("http://rebound.example:9", "public", ("10.0.0.1", "127.0.0.1")),
        ("http://0x7f.1:9", "public,private", ()),
        ("http://nobody.example", ALL, ()),
    ],
)
def test_nothing_is_sent_to_an_address_that_is_not_allowed(
    url: str, allow: str, addresses: tuple[str, ...]
) -> None:
    result = post(url, allow=allow, addresses=addresses)
    assert result.end is End.FORBIDDEN
    assert "POC_CALLBACK_ALLOW" in result.said


def test_nothing_is_sent_to_the_nodes_own_ports_whatever_the_name() -> None:
    asked: list[bytes] = []
    with receiver(lambda connection: asked.append(read_request(connection))) as port:
        result = post(f"http://harmless.example:{port}", node_ports=lambda: frozenset({port}))
    assert (result.end, asked) == (End.FORBIDDEN, [])


# Not 127.0.0.2, from which clients of other tests connect: it may have the port.
DEAD = tuple(f"127.80.0.{n}" for n in range(2, 6))
REFUSING = "127.80.0.6"


@contextmanager
def dead(port: int) -> Iterator[None]:
    """At the port of these addresses connections hang: nobody takes them from a full queue."""
    with ExitStack() as open_sockets:
        for address in DEAD:
            server = open_sockets.enter_context(socket.create_server((address, port), backlog=0))
            for _ in range(3):
                client = open_sockets.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(server.getsockname())
        yield


def test_dead_addresses_before_a_good_one_cost_less_than_a_try() -> None:
    """Which takes 10 s: by turns of 3 s each, the good one was never tried."""
    requests: list[bytes] = []

    def late(connection: socket.socket) -> None:
        time.sleep(0.3)
        answers(TAKEN, requests)(connection)

    further = "127.80.0.7"
    addresses = ("::1", "169.254.1.1", *DEAD, "127.0.0.1", further)
    with receiver(late) as port, dead(port), socket.create_server((further, port)) as last:
        result = post(f"http://many.example:{port}", addresses=addresses, deadline_s=10)
        assert (result.end, len(requests)) == (End.TAKEN, 1)
        last.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody has connected
            last.accept()


def test_an_address_that_is_not_allowed_is_never_connected_to() -> None:
    with receiver(answers(TAKEN)) as port, dead(port):
        result = post(
            f"http://many.example:{port}",
            allow=",".join((*DEAD[:2], REFUSING)),
            addresses=("127.0.0.1", *DEAD, REFUSING),
            deadline_s=SOON_S,
        )
    assert result.end is End.SILENT


def test_the_address_that_worked_is_tried_first() -> None:
    tried: list[str] = []

    def take(request: httpx.Request) -> httpx.Response:
        tried.append(request.url.host)
        if request.url.host == "10.0.0.1":
            raise httpx.ConnectError("nobody")
        return httpx.Response(200)

    async def tries() -> None:
        client = httpx.AsyncClient(transport=httpx.MockTransport(take))
        poster = Poster(
            client,
            CallbackPolicy.of(ALL),
            lookup=lambda _, port: [(0, 0, 0, "", (f"10.0.0.{n}", port)) for n in (1, 2)],
        )
        for url in ("http://a.example/", "http://A.example./x", "http://b.example/"):
            await poster.post(Delivery("id", "token", url, b"{}", "id-0", 0))

    asyncio.run(tries())
    assert tried == ["10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *((b"120", 120), (b"0", 0), (b"Wed, 21 Oct 2015 07:28:00 GMT", "at once")),
        *((text, None) for text in (b"soon", b"9" * 400, b"-", b"")),
    ],
)
def test_when_a_receiver_wants_to_be_asked_again(text: bytes, seconds: object) -> None:
    with receiver(answers(b"HTTP/1.1 503 X\r\nRetry-After: " + text + b"\r\n\r\n")) as port:
        result = post(f"http://127.0.0.1:{port}")
    assert result.end is End.REFUSED
    after_s = result.retry_after_s
    assert ("at once" if after_s is not None and after_s < 0 else after_s) == seconds


@pytest.mark.parametrize("url", ["http://bücher.example:%d/", "http://xn--bcher-kva.EXAMPLE.:%d/"])
def test_a_name_goes_out_as_it_is_in_dns(url: str) -> None:
    requests: list[bytes] = []
    with receiver(answers(TAKEN, requests)) as port:
        result = post(url % port, allow="bücher.example")
    assert result.end is End.TAKEN
    assert b"\r\nHost: xn--bcher-kva.example:%d\r\n" % port in requests[0]


@pytest.mark.parametrize(
    ("addresses", "is_proxied"),
    [(("8.8.8.8",), True), (("2001:4860:4860::8888", "8.8.8.8"), True), (("127.0.0.1",), False)],
)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_public_addresses_are_reached_through_the_proxy(
    addresses: tuple[str, ...], is_proxied: bool, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[bytes] = []

    def take(connection: socket.socket) -> None:
        requests.append(connection.recv(65536))
        connection.sendall(b"HTTP/1.1 502 X\r\nContent-Length: 0\r\n\r\n")

    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")

    with receiver(take) as port:
        url, proxy = f"{scheme}://aggregator.example:{port}/x", f"http://user:word@127.0.0.1:{port}"
        result = post(url, addresses=addresses, proxy=proxy)
    assert result.end is not End.TAKEN
    # Certificates behind a proxy are checked by the url's name.
    by_tunnel = f"CONNECT aggregator.example:{port} "
    to = by_tunnel if scheme == "https" else f"POST http://8.8.8.8:{port}/x "
    assert requests[0].startswith(to.encode()) == is_proxied
    assert (b"Proxy-Authorization: Basic" in requests[0]) == is_proxied
    assert "word" not in result.said + result.details


@pytest.mark.parametrize(
    ("url", "name"),
    [("https://aggregator.example/x", "aggregator.example"), ("https://127.0.0.1/x", None)],
)
def test_a_certificate_is_that_of_the_name_and_not_of_its_address(
    url: str, name: str | None
) -> None:
    requests: list[httpx.Request] = []

    def take(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200)

    assert post(url, transport=httpx.MockTransport(take)).end is End.TAKEN
    assert requests[0].url.host == "127.0.0.1"
    assert requests[0].extensions.get("sni_hostname") == name
