"""Callbacks by mutual TLS: node and receiver each pin the other's certificate."""

import asyncio
import os
import select
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from redis import Redis

from poc_core.callback_tls import CallbackTls, CertificateError
from poc_core.callbacks import CallbackPolicy
from poc_core.records import Lease, RoundState
from poc_core.settings.callbacks import TlsNames
from poc_core.state.outbox import Delivery, Outbox, Receivers
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.certificates import HOST, make_certificate
from tests.harness.samples import Clock, complete_lease, lease_nonces, round_config, worker_record
from tests.harness.stored import outbox_status
from tests.harness.waiting import wait_until
from tests.peers.receiver import Receiver
from workers.courier.courier import Courier
from workers.courier.poster import NO_CERTIFICATES, End, Poster, Result
from workers.courier.tls_clients import CONNECTIONS

POLICY = CallbackPolicy.of("loopback")


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    certificate: Path
    key: Path

    @property
    def both(self) -> str:
        return self.certificate.read_text() + self.key.read_text()


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("certificates")
    names = ("node", "next-node", "receiver", "next-receiver", "stranger")
    return {name: Pair(*make_certificate(folder, name)) for name in names}


@pytest.fixture
def context(pairs: dict[str, Pair]) -> ssl.SSLContext:
    """The receiver's: its own certificate, and the node's as the only one that it takes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pairs["receiver"].certificate, pairs["receiver"].key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(pairs["node"].certificate)
    return context


@pytest.fixture
def a_worker(workers: WorkerRegistry) -> None:
    workers.heartbeat(worker_record("w1"))


@pytest.fixture
def receiver(context: ssl.SSLContext) -> Iterator[Receiver]:
    with Receiver(tls=context) as receiver:
        yield receiver


@dataclass(frozen=True)
class Files:
    """Those that the node's settings name."""

    client: Path
    trusted: Path

    def put(self, client: str | None = None, trusted: str | None = None) -> None:
        """Another content, in one step."""
        for file, text in ((self.client, client), (self.trusted, trusted)):
            if text is not None:
                new = file.with_suffix(".new")
                new.write_text(text)
                os.replace(new, file)

    def names(self, shows_one: bool = True) -> TlsNames:
        return TlsNames.of(f"other, {HOST}", str(self.client) if shows_one else "", self.trusted)


@pytest.fixture
def files(tmp_path: Path, pairs: dict[str, Pair]) -> Files:
    files = Files(tmp_path / "client.pem", tmp_path / "trusted.pem")
    files.put(pairs["node"].both, pairs["receiver"].certificate.read_text())
    return files


def poster(names: TlsNames) -> Poster:
    client = httpx.AsyncClient(trust_env=False, limits=CONNECTIONS)
    return Poster(client, POLICY, tls=CallbackTls(names))


def post(names: TlsNames, url: str) -> Result:
    """What came of one try. TLS 1.3 tells of a refusal when the request is on its way already."""

    async def one_try() -> Result:
        one = poster(names)
        body = b'{"artifacts": []}'
        result = await one.post(Delivery("id", "token", f"{url}/generated", body, "id-0", 0))
        await one.close()
        return result

    return asyncio.run(one_try())


def test_with_the_right_certificates_a_payload_arrives(files: Files, receiver: Receiver) -> None:
    assert post(files.names(), receiver.url).end is End.TAKEN
    assert len(receiver.payloads) == 1


def test_a_key_may_lie_in_a_file_of_its_own(
    files: Files, receiver: Receiver, pairs: dict[str, Pair]
) -> None:
    both = f"{pairs['node'].certificate},{pairs['node'].key}"
    assert post(TlsNames.of(HOST, both, files.trusted), receiver.url).end is End.TAKEN


@pytest.mark.parametrize("shows", [None, "stranger"], ids=["without", "with a wrong one"])
def test_a_receiver_that_misses_the_nodes_certificate_is_said_to(
    files: Files, receiver: Receiver, pairs: dict[str, Pair], shows: str | None
) -> None:
    if shows:
        files.put(client=pairs[shows].both)
    result = post(files.names(shows_one=shows is not None), receiver.url)
    assert result.end is End.SILENT
    why = "the receiver does not take the node's certificate (POC_CALLBACK_CLIENT_CERT)"
    assert result.said == f"No TLS with {receiver.url}/generated: {why}."
    assert receiver.payloads == []


