"""The head of an engine over several hosts and its followers, on loopback and without vLLM."""

import json
import logging
import os
import queue
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest

from cli.supervise.redis_server import free_port
from poc_core.errors import ProoflineError
from tests.harness.waiting import wait_until
from workers.engines.options import EngineOptions, HostSpan
from workers.vllm.start import host_follower, host_link, launch, lifeline, log_patterns
from workers.vllm.start.host_link import Connection, Head, join_head

HOST = "127.0.0.1"
Joined = tuple[Connection, list[str]]
T = TypeVar("T")


class Group:
    """The hosts of one engine, each a thread here; what each end hears and misses."""

    def __init__(self, n_hosts: int) -> None:
        self.n_hosts, self.port = n_hosts, free_port()
        self.exits: queue.Queue[int] = queue.Queue()
        self.heads: list[Head] = []
        self.open: list[Connection] = []

    def options(self, rank: int, **changes: Any) -> EngineOptions:
        span = HostSpan(n_hosts=self.n_hosts, rank=rank, head_host=HOST, head_port=self.port)
        return EngineOptions(**{"model": "m", "tensor_parallel": 6, "span": span} | changes)

    def head(self, **changes: Any) -> Future[Head]:
        def make() -> Head:
            self.heads.append(Head(self.options(0, **changes)))
            return self.heads[-1]

        return in_thread(make)

    def follower(self, rank: int, **changes: Any) -> Future[Joined]:
        def join() -> Joined:
            joined = join_head(self.options(rank, **changes))
            self.open.append(joined[0])
            return joined

        return in_thread(join)

    def stranger(self, said: bytes) -> bytes:
        """What is answered to whoever says this, up to the end of the connection."""
        wait_until(lambda: listens(self.port), "the head", 60)
        with socket.create_connection((HOST, self.port), 10) as sock:
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: sock.recv(4096), b""))

    def end(self) -> None:
        for head in self.heads:
            head.close()
        for connection in self.open:
            connection.close()
        # Who misses an end ends its process, which no test may once `os._exit` is itself again.
        for thread in threading.enumerate():
            if thread.name == "host-link":
                thread.join(60)


