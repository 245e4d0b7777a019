"""What pipeline stages hand to each other within a tick: activations to the next one, points
back to the first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from workers.vllm import compat


class HandOver:
    """One rank's side of it. Sends are only begun; what they read is kept until they are done."""

    def __init__(
        self, worker: Any, model: nn.Module, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._worker = worker
        self._model = model
        self._dtype = dtype
        self._device = device
        self._sends: list[
            tuple[Any, dict[str, torch.Tensor]]
        ] = []  # a handle, and the tensors it reads

    def release_sent(self) -> None:
        self._sends = [
            (handle, tensors) for handle, tensors in self._sends if not handle.is_completed()
        ]

    def send(self, activations: dict[str, torch.Tensor]) -> None:
        """To the next stage."""
        compat.wait_for_pending_sends(self._worker)
        self._sends += [(handle, activations) for handle in compat.send_to_next_stage(activations)]

    def receive(self, n_tokens: int) -> dict[str, torch.Tensor]:
        """From the stage before."""
        activations = compat.between_stages(self._model, n_tokens, self._dtype, self._device)
        compat.receive_from_previous_stage(activations)
        return activations

    def send_points(self, points: torch.Tensor) -> None:
        """From the last stage to the first, which makes the next step's inputs of them."""
        self._sends.append((compat.send_to_first_stage(points), {"points": points}))

    def receive_points(self, n: int) -> torch.Tensor:
        """int64 (n,)."""
        points = torch.empty(n, dtype=torch.int64, device=self._device)
        compat.receive_from_last_stage(points)
        return points

    def forget(self) -> None:
        self._sends.clear()