def test_a_receiver_with_another_certificate_gets_nothing(
    files: Files, receiver: Receiver, pairs: dict[str, Pair]
) -> None:
    files.put(trusted=pairs["stranger"].certificate.read_text())
    result = post(files.names(), receiver.url)
    assert result.end is End.SILENT
    assert "none that POC_CALLBACK_TRUSTED_CERTS trusts for this name" in result.said
    assert receiver.payloads == []


def test_a_receiver_that_is_not_named_is_told_nothing_of_the_certificates(
    files: Files, receiver: Receiver
) -> None:
    names = TlsNames.of("other", str(files.client), files.trusted)
    result = post(names, receiver.url)
    assert result.end is End.SILENT
    assert "certificate" not in result.said


def test_a_host_that_is_named_gets_nothing_in_the_clear(files: Files) -> None:
    with Receiver() as receiver:
        result = post(files.names(), receiver.url)
    assert result[:3] == (
        End.FORBIDDEN,
        *[f"Callbacks to {HOST} go by https alone (POC_CALLBACK_TLS_HOSTS)."] * 2,
    )
    assert receiver.payloads == []


@pytest.mark.parametrize(
    ("content", "which"),
    [
        ({"client": "nonsense"}, "POC_CALLBACK_CLIENT_CERT"),
        ({"trusted": "nonsense"}, "POC_CALLBACK_TRUSTED_CERTS"),
        ({"trusted": ""}, "POC_CALLBACK_TRUSTED_CERTS"),
    ],
)
def test_files_that_cannot_be_used_send_nothing_and_the_log_says_which(
    files: Files, receiver: Receiver, content: dict[str, str], which: str
) -> None:
    files.put(**content)
    result = post(files.names(), receiver.url)
    assert (result.end, result.said) == (End.FORBIDDEN, NO_CERTIFICATES)
    assert which in result.details
    assert receiver.payloads == []


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    tls = CallbackTls(TlsNames.of(HOST, str(tmp_path / "none.pem"), None))
    with pytest.raises(CertificateError, match=r"none\.pem is no certificate with its key"):
        tls.context()


def test_files_are_read_again_when_they_change_and_only_then(
    files: Files, pairs: dict[str, Pair]
) -> None:
    tls = CallbackTls(files.names())
    first = tls.context()
    assert tls.context() is first
    files.put(client=pairs["next-node"].both)
    second = tls.context()
    assert second is not first
    files.put(client="half of a")  # in the middle of being written
    assert tls.context() is second
    files.put(client=pairs["node"].both)
    assert tls.context() not in (first, second)


