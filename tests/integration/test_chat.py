"""Chat and proofs on one real engine, on a GPU if there is one: who waits, and that chat's answers stay its own."""

import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.chat_client import (
    ANSWER_TOKENS,
    CHAT,
    MODEL,
    Answer,
    ConstantChat,
    ask,
    ask_all,
    chat_stack,
    differences,
    prompts,
    request,
    round_beside,
    streaming,
)
from tests.integration.processes import descendants
from tests.marks import needs_vllm
from tests.round_client import RoundClient

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    needs_vllm,
]

PATIENCE_S = 4
# Pause after each wave of prompts, in which a round makes progress under yield too.
GAP_S = 0.3
# The promise is made for 50 prompts, which PROOFLINE_TEST_PROMPTS=50 asks; the suite asks as many as take a minute.
PROMPTS = prompts(int(os.environ.get("PROOFLINE_TEST_PROMPTS", "6")))
# Proofs between the tokens of every answer, in micro-batches of a whole lease even on a machine with other work.
SHARING: dict[str, Any] = {"policy": "share:0.5", "POC_MAX_STEP_MS": "400"}
LONG_PROMPT = prompts(1, least_tokens=400, seed=2)[0]  # three whole blocks of cache
CONCURRENCY = [1, 8]


@pytest.fixture(scope="module")
def yielding() -> Iterator[RoundClient]:
    with chat_stack("yield", POC_GENERATE_CHUNK_TIMEOUT_SEC=str(PATIENCE_S)) as client:
        yield client


@pytest.fixture(scope="module")
def sharing() -> Iterator[RoundClient]:
    with chat_stack(**SHARING) as client:
        yield client


@pytest.fixture(scope="module")
def unisolated() -> Iterator[RoundClient]:
    with chat_stack(**SHARING, isolated=False) as client:
        yield client


@pytest.fixture(scope="module")
def two_workers() -> Iterator[RoundClient]:
    # Heartbeats tell which worker has chat: frequent ones, or an answer is over before it is looked for.
    with chat_stack("exclusive", workers=2, POC_HEARTBEAT_S="0.2") as client:
        yield client


def chat_stats(client: RoundClient) -> dict[str, Any]:
    """What the only worker said of chat with its last heartbeat."""
    (worker,) = client.status()["workers"]
    stats: dict[str, Any] = worker["stats"]
    return stats


def openai_client(client: RoundClient) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{client.stack.base_url}/v1", api_key="none", max_retries=0)


def alone_and_beside(client: RoundClient, concurrency: int) -> tuple[list[Answer], list[Answer]]:
    """Answers to the same prompts without and with a round, asked in the same way."""
    model = client.stack.model_name
    alone = ask_all(client.http, PROMPTS, concurrency, model=model)
    with round_beside(client):
        before = client.processed()
        beside = ask_all(client.http, PROMPTS, concurrency, GAP_S, model)
        assert client.processed() - before > len(PROMPTS), "the round made no progress"
    return alone, beside


class TestGreedyAnswers:
    @pytest.mark.parametrize("concurrency", CONCURRENCY)
    @pytest.mark.parametrize("policy", ["yielding", "sharing"])
    def test_beside_a_round_are_those_without_one(self, request, policy, concurrency):
        alone, beside = alone_and_beside(request.getfixturevalue(policy), concurrency)
        assert {len(answer.tokens) for answer in alone + beside} == {ANSWER_TOKENS}
        assert min(answer.prompt_tokens for answer in alone) < 40
        assert max(answer.prompt_tokens for answer in alone) > 360
        if concurrency == 1:  # nothing that batching could change: bit for bit
            assert [answer.tokens for answer in beside] == [answer.tokens for answer in alone]
        found = differences(alone, beside)
        assert found.corrupted == []
        assert len(found.ties) <= len(PROMPTS) // 10

    def test_of_a_mixture_of_experts_beside_a_round_are_those_without_one(self):
        with chat_stack(**SHARING, model="tiny-qwen3-moe") as client:
            alone, beside = alone_and_beside(client, 1)
        assert [answer.tokens for answer in beside] == [answer.tokens for answer in alone]

    @pytest.mark.parametrize("concurrency", CONCURRENCY)
    def test_are_corrupted_where_isolation_is_switched_off(self, unisolated, concurrency):
        alone, beside = alone_and_beside(unisolated, concurrency)
        assert differences(alone, beside).corrupted

    @pytest.mark.parametrize("policy", ["yielding", "sharing"])
    def test_after_a_round_are_those_before_it(self, request, policy):
        """Neither reflections nor scratch caches leave a trace."""
        client = request.getfixturevalue(policy)
        before = ask_all(client.http, PROMPTS[:4], 1)
        with round_beside(client, 100):
            pass
        after = ask_all(client.http, PROMPTS[:4], 1)
        assert [answer.tokens for answer in after] == [answer.tokens for answer in before]


