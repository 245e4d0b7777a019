"""What a deployment may tell vLLM, and what becomes of it."""

from typing import get_args

import pytest

from poc_core.errors import ArgumentsError
from poc_core.serving.vllm_arguments import DTYPES, ServeArguments, read_arguments
from workers.engines.kinds import Dtype


def test_number_formats_are_those_of_the_engines() -> None:
    assert get_args(Dtype) == DTYPES


def test_what_brokers_send_is_understood() -> None:
    words = (
        "--tensor-parallel-size 4 --max-model-len 240000 --quantization fp8"
        " --enable-expert-parallel "
    )
    words += (
        "--served-model-name Qwen/Qwen3-235B --gpu-memory-utilization=0.9"
        " --enable-auto-tool-choice "
    )
    words += (
        "--tool-call-parser hermes --host 0.0.0.0 --port 5000 -pp 2 --dtype bfloat16"
        " --max_num_seqs 128"
    )
    rest = (
        "--max-model-len 240000 --quantization fp8 --enable-expert-parallel"
        " --gpu-memory-utilization 0.9 "
    )
    rest += "--enable-auto-tool-choice --tool-call-parser hermes --max-num-seqs 128"
    assert read_arguments(words.split()) == ServeArguments(
        tensor_parallel=4,
        pipeline_parallel=2,
        served_model_name="Qwen/Qwen3-235B",
        dtype="bfloat16",
        rest=tuple(rest.split()),
        ignored=("--host", "--port"),
    )


def test_nothing_said_is_nothing_wanted() -> None:
    assert read_arguments([]) == ServeArguments()


@pytest.mark.parametrize(
    "words",
    [
        ["--max-logprobs", "-1"],
        ["--no-enable-prefix-caching"],
        ["--cudagraph-capture-sizes", "1", "2", "4"],
        ["--override-generation-config", '{"temperature": 0}'],
        ["--load-format", "safetensors"],
    ],
)
def test_values_of_all_shapes_pass(words: list[str]) -> None:
    assert read_arguments(words).rest == tuple(words)


@pytest.mark.parametrize(
    "words",
    [
        "--trust-remote-code",
        "--trust_remote_code",
        "--model /etc",
        "--config /etc/passwd",
        "--middleware os.system",
        "--api-key secret",
        "--ssl-keyfile x",
        "--uds /tmp/x",
        "--tool-parser-plugin /tmp/x.py",
        "--reasoning-parser-plugin /tmp/x.py",
        "--logits-processors x:y",
        "--worker-cls x.y",
        "--worker-extension-cls x.y",
        "--scheduler-cls x.y",
        "--kv-transfer-config {}",
        "--compilation-config {}",
        "--compilation-config.backend x",
        "--chat-template /etc/passwd",
        "--allowed-local-media-path /",
        "--enable-lora",
        "--lora-modules a=/x",
        "--trust",
        "-O3",
        "--no-such-argument 3",
        "--",
    ],
)
def test_what_runs_code_opens_ports_or_is_not_known_is_refused(words: str) -> None:
    with pytest.raises(ArgumentsError, match="not among the arguments that a deployment may bring"):
        read_arguments(words.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("oops --seed 1", "'oops' follows no argument"),
        ("--enforce-eager /model", "--enforce-eager takes no value, and '/model' follows it"),
        ("--max-model-len --seed 1", "--max-model-len needs a value"),
        ("--tensor-parallel-size 0", "--tensor-parallel-size is a number from 1, not '0'"),
        ("--tensor-parallel-size two", "is a number from 1, not 'two'"),
        ("--served-model-name a b", "--served-model-name takes one value, not 2"),
        (
            "--load-format my.plugin",
            "--load-format may be auto, hf, safetensors, fastsafetensors here",
        ),
        ("--distributed-executor-backend my.Executor", "may be mp, uni here, not 'my.Executor'"),
        ("--generation-config /etc", "may be auto, vllm here"),
        (
            "--tokenizer=--trust-remote-code",
            "--tokenizer cannot have the value '--trust-remote-code'",
        ),
        ("--served-model-name=--trust-remote-code", "--served-model-name cannot have the value"),
        ("--dtype float16", "--dtype may be auto, float32, bfloat16 here, not 'float16'"),
    ],
)
def test_what_is_wrong_is_said(words: str, said: str) -> None:
    with pytest.raises(ArgumentsError) as error:
        read_arguments(words.split())
    assert said in str(error.value)


def test_an_operator_may_allow_more() -> None:
    words = ["--trust-remote-code", "--chat-template", "/models/template.jinja"]
    allowed = ("--trust-remote-code", "chat-template")
    assert read_arguments(words, allowed).rest == tuple(words)
    with pytest.raises(ArgumentsError, match="--middleware"):
        read_arguments(["--middleware", "x"], allowed)
