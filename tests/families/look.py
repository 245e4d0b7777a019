"""What is seen of one family's tiny model on one real engine."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from tests.families.make import given, make, text_config

FOLDER = Path(__file__).resolve().parents[2] / "build" / "families"


class Variant(NamedTuple):
    dtype: str  # of the weights
    arguments: tuple[str, ...] = ()  # of vLLM


VARIANTS = {
    "float32": Variant("float32"),
    "bfloat16": Variant("bfloat16"),
    "fp8": Variant("bfloat16", ("--kv-cache-dtype", "fp8")),
    # Of a GPU: latent attention by kernels that are not vLLM's first choice there (see `arguments`).
    "flashmla": Variant("bfloat16"),
}
# L2 of artifacts from transformers': the largest, of float32, and the mean, of bfloat16. A mixture of experts flips
# a router now and then (docs/protocol.md, "Golden data"), so its median counts.
FLOAT32_MOST, BFLOAT16_MEAN = 0.003, 0.05
# Of wrappers: no other tower is wanted here, and none has a processor.
_TEXT_ONLY = ("--language-model-only",)
# Several engines share a GPU: each says what it takes, as none can tell from what is free.
_SHARED_GPU = ("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2**30))
_KEPT_GB = 0.25


def look(family: str, variant: str, on_gpu: bool) -> dict[str, Any]:
    """What is seen of one family: refused with a sentence, or every check."""
    from poc_core.errors import ProoflineError
    from workers.engines import load_engine
    from workers.engines.options import EngineOptions

    options = EngineOptions(
        model=str(make(family, FOLDER)),
        served_model_name=family,
        dtype=VARIANTS[variant].dtype,
        max_batch_tokens=2048,
        decode_memory_gb=_KEPT_GB if on_gpu else None,
        vllm_args=(*arguments(family, variant), *(_SHARED_GPU if on_gpu else ())),
    )
    try:
        engine = load_engine(options, 120)
    except ProoflineError as error:
        return {"right": "\n" not in str(error), "refused": str(error)}
    try:
        return checked(engine, options, family, with_opinion=variant != "fp8")
    finally:
        engine.close()


def arguments(family: str, variant: str) -> list[str]:
    """Of `vllm serve`."""
    config = text_config(family)
    found = ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16", *VARIANTS[variant].arguments]
    if variant == "flashmla":
        found += ["--attention-backend", "FLASHMLA_SPARSE" if "index_topk" in config else "FLASHMLA"]
    return [*found, *_TEXT_ONLY] if "text_config" in given(family) else found


def checked(engine: Any, options: Any, family: str, with_opinion: bool) -> dict[str, Any]:
    """Every check; `with_opinion`: transformers' too, where it knows the family."""
    from tests.families import checks

    seen: dict[str, Any] = {
        "caches": engine.info.caches,
        "layers": engine.info.layers,
        "reflected": engine.info.layers_reflected,
        "sliceable": engine.sliceable,
        "shared": checks.shared_against_private(engine) or engine.info.caches == "private",
        "slices": not engine.sliceable or checks.slices_against_whole(engine),
        "chat": checks.chat_between_slices(engine),
    }
    right = seen["shared"] and seen["slices"] and seen["chat"]
    if with_opinion:
        agrees, seen["transformers"] = second_opinion(engine, options, family)
        right = right and agrees
    return {"right": bool(right), **seen}


def second_opinion(engine: Any, options: Any, family: str) -> tuple[bool, str]:
    """Whether transformers agrees, and in which words."""
    import numpy as np

    from tests.families import checks
    from workers.engines import load_engine

    config = text_config(family)
    # Sparse attention chooses by scores in 8 bits, transformers by exact ones: they agree where it takes all tokens.
    spec = checks.SPEC.model_copy(update={"seq_len": min(checks.SPEC.seq_len, config.get("index_topk", 1 << 30))})
    plain = options.model_copy(update={"engine": "transformers", "vllm_args": (), "max_batch_tokens": None})
    try:
        errors = checks.against(engine, load_engine(plain), spec)
    except Exception as error:  # whatever a model of another library raises: then there is no second opinion
        return True, f"none ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
    with_experts = "experts" in json.dumps(config)
    middle = float(np.median(errors)) if with_experts else float(errors.max())
    agrees = middle <= FLOAT32_MOST if options.dtype == "float32" else errors.mean() <= BFLOAT16_MEAN
    return bool(agrees), f"mean {errors.mean():.4f} largest {errors.max():.4f}"
