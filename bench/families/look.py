"""All checks of one family's tiny model on one real engine."""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import JsonValue

from bench.families import against_oracle, checks
from bench.families.differences import Difference
from bench.families.make import FOR_TRANSFORMERS, given, is_quantized, kept, make, text_config
from poc_core.records import ProofSpec
from tests.harness import golden
from workers.engines.options import EngineOptions
from workers.pipeline import compute_all

FOLDER = Path(__file__).resolve().parents[2] / "build" / "families"


class Variant(NamedTuple):
    """A way to start a family's engine."""

    dtype: str  # of the weights
    arguments: tuple[str, ...] = ()  # of vLLM


VARIANTS = {
    "float32": Variant("float32"),
    "bfloat16": Variant("bfloat16"),
    "fp8": Variant("bfloat16", ("--kv-cache-dtype", "fp8")),
    # For GPUs: latent attention by kernels that are not vLLM's first choice (see `arguments`).
    "flashmla": Variant("bfloat16"),
    # Chains compared with an oracle's, of a model as wide as they need (see `decode_dtype`).
    "decode": Variant("float32"),
}
# Limits of the L2 to transformers' artifacts: the largest in float32, the mean in bfloat16. Routers
# of experts sometimes choose other experts (docs/protocol.md, "Golden data"), so with experts only
# this share of the artifacts must be within the limit.
FLOAT32_MOST, BFLOAT16_MEAN, MOST_OF_THEM = 0.003, 0.05, 0.75
# Nonces that transformers computes.
_OPINIONS = range(20)
# For multimodal families: only the text model is loaded.
_TEXT_ONLY = ("--language-model-only",)
# Several engines share a GPU, so each gets a fixed part. FlashInfer's tuning would compile DeepGEMM
# kernels for sixteen sizes.
SHARED_GPU = (
    "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2**30),
    "--no-enable-flashinfer-autotune",
)  # fmt: skip
KEPT_GB = 0.25
# DeepSeek-V4's first start compiles kernels for two minutes and more.
START_S = 400


def look(family: str, variant: str, on_gpu: bool) -> dict[str, Any]:
    """Loads the family's engine and returns the result of every check, or the refusal."""
    from poc_core.errors import ProoflineError
    from workers.load import load_engine

    options, of_chains = options_of(family, variant, on_gpu), variant == "decode"
    try:
        engine = load_engine(options, START_S)
    except ProoflineError as error:
        return {"right": "\n" not in str(error), "refused": str(error)}
    try:
        if of_chains:
            return against_oracle.checked(engine, family, options.model)
        # transformers has no cache in 8 bits to compare with, except for DeepSeek-V4.
        with_opinion = variant != "fp8" or is_quantized(family)
        return checked(engine, options, family, with_opinion)
    finally:
        engine.close()


def options_of(
    family: str, variant: str, on_gpu: bool, wide: bool = False, words: Sequence[str] = ()
) -> EngineOptions:
    """Makes the model; returns the options of a variant's engine.

    `wide`: as wide as chains need it, as in the variant `decode`. `words`: further arguments of
    vLLM.
    """
    decodes = variant == "decode"
    model = against_oracle.model if wide or decodes else make
    return EngineOptions(
        model=str(model(family, FOLDER)),
        served_model_name=family,
        dtype=decode_dtype(family, on_gpu) if decodes else VARIANTS[variant].dtype,
        max_batch_tokens=2048,
        decode_memory_gb=KEPT_GB if on_gpu else None,
        vllm_args=(*arguments(family, variant), *words, *(SHARED_GPU if on_gpu else ())),
    )


def decode_dtype(family: str, on_gpu: bool) -> str:
    """Returns the number format of chains: float32 on CPUs, where it is exact.

    CPUs compute linear attention only in bfloat16.
    """
    is_linear = any(name.startswith("linear_") for name in text_config(family))
    return "bfloat16" if on_gpu or is_linear else "float32"


def arguments(family: str, variant: str) -> list[str]:
    """Returns the arguments of `vllm serve`."""
    config = text_config(family)
    found = ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16"]
    found += [*VARIANTS[variant].arguments, *_without_warmup()]
    if variant == "decode" and is_quantized(family):
        found += VARIANTS["fp8"].arguments
    if variant == "flashmla":
        backend = "FLASHMLA_SPARSE" if "index_topk" in config else "FLASHMLA"
        found += ["--attention-backend", backend]
    return [*found, *_TEXT_ONLY] if "text_config" in given(family) else found


def _without_warmup() -> list[str]:
    """Returns the arguments that prevent compiling kernels for large sizes at the start.

    DeepSeek-V4's take minutes.
    """
    try:
        from vllm.config.kernel import KernelConfig
    except ImportError:
        return []
    has_switch = hasattr(KernelConfig, "enable_jit_warmup")
    return ["--kernel-config", '{"enable_jit_warmup": false}'] if has_switch else []


