"""Where the time of a micro-batch goes, as an engine can tell; numbers and names only."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Kernel:
    """What ran under one name: a kernel of a GPU, an operation of a CPU."""

    # inputs, reflections, tail or norms where it belongs to that step of a micro-batch; else empty
    step: str
    name: str
    seconds: float  # all its runs together


@dataclass(frozen=True)
class RankProfile:
    """One micro-batch on one of the engine's devices (on a CPU: processes), its layers in one
    go.
    """

    device: str
    first_layer: int  # of those it has; the same for all ranks of a pipeline stage
    seconds: float  # of the fastest of a few runs, most of them without a profiler
    busy_s: float  # of the run under the profiler: when at least one kernel ran
    flops: float  # floating-point operations of its matrix products and its attention
    peak_flops: float  # a second, of one large matrix product in the engine's dtype
    kernels: list[Kernel] = field(default_factory=list)  # of that run
