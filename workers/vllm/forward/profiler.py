"""Profiles a proof's work with torch's profiler, and measures the device's speed. Runs in vLLM's
worker processes.
"""

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

from poc_core.schemes.base import PrefillScheme

# Prefix of the names of our profiler ranges around a micro-batch's steps.
_PREFIX = "proofline."
# Rows and columns of the matrix product that measures a device's peak: enough to fill the device.
_PEAK_SIZE_GPU = 8192
_PEAK_SIZE_CPU = 1024
_PEAK_S = 0.2
_PEAK_TRIES = 5


# The step that each method of a scheme computes.
_STEPS = {"inputs": "inputs", "transform_terms": "reflections", "numbers": "tail"}


def marked(scheme: PrefillScheme) -> PrefillScheme:
    """Returns a copy of a proof scheme that runs each of its steps in a profiler range."""
    found = copy.copy(scheme)
    for method, step in _STEPS.items():
        setattr(found, method, record_function(f"{_PREFIX}{step}")(getattr(scheme, method)))
    return found


@contextmanager
def marked_norms(model: nn.Module) -> Iterator[None]:
    """Runs each of the model's norms in a profiler range. On CPUs other layers use the same
    operations as norms, so the names of the operations are not enough.
    """
    ranges: list[record_function] = []

    def enter(_module: nn.Module, _args: Any) -> None:
        ranges.append(record_function(f"{_PREFIX}norms"))
        ranges[-1].__enter__()

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    with ExitStack() as hooks:
        for module in model.modules():
            if type(module).__name__.endswith("Norm"):
                hooks.enter_context(module.register_forward_pre_hook(enter))
                hooks.enter_context(module.register_forward_hook(leave))
        yield


def profiled(
    device: torch.device, work: Callable[[], None]
) -> tuple[float, list[tuple[str, str, float]]]:
    """Profiles `work`. Returns the seconds in which the device was busy, and a list of (step, name,
    seconds), one for each step and kernel. The step is "" for work outside our profiler ranges.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        synchronize(device)
    events = profile.events() or ()
    if on_gpu:
        return kernels_of_device(
            [event for event in events if event.device_type == DeviceType.CUDA]
        )
    return operations_of_host([event for event in events if event.device_type == DeviceType.CPU])


def kernels_of_device(events: Iterable[Any]) -> tuple[float, list[tuple[str, str, float]]]:
    """Computes the result of `profiled` from a GPU's profiler events. A kernel belongs to the step
    in whose profiler range the kernel began.
    """
    ranges: list[tuple[float, float, str]] = []  # microseconds
    kernels: list[tuple[float, float, str]] = []
    for event in events:
        span = (event.time_range.start, event.time_range.end, event.name)
        if event.name.startswith(_PREFIX):
            ranges.append(span)
        elif not getattr(event, "is_user_annotation", False):
            kernels.append(span)
    ranges.sort()
    kernels.sort()
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    busy_us = reached = 0.0
    place = 0
    for start, end, name in kernels:
        while place < len(ranges) and ranges[place][1] <= start:
            place += 1
        inside = place < len(ranges) and ranges[place][0] <= start
        step = ranges[place][2].removeprefix(_PREFIX) if inside else ""
        seconds[step, name] += (end - start) / 1e6
        busy_us += max(0.0, end - max(start, reached))  # kernels of several streams overlap
        reached = max(reached, end)
    return busy_us / 1e6, [(*key, value) for key, value in seconds.items()]


def operations_of_host(events: Iterable[Any]) -> tuple[float, list[tuple[str, str, float]]]:
    """Computes the result of `profiled` from a CPU's profiler events. The time of an operation
    excludes the operations that it called.
    """
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    for event in events:
        outer = event
        while outer is not None and not outer.name.startswith(_PREFIX):
            outer = outer.cpu_parent
        step = "" if outer is None else outer.name.removeprefix(_PREFIX)
        seconds[step, event.name] += event.self_cpu_time_total / 1e6
    return sum(seconds.values()), [(*key, value) for key, value in seconds.items()]


def matrix_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the operations per second of a large matrix product, the best of a few runs."""
    size = _PEAK_SIZE_GPU if device.type == "cuda" else _PEAK_SIZE_CPU
    a, b = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def seconds(times: int) -> float:
        synchronize(device)
        began = time.perf_counter()
        for _ in range(times):
            torch.mm(a, b, out=out)
        synchronize(device)
        return time.perf_counter() - began

    seconds(2)  # chooses the kernel
    times = max(1, int(_PEAK_S / seconds(1)))
    return 2 * size**3 * times / min(seconds(times) for _ in range(_PEAK_TRIES))


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished all launched work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matrix_flops(layers: Iterable[nn.Module], seq_len: int) -> float:
    """Returns the number of floating-point operations that this rank needs for one sequence in
    `layers`. Counts matrix products and attention. Reads the sizes that vLLM's modules store,
    because the weights' own shapes can be packed.
    """
    return sum(_matrix_flops(layer, seq_len) for layer in layers)


def _matrix_flops(module: nn.Module, seq_len: int) -> float:
    sizes: dict[str, Any] = vars(module)
    if {"top_k", "hidden_size", "intermediate_size_per_partition"} <= sizes.keys():
        # Experts: gate, up and down.
        experts = sizes.get("global_num_experts", 1)
        # On this rank's experts.
        per_token = sizes["top_k"] * sizes.get("local_num_experts", experts) / experts
        return float(
            2
            * 3
            * sizes["hidden_size"]
            * sizes["intermediate_size_per_partition"]
            * per_token
            * seq_len
        )
    if {"input_size", "output_size"} <= sizes.keys():
        rows = sizes.get("input_size_per_partition", sizes["input_size"])
        return float(
            2 * rows * sizes.get("output_size_per_partition", sizes["output_size"]) * seq_len
        )
    if {"num_heads", "head_size", "kv_cache"} <= sizes.keys():
        # Each token attends to itself and the tokens before it, with two products.
        return float(4 * sizes["num_heads"] * sizes["head_size"] * seq_len * (seq_len + 1) / 2)
    return sum(_matrix_flops(child, seq_len) for child in module.children())
