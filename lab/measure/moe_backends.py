"""Other backends of the experts' products: how fast an engine is with each, and how far its
artifacts then lie from the default's, the backend that it starts with if none is tried.

Another backend gives other bits. So does another size of micro-batches, which every node chooses
for itself: a backend that moves artifacts no further than that may be proposed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import JsonValue

from cli.terminal import UsageError, progress_bar
from lab.local_engine import local_engine, progress_title, stdout_kept_clean
from lab.measure.artifact_distance import Distance, artifacts, distance
from lab.measure.speed import SeqLenSpeeds, spec_of, speed
from poc_core.errors import ProoflineError
from poc_core.records import ProofSpec
from workers.engines.base import Engine
from workers.engines.options import EngineOptions
from workers.vllm.start import log_patterns

OPTION = "--try-moe-backend"
# Nonces whose artifacts are compared, and of a micro-batch: what clients send, and what another
# node may make of it.
NONCES, BATCH, SMALL_BATCH = 64, 32, 8
# Rate over the default's from which on a backend is clearly faster: the engines run one after the
# other, and a device's clock drifts.
_FASTER = 1.01
# Of a process that waited for the one that failed.
_TELLS_NOTHING = re.compile(r"root cause")


@dataclass(frozen=True)
class Default:
    """The engine with the backend that it starts with."""

    spec: ProofSpec
    counts: Sequence[int]  # nonces of the micro-batches that were measured
    nonces_per_s: float  # at the best of them
    batch: int
    small_batch: int
    artifacts: Sequence[JsonValue]  # in micro-batches of `batch`
    by_size: Distance  # of those in micro-batches of `small_batch` from them


@dataclass(frozen=True)
class Tried:
    """The result of one backend."""

    backend: str
    nonces_per_s: float | None = None  # at its best; None: it cannot be used here
    distance: Distance | None = None  # from the default's artifacts
    why_not: str = ""  # why it is not proposed; empty: it is

    @property
    def line(self) -> str:
        """Returns the line to print."""
        if self.why_not:
            return f"{self.backend} is not proposed: {self.why_not}"
        return (
            f"{self.backend} is faster, and no further from the default than the size of"
            f" micro-batches moves artifacts. Add after --: {argument(self.backend)}"
        )


@dataclass(frozen=True)
class Comparison:
    """All backends beside the default; one at most is proposed."""

    default: Default
    tried: Sequence[Tried]

    @property
    def proposal(self) -> str | None:
        """The argument to add; None: better none."""
        return next((argument(one.backend) for one in self.tried if not one.why_not), None)


def argument(backend: str) -> str:
    """The argument of `vllm serve`."""
    return f"--moe-backend={backend}"


def with_backend(options: EngineOptions, backend: str) -> EngineOptions:
    """The options of the same engine with this backend: the last of two arguments counts."""
    return options.model_copy(update={"vllm_args": (*options.vllm_args, argument(backend))})


def check_backends(options: EngineOptions, backends: Sequence[str]) -> None:
    """UsageError: this engine has none."""
    if backends and options.engine != "vllm":
        raise UsageError(f"{OPTION} needs --engine vllm, whose backends they are.")


def default_of(engine: Engine, measured: SeqLenSpeeds) -> Default:
    """Returns the measured engine's values, with which other backends are compared."""
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
    """Tries each backend in turn; no engine may run here meanwhile.

    `seconds`: that each size of micro-batches is measured at least; `verbose`: logs are shown.
    """
    found = [_tried(options, one, default, seconds, verbose) for one in backends]
    return Comparison(default, judged(default, found, dummy_weights))


def _tried(
    options: EngineOptions, backend: str, default: Default, seconds: float, verbose: bool
) -> Tried:
    try:
        with (
            stdout_kept_clean(verbose),
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
    """One line of an error that may have the end of an engine's log with it: what that ends with,
    where it names a cause."""
    message, *log = str(error).splitlines()
    causes = [
        line[found.start() :]
        for line in log
        if (found := log_patterns.ERROR.search(line)) and not _TELLS_NOTHING.search(line)
    ]
    return causes[-1] if causes else message


def judged(default: Default, found: Sequence[Tried], dummy_weights: bool) -> list[Tried]:
    """The same backends, each but the proposed one with why it is not."""
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
