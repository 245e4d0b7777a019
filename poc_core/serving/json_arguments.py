"""The allowed keys and values in JSON arguments of a deployment's `vllm serve`. Other keys or
values might make vLLM import a class, load another model or write to a folder.
"""

import json
import re
from typing import Any, NoReturn

from pydantic import JsonValue

from poc_core.errors import ArgumentsError


def names(text: str) -> frozenset[str]:
    """Splits a text at white space, and returns its words."""
    return frozenset(text.split())


# Allowed keys by argument. None allows all keys that do not match _CODE_OR_PLACE.
JSON_ARGUMENTS: dict[str, frozenset[str] | None] = {
    "additional-config": names("gdn_prefill_backend kda_decode_backend kda_prefill_backend"),
    "attention-config": names("""
        backend backend_per_kind disable_flashinfer_prefill disable_flashinfer_q_quantization
        flash_attn_max_num_splits_for_cuda_graph flash_attn_version indexer_kv_dtype
        mla_prefill_backend sparse_mla_force_mqa sparse_mla_prefill_workspace_factor
        tokenspeed_mla_min_split_kv use_cudnn_prefill use_prefill_query_quantization
        use_trtllm_attention use_trtllm_ragged_deepseek_prefill
        """),
    "compilation-config": names("""
        backend compile_mm_encoder compile_ranges_endpoints compile_sizes
        cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_mm_encoder cudagraph_mode
        cudagraph_num_of_warmups cudagraph_specialize_lora custom_ops fast_moe_cold_start level
        max_cudagraph_capture_size mode pass_config use_inductor_graph_partition
        """),
    "default-chat-template-kwargs": None,
    "hf-overrides": None,
    "limit-mm-per-prompt": None,
    "mm-processor-kwargs": None,
    "override-generation-config": None,
    "rope-scaling": None,
    "speculative-config": names("""
        disable_padded_drafter_batch draft_tensor_parallel_size method num_speculative_tokens
        prompt_lookup_max prompt_lookup_min
        """),
}
# Allowed values of keys whose values vLLM may use as the name of code or of a model.
_NAMES = {
    ("compilation-config", "backend"): ("eager", "inductor"),
    ("speculative-config", "method"): ("deepseek_mtp", "mtp", "ngram"),
}
_CODE_OR_PLACE = re.compile(
    r"auth|auto_?map|class|cls|(^|_)code|(^|_)dir|(^|_)file|hf_token|import|module|path|plugin|processor"
    r"|repo|revision|script|template|tokenizer|trust|ur[il]",
    re.IGNORECASE,
)
_NAME = re.compile(r"[\w +-]{0,64}", re.ASCII)  # excludes classes, paths and addresses
_DEEPEST = 4


def check_json(argument: str, text: str) -> None:
    """Raises ArgumentsError unless `text` is JSON and allowed as the value of `argument`."""

    def object_of(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
        if len({key for key, _ in pairs}) < len(pairs):  # parsers differ in which of them they use
            raise ValueError("a key twice")
        return dict(pairs)

    def refused(constant: str) -> NoReturn:
        raise ValueError(constant)

    try:
        value = json.loads(text, object_pairs_hook=object_of, parse_constant=refused)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ArgumentsError(
            f"--{argument} takes a JSON object without repeated keys, such as"
            f' {{"mode": 0}}, not {text[:80]!r}.'
        )
    allowed = JSON_ARGUMENTS[argument]
    for key, one in value.items():
        if key not in allowed if allowed else _CODE_OR_PLACE.search(key):
            _refuse_key(argument, key)
        values = _NAMES.get((argument, key))
        if values and one not in values:
            raise ArgumentsError(
                f"--{argument}: {key} may be {', '.join(values)} here, not {str(one)[:80]!r}."
            )
        _check_value(argument, one, _DEEPEST)


def _check_value(argument: str, value: Any, deepest: int) -> None:
    if isinstance(value, str) and not _NAME.fullmatch(value):
        raise ArgumentsError(f"--{argument} cannot have {value[:80]!r} in it: names and numbers.")
    if isinstance(value, dict | list) and not deepest:
        raise ArgumentsError(f"--{argument} is nested too deep.")
    if isinstance(value, dict):
        for key in value:
            if _CODE_OR_PLACE.search(key):
                _refuse_key(argument, key)
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            _check_value(argument, one, deepest - 1)


def _refuse_key(argument: str, key: str) -> NoReturn:
    raise ArgumentsError(
        f"--{argument} has the key {key[:80]!r}, which a deployment may not bring here: leave it"
        " out."
    )
