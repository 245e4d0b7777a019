"""Compressed bodies are read as they were before; what cannot be is refused with its reason."""

import ctypes
import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterator
from unittest.mock import AsyncMock

import pytest
from fastapi.testclient import TestClient
from starlette.types import Receive, Scope, Send

from api.app import create_app
from api.edge.encodings import Decoded, decoders
from poc_core.settings import Settings
from tests.harness.samples import body

GENERATE = "/api/v1/pow/generate"
CHAT = "/v1/chat/completions"
LIMIT = 1_000_000
# Nobody serves a model, which is said of a body that was read.
READ = 503


def zstd(data: bytes) -> bytes:
    library = ctypes.CDLL("libzstd.so.1")
    library.ZSTD_compress.restype = ctypes.c_size_t
    room = ctypes.create_string_buffer(len(data) + 1000)
    size = library.ZSTD_compress(
        room, ctypes.c_size_t(len(room)), data, ctypes.c_size_t(len(data)), 3
    )
    return room.raw[:size]


ENCODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstd,
}
pytestmark = pytest.mark.skipif("zstd" not in decoders(), reason="this system has no libzstd")


@pytest.fixture
def api(client: TestClient) -> Iterator[TestClient]:
    services = client.app.state.services  # type: ignore[attr-defined]
    with TestClient(create_app(Settings(max_body_bytes=LIMIT), services)) as api:
        yield api


def headers(encoding: str) -> dict[str, str]:
    return {"Content-Type": "application/json", "Content-Encoding": encoding}


@pytest.mark.parametrize("encoding", ENCODINGS)
class TestEach:
    def test_is_read_on_every_path(self, api: TestClient, encoding: str) -> None:
        plain = json.dumps(body()).encode()
        sent = ENCODINGS[encoding](plain)
        assert api.post(GENERATE, content=sent, headers=headers(encoding)).status_code == READ
        parts = (sent[at : at + 7] for at in range(0, len(sent), 7))
        assert (
            api.post(GENERATE, content=parts, headers=headers(encoding.upper())).status_code == READ
        )
        chat = ENCODINGS[encoding](b'{"model": "x"}')
        assert api.post(CHAT, content=chat, headers=headers(encoding)).status_code == READ

    def test_of_much_that_hardly_shrinks_is_whole(self, api: TestClient, encoding: str) -> None:
        chat = json.dumps({"model": random.Random(0).randbytes(100_000).hex()}).encode()
        answer = api.post(CHAT, content=ENCODINGS[encoding](chat), headers=headers(encoding))
        assert answer.status_code == READ

    def test_of_several_members_is_one_body(self, api: TestClient, encoding: str) -> None:
        if encoding == "deflate":
            return
        plain = json.dumps(body()).encode()
        sent = b"".join(map(ENCODINGS[encoding], (plain[:9], plain[9:])))
        assert api.post(GENERATE, content=sent, headers=headers(encoding)).status_code == READ

    def test_that_holds_more_than_a_body_may_is_413(self, api: TestClient, encoding: str) -> None:
        bomb = ENCODINGS[encoding](bytes(20 * LIMIT))
        assert len(bomb) < LIMIT
        answer = api.post(CHAT, content=bomb, headers=headers(encoding))
        assert answer.status_code == 413
        assert "POC_MAX_BODY_BYTES" in answer.json()["error"]["message"]

    def test_that_is_none_says_so(self, api: TestClient, encoding: str) -> None:
        others = [encode(b"{}") for name, encode in ENCODINGS.items() if name != encoding]
        for content in (b"{}" * 20, *others):
            answer = api.post(CHAT, content=content, headers=headers(encoding))
            assert answer.status_code == 400
            assert f"is no {encoding}: " in answer.json()["error"]["message"]

    def test_that_is_cut_short_says_so(self, api: TestClient, encoding: str) -> None:
        sent = ENCODINGS[encoding](b'{"model": "x"}' + bytes(1000))
        for content in (sent[:-3], iter([sent[:9], sent[9:-3]])):
            answer = api.post(CHAT, content=content, headers=headers(encoding))
            assert answer.status_code == 400
            assert "is truncated" in answer.json()["error"]["message"]


async def test_the_application_gets_all_other_headers() -> None:
    others = [(b"accept", b"*/*"), (b"content-type", b"application/json"), (b"x-name", b"7")]
    seen: list[Scope] = []

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        seen.append(scope)

    sent = [*others, (b"content-encoding", b"gzip")]
    await Decoded(app, LIMIT)({"type": "http", "headers": sent}, AsyncMock(), AsyncMock())
    assert seen == [{"type": "http", "headers": others}]


def test_what_decodes_to_nothing_has_the_limit_too(api: TestClient) -> None:
    nothing = gzip.compress(b"")
    parts = (nothing * 1000 for _ in range(LIMIT // len(nothing) // 1000 + 2))
    answer = api.post(CHAT, content=parts, headers=headers("gzip"))
    assert answer.status_code == 413


@pytest.mark.parametrize("size", [128 * 1024, 256 * 1024, 128 * 1024 + 1])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_body_of_whole_pieces_is_whole(api: TestClient, encoding: str, size: int) -> None:
    body = b'{"model": "x"' + b" " * (size - 14) + b"}"
    answer = api.post(CHAT, content=ENCODINGS[encoding](body), headers=headers(encoding))
    assert answer.status_code == READ, answer.text


def test_a_window_beyond_what_http_allows_is_refused(api: TestClient) -> None:
    """RFC 9659: a decoder would set aside as much as a frame says."""
    frame = b"\x28\xb5\x2f\xfd\x00" + bytes([(27 - 10) << 3]) + b"\x01\x00\x00"
    answer = api.post(CHAT, content=frame, headers=headers("zstd"))
    assert answer.status_code == 400


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "pack200-gzip"])
def test_others_are_refused_with_those_that_are_known(api: TestClient, encoding: str) -> None:
    answer = api.post(CHAT, content=b"{}", headers=headers(encoding))
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "gzip, deflate, zstd"
    assert encoding in answer.json()["error"]["message"]


def test_identity_is_none(api: TestClient) -> None:
    answer = api.post(CHAT, content=b'{"model": "x"}', headers=headers("identity"))
    assert answer.status_code == READ