def in_thread(work: Callable[[], T]) -> Future[T]:
    """What the work gives, in a thread that holds up no end: a head that nobody joins waits for
    ever, as after a test that failed.
    """
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Groups of so many hosts. The environment stays as it was, and no process ends."""
    groups: list[Group] = []

    def make(n_hosts: int = 2) -> Group:
        made = Group(n_hosts)
        groups.append(made)
        monkeypatch.setattr(os, "_exit", made.exits.put)
        return made

    for name in ("VLLM_HOST_IP", "TORCHELASTIC_USE_AGENT_STORE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name in ("NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "ib0")
    monkeypatch.setattr(host_link, "_store", lambda address: (None, 4321))
    monkeypatch.setattr(host_link, "BEAT_S", 0.05)
    monkeypatch.setattr(host_link, "_RETRY_S", 0.02)
    yield make
    for made in groups:
        made.end()


def test_each_host_gets_its_part_of_the_engine(group: Any) -> None:
    hosts = group(3)
    followers = [hosts.follower(rank) for rank in (1, 2)]  # which wait for their head
    head = hosts.head().result(60)
    words = [head.words, *(follower.result(60)[1] for follower in followers)]
    assert words == [
        [
            *("--distributed-executor-backend", "mp", "--nnodes", "3", "--node-rank", str(rank)),
            *("--master-addr", HOST, "--master-port", "4321"),
        ]
        for rank in range(3)
    ]
    assert os.environ["VLLM_HOST_IP"] == HOST
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"  # an operator's choice stands
    assert not listens(hosts.port)


def test_a_follower_hears_that_the_engine_serves_and_that_the_head_is_gone(group: Any) -> None:
    hosts = group()
    following, heading = hosts.follower(1), hosts.head()
    connection, head = following.result(60)[0], heading.result(60)
    heard: queue.Queue[Any] = queue.Queue()
    connection.keep(heard.put, heard.put)
    head.serves()
    assert heard.get(timeout=60) == {"serves": True}
    head.close()
    assert heard.get(timeout=60) == "it closed the connection"


def test_a_head_ends_with_a_follower(group: Any) -> None:
    hosts = group()
    following, heading = hosts.follower(1), hosts.head()
    heading.result(60)
    following.result(60)[0].close()
    assert hosts.exits.get(timeout=60) == host_link.HOST_LOST_STATUS


def test_a_head_that_closes_misses_nobody(group: Any) -> None:
    hosts = group()
    following, heading = hosts.follower(1), hosts.head()
    heading.result(60).close()
    following.result(60)[0].close()
    wait_until(lambda: not threads("host-link"), "the end of all connections", 60)
    assert hosts.exits.empty()


def test_an_end_that_is_silent_is_lost(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_link, "SILENT_S", 0.3)
    monkeypatch.setattr(Connection, "beat", lambda self: None)
    ours, theirs = socket.socketpair()
    lost: queue.Queue[str] = queue.Queue()
    with ours, theirs:
        Connection(ours).keep(lambda message: None, lost.put)
        assert lost.get(timeout=60) == "no sign of life for 0.3 s"


def test_a_follower_that_leaves_drains_the_head(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: queue.Queue[Any] = queue.Queue()
    monkeypatch.setattr(os, "kill", lambda *said: signals.put(said))
    hosts = group()
    following, heading = hosts.follower(1), hosts.head()
    heading.result(60)
    following.result(60)[0].send(leaves=True)
    assert signals.get(timeout=60) == (os.getpid(), signal.SIGTERM)


def test_a_follower_that_goes_before_all_are_there_is_waited_for_again(group: Any) -> None:
    hosts = group(3)
    heading = hosts.head()
    said = host_link.plan_of(hosts.options(1))
    wait_until(lambda: listens(hosts.port), "the head", 60)
    first = Connection(socket.create_connection((HOST, hosts.port)))
    first.send(rank=1, plan=said)
    assert first.receive() == {}
    first.close()
    wait_until(lambda: not threads("host-link"), "the end of the first", 60)
    assert not heading.done()
    followers = [hosts.follower(rank) for rank in (1, 2)]
    assert {follower.result(60)[1][5] for follower in followers} == {"1", "2"}
    heading.result(60)
    assert hosts.exits.empty()


def test_a_follower_whose_connection_was_reset_before_the_head_looked_is_waited_for_again(
    group: Any,
) -> None:
    hosts = group()
    heading = hosts.head()
    hello = json.dumps({"rank": 1, "plan": host_link.plan_of(hosts.options(1))}).encode() + b"\n"
    wait_until(lambda: listens(hosts.port), "the head")
    at = (HOST, hosts.port)
    # The head listens to the first connection until that ends.
    with socket.create_connection(at), socket.create_connection(at) as lost:
        lost.sendall(hello)
        lost.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    hosts.follower(1).result(60)
    assert heading.result(60)


@pytest.mark.parametrize(
    ("said", "answered"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b""),
        (b"[]\n", b""),
        (b'{"rank": "1", "plan": {}}\n', b""),
        (b'{"rank": 1}\n', b""),
        (b'{"rank": 0, "plan": {}}\n', b"the ranks of followers are 1 to 1, not 0"),
        (b'{"rank": 2, "plan": {}}\n', b"the ranks of followers are 1 to 1, not 2"),
        (b"x" * 100_000, b""),
        (b"[" * 50_000 + b"\n", b""),
    ],
    ids=[
        *("http", "a list", "a rank in letters", "no plan", "the head's rank", "rank 2", "no end"),
        "too deep",
    ],
)
def test_a_stranger_neither_joins_nor_disturbs(group: Any, said: bytes, answered: bytes) -> None:
    hosts = group()
    heading = hosts.head()
    try:
        answer = hosts.stranger(said)
    except OSError:  # the head closed the connection before everything was sent
        answer = b""
    assert answered in answer
    assert answered or not answer
    hosts.follower(1).result(60)
    assert heading.result(60)


def test_a_host_with_other_options_says_so_and_waits_for_a_head_that_has_them(
    group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = group()
    heading, other = hosts.head(), hosts.follower(1, dtype="bfloat16")
    wait_until(lambda: "dtype is 'auto' on the head and 'bfloat16' here" in caplog.text, "why", 60)
    hosts.follower(1).result(60)
    heading.result(60).close()
    assert not other.done()
    hosts.head(dtype="bfloat16").result(60)
    other.result(60)
    assert caplog.text.count("'bfloat16' here") == 1


def test_where_the_model_lies_is_each_hosts_own_matter(group: Any) -> None:
    ours = host_link.plan_of(group().options(0, model="/a/m", served_model_name="m"))
    theirs = host_link.plan_of(group().options(1, model="/b/m", served_model_name="m"))
    assert host_link.differences(ours, theirs) is None


@pytest.mark.parametrize(
    ("switch", "usual", "same", "other"),
    [
        ("PROOFLINE_FUSED", "on", "on", "off"),
        ("PROOFLINE_GRAPHS", None, "", "off"),
        ("POC_EXPERTS", "same", "same", "exact"),
    ],
)
def test_hosts_agree_on_what_their_ranks_do_together(
    switch: str,
    usual: str | None,
    same: str,
    other: str,
    group: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that share the router, or record a step, wait for each other."""
    monkeypatch.delenv(switch, raising=False)
    ours = host_link.plan_of(group().options(0, model="m"))
    monkeypatch.setenv(switch, same)
    assert host_link.plan_of(group().options(0, model="m")) == ours
    monkeypatch.setenv(switch, other)
    theirs = host_link.plan_of(group().options(1, model="m"))
    said = f"{switch} is {usual!r} on the head and {other!r} here"
    assert host_link.differences(ours, theirs) == said


