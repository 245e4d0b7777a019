"""Clients that hang up in the middle of an answer: their requests end in the engine."""

import contextlib
import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.harness.chat_client import CHAT, PROMPTS, request
from tests.harness.marks import needs_vllm
from tests.stacks.round_client import RoundClient

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("up"),
    needs_vllm,
]

PROMPT_TOKENS = "vllm:prompt_tokens_total"
N = int(os.environ.get("PROOFLINE_TEST_VANISHING", "40"))


def test_clients_that_vanish_leave_no_request_running(yielding: RoundClient) -> None:
    def is_still() -> bool:
        tokens = counted(yielding, "vllm:generation_tokens_total")
        time.sleep(1.5)
        still = counted(yielding, "vllm:generation_tokens_total") == tokens
        return still and counted(yielding, "vllm:num_requests_running") == 0

    yielding.wait(is_still, 300, "figures that know of all chat before")
    before, prompts = long_answers(yielding), counted(yielding, PROMPT_TOKENS)
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda seed: vanish(yielding, seed), range(N)))
    yielding.wait(is_still, 300, "an engine that stands still")
    yielding.wait(lambda: n_active(yielding) == 0, 300, "it in the status")
    assert long_answers(yielding) == before  # none was computed to its end
    assert counted(yielding, PROMPT_TOKENS) > prompts
    assert yielding.http.post(CHAT, json=request("Hello", 8)).status_code == 200


def vanish(client: RoundClient, seed: int) -> None:
    """Streams an answer that would take seconds, and hangs up: every other client once the
    answer has begun, the others within a quarter of a second.
    """
    rng = random.Random(seed)
    stay_s = rng.uniform(0.0, 0.25)
    timeout = httpx.Timeout(60, read=60 if seed % 2 else rng.uniform(0.001, 0.25))
    asked = request(PROMPTS[seed % len(PROMPTS)], 1500, stream=True)
    with httpx.Client(base_url=client.base_url, timeout=timeout, trust_env=False) as http:
        began = time.monotonic()
        with (
            contextlib.suppress(httpx.ReadTimeout),
            http.stream("POST", CHAT, json=asked) as answer,
        ):
            for _ in answer.iter_raw():
                if time.monotonic() > began + stay_s:
                    break


def n_active(client: RoundClient) -> float:
    (worker,) = client.status()["workers"]
    return float(worker["stats"]["chat_active"])


def long_answers(client: RoundClient) -> float:
    """The number of answers with more than 1,000 tokens, however they ended. Only clients that
    vanish ask for so many.
    """
    name = "vllm:request_generation_tokens"
    short = counted(client, name + r'_bucket\{.*le="1000\.0"')
    return counted(client, f"{name}_count") - short


def counted(client: RoundClient, pattern: str) -> float:
    """The figure of the only engine whose line begins so, as the engine had it after this call: a
    page repeats what an engine said before if it does not answer at once.
    """
    asked_at, metrics = time.time(), ""

    def figure(pattern: str) -> float:
        (line,) = (line for line in metrics.splitlines() if re.match(pattern, line))
        return float(line.rpartition(" ")[2])

    def is_new() -> bool:
        nonlocal metrics
        metrics = client.http.get("/api/v1/metrics").text
        return figure(r'mlnode_source_scrape_timestamp_seconds\{.*source="vllm"') >= asked_at

    client.wait(is_new, 300, "an answer of the engine")
    return figure(pattern)
