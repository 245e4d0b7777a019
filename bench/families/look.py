"""What is seen of one family's tiny model on one real engine."""

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
    dtype: str  # of the weights
    arguments: tuple[str, ...] = ()  # of vLLM


VARIANTS = {
    "float32": Variant("float32"),
    "bfloat16": Variant("bfloat16"),
    "fp8": Variant("bfloat16", ("--kv-cache-dtype", "fp8")),
    # Of a GPU: latent attention by kernels that are not vLLM's first choice there (see
    # `arguments`).
    "flashmla": Variant("bfloat16"),
    # Chains against an oracle, of a model as wide as they need (see `decode_dtype`).
    "decode": Variant("float32"),
}
# L2 of artifacts from transformers': the largest, of float32, and the mean, of bfloat16. A mixture
# of experts flips a router now and then (docs/protocol.md, "Golden data"), two number formats of
# transformers itself too: of these so many have to be as near.
FLOAT32_MOST, BFLOAT16_MEAN, MOST_OF_THEM = 0.003, 0.05, 0.75
# Nonces of which transformers is asked.
_OPINIONS = range(20)
# Of wrappers: no other tower is wanted here, and none has a processor.
_TEXT_ONLY = ("--language-model-only",)
# Several engines share a GPU: each says what it takes, as none can tell from what is free. Tuning
# FlashInfer runs sixteen sizes, for each of which DeepGEMM compiles kernels.
SHARED_GPU = (
    "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2**30),
    "--no-enable-flashinfer-autotune",
)  # fmt: skip
KEPT_GB = 0.25
# DeepSeek-V4's first start compiles kernels for two minutes and more.
START_S = 400


def look(family: str, variant: str, on_gpu: bool) -> dict[str, Any]:
    """What is seen of one family: refused with a sentence, or every check."""
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
        # A cache in 8 bits has none: transformers keeps no such. DeepSeek-V4 has no other, so its
        # opinion counts.
        return checked(
            engine, options, family, with_opinion=variant != "fp8" or is_quantized(family)
        )
    finally:
        engine.close()


def options_of(
    family: str, variant: str, on_gpu: bool, wide: bool = False, words: Sequence[str] = ()
) -> EngineOptions:
    """Of the engine that one variant is looked at with; the model is made.

    `wide`: as chains need it, which the variant `decode` has anyway; `words`: further arguments of
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
    """The number format in which chains are looked at.

    float32 where it is exact: on a CPU, but for linear attention, which vLLM's CPUs compute in
    bfloat16 only.
    """
    is_linear = any(name.startswith("linear_") for name in text_config(family))
    return "bfloat16" if on_gpu or is_linear else "float32"


def arguments(family: str, variant: str) -> list[str]:
    """Of `vllm serve`."""
    config = text_config(family)
    found = [
        "--enforce-eager",
        "--max-model-len",
        "512",
        "--max-num-seqs",
        "16",
        *VARIANTS[variant].arguments,
        *_without_warmup(),
    ]
    if variant == "decode" and is_quantized(family):
        found += VARIANTS["fp8"].arguments
    if variant == "flashmla":
        found += [
            "--attention-backend",
            "FLASHMLA_SPARSE" if "index_topk" in config else "FLASHMLA",
        ]
    return [*found, *_TEXT_ONLY] if "text_config" in given(family) else found


def _without_warmup() -> list[str]:
    """What keeps vLLM from compiling, at its start, kernels of sizes that tiny models never see:
    DeepSeek-V4's take minutes.
    """
    try:
        from vllm.config.kernel import KernelConfig
    except ImportError:
        return []
    has_switch = hasattr(KernelConfig, "enable_jit_warmup")
    return ["--kernel-config", '{"enable_jit_warmup": false}'] if has_switch else []


def checked(engine: Any, options: Any, family: str, with_opinion: bool) -> dict[str, Any]:
    """Every check; `with_opinion`: transformers' too, where it knows the family."""
    seen: dict[str, Any] = {
        "caches": engine.info.caches,
        "layers": engine.info.layers,
        "reflected": engine.info.layers_reflected,
        "sliceable": engine.sliceable,
    }
    differences = all_differences(engine, family)
    # Of caches that the engine shares no more, the difference only tells why.
    judged = (
        name
        for name in differences
        if engine.info.caches == "shared" or not name.startswith("shared")
    )
    right = all(differences[name].right for name in judged)
    seen |= {name: str(one) for name, one in differences.items()}
    if with_opinion:
        agrees, seen["transformers"] = second_opinion(engine, options, family)
        right = right and agrees
    return {"right": right, **seen}


def all_differences(engine: Any, family: str) -> dict[str, Difference]:
    """Of an engine from itself; where attention is sparse, of as many tokens as it takes
    without choosing, and of more.
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
    """Whether transformers agrees, and in which words."""
    try:
        spec, theirs = artifacts(options, family)
    except (
        Exception
    ) as error:  # whatever a model of another library raises: then there is no second opinion
        return not is_quantized(
            family
        ), f"none ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
    errors = golden.l2(compute_all(engine, spec, _OPINIONS), theirs, 12)
    return agree(errors, options.dtype, with_experts="experts" in json.dumps(text_config(family)))


def artifacts(options: EngineOptions, family: str) -> tuple[ProofSpec, list[JsonValue]]:
    """What transformers makes of some nonces with a model, kept beside it."""
    # Sparse attention chooses by scores in 8 bits, transformers by exact ones: they agree where it
    # takes all tokens.
    most = text_config(family).get("index_topk", 1 << 30)
    spec = checks.SPEC.model_copy(update={"seq_len": min(checks.SPEC.seq_len, most)})
    plain = options.model_copy(
        update={"engine": "transformers", "vllm_args": (), "max_batch_tokens": None}
    )
    if is_quantized(family):
        copy = Path(options.model, FOR_TRANSFORMERS)
        plain = plain.model_copy(update={"model": str(copy), "dtype": "float32"})

    def ask() -> list[JsonValue]:
        # In a process without vLLM, whose own readings of some configurations transformers would
        # take for its.
        with ProcessPoolExecutor(1, get_context("spawn")) as processes:
            return processes.submit(opinion, plain, spec).result()

    path = Path(options.model, f"transformers-{plain.dtype}.json")
    answer: Any = kept(path, f"{spec} {_OPINIONS}", ask)
    return spec, answer


def opinion(options: EngineOptions, spec: ProofSpec) -> list[JsonValue]:
    """Artifacts by the engine of these options, on the processor, where nothing rounds float32
    to TF32.
    """
    from workers.load import load_engine

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return compute_all(load_engine(options), spec, _OPINIONS)


def agree(errors: np.ndarray, dtype: str, with_experts: bool) -> tuple[bool, str]:
    """Whether L2 of artifacts from another engine's are what two right ones may have, and in
    which words.
    """
    most = FLOAT32_MOST if dtype == "float32" else BFLOAT16_MEAN
    near = float(np.mean(errors <= most))
    if with_experts:
        agrees = near >= MOST_OF_THEM
    else:
        agrees = bool(near == 1.0 if dtype == "float32" else errors.mean() <= most)
    words = f"mean {errors.mean():.4f} median {np.median(errors):.4f} largest {errors.max():.4f}"
    return agrees, words if near == 1.0 else f"{words}, {near:.0%} within {most:g}"
