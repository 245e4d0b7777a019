"""An independent implementation of chains: a family's transformers class, step by step in float32.

This module uses only the codebook file of the product. Seeds, inputs, reflections, picks and
experts are implemented again from the specification, so that a mistake is not repeated.
"""

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

_CODEBOOK = Path(__file__).parents[2] / "poc_core" / "schemes" / "decode" / "codebook.f32"
_DIMENSIONS = 256
_EMBED, _PICK, _TOKEN = 0x0D, 0x91, 0x57
# Paths of the modules that run the decoder layers in transformers' models.
_DECODERS = ("language_model", "model.language_model", "")
_FIRST_LOGIT, _OTHER_LOGITS = 100, -10000.0


class Chain(NamedTuple):
    """The chain of one nonce."""

    points: list[int]
    scores: list[list[float]]  # of each step, by point


class Wanted(NamedTuple):
    """The chains to compute. `claims`: points by nonce that steps follow instead of their own."""

    block_hash: str
    public_key: str
    seq_len: int
    max_tokens: int
    nonces: tuple[int, ...]
    claims: Mapping[int, Sequence[int]] | None = None
    other_ids: bool = False  # uses the token ids of another proof, to see their influence


def seed(text: str) -> int:
    return int(struct.unpack(">I", hashlib.sha256(text.encode()).digest()[:4])[0])


def hashes(keys: Any, start: int) -> np.ndarray:
    """Returns MurmurHash3 of 32-bit keys without the length, uint32 in the shape of `keys`."""
    key = np.asarray(keys, dtype=np.uint64)

    def product(x: Any, factor: int) -> np.ndarray:
        return np.asarray(x * np.uint64(factor) & np.uint64(0xFFFFFFFF))

    def turned(x: Any, bits: int) -> np.ndarray:
        return np.asarray(
            (x << np.uint64(bits) | x >> np.uint64(32 - bits)) & np.uint64(0xFFFFFFFF)
        )

    h = np.uint64(start) ^ product(turned(product(key, 0xCC9E2D51), 15), 0x1B873593)
    h = (turned(h, 13) * np.uint64(5) + np.uint64(0xE6546B64)) & np.uint64(0xFFFFFFFF)
    h = product(h ^ h >> np.uint64(16), 0x85EBCA6B)
    h = product(h ^ h >> np.uint64(13), 0xC2B2AE35)
    return np.asarray((h ^ h >> np.uint64(16)).astype(np.uint32))


def normal(start: int, n: int) -> Tensor:
    """Returns normally distributed numbers, float32 (n,)."""
    half = (n + 1) // 2
    uniform = hashes(np.arange(2 * half), start).astype(np.float32) / np.float32(2**32)
    radius = np.sqrt(-2 * np.log(np.maximum(uniform[:half], np.float32(1e-10))))
    angle = np.float32(2 * np.pi) * uniform[half:]
    both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return torch.from_numpy(both[:n].astype(np.float32))


def picked(start: int, hidden: int) -> Tensor:
    """Returns the dimensions with the smallest hashes, ascending, that of the largest hash last."""
    found = hashes(np.arange(hidden), start)
    order = np.argsort(found, kind="stable")[:_DIMENSIONS]
    return torch.tensor([*sorted(order[:-1].tolist()), int(order[-1])])


class Nonce:
    """A chain in progress."""

    def __init__(self, wanted: Wanted, number: int) -> None:
        self.wanted, self.number = wanted, number
        self.name = f"{wanted.block_hash}_{wanted.public_key}"
        self.base = seed(f"{self.name}_nonce{number}")
        self.chain = Chain([], [])

    @property
    def t(self) -> int:
        return len(self.chain.points)

    def step_seed(self, salt: int) -> int:
        claims = (self.wanted.claims or {}).get(self.number, self.chain.points)
        mixed = claims[self.t - 1] * 0x9E3779B1 + self.t * 0x85EBCA77 + salt
        return int(hashes(mixed % 2**32, self.base))

    def inputs(self, hidden: int) -> Tensor:
        """Returns the embeddings of the next step (positions, hidden)."""
        if self.t == 0:
            return normal(self.base, self.wanted.seq_len * hidden).view(-1, hidden)
        return normal(self.step_seed(_EMBED), hidden)[None]

    def token_ids(self, vocab_size: int) -> list[int]:
        if self.t == 0:
            start, keys = seed(f"{self.name}_nonce{self.number}_input_ids"), self.wanted.seq_len
        else:
            start, keys = self.step_seed(_TOKEN), 1
        start ^= self.wanted.other_ids
        return [int(one) % vocab_size for one in hashes(np.arange(keys), start)]

    def first_expert(self, moe_layer: int, n_experts: int) -> int:
        start = seed(f"{self.wanted.block_hash}_n{self.number}_route_layer_{moe_layer}")
        return int(hashes(self.t, start)) % n_experts

    def take(self, state: Tensor) -> None:
        """Adds the point of the state (hidden,) at the last position."""
        start = (
            seed(f"{self.name}_nonce_{self.number}_pick_{_DIMENSIONS}_decode0")
            if self.t == 0
            else self.step_seed(_PICK)
        )
        x = state.float() / (state.float().norm() + 1e-8)
        q = x[picked(start, len(x))]
        codebook = np.fromfile(_CODEBOOK, dtype="<f4").reshape(-1, _DIMENSIONS)
        scores = torch.from_numpy(codebook) @ (q / (q.norm() + 1e-8))
        self.chain.points.append(int(np.argmax(scores.numpy())))
        self.chain.scores.append(scores.tolist())


