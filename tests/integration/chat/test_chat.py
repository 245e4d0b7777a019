"""Chat and proofs on one real engine, on a GPU if there is one: who waits, and that chat's
answers stay its own.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.chat_client import (
    ANSWER_TOKENS,
    LONG_PROMPT,
    MODEL,
    PROMPTS,
    Answer,
    ConstantChat,
    ask,
    ask_all,
    differences,
    round_beside,
    switchable_stack,
)
from tests.harness.marks import needs_vllm
from tests.harness.samples import body
from tests.harness.waiting import wait_until
from tests.stacks.round_client import RoundClient

if TYPE_CHECKING:
    import openai

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("up"),
    needs_vllm,
]

# Proofs between the tokens of every answer, in micro-batches of a whole lease even on a machine
# with other work.
SHARING = {"POC_CHAT_POLICY": "share:0.5", "POC_MAX_STEP_MS": "400"}
CONCURRENCY = [1, 8]
HELLO = [{"role": "user", "content": "Hello"}]
# A second stack, of an engine whose isolation can be switched off, takes a minute of CPU time to
# start. `make test` holds that proofs between the steps of chat change no answer by
# test_vllm_engine.py (chat between two slices), that a missing isolation is found by
# test_kv_isolation.py, the share of proofs by test_chat_gate.py, and texts instead of ids by
# test_chat_requests.py.
ON_SHARING = [pytest.mark.xdist_group("sharing"), pytest.mark.slow]
POLICIES = ["yielding", pytest.param("sharing", marks=ON_SHARING)]
POLICIES_AND_CONCURRENCY = [
    ("yielding", 1),
    ("yielding", 8),
    pytest.param("sharing", 1, marks=ON_SHARING),
    pytest.param("sharing", 8, marks=ON_SHARING),
]


@pytest.fixture(scope="session")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that switches isolation off."""
    return tmp_path_factory.mktemp("isolation") / "off"


@pytest.fixture(scope="session")
def sharing(switch: Path) -> Iterator[RoundClient]:
    with switchable_stack(switch, **SHARING) as client:
        yield client


@pytest.fixture
def unisolated(sharing: RoundClient, switch: Path) -> Iterator[RoundClient]:
    switch.touch()
    yield sharing
    switch.unlink()


def chat_stats(client: RoundClient) -> dict[str, Any]:
    """What the only worker said of chat with its last heartbeat."""
    (worker,) = client.status()["workers"]
    stats: dict[str, Any] = worker["stats"]
    return stats


def openai_client(client: RoundClient) -> "openai.OpenAI":
    import openai  # here: a second, in every process of a run

    return openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)


def alone_and_beside(client: RoundClient, concurrency: int) -> tuple[list[Answer], list[Answer]]:
    """Answers to the same prompts without and with a round, asked in the same way."""
    alone = ask_all(client.http, PROMPTS, concurrency)
    with round_beside(client):
        # Under yield too the round makes progress between the waves of prompts.
        beside = ask_all(client.http, PROMPTS, concurrency, client.wait_progress)
    return alone, beside


class TestGreedyAnswers:
    @pytest.mark.parametrize(("policy", "concurrency"), POLICIES_AND_CONCURRENCY)
    def test_beside_a_round_are_those_without_one(
        self, request: pytest.FixtureRequest, policy: Any, concurrency: Any
    ) -> None:
        alone, beside = alone_and_beside(request.getfixturevalue(policy), concurrency)
        assert {len(answer.tokens) for answer in alone + beside} == {ANSWER_TOKENS}
        assert min(answer.prompt_tokens for answer in alone) < 40
        assert max(answer.prompt_tokens for answer in alone) > 360
        if concurrency == 1:  # nothing that batching could change: bit for bit
            assert [answer.tokens for answer in beside] == [answer.tokens for answer in alone]
        found = differences(alone, beside)
        assert found.corrupted == []
        assert len(found.ties) <= len(PROMPTS) // 10

    @pytest.mark.slow
    @pytest.mark.xdist_group("sharing")
    @pytest.mark.parametrize("concurrency", CONCURRENCY)
    def test_are_corrupted_where_isolation_is_switched_off(
        self, unisolated: RoundClient, concurrency: Any
    ) -> None:
        """Not in every go: on a busy machine proofs may get no turn while a chat runs."""
        while not differences(*alone_and_beside(unisolated, concurrency)).corrupted:
            pass  # until pytest's own limit

    @pytest.mark.parametrize("policy", POLICIES)
    def test_after_a_round_are_those_before_it(
        self, request: pytest.FixtureRequest, policy: Any
    ) -> None:
        """Neither reflections nor scratch caches leave a trace."""
        client = request.getfixturevalue(policy)
        before = ask_all(client.http, PROMPTS[:4], 1)
        with round_beside(client, 40):
            pass
        after = ask_all(client.http, PROMPTS[:4], 1)
        assert [answer.tokens for answer in after] == [answer.tokens for answer in before]