class TestPrefixCache:
    """A prompt is cached, a round runs, the prompt is answered from the cache."""

    def cached_before_and_after(self, client: RoundClient, salt: str) -> tuple[Answer, Answer]:
        ask(client.http, LONG_PROMPT, salt=salt)
        before = ask(client.http, LONG_PROMPT, salt=salt)
        assert before.cached_tokens >= 256
        with round_beside(client, 100):
            pass
        after = ask(client.http, LONG_PROMPT, salt=salt)
        assert after.cached_tokens == before.cached_tokens
        return before, after

    @pytest.mark.parametrize("policy", ["yielding", "sharing"])
    def test_answers_after_a_round_as_before(self, request, policy):
        before, after = self.cached_before_and_after(request.getfixturevalue(policy), f"isolated {policy}")
        assert after.tokens == before.tokens

    def test_is_corrupted_where_isolation_is_switched_off(self, unisolated):
        """Of several cached prompts at least one lies in blocks that proofs write to."""
        changed = []
        for index in range(4):
            before, after = self.cached_before_and_after(unisolated, f"unisolated {index}")
            changed.append(after.tokens != before.tokens)
        assert any(changed)


class TestOpenAiClient:
    def ask(self, client: RoundClient, **more: Any) -> Any:
        return openai_client(client).chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me about the sea."}],
            max_tokens=20,
            temperature=0,
            **more,
        )

    def test_chat(self, yielding):
        answer = self.ask(yielding)
        assert answer.object == "chat.completion"
        assert answer.model == MODEL
        assert answer.usage.completion_tokens == 20
        assert answer.choices[0].message.content

    def test_streamed_chat_says_the_same(self, yielding):
        whole = self.ask(yielding).choices[0].message.content
        events = list(self.ask(yielding, stream=True, stream_options={"include_usage": True}))
        assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == whole
        assert events[-1].usage.completion_tokens == 20
        assert len(events) > 10

    def test_completions(self, yielding):
        client = openai_client(yielding)
        options = {"model": MODEL, "prompt": "The sea is", "max_tokens": 20, "temperature": 0}
        whole = client.completions.create(**options)
        assert whole.usage.completion_tokens == 20
        streamed = client.completions.create(**options, stream=True)
        assert "".join(event.choices[0].text for event in streamed) == whole.choices[0].text

    def test_responses(self, yielding):
        answer = openai_client(yielding).responses.create(model=MODEL, input="Hello", max_output_tokens=16)
        assert answer.usage.output_tokens == 16

    def test_models(self, yielding):
        (model,) = openai_client(yielding).models.list().data
        assert model.id == MODEL
        assert model.max_model_len == 2048

    def test_unknown_model_and_bad_request_are_its_own_errors(self, yielding):
        client = openai_client(yielding)
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            client.chat.completions.create(model="nope", messages=[])
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=-1)


