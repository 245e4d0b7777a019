"""Known faults of vLLM's releases: works around them, or explains them to the operator."""

import logging
import re
from importlib import import_module
from importlib.util import find_spec
from typing import Any

logger = logging.getLogger(__name__)

# Major number of Hopper's compute capability.
_HOPPER = 9
# vLLM's attention backend on Hopper for sparse latent attention without rotary dimensions, and the
# most query rows that FlashInfer plans for it (0.6.18 to 0.7.4).
_PLANNED_BACKEND = "FLASHINFER_MLA_SPARSE_SM90"
_MOST_PLANNED = 16_384
# Why vLLM's CPU build cannot load a family, by model type. vLLM fails during loading without a
# clear last line. Seen with release _CPU_RELEASE.
_CPU_RELEASE = "0.32."
_NOT_ON_CPUS = {
    "deepseek_v4": "it has no kernels for this family's numbers of 8 bits there",
    "glm5_next": "this family's kernels need Triton",
    "kimi_linear": "this family's kernels need Triton and CUTLASS",
}

# Error texts of vLLM or transformers for an unknown model class.
_UNKNOWN = re.compile(
    r"Model architectures \['(\w+)'.*?\] are not supported for now"
    r"|has model type `(\S+)` but Transformers does not recognize"
)
# The first release of vLLM with one of the network's models, by model type and architecture.
_KNOWN_SINCE = {"glm5_next": "0.30", "Glm5NextForConditionalGeneration": "0.30"}


def avoid(engine_args: Any) -> None:
    """Changes engine arguments with which vLLM would compute wrongly or fail. An operator's choice
    is changed only if it is a number of tokens that would end the engine.

    On CPUs, rotary_embedding of 0.32 reads the 3-dimensional queries of MLA wrongly (artifacts
    differ by an L2 distance of 0.6). On CPUs with AMX, 0.32 chooses an MLA backend that supports
    only bfloat16; loading other dtypes fails with "expect weight to be bfloat16". On GPUs, vLLM
    runs gated delta nets (Qwen3-Next, Qwen3.5) with FlashInfer even if FlashInfer is not installed.
    """
    from vllm.platforms import current_platform
    from vllm.transformers_utils.config import get_config

    if not current_platform.is_cpu():
        if (
            find_spec("flashinfer") is None
            and getattr(engine_args, "gdn_prefill_backend", "triton") is None
        ):
            engine_args.gdn_prefill_backend = "triton"
        _compute_what_is_planned(engine_args)
        return
    config = get_config(engine_args.model, engine_args.trust_remote_code, engine_args.revision)
    text = config.get_text_config()
    if not hasattr(text, "kv_lora_rank"):
        return
    operations = engine_args.compilation_config.custom_ops
    if not any("rotary" in name for name in operations):
        operations += [*([] if {"all", "none"} & {*operations} else ["all"]), "-rotary_embedding"]
    asked = str(getattr(engine_args, "dtype", "auto"))
    if asked == "auto":  # with auto, vLLM computes float32 models in bfloat16
        kept = str(getattr(text, "dtype", None) or getattr(config, "dtype", None))
        asked = "float16" if kept.endswith("float16") and "bfloat" not in kept else "bfloat16"
    if not asked.endswith("bfloat16") and not (
        engine_args.attention_backend or engine_args.attention_config.backend
    ):
        engine_args.attention_backend = _backend("CPU_MLA")


def _compute_what_is_planned(engine_args: Any) -> None:
    """Lowers the number of tokens of one forward to what FlashInfer can plan, if vLLM will use its
    plan.

    With more rows, FlashInfer 0.6.18 overwrites its own plan. The kernel then computes wrong rows,
    or ends the engine with an illegal memory access (flashinfer-ai/flashinfer#5170). FlashInfer
    0.7.2 raises an error instead, which ends the engine in a chat step. vLLM gives the kernel one
    row for each token of a long prompt (over index_topk tokens), of many short prompts, and of many
    short nonces.
    """
    from vllm.platforms import current_platform
    from vllm.transformers_utils.config import get_config

    asked = getattr(engine_args, "max_num_batched_tokens", None) or 0
    capability = current_platform.get_device_capability()
    on_hopper = current_platform.is_cuda() and capability and capability.major == _HOPPER
    if asked <= _MOST_PLANNED or not on_hopper:
        return
    chosen = engine_args.attention_backend or engine_args.attention_config.backend
    if chosen is None:
        try:
            text = get_config(
                engine_args.model, engine_args.trust_remote_code, engine_args.revision
            ).get_text_config()
        except Exception:  # vLLM reads the configuration again, and reports why it cannot
            return
        sparse = getattr(text, "index_topk", None) and getattr(text, "kv_lora_rank", None)
        if not sparse or getattr(text, "qk_rope_head_dim", None) != 0:
            return
    elif getattr(chosen, "name", chosen) != _PLANNED_BACKEND:
        return
    engine_args.max_num_batched_tokens = _MOST_PLANNED
    logger.warning(
        "a forward computes at most %d tokens at a time, not %d: with more, FlashInfer's attention"
        " ends the engine on Hopper GPUs (flashinfer-ai/flashinfer#5170)",
        _MOST_PLANNED,
        asked,
    )


def _backend(name: str) -> Any:
    registry: Any = import_module("vllm.v1.attention.backends.registry")
    return registry.AttentionBackendEnum.__members__.get(name)


