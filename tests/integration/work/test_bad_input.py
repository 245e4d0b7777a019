"""Requests that no client should send, against the running stack: the right 4xx, and nothing is
queued.
"""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.harness.samples import body
from tests.integration.node import PREFIX, Node

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("node")]

MIB = 1024 * 1024
LIMIT = 32 * MIB  # POC_MAX_BODY_BYTES
GENERATE = f"{PREFIX}/generate"


def chunked(n_bytes: int) -> Iterator[bytes]:
    """A body without Content-Length; it says its length only by ending."""
    yield b'{"block_hash": "'
    for _ in range(n_bytes // MIB):
        yield b"x" * MIB
    yield b'"}'


def raw_with(**changes: str) -> bytes:
    """The JSON of a right body with fields replaced by the given source text, valid or not."""
    text = json.dumps(body(**dict.fromkeys(changes, "REPLACED")))
    for source in changes.values():
        text = text.replace('"REPLACED"', source, 1)
    return text.encode("utf-8", "surrogatepass")


NOT_UTF8 = json.dumps(body(public_key="REPLACED")).encode().replace(b"REPLACED", b"\xff\xfe\xc3")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(
            raw_with(block_hash='"' + "x" * 10 * MIB + '"'), 422, id="a block_hash of 10 MB"
        ),
        pytest.param(raw_with(block_hash='""'), 422, id="an empty block_hash"),
        pytest.param(
            raw_with(block_hash='"' + "x" * (LIMIT + 1) + '"'), 413, id="a body over the limit"
        ),
        pytest.param(NOT_UTF8, 422, id="not UTF-8"),
        pytest.param(raw_with(public_key=r'"\ud800"'), 422, id="a lone surrogate, escaped"),
        pytest.param(raw_with(public_key='"\ud800"'), 422, id="a lone surrogate, encoded"),
        pytest.param(raw_with(block_height="NaN"), 422, id="NaN for a number"),
        pytest.param(raw_with(stat_test='{"dist_threshold": NaN}'), 422, id="a NaN threshold"),
        pytest.param(
            raw_with(stat_test='{"p_mismatch": Infinity}'), 422, id="an infinite probability"
        ),
        pytest.param(raw_with(nonces="[9223372036854775808]"), 422, id="a nonce of 2^63"),
        pytest.param(raw_with(nonces="[1e3]"), 422, id="a nonce that is no integer"),
        pytest.param(raw_with(nonces="[1" + "0" * 5000 + "]"), 422, id="a nonce of 5,000 digits"),
        pytest.param(b"[" * 100_000, 422, id="100,000 open brackets"),
        pytest.param(b"", 422, id="nothing"),
        pytest.param(b"\x00" * 1000, 422, id="zeros"),
        pytest.param(raw_with(validation='{"artifacts": []}'), 400, id="artifacts of other nonces"),
    ],
)
def test_a_bad_body_is_refused_and_nothing_is_queued(
    node: Node, content: Any, expected: int
) -> None:
    answer = node.http.post(GENERATE, content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, node.status()["queued_nonces"]) == (expected, 0), answer.text[:500]
    assert answer.json()["detail"]


def test_an_answer_to_a_large_bad_body_is_small(node: Node) -> None:
    answer = node.http.post(
        GENERATE,
        content=raw_with(block_hash='"' + "x" * 10 * MIB + '"'),
        headers={"Content-Type": "application/json"},
    )
    assert len(answer.content) < 2000


def test_a_chunked_body_over_the_limit_is_refused_and_nothing_is_queued(node: Node) -> None:
    try:
        status_code = node.http.post(
            GENERATE, content=chunked(LIMIT + 8 * MIB), headers={"Content-Type": "application/json"}
        ).status_code
    except httpx.TransportError:  # the API need not read on what it has refused already
        status_code = 413
    assert (status_code, node.status()["queued_nonces"]) == (413, 0)


def test_a_chunked_body_within_the_limit_is_as_good_as_another(node: Node) -> None:
    content = json.dumps(body(wait=True)).encode()
    answer = node.http.post(
        GENERATE,
        content=(content[i : i + 7] for i in range(0, len(content), 7)),
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 200, answer.text


def test_a_client_that_hangs_up_in_the_middle_of_its_body_leaves_nothing_queued(node: Node) -> None:
    with socket.create_connection(("127.0.0.1", node.stack.port)) as client:
        client.sendall(
            f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\n".encode()
            + b"Content-Type: application/json\r\nContent-Length: 5000\r\n\r\n"
            + raw_with()[:100]
        )
    assert node.status()["queued_nonces"] == 0


@pytest.mark.parametrize(
    "request_id", ["x", "0" * 32, "..%2F..%2Fstatus", "%00", "%F0%9F%92%A9", "a" * 10_000, "*" * 32]
)
def test_an_unknown_request_id_is_404(node: Node, request_id: Any) -> None:
    assert node.http.get(f"{GENERATE}/{request_id}").status_code == 404


def test_the_node_works_on_after_all_that(node: Node) -> None:
    assert node.generate(range(10), wait=True).status_code == 200