def checked(engine: Any, options: Any, family: str, with_opinion: bool) -> dict[str, Any]:
    """Returns the results of all checks; `with_opinion` includes a comparison with transformers."""
    seen: dict[str, Any] = {
        "caches": engine.info.caches,
        "layers": engine.info.layers,
        "reflected": engine.info.layers_reflected,
        "sliceable": engine.sliceable,
    }
    differences = all_differences(engine, family)
    # If the engine does not share caches, that difference is only the reason.
    right = all(
        one.right
        for name, one in differences.items()
        if engine.info.caches == "shared" or not name.startswith("shared")
    )
    seen |= {name: str(one) for name, one in differences.items()}
    if with_opinion:
        agrees, seen["transformers"] = second_opinion(engine, options, family)
        right = right and agrees
    return {"right": right, **seen}


def all_differences(engine: Any, family: str) -> dict[str, Difference]:
    """Returns the differences of an engine from itself.

    With sparse attention: of as many tokens as it uses without choosing, and of more.
    """
    spec, most = checks.SPEC, text_config(family).get("index_topk", 1 << 30)
    if most >= spec.seq_len:
        return differences_of(engine, spec, checks.PROMPT)
    all_taken = differences_of(
        engine, spec.model_copy(update={"seq_len": most}), most - checks.ANSWER
    )
    chosen = differences_of(engine, spec, checks.PROMPT)
    return all_taken | {f"{name}, choosing": one for name, one in chosen.items()}


def differences_of(engine: Any, spec: ProofSpec, prompt: int) -> dict[str, Difference]:
    found = {"shared": checks.shared_against_private(engine, spec)}
    if engine.sliceable:
        found["slices"] = checks.slices_against_whole(engine, spec)
    return found | checks.chat_beside_proofs(engine, spec, prompt)


def second_opinion(engine: Any, options: Any, family: str) -> tuple[bool, str]:
    """Returns whether transformers agrees, and a description."""
    try:
        spec, theirs = artifacts(options, family)
    except Exception as error:  # of another library's model: there is no second opinion
        words = " ".join(str(error).split())[:120]
        return not is_quantized(family), f"none ({type(error).__name__}: {words})"
    errors = golden.l2(compute_all(engine, spec, _OPINIONS), theirs, 12)
    return agree(errors, options.dtype, with_experts="experts" in json.dumps(text_config(family)))


def artifacts(options: EngineOptions, family: str) -> tuple[ProofSpec, list[JsonValue]]:
    """Returns a spec and transformers' artifacts of some nonces, stored in the model's folder."""
    # Sparse attention chooses by 8-bit scores, transformers by exact scores. They agree if all
    # tokens are used.
    most = text_config(family).get("index_topk", 1 << 30)
    spec = checks.SPEC.model_copy(update={"seq_len": min(checks.SPEC.seq_len, most)})
    plain = options.model_copy(
        update={"engine": "transformers", "vllm_args": (), "max_batch_tokens": None}
    )
    if is_quantized(family):
        copy = Path(options.model, FOR_TRANSFORMERS)
        plain = plain.model_copy(update={"model": str(copy), "dtype": "float32"})

    def ask() -> list[JsonValue]:
        # In a process without vLLM, which registers its own configuration classes in transformers.
        with ProcessPoolExecutor(1, get_context("spawn")) as processes:
            return processes.submit(opinion, plain, spec).result()

    path = Path(options.model, f"transformers-{plain.dtype}.json")
    answer: Any = kept(path, f"{spec} {_OPINIONS}", ask)
    return spec, answer


def opinion(options: EngineOptions, spec: ProofSpec) -> list[JsonValue]:
    """Computes artifacts on the CPU, because GPUs may round float32 to TF32."""
    from workers.load import load_engine

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return compute_all(load_engine(options), spec, _OPINIONS)


def agree(errors: np.ndarray, dtype: str, with_experts: bool) -> tuple[bool, str]:
    """Returns whether two right engines may differ by these L2 distances, and a description."""
    most = FLOAT32_MOST if dtype == "float32" else BFLOAT16_MEAN
    near = float(np.mean(errors <= most))
    if with_experts:
        agrees = near >= MOST_OF_THEM
    else:
        agrees = bool(near == 1.0 if dtype == "float32" else errors.mean() <= most)
    words = f"mean {errors.mean():.4f} median {np.median(errors):.4f} largest {errors.max():.4f}"
    return agrees, words if near == 1.0 else f"{words}, {near:.0%} within {most:g}"
