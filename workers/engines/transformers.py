"""An engine that computes the same proofs with Hugging Face's code, to verify the vLLM engine."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from poc_core import records
from poc_core.errors import ProoflineError
from poc_core.schemes.base import Batch
from poc_core.schemes.decode.codebook import choose_codebook
from poc_core.schemes.decode.limits import ChainLimits
from workers.engines import stages
from workers.engines.base import EngineLostError, EngineMemoryError, WholeBatchEngine
from workers.engines.decoder_layers import find_decoder_layers, n_chosen_experts, n_routed_tokens
from workers.engines.options import EngineOptions
from workers.engines.ready_schemes import ReadySchemes
from workers.engines.seeded_routing import gates, seeded
from workers.engines.shortage import first_line, is_of_memory

# Tokens of one forward: enough to fill a GPU; a large model's activations still fit in memory.
_MAX_BATCH_TOKENS = 8192
_EXPERTS_UNKNOWN = (
    "Decode proofs cannot be computed with this model: the number of experts per token is not known"
    " to this node."
)


class TransformersEngine(WholeBatchEngine):
    """An engine for decoder-only models of the transformers library."""

    def __init__(self, options: EngineOptions) -> None:
        """Loads the model. ProoflineError if loading fails or no decoder layers are found."""
        stages.begin("loading the model")
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            config = AutoConfig.from_pretrained(options.model).get_text_config()
            loaded = AutoModel.from_pretrained(options.model, dtype=options.dtype)
        except (OSError, ValueError, ImportError) as error:
            # ImportError: a number format needs another library.
            raise ProoflineError(f"Cannot load the model {options.model!r}: {error}") from error
        self._model: nn.Module = loaded.eval().requires_grad_(False).to(self._device)
        try:
            found = find_decoder_layers(self._model, config.num_hidden_layers)
        except LookupError as error:
            raise ProoflineError(f"{error}; use the vllm engine.") from error
        self._layers = list(found.modules)
        self._gates = gates(self._layers)
        self._vocab_size = n_routed_tokens(config)
        self._top_k = n_chosen_experts(config)
        self._dtype: torch.dtype = loaded.dtype
        self._schemes = ReadySchemes(
            config.hidden_size, len(self._layers), self._device, self._dtype
        )
        unknown = bool(self._gates) and not self._top_k
        limits = ChainLimits(
            no_chains=_EXPERTS_UNKNOWN if unknown else "",
            codebook=choose_codebook(options.codebook),
        )
        info = records.ModelInfo(
            name=options.name,
            hidden_size=config.hidden_size,
            n_layers=len(self._layers),
            max_seq_len=config.max_position_embeddings,
            max_batch_tokens=options.max_batch_tokens or _MAX_BATCH_TOKENS,
            dtype=str(self._dtype).removeprefix("torch."),
            layers=found.path,
            layers_reflected=found.reflected,
        )
        self.info = limits.on(info)

    def compute_batch(self, spec: records.ProofSpec, nonces: Sequence[int]) -> list[JsonValue]:
        scheme = self._schemes.of(spec)
        try:
            with torch.inference_mode():
                return self._run(scheme.begin(nonces, reflected=self.info.layers_reflected))
        except torch.AcceleratorError as error:
            raise EngineLostError(
                f"The accelerator failed ({error}); restart the worker."
            ) from error
        except Exception as error:
            if not is_of_memory(error):
                raise
            raise EngineMemoryError(first_line(error)) from error

    def _run(self, batch: Batch) -> list[JsonValue]:
        order, cache = batch.order, None
        for step in range(order.n_passes):
            ids = None
            if self._vocab_size is not None:
                ids = batch.token_ids(step, self._vocab_size).view(order.n, -1)
            with (
                _with_token_ids(self._layers, ids),
                _transformed_layers(self._layers, batch, step),
                seeded(
                    self._gates if batch.seeds_experts else (),
                    self._top_k,
                    partial(batch.first_experts, step),
                ),
            ):
                output = self._model(
                    inputs_embeds=batch.inputs(step).view(order.n, -1, self.info.hidden_size),
                    use_cache=bool(order.shape.steps),
                    past_key_values=cache,
                )
            cache = output.past_key_values if order.shape.steps else None
            batch.take(step, output.last_hidden_state)
        return batch.values(batch.numbers().cpu())

    def close(self) -> None:
        self._layers = []
        self._gates = []
        vars(self).pop("_schemes", None)
        self._model = nn.Module()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def _with_token_ids(layers: Sequence[nn.Module], ids: Tensor | None) -> Iterator[None]:
    """Passes `ids` to each layer, because the model itself accepts either ids or embeddings."""

    def add_ids(
        module: nn.Module, args: tuple[Any, ...], others: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, others | {"input_ids": ids}

    with ExitStack() as exits:
        for layer in layers if ids is not None else ():
            exits.callback(layer.register_forward_pre_hook(add_ids, with_kwargs=True).remove)
        yield


@contextmanager
def _transformed_layers(layers: Sequence[nn.Module], batch: Batch, step: int) -> Iterator[None]:
    """Inside the context, transforms each layer's output if pass `step` has a transformation."""
    transform = batch.transform(step)
    with ExitStack() as exits:
        for index, layer in enumerate(layers if transform is not None else ()):
            assert transform is not None
            hook = _transform_sum if batch.scheme.transform_is_linear else _transform_terms
            for handle in hook(layer, partial(transform.transform_terms, index)):
                exits.callback(handle.remove)
        yield


_Terms = Callable[[Sequence[Tensor]], list[Tensor]]


def _transform_sum(layer: nn.Module, transform: _Terms) -> list[torch.utils.hooks.RemovableHandle]:
    return [_replace_output(layer, lambda x: transform([x])[0])]


def _transform_terms(
    layer: nn.Module, transform: _Terms
) -> list[torch.utils.hooks.RemovableHandle]:
    """Registers hooks that transform both summands of a layer's output, as in vLLM: the residual,
    and the output of the last child module (the MLP, or a norm after it). Returns hook handles.
    """
    last: list[Tensor] = []

    def remember(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        last[:] = [output[0] if isinstance(output, tuple) else output]

    def apart(x: Tensor) -> Tensor:
        hidden_states = last.pop().view_as(x)
        one, other = transform([hidden_states, x - hidden_states])
        return one + other

    handles = [child.register_forward_hook(remember) for child in layer.children()]
    return [*handles, _replace_output(layer, apart)]


def _replace_output(
    layer: nn.Module, transform: Callable[[Tensor], Tensor]
) -> torch.utils.hooks.RemovableHandle:
    """Registers a hook that transforms the hidden states of a layer's output. Returns the hook."""

    def hook(
        module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]
    ) -> Tensor | tuple[Tensor, ...]:
        if isinstance(output, tuple):
            return (transform(output[0]), *output[1:])
        return transform(output)

    return layer.register_forward_hook(hook)
