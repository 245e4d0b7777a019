"""Chooses MoE experts by a seed instead of a router, in models of the transformers library."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from poc_core.errors import SpecError
from poc_core.schemes.decode.steps import forced_logits
from workers.engines.decoder_layers import routes_by_token

FirstExperts = Callable[[int, int], Tensor | None]
"""(index of the MoE layer, number of experts) -> each row's first expert, int64 (rows,)."""


def gates(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the MoE routers (gates) of `layers` in order, except those that route by token id."""
    found = []
    for layer in layers:
        for block in layer.modules():
            gate = getattr(block, "gate", None) or getattr(block, "router", None)
            if hasattr(block, "experts") and isinstance(gate, nn.Module):
                found.append(gate)
    return [gate for gate in found if not routes_by_token(gate)]


@contextmanager
def seeded(gates: Sequence[nn.Module], top_k: int, first_experts: FirstExperts) -> Iterator[None]:
    """Makes MoE routers choose experts by a seed while the context is open. `first_experts` returns
    the first expert of each row. A forward pass raises SpecError for a router of an unknown kind.
    """
    with ExitStack() as exits:
        for index, gate in enumerate(gates):
            exits.callback(_seed(gate, index, top_k, first_experts))
        yield


def _seed(
    gate: nn.Module, index: int, top_k: int, first_experts: FirstExperts
) -> Callable[[], None]:
    """Makes a MoE router choose seeded experts. Returns a function that restores the router."""
    plain = gate.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _ForcedLogits(lambda n_experts: first_experts(index, n_experts), top_k) as mode:
            output = plain(*args, **kwargs)
        if not mode.forced:
            raise SpecError(
                f"The experts of {type(gate).__name__} cannot be seeded: decode proofs need a"
                " linear gate."
            )
        return output

    gate.forward = forward
    return lambda: delattr(gate, "forward")


class _ForcedLogits(TorchFunctionMode):
    """A context in which forced logits replace the output of the first linear layer that runs."""

    def __init__(self, first_experts: Callable[[int], Tensor | None], top_k: int) -> None:
        super().__init__()
        self.forced = False
        self._first_experts = first_experts
        self._top_k = top_k

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear and not self.forced:
            self.forced = True
            first = self._first_experts(output.shape[-1])
            if first is not None:
                logits = forced_logits(
                    first.reshape(-1), output.shape[-1], self._top_k, output.dtype
                )
                return logits.view_as(output)
        return output