def test_files_are_read_again_when_their_rights_change(files: Files) -> None:
    """Only a file's time of change shows it: its size and time of writing stay."""
    good = files.client.read_text()
    files.client.write_text("x" * len(good))
    tls = CallbackTls(files.names())
    assert tls.problem() is not None
    before = files.client.stat()
    files.client.write_text(good)
    os.utime(files.client, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert tls.problem() is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("host", "", None), "needs POC_CALLBACK_CLIENT_CERT, POC_CALLBACK_TRUSTED_CERTS or both"),
        (("", "a.pem", None), "POC_CALLBACK_TLS_HOSTS names, and there are none"),
        (("host", "a,b,c", None), "one file, or a certificate and its key"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    given: tuple[str, str, Path | None], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        TlsNames.of(*given)


@pytest.mark.usefixtures("a_worker")
def test_replacing_all_certificates_under_load_loses_nothing(
    files: Files,
    receiver: Receiver,
    context: ssl.SSLContext,
    pairs: dict[str, Pair],
    redis: Redis,
    rounds: RoundStore,
    outbox: Outbox,
    clock: Clock,
) -> None:
    """As an operator does it, each side first trusting what comes; and once as one should not, with
    a certificate that the receiver does not know yet."""
    texts = {name: pair.certificate.read_text() for name, pair in pairs.items()}
    steps: dict[int, Callable[[], None]] = {
        # Too early: refused until the next step.
        10: lambda: files.put(client=pairs["next-node"].both),
        20: lambda: context.load_verify_locations(pairs["next-node"].certificate),
        30: lambda: files.put(trusted=texts["receiver"] + texts["next-receiver"]),
        35: lambda: files.put(client="half of a"),  # while it is written
        40: lambda: context.load_cert_chain(
            pairs["next-receiver"].certificate, pairs["next-receiver"].key
        ),
        45: lambda: files.put(client=pairs["next-node"].both),
        50: lambda: files.put(trusted=texts["next-receiver"]),
    }
    record = rounds.read(rounds.store(round_config(url=receiver.url), RoundState.GENERATING))
    assert record is not None
    courier = Courier(outbox, Receivers(redis, clock), poster(files.names()))
    expected: list[int] = []

    def offer() -> None:
        clock.now += 120
        for due in outbox.announce():
            courier.offer(due)

    def compute() -> None:
        lease = lease_nonces(rounds, record, "w1", 4)
        assert isinstance(lease, Lease)
        expected.extend(lease.nonces)
        complete_lease(rounds, lease, "w1", ["v"] * len(lease.nonces))

    def arrives(n_before: int) -> Callable[[], bool]:
        def one_more() -> bool:
            compute()  # all before may have arrived
            offer()
            return len(receiver.payloads) > n_before

        return one_more

    def all_delivered() -> bool:
        offer()
        return outbox_status(redis, record.round_id).delivered == len(expected)

    with courier.running():
        for number in range(60):
            compute()
            steps.get(number, offer)()
            offer()
            if number in (9, 29, 34, 49):  # so that what comes next finds deliveries at work
                wait_until(arrives(len(receiver.payloads)))
        wait_until(all_delivered)
    assert receiver.nonces() == expected


@contextmanager
def tunnel(port: int) -> Iterator[tuple[str, list[bytes]]]:
    """A proxy that takes CONNECT alone, for whatever name to this port: its url, and what it was
    asked for."""
    asked: list[bytes] = []

    class Tunnel(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            asked.append(self.request.recv(65536).partition(b"\r\n")[0])
            with socket.create_connection((HOST, port)) as onward, suppress(OSError):
                self.request.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
                others = {self.request: onward, onward: self.request}
                while True:
                    for one in select.select(list(others), [], [])[0]:
                        if not (piece := one.recv(65536)):
                            return
                        others[one].sendall(piece)

    with socketserver.ThreadingTCPServer((HOST, 0), Tunnel) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://{HOST}:{server.server_address[1]}", asked
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("why_not", [None, "name", "client"])
def test_through_a_proxy_certificates_are_those_of_the_name(
    tmp_path: Path,
    pairs: dict[str, Pair],
    monkeypatch: pytest.MonkeyPatch,
    why_not: str | None,
) -> None:
    name = "another.example" if why_not == "name" else "aggregator.example"
    certificate, key = make_certificate(tmp_path, "receiver", [f"DNS:{name}"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if why_not == "client":
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(pairs["node"].certificate)
    around: list[object] = []
    monkeypatch.setattr(
        "workers.courier.poster.callback_tls.try_handshake", lambda *told: around.append(told)
    )

    async def one_try(port: int, proxy: str) -> Result:
        one = Poster(
            httpx.AsyncClient(trust_env=False, limits=CONNECTIONS),
            CallbackPolicy.of("public"),
            lookup=lambda _, at: [(0, 0, 0, "", ("8.8.8.8", at))],
            tls=CallbackTls(TlsNames.of("aggregator.example", "", certificate)),
            proxy=proxy,
        )
        url = f"https://aggregator.example:{port}/generated"
        result = await one.post(Delivery("id", "token", url, b'{"artifacts": []}', "id-0", 0))
        await one.close()
        return result

    with Receiver(tls=context) as receiver:
        port = httpx.URL(receiver.url).port
        assert port is not None
        with tunnel(port) as (proxy, asked):
            result = asyncio.run(one_try(port, proxy))
    is_right = why_not is None
    assert (result.end is End.TAKEN, len(receiver.payloads)) == (is_right, is_right), result
    assert set(asked) == {f"CONNECT aggregator.example:{port} HTTP/1.1".encode()}
    assert not around  # the proxy
