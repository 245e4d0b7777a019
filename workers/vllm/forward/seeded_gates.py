"""Makes the MoE routers of vLLM's models choose experts by a seed (protocol.md, section 8.2), but
only during a proof's slice; chat is not affected. vLLM's models call a router's logits layer a
gate.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from poc_core.schemes.decode.steps import forced_logits
from workers.engines.decoder_layers import n_chosen_experts, routes_by_token

FirstExperts = Callable[[int, int], Tensor | None]
"""(index of the MoE layer, number of experts) -> the first expert of each row, int64 (rows,).

Returns None if the router chooses the experts itself.
"""

# Names of a gate in models.
_GATES = ("gate", "router")


class Gates:
    """The MoE routers (gates) of this pipeline stage, in the order of the layers. Routers that
    choose experts by token id are not included.
    """

    def __init__(self, layers: nn.ModuleList, own: range, text_config: Any) -> None:
        self._by_layer: dict[int, list[nn.Module]] = {}
        self._tables: dict[tuple[int, torch.dtype], Tensor] = {}
        self._unknown: list[str] = []  # layers of experts whose gate was not found
        self._by_token: list[nn.Module] = []
        self._is_first_stage = own.start == 0
        for index in own:
            self._by_layer[index] = self._find(layers[index])
        self._top_k = n_chosen_experts(text_config)
        self.first = 0  # number of layers of experts in earlier pipeline stages

    def __len__(self) -> int:
        return sum(map(len, self._by_layer.values()))

    @property
    def numbers(self) -> range:
        """The indices of this stage's routers among the routers of the whole model."""
        return range(self.first, self.first + len(self))

    def why_not(self) -> str | None:
        """Returns why this model's experts cannot be chosen by a seed. Returns None if they can."""
        if self._unknown or (len(self) and not self._top_k):
            what = self._unknown[0] if self._unknown else "their number per token"
            return (
                "Decode proofs cannot be computed with this model: its router cannot be seeded "
                f"({what} is not known to this node)."
            )
        if self._by_token and not self._is_first_stage:
            return (
                "Decode proofs cannot be computed with this model over so many pipeline stages: "
                "one that is not the first has layers that choose experts by token."
            )
        return None

    @contextmanager
    def seeded(self, layers: range, first_experts: FirstExperts | None) -> Iterator[None]:
        """Inside the context, replaces the logits of the routers in `layers`, so that the model
        selects the seeded experts. The model processes the new logits as usual. RuntimeError if a
        router was not called, or was called for other rows.

        `first_experts`: returns the seeded experts; None changes nothing.
        """
        if first_experts is None:
            yield
            return
        asked, place = [0], self.first
        wanted: list[tuple[int, nn.Module]] = []
        for index, gates in self._by_layer.items():
            wanted += [(place + i, gate) for i, gate in enumerate(gates) if index in layers]
            place += len(gates)
        with ExitStack() as hooks:
            for number, gate in wanted:
                seed = self._seed(number, first_experts, asked)
                hooks.enter_context(gate.register_forward_hook(seed))
            yield
        if asked[0] != len(wanted):
            raise RuntimeError(
                f"{asked[0]} of {len(wanted)} gates were asked: this model's router cannot be"
                " seeded"
            )

    def _find(self, layer: nn.Module) -> list[nn.Module]:
        found: list[nn.Module] = []
        for name, block in layer.named_modules():
            if not isinstance(getattr(block, "experts", None), nn.Module):
                continue
            named = (getattr(block, gate, None) for gate in _GATES)
            gate = next((gate for gate in named if isinstance(gate, nn.Module)), None)
            if gate is None:
                self._unknown.append(f"the gate of {type(block).__name__} {name}".rstrip())
            elif routes_by_token(gate):
                self._by_token.append(gate)
            elif all(gate is not other for other in found):
                found.append(gate)
        return found

    def _logits_by_first(self, logits: Tensor) -> Tensor:
        """Returns a table of logits (experts, experts). Row i is the logits that select the experts
        of a token whose first expert is i.
        """
        n_experts = logits.shape[-1]
        key = (n_experts, logits.dtype)
        table = self._tables.get(key)
        if table is None:
            first = torch.arange(n_experts, device=logits.device)
            table = self._tables[key] = forced_logits(first, n_experts, self._top_k, logits.dtype)
        return table

    def _seed(self, number: int, first_experts: FirstExperts, asked: list[int]) -> Any:
        def replace(_module: Any, _args: Any, output: Any) -> Any:
            asked[0] += 1
            logits: Tensor = output[0] if isinstance(output, tuple) else output
            n_experts = logits.shape[-1]
            first = first_experts(number, n_experts)
            if first is None:
                return output
            if first.shape[0] != logits.numel() // n_experts:
                raise RuntimeError(
                    f"a gate was asked for {logits.numel() // n_experts} rows of {first.shape[0]}:"
                    " experts cannot be seeded where ranks divide the rows"
                )
            forced = self._logits_by_first(logits)[first].view_as(logits)
            return (forced, *output[1:]) if isinstance(output, tuple) else forced

        return replace
