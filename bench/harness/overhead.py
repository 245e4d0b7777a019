"""The speed of work through the whole node, compared with a bare loop on the same engine."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import numpy as np
from pydantic import JsonValue

from bench.harness import machine
from bench.harness.node import K_DIM, NodeError, running
from bench.harness.open_worker import OpenStack
from bench.harness.report import LEGEND, at_least, console, listed, say, table, warn_of_noise
from poc_core.schemes.artifact.encoding import decode_vector
from workers.engines.options import EngineOptions

# The two sides batch differently, which changes bfloat16 vectors: nearly all vectors must agree
# within this L2 distance.
SAME_WITHIN, SAME_SHARE = 0.05, 0.99


@dataclass(frozen=True)
class Pair:
    """One run through the node, and one run of the bare loop over as many nonces."""

    n_nonces: int
    seconds: float
    loop_s: float
    others: float = 0.0  # cores that other programs used, in the more disturbed of the runs

    @property
    def ratio(self) -> float:
        return self.loop_s / self.seconds


@contextmanager
def open_node(options: EngineOptions, chat_policy: str) -> Iterator[tuple[OpenStack, httpx.Client]]:
    """Starts a node of one worker with access to its engine; prints what runs where."""
    env = {"POC_CHAT_POLICY": chat_policy}
    with running(OpenStack(options, max_fast_crashes=0, env=env)) as (stack, client):
        say(
            f"{machine.describe()}; engine {options.engine}, model {stack.model_name}, chat policy"
            f" {chat_policy}"
        )
        yield stack, client


def check_same(vectors: Mapping[int, str], values: Sequence[JsonValue]) -> None:
    """NodeError: the vectors of the node and of the loop differ, so their speeds do not compare."""
    shared = [(vectors[nonce], value) for nonce, value in enumerate(values) if nonce in vectors]
    of_node, of_loop = (
        np.stack([decode_vector(str(each), K_DIM) for each in side])
        for side in zip(*shared, strict=True)
    )
    agree = np.mean(np.linalg.norm(of_node - of_loop, axis=1) <= SAME_WITHIN)
    if agree < SAME_SHARE:
        raise NodeError(f"Only {agree:.1%} of the node's artifacts are those of the bare loop.")


def compare(title: str, pair: Callable[[int], Pair], repeat: int, target: float | None) -> bool:
    """Runs pairs until `repeat` count, and reports them."""

    def measure(index: int) -> tuple[Pair, float]:
        done = pair(index)
        return done, done.others

    return report(title, machine.repeated(measure, repeat), target)


def report(title: str, pairs: Sequence[machine.Observed[Pair]], target: float | None) -> bool:
    """Prints the pairs and the ratio of the medians; returns whether the ratio meets the target."""
    rows = table(title, "runs", "node\nnonces/s", "bare loop\nnonces/s", "ratio", "others", dim=1)
    counted = machine.counted(pairs)
    rate, loop_rate = (
        statistics.median(pair.n_nonces / seconds(pair) for pair in counted)
        for seconds in (lambda pair: pair.seconds, lambda pair: pair.loop_s)
    )
    rows.add_row(
        "each",
        listed(pairs, lambda pair: f"{pair.n_nonces / pair.seconds:.1f}"),
        listed(pairs, lambda pair: f"{pair.n_nonces / pair.loop_s:.1f}"),
        listed(pairs, lambda pair: f"{pair.ratio:.3f}"),
        listed(pairs, lambda pair: f"{pair.others:.2f}"),
    )
    rows.add_row("median", f"{rate:.1f}", f"{loop_rate:.1f}", f"[bold]{rate / loop_rate:.3f}[/]")
    console.print(rows)
    console.print(LEGEND, style="dim")
    warn_of_noise(pairs)
    return target is None or at_least(title, rate / loop_rate, target)
