"""Chats that nodes check, of a whole node: gateway, worker and a real engine in float32."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.harness.chat_client import MODEL, round_beside
from tests.harness.marks import needs_vllm
from tests.integration.chat_checks.known import (
    MODES,
    Client,
    answers_alike,
    chat,
    content,
    furthest,
    ids_of,
    known,
    text_of,
)
from tests.stacks.round_client import RoundClient

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("up"),
    needs_vllm,
]

_METRIC = f'proofline_chat_validations_total{{model="{MODEL}",way="pass"}}'


@pytest.fixture
def client(yielding: RoundClient) -> Client:
    return Client(yielding.http, MODEL)


def counted(node: RoundClient) -> dict[str, Any]:
    (worker,) = node.status()["workers"]
    found: dict[str, Any] = worker["stats"]
    return found


def metrics(node: RoundClient) -> str:
    """Without what names the worker."""
    return re.sub(r',worker="[^"]*"|worker="[^"]*",', "", node.http.get("/metrics").text)


@pytest.mark.parametrize("temperature", [0, 0.99])
@pytest.mark.parametrize("mode", MODES)
def test_a_node_confirms_its_own_chat(client: Client, temperature: float, mode: str) -> None:
    asked = chat(temperature=temperature, logprobs_mode=mode)
    free = client.ask(asked)
    answers_alike(free, client.ask(known(asked, ids_of(free))))


def test_streams_choices_and_stops_are_as_if_sampled(client: Client) -> None:
    asked = chat(temperature=0.99)
    free = client.ask(asked)
    again = known(asked, ids_of(free))
    chunks = client.stream(again | {"stream_options": {"include_usage": True}})
    told = [one["choices"][0] for one in chunks if one["choices"]]
    positions = [
        one for choice in told if choice.get("logprobs") for one in choice["logprobs"]["content"]
    ]
    assert furthest(content(free), positions) < 1e-5
    assert chunks[-1]["usage"]["completion_tokens"] == len(positions)
    two = client.ask(again | {"n": 2})
    assert content(two) == content(two, 1)
    assert furthest(content(free), content(two)) < 1e-5
    stop = text_of(free)[8:11]
    cut = client.ask(again | {"stop": [stop]})
    assert text_of(cut) == text_of(free).split(stop)[0]
    assert cut["choices"][0]["stop_reason"] == stop


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"enforced_tokens": {"tokens": [{"token": "512"}]}}, "enforced_tokens"),
        ({"enforced_tokens": {"tokens": []}}, None),
        ({"logprobs_mode": "foo"}, "logprobs_mode"),
        ({"stop_token_ids": [512], "min_tokens": 1}, "stop_token_ids"),
    ],
    ids=str,
)
def test_what_is_wrong_comes_back_through_the_gateway(
    client: Client, more: dict[str, Any], param: str | None
) -> None:
    answer = client.post(chat() | more)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_validations_beside_a_round_are_refused_to_nobody(
    client: Client, yielding: RoundClient
) -> None:
    asked = [
        chat(temperature=0.99, logprobs_mode=mode, seed=seed) for mode in MODES for seed in range(3)
    ]
    free = [client.ask(one) for one in asked]
    bodies = [known(one, ids_of(answer)) for one, answer in zip(asked, free, strict=True)]
    before = counted(yielding)
    n_asked = 0
    with round_beside(yielding), ThreadPoolExecutor(len(bodies)) as pool:
        began = yielding.processed()
        while not n_asked or yielding.processed() == began:
            n_asked += len(bodies)
            for one, other in zip(free, pool.map(client.ask, bodies), strict=True):
                answers_alike(one, other)

    def has_told() -> bool:
        """What the node says of them, in both places; an error tells what is lacking."""
        now = counted(yielding)
        grown = {name: now[name] - before[name] for name in before}
        assert grown["chat_refused"] == 0
        assert grown["validations_pass"] >= n_asked, (n_asked, before, now)
        assert grown["validation_pass_s"] > 0, (before, now)
        told = [line for line in metrics(yielding).splitlines() if line.startswith(_METRIC)]
        assert told == [f"{_METRIC} {float(now['validations_pass'])}"]
        return True

    yielding.wait(has_told, 300, "the validations in status and metrics")
