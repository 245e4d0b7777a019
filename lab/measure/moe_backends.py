"""Tries other vLLM backends for the matrix products of MoE experts: the speed with each, and how
much it changes artifacts.

Another backend changes artifacts slightly. Another micro-batch size does so too, and each node
chooses its own size. Therefore a backend is proposed only if it changes artifacts no more than
another micro-batch size does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import JsonValue

from cli.terminal import UsageError, progress_bar
from lab.local_engine import clean_stdout, local_engine, progress_title
from lab.measure.artifact_distance import Distance, artifacts, distance
from lab.measure.speed import SeqLenSpeeds, spec_of, speed
from poc_core.errors import ProoflineError
from poc_core.records import ProofSpec
from workers.engines.base import Engine
from workers.engines.options import EngineOptions
from workers.vllm.start import log_patterns

OPTION = "--try-moe-backend"
# Number of compared nonces, the usual size of micro-batches, and another size that a node may
# choose.
NONCES, BATCH, SMALL_BATCH = 64, 32, 8
# Ratio to the default's rate from which a backend is clearly faster: the engines run one after the
# other, and a device's clock varies.
_FASTER = 1.01
# Log line of a process that waited for the failed one.
_TELLS_NOTHING = re.compile(r"root cause")


@dataclass(frozen=True)
class Default:
    """The measured speed and artifacts of the engine with its default backend."""

    spec: ProofSpec
    counts: Sequence[int]  # nonces of the measured micro-batches
    nonces_per_s: float  # at the best of them
    batch: int
    small_batch: int
    artifacts: Sequence[JsonValue]  # in micro-batches of `batch`
    by_size: Distance  # distance of artifacts in micro-batches of `small_batch`


@dataclass(frozen=True)
class Tried:
    """The measured speed and artifact distance of the engine with another backend, or why that
    backend is not proposed.
    """

    backend: str
    nonces_per_s: float | None = None  # at its best; None if it cannot be used here
    distance: Distance | None = None  # from the default's artifacts
    why_not: str = ""  # why it is not proposed; empty if it is

    @property
    def line(self) -> str:
        """Returns the line that `bench` prints about this backend."""
        if self.why_not:
            return f"{self.backend} is not proposed: {self.why_not}"
        return (
            f"{self.backend} is faster, and no further from the default than the size of"
            f" micro-batches moves artifacts. Add after --: {argument(self.backend)}"
        )


@dataclass(frozen=True)
class Comparison:
    """The results for the default backend and for all backends that were tried. At most one of
    these is proposed.
    """

    default: Default
    tried: Sequence[Tried]

    @property
    def proposal(self) -> str | None:
        """Returns the `vllm serve` argument that selects the proposed backend; None if no backend
        is proposed.
        """
        return next((argument(one.backend) for one in self.tried if not one.why_not), None)


def argument(backend: str) -> str:
    """Returns the `vllm serve` argument that selects this backend."""
    return f"--moe-backend={backend}"


def with_backend(options: EngineOptions, backend: str) -> EngineOptions:
    """Returns engine options with this backend. It replaces a given one, because vLLM uses the last
    of repeated arguments.
    """
    return options.model_copy(update={"vllm_args": (*options.vllm_args, argument(backend))})


def check_backends(options: EngineOptions, backends: Sequence[str]) -> None:
    """Raises UsageError if backends are given for an engine other than vLLM."""
    if backends and options.engine != "vllm":
        raise UsageError(f"{OPTION} needs --engine vllm.")


def default_of(engine: Engine, measured: SeqLenSpeeds) -> Default:
    """Measures the default backend, with which others are compared: its speed, and its artifacts in
    large and in small micro-batches.

    `measured`: the speeds that `bench` has measured already.
    """
    spec = spec_of(measured.seq_len)
    batch = min(BATCH, engine.info.max_batch(spec.seq_len))
    small = max(1, batch * SMALL_BATCH // BATCH)
    own = artifacts(engine, spec, NONCES, batch)
    return Default(
        spec=spec,
        counts=[whole.n for whole, _ in measured.sizes],
        nonces_per_s=measured.best,
        batch=batch,
        small_batch=small,
        artifacts=own,
        by_size=distance(spec, artifacts(engine, spec, NONCES, small), own),
    )


def compare(
    options: EngineOptions,
    backends: Sequence[str],
    default: Default,
    dummy_weights: bool,
    seconds: float,
    verbose: bool,
) -> Comparison:
    """Starts an engine with each backend in turn, and measures it. No other engine may run
    meanwhile.

    `seconds`: least duration of each measurement. `verbose`: True to show the engines' logs.
    """
    found = [_tried(options, one, default, seconds, verbose) for one in backends]
    return Comparison(default, judged(default, found, dummy_weights))


def _tried(
    options: EngineOptions, backend: str, default: Default, seconds: float, verbose: bool
) -> Tried:
    try:
        with (
            clean_stdout(verbose),
            local_engine(with_backend(options, backend)) as engine,
            progress_bar("measurements") as bar,
        ):
            task = bar.add_task(f"{progress_title(engine)}, {backend}", total=len(default.counts))
            rates = []
            for n in default.counts:
                rates.append(speed(engine, default.spec, n, None, seconds).nonces_per_s)
                bar.advance(task)
            found = artifacts(engine, default.spec, NONCES, default.batch)
    except ProoflineError as error:
        return Tried(backend, why_not=f"it cannot be used here: {cause(error)}")
    return Tried(backend, max(rates), distance(default.spec, found, default.artifacts))


def cause(error: ProoflineError) -> str:
    """Returns one line about an error: the last error line of the engine's log, or the error's
    message if the log has none.
    """
    message, *log = str(error).splitlines()
    causes = [
        line[found.start() :]
        for line in log
        if (found := log_patterns.ERROR.search(line)) and not _TELLS_NOTHING.search(line)
    ]
    return causes[-1] if causes else message


def judged(default: Default, found: Sequence[Tried], dummy_weights: bool) -> list[Tried]:
    """Returns the tried backends, each with the reason why it is not proposed. The proposed backend
    has no reason.
    """
    first = [replace(one, why_not=_why_not(default, one, dummy_weights)) for one in found]
    good = [one for one in first if not one.why_not]
    best = max(good, key=lambda one: one.nonces_per_s or 0.0, default=None)
    return [
        replace(one, why_not=f"{best.backend} is faster.")
        if best and one in good and one is not best
        else one
        for one in first
    ]


def _why_not(default: Default, one: Tried, dummy_weights: bool) -> str:
    if one.nonces_per_s is None or one.distance is None:
        return one.why_not
    if one.nonces_per_s < _FASTER * default.nonces_per_s:
        return (
            f"it is not clearly faster ({one.nonces_per_s:,.1f} nonces/s; the default has"
            f" {default.nonces_per_s:,.1f})."
        )
    if dummy_weights:
        return (
            "it is faster, but distances depend on the weights, and made-up ones are not your"
            " model's; try it with these."
        )
    if not one.distance.is_within(default.by_size):
        return (
            "it is faster, but its artifacts lie further from the default's than those of batches"
            f" of {default.small_batch} from those of {default.batch}."
        )
    return ""