class TestPrefixCache:
    """A prompt is cached, a round runs, the prompt is answered from the cache."""

    def cached_before_and_after(self, client: RoundClient, salt: str) -> tuple[Answer, Answer]:
        ask(client.http, LONG_PROMPT, salt=salt)
        before = ask(client.http, LONG_PROMPT, salt=salt)
        assert before.cached_tokens >= 256
        with round_beside(client, 40):
            pass
        after = ask(client.http, LONG_PROMPT, salt=salt)
        assert after.cached_tokens == before.cached_tokens
        return before, after

    @pytest.mark.parametrize("policy", POLICIES)
    def test_answers_after_a_round_as_before(
        self, request: pytest.FixtureRequest, policy: Any
    ) -> None:
        before, after = self.cached_before_and_after(
            request.getfixturevalue(policy), f"isolated {policy}"
        )
        assert after.tokens == before.tokens

    @pytest.mark.slow
    @pytest.mark.xdist_group("sharing")
    def test_is_corrupted_where_isolation_is_switched_off(self, unisolated: RoundClient) -> None:
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

    def test_chat(self, yielding: RoundClient) -> None:
        answer = self.ask(yielding)
        assert answer.object == "chat.completion"
        assert answer.model == MODEL
        assert answer.usage.completion_tokens == 20
        assert answer.choices[0].message.content

    def test_streamed_chat_says_the_same(self, yielding: RoundClient) -> None:
        whole = self.ask(yielding).choices[0].message.content

        def is_in_parts() -> bool:
            options = {"include_usage": True}
            events = list(self.ask(yielding, stream=True, stream_options=options))
            texts = [event.choices[0].delta.content or "" for event in events if event.choices]
            assert "".join(texts) == whole
            assert events[-1].usage.completion_tokens == 20
            return len(list(filter(None, texts))) > 1

        # vLLM puts tokens into one event that come faster than they are sent: all of an answer
        # whose worker gets no turn meanwhile.
        wait_until(is_in_parts, "a stream of several events")

    def test_completions(self, yielding: RoundClient) -> None:
        client = openai_client(yielding)
        options: dict[str, Any] = {"model": MODEL, "prompt": "The sea is", "max_tokens": 20}
        options |= {"temperature": 0}
        whole = client.completions.create(**options)
        assert whole.usage.completion_tokens == 20
        streamed = client.completions.create(**options, stream=True)
        assert "".join(event.choices[0].text for event in streamed) == whole.choices[0].text

    @pytest.mark.slow
    @pytest.mark.xdist_group("sharing")
    def test_plain_clients_get_texts_where_the_operator_says_so(self, sharing: RoundClient) -> None:
        completions = openai_client(sharing).chat.completions
        asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 8}
        asked |= {"temperature": 0, "logprobs": True, "top_logprobs": 2}

        def tokens(**more: Any) -> tuple[list[str], str]:
            (choice,) = completions.create(**asked, extra_body=more).choices
            assert choice.logprobs is not None
            said = choice.logprobs.content or []
            return [one.token for one in said], choice.message.content or ""

        texts, answer = tokens(skip_special_tokens=False)
        assert "".join(texts) == answer
        for mode in ("raw", "processed"):
            ids, _ = tokens(logprobs_mode=mode)
            assert [one.isdecimal() for one in ids] == [True] * len(texts)
        known = {"enforced_tokens": {"tokens": [{"token": one} for one in ids]}}
        assert tokens(**known)[0] == ids

    def test_responses(self, yielding: RoundClient) -> None:
        answer = openai_client(yielding).responses.create(
            model=MODEL, input="Hello", max_output_tokens=16
        )
        assert answer.usage is not None
        assert answer.usage.output_tokens == 16

    def test_what_else_its_server_has_and_nothing_that_is_not_bounded(
        self, yielding: RoundClient
    ) -> None:
        asked = {"model": MODEL, "messages": HELLO, "max_tokens": 4}
        answer = yielding.http.post("/v1/messages", json=asked)
        assert (answer.status_code, answer.json()["type"]) == (200, "message")
        versioned = ("systemone", "load_lora_adapter", "audio/translations", "nothing")
        unversioned = ("/generative_scoring", "/sleep", "/score")
        for path in (*unversioned, *(f"/v1/{name}" for name in versioned)):
            assert yielding.http.post(path, json=asked).status_code == 404

    def test_models(self, yielding: RoundClient) -> None:
        (model,) = openai_client(yielding).models.list().data
        assert openai_client(yielding).models.retrieve(MODEL).id == model.id == MODEL
        assert model.to_dict()["max_model_len"] == 2048

    def test_unknown_model_and_bad_request_are_its_own_errors(self, yielding: RoundClient) -> None:
        import openai

        client = openai_client(yielding)
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            client.chat.completions.create(model="nope", messages=[])
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=-1
            )


