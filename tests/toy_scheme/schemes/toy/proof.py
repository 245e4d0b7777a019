"""The half with torch: each step is the place of the largest number in another part of the last state."""

from collections.abc import Sequence

from pydantic import JsonValue
from torch import Tensor

from poc_core.schemes.base import Scheme
from poc_core.schemes.toy.contract import ToyOptions  # type: ignore[import-untyped]  # only where a test puts it


class ToyScheme(Scheme):
    transforms_layers = False

    def transform_layer(self, layer: int, x: Tensor) -> Tensor:
        return x

    def finish(self, nonces: Sequence[int], last_hidden: Tensor) -> list[JsonValue]:
        n_steps = ToyOptions.checked(self.spec, self.hidden_size).n_steps
        parts = last_hidden.tensor_split(n_steps, dim=-1)
        return [[int(part[row].argmax()) % 16 for part in parts] for row in range(len(nonces))]


SCHEME = ToyScheme
