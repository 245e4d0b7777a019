"""Tiny models of the network's families: random weights for the configurations in this folder.

Weights are not committed: they are drawn from a fixed seed, so one release of torch always makes
the same bfloat16 weights of a configuration.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER = Path(__file__).resolve().parent
# All models get this model's tokenizer, and have its vocabulary of 512.
_TOKENIZER = FOLDER.parents[1] / "models" / "tiny-qwen3"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
# The image processors of multimodal families, which vLLM reads even without images.
_PROCESSORS = {
    "kimi_k25": {
        "image_processor_type": "Kimi_K25ImageProcessor",
        "media_proc_cfg": {
            "merge_kernel_size": 2,
            "temporal_merge_kernel_size": 4,
            "patch_size": 14,
            "in_patch_limit": 64,
            "in_patch_limit_each_frame": 64,
            "in_patch_limit_video": 64,
            "patch_limit_on_one_side": 8,
            "fixed_output_tokens": None,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    }
}
# Model type -> parts of weights' names as transformers saves them, and as vLLM reads them.
_RENAMED = {
    "deepseek_v4": ((".hc_head.hc_", ".hc_head_"), (".attn.norm.", ".attn.kv_norm.")),
    "kimi_k25": (
        ("language_model.model.blocks.", "language_model.model.layers."),
        ("model.mm_projector.", "mm_projector."),
    ),
    "kimi_linear": (("layers.0.block_sparse_moe.", "layers.0.mlp."),),
}
# Model types whose norm of queries replaces the division by the square root of the head size. With
# weights of 1, bfloat16 alone would move artifacts by 0.08.
_SCALED_BY_NORMS = ("gemma4_text", "gemma3n_text")
# Model types whose last norm vLLM applies with the logits. Weights of 1 would hide a missing norm.
_NORMED_LATE = ("kimi_linear", "qwen2")
# Names of DeepSeek-V4's weights that are published in 8 bits, and the size of their blocks.
_IN_8_BITS = re.compile(
    r"(\.attn|\.indexer|experts\.\d+|shared_experts)\.(wq_a|wq_b|wkv|wo_a|wo_b|w[123])\.weight$"
)
_BLOCK = 128
# Subfolder of an 8-bit model: a copy with the same numbers in bfloat16 for transformers, which has
# no 8-bit kernels on CPUs.
FOR_TRANSFORMERS = "unquantized"
# Written last: a model without this file is made again.
_DONE = "made-from.sha256"


def families() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def given(family: str) -> dict[str, Any]:
    """Returns the family's configuration."""
    config: dict[str, Any] = json.loads((FOLDER / f"{family}.json").read_text())
    return config


def text_config(family: str) -> dict[str, Any]:
    """Returns the configuration of the family's text model."""
    config = given(family)
    found: dict[str, Any] = config.get("text_config", config)
    return found


def is_quantized(family: str) -> bool:
    return "quantization_config" in given(family)


def make(family: str, folder: Path, **changes: Any) -> Path:
    """Makes the family's model in a subfolder of `folder`, unless it exists; returns the subfolder.

    `changes`: to the configuration of the text model.
    """
    config = given(family)
    config.get("text_config", config).update(changes)
    text = json.dumps(config, indent=2)
    stamp = hashlib.sha256((text + Path(__file__).read_text()).encode()).hexdigest()
    model = folder / family
    done = model / _DONE
    if done.exists() and done.read_text() == stamp:
        return model
    shutil.rmtree(model, ignore_errors=True)
    model.mkdir(parents=True)
    _save_weights(json.loads(text), model)
    for name in _TOKENIZER_FILES:
        shutil.copy(_TOKENIZER / name, model / name)
    if processor := _PROCESSORS.get(json.loads(text)["model_type"]):
        (model / "preprocessor_config.json").write_text(json.dumps(processor))
    # The original: not every vLLM reads what transformers writes.
    (model / "config.json").write_text(text)
    done.write_text(stamp)
    return model


