"""How fast a round is with its leases, counters and callbacks, compared with a bare loop.

    .venv/bin/python -m bench.round_overhead

The round runs for a set time on one vLLM worker and delivers to a receiver; a bare loop on the same
engine computes as many of the same nonces.
"""

from typing import Annotated

import typer

from bench.harness import machine
from bench.harness.node import spec_of
from bench.harness.overhead import Pair, check_same, compare, open_node
from bench.harness.report import ChatPolicy, Model, QuietWait, Repeat, measures, run
from bench.harness.timed_round import RoundRun, Sink, run_round
from workers.engines.options import EngineKind, EngineOptions

BATCH_SIZE, SEQ_LEN = 32, 256
TARGET = 0.95
# Seconds of a round before the first that counts: micro-batches grow to POC_MAX_STEP_MS's size.
WARM_UP_S = 6.0


@measures
def main(
    repeat: Repeat = 5,
    seconds: Annotated[
        float, typer.Option(min=10, help="How long each side computes for a pair.")
    ] = 50.0,
    model: Model = "tiny-qwen3",
    engine: Annotated[EngineKind, typer.Option(help="vllm or transformers.")] = "vllm",
    chat_policy: ChatPolicy = "off",
    quiet_wait: QuietWait = 60.0,
) -> bool:
    """Nonces/s of a round over those of a bare loop on the same engine, one after the other.

    Pairs of runs that other programs disturbed are repeated, at most twice. Exits with 1 when the
    target is missed.
    """
    options = EngineOptions(model=model, engine=engine)
    with open_node(options, chat_policy) as (stack, client), Sink() as sink:

        def one_round(block_hash: str, seconds: float) -> RoundRun:
            return run_round(
                client, sink, stack.model_name, SEQ_LEN, block_hash, BATCH_SIZE, seconds
            )

        def pair(index: int) -> Pair:
            # The loop needs the round's number of nonces. It runs between two rounds, so that a
            # drift of the machine's speed favours neither side.
            block_hash, half_s = f"block-{index}", seconds / 2
            spec = spec_of(SEQ_LEN, block_hash)
            first, usage = machine.measured(lambda: one_round(block_hash, half_s), quiet_wait)
            n = 2 * first.n_nonces
            (loop_s, values), loop_usage = machine.measured(
                lambda: stack.loop(spec, range(n), BATCH_SIZE), quiet_wait
            )
            second, usage_2 = machine.measured(lambda: one_round(block_hash, half_s), quiet_wait)
            check_same(second.vectors, values)
            both = first.n_nonces + second.n_nonces
            others = max(one.others for one in (usage, loop_usage, usage_2))
            return Pair(both, first.seconds + second.seconds, loop_s * both / n, others)

        one_round("warm-up", WARM_UP_S)
        stack.loop(spec_of(SEQ_LEN, "warm-up"), range(4 * BATCH_SIZE), BATCH_SIZE)
        title = f"Round overhead: batch {BATCH_SIZE}, seq_len {SEQ_LEN}"
        return compare(title, pair, repeat, TARGET)


if __name__ == "__main__":
    run(main)
