"""Keeps a layer's outputs if a micro-batch is cut after it.

Layers with hyper-connections hand on four tensors, of which the pipeline stages of vLLM's models
hand on fewer: GLM-5.3-Flash's drops two, and DeepSeek-V4's closes the connections, where the next
layer would do so in one kernel with its own beginning, which gives other bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

# By a layer's class, what the next layer calls the tensors that it gives, in their order.
NAMES: Mapping[str, tuple[str, ...]] = {
    "DeepseekV4DecoderLayer": ("x", "residual", "post_mix", "res_mix"),
    "Glm5NextDecoderLayer": ("hidden_states", "residual", "post", "comb"),
}
# Begins the names that vLLM's model does not know, among those that it hands on itself.
_PREFIX = "proofline."


@contextmanager
def handed_on(
    modules: nn.ModuleList, layers: range, own: range, state: Mapping[str, Tensor]
) -> Iterator[dict[str, Tensor]]:
    """Within, the first of the layers takes all that the one before it has handed on.

    `own`: the layers of this rank; `state`: what came with the call. Gives what the last one hands
    on, which fills in the call: nothing where the stage ends, or where vLLM hands on all itself.
    """
    kept: dict[str, Tensor] = {}
    handles = []
    first, last = modules[layers.start], modules[layers.stop - 1]
    given = {name.removeprefix(_PREFIX): x for name, x in state.items() if name.startswith(_PREFIX)}
    try:
        if given:
            handles.append(
                first.register_forward_pre_hook(_in_place_of_arguments(given), with_kwargs=True)
            )
        if layers.stop != own.stop and (names := NAMES.get(type(last).__name__)):

            def keep(_module: Any, _args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                kept.update(zip((_PREFIX + name for name in names), output, strict=True))
                # DeepSeek-V4's model closes the connections of what it gets, for nobody.
                return tuple(x[:1] for x in output)

            handles.append(last.register_forward_hook(keep))
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def _in_place_of_arguments(given: Mapping[str, Tensor]) -> Any:
    def replace(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        bound.arguments.update(given)
        return bound.args, bound.kwargs

    return replace


def with_all(tensors: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the input of a stage's next part: everything kept, else the model's own output.

    Its own names stay, as the model asks for them, but no tensor of theirs: no layer sees it.
    """
    if not kept:
        return dict(tensors)
    return dict.fromkeys(tensors, next(iter(kept.values()))) | dict(kept)
