"""Reads the arguments of `vllm serve` in a deployment.

Any client of the API may deploy a model. Therefore this module lists the allowed arguments and
refuses all others. No allowed argument runs code, opens a port, reads a file outside the model, or
changes access rights. vLLM's own parser checks the values when the engine starts.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, get_args

from poc_core.errors import ArgumentsError
from poc_core.serving.deployments import Deployment
from poc_core.serving.json_arguments import JSON_ARGUMENTS, check_json, names
from poc_core.serving.model_options import ALSO, Dtype, dtype_of
from poc_core.serving.trusted_models import why_not_trusted

# Arguments with one value.
_WITH_VALUE = names("""
    attention-backend block-size chat-template-content-format config-format cpu-offload-gb
    distributed-executor-backend dtype gdn-prefill-backend generation-config
    gpu-memory-utilization kda-decode-backend kda-prefill-backend kv-cache-dtype
    kv-cache-memory-bytes load-format logprobs-mode long-prefill-token-threshold
    max-cudagraph-capture-size max-logprobs max-long-partial-prefills max-model-len
    max-num-batched-tokens max-num-partial-prefills max-num-seqs max-parallel-loading-workers
    max-seq-len-to-capture mm-encoder-tp-mode mm-processor-cache-gb moe-backend
    num-gpu-blocks-override performance-mode pipeline-parallel-size quantization reasoning-parser
    revision rope-theta scheduling-policy seed swap-space tensor-parallel-size tokenizer
    tokenizer-mode tokenizer-revision tool-call-parser tool-strict-level worker-extension-cls
    """) | set(JSON_ARGUMENTS)
_WITH_VALUES = frozenset({"cudagraph-capture-sizes", "served-model-name"})
# Switches; most have a --no- form.
_SWITCHES = names("""
    async-scheduling calculate-kv-scales disable-cascade-attn disable-chunked-mm-input
    disable-custom-all-reduce disable-sliding-window enable-auto-tool-choice
    enable-chunked-prefill enable-expert-parallel enable-flashinfer-autotune
    enable-force-include-usage enable-prefix-caching enable-prompt-tokens-details enable-reasoning
    enforce-eager exclude-tools-when-tool-choice-none language-model-only
    return-tokens-as-token-ids skip-mm-profiling trust-remote-code
    """)
# Arguments that the node sets itself: ports, logs, number of engines, proofs, and keep-alives of
# streams (api/chat/streams.py), because the network node does not accept comments in streams.
_SETTLED = names("""
    data-parallel-size disable-fastapi-docs disable-log-requests disable-log-stats
    disable-uvicorn-access-log enable-log-requests host max-log-len port root-path
    sse-keep-alive-interval uvicorn-log-level worker-extension-cls
    """)
# Arguments that would also accept a class or a file. Only these values are allowed.
_VALUES = {
    "distributed-executor-backend": ("mp", "uni"),
    "dtype": (*get_args(Dtype), *ALSO),
    "generation-config": ("auto", "vllm"),
    "load-format": ("auto", "hf", "safetensors", "fastsafetensors"),
    "worker-extension-cls": ("gonka_poc.worker.PoCWorkerExtension",),  # the network's own proofs
}
# Arguments that only affect speed or memory. They are left out if the engine's vLLM lacks them.
_HARMLESS = names("""
    disable-chunked-mm-input enable-flashinfer-autotune enable-reasoning gdn-prefill-backend
    kda-decode-backend kda-prefill-backend language-model-only max-long-partial-prefills
    max-num-partial-prefills max-seq-len-to-capture mm-encoder-tp-mode performance-mode
    swap-space tool-strict-level
    """)
# All known names.
_KNOWN = _WITH_VALUE | _WITH_VALUES | _SETTLED | _SWITCHES | {f"no-{name}" for name in _SWITCHES}
# Forbidden names of vLLM that are beginnings of allowed names.
_WHOLE = {"chat-template", "config"}
_SHORT = {
    "-ac": "--attention-config",
    "-cc": "--compilation-config",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}
# Arguments that are fields of ModelOptions, with the field's name.
_OPTIONS = {
    "dtype": "dtype",
    "pipeline-parallel-size": "pipeline_parallel",
    "served-model-name": "served_model_name",
    "tensor-parallel-size": "tensor_parallel",
}
_COUNTS = {"pipeline-parallel-size", "tensor-parallel-size"}
_MOST_DEVICES = 1024  # devices of one engine
# Names and numbers: no path, no address, no class.
_PLAIN = re.compile(r"[\w+-]{1,200}|-?[0-9.]{1,40}", re.ASCII)
_REVISION = re.compile(r"\w[\w.-]{0,99}(/\w[\w.-]{0,99}){0,3}", re.ASCII)
_PATTERNS = {
    "revision": _REVISION,
    "served-model-name": re.compile(r"\S([^\t\n\r]{0,254}\S)?"),
    "tokenizer": re.compile(r"\w[\w.-]{0,99}(/\w[\w.-]{0,99})?", re.ASCII),  # a hub repository
    "tokenizer-revision": _REVISION,
}


def read_deployment(
    model: str, dtype: Dtype, words: Sequence[str], trusted: Collection[str] = ()
) -> Deployment:
    """Returns the deployment that `vllm serve MODEL --dtype DTYPE WORDS` describes. The last of
    repeated arguments counts. Raises ArgumentsError, which names the first such argument, if an
    argument is not allowed or lacks a value. `trusted`: the trusted repositories.
    """
    said: dict[str, Any] = {"model": model} | ({} if dtype == "auto" else {"dtype": dtype})
    rest: list[str] = []
    left_out: dict[str, str] = {}
    last: dict[str, str] = {}  # the last value of each argument
    trusts = False
    for name, values in _arguments(words):
        _check(name, values)
        last[name] = values[0] if values else ""
        if name == "served-model-name" and len(values) > 1:
            left_out[f"--{name} {' '.join(values[1:])}"] = "a node serves a model by one name"
        if name in _SETTLED:
            left_out[f"--{name}"] = "a node settles that by itself"
        elif name in _OPTIONS:
            said[_OPTIONS[name]] = _option(name, values[0])
        else:
            rest += [f"--{name}", *values]
        if name.endswith("trust-remote-code"):
            trusts = not name.startswith("no-")
    if said.get("dtype") == "auto":  # the host's dtype applies
        del said["dtype"]
    why_not = why_not_trusted(model, last, trusted) if trusts else None
    if why_not is not None:
        left_out["--trust-remote-code"] = why_not
    if not trusts or why_not is not None:
        rest = without(rest, {"trust-remote-code"})
    told = tuple(f"{name}: {why}" for name, why in left_out.items())
    return Deployment(**said, vllm_args=tuple(rest), left_out=told)


def harmless(words: Sequence[str]) -> set[str]:
    """Returns the names of those arguments in `words` that only affect speed or memory."""
    found = {_name(word.partition("=")[0]) for word in words if not _is_value(word)}
    return {name for name in found if name.removeprefix("no-") in _HARMLESS}


def without(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Returns the command-line tokens `words` without the arguments in `names` and their values."""
    kept, dropping = [], False
    for word in words:
        if not _is_value(word):
            dropping = _name(word.partition("=")[0]) in names
        if not dropping:
            kept.append(word)
    return kept