def _save_weights(config: dict[str, object], model: Path) -> None:
    import transformers

    fields = {name: value for name, value in config.items() if name != "quantization_config"}
    model_type = str(fields.pop("model_type"))
    # A copy, because transformers changes the fields.
    read = transformers.AutoConfig.for_model(model_type, **deepcopy(fields))
    is_multimodal = "text_config" in config
    task = "ImageTextToText" if is_multimodal else "CausalLM"
    kind = getattr(transformers, f"AutoModelFor{task}")
    torch.manual_seed(0)
    loaded = kind.from_config(read)
    spread = read.get_text_config().initializer_range
    with torch.no_grad():
        for name, weight in sorted(loaded.state_dict().items()):
            if weight.is_floating_point() and weight.numel() and not weight.isfinite().all():
                weight.normal_(std=spread)  # transformers leaves it uninitialised
            if name.endswith(("e_score_correction_bias", "sinks")):
                weight.normal_(std=spread)
            if name.endswith("q_norm.weight") and model_type in _SCALED_BY_NORMS:
                weight.fill_(len(weight) ** -0.5)
            if name == "model.norm.weight" and model_type in _NORMED_LATE:
                weight.uniform_(0.25, 4)
            if name.endswith("tid2eid"):  # a token's experts
                scores = torch.rand(len(weight), read.n_routed_experts)
                weight.copy_(scores.topk(weight.shape[1]).indices)
    loaded.to(torch.bfloat16).save_pretrained(model)
    path = model / "model.safetensors"
    if "quantization_config" in config:
        rounded = in_8_bits(load_file(path))
        save_file(rounded, path, {"format": "pt"})
        _save_for_transformers(from_8_bits(rounded), config, model / FOR_TRANSFORMERS)
    for old, new in _RENAMED.get(model_type, ()):
        weights = {name.replace(old, new): weight for name, weight in load_file(path).items()}
        save_file(weights, path, {"format": "pt"})


def in_8_bits(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights with DeepSeek-V4's 8-bit weights in float8_e4m3fn.

    Each block of 128 x 128 has a float32 scale. Scales are powers of two, as vLLM's kernels on an
    H200 make them, so bfloat16 can represent all the numbers.
    """
    found = dict(weights)
    for name, weight in weights.items():
        if _IN_8_BITS.search(name):
            rows, columns = (size // _BLOCK for size in weight.shape)
            blocks = weight.float().view(rows, _BLOCK, columns, _BLOCK)
            largest = blocks.abs().amax((1, 3), keepdim=True)
            most = torch.finfo(torch.float8_e4m3fn).max
            scale = torch.exp2(torch.ceil(torch.log2(largest / most)))
            found[name] = (blocks / scale).view(weight.shape).to(torch.float8_e4m3fn)
            found[name.removesuffix("weight") + "scale"] = scale.view(rows, columns)
    return found


def from_8_bits(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of `in_8_bits` as bfloat16 numbers."""
    found = {}
    for name, weight in weights.items():
        if weight.dtype == torch.float8_e4m3fn:
            scale = weights[name.removesuffix("weight") + "scale"]
            each = scale.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
            found[name] = (weight.float() * each).to(torch.bfloat16)
        elif not name.endswith(".scale"):
            found[name] = weight
    return found


def _save_for_transformers(
    weights: dict[str, Tensor], config: dict[str, object], folder: Path
) -> None:
    """Saves a model for transformers.

    transformers does not find the last norm under its saved name and sets the weights to 1, which
    is their value anyway.
    """
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(plain))


def kept(path: Path, asked: str, ask: Callable[[], JsonValue]) -> JsonValue:
    """Returns the answer in a file if it belongs to `asked`; else calls `ask` and stores it.

    The file is in the model's folder, which is removed when another model is made.
    """
    stamp = hashlib.sha256(asked.encode()).hexdigest()
    if path.exists():
        found = json.loads(path.read_text())
        if found["asked"] == stamp:
            kept_answer: JsonValue = found["answer"]
            return kept_answer
    answer = ask()
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"asked": stamp, "answer": answer}))
    part.rename(path)
    return answer
