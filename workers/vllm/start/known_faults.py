"""What releases of vLLM are known to do wrongly, told or avoided before the model is loaded."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

# Major number of Hopper's compute capability.
_HOPPER = 9


def avoid(engine_args: Any) -> None:
    """Avoids what vLLM computes wrongly or not at all; an operator's choice stands.

    On CPUs, rotary_embedding of 0.32 reads the 3-dimensional queries of MLA wrongly: L2 0.6 of
    artifacts. On GPUs, gated delta nets (Qwen3-Next, Qwen3.5) are left to FlashInfer even where
    that is not installed.
    """
    from vllm.platforms import current_platform
    from vllm.transformers_utils.config import get_config

    if not current_platform.is_cpu():
        if (
            find_spec("flashinfer") is None
            and getattr(engine_args, "gdn_prefill_backend", "triton") is None
        ):
            engine_args.gdn_prefill_backend = "triton"
        return
    config = get_config(engine_args.model, engine_args.trust_remote_code, engine_args.revision)
    operations = engine_args.compilation_config.custom_ops
    if hasattr(config.get_text_config(), "kv_lora_rank") and not any(
        "rotary" in name for name in operations
    ):
        operations += [*([] if {"all", "none"} & {*operations} else ["all"]), "-rotary_embedding"]


def why_not_startable(config: Any) -> str | None:
    """Why vLLM would fail with its configuration, after minutes or at chat's first answer.

    0.25 gives sparse attention's cache in 8 bits another shape than its memory
    (vllm-project/vllm#48378). On CPUs a step of chat's with latent attention (MLA) ends the engine
    where the cache is in 8 bits (seen with 0.32).
    """
    from vllm.platforms import current_platform
    from vllm.version import __version__

    dtype, text = str(config.cache_config.cache_dtype), config.model_config.hf_text_config
    if not (dtype.startswith("fp8") and hasattr(text, "kv_lora_rank")):
        return None
    if current_platform.is_cpu():
        return (
            f"vLLM {__version__} cannot answer chat on CPUs with latent attention's cache in 8"
            " bits; use --kv-cache-dtype auto"
        )
    # DeepSeek-V4 has caches of its own.
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