def why_unknown(said: str) -> str | None:
    """Replaces vLLM's error text for an unknown model class, which lists hundreds of classes, with
    a short explanation. Returns None if `said` is another error.
    """
    from vllm.version import __version__

    found = _UNKNOWN.search(said)
    if found is None:
        return None
    kind = found[1] or found[2]
    since = _KNOWN_SINCE.get(kind)
    release = f"vLLM {since} or later" if since else "a release of vLLM that does"
    return (
        f"vLLM {__version__} does not know models of the kind {kind}; take {release}"
        " (PROOFLINE_VLLM_VERSION with Docker, else `pip install` into .venv)"
    )


def why_not_on_cpus(engine_args: Any) -> str | None:
    """Returns why vLLM's CPU build cannot compute this model; None if it can, and on GPUs."""
    from vllm.platforms import current_platform
    from vllm.transformers_utils.config import get_config
    from vllm.version import __version__

    if not (current_platform.is_cpu() and __version__.startswith(_CPU_RELEASE)):
        return None
    family = get_config(
        engine_args.model, engine_args.trust_remote_code, engine_args.revision
    ).model_type
    if family not in _NOT_ON_CPUS:
        return None
    return (
        f"vLLM {__version__} cannot compute {family} on CPUs, as {_NOT_ON_CPUS[family]}; deploy it"
        " on a host with GPUs"
    )


def why_not_startable(config: Any) -> str | None:
    """Returns why vLLM would fail after minutes of loading, or at the first chat request, or would
    compute proofs wrongly. Returns None if no such fault is known.

    With LoRA, a forward pass adds the adapters of chat's last step. Before the first step on CPUs,
    vLLM reads their numbers from uninitialised memory ("index 140415835513904 is out of bounds").
    vLLM 0.25 gives the 8-bit KV cache of sparse attention a shape that differs from the cache's
    memory (vllm-project/vllm#48378). On CPUs, a chat step with latent attention (MLA) and an 8-bit
    KV cache ends the engine (seen with 0.32).
    """
    from vllm.platforms import current_platform
    from vllm.version import __version__

    if config.lora_config is not None:
        return (
            "proofs would be computed with the adapters of chat's last step, and a node serves its"
            " model by one name; leave --enable-lora out"
        )
    dtype, text = str(config.cache_config.cache_dtype), config.model_config.hf_text_config
    if not (dtype.startswith("fp8") and hasattr(text, "kv_lora_rank")):
        return None
    if current_platform.is_cpu():
        return (
            f"vLLM {__version__} cannot answer chat on CPUs with latent attention's cache in 8"
            " bits; use --kv-cache-dtype auto"
        )
    # DeepSeek-V4 has other caches.
    if not (
        hasattr(text, "index_topk")
        and __version__.startswith("0.25.")
        and current_platform.is_cuda()
    ):
        return None
    capability = current_platform.get_device_capability()
    if dtype != "fp8_ds_mla" and (capability is None or capability.major != _HOPPER):
        return None  # newer GPUs have another layout
    return (
        f"vLLM {__version__} cannot keep sparse attention's cache in 8 bits (its issue 48378); use "
        "--kv-cache-dtype auto, or a later vLLM"
    )


def plan_for_caches_of_8_bits() -> None:
    """Passes FlashInfer the correct dtype of an 8-bit KV cache for sparse attention on Hopper. Must
    be called in each of vLLM's processes before attention is created.

    vLLM 0.30 and 0.31 pass the storage dtype uint8, which FlashInfer refuses: GLM-5.3-Flash does
    not start with the network's --kv-cache-dtype fp8 (vllm-project/vllm#55221; fixed in 0.32).
    """
    import torch
    from vllm.platforms import current_platform
    from vllm.version import __version__

    if (
        not __version__.startswith(("0.30.", "0.31."))
        or current_platform.is_cpu()
        or find_spec("flashinfer") is None
    ):
        return
    backend: Any = import_module("vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90")
    state: Any = backend._SM90State

    def planned(device: Any, n_heads: int, kept: torch.dtype, *args: Any, **more: Any) -> Any:
        numbers = torch.float8_e4m3fn if kept is torch.uint8 else kept
        return state(device, n_heads, numbers, *args, **more)

    backend._SM90State = planned


def receive_activations(runner: Any) -> None:
    """Allocates a pipeline stage's buffer for received activations, on CPUs. vLLM 0.32 does so in a
    warm-up that eager CPU engines skip. Without the buffer, the first chat request ends the engine.
    """
    import torch
    from vllm.distributed.parallel_state import get_pp_group

    if runner.device.type != "cpu" or get_pp_group().is_first_rank:
        return
    if getattr(runner, "intermediate_tensors", torch) is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def keep_generators(runner: Any) -> None:
    """Stops vLLM's V1 runner on CPUs from rewinding a seeded request's random generator after a
    part of the prompt. CPU generators cannot be rewound: the engine of 0.32 ended with "CPU
    Generator does not use offset". The random numbers then depend on how the prompt was divided.
    """
    import torch

    if runner.device.type != "cpu" or not hasattr(runner, "_update_states"):
        return

    class FixedOffset(torch.Generator):
        def get_offset(self) -> int:
            return 0

        def set_offset(self, _offset: int) -> torch.Generator:
            return self

    update = runner._update_states

    def update_states(scheduled: Any) -> Any:
        answer = update(scheduled)
        for new in scheduled.scheduled_new_reqs:
            state = runner.requests[new.req_id]
            if state.generator is not None:
                state.generator = FixedOffset().manual_seed(new.sampling_params.seed)
                row = runner.input_batch.req_id_to_index[new.req_id]
                runner.input_batch.generators[row] = state.generator
        return answer

    runner._update_states = update_states