class TestWhoWaits:
    def test_skips_are_in_the_status(self, yielding):
        before = chat_stats(yielding)["skips"]
        with round_beside(yielding), ConstantChat(yielding.http):
            yielding.wait(lambda: chat_stats(yielding)["skips"] > before, 60, "skips in the status")
            yielding.wait(lambda: chat_stats(yielding)["chat_active"] > 0, 60, "chat in the status")
        assert chat_stats(yielding)["proof_busy_s"] > 0

    def test_a_job_under_constant_chat_says_that_it_waits_and_fails_after_its_patience(self, yielding):
        with ConstantChat(yielding.http) as chat:
            job = Job(yielding, 1000)  # more than gaps in chat, should there be any, have room for
            yielding.wait(lambda: job.state().get("waiting_for") == "chat", 60, "the job waits for chat")
            assert job.state()["status"] == "running"
            yielding.wait(lambda: job.state()["status"] == "failed", 120, "the job gives up")
        assert "Chat kept the engine busy for 4 s (POC_GENERATE_CHUNK_TIMEOUT_SEC)" in job.state()["error"]
        assert "waiting_for" not in job.state()
        assert chat.refused == []

    def test_a_job_completes_when_chat_ends_in_time(self, yielding):
        with ConstantChat(yielding.http) as chat:
            job = Job(yielding)
            yielding.wait(lambda: job.state().get("waiting_for") == "chat", 60, "the job waits for chat")
            chat.stop()
            yielding.wait(lambda: job.state()["status"] == "completed", 60, "the job's end")

    def test_a_job_completes_beside_constant_chat_under_share(self, sharing):
        with ConstantChat(sharing.http) as chat:
            sharing.wait(lambda: chat_stats(sharing)["chat_active"] > 0, 60, "chat in the status")
            job = Job(sharing)
            sharing.wait(lambda: job.state()["status"] == "completed", 60, "the job's end")
            assert chat_stats(sharing)["chat_active"] > 0
        assert chat.refused == []


class Job:
    """A job of one batch."""

    def __init__(self, client: RoundClient, n: int = 100) -> None:
        self._http = client.http
        body = {"block_hash": "b", "block_height": 1, "public_key": "k", "node_id": 0, "node_count": 1}
        body |= {"nonces": list(range(n)), "batch_size": n, "params": {"model": MODEL, "seq_len": 256}}
        answer = self._http.post("/api/v1/pow/generate", json=body)
        assert answer.status_code == 200, answer.text
        self._id = answer.json()["request_id"]

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._http.get(f"/api/v1/pow/generate/{self._id}").json()
        return state


def chat(client: RoundClient) -> httpx.Response:
    return client.http.post(CHAT, json=request("Hello", 8))


class TestClientsThatVanish:
    N = int(os.environ.get("PROOFLINE_TEST_VANISHING", "200"))

    def test_leave_no_request_running_a_second_later(self, yielding):
        with ThreadPoolExecutor(10) as pool:
            list(pool.map(lambda seed: self.vanish(yielding, seed), range(self.N)))
        time.sleep(1)
        tokens = generated_tokens(yielding)
        time.sleep(1.5)
        assert generated_tokens(yielding) == tokens
        assert chat_stats(yielding)["chat_active"] == 0
        assert chat(yielding).status_code == 200

    def vanish(self, client: RoundClient, seed: int) -> None:
        """Streams an answer that would take many seconds, and hangs up within the first half second."""
        rng = random.Random(seed)
        deadline = time.monotonic() + rng.uniform(0.0, 0.5)
        timeout = httpx.Timeout(30, read=max(0.001, rng.uniform(0.0, 0.5)))
        with (
            contextlib.suppress(httpx.ReadTimeout),
            httpx.Client(base_url=client.stack.base_url, timeout=timeout, trust_env=False) as http,
            http.stream("POST", CHAT, json=request(PROMPTS[seed % len(PROMPTS)], 1500, stream=True)) as answer,
        ):
            for _ in answer.iter_raw():
                if time.monotonic() > deadline:
                    return


def generated_tokens(client: RoundClient) -> float:
    """Tokens that the only worker's engine has generated, as its vLLM counts them."""
    (worker,) = client.status()["workers"]
    metrics = httpx.get(f"http://127.0.0.1:{worker['port']}/metrics", trust_env=False).text
    return sum(
        float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if line.startswith("vllm:generation_tokens_total")
    )


