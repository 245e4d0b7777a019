"""Passes all outputs of a slice's last layer to the next slice. Layers with hyper-connections
return four tensors, but pipeline stages of vLLM's models pass on fewer: GLM-5.3-Flash drops two,
and DeepSeek-V4 merges the connections. If no slice ends there, the next layer merges the
connections in one kernel with its first operations, which rounds differently.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

# By a layer's class, the next layer's argument names for its outputs, in order.
NAMES: Mapping[str, tuple[str, ...]] = {
    "DeepseekV4DecoderLayer": ("x", "residual", "post_mix", "res_mix"),
    "Glm5NextDecoderLayer": ("hidden_states", "residual", "post", "comb"),
}
# Prefix of our names among the names that vLLM's model passes on.
_PREFIX = "proofline."


@contextmanager
def handed_on(
    modules: nn.ModuleList, layers: range, own: range, state: Mapping[str, Tensor]
) -> Iterator[dict[str, Tensor]]:
    """Inside the context, passes all outputs of the layer before `layers` to the first of `layers`.
    Yields a dictionary, which the forward pass fills with the outputs of the last of `layers`. It
    stays empty at the end of this pipeline stage, and for models whose stages pass on all outputs.

    `own`: the layers of this rank. `state`: the input of the forward pass.
    """
    kept: dict[str, Tensor] = {}
    first, last = modules[layers.start], modules[layers.stop - 1]
    given = {name.removeprefix(_PREFIX): x for name, x in state.items() if name.startswith(_PREFIX)}
    with ExitStack() as hooks:
        if given:
            replace = _in_place_of_arguments(given)
            hooks.enter_context(first.register_forward_pre_hook(replace, with_kwargs=True))
        if layers.stop != own.stop and (names := NAMES.get(type(last).__name__)):

            def keep(_module: Any, _args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                kept.update(zip((_PREFIX + name for name in names), output, strict=True))
                # DeepSeek-V4's model closes the connections of its input; the result is not used.
                return tuple(x[:1] for x in output)

            hooks.enter_context(last.register_forward_hook(keep))
        yield kept


def _in_place_of_arguments(given: Mapping[str, Tensor]) -> Any:
    def replace(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        bound.arguments.update(given)
        return bound.args, bound.kwargs

    return replace


def with_all(tensors: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the input of a stage's next slice: all outputs in `kept`, or `tensors` if `kept` is
    empty. vLLM's model reads the names in `tensors`, so the result also contains these names. Their
    values are arbitrary, because no layer uses them.
    """
    if not kept:
        return dict(tensors)
    return dict.fromkeys(tensors, next(iter(kept.values()))) | dict(kept)
