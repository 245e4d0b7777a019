"""Tiny models of the families that the network runs, with random weights, from the configurations
beside this file.

    python -m bench.families.make FOLDER [FAMILY ...]

Weights are never committed: on one release of torch the same configuration gives the same weights,
bfloat16 numbers from a fixed seed.
"""

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER = Path(__file__).resolve().parent
# Whose tokenizer they get: all have its vocabulary of 512.
_TOKENIZER = FOLDER.parents[1] / "models" / "tiny-qwen3"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
# What vLLM wants to know of a wrapper's pictures, also where it takes none.
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
# Parts of weights' names that transformers saves otherwise than vLLM reads them, by model type.
_RENAMED = {
    "deepseek_v4": ((".hc_head.hc_", ".hc_head_"), (".attn.norm.", ".attn.kv_norm.")),
    "kimi_k25": (
        ("language_model.model.blocks.", "language_model.model.layers."),
        ("model.mm_projector.", "mm_projector."),
    ),
    "kimi_linear": (("layers.0.block_sparse_moe.", "layers.0.mlp."),),
}
# Model types whose attention does not divide by the square root of the head size: weights of the
# norm of queries do. With ones there, scores are so far apart that bfloat16 alone moves artifacts
# by 0.08.
_SCALED_BY_NORMS = ("gemma4_text", "gemma3n_text")
# Model types whose last norm vLLM leaves to the logits: ones there would hide one that is left out.
_NORMED_LATE = ("kimi_linear", "qwen2")
# What of DeepSeek-V4 is published in 8 bits, and in which blocks.
_IN_8_BITS = re.compile(
    r"(\.attn|\.indexer|experts\.\d+|shared_experts)\.(wq_a|wq_b|wkv|wo_a|wo_b|w[123])\.weight$"
)
_BLOCK = 128
# Within a model of 8 bits: a copy with the same numbers for transformers, which has no kernels for
# these on CPUs.
FOR_TRANSFORMERS = "unquantized"
# Written when all else is: what has none is made again.
_DONE = "made-from.sha256"


def families() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def given(family: str) -> dict[str, Any]:
    """The family's configuration."""
    config: dict[str, Any] = json.loads((FOLDER / f"{family}.json").read_text())
    return config


def text_config(family: str) -> dict[str, Any]:
    """That of the model in it which writes text."""
    config = given(family)
    found: dict[str, Any] = config.get("text_config", config)
    return found


def is_quantized(family: str) -> bool:
    return "quantization_config" in given(family)


def make(family: str, folder: Path, **changes: Any) -> Path:
    """The family's model in a folder of its own within `folder`, made unless it is there
    already.

    `changes`: to the configuration of the model that writes text.
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
    # As given: transformers writes its own reading of it, which not every vLLM reads.
    (model / "config.json").write_text(text)
    done.write_text(stamp)
    return model


def _save_weights(config: dict[str, object], model: Path) -> None:
    import transformers

    fields = {
        name: value
        for name, value in config.items()
        if name not in ("model_type", "quantization_config")
    }
    read = transformers.AutoConfig.for_model(
        str(config["model_type"]), **deepcopy(fields)
    )  # it writes into them
    kind = (
        transformers.AutoModelForImageTextToText
        if "text_config" in config
        else transformers.AutoModelForCausalLM
    )
    torch.manual_seed(0)
    loaded = kind.from_config(read)
    spread = read.get_text_config().initializer_range
    with torch.no_grad():
        for name, weight in sorted(loaded.state_dict().items()):
            if weight.is_floating_point() and weight.numel() and not weight.isfinite().all():
                weight.normal_(std=spread)  # what the library leaves as it finds it
            if name.endswith(("e_score_correction_bias", "sinks")):
                weight.normal_(std=spread)
            if name.endswith("q_norm.weight") and config["model_type"] in _SCALED_BY_NORMS:
                weight.fill_(len(weight) ** -0.5)
            if name == "model.norm.weight" and config["model_type"] in _NORMED_LATE:
                weight.uniform_(0.25, 4)
            if name.endswith("tid2eid"):  # a token's experts
                weight.copy_(
                    torch.rand(len(weight), read.n_routed_experts).topk(weight.shape[1]).indices
                )
    loaded.to(torch.bfloat16).save_pretrained(model)
    path = model / "model.safetensors"
    if "quantization_config" in config:
        rounded = in_8_bits(load_file(path))
        save_file(rounded, path, {"format": "pt"})
        _save_for_transformers(from_8_bits(rounded), config, model / FOR_TRANSFORMERS)
    for old, new in _RENAMED.get(str(config["model_type"]), ()):
        save_file(
            {name.replace(old, new): weight for name, weight in load_file(path).items()},
            path,
            {"format": "pt"},
        )


def in_8_bits(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in float8_e4m3fn with a float32 scale for each block of 128 x 128, where DeepSeek-V4
    is published so.

    Scales are powers of two, as vLLM's kernels on an H200 would make them, and bfloat16 has all
    such numbers.
    """
    found = dict(weights)
    for name, weight in weights.items():
        if _IN_8_BITS.search(name):
            rows, columns = (size // _BLOCK for size in weight.shape)
            blocks = weight.float().view(rows, _BLOCK, columns, _BLOCK)
            largest = blocks.abs().amax((1, 3), keepdim=True)
            scale = torch.exp2(
                torch.ceil(torch.log2(largest / torch.finfo(torch.float8_e4m3fn).max))
            )
            found[name] = (blocks / scale).view(weight.shape).to(torch.float8_e4m3fn)
            found[name.removesuffix("weight") + "scale"] = scale.view(rows, columns)
    return found


def from_8_bits(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same as bfloat16 numbers."""
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
    """The last norm is not found again under the name that transformers gave it, and becomes
    ones: which it was.
    """
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(plain))


def kept(path: Path, asked: str, ask: Callable[[], JsonValue]) -> JsonValue:
    """The answer in a file if it is one to what is `asked`; else a new one, which is kept there.

    The file lies in the model's folder, which is removed when another model is made.
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


def main() -> None:
    folder, *names = sys.argv[1:]
    for family in names or families():
        print(make(family, Path(folder)))


if __name__ == "__main__":
    main()