class TestTwoWorkers:
    """Under `exclusive`, which without a round is as `yield`."""

    def test_exclusive_refuses_chat_during_a_round_and_serves_it_right_after(self, two_workers):
        assert chat(two_workers).status_code == 200
        two_workers.start(None, params={"seq_len": 256})
        two_workers.wait(lambda: len(two_workers.stats()["workers"]) == 2, 60, "both workers at work")
        refused = chat(two_workers)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert "POC_CHAT_POLICY=exclusive" in refused.json()["error"]["message"]
        with pytest.raises(openai.InternalServerError):
            openai_client(two_workers).chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
        before = two_workers.processed()
        time.sleep(2)
        assert two_workers.processed() > before
        two_workers.stop()
        assert two_workers.wait(lambda: chat(two_workers).status_code == 200, 60, "chat after the round") < 1.0
        two_workers.wait(lambda: sum(counted(two_workers, "chat_refused")) >= 2, 60, "the refusals in the status")

    def test_a_lost_engine_is_replaced_and_what_it_left_unanswered_is_answered_elsewhere(self, two_workers):
        with under_way_on_the_first(two_workers, LONG_PROMPT, 1400) as (first, answer):
            (engine,) = [process for process in descendants(first["pid"]) if "EngineCore" in process.name]
            os.kill(engine.pid, signal.SIGKILL)
            answers = [chat(two_workers) for _ in range(20)]  # while its worker finds out and ends
            assert [one.status_code for one in answers] == [200] * 20
            assert answer.result(60).status_code == 200
            assert answer.result().json()["usage"]["completion_tokens"] == 1400
        wait_two_ready(two_workers)
        assert first["id"] not in {worker["id"] for worker in two_workers.status()["workers"]}

    def test_a_worker_that_is_to_end_finishes_its_chat_first(self, two_workers):
        with under_way_on_the_first(two_workers, "Hello", 1000) as (first, answer):
            two_workers.log.clear()
            os.kill(first["pid"], signal.SIGTERM)
            two_workers.wait(
                lambda: [worker["state"] for worker in two_workers.status()["workers"]][:1] == ["draining"],
                60,
                "the worker to say that it is to end",
            )
            assert not answer.done()
            assert chat(two_workers).status_code == 200
            assert answer.result(60).json()["usage"]["completion_tokens"] == 1000
        two_workers.wait(lambda: not os.path.exists(f"/proc/{first['pid']}"), 60, "the worker's end")
        assert not [
            line for line in two_workers.log if re.search("died in the middle|did not answer|are cut off", line)
        ]
        wait_two_ready(two_workers)

    def test_streams_of_a_dead_one_end_with_an_error_event_and_others_are_answered_elsewhere(self, two_workers):
        short = two_workers.http.post(CHAT, json=request(LONG_PROMPT, 50))
        expected = short.json()["choices"][0]["message"]["content"]
        with under_way_on_the_first(two_workers, LONG_PROMPT, 1400) as (first, answer):
            with streaming(two_workers.http, "Hello", 1900) as other:
                next(other)
                two_workers.wait(lambda: active(two_workers) == [1, 1], 60, "one request on each worker")
                with streaming(two_workers.http, "Hello", 1900) as events:
                    assert [json.loads(next(events))["object"] for _ in range(3)] == ["chat.completion.chunk"] * 3
                    assert not answer.done()
                    os.kill(first["pid"], signal.SIGKILL)
                    *_, last = events
                error = json.loads(last)["error"]
                assert "was lost" in error["message"]
                assert json.loads(next(other))["object"] == "chat.completion.chunk"  # the second worker goes on
            retried = answer.result(60)
            assert retried.status_code == 200
            assert retried.json()["usage"]["completion_tokens"] == 1400
            assert retried.json()["choices"][0]["message"]["content"].startswith(expected)
            # The dead worker is registered for a while still: requests pass it over.
            for _ in range(3):
                assert chat(two_workers).status_code == 200


def wait_two_ready(client: RoundClient) -> None:
    """And nobody else: until one that was killed is forgotten."""

    def states() -> list[str]:
        return [worker["state"] for worker in client.status()["workers"]]

    client.wait(lambda: states() == ["ready", "ready"], 120, "two ready workers")


@contextlib.contextmanager
def under_way_on_the_first(
    client: RoundClient, prompt: str, tokens: int
) -> Iterator[tuple[dict[str, Any], Future[httpx.Response]]]:
    """The first of two ready workers, and the answer that it computes."""
    wait_two_ready(client)
    with ThreadPoolExecutor(1) as pool:
        first, _ = client.status()["workers"]  # by id, as the gateway chooses among equals
        client.wait(lambda: active(client) == [0, 0], 60, "two idle workers")
        answer = pool.submit(client.http.post, CHAT, json=request(prompt, tokens))
        client.wait(lambda: active(client) == [1, 0], 60, "a request on the first worker")
        yield first, answer


def active(client: RoundClient) -> list[int]:
    return counted(client, "chat_active")


def counted(client: RoundClient, name: str) -> list[int]:
    """What each worker said with its last heartbeat."""
    return [worker["stats"][name] for worker in client.status()["workers"]]
