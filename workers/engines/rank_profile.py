"""A micro-batch's time by kernel, as an engine reports it; numbers and names only."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Kernel:
    """Time under one name: a GPU's kernel or a CPU's operation."""

    # inputs, reflections, tail or norms where it belongs to that step of a micro-batch; else empty
    step: str
    name: str
    seconds: float  # all its runs together


@dataclass(frozen=True)
class RankProfile:
    """One micro-batch on one device (on a CPU: process) of the engine, its layers in one go."""

    device: str
    first_layer: int  # the rank's first; the same for all ranks of a pipeline stage
    seconds: float  # of the fastest of a few runs, most of them without a profiler
    busy_s: float  # with a kernel running, in the run under the profiler
    flops: float  # of matrix products and attention, floating-point operations
    peak_flops: float  # operations a second of one large matrix product in the engine's dtype
    kernels: list[Kernel] = field(default_factory=list)  # of the run under the profiler
