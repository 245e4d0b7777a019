"""How far fused kernels and other backends of experts move artifacts, compared with batch size.

    python -m bench.bits.fused_distance --dimensions qwen3-0.6b --dimensions qwen3-8b  # with a GPU
    python -m bench.bits.fused_distance --dimensions minimax-m2.7 --layers 6 --seq-len 1024
    python -m bench.bits.fused_distance --dimensions qwen3-30b-a3b --moe-backend triton
    POC_EXPERTS=fast python -m bench.bits.fused_distance --dimensions deepseek-v4-flash \
        --plain POC_EXPERTS=exact
    python -m bench.bits.fused_distance --model tiny-qwen3 --nonces 64  # anywhere; no kernels there

Several engines load the same weights in turn: with PROOFLINE_FUSED=off or another --plain, without
it, and with each --moe-backend. --dimensions makes random weights, as large as a trained model's.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple
from typing import Annotated
from unittest import mock

import typer
from pydantic import JsonValue

from bench.harness import machine
from bench.harness.report import console, measures, run, say, say_json, table
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


@measures
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
) -> bool:
    """Mean and largest L2 of each. Exit 1: kernels move artifacts further than batch size does."""
    if not (dimensions or model):
        raise typer.BadParameter("give --model or --dimensions")
    title = f"L2 of {nonces} artifacts at seq_len {seq_len}, {dtype}"
    rows = table(title, "model", "what", "mean", "largest")
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
            kernels, sizes, others = distances(options, moe_backend or (), nonces, seq_len, plain)
        found = {
            "fused from plain": kernels,
            f"plain, batches of {SMALL_BATCH} from those of {BATCH}": sizes,
            **{f"{backend} from the default": one for backend, one in others.items()},
        }
        for what, one in found.items():
            rows.add_row(name, what, f"{one.mean:.6f}", f"{one.largest:.6f}")
        passed.append(kernels.is_within(sizes))
        told = {what: astuple(one) for what, one in found.items()}
        say_json(model=name, passed=passed[-1], **told)
    say(machine.describe())
    console.print(rows)
    return all(passed)


def distances(
    options: EngineOptions,
    backends: Sequence[str],
    nonces: int,
    seq_len: int,
    plain_env: str = PLAIN,
) -> tuple[Distance, Distance, dict[str, Distance]]:
    """Returns the distances of fused from plain kernels, of small batches, and of each backend.

    A backend that does not start is printed and left out.
    """
    spec = spec_of(seq_len)
    name, _, value = plain_env.partition("=")
    plain, small = computed(options, {name: value}, spec, nonces, (BATCH, SMALL_BATCH))
    (fused,) = computed(options, {}, spec, nonces, (BATCH,))
    others = {}
    for backend in backends:
        try:
            (found,) = computed(with_backend(options, backend), {}, spec, nonces, (BATCH,))
        except ProoflineError as error:
            say(f"{backend} cannot be used here: {cause(error)}", markup=False)
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
    """Returns the artifacts for each micro-batch size, on an engine that starts with `env`."""
    with mock.patch.dict(os.environ, env), local_engine(options) as engine:
        return [artifacts(engine, spec, nonces, batch) for batch in batches]


if __name__ == "__main__":
    run(main)