def _arguments(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields the name (without dashes) and the values of each argument in `words`."""
    name: str | None = None
    values: list[str] = []
    for word in words:
        if not all(char.isprintable() or char in "\t\n\r" for char in word):
            raise ArgumentsError(f"{word[:80]!r} has a character that cannot be printed.")
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
        name, values = _known(option), [value] if has_value else []
    if name is not None:
        yield name, values


def _is_value(word: str) -> bool:
    return not word.startswith("-") or word[1:2].isdigit()  # -1 is a number


def _name(option: str) -> str:
    return _SHORT.get(option, option).removeprefix("--").replace("_", "-")


def _known(option: str) -> str:
    """Returns the complete name of an argument whose name may be abbreviated, as in vLLM.
    ArgumentsError if the name is ambiguous, or not allowed in a deployment.
    """
    name = _name(option)
    if name in _KNOWN:
        return name
    may_begin_one = option.startswith("--") and name and name not in _WHOLE
    longer = sorted(one for one in _KNOWN if may_begin_one and one.startswith(name))
    if len(longer) == 1:
        return longer[0]
    if longer:
        raise ArgumentsError(
            f"{option[:80]} may stand for --{' or --'.join(longer[:5])}; write it in full."
        )
    raise ArgumentsError(
        f"{option[:80]} is not among the arguments that a deployment may bring here: leave it"
        " out, or the operator of the hosts gives it to `proofline workers` after --."
    )


def _check(name: str, values: list[str]) -> None:
    is_switch = name.removeprefix("no-") in _SWITCHES
    if is_switch and values:
        raise ArgumentsError(f"--{name} takes no value, and {values[0][:80]!r} follows it.")
    if name in _WITH_VALUE | _WITH_VALUES and not values:
        raise ArgumentsError(f"--{name} needs a value.")
    if name in _WITH_VALUE and len(values) > 1:
        raise ArgumentsError(f"--{name} takes one value, not {len(values)}.")
    for value in values:
        _check_value(name, value)


def _check_value(name: str, value: str) -> None:
    if not _is_value(value):  # --tokenizer=--trust-remote-code would become two arguments again
        raise ArgumentsError(f"--{name} cannot have the value {value[:80]!r}.")
    allowed = _VALUES.get(name)
    if allowed and value not in allowed:
        raise ArgumentsError(f"--{name} may be {', '.join(allowed)} here, not {value[:80]!r}.")
    if name in JSON_ARGUMENTS:
        check_json(name, value)
    elif name not in _SETTLED and not _PATTERNS.get(name, _PLAIN).fullmatch(value):
        raise ArgumentsError(f"--{name} cannot have the value {value[:80]!r} here.")


def _option(name: str, value: str) -> str | int:
    """Converts the value of an argument that is a field of ModelOptions to the field's type."""
    if name == "dtype":
        return dtype_of(value)
    if name not in _COUNTS:
        return value
    # Few digits, because Python refuses to read thousands of digits.
    fits = value.isascii() and value.isdigit() and len(value) <= len(str(_MOST_DEVICES))
    if not fits or not 1 <= int(value) <= _MOST_DEVICES:
        raise ArgumentsError(f"--{name} is a number from 1 to {_MOST_DEVICES}, not {value[:80]!r}.")
    return int(value)
