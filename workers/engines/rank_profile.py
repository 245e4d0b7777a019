"""A micro-batch's time by kernel, as reported by an engine. Contains only numbers and names."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Kernel:
    """The time of a GPU kernel or a CPU operation."""

    # The step of a micro-batch: inputs, reflections, tail or norms; empty for other work.
    step: str
    name: str
    seconds: float  # total of all runs


@dataclass(frozen=True)
class RankProfile:
    """The times of one micro-batch on one device (or CPU process), run without slices."""

    device: str
    first_layer: int  # the rank's first layer, equal for all ranks of a pipeline stage
    seconds: float  # time of the fastest of a few runs, most of them without a profiler
    busy_s: float  # time with a running kernel, in the run with the profiler
    flops: float  # floating-point operations of matrix products and attention
    peak_flops: float  # operations per second of a large matrix product in the engine's dtype
    kernels: list[Kernel] = field(default_factory=list)  # from the run with the profiler
