"""Caches that keep keys and values of decode proofs from step to step: never chat's blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from workers.vllm.forward.kv_isolation import ScratchCaches

# Share of the memory that is free when the engine has started.
_SHARE_OF_FREE = 0.5
# On a CPU, which tells no free memory: share of what chat's own caches take.
_SHARE_OF_CHATS = 0.25


class Place:
    """The caches of one micro-batch at a time, one for each layer; on a CPU they grow with it."""

    def __init__(self) -> None:
        self.caches: dict[str, list[Tensor]] = {}
        self.n_tokens = 0
        self.is_taken = False


class KeptCaches:
    """A place for each micro-batch that may be under way at a time."""

    def __init__(self, scratch: ScratchCaches, device: torch.device) -> None:
        self._scratch = scratch
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._places: list[Place] = []
        # A sequence takes a multiple of this, also where layers have blocks of several sizes.
        self.block = math.lcm(*(group.block_size for group in scratch.groups), 1)

    def why_not(self) -> str | None:
        """Why steps cannot be computed with this model."""
        if any(group.is_state for group in self._scratch.groups):
            return (
                "Decode proofs cannot be computed with this model on vLLM: its linear attention"
                " keeps a state, which is not carried from step to step yet."
            )
        return None

    def room(self, n_places: int, limit_bytes: int | None) -> int:
        """Tokens that each of `n_places` could keep.

        `limit_bytes`: of all places; None: a share of what is free.
        """
        per_token = self._scratch.own_bytes_per_token()
        if limit_bytes is None and self._on_gpu:
            limit_bytes = int(_SHARE_OF_FREE * torch.cuda.mem_get_info(self._device)[0])
        elif limit_bytes is None:
            limit_bytes = int(_SHARE_OF_CHATS * self._scratch.chats_bytes())
        # One block is vLLM's null block.
        per_place = limit_bytes // n_places // max(per_token, 1) - self.block
        return max(0, per_place // self.block * self.block)

    def reserve(self, n_places: int, n_tokens: int) -> None:
        """Makes the places; on a GPU with all of their memory, which is then always there."""
        self._places = [Place() for _ in range(n_places)]
        if self._on_gpu:
            for place in self._places:
                self._grow(place, n_tokens)

    def take(self, n: int, positions: int) -> Place:
        """A place for `n` sequences of `positions` tokens; to be given back by `free`."""
        place = next(place for place in self._places if not place.is_taken)
        self._grow(place, n * -(-positions // self.block) * self.block)
        place.is_taken = True
        return place

    def free(self, place: Place) -> None:
        place.is_taken = False

    def free_all(self) -> None:
        for place in self._places:
            place.is_taken = False

    @contextmanager
    def bound(self, place: Place) -> Iterator[None]:
        """Binds the place's caches to every attention layer; chat's own again on any exit."""
        with self._scratch.bound_to(place.caches):
            yield

    def _grow(self, place: Place, n_tokens: int) -> None:
        if place.n_tokens < n_tokens:
            place.caches.clear()  # before the new ones are made
            place.caches = self._scratch.own_caches(n_tokens // self.block, self.block)
            place.n_tokens = n_tokens
