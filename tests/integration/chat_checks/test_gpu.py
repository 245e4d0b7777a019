"""Known tokens on GPUs: both of vLLM's model runners, CUDA graphs, asynchronous scheduling, drafts.

On vLLM 0.25.1 dense models run on the second model runner, experts on the first.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.harness import golden
from tests.harness.marks import needs_vllm
from tests.integration.chat_checks.known import (
    CASES,
    MODES,
    Server,
    body_of,
    content,
    furthest,
    ids_of,
    known,
    serving,
)
from tests.stacks.deployments import Deployment
from workers.engines.options import EngineOptions
from workers.engines.validations import Way
from workers.load import load_engine

pytestmark = [
    pytest.mark.integration,
    pytest.mark.gpu,
    pytest.mark.xdist_group("engines"),
    needs_vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DENSE = Deployment("tiny-qwen3", "float32")
EXPERTS = Deployment("tiny-qwen3-moe", "float32")
# Sums of float32 on a GPU, in graphs of several batch sizes.
_NEAR = 2e-3
_DRAFTS = json.dumps(
    {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
)


def started(deployment: Deployment, *arguments: str) -> Iterator[Server]:
    """With CUDA graphs and asynchronous scheduling, as vLLM has them by default."""
    memory = ("--gpu-memory-utilization", "0.15")
    engine = load_engine(
        EngineOptions(
            model=golden.model_dir(deployment.model),
            served_model_name=deployment.model,
            dtype="float32",
            max_batch_tokens=256,
            decode_memory_gb=0.1,
            vllm_args=(*memory, "--max-num-seqs", "32", *arguments),
        )
    )
    try:
        with serving(engine) as server:
            yield server
    finally:
        engine.close()


@pytest.fixture(scope="module", params=[DENSE, EXPERTS], ids=str)
def gpu_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    yield from started(request.param)


@pytest.fixture(scope="module", params=[DENSE, EXPERTS], ids=str)
def drafting(request: pytest.FixtureRequest) -> Iterator[Server]:
    """With speculative decoding: drafts are what came before."""
    yield from started(request.param, "--speculative-config", _DRAFTS)


def chat(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Tell me about the sea, the sea, the sea."}]
    asked = {"messages": messages, "max_tokens": 64, "logprobs": True, "top_logprobs": 5}
    return asked | {"ignore_eos": True} | more


def together(server: Server, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(server.ask, bodies))


@pytest.mark.parametrize("way", ["pass", "steps"])
def test_golden_cases_all_at_once(gpu_server: Server, way: Way) -> None:
    if gpu_server.model != DENSE.model:
        pytest.skip("golden data is the dense model's")
    with gpu_server.scoring_by(way):
        answers = together(gpu_server, [body_of(case) for case in CASES])
    for case, answer in zip(CASES, answers, strict=True):
        assert furthest(case["expected"]["content"], content(answer)) < _NEAR
        assert answer["choices"][0]["finish_reason"] == case["expected"]["finish_reason"]


@pytest.mark.parametrize("way", ["pass", "steps"])
@pytest.mark.parametrize("temperature", [0, 0.99])
def test_answers_of_both_modes_are_confirmed(
    gpu_server: Server, way: Way, temperature: float
) -> None:
    asked = [
        chat(logprobs_mode=mode, temperature=temperature, max_tokens=32 + n)
        for n, mode in enumerate(MODES * 8)
    ]
    free = together(gpu_server, asked)
    with gpu_server.scoring_by(way):
        pairs = zip(asked, free, strict=True)
        forced = together(gpu_server, [known(body, ids_of(one)) for body, one in pairs])
    for one, other in zip(free, forced, strict=True):
        assert furthest(content(one), content(other)) < _NEAR


def test_ordinary_modes_are_right_beside_drafts(drafting: Server) -> None:
    """Raw logprobs of a greedy answer do not depend on the temperature, processed ones do: both
    against one pass."""
    cool = {"temperature": 0.5, "top_k": 20}
    asked = [chat(logprobs_mode=mode, **cool) for mode in MODES * 4]
    free = together(drafting, asked)
    with drafting.scoring_by("pass"):
        pairs = zip(asked, free, strict=True)
        forced = together(drafting, [known(body, ids_of(one)) for body, one in pairs])
    for one, other in zip(free, forced, strict=True):
        assert furthest(content(one), content(other)) < _NEAR


def test_steps_are_refused_where_drafts_take_their_places(drafting: Server) -> None:
    body = known(chat(), [40, 41])
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    answer = drafting.post({**body, "response_format": schema})
    assert answer.status_code == 503, answer.text
    assert "speculative decoding" in answer.text
