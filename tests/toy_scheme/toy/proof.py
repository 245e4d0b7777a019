"""The half with torch: each step is the place of the largest number in another part of the last
state.
"""

from collections.abc import Sequence

import torch
from pydantic import JsonValue
from torch import Tensor

from poc_core.schemes.base import PrefillScheme
from poc_core.schemes.toy.contract import ToyOptions  # type: ignore[import-not-found]  # only where a test puts it


class ToyScheme(PrefillScheme):
    transforms_layers = False

    def numbers(self, nonces: Sequence[int], last_hidden: Tensor) -> Tensor:
        n_steps = ToyOptions.checked(self.spec, self.hidden_size).n_steps
        parts = [part.argmax(-1) for part in last_hidden.tensor_split(n_steps, dim=-1)]
        return torch.stack(parts, -1) % 16

    def values(self, nonces: Sequence[int], numbers: Tensor) -> list[JsonValue]:
        return list(numbers.tolist())


SCHEME = ToyScheme
