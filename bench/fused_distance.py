"""How far fused kernels move artifacts from the plain expressions', beside what batch size does.

    python -m bench.fused_distance --dimensions qwen3-0.6b --dimensions qwen3-8b  # on a GPU host
    python -m bench.fused_distance --dimensions minimax-m2.7 --layers 6 --seq-len 1024
    python -m bench.fused_distance --model tiny-qwen3 --nonces 64  # anywhere; a CPU has no kernels

The same weights in two engines, one after the other: with PROOFLINE_FUSED=off and without. For
--dimensions they are drawn as transformers begins a training: vLLM's dummy ones are so small that
layers hardly change what goes through them, and artifacts of any two batch sizes are the same.
Quantized dimensions have those all the same, as transformers draws none in 8 bits.
"""

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from bench.harness import machine
from bench.harness.report import console, exit_with
from cli.local_engine import local_engine, stdout_kept_clean
from cli.measure import dimensions as dummies
from cli.model_choice import with_chosen_model
from poc_core.arithmetic.encoding import decode_vector
from poc_core.fused import SWITCH
from poc_core.records import ProofSpec
from workers.engines.options import EngineOptions
from workers.pipeline import compute_all

K_DIM = 12
# Nonces of a micro-batch: what clients send, and what another node may make of it.
BATCH, SMALL_BATCH = 32, 8


def main(
    dimensions: Annotated[
        list[str] | None,
        typer.Option(
            help=f"With random weights, may be repeated: {', '.join(dummies.DIMENSIONS)}."
        ),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="One that is there, may be repeated.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Of --dimensions only the first so many.")
    ] = None,
    nonces: Annotated[int, typer.Option(min=1)] = 512,
    seq_len: Annotated[int, typer.Option(min=1)] = 256,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    engine_arg: Annotated[
        list[str] | None, typer.Option(help="An argument of `vllm serve`, may be repeated.")
    ] = None,
) -> None:
    """Mean and largest L2 of both. Exit 1: kernels move artifacts further than batch size."""
    if not (dimensions or model):
        raise typer.BadParameter("give --model or --dimensions")

    def run() -> bool:
        table = Table(title=f"L2 of {nonces} artifacts at seq_len {seq_len}, {dtype}")
        for heading in ("model", "what", "mean", "largest"):
            table.add_column(heading, justify="right")
        passed = []
        for name in (*(dimensions or ()), *(model or ())):
            with ExitStack() as exits:
                directory, args = name, list(engine_arg or ())
                if name in (dimensions or ()):
                    directory = exits.enter_context(dummies.model_directory(name, layers))
                    if "quantization_config" in dummies.configuration(name)[1]:
                        args += dummies.ENGINE_ARGS
                    else:
                        draw_weights(directory)
                options = with_chosen_model(
                    EngineOptions(model=directory, dtype=dtype, vllm_args=tuple(args))
                )
                exits.enter_context(stdout_kept_clean())
                plain, small = artifacts(options, "off", nonces, seq_len, (BATCH, SMALL_BATCH))
                (fused,) = artifacts(options, "auto", nonces, seq_len, (BATCH,))
            kernels, sizes = distances(fused, plain), distances(small, plain)
            for what, found in (
                ("fused from plain", kernels),
                (f"plain, batches of {SMALL_BATCH} from those of {BATCH}", sizes),
            ):
                table.add_row(name, what, f"{found.mean():.6f}", f"{found.max():.6f}")
            passed.append(bool(kernels.mean() <= sizes.mean() and kernels.max() <= sizes.max()))
            seen = {
                "model": name,
                "fused": [kernels.mean(), kernels.max()],
                "batch": [sizes.mean(), sizes.max()],
            }
            console.print(json.dumps(seen | {"passed": passed[-1]}), highlight=False)
        console.print(f"{machine.describe()}", highlight=False)
        console.print(table)
        return all(passed)

    exit_with(run)


def draw_weights(directory: str) -> None:
    """Puts random weights in bfloat16 beside a configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(directory), dtype=torch.bfloat16
        )
    model.save_pretrained(directory)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the engines' processes need it


def artifacts(
    options: EngineOptions, switch: str, nonces: int, seq_len: int, batches: Sequence[int]
) -> list[list[Any]]:
    """Artifacts of the nonces by micro-batch size, on an engine that starts with this switch."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = switch  # read in the processes that vLLM starts
    try:
        with local_engine(options) as engine:
            spec = ProofSpec(
                block_hash="bench",
                public_key="bench",
                seq_len=seq_len,
                options={"k_dim": K_DIM, "stronger_rng": False},
            )
            return [
                [
                    value
                    for first in range(0, nonces, batch)
                    for value in compute_all(engine, spec, range(first, min(first + batch, nonces)))
                ]
                for batch in batches
            ]
    finally:
        del os.environ[SWITCH]
        if before is not None:
            os.environ[SWITCH] = before


def distances(ours: Sequence[str], theirs: Sequence[str]) -> np.ndarray:
    """L2 of each pair: float64 (n,)."""
    a, b = (
        np.array([decode_vector(value, K_DIM) for value in side], np.float64)
        for side in (ours, theirs)
    )
    found: np.ndarray = np.linalg.norm(a - b, axis=1)
    return found


if __name__ == "__main__":
    typer.run(main)
