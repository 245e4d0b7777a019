"""Clients that ask much of an engine's server, and one that asks little."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from poc_core.records import GATEWAY_CLIENT_HEADER
from tests.harness.chat_client import CHAT
from tests.harness.marks import needs_vllm
from tests.integration.chat_checks.known import Server, chat, text_of

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.xdist_group("engines"),
    needs_vllm,
    pytest.mark.parametrize("server", [256], indirect=True),
]

GREEDY, HONEST = ({GATEWAY_CLIENT_HEADER: name} for name in ("greedy", "honest"))
STREAMS = 30


@pytest.fixture
def others() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(STREAMS) as pool:
        yield pool


def asked(server: Server, headers: dict[str, str], **more: Any) -> dict[str, Any]:
    body = {"model": server.model, **chat(), **more}
    answer = server.http.post(CHAT, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_streams_with_many_logprobs_hold_up_nobodys_answer(
    server: Server, others: ThreadPoolExecutor
) -> None:
    body = {"model": server.model, "stream": True, "ignore_eos": True}
    body |= chat(max_tokens=400, top_logprobs=20)
    begun: list[bool] = []

    def stream() -> int:
        with server.http.stream("POST", CHAT, json=body, headers=GREEDY) as answer:
            n = 0
            for line in answer.iter_lines():
                n += line.startswith("data: {")
                if n == 1:
                    begun.append(True)
            return n

    streams = [others.submit(stream) for _ in range(STREAMS)]
    while len(begun) < STREAMS // 2:
        asked(server, HONEST, max_tokens=1)
    assert asked(server, HONEST, max_tokens=16, ignore_eos=True)["usage"]["completion_tokens"] == 16
    assert not any(one.done() for one in streams)
    # nothing is lost on the way: a part has several tokens
    assert all(one.result() > 10 for one in streams)


def test_slow_grammars_hold_up_no_other_grammar(server: Server, others: ThreadPoolExecutor) -> None:
    is_over = threading.Event()

    def grammars(number: int) -> set[int]:
        seen: set[int] = set()
        while not seen or not is_over.is_set():
            number += 8
            slow = {"type": "string", "minLength": 1, "maxLength": 1_000_000 + number}
            body = {"model": server.model, **chat(structured_outputs={"json": slow})}
            seen.add(server.http.post(CHAT, json=body, headers=GREEDY).status_code)
        return seen

    slow = [others.submit(grammars, number) for number in range(8)]
    free: Callable[..., dict[str, Any]] = lambda **more: asked(server, HONEST, **more)  # noqa: E731
    for word in ("yes", "no"):
        assert text_of(free(structured_outputs={"choice": [word]})) == word
    is_over.set()
    assert set().union(*(one.result() for one in slow)) <= {200, 400}
