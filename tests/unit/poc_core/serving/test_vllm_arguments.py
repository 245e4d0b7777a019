"""What a deployment may tell vLLM, and what becomes of it."""

import pytest

from poc_core.errors import ArgumentsError
from poc_core.serving.deployments import Deployment
from poc_core.serving.trusted_models import SHIPPED
from poc_core.serving.vllm_arguments import _known, harmless, read_deployment, without
from tests.harness.marks import needs_vllm
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


def test_comments_in_streams_are_not_asked_for() -> None:
    """The network node drops an answer that has one."""
    wanted = read("--sse-keep-alive", "15", "--max-model-len", "4096")
    assert wanted.vllm_args == ("--max-model-len", "4096")
    assert wanted.left_out == (f"--sse-keep-alive-interval: {_SETTLED}",)


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
        *("--model /etc", "--config /etc/passwd", "--middleware os.system", "--api-key secret"),
        *("--ssl-keyfile x", "--uds /tmp/x", "--tool-parser-plugin /tmp/x.py"),
        *("--reasoning-parser-plugin /tmp/x.py", "--logits-processors x:y", "--worker-cls x.y"),
        *("--scheduler-cls x.y", "--kv-transfer-config {}", "--compilation-config.backend x"),
        *("--chat-template /etc/passwd", "--allowed-local-media-path /", "--code-revision main"),
        *("--enable-lora", "--lora-modules a=/x", "--allowed-local", "--chat-temp.x"),
        *("--no-such-argument 3", "-O3", "-O 3", "-n 2", "---seed 1", "--", "-"),
    ],
)
def test_what_runs_code_opens_ports_or_is_not_known_is_refused_as_it_was_written(
    words: str,
) -> None:
    with pytest.raises(ArgumentsError) as error:
        read(*words.split())
    refused = "is not among the arguments that a deployment may bring here"
    assert str(error.value).startswith(f"{words.split()[0]} {refused}")


@pytest.mark.parametrize(
    ("words", "whole"),
    [
        ("--max-model 4096", "--max-model-len 4096"),
        ("--max_model=4096", "--max-model-len 4096"),
        ("--max_model_len 4096", "--max-model-len 4096"),
        ("--gpu-mem 0.9", "--gpu-memory-utilization 0.9"),
        ("--no-enable-prefix", "--no-enable-prefix-caching"),
        ("--enforce", "--enforce-eager"),
        ("--compilation {}", "--compilation-config {}"),
        ("--perf throughput", "--performance-mode throughput"),
    ],
)
def test_a_name_may_be_written_in_vllms_other_ways(words: str, whole: str) -> None:
    assert list(read(*words.split()).vllm_args) == whole.split()


def test_short_names_of_options_of_the_node_are_taken() -> None:
    wanted = read("--tensor-par", "4", "-pp=2", "--served", "q", "--pipeline_parallel_size", "3")
    assert (wanted.tensor_parallel, wanted.pipeline_parallel, wanted.name) == (4, 3, "q")


def test_a_beginning_of_several_names_is_asked_for_in_full() -> None:
    with pytest.raises(ArgumentsError) as error:
        read("--max-num", "4")
    assert str(error.value) == (
        "--max-num may stand for --max-num-batched-tokens or --max-num-partial-prefills or"
        " --max-num-seqs; write it in full."
    )


@needs_vllm
@pytest.mark.xdist_group("engines")  # whose process has loaded vLLM
def test_a_beginning_stands_for_the_argument_that_vllm_takes_it_for() -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from workers.vllm.release import api_server

    names = {
        option.removeprefix("--")
        for action in api_server.serve_parser(FlexibleArgumentParser())._actions  # noqa: SLF001
        for option in action.option_strings
        if option.startswith("--")
    }
    assert {"performance-mode", "sse-keep-alive-interval"} <= names
    beginnings = {name[:length] for name in names for length in range(1, len(name) + 1)}
    for beginning in beginnings:
        vllms = {beginning} & names or {name for name in names if name.startswith(beginning)}
        try:
            ours = _known(f"--{beginning}")
        except ArgumentsError:
            continue
        # One that it has no more, or a beginning that it does not take: given on in full.
        assert ours in vllms or ours not in names, beginning


def test_a_model_is_served_by_the_first_of_several_names() -> None:
    wanted = read("--served-model-name", "a", "b", "c", "--seed", "1")
    assert (wanted.name, wanted.vllm_args) == ("a", ("--seed", "1"))
    assert wanted.left_out == ("--served-model-name b c: a node serves a model by one name",)


@pytest.mark.parametrize(("word", "is_called"), [("float16", "float16"), ("half", "float16")])
def test_a_number_format_may_have_vllms_other_name(word: str, is_called: str) -> None:
    assert read("--dtype", word).dtype == is_called


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
        ("--served-model-name=", "--served-model-name cannot have the value ''"),
        (f"--served-model-name {'m' * 8000}", "--served-model-name cannot have the value 'mmm"),
        ("--served-model-name a\0b", "has a character that cannot be printed"),
        ("--served-model-name \x1b[31mred", "has a character that cannot be printed"),
        ("--load-format my.plugin", "may be auto, hf, safetensors, fastsafetensors here"),
        ("--distributed-executor-backend my.Executor", "may be mp, uni here, not 'my.Executor'"),
        ("--worker-extension-cls x.y", "--worker-extension-cls may be gonka_poc.worker"),
        ("--generation-config /etc", "may be auto, vllm here"),
        ("--attention-backend my.Backend", "--attention-backend cannot have the value"),
        ("--tokenizer /etc", "--tokenizer cannot have the value '/etc' here"),
        ("--tokenizer ../x", "--tokenizer cannot have the value '../x' here"),
        ("--revision ../../../etc/passwd", "--revision cannot have the value"),
        ("--tokenizer=--trust-remote-code", "cannot have the value '--trust-remote-code'"),
        ("--served-model-name=--trust-remote-code", "--served-model-name cannot have the value"),
        ("--dtype int8", "--dtype may be auto, float32, bfloat16, float16, half, float here"),
    ],
)
def test_what_is_wrong_is_said(words: str, said: str) -> None:
    with pytest.raises(ArgumentsError) as error:
        read(*words.split(" "))
    assert said in str(error.value)


def test_an_engine_may_go_without_what_only_makes_it_faster() -> None:
    words = ["--seed", "1", "--kda-prefill-backend", "triton", "--no-enable-flashinfer-autotune"]
    assert harmless(words) == {"kda-prefill-backend", "no-enable-flashinfer-autotune"}
    left = without([*words, "--enforce-eager"], harmless(words))
    assert left == ["--seed", "1", "--enforce-eager"]
    assert without(["-O3", "--kda_prefill_backend=triton"], {"kda-prefill-backend"}) == ["-O3"]
