"""KV caches and state caches in which decode proofs keep their sequences between steps. They are
separate from chat's caches.
"""

import math
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from workers.vllm.forward.kv_isolation import ScratchCaches
from workers.vllm.release import kv_caches

# Share of the memory that is free after the engine has started.
_SHARE_OF_FREE = 0.5
# On a CPU, which does not report free memory: share of the size of chat's caches.
_SHARE_OF_CHATS = 0.25
# Alignment of each cache in bytes, as in torch's allocator.
_ALIGNMENT = 512


class Place:
    """A set of caches, one per layer, for one micro-batch at a time. On a GPU the memory stays
    reserved. On a CPU it grows with the micro-batch.
    """

    def __init__(self, memory: Tensor | None) -> None:
        self.caches: dict[str, list[Tensor]] = {}
        self.shape = (0, 0)  # capacity of the caches: sequences with states, and tokens
        self.is_taken = False
        self.memory = memory  # uint8
        self._used = 0

    def make(self, scratch: ScratchCaches, n_sequences: int, n_tokens: int) -> None:
        """Creates caches of zeros for a number of sequences and tokens. On a GPU they lie in the
        reserved memory, always at the same addresses.
        """
        self.caches.clear()  # freed before the new ones are created
        self.shape = (0, 0)  # if memory is short, the next micro-batch creates caches
        self._used = 0
        zeros = None if self.memory is None else self._zeros
        self.caches = scratch.new_caches(n_sequences, n_tokens, zeros)
        self.shape = (n_sequences, n_tokens)

    def _zeros(self, n: int, dtype: torch.dtype) -> Tensor:
        assert self.memory is not None
        size, first = n * dtype.itemsize, self._used
        assert first + size <= len(self.memory), "more is kept than there is memory for"
        self._used = first + -(-size // _ALIGNMENT) * _ALIGNMENT
        return self.memory[first : first + size].zero_().view(dtype)


class StepCaches:
    """The caches of decode proofs: one Place (set of caches) for each micro-batch that can be in
    progress at the same time.
    """

    def __init__(self, scratch: ScratchCaches, device: torch.device) -> None:
        self._scratch = scratch
        self.groups = scratch.groups
        self.on_gpu = device.type == "cuda"
        self._device = device
        self.places: list[Place] = []
        # A sequence occupies a multiple of this number of tokens, with any layer's block size.
        self.block = math.lcm(*(group.block_size for group in scratch.groups), 1)
        self._per_token = max(scratch.scratch_bytes_per_token(), 1)
        self._per_state = scratch.scratch_bytes_per_state()
        # One block of each cache is vLLM's null block.
        self._fixed = (
            self._per_token * self.block + self._per_state + _ALIGNMENT * scratch.n_new_caches()
        )

    @property
    def state(self) -> int:
        """The number of tokens that need as much memory as the states of one sequence."""
        return -(-self._per_state // self._per_token)

    def why_not(self) -> str | None:
        """Returns why decode steps cannot be computed with this model. Returns None if they can."""
        for group in self.groups:
            if group.is_state and not kv_caches.carries_state(group.group):
                return (
                    "Decode proofs cannot be computed with this model on vLLM: whether the state of"
                    f" its {type(group.group.get_metadata_builder(0)).__name__} is carried from"
                    " step to step is not known to this node."
                )
        return None

    def room(self, n_places: int, limit_bytes: int | None) -> int:
        """Returns how many tokens fit into each of `n_places` places. The states of a sequence
        count as `state` tokens. `limit_bytes`: the memory for all places together; None means a
        share of the free memory.
        """
        if limit_bytes is None and self.on_gpu:
            limit_bytes = int(_SHARE_OF_FREE * torch.cuda.mem_get_info(self._device)[0])
        elif limit_bytes is None:
            limit_bytes = int(_SHARE_OF_CHATS * self._scratch.chats_bytes())
        per_place = (limit_bytes // n_places - self._fixed) // self._per_token
        return max(0, per_place // self.block * self.block)

    def reserve(self, n_places: int, n_tokens: int) -> None:
        """Creates `n_places` places for `n_tokens` tokens each. On a GPU, also reserves their
        memory.
        """
        self.places.clear()
        for _ in range(n_places):
            memory = None
            if self.on_gpu:
                n_bytes = self._fixed + n_tokens * self._per_token
                memory = torch.empty(n_bytes, dtype=torch.uint8, device=self._device)
            place = Place(memory)
            if self.on_gpu and not self._per_state:  # then one shape serves all micro-batches
                place.make(self._scratch, 0, n_tokens)
            self.places.append(place)

    def take(self, n: int, positions: int) -> Place:
        """Returns a free Place, prepared for `n` new sequences of `positions` tokens. The place is
        occupied until `free` is called.
        """
        place = next(place for place in self.places if not place.is_taken)
        n_tokens = n * -(-positions // self.block) * self.block
        n_states = n if self._per_state else 0
        if place.shape[0] < n_states or place.shape[1] < n_tokens:
            place.make(self._scratch, n_states, n_tokens)
        else:
            self._scratch.clear(place.caches, n, positions)
        place.is_taken = True
        return place

    def free(self, place: Place) -> None:
        place.is_taken = False

    def free_all(self) -> None:
        for place in self.places:
            place.is_taken = False

    def bound(self, place: Place) -> AbstractContextManager[None]:
        """Inside the context, the attention layers use the caches of `place`. Restores chat's
        caches afterwards, also after an error.
        """
        return self._scratch.bound_to(place.caches)
