"""Compares this machine's rate for a model of the network with the rates that operators publish."""

from dataclasses import dataclass

from lab.measure.network_models import (
    HOST_GPUS,
    PUBLISHED_ON,
    PUBLISHED_SEQ_LEN,
    NetworkModel,
    network_model,
)
from lab.measure.speed import SeqLenSpeeds, Speeds
from lab.measure.time_parts import INPUTS, TAIL


@dataclass(frozen=True)
class BesidePublished:
    """A measured rate next to the published one, in nonces a minute of the complete model at the
    network's seq_len. Rates of fewer layers are scaled.
    """

    model: str
    layers: int  # number of computed layers
    of_layers: int
    per_gpu: float
    gpu: str | None  # this machine's card by its published name; None if it is unknown
    published: int | None  # of HOST_GPUS cards

    @property
    def per_host(self) -> float:
        """Returns the nonces a minute of a host with HOST_GPUS such GPUs."""
        return HOST_GPUS * self.per_gpu

    def lines(self) -> list[str]:
        """Returns the lines to print."""
        scaled = (
            f" (computed with {self.layers} of {self.of_layers} layers, scaled as if all were"
            " alike)"
            if self.layers < self.of_layers
            else ""
        )
        ours = (
            f"{self.model} at seq_len {PUBLISHED_SEQ_LEN}: {self.per_gpu:,.0f} nonces a minute per"
            f" GPU, {self.per_host:,.0f} of {HOST_GPUS} GPUs{scaled}."
        )
        if self.published is None:
            return [ours, "Operators publish no rate for this model on such a GPU."]
        return [
            ours,
            f"Operators publish {self.published:,} of {HOST_GPUS} {self.gpu} ({PUBLISHED_ON}):"
            f" {self.per_host / self.published:.2f} times that.",
        ]


def beside_published(speeds: Speeds, layers: int) -> BesidePublished | None:
    """Compares the speeds with the published rates. None if the network does not run the model, or
    another seq_len was measured.

    `layers`: number of layers in the engine.
    """
    model = network_model(speeds.model)
    one = next((one for one in speeds.seq_lens if one.seq_len == PUBLISHED_SEQ_LEN), None)
    if model is None or one is None:
        return None
    whole = layers_of(model)
    per_gpu = 60 * one.best / slower_by(one, whole / layers) / speeds.n_devices
    device = one.parts.device if one.parts else ""
    gpu = next((gpu for gpu in model.published if gpu in device), None)
    published = model.published[gpu] if gpu else None
    return BesidePublished(speeds.model, layers, whole, per_gpu, gpu, published)


def layers_of(model: NetworkModel) -> int:
    """Returns the number of decoder layers of the complete model."""
    config = model.config.get("text_config", model.config)
    return int(config["num_hidden_layers"])


def slower_by(one: SeqLenSpeeds, more_layers: float) -> float:
    """Returns by which factor a nonce takes longer with `more_layers` times as many layers.

    The time for inputs and for the tail (after the last layer) does not depend on the layers.
    """
    once = one.parts.share(INPUTS) + one.parts.share(TAIL) if one.parts else 0.0
    return once + (1 - once) * more_layers
