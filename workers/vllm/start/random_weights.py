"""Draws random weights that are about as large as trained weights, in place of vLLM's dummy
weights.

vLLM's dummy weights are within 0.001 of zero. In 8 bits nearly all of them are zero, and packed
4-bit weights stay uninitialised. Products of zeros need less power, so a GPU computes them faster.
And layers hardly change their inputs, so artifacts do not depend on how they were computed.
"""

import math
import os
import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

# With `off`, --load-format dummy uses vLLM's own weights.
VARIABLE = "PROOFLINE_RANDOM_WEIGHTS"
_ON = "on"
# Standard deviation of the weights: the initial value in transformers.
SPREAD = 0.02
# Root mean square of the unscaled numbers, by storage type. Bits of packed formats are uniform.
_SPREADS = {
    torch.float8_e4m3fn: 64.0,
    torch.uint8: math.sqrt(68.5 / 8),  # MXFP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6
    torch.int8: 74.0,
    torch.int32: math.sqrt(344 / 16),  # eight of 4 bits: -8 to 7
}
_PACKED = ("weight", "weight_packed")
_E4M3_MOST = 448.0
_E8M0_BIAS = 127  # bias of an 8-bit exponent
_CHUNK = 2**26  # numbers drawn at a time: 256 MB


def ask_for(load_format: str) -> None:
    """Makes vLLM processes that start later draw random weights if `load_format` is "dummy", unless
    the operator has set PROOFLINE_RANDOM_WEIGHTS.
    """
    if load_format == "dummy":
        os.environ.setdefault(VARIABLE, _ON)


def are_enabled() -> bool:
    return os.environ.get(VARIABLE) == _ON


@torch.no_grad()
def draw(model: nn.Module) -> None:
    """Overwrites a model's weights with random numbers, norms with 1, and scales with suitable
    values. The seed is a weight's name, so all ranks draw the same numbers for shards of one shape.
    """
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        is_norm = "norm" in type(module).__name__.lower()
        for name, parameter in own.items():
            chosen = getattr(parameter, "dummy_weight_value", None)  # by vLLM
            if parameter.device.type == "meta" or not parameter.numel() or chosen is not None:
                continue
            if is_norm and name == "weight":
                parameter.fill_(1.0)
            elif "scale" in name:
                _set_scale(parameter.data, _unscaled_spread(name, own))
            else:
                seed = zlib.crc32(f"{path}.{name}".encode())
                _draw_one(name, parameter.data, seed)


def _draw_one(name: str, weight: Tensor, seed: int) -> None:
    generator = torch.Generator(weight.device).manual_seed(seed)
    if weight.is_floating_point():
        spread = _SPREADS.get(weight.dtype, SPREAD)
        most = _E4M3_MOST if weight.dtype in _SPREADS else math.inf
        for part in _chunks(weight):
            numbers = torch.empty(part.shape, dtype=torch.float32, device=weight.device)
            part.copy_(numbers.normal_(0, spread, generator=generator).clamp_(-most, most))
    elif weight.dtype in _SPREADS and name.endswith(_PACKED):
        for part in _chunks(weight.view(torch.uint8)):
            part.random_(0, 256, generator=generator)


def _chunks(weight: Tensor) -> Iterator[Tensor]:
    if not weight.is_contiguous():
        yield weight
        return
    yield from weight.view(-1).split(_CHUNK)


def _unscaled_spread(name: str, own: Mapping[str, Tensor]) -> float | None:
    """Returns the standard deviation of the weights that the scale `name` multiplies. Returns None
    if the scale belongs to activations.
    """
    stem = name[: name.index("scale")].rstrip("_")
    weights = [
        one
        for other, one in own.items()
        if other.startswith(stem) and "scale" not in other and one.dtype in _SPREADS
    ]
    return _SPREADS[weights[0].dtype] if weights and "weight" in stem else None


def _set_scale(scale: Tensor, spread: float | None) -> None:
    value = 1.0 if spread is None else SPREAD / spread
    if scale.element_size() == 1:  # an exponent only, perhaps as uint8
        scale.view(torch.uint8).fill_(_E8M0_BIAS + round(math.log2(value)))
    else:
        scale.fill_(value)
