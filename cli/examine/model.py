"""Checks a model: its files, its size, and known problems of its family (docs/models.md)."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from api.models.cache import CacheError, ModelCache
from api.models.files import BrokenModelError, missing, parsed, printable
from cli.examine.findings import Finding, Subject
from cli.machine.cpu_memory import available_bytes
from cli.machine.model_memory import weights_bytes
from cli.model_choice import choose_model
from cli.shipped import ModelChoiceError
from poc_core.gpus import Gpu
from workers.engines.layer_paths import FLEET_PATHS, KNOWN_PATHS

_MODEL, _MODELS, _MEMORY, _FAMILY = map(Subject, ("model", "models", "memory", "family"))

_GIB = 1024**3
_MIB = 1024**2
# Weights times this factor also covers activations, CUDA graphs and the smallest KV cache.
_BESIDE_WEIGHTS = 1.15
_SEEN = "docs/models.md"

# model_type -> why vLLM cannot compute this family on a CPU.
_NOT_ON_CPU = {
    "deepseek_v32": "vLLM has its sparse attention for GPUs alone",
    "deepseek_v4": "vLLM has its attention for GPUs alone",
    "glm_moe_dsa": "vLLM has its sparse attention for GPUs alone",
    "minimax_m2": "vLLM's router for CPUs has no sigmoid scores",
}
_NEED_TORCHVISION = ("qwen3_5", "qwen3_5_moe", "kimi_k25")


@dataclass(frozen=True)
class Model:
    """A model to check. `folder`: the folder with the model's files; None if this machine does not
    have them.
    """

    name: str
    folder: Path | None

    @property
    def config(self) -> dict[str, Any]:
        if self.folder is None:
            return {}
        try:
            return parsed(self.folder / "config.json")
        except BrokenModelError:
            return {}  # reported by the check of the files


def find(name: str, cache: ModelCache | None = None) -> tuple[Model | None, list[Finding]]:
    """Returns the model that the option --model names, and findings about the model's files. The
    model is None if the name is invalid.
    """
    try:
        path, _ = choose_model(name, None)
    except ModelChoiceError as error:
        return None, [_MODEL.problem(str(error), "Give --model as `proofline up` would get it.")]
    if Path(path).is_dir():
        return Model(name, Path(path)), [_files(Path(path))]
    return _on_hub(name, cache or ModelCache())


def _files(folder: Path) -> Finding:
    remedy = "Download or copy the model again, whole."
    try:
        lacks = missing(folder)
    except BrokenModelError as error:
        return _MODEL.problem(f"{error}.", remedy)
    if not lacks:
        return _MODEL.ok(
            f"{folder}: configuration, weights and tokenizer are there,"
            f" {weights_bytes(folder, 'auto') / 1e9:.1f} GB"
        )
    more = f" and {len(lacks) - 3} more" if len(lacks) > 3 else ""
    return _MODEL.problem(f"{folder} lacks {', '.join(lacks[:3])}{more}.", remedy)


def in_cache(cache: ModelCache | None = None) -> Iterator[Finding]:
    """Yields a finding for each incomplete or unreadable model in the Hugging Face cache."""
    cache = cache or ModelCache()
    try:
        found = [one for one in cache.models() if one[2] == "PARTIAL"]
    except CacheError as error:
        yield _MODELS.problem(str(error), "Correct the folder, or its permissions.")
        return
    for hf_repo, commit, _ in found:
        why = cache.trouble(hf_repo, commit) or "is here in part."
        yield _MODELS.warning(
            printable(f"{hf_repo}{f' at {commit}' if commit else ''}: {why}"),
            f"hf download {hf_repo}, which completes it; or delete it.",
        )


def _on_hub(name: str, cache: ModelCache) -> tuple[Model, list[Finding]]:
    found = try_to_load_from_cache(name, "config.json", cache_dir=cache.path)
    model = Model(name, Path(found).parent if isinstance(found, str) else None)
    stage = cache.stage(name, None)
    if stage == "DOWNLOADED":
        return model, [_MODEL.ok(f"{name} is in the Hugging Face cache, {cache.path}")]
    is_where = "is in the Hugging Face cache in part"
    if stage != "PARTIAL":
        is_where = "is not in the Hugging Face cache"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        finding = _MODEL.problem(
            f"{name} {is_where} ({cache.path}), and HF_HUB_OFFLINE forbids to ask the hub.",
            "Unset HF_HUB_OFFLINE for the first start, or give the model's directory.",
        )
    else:
        finding = _MODEL.warning(
            f"{name} {is_where} ({cache.path}): the first start downloads it.",
            f"hf download {name} downloads it before; set HF_TOKEN if the model has a licence.",
        )
    return model, [finding]


def room(
    model: Model, dtype: str, gpus: Sequence[Gpu], group_size: int, uses_gpus: bool
) -> Iterator[Finding]:
    """Yields a finding: whether the model fits into the memory of one worker's GPUs, or into this
    machine's memory if the worker uses no GPU. Yields nothing if the model's size is unknown.
    """
    weights = weights_bytes(model.folder, dtype) if model.folder else 0
    if not weights:
        return
    if uses_gpus and len(gpus) < group_size:
        yield _MEMORY.problem(
            f"A worker is to have {group_size} GPU(s) and there are {len(gpus)} to be seen.",
            "Less --tensor-parallel or --pipeline-parallel, or look at CUDA_VISIBLE_DEVICES.",
        )
        return
    where = f"{group_size} GPU(s)" if uses_gpus else "this machine"
    total = sum(gpu.total_memory_mb or 0 for gpu in gpus) * _MIB
    free = sum(gpu.free_memory_mb or 0 for gpu in gpus) * _MIB if uses_gpus else available_bytes()
    needs = weights * _BESIDE_WEIGHTS
    text = f"The weights take {weights / _GIB:.1f} GiB and {where} can give {free / _GIB:.1f}"
    if needs <= free:
        yield _MEMORY.ok(text)
    elif uses_gpus and needs <= total:
        yield _MEMORY.problem(
            f"{text} of {total / _GIB:.1f}.", "End what uses the GPU: nvidia-smi shows it."
        )
    elif uses_gpus:
        remedy = "More --tensor-parallel or --pipeline-parallel, or a smaller model."
        yield _MEMORY.problem(f"{text}.", remedy)
    else:
        yield _MEMORY.problem(f"{text}.", "Free some, or take a smaller model.")


def family(model: Model, on_cpu: bool, has_torchvision: bool) -> Iterator[Finding]:
    """Yields findings about the model's family: whether proofs reflect its layers, and its known
    problems.
    """
    config = model.config
    if not config:
        return
    match config.get("architectures"):
        case [str(architecture), *_]:
            pass
        case _:
            architecture = "an unnamed architecture"
    text_config = config.get("text_config")
    n_layers = (text_config if isinstance(text_config, dict) else config).get(
        "num_hidden_layers", "?"
    )
    path = KNOWN_PATHS.get(architecture, FLEET_PATHS[0])
    if path in FLEET_PATHS:
        yield _FAMILY.ok(f"{architecture}: reflected after each of its {n_layers} layers")
    else:
        yield _FAMILY.ok(
            f"{architecture} wraps a language model, whose layers ({path}) the network's nodes do"
            f" not find: none of its {n_layers} layers is reflected, as in the fleet"
            f" ({_SEEN})"
        )
    kind = str(config.get("model_type", ""))
    if on_cpu and kind in _NOT_ON_CPU:
        yield _FAMILY.problem(
            f"{kind} on a CPU: {_NOT_ON_CPU[kind]}.", f"GPUs, or another model: {_SEEN}."
        )
    if kind in _NEED_TORCHVISION and not has_torchvision:
        yield _FAMILY.problem(
            f"{kind} needs torchvision.", "pip install the build of torchvision for this torch."
        )
