"""Compares this machine's rate of a network's model with what operators publish."""

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
    """Nonces a minute of the whole model at the network's seq_len, as measured or scaled."""

    model: str
    layers: int  # that were computed
    of_layers: int
    per_gpu: float
    gpu: str | None  # the published card that this machine's is; None: none of them, or unknown
    published: int | None  # of HOST_GPUS

    @property
    def per_host(self) -> float:
        """Nonces a minute of HOST_GPUS such cards, as many engines beside each other."""
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
    """None: not a model of the network's, or not measured at its seq_len.

    `layers`: how many the engine has.
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
    """Decoder layers of the whole model."""
    config = model.config.get("text_config", model.config)
    return int(config["num_hidden_layers"])


def slower_by(one: SeqLenSpeeds, more_layers: float) -> float:
    """How many times as long a nonce takes with that many times the layers: inputs and the tail
    are made once all the same."""
    once = one.parts.share(INPUTS) + one.parts.share(TAIL) if one.parts else 0.0
    return once + (1 - once) * more_layers