def chains(model: str, wanted: Wanted) -> dict[int, Chain]:
    """Returns the chains by nonce of a model in a folder, computed on the CPU in float32."""
    import transformers

    loaded: Any = transformers.AutoModel.from_pretrained(model, dtype=torch.float32)
    config = loaded.config.get_text_config()
    decoder = _decoder(loaded.eval(), config.num_hidden_layers)
    nonces, cache = [Nonce(wanted, number) for number in wanted.nonces], None
    with torch.inference_mode(), _reflected(decoder.layers, wanted.block_hash, config.hidden_size):
        for _ in range(wanted.max_tokens + 1):
            inputs = torch.stack([nonce.inputs(config.hidden_size) for nonce in nonces])
            ids = torch.tensor([nonce.token_ids(config.vocab_size) for nonce in nonces])
            with _told(decoder.layers, ids), _led(decoder.layers, nonces, config):
                output = decoder(inputs_embeds=inputs, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            for nonce, state in zip(nonces, output.last_hidden_state[:, -1], strict=True):
                nonce.take(state)
    return {nonce.number: nonce.chain for nonce in nonces}


def _decoder(model: nn.Module, n_layers: int) -> Any:
    """Returns the module that runs the layers of the text model."""
    for path in _DECODERS:
        try:
            found: Any = model.get_submodule(path)
        except AttributeError:
            continue
        if len(getattr(found, "layers", ())) == n_layers:
            return found
    raise LookupError(f"no {n_layers} layers in {type(model).__name__}")


@contextmanager
def _reflected(layers: Sequence[nn.Module], block_hash: str, hidden: int) -> Iterator[None]:
    """Reflects the output of every layer inside the context."""

    def hook(index: int) -> Callable[[Any, Any, Any], Any]:
        v = normal(seed(f"{block_hash}_layer_{index}_householder"), hidden)
        v = v / v.norm()

        def reflect(_module: Any, _args: Any, output: Any) -> Any:
            x = output[0] if isinstance(output, tuple) else output
            x = x - 2 * (x @ v)[..., None] * v
            return (x, *output[1:]) if isinstance(output, tuple) else x

        return reflect

    with ExitStack() as exits:
        for index, layer in enumerate(layers):
            exits.callback(layer.register_forward_hook(hook(index)).remove)
        yield


@contextmanager
def _told(layers: Sequence[nn.Module], ids: Tensor) -> Iterator[None]:
    """Passes the ids (nonces, positions) to layers with a table of tokens' experts."""

    def tell(_module: Any, args: Any, others: dict[str, Any]) -> Any:
        return args, others | {"input_ids": ids}

    with ExitStack() as exits:
        for layer in layers:
            if any(hasattr(module, "tid2eid") for module in layer.modules()):
                exits.callback(layer.register_forward_pre_hook(tell, with_kwargs=True).remove)
        yield


@contextmanager
def _led(layers: Sequence[nn.Module], nonces: Sequence[Nonce], config: Any) -> Iterator[None]:
    """Makes gates choose the seeded experts, except gates with a table of tokens' experts."""
    gates = []
    for layer in layers:
        for block in layer.modules():
            gate = getattr(block, "gate", None) or getattr(block, "router", None)
            if hasattr(block, "experts") and isinstance(gate, nn.Module):
                gates += [] if hasattr(gate, "tid2eid") else [gate]
    with ExitStack() as exits:
        for moe_layer, gate in enumerate(gates):
            exits.enter_context(_one_led(gate, moe_layer, nonces, config.num_experts_per_tok))
        yield


@contextmanager
def _one_led(gate: Any, moe_layer: int, nonces: Sequence[Nonce], top_k: int) -> Iterator[None]:
    plain, linear = gate.forward, nn.functional.linear

    def logits(*args: Any, **others: Any) -> Tensor:
        found: Tensor = linear(*args, **others)
        n_experts = found.shape[-1]
        rows = torch.full((len(nonces), n_experts), _OTHER_LOGITS, dtype=found.dtype)
        for row, nonce in zip(rows, nonces, strict=True):
            first = nonce.first_expert(moe_layer, n_experts)
            for j in range(top_k):
                row[(first + j) % n_experts] = _FIRST_LOGIT + top_k - j
        positions = found.numel() // rows.numel()
        return rows.repeat_interleave(positions, 0).view_as(found)

    def forward(*args: Any, **others: Any) -> Any:
        with patch.object(nn.functional, "linear", logits):
            return plain(*args, **others)

    gate.forward = forward
    try:
        yield
    finally:
        del gate.forward
