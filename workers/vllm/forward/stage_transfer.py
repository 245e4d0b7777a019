"""Transfers between pipeline stages: activations to the next stage, and the results of decode steps
(points) from the last stage to the first.
"""

from typing import Any

import torch
from torch import nn

from workers.vllm.release import model_parts, parallel


class StageTransfer:
    """One rank's transfers to and from other pipeline stages. Keeps tensors until they have been
    sent.
    """

    def __init__(
        self, worker: Any, model: nn.Module, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._worker = worker
        self._model = model
        self._dtype = dtype
        self._device = device
        # Handles, and the tensors that are being sent.
        self._sends: list[tuple[Any, dict[str, torch.Tensor]]] = []

    def release_sent(self) -> None:
        self._sends = [
            (handle, tensors) for handle, tensors in self._sends if not handle.is_completed()
        ]

    def send(self, activations: dict[str, torch.Tensor]) -> None:
        parallel.wait_for_pending_sends(self._worker)
        handles = parallel.send(_ordered(activations), parallel.stage_index() + 1)
        self._sends += [(handle, activations) for handle in handles]

    def receive(self, n_tokens: int) -> dict[str, torch.Tensor]:
        activations = model_parts.between_stages(self._model, n_tokens, self._dtype, self._device)
        parallel.receive(_ordered(activations), parallel.stage_index() - 1)
        return activations

    def send_points(self, points: torch.Tensor) -> None:
        """Sends the results of a decode step from the last stage to the first, which computes the
        next step's inputs from them.
        """
        self._sends += [(handle, {"points": points}) for handle in parallel.send([points], 0)]

    def receive_points(self, n: int) -> torch.Tensor:
        """Receives the results of a decode step from the last stage: int64 (n,)."""
        points = torch.empty(n, dtype=torch.int64, device=self._device)
        parallel.receive([points], -1)
        return points

    def forget(self) -> None:
        self._sends.clear()


def _ordered(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [tensors[name] for name in sorted(tensors)]
