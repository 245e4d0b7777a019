"""How far fused kernels move artifacts from the plain expressions', and other backends of the
experts' products from the default's, beside what batch size does.

    python -m bench.bits.fused_distance --dimensions qwen3-0.6b --dimensions qwen3-8b  # with a GPU
    python -m bench.bits.fused_distance --dimensions minimax-m2.7 --layers 6 --seq-len 1024
    python -m bench.bits.fused_distance --dimensions qwen3-30b-a3b --moe-backend triton
    POC_EXPERTS=fast python -m bench.bits.fused_distance --dimensions deepseek-v4-flash \
        --plain POC_EXPERTS=exact
    python -m bench.bits.fused_distance --model tiny-qwen3 --nonces 64  # anywhere; no kernels there

The same weights in several engines, one after the other: with PROOFLINE_FUSED=off or another
--plain, without it, and with each --moe-backend. For --dimensions they are random, as large as a
trained model's.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple
from typing import Annotated
from unittest import mock

import typer
from pydantic import JsonValue
from rich.table import Table

from bench.harness import machine
from bench.harness.report import console, exit_with
from cli.model_choice import with_chosen_model
from lab.local_engine import clean_stdout, local_engine
from lab.measure import dimensions as dummies
from lab.measure.artifact_distance import Distance, artifacts, distance
from lab.measure.moe_backends import BATCH, SMALL_BATCH, cause, with_backend
from lab.measure.speed import spec_of
from poc_core.errors import ProoflineError
from poc_core.fused import SWITCH
from poc_core.records import ProofSpec
from workers.engines.options import EngineOptions

PLAIN = f"{SWITCH}=off"


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
    moe_backend: Annotated[
        list[str] | None,
        typer.Option(help="Also with this backend of the experts, may be repeated."),
    ] = None,
    plain: Annotated[
        str, typer.Option(help="NAME=VALUE in the environment of the engine to compare with.")
    ] = PLAIN,
) -> None:
    """Mean and largest L2 of each. Exit 1: kernels move artifacts further than batch size."""
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
                    args += dummies.ENGINE_ARGS
                options = with_chosen_model(
                    EngineOptions(model=directory, dtype=dtype, vllm_args=tuple(args))
                )
                exits.enter_context(clean_stdout())
                kernels, sizes, others = distances(
                    options, moe_backend or (), nonces, seq_len, plain
                )
            rows = {
                "fused from plain": kernels,
                f"plain, batches of {SMALL_BATCH} from those of {BATCH}": sizes,
            }
            rows |= {f"{backend} from the default": found for backend, found in others.items()}
            for what, found in rows.items():
                table.add_row(name, what, f"{found.mean:.6f}", f"{found.largest:.6f}")
            passed.append(kernels.is_within(sizes))
            seen = {
                "model": name,
                "fused": astuple(kernels),
                "batch": astuple(sizes),
                "backends": {backend: astuple(found) for backend, found in others.items()},
            }
            console.print(json.dumps(seen | {"passed": passed[-1]}), highlight=False)
        console.print(f"{machine.describe()}", highlight=False)
        console.print(table)
        return all(passed)

    exit_with(run)


def distances(
    options: EngineOptions,
    backends: Sequence[str],
    nonces: int,
    seq_len: int,
    plain_env: str = PLAIN,
) -> tuple[Distance, Distance, dict[str, Distance]]:
    """Of fused kernels' artifacts from plain ones', of small batches', and of each backend's from
    the default's; backends that do not start are told and left out.
    """
    spec = spec_of(seq_len)
    name, _, value = plain_env.partition("=")
    plain, small = computed(options, {name: value}, spec, nonces, (BATCH, SMALL_BATCH))
    (fused,) = computed(options, {}, spec, nonces, (BATCH,))
    others = {}
    for backend in backends:
        told = with_backend(options, backend)
        try:
            (found,) = computed(told, {}, spec, nonces, (BATCH,))
        except ProoflineError as error:
            console.print(f"{backend} cannot be used here: {cause(error)}", markup=False)
            continue
        others[backend] = distance(spec, found, fused)
    return distance(spec, fused, plain), distance(spec, small, plain), others


def computed(
    options: EngineOptions,
    env: Mapping[str, str],
    spec: ProofSpec,
    nonces: int,
    batches: Sequence[int],
) -> list[list[JsonValue]]:
    """Artifacts of the nonces by micro-batch size, on an engine that starts with `env`."""
    with mock.patch.dict(os.environ, env), local_engine(options) as engine:
        return [artifacts(engine, spec, nonces, batch) for batch in batches]


if __name__ == "__main__":
    typer.run(main)
