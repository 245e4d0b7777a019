"""Divides the time of a micro-batch into parts, such as matrix products and norms, according to the
names of its GPU kernels.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from workers.engines.base import Kernel, RankProfile

INPUTS = "inputs"
MATRICES = "matrix products, attention"
REFLECTIONS = "reflections"
NORMS = "norms"
COMMUNICATION = "communication"
TAIL = "tail"
OTHER = "other"
GAPS = "gaps"
PARTS = (INPUTS, MATRICES, REFLECTIONS, NORMS, COMMUNICATION, TAIL, OTHER, GAPS)

# Steps that the engine marks itself.
_STEPS = {"inputs": INPUTS, "reflections": REFLECTIONS, "tail": TAIL, "norms": NORMS}
# First match wins: an all-reduce may be fused with a norm, a matrix product's name may contain
# "sort".
_NAMES: Sequence[tuple[str, re.Pattern[str]]] = [
    (part, re.compile(pattern, re.IGNORECASE))
    for part, pattern in (
        (REFLECTIONS, r"_reflect_kernel"),
        (INPUTS, r"_normal_kernel"),
        (NORMS, r"mhc_pre_"),  # one of these broadcasts
        (
            COMMUNICATION,
            r"nccl|gloo|c10d::|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast_|cross_device|multimem|shm_",
        ),
        (NORMS, r"rms_?norm|layer_?norm|_norm_|rsqrt"),
        (
            MATRICES,
            r"gemm|gemv|matmul|linear|(?<![a-z])(add|b|baddb|scaled_|onednn_)?mm(?![a-z])|cutlass|cublas|nvjet|xmma|wgmma"
            r"|marlin|moe|expert|_(product|gates|last)_kernel|topk_|flash|fmha|mha|attention|attn|paged|reshape_and_cache",
        ),
        (TAIL, r"sort|gather"),
    )
]


@dataclass(frozen=True)
class TimeParts:
    """How long each part of a micro-batch takes, summed over the pipeline stages. A stage's time is
    the mean of its devices.
    """

    n: int  # nonces
    seconds: dict[str, float]  # of each of PARTS
    flops: float  # of the micro-batch, on all devices
    peak_flops: float  # a second, mean of the devices
    n_devices: int
    n_stages: int
    device: str
    longest: list[tuple[str, str, float]]  # (part, name, seconds), the longest first

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def share(self, part: str) -> float:
        return self.seconds[part] / self.total_s if self.total_s else 0.0

    def share_of_peak(self, nonces_per_s: float) -> float | None:
        """Returns which share of the devices' peak FLOP/s the model's matrix products use at this
        rate; None if the profile has no matrix products.
        """
        return (
            nonces_per_s * self.flops / self.n / (self.peak_flops * self.n_devices)
            if self.flops
            else None
        )

    @property
    def matrices_share_of_peak(self) -> float | None:
        """Returns which share of the devices' peak FLOP/s is reached while matrix products run;
        None if the profile has no matrix products.
        """
        seconds = self.seconds[MATRICES] * self.n_devices / self.n_stages
        return self.flops / (self.peak_flops * seconds) if self.flops and seconds else None


def part_of(kernel: Kernel) -> str:
    if kernel.step in _STEPS:
        return _STEPS[kernel.step]
    return next((part for part, pattern in _NAMES if pattern.search(kernel.name)), OTHER)


def time_parts(ranks: Sequence[RankProfile], n: int, most_kernels: int = 12) -> TimeParts | None:
    """Returns how long each part of a micro-batch of `n` nonces takes; None if the engine provided
    no profile.

    `ranks`: the profile of each device. `most_kernels`: how many of the longest kernels to list.
    """
    if not ranks:
        return None
    stages: dict[int, int] = {}  # first layer -> ranks
    for rank in ranks:
        stages[rank.first_layer] = stages.get(rank.first_layer, 0) + 1
    seconds = dict.fromkeys(PARTS, 0.0)
    by_name: dict[tuple[str, str], float] = {}
    for rank in ranks:
        weight = 1 / stages[rank.first_layer]
        seconds[GAPS] += weight * max(0.0, rank.seconds - rank.busy_s)
        for kernel in rank.kernels:
            part = part_of(kernel)
            seconds[part] += weight * kernel.seconds
            by_name[part, kernel.name] = (
                by_name.get((part, kernel.name), 0.0) + weight * kernel.seconds
            )
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:most_kernels]
    return TimeParts(
        n=n,
        seconds=seconds,
        flops=sum(rank.flops for rank in ranks),
        peak_flops=sum(rank.peak_flops for rank in ranks) / len(ranks),
        n_devices=len(ranks),
        n_stages=len(stages),
        device=ranks[0].device,
        longest=[(*key, value) for key, value in longest],
    )