class TestWhoWaits:
    def test_a_validation_completes_under_constant_chat(self, yielding: RoundClient) -> None:
        honest = Job(yielding, 60)
        yielding.wait(lambda: honest.state()["status"] == "completed", 300, "artifacts to validate")
        with ConstantChat(yielding.http) as chat:
            job = Job(yielding, 60, validation={"artifacts": honest.state()["artifacts"]})
            yielding.wait(lambda: job.state()["status"] == "completed", 300, "the verdict")
            yielding.wait(lambda: chat_stats(yielding)["chat_active"] > 0, 300, "chat goes on")
        verdict = job.state()
        assert (verdict["n_total"], verdict["n_mismatch"], verdict["fraud_detected"]) == (
            60,
            0,
            False,
        )
        assert "waiting_for" not in verdict
        assert chat.refused == []

    def test_a_job_completes_when_chat_ends_in_time(self, yielding: RoundClient) -> None:
        before = chat_stats(yielding)["skips"]
        with ConstantChat(yielding.http) as chat:
            job = Job(yielding)
            yielding.wait(
                lambda: job.state().get("waiting_for") == "chat", 300, "the job waits for chat"
            )
            yielding.wait(
                lambda: chat_stats(yielding)["skips"] > before, 300, "skips in the status"
            )
            yielding.wait(
                lambda: chat_stats(yielding)["chat_active"] > 0, 300, "chat in the status"
            )
            chat.stop()
            yielding.wait(lambda: job.state()["status"] == "completed", 300, "the job's end")
        assert chat_stats(yielding)["proof_busy_s"] > 0

    @pytest.mark.slow
    @pytest.mark.xdist_group("sharing")
    def test_a_job_completes_beside_constant_chat_under_share(self, sharing: RoundClient) -> None:
        with ConstantChat(sharing.http) as chat:
            sharing.wait(lambda: chat_stats(sharing)["chat_active"] > 0, 300, "chat in the status")
            job = Job(sharing)
            sharing.wait(lambda: job.state()["status"] == "completed", 300, "the job's end")
            sharing.wait(lambda: chat_stats(sharing)["chat_active"] > 0, 300, "chat goes on")
        assert chat.refused == []


class Job:
    """A job of one batch."""

    def __init__(self, client: RoundClient, n: int = 100, **more: Any) -> None:
        self._http = client.http
        job = body(nonces=list(range(n)), batch_size=n, params={"seq_len": 256}, **more)
        answer = self._http.post("/api/v1/pow/generate", json=job)
        assert answer.status_code == 200, answer.text
        self._id = answer.json()["request_id"]

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._http.get(f"/api/v1/pow/generate/{self._id}").json()
        return state
