"""The models that the network runs: their public configurations, the `vllm serve` arguments of
operators, and the rates that operators publish.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# GPUs of the hosts with published rates, and the rates' seq_len and date.
HOST_GPUS = 8
PUBLISHED_SEQ_LEN = 1024
PUBLISHED_ON = "2026-09-23"


@dataclass(frozen=True)
class NetworkModel:
    """A model that the network runs: its configuration, operators' `vllm serve` arguments and
    published rates.
    """

    # the model's configuration file, reduced to the parts that compute proofs
    config: Mapping[str, Any]
    # Arguments of `vllm serve` in the network's deployments that affect the speed of proofs.
    arguments: Sequence[str] = ()
    # Further arguments that need FlashInfer, which is not installed everywhere.
    with_flashinfer: Sequence[str] = ()
    # GPU -> nonces a minute of HOST_GPUS such GPUs.
    published: Mapping[str, int] = field(default_factory=dict)

    def arguments_here(self) -> list[str]:
        """Returns those of the operators' arguments that work with the packages installed on this
        machine.
        """
        has_flashinfer = importlib.util.find_spec("flashinfer") is not None
        return [*self.arguments, *(self.with_flashinfer if has_flashinfer else ())]


def network_model(name: str) -> NetworkModel | None:
    """Returns the network's model with this name; None if the network does not run such a model.

    `name`: a value of --dimensions, a directory, or a repository on the Hugging Face hub.
    """
    return NETWORK_MODELS.get(name.rpartition("/")[2].lower().removesuffix(_EDITION))


_EDITION = "-0731"  # in the name of DeepSeek-V4-Flash's repository
_BLOCK_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
_DSA_LAYERS = range(3, 45, 4)  # of GLM-5.3-Flash; its other layers have linear attention

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
        arguments=("--kv-cache-dtype=fp8", "--moe-backend=triton"),
        with_flashinfer=("--attention-backend=FLASHINFER",),
        published={"H100": 4736, "H200": 6912, "B200": 10496, "B300": 14336},
    ),
    "deepseek-v4-flash": NetworkModel(  # the edition of 31 July: experts in MXFP4
        config={
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "dtype": "bfloat16",
            "expert_dtype": "fp4",
            "hidden_size": 4096,
            "num_hidden_layers": 43,
            "num_attention_heads": 64,
            "num_key_value_heads": 1,
            "head_dim": 512,
            "qk_rope_head_dim": 64,
            "q_lora_rank": 1024,
            "o_lora_rank": 1024,
            "o_groups": 8,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 6,
            "num_hash_layers": 3,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "swiglu_limit": 10.0,
            "hidden_act": "silu",
            "sliding_window": 128,
            "compress_ratios": [0, 0, *(4 if layer % 2 == 0 else 128 for layer in range(2, 43))],
            "compress_rope_theta": 160000,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 512,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-06,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000,
            "rope_scaling": {
                "type": "yarn",
                "factor": 16,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 65536,
            },
            "max_position_embeddings": 1048576,
            "vocab_size": 129280,
            "tie_word_embeddings": False,
            "quantization_config": _BLOCK_FP8 | {"scale_fmt": "ue8m0"},
        },
        arguments=("--kv-cache-dtype=fp8",),
        published={"H100": 3072, "H200": 4864, "B200": 9216, "B300": 13824},
    ),
    "glm-5.3-flash": NetworkModel(
        config={
            "architectures": ["Glm5NextForConditionalGeneration"],
            "model_type": "glm5_next",
            "dtype": "bfloat16",
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "glm5_next_text",
                "dtype": "bfloat16",
                "hidden_size": 4096,
                "intermediate_size": 12288,
                "num_hidden_layers": 45,
                "num_attention_heads": 64,
                "num_key_value_heads": 64,
                "q_lora_rank": 1536,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 256,
                "qk_rope_head_dim": 0,
                "v_head_dim": 256,
                "layer_types": [
                    "indexed_attention" if layer in _DSA_LAYERS else "linear_attention"
                    for layer in range(45)
                ],
                "indexer_types": ["full"] * 45,
                "index_n_heads": 32,
                "index_head_dim": 128,
                "index_topk": 2048,
                "index_kpool": 4,
                "linear_num_heads": 64,
                "linear_head_dim": 128,
                "linear_conv_kernel_dim": 4,
                "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42,
                "first_k_dense_replace": 3,
                "moe_intermediate_size": 2048,
                "n_routed_experts": 288,
                "n_shared_experts": 1,
                "num_experts_per_tok": 8,
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
                "routed_scaling_factor": 2.5,
                "swiglu_limit": 10.0,
                "mla_use_nope": True,
                "indexer_rope_interleave": False,
                "mhc": True,
                "hc_mult": 4,
                "hc_sinkhorn_iters": 20,
                "rms_norm_eps": 1e-05,
                "max_position_embeddings": 1048576,
                "vocab_size": 154880,
                "tie_word_embeddings": False,
            },
            "vision_config": {"model_type": "glm5_next_vision", "out_hidden_size": 4096},
            "quantization_config": _BLOCK_FP8,
        },
        # The last two need vLLM 0.30 or later; older releases do not get unknown arguments.
        arguments=("--block-size=2304", "--kda-prefill-backend=triton", "--language-model-only"),
        # Without FlashInfer, vLLM 0.30 has no kernel for sparse attention with an 8-bit cache on
        # Hopper.
        with_flashinfer=("--kv-cache-dtype=fp8",),
        published={"H100": 1775, "H200": 2878, "B200": 5454, "B300": 8120},
    ),
    "kimi-k2.6": NetworkModel(  # its language model, which alone computes proofs
        config={
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "dtype": "bfloat16",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 384,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.827,
            "rms_norm_eps": 1e-05,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
            "max_position_embeddings": 262144,
            "vocab_size": 163840,
            "tie_word_embeddings": False,
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "quantization_status": "compressed",
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {
                            "num_bits": 4,
                            "type": "int",
                            "symmetric": True,
                            "strategy": "group",
                            "group_size": 32,
                        },
                    }
                },
                "ignore": [
                    "lm_head",
                    "re:.*self_attn.*",
                    "re:.*shared_experts.*",
                    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
                ],
            },
        },
        arguments=("--enable-expert-parallel",),
        with_flashinfer=("--attention-backend=FLASHINFER_MLA",),
    ),
}
