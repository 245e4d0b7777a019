"""What a stranger gets who knocks, without key or password, at every port that processes listen
on.
"""

import re
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
from flower.urls import handlers as flower_handlers
from tornado.web import URLSpec

from api.app import create_app
from api.console import page
from api.edge.doorkeeper import OF_HOSTS
from poc_core.settings import Settings

# Seconds until a port that says nothing is believed to say nothing. One that closes is not waited
# for.
SILENCE_S = 5.0
_AT_A_TIME = 16
_OTHER_METHODS = ("HEAD", "PUT", "PATCH", "DELETE", "OPTIONS")

# Of vLLM's server, with all that it can be started with. Whatever it is asked, a chat port refuses
# before it looks.
VLLM_PATHS = (
    *(
        "/health",
        "/metrics",
        "/load",
        "/ping",
        "/version",
        "/server_info",
        "/docs",
        "/openapi.json",
        "/tokenize",
    ),
    *(
        "/detokenize",
        "/collective_rpc",
        "/scale_elastic_ep",
        "/is_scaling_elastic_ep",
        "/pause",
        "/resume",
        "/sleep",
    ),
    *(
        "/is_paused",
        "/wake_up",
        "/is_sleeping",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/abort_requests",
    ),
    *(
        "/init_weight_transfer_engine",
        "/update_weights",
        "/get_world_size",
        "/inference/v1/generate",
        "/invocations",
    ),
    *(
        "/v1/models",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
    ),
    *(
        "/v1/score",
        "/v1/rerank",
        "/v1/audio/transcriptions",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    ),
)
# Of Flower's beside its handlers.
_STATIC = ("/static/css/flower.css", "/favicon.ico", "/robots.txt")
# What is answered to everybody, by design: that a server runs, and the console's page, a file of
# the release that asks for a key before it shows anything of the node.
OPEN = {
    "/livez": b'{"status":"ok"}',
    "/api/v1/clock": b"",
    "/v3.0.16/api/v1/clock": b"",
    "/healthcheck": b"OK",
    "/console": page.load()[page.INDEX].content,
    "/console/": b"",  # leads to the page
}
# To what is no HTTP at all, before anybody could be asked for a key: by uvicorn's two parsers, and
# Tornado's.
_NO_HTTP = (b"HTTP/1.1 400 Bad Request", b"HTTP/1.1 400 \r\n")
_NOT_HTTP = (
    b"PING\r\n",
    b"*1\r\n$4\r\nINFO\r\n",
    b"*2\r\n$5\r\nHELLO\r\n$1\r\n3\r\n",
    b"\x00" * 64,
)
# Redis answers nothing but errors before a password: that there is none, or that these words are no
# command of its.
_REDIS = b"-"


def routes() -> list[tuple[str, str]]:
    """(method, path) of all that the API, a worker's vLLM and Flower answer, and of some that
    nobody does.
    """
    app = create_app(Settings(require_keys="always"))
    own = [path for route in app.routes if isinstance(path := getattr(route, "path", None), str)]
    flowers = [
        re.sub(r"\(.*\)", "x", one.regex.pattern.rstrip("$?"))
        for one in map(_rule, flower_handlers)
    ]
    paths = dict.fromkeys(
        path for path in [*own, *VLLM_PATHS, *flowers, *_STATIC, "/no/such"] if path.startswith("/")
    )
    versioned = [f"/v3.0.16{path}" for path in own if path.startswith(("/api", "/v1", "/health"))]
    every = ("/", "/metrics", "/v1/models", "/static/x", "/no/such", *OPEN)
    asked = [(method, path) for path in [*paths, *versioned] for method in ("GET", "POST")]
    asked += [(method, path) for method in _OTHER_METHODS for path in every]
    asked += [("DELETE", path) for path in own]
    return list(dict.fromkeys(asked))


def _rule(handler: Any) -> URLSpec:
    return handler if isinstance(handler, URLSpec) else URLSpec(*handler)


@dataclass(frozen=True)
class Door:
    """A TCP port that a process listens on."""

    command: str  # the process's
    host: str
    port: int


@dataclass(frozen=True)
class Heard:
    door: Door
    knock: bytes
    answer: bytes

    @property
    def is_http(self) -> bool:
        return self.answer.startswith(b"HTTP/")

    @property
    def status(self) -> int:
        """Of an answer by HTTP."""
        return int(self.answer.split(b" ", 2)[1])

    @property
    def body(self) -> bytes:
        return self.answer.partition(b"\r\n\r\n")[2]

    @property
    def is_refusal(self) -> bool:
        """401, 403, a connection that is closed or silent, an error of Redis; or what everybody
        may know.
        """
        if not self.is_http:
            return not self.answer or self.answer.startswith(_REDIS)
        if self.knock in _NOT_HTTP:
            return self.answer.startswith(_NO_HTTP)
        method, path, _ = self.knock.decode().split(" ", 2)
        if path in OPEN and self.status in (200, 307):
            return self.body == (b"" if method == "HEAD" else OPEN[path])
        if path in OPEN and self.status in (204, 405):  # by another method
            return True
        if path.removeprefix("/v3.0.16") in OF_HOSTS and self.status == 405:  # theirs wants a token
            return True
        # Which files the page has is no secret either.
        return self.status in (401, 403) or (
            path.startswith("/console/") and self.status in (404, 405)
        )


def doors_of(processes: Iterable[psutil.Process]) -> list[Door]:
    """Every TCP port that the processes listen on."""
    found: dict[tuple[str, int], Door] = {}
    for process in processes:
        try:
            listening = [
                one.laddr
                for one in process.net_connections("tcp")
                if one.status == psutil.CONN_LISTEN
            ]
            command = " ".join(process.cmdline())[-80:]
        except psutil.NoSuchProcess:
            continue
        for host, port in listening:
            here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            found.setdefault((here, port), Door(command, here, port))
    return list(found.values())


def knock_at(doors: Iterable[Door]) -> list[Heard]:
    """All routes at every door that speaks HTTP, and at all of them what is none."""
    asked = [request(method, path) for method, path in routes()] + [
        upgrade("/"),
        upgrade("/v1/realtime"),
    ]
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        doors = list(doors)
        at_once = [(door, knock) for door in doors for knock in (request("GET", "/"), *_NOT_HTTP)]
        heard = list(pool.map(lambda one: knock_once(*one), at_once))
        speak_http = dict.fromkeys(one.door for one in heard if one.is_http)
        return heard + list(
            pool.map(
                lambda one: knock_once(*one),
                [(door, knock) for door in speak_http for knock in asked],
            )
        )


def request(method: str, path: str, *headers: str) -> bytes:
    path = re.sub(r"\{[^}]*\}", "x", path)
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", *headers]
    return "\r\n".join([*lines, "Content-Length: 0", "", ""]).encode()


def upgrade(path: str) -> bytes:
    """A WebSocket, of which vLLM has some."""
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    lines = [
        f"GET {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Connection: Upgrade",
        "Upgrade: websocket",
        key,
    ]
    return "\r\n".join([*lines, "Sec-WebSocket-Version: 13", "", ""]).encode()


def knock_once(door: Door, knock: bytes) -> Heard:
    """What is answered, to its end; nothing where the connection is closed without a word, or
    nothing is said.
    """
    answer = b""
    try:
        with socket.create_connection((door.host, door.port), SILENCE_S) as connection:
            connection.sendall(knock)
            while part := connection.recv(65536):
                answer += part
                if not answer.startswith(b"HTTP/"):
                    break
    except OSError:
        pass
    return Heard(door, knock, answer)
