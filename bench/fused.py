"""What the fused kernels between a model's matrix products change: the speed, and the artifacts.

    python -m bench.fused --dimensions minimax-m2.7 --layers 6 --seq-len 1024  # on a GPU host
    python -m bench.fused --dimensions deepseek-v4-flash --plain POC_EXPERTS=exact
    python -m bench.fused --model tiny-qwen3 --nonces 64 --seq-len 64  # anywhere; no kernels there

Two engines with the same weights run in turn: one with PROOFLINE_FUSED=off or another --plain, one
without. Tests and each engine's start compare every kernel with vLLM's operation.
"""

import os
from dataclasses import astuple
from typing import Annotated
from unittest import mock

import typer

from bench.harness import machine
from bench.harness.engine import takes_engine
from bench.harness.report import console, judged, measures, run, say, say_json, table
from lab.local_engine import clean_stdout, local_engine
from lab.measure.artifact_distance import artifacts, distance
from lab.measure.moe_backends import BATCH, SMALL_BATCH
from lab.measure.speed import spec_of, speed
from lab.measure.time_parts import time_parts
from poc_core.arithmetic.fused import SWITCH
from workers.engines.options import EngineOptions

LONGEST = 16  # kernels of a micro-batch that are printed


@takes_engine(dimensions="minimax-m2.7")
@measures
def main(
    *,
    engine_options: EngineOptions,
    seq_len: Annotated[int, typer.Option(min=1, help="Positions of a nonce.")] = 256,
    nonces: Annotated[int, typer.Option(min=1, help="That are compared.")] = 64,
    seconds: Annotated[float, typer.Option(min=1, help="How long each engine computes.")] = 6.0,
    plain: Annotated[
        str, typer.Option(help="NAME=VALUE in the environment of the engine to compare with.")
    ] = f"{SWITCH}=off",
) -> bool:
    """Nonces/s, longest kernels, and mean and largest L2 of artifacts.

    Exits with 1 if kernels move artifacts further than another batch size does.
    """
    say(machine.describe())
    spec, rates, values = spec_of(seq_len), {}, {}
    name, _, value = plain.partition("=")
    for what, env in ((plain, {name: value}), ("fused", {})):
        with (
            mock.patch.dict(os.environ, env),
            clean_stdout(),
            local_engine(engine_options) as engine,
        ):
            rates[what] = speed(engine, spec, BATCH, None, seconds).nonces_per_s
            values[what] = artifacts(engine, spec, nonces, BATCH)
            if env:
                small = artifacts(engine, spec, nonces, SMALL_BATCH)
            n = min(BATCH, engine.info.max_batch(seq_len))
            parts = time_parts(engine.profile(spec, range(n)), n, LONGEST)
        for part, kernel, taken_s in parts.longest if parts else ():
            say(f"{what} {1000 * taken_s:8.2f} ms  {part}: {kernel[:90]}", markup=False)
    title = f"{engine_options.name}, micro-batches of {BATCH} x {seq_len}"
    rows = table(title, "engine", "nonces/s", "ratio")
    for what, rate in rates.items():
        rows.add_row(what, f"{rate:.2f}", f"{rate / rates[plain]:.3f}")
    console.print(rows)
    kernels = distance(spec, values["fused"], values[plain])
    sizes = distance(spec, small, values[plain])
    say_json(model=engine_options.name, rates=rates, fused=astuple(kernels), batch=astuple(sizes))
    return judged(
        kernels.is_within(sizes),
        f"L2 of {nonces} artifacts, mean and largest: fused {kernels.mean:.6f},"
        f" {kernels.largest:.6f}; batches of {SMALL_BATCH} {sizes.mean:.6f}, {sizes.largest:.6f}",
    )


if __name__ == "__main__":
    run(main)
