"""vLLM's operations, norms and kernels of experts, by release."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

# Implementations of vLLM's operations as eager deployments have them, the first ones first.
_EAGER = ("vllm_c", "triton", "native")


@contextmanager
def fused_kernels() -> Iterator[None]:
    """vLLM's own kernels for norms, as in an eager deployment: a compiled one leaves them to
    the compiler, whose code a proof's forward bypasses, and would run them operation by
    operation.
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
    """Which of its implementations vLLM asks first for each operation that has several."""
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.ir.op import IrOp
    from vllm.platforms import current_platform

    current_platform.import_ir_kernels()  # which says what there is
    return IrOpPriorityConfig(
        **{
            field.name: [one for one in _EAGER if one in IrOp.registry[field.name].impls]
            for field in dataclasses.fields(IrOpPriorityConfig)
        }
    )


def operation(name: str) -> Any | None:
    """One of vLLM's operations, as in _C::rms_norm; None: this release or device has none of that
    name.
    """
    import vllm._custom_ops  # noqa: F401  # which loads the compiled ones

    namespace, _, own = name.partition("::")
    return getattr(getattr(torch.ops, namespace), own, None)


def argument_names(operation: Any) -> list[str]:
    """Returns the names of an operation's arguments, in their order."""
    return [one.name for one in operation.default._schema.arguments]


@contextmanager
def in_place_of_operations(others: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within: what vLLM's Python calls under these names. Recorded and compiled code calls its
    own all the same.
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
        if one is None:  # there is none
            del found[own]


def enable_custom_ops(engine_args: Any) -> None:
    """The same for all other fused operations, which are chosen when the model loads. An
    operator's choice stands.
    """
    config = engine_args.compilation_config
    if not any(word in ("all", "none") for word in config.custom_ops):
        config.custom_ops.append("all")


def query_and_key_norms() -> Any | None:
    """The class whose `forward_qk` computes MiniMax's norms of queries and keys where a rank has
    all heads; None: this release has none.
    """
    try:
        from vllm.model_executor.layers.minimax_rms_norm import rms_norm_tp
    except ImportError:
        return None
    found = getattr(rms_norm_tp, "MiniMaxText01RMSNormTP", None)
    return found if hasattr(found, "forward_qk") else None


def triton_experts() -> Any | None:
    """The module whose TritonExperts multiply by Triton's kernel; None: it is elsewhere here."""
    try:
        from vllm.model_executor.layers.fused_moe.experts import triton_moe
    except ImportError:
        return None
    names = ("TritonExperts", "invoke_fused_moe_triton_kernel")
    return triton_moe if all(hasattr(triton_moe, name) for name in names) else None


def marlin_experts() -> Any | None:
    """The class of experts whose weights are in Marlin's layout; None: it is elsewhere here."""
    try:
        from vllm.model_executor.layers.fused_moe.experts import marlin_moe
    except ImportError:
        return None
    return getattr(marlin_moe, "MarlinExperts", None)


def sum_of_experts(
    experts: Any, rows: torch.Tensor, out: torch.Tensor, chosen: torch.Tensor
) -> None:
    """Adds a token's rows (tokens, experts a token, columns) to `out` (tokens, columns), as
    MarlinExperts do; `chosen`: its experts."""
    more = (chosen, None) if len(inspect.signature(experts.moe_sum).parameters) > 2 else ()
    experts.moe_sum(rows, out, *more)


def limit_of_gates(experts: Any) -> float | None:
    """What bounds the gates of a TritonExperts and what they open, as each release says it; None:
    nothing."""
    said = (("quant_config", "gemm1_clamp_limit"), ("activation_config", "clamp_limit"))
    limits = (getattr(getattr(experts, of, None), name, None) for of, name in said)
    return next((float(one) for one in limits if one is not None), None)


def scales_are_powers() -> bool:
    """True if TritonExperts' activation and quantisation are two steps, its scales powers of two.
    So it is on Hopper where DeepGEMM can be imported and VLLM_USE_DEEP_GEMM_E8M0 is not 0."""
    return bool(getattr(triton_experts(), "is_deep_gemm_e8m0_used", lambda: False)())


def rows_of_experts(
    chosen: torch.Tensor, block: int, n_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows by expert in whole blocks, of chosen experts (tokens, experts a token): places in it,
    the blocks' experts, and how many places count (1,); int32."""
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    rows = moe_align_block_size(chosen, block, n_experts, None)
    return rows
