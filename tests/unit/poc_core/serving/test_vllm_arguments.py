"""What a deployment may tell vLLM, and what becomes of it."""

import pytest

from poc_core.errors import ArgumentsError
from poc_core.serving.deployments import Deployment
from poc_core.serving.trusted_models import SHIPPED
from poc_core.serving.vllm_arguments import harmless, read_deployment, without
from tests.harness.official import Official, official

_SETTLED = "a node settles that by itself"


def read(*words: str) -> Deployment:
    return read_deployment("acme/model", "auto", words)


def test_what_brokers_send_is_understood() -> None:
    words = (
        "--tensor-parallel-size 4 --max-model-len 240000 --quantization fp8"
        " --enable-expert-parallel --served-model-name Qwen/Qwen3-235B"
        " --gpu-memory-utilization=0.9 --enable-auto-tool-choice --tool-call-parser hermes"
        " --host 0.0.0.0 --port 5000 -pp 2 --dtype bfloat16 --max_num_seqs 128"
        " --worker-extension-cls gonka_poc.worker.PoCWorkerExtension"
    )
    rest = (
        "--max-model-len 240000 --quantization fp8 --enable-expert-parallel"
        " --gpu-memory-utilization 0.9 --enable-auto-tool-choice --tool-call-parser hermes"
        " --max-num-seqs 128"
    )
    assert read(*words.split()) == Deployment(
        model="acme/model",
        tensor_parallel=4,
        pipeline_parallel=2,
        served_model_name="Qwen/Qwen3-235B",
        dtype="bfloat16",
        vllm_args=tuple(rest.split()),
        left_out=tuple(
            f"--{name}: {_SETTLED}" for name in ("host", "port", "worker-extension-cls")
        ),
    )


@pytest.mark.parametrize("deployment", official(), ids=str)
def test_every_deployment_of_the_network_is_taken_word_for_word(deployment: Official) -> None:
    wanted = read_deployment(deployment.model, "auto", deployment.words, SHIPPED)
    assert wanted.name == deployment.name
    is_trusted = deployment.model != "moonshotai/Kimi-K2.6"  # which names no --revision
    options = {
        "--tensor-parallel-size": str(wanted.tensor_parallel),
        "--served-model-name": wanted.served_model_name,
    }
    said = [word for word in deployment.words if is_trusted or word != "--trust-remote-code"]
    for option, value in options.items():
        if option in said:
            at = said.index(option)
            assert said[at : at + 2] == [option, value]
            del said[at : at + 2]
    assert list(wanted.vllm_args) == said
    assert [told.partition(":")[0] for told in wanted.left_out] == (
        [] if is_trusted else ["--trust-remote-code"]
    )


def test_what_is_not_said_is_not_wanted() -> None:
    assert read().model_dump(exclude_unset=True, exclude={"vllm_args", "left_out"}) == {
        "model": "acme/model"
    }
    assert "dtype" not in read("--dtype", "auto").model_fields_set


def test_the_last_of_two_counts() -> None:
    words = ("--tensor-parallel-size=2", "--dtype", "float32", "-tp", "4", "--dtype=bfloat16")
    wanted = read(*words, "--max-model-len", "512", "--max-model-len=1024")
    assert (wanted.tensor_parallel, wanted.dtype) == (4, "bfloat16")
    assert wanted.vllm_args == ("--max-model-len", "512", "--max-model-len", "1024")


@pytest.mark.parametrize(
    "words",
    [
        ["--max-logprobs", "-1"],
        ["--no-enable-prefix-caching"],
        ["--cudagraph-capture-sizes", "1", "2", "4"],
        ["--override-generation-config", '{"temperature": 0}'],
        ["--load-format", "safetensors"],
        ["--logprobs-mode", "processed_logprobs"],
        ["--tokenizer", "acme/tokenizer.v2", "--tokenizer-revision", "refs/pr/1"],
    ],
)
def test_values_of_all_shapes_pass(words: list[str]) -> None:
    assert read(*words).vllm_args == tuple(words)


@pytest.mark.parametrize(
    "words",
    [
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
        "--scheduler-cls x.y",
        "--kv-transfer-config {}",
        "--compilation-config.backend x",
        "--chat-template /etc/passwd",
        "--allowed-local-media-path /",
        "--code-revision main",
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
        read(*words.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("oops --seed 1", "'oops' follows no argument"),
        ("--enforce-eager /model", "--enforce-eager takes no value, and '/model' follows it"),
        ("--trust-remote-code=true", "--trust-remote-code takes no value"),
        ("--max-model-len --seed 1", "--max-model-len needs a value"),
        ("--revision main evil/model", "--revision takes one value, not 2"),
        ("--tensor-parallel-size 0", "--tensor-parallel-size is a number from 1 to 1024, not '0'"),
        ("--tensor-parallel-size two", "is a number from 1 to 1024, not 'two'"),
        (f"--tensor-parallel-size {'9' * 5000}", "--tensor-parallel-size cannot have the value"),
        ("--pipeline-parallel-size 1025", "is a number from 1 to 1024, not '1025'"),
        ("--served-model-name a b", "--served-model-name takes one value, not 2"),
        ("--served-model-name=", "--served-model-name cannot have the value ''"),
        (f"--served-model-name {'m' * 8000}", "--served-model-name cannot have the value 'mmm"),
        ("--served-model-name a\0b", "has a character that cannot be printed"),
        ("--served-model-name \x1b[31mred", "has a character that cannot be printed"),
        (
            "--load-format my.plugin",
            "--load-format may be auto, hf, safetensors, fastsafetensors here",
        ),
        ("--distributed-executor-backend my.Executor", "may be mp, uni here, not 'my.Executor'"),
        ("--worker-extension-cls x.y", "--worker-extension-cls may be gonka_poc.worker"),
        ("--generation-config /etc", "may be auto, vllm here"),
        ("--attention-backend my.Backend", "--attention-backend cannot have the value"),
        ("--tokenizer /etc", "--tokenizer cannot have the value '/etc' here"),
        ("--tokenizer ../x", "--tokenizer cannot have the value '../x' here"),
        ("--revision ../../../etc/passwd", "--revision cannot have the value"),
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
        read(*words.split(" "))
    assert said in str(error.value)


def test_an_engine_may_go_without_what_only_makes_it_faster() -> None:
    words = ["--seed", "1", "--kda-prefill-backend", "triton", "--no-enable-flashinfer-autotune"]
    assert harmless(words) == {"kda-prefill-backend", "no-enable-flashinfer-autotune"}
    assert without([*words, "--enforce-eager"], harmless(words)) == [
        "--seed",
        "1",
        "--enforce-eager",
    ]
    assert without(["-O3", "--kda_prefill_backend=triton"], {"kda-prefill-backend"}) == ["-O3"]
