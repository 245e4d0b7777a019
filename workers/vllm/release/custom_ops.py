"""vLLM's custom operations, norms and kernels for mixtures of experts, adapted to each release."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

# Implementations of vLLM's operations in eager deployments, in the order of preference.
_EAGER = ("vllm_c", "triton", "native")


@contextmanager
def fused_kernels() -> Iterator[None]:
    """Makes norms inside the context run as vLLM's fused kernels, as in an eager deployment. In a
    compiled deployment, a proof's forward pass would run norms operation by operation.
    """
    if not torch.cuda.is_available():
        yield
        return
    try:
        from vllm.ir.op import enable_torch_wrap
    except ImportError:  # releases whose norms are custom operations (see `enable_custom_ops`)
        yield
        return
    with _eager_priority().set_priority(), enable_torch_wrap(False):
        yield


@functools.cache
def _eager_priority() -> Any:
    """Returns the order in which vLLM prefers each operation's implementations in eager mode."""
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.ir.op import IrOp
    from vllm.platforms import current_platform

    current_platform.import_ir_kernels()  # registers the implementations
    return IrOpPriorityConfig(
        **{
            field.name: [one for one in _EAGER if one in IrOp.registry[field.name].impls]
            for field in dataclasses.fields(IrOpPriorityConfig)
        }
    )


def operation(name: str) -> Any | None:
    """Returns a custom operation of vLLM, such as _C::rms_norm; None if this build lacks it."""
    import vllm._custom_ops  # noqa: F401  # loads the compiled operations

    namespace, _, own = name.partition("::")
    return getattr(getattr(torch.ops, namespace), own, None)


def argument_names(operation: Any) -> list[str]:
    return [one.name for one in operation.default._schema.arguments]


@contextmanager
def in_place_of_operations(others: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replaces custom operations of vLLM inside the context. Affects calls from Python, but neither
    recorded CUDA graphs nor compiled code. `others`: the replacements, by operation name.
    """
    own = {name: operation(name) for name in others}
    _put(others)
    try:
        yield
    finally:
        _put(own)


def _put(operations: Mapping[str, Any]) -> None:
    for name, one in operations.items():
        namespace, _, own = name.partition("::")
        found = vars(getattr(torch.ops, namespace))
        found[own] = one
        if one is None:  # it does not exist
            del found[own]


def enable_custom_ops(engine_args: Any) -> None:
    """Enables all of vLLM's fused operations, unless the operator has chosen "all" or "none"."""
    config = engine_args.compilation_config
    if not any(word in ("all", "none") for word in config.custom_ops):
        config.custom_ops.append("all")


def query_and_key_norms() -> Any | None:
    """Returns vLLM's class for MiniMax's query and key norms; None if it lacks `forward_qk`."""
    found = getattr(_module("minimax_rms_norm.rms_norm_tp"), "MiniMaxText01RMSNormTP", None)
    return found if hasattr(found, "forward_qk") else None


def triton_experts() -> Any | None:
    """Returns vLLM's module of Triton kernels for experts; None if a function is missing in it."""
    found = _module("fused_moe.experts.triton_moe")
    names = ("TritonExperts", "invoke_fused_moe_triton_kernel")
    return found if all(hasattr(found, name) for name in names) else None


def marlin_experts() -> Any | None:
    """Returns vLLM's class for experts in Marlin's layout; None if this release lacks the class."""
    return getattr(_module("fused_moe.experts.marlin_moe"), "MarlinExperts", None)


def _module(name: str) -> Any | None:
    try:
        return import_module(f"vllm.model_executor.layers.{name}")
    except ImportError:
        return None


def sum_of_experts(
    experts: Any, rows: torch.Tensor, out: torch.Tensor, chosen: torch.Tensor
) -> None:
    """Sums each token's rows (tokens, experts per token, columns), as vLLM does, into `out`."""
    more = (chosen, None) if len(inspect.signature(experts.moe_sum).parameters) > 2 else ()
    experts.moe_sum(rows, out, *more)


def limit_of_gates(experts: Any) -> float | None:
    """Returns the value at which experts clamp gate and up projections; None without clamping."""
    said = (("quant_config", "gemm1_clamp_limit"), ("activation_config", "clamp_limit"))
    limits = (getattr(getattr(experts, of, None), name, None) for of, name in said)
    return next((float(one) for one in limits if one is not None), None)


def scales_are_powers() -> bool:
    """Returns True if TritonExperts quantise the activation's output in a separate kernel, with
    powers of two as scales: on Hopper with DeepGEMM, unless VLLM_USE_DEEP_GEMM_E8M0 is 0.
    """
    return bool(getattr(triton_experts(), "is_deep_gemm_e8m0_used", lambda: False)())