def test_a_head_that_cannot_listen_says_what_head_is(group: Any) -> None:
    hosts = group()
    with (
        socket.create_server((HOST, hosts.port)),
        pytest.raises(
            ProoflineError,
            match=r"cannot listen on 127\.0\.0\.1, port \d+ .*--head names an address",
        ),
    ):
        Head(hosts.options(0))


def follow(group: Group, monkeypatch: pytest.MonkeyPatch, part: Callable[[], object]) -> None:
    """Runs a follower's process here; `part` is what its part of the engine does, and ends then."""
    monkeypatch.setattr(launch, "follow", lambda options, words: part())
    monkeypatch.setattr(host_follower, "log_to_stderr", lambda: None)
    monkeypatch.setenv(lifeline.VARIABLE, "1")
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(ProoflineError, match="A rank of this host's part of the engine ended"):
            host_follower.run_follower(group.options(1))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_followers_process_ends_with_its_head(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = group()
    heading = hosts.head()

    def part() -> None:
        heading.result(60).close()
        assert hosts.exits.get(timeout=60) == host_link.HOST_LOST_STATUS

    follow(hosts, monkeypatch, part)


def test_a_followers_process_that_is_told_to_stop_lets_the_head_finish(
    group: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = group()
    heading = hosts.head()
    heard: queue.Queue[Any] = queue.Queue()
    monkeypatch.setattr(Head, "_hear", lambda head, rank, message: heard.put(message))
    caplog.set_level(logging.INFO)

    def part() -> None:
        heading.result(60).serves()
        wait_until(lambda: log_patterns.READY.search(caplog.text.rstrip()), "its ready line", 60)
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.get(timeout=60) == {"leaves": True}
        assert hosts.exits.empty()
        heading.result(60).close()
        assert hosts.exits.get(timeout=60) == 0

    follow(hosts, monkeypatch, part)


def test_a_followers_process_that_only_starts_stops_at_once(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = group()
    hosts.head()

    def part() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert hosts.exits.get(timeout=60) == 0

    follow(hosts, monkeypatch, part)


def test_the_name_of_a_new_pod_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [socket.gaierror("not yet"), [(socket.AF_INET, 1, 6, "", (HOST, 0))]]

    def ask(*_said: Any, **_more: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    monkeypatch.setattr(host_link, "_RETRY_S", 0.01)
    with host_link.listen_at("worker-pair-0.worker-pair", 0) as listener:
        assert listener.getsockname()[0] == HOST
    answers += [socket.gaierror("unknown")]
    monkeypatch.setattr(host_link, "_KNOWN_S", -1.0)
    with pytest.raises(ProoflineError, match=r"cannot listen on nowhere, port 7070 \(unknown\)"):
        host_link.listen_at("nowhere", 7070)


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]
