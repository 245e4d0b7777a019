"""Which arguments of `vllm serve` a deployment may bring, and what they say of parallelism, name
and number format.

Whoever reaches the API may deploy, so the list names what is allowed: nothing on it runs code,
opens a port, reads a file that is no model's, or changes who may ask. vLLM's own parser checks the
values later, where the engine starts.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from poc_core.errors import ArgumentsError

DTYPES = ("auto", "float32", "bfloat16")  # those in which proofs are known to be right

# Of the command line, with one value or more.
_WITH_VALUE = """
    attention-backend block-size chat-template-content-format config-format cpu-offload-gb
    cudagraph-capture-sizes default-chat-template-kwargs distributed-executor-backend dtype
    generation-config gpu-memory-utilization hf-overrides kv-cache-dtype kv-cache-memory-bytes
    limit-mm-per-prompt load-format long-prefill-token-threshold max-cudagraph-capture-size
    max-logprobs max-long-partial-prefills max-model-len max-num-batched-tokens
    max-num-partial-prefills max-num-seqs max-parallel-loading-workers max-seq-len-to-capture
    mm-processor-cache-gb mm-processor-kwargs moe-backend num-gpu-blocks-override
    override-generation-config pipeline-parallel-size quantization reasoning-parser revision
    rope-scaling rope-theta scheduling-policy seed served-model-name swap-space
    tensor-parallel-size tokenizer tokenizer-mode tokenizer-revision tool-call-parser
"""
# Switches; most have a --no- beside them.
_SWITCHES = """
    async-scheduling calculate-kv-scales disable-cascade-attn disable-chunked-mm-input
    disable-custom-all-reduce disable-sliding-window enable-auto-tool-choice
    enable-chunked-prefill enable-expert-parallel enable-force-include-usage
    enable-prefix-caching enable-prompt-tokens-details enable-reasoning enforce-eager
    exclude-tools-when-tool-choice-none language-model-only return-tokens-as-token-ids
    skip-mm-profiling
"""
# What a node settles by itself: where its engines listen, what they log, how many of them there
# are.
_IGNORED = """
    data-parallel-size disable-fastapi-docs disable-log-requests disable-log-stats
    disable-uvicorn-access-log enable-log-requests host max-log-len port root-path
    uvicorn-log-level
"""
# Of these only some values are harmless: others are the name of a class to import, or a file.
_VALUES = {
    "distributed-executor-backend": ("mp", "uni"),
    "dtype": DTYPES,
    "generation-config": ("auto", "vllm"),
    "load-format": ("auto", "hf", "safetensors", "fastsafetensors"),
}
_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
}


@dataclass(frozen=True)
class ServeArguments:
    """What the arguments of `vllm serve` say; None where they say nothing."""

    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    served_model_name: str | None = None
    dtype: str | None = None
    rest: tuple[str, ...] = ()  # for vLLM itself
    ignored: tuple[str, ...] = ()  # names of those that a node settles by itself


def read_arguments(words: Sequence[str], also_allowed: Collection[str] = ()) -> ServeArguments:
    """The words that would follow `vllm serve MODEL`, understood.

    `also_allowed`: names such as --trust-remote-code that this node's operator allows beside those
    here. ArgumentsError names the first argument that may not be, or has not the value that it
    needs.
    """
    rest: list[str] = []
    ignored: list[str] = []
    said: dict[str, str] = {}
    extra = {_name(word) for word in also_allowed}
    for name, values in _arguments(words):
        if name in _IGNORED.split():
            ignored.append(f"--{name}")
            continue
        _check(name, values, extra)
        if name in ("tensor-parallel-size", "pipeline-parallel-size", "served-model-name", "dtype"):
            said[name] = _only(name, values)
        else:
            rest += [f"--{name}", *values]
    return ServeArguments(
        tensor_parallel=_count(said, "tensor-parallel-size"),
        pipeline_parallel=_count(said, "pipeline-parallel-size"),
        served_model_name=said.get("served-model-name"),
        dtype=said.get("dtype"),
        rest=tuple(rest),
        ignored=tuple(ignored),
    )


def _arguments(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(name without dashes, values) of each."""
    name: str | None = None
    values: list[str] = []
    for word in words:
        if _is_value(word):
            if name is None:
                raise ArgumentsError(
                    f"{word[:80]!r} follows no argument; they look like --max-model-len 4096."
                )
            values.append(word)
            continue
        if name is not None:
            yield name, values
        option, has_value, value = word.partition("=")
        name, values = _name(option), [value] if has_value else []
    if name is not None:
        yield name, values


def _is_value(word: str) -> bool:
    return not word.startswith("-") or word[1:2].isdigit()  # -1 is a number


def _name(option: str) -> str:
    return _SHORT.get(option, option).removeprefix("--").replace("_", "-")


def _check(name: str, values: list[str], extra: Collection[str]) -> None:
    is_switch = name.removeprefix("no-") in _SWITCHES.split()
    if not is_switch and name not in _WITH_VALUE.split() and name not in extra:
        raise ArgumentsError(
            f"--{name[:80]} is not among the arguments that a deployment may bring here: leave it"
            " out, or whoever runs this node adds it to POC_DEPLOY_ARGUMENTS."
        )
    for value in values:
        if not _is_value(value):  # --tokenizer=--trust-remote-code would become two arguments again
            raise ArgumentsError(f"--{name} cannot have the value {value[:80]!r}.")
    if is_switch and values:
        raise ArgumentsError(f"--{name} takes no value, and {values[0][:80]!r} follows it.")
    if name in _WITH_VALUE.split() and not values:
        raise ArgumentsError(f"--{name} needs a value.")
    allowed = _VALUES.get(name)
    if allowed and name not in extra and not set(values) <= set(allowed):
        raise ArgumentsError(f"--{name} may be {', '.join(allowed)} here, not {values[0][:80]!r}.")


def _only(name: str, values: list[str]) -> str:
    if len(values) != 1:
        raise ArgumentsError(f"--{name} takes one value, not {len(values)}.")
    return values[0]


def _count(said: dict[str, str], name: str) -> int | None:
    if name not in said:
        return None
    if not said[name].isascii() or not said[name].isdigit() or int(said[name]) < 1:
        raise ArgumentsError(f"--{name} is a number from 1, not {said[name][:80]!r}.")
    return int(said[name])
