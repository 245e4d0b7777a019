"""What happens after each decoder layer while a slice of a proof runs, and not a moment longer:
chat never sees it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from workers.vllm.start.watch import Watch

# What the network transforms of a layer's outputs: hidden_states and residual. Hyper-connections
# give more beside them.
_TERMS = 2


class LayerTransform(Protocol):
    """What happens after a layer: a Scheme is one."""

    hidden_size: int

    def transform_terms(self, layer: int, terms: Sequence[Tensor]) -> list[Tensor]:
        """See Scheme."""


@contextmanager
def transformed(
    modules: nn.ModuleList, layers: range, scheme: LayerTransform | None, watch: Watch | None = None
) -> Iterator[None]:
    """Within: the scheme is applied after each of the layers, and the watch looks at what they
    give.

    `scheme`: None where it transforms none.
    """
    handles = []
    try:
        for index in layers:
            if watch is not None:
                handles.append(modules[index].register_forward_hook(_looked_at(watch)))
            if scheme is not None:
                handles.append(modules[index].register_forward_hook(_after_layer(scheme, index)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _looked_at(watch: Watch) -> Any:
    def look(_module: Any, _args: Any, output: Any) -> None:
        watch.look(output[0] if isinstance(output, tuple) else output)

    return look


def _after_layer(scheme: LayerTransform, index: int) -> Any:
    def transform(_module: Any, _args: Any, output: Any) -> Any:
        outputs = output if isinstance(output, tuple) else (output,)
        at = [i for i, x in enumerate(outputs[:_TERMS]) if _is_term(x, scheme.hidden_size)]
        terms = dict(zip(at, scheme.transform_terms(index, [outputs[i] for i in at]), strict=True))
        after = tuple(terms.get(i, x) for i, x in enumerate(outputs))
        return after if isinstance(output, tuple) else after[0]

    return transform


def _is_term(x: Any, hidden_size: int) -> bool:
    return isinstance(x, Tensor) and torch.is_floating_point(x) and x.shape[-1] == hidden_size
