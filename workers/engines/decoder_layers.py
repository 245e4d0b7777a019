"""Finds a model's decoder layers, and whether proof schemes transform the outputs of the layers."""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from workers.engines.layer_paths import FLEET_PATHS, KNOWN_PATHS

# Names of the number of experts per token in models' configurations.
_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_k",
    "moe_top_k",
)

# Parts of a path that belong to another tower than the text decoder.
_OTHER_TOWERS = re.compile("vision|visual|image|video|audio|speech|tower|encoder|vit|mtp|draft")


@dataclass(frozen=True)
class DecoderLayers:
    """A model's decoder layers, indexed as in the whole model even under pipeline parallelism."""

    modules: nn.ModuleList
    path: str  # module path in the model
    reflected: bool  # True if schemes that transform layers transform these layers


def find_decoder_layers(model: nn.Module, n_layers: int) -> DecoderLayers:
    """Returns the model's decoder layers. LookupError if none or several candidates are found."""
    path = _path(model, n_layers)
    modules = _at(model, path)
    assert modules is not None
    return DecoderLayers(modules, path, path in FLEET_PATHS)


def n_routed_tokens(text_config: Any) -> int | None:
    """Returns the vocabulary size if the first layers choose experts by token id, and so need token
    ids in addition to embeddings (protocol.md, section 2.1); else None.
    """
    return int(text_config.vocab_size) if text_config.model_type == "deepseek_v4" else None


def n_chosen_experts(text_config: Any) -> int:
    """Returns how many experts an MoE router chooses per token. Returns 0 if the number is unknown,
    or if layers differ.
    """
    said = next((found for name in _TOP_K if (found := getattr(text_config, name, None))), 0)
    counts = {*said} if isinstance(said, list | tuple) else {said}  # Hunyuan: one for each layer
    return int(counts.pop()) if len(counts) == 1 else 0


def routes_by_token(gate: nn.Module) -> bool:
    """Returns True if a MoE router looks up a token's experts in a table by token id (DeepSeek-V4's
    first layers). Decode proofs do not replace such routers (protocol.md, section 8.2).
    """
    return getattr(gate, "tid2eid", None) is not None


def _path(model: nn.Module, n_layers: int) -> str:
    known = KNOWN_PATHS.get(type(model).__name__)
    for path in [known] if known else FLEET_PATHS:
        modules = _at(model, path)
        if modules is not None and len(modules) == n_layers:
            return path
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == n_layers and not _is_elsewhere(name)
    ]
    if len(found) == 1:
        return str(found[0])
    many = f"{len(found)} lists of {n_layers} layers ({', '.join(found)})"
    why = many if found else f"no list of {n_layers} layers"
    raise LookupError(
        f"{type(model).__name__} has {why}, so its decoder layers were not found; proofs cannot be"
        " computed with this model"
    )


def _is_elsewhere(path: str) -> bool:
    """Returns True if the module list at `path` is inside a layer or outside the text decoder."""
    *parents, own = path.split(".")
    in_a_layer = any(part.isdecimal() for part in parents)
    return bool(in_a_layer or own not in ("layers", "h", "blocks") or _OTHER_TOWERS.search(path))


def _at(model: nn.Module, path: str) -> nn.ModuleList | None:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    return module if isinstance(module, nn.ModuleList) else None
