"""What chat and proofs cost each other on one engine.

    .venv/bin/python -m bench.coexist
    .venv/bin/python -m bench.coexist --part soak --soak-minutes 10
    python -m bench.coexist --dimensions qwen3-8b --seq-len 1024 --per-second 1 --per-second 8

Every situation is measured beside its counterpart (alone and beside a round; with and without a
chat server) on the same engine, taking turns, so that whatever else changes on the machine meets
both. Turns during which other programs were busy are repeated.
"""

from typing import Annotated

import typer

from bench.harness import machine
from bench.harness.chat_node import Work, chat_node
from bench.harness.coexist_parts import PARTS, SHARE, Options
from bench.harness.engine import takes_engine
from bench.harness.report import console, exit_with, run
from poc_core.settings import Settings
from workers.engines.options import EngineOptions


@takes_engine(model="tiny-qwen3")
def main(
    *,
    part: Annotated[
        list[str] | None, typer.Option(help=f"Only this, may be repeated: {', '.join(PARTS)}.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Only under this POC_CHAT_POLICY, may be repeated.")
    ] = None,
    engine_options: EngineOptions,
    seq_len: Annotated[int, typer.Option(min=1, help="Positions of a nonce.")] = 256,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Rounds of decode proofs with so many steps.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=1024, help="batch_size of requests.")] = 32,
    max_step_ms: Annotated[
        float, typer.Option(min=1, help="POC_MAX_STEP_MS.")
    ] = Settings.model_fields["max_step_ms"].default,
    requests: Annotated[int, typer.Option(min=5, help="Chat requests in each situation.")] = 60,
    per_second: Annotated[
        list[float] | None,
        typer.Option(
            help=(
                "They come at random, so many a second; may be repeated. Without it, one after the"
                " other."
            )
        ),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Turns of each measurement.")] = 5,
    seconds: Annotated[
        float, typer.Option(min=1, help="Length of a measurement of rates and shares.")
    ] = 10.0,
    soak_minutes: Annotated[
        int, typer.Option(min=0, help="Minutes of the soak, for each policy; 0: none.")
    ] = 0,
) -> None:
    """Chat beside proofs and proofs beside chat. Exits with 1 when a target is missed."""
    for name in part or ():
        if name not in PARTS:
            raise typer.BadParameter(f"one of {', '.join(PARTS)}", param_hint="--part")
    work = Work(engine_options, seq_len, batch_size, max_step_ms, max_tokens)
    options = Options(work, requests, per_second or [], repeat, seconds, soak_minutes)
    policies = policy or ["yield", f"share:{SHARE}", "off"]
    exit_with(lambda: measure(options, part or list(PARTS), policies))


def measure(options: Options, parts: list[str], policies: list[str]) -> bool:
    engine = options.work.engine
    console.print(f"{machine.describe()}; model {engine.model}, {engine.dtype}", highlight=False)
    verdicts = []
    for policy in policies:
        wanted = [
            PARTS[name]
            for name in PARTS
            if name in parts and policy.split(":")[0] in PARTS[name].policies
        ]
        if wanted:
            with chat_node(options.work, policy) as node:
                # All of them, also after a miss.
                verdicts += [one.run(node, options) for one in wanted]
    return all(verdicts)


if __name__ == "__main__":
    run(main)
