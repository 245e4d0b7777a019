"""Compares the measured rate of a network model with the rates that operators publish."""

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
    """A measured rate and the published rate of the same model, both in nonces per minute at the
    network's seq_len.

    If only some layers were computed, the measured rate is scaled to the complete model.
    """

    model: str
    layers: int  # number of computed layers
    of_layers: int
    per_gpu: float
    gpu: str | None  # this machine's card by its published name; None if it is unknown
    published: int | None  # of HOST_GPUS cards

    @property
    def per_host(self) -> float:
        """Returns the measured rate, in nonces per minute, of a host with HOST_GPUS such GPUs."""
        return HOST_GPUS * self.per_gpu

    def lines(self) -> list[str]:
        """Returns the lines that `bench` prints about the two rates."""
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
    """Returns the measured rate and the published rate; None if the network does not run the model,
    or its seq_len was not measured.

    `layers`: number of layers that the engine computed.
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
    """Returns how many decoder layers the complete model has."""
    config = model.config.get("text_config", model.config)
    return int(config["num_hidden_layers"])


def slower_by(one: SeqLenSpeeds, more_layers: float) -> float:
    """Returns the factor by which a nonce takes longer if the model has `more_layers` times as many
    layers.

    The time for the inputs, and for the steps after the last layer (the tail), stays the same.
    """
    once = one.parts.share(INPUTS) + one.parts.share(TAIL) if one.parts else 0.0
    return once + (1 - once) * more_layers
