"""Models that the network runs: their public configurations, how operators serve them, and the
rates that operators publish."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# GPUs of the hosts whose rates are published.
HOST_GPUS = 8


@dataclass(frozen=True)
class NetworkModel:
    """What a benchmark needs to know of one model."""

    config: Mapping[str, Any]  # as published beside the weights
    # Arguments of `vllm serve` in the network's own deployments, but for memory and chat.
    arguments: Sequence[str] = ()
    # GPU -> nonces a minute of HOST_GPUS at seq_len 1024, as operators published on 2026-09-23.
    published: Mapping[str, int] = field(default_factory=dict)


_BLOCK_FP8 = {
    "quant_method": "fp8",
    "fmt": "float8_e4m3fn",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}

NETWORK_MODELS: dict[str, NetworkModel] = {
    "minimax-m2.7": NetworkModel(
        config={
            "architectures": ["MiniMaxM2ForCausalLM"],
            "model_type": "minimax_m2",
            "dtype": "bfloat16",
            "hidden_size": 3072,
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rotary_dim": 64,
            "intermediate_size": 1536,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "rms_norm_eps": 1e-06,
            "rope_theta": 5000000,
            "max_position_embeddings": 204800,
            "vocab_size": 200064,
            "tie_word_embeddings": False,
            "quantization_config": _BLOCK_FP8
            | {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        },
        arguments=(
            "--kv-cache-dtype=fp8",
            "--moe-backend=triton",
            "--attention-backend=FLASHINFER",
        ),
        published={"H100": 4736, "H200": 6912, "B200": 10496, "B300": 14336},
    ),
}
