"""What stands where vLLM's server calls `generate`: what it hands on and what it refuses, without
an engine."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.marks import needs_vllm
from workers.vllm.chat.errors import BadRequest
from workers.vllm.chat.fields import SALT, TOLD, RequestOptions
from workers.vllm.chat.limits import Limits
from workers.vllm.release.extra_args import LOGPROBS_MODE, PASS, TOKEN_IDS

pytestmark = [pytest.mark.xdist_group("engines"), needs_vllm]  # whose process has loaded vLLM

PROMPT = {"type": "token", "prompt_token_ids": [1, 2, 511]}


class Engine:
    """Stands in for an AsyncLLM of 512 token ids whose tokenizer has more."""

    def __init__(self) -> None:
        self.generated: list[Any] = []
        self.begun: list[Any] = []
        self.salts: list[Any] = []
        model = {
            "logprobs_mode": "processed_logprobs",
            "get_vocab_size": lambda: 512,
            "max_model_len": 64,
            "skip_tokenizer_init": True,
        }
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(**model, logits_processors=None),
            cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
            speculative_config=None,
            structured_outputs_config=SimpleNamespace(backend="none"),
        )
        self.output_processor = SimpleNamespace(add_request=self.begun.append, tokenizer=None)
        self.engine_core = SimpleNamespace(get_output_async=None)

    def generate(self, prompt: Any, params: Any, _request_id: str) -> None:
        self.generated.append(params.extra_args)
        self.salts.append(prompt.get("cache_salt"))


@pytest.fixture
def engine() -> Any:
    from workers.vllm.chat.pipeline import ChatPipeline

    made = Engine()
    ChatPipeline(made, "").install()
    return made


def params(**asked: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**asked)


def test_over_http_a_clients_own_entries_are_ours_to_make(engine: Any) -> None:
    context = TOLD.set(RequestOptions(ids=True, mode="raw_logprobs"))
    try:
        engine.generate(PROMPT, params(logprobs=5, extra_args={PASS: {}, "kv": 1}), "a")
        engine.generate(PROMPT, params(extra_args={TOKEN_IDS: 1}), "b")
    finally:
        TOLD.reset(context)
    told = {LOGPROBS_MODE: "raw_logprobs"}
    assert engine.generated == [{"kv": 1, TOKEN_IDS: 1} | told, told]


@pytest.mark.parametrize(
    "asked",
    [
        {"stop_token_ids": [7, 512]},
        {"stop_token_ids": [-1]},
        {"logit_bias": {512: 1.0}},
        {"allowed_token_ids": [512]},
        {"logprob_token_ids": [2**40]},
    ],
    ids=str,
)
def test_no_foreign_id_reaches_the_engine(engine: Any, asked: dict[str, Any]) -> None:
    (field,) = asked
    with pytest.raises(BadRequest) as refused:
        engine.generate(PROMPT, params(**asked), "a")
    assert refused.value.param == field
    assert engine.generated == []


def test_a_prompt_without_a_salt_has_its_clients(engine: Any) -> None:
    """On paths that have no field for one."""
    engine.generate(PROMPT, params(), "a")
    context = SALT.set("its client's")
    try:
        engine.generate(PROMPT, params(), "b")
        engine.generate(PROMPT | {"cache_salt": "its own"}, params(), "c")
    finally:
        SALT.reset(context)
    assert engine.salts == [None, "its client's", "its own"]
    assert "cache_salt" not in PROMPT


@pytest.mark.parametrize("foreign", [512, -1])
def test_nor_does_a_prompt_of_them(engine: Any, foreign: int) -> None:
    with pytest.raises(BadRequest, match=rf"token id {foreign}; this model has 0 to 511"):
        engine.generate(PROMPT | {"prompt_token_ids": [1, foreign, 2]}, params(), "a")
    assert engine.generated == []


def test_placeholders_of_pictures_may_be_beyond_the_vocabulary(engine: Any) -> None:
    engine.generate({"type": "multimodal", "prompt_token_ids": [1, 600]}, params(), "a")
    assert len(engine.generated) == 1


def test_nor_do_words_that_only_the_tokenizer_has(engine: Any) -> None:
    asked = params(bad_words=["a word"])
    asked._bad_words_token_ids = [[5, 600]]
    with pytest.raises(BadRequest, match="bad_words has the token id 600"):
        engine.output_processor.add_request(SimpleNamespace(sampling_params=asked))
    assert engine.begun == []


@pytest.mark.parametrize(
    "asked",
    [
        {"top_k": 2**64},
        {"allowed_token_ids": [5] * 1025},
        {"logit_bias": {5: float("nan")}},
        {"extra_args": {"a": [2**64 - 1, float("inf")]}},
    ],
    ids=str,
)
def test_what_the_core_could_not_hold_never_reaches_it(engine: Any, asked: dict[str, Any]) -> None:
    """Neither by `generate` nor by what else adds a request, which vLLM would remember first."""
    (field,) = asked
    for begin in (
        lambda: engine.generate(PROMPT, params(**asked), "a"),
        lambda: engine.output_processor.add_request(
            SimpleNamespace(sampling_params=params(**asked))
        ),
    ):
        with pytest.raises(BadRequest) as refused:
            begin()
        assert refused.value.param == field
    assert engine.generated == engine.begun == []


def test_limits_are_those_of_the_installed_release() -> None:
    from workers.vllm.release import answers

    pytest.importorskip("vllm.v1.worker.gpu.sample.logit_bias")
    assert Limits(**answers.limits()) == Limits()
