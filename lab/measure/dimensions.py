"""Creates models that have the dimensions of well-known models, and weights that vLLM generates.

Generated weights have the magnitude of trained weights (workers/vllm/start/random_weights.py), so
that the model is as fast as the real one.
"""

import functools
import inspect
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from cli.grouped import with_parameters
from cli.shipped import shipped_models
from cli.terminal import UsageError
from lab.measure.network_models import NETWORK_MODELS, network_model


def _dimensions(
    hidden_size: int, layers: int, heads: int, kv_heads: int, intermediate_size: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate_size,
        "tie_word_embeddings": False,
    } | more


_EXPERTS = {"num_experts": 128, "num_local_experts": 128, "num_experts_per_tok": 8}
_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_235B = _EXPERTS | {"moe_intermediate_size": 1536, "quantization_config": _FP8}
# Differences from the shipped model named first, which provides the rest and its tokenizer.
DIMENSIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": ("tiny-qwen3", _dimensions(1024, 28, 16, 8, 3072, tie_word_embeddings=True)),
    "qwen3-8b": ("tiny-qwen3", _dimensions(4096, 36, 32, 8, 12288)),
    "qwen3-30b-a3b": (
        "tiny-qwen3-moe",
        _dimensions(2048, 48, 32, 4, 6144, moe_intermediate_size=768, **_EXPERTS),
    ),
    "qwen3-235b-a22b-fp8": ("tiny-qwen3-moe", _dimensions(4096, 94, 64, 4, 12288, **_235B)),
}
# Arguments of `vllm serve` for such a model.
ENGINE_ARGS: Sequence[str] = ("--load-format=dummy",)


NAMES = (*DIMENSIONS, *NETWORK_MODELS)
_Dimensions = Annotated[
    str | None,
    typer.Option(
        help=f"Instead of --model, use generated weights with the dimensions of {', '.join(NAMES)}."
    ),
]
_Layers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="With --dimensions: use only this number of layers, so that the model fits on "
        "this machine.",
    ),
]


def configuration(name: str) -> tuple[str, dict[str, Any]]:
    """Returns the name of a shipped model, whose tokenizer is used, and the configuration of the
    model with the dimensions `name`.

    Raises UsageError if the name is unknown.
    """
    if name in NETWORK_MODELS:
        return "tiny-qwen3", dict(NETWORK_MODELS[name].config)
    if name not in DIMENSIONS:
        raise UsageError(f"There are no dimensions {name!r}; there are: {', '.join(NAMES)}.")
    base, differences = DIMENSIONS[name]
    config = json.loads((shipped_models()[base] / "config.json").read_text())
    config |= {"head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 4096} | differences
    if "layer_types" in config:
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    return base, config


@contextmanager
def model_directory(name: str, layers: int | None = None) -> Iterator[str]:
    """Yields a temporary directory with a model's configuration and a tokenizer, without weights.

    `layers`: how many of the first layers to keep; None keeps all.
    """
    base, config = configuration(name)
    shipped = shipped_models()[base]
    config |= first_layers(config, layers) if layers else {}
    with TemporaryDirectory(prefix="proofline-bench-") as folder:
        directory = Path(folder) / name
        shutil.copytree(
            shipped, directory, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
        )
        (directory / "config.json").write_text(json.dumps(config))
        yield str(directory)


def first_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Returns the changes to a model's configuration with which only its first `layers` layers
    remain.

    Raises UsageError if the model has fewer layers.
    """
    if "text_config" in config:
        return {"text_config": config["text_config"] | first_layers(config["text_config"], layers)}
    whole = config["num_hidden_layers"]
    if layers > whole:
        raise UsageError(f"These dimensions have {whole} layers; give --layers at most that.")
    by_layer = {
        key: value[:layers]
        for key, value in config.items()
        if isinstance(value, list) and len(value) == whole
    }
    return by_layer | {"num_hidden_layers": layers}


def takes_dimensions(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator for a command with engine options: adds the options --dimensions, which replaces
    --model, and --layers.
    """

    @functools.wraps(command)
    def with_dimensions(
        *,
        model: str | None,
        dimensions: str | None,
        layers: int | None,
        engine: str,
        vllm_args: list[str] | None,
        **given: Any,
    ) -> None:
        if (model is None) == (dimensions is None):
            raise UsageError("Give one of --model and --dimensions.")
        if dimensions is None:
            if layers is not None:
                raise UsageError("--layers needs --dimensions.")
            command(model=model, engine=engine, vllm_args=vllm_args, **given)
            return
        if engine != "vllm":
            raise UsageError("--dimensions needs --engine vllm, which can generate weights.")
        of_network = network_model(dimensions)
        official = of_network.arguments_here() if of_network else []
        with model_directory(dimensions, layers) as directory:
            command(
                model=directory,
                engine=engine,
                # the last of two arguments counts
                vllm_args=[*official, *(vllm_args or ()), *ENGINE_ARGS],
                **given,
            )

    shared = inspect.signature(command).parameters
    text, options = shared["model"].annotation.__origin__, shared["model"].annotation.__metadata__
    optional = shared["model"].replace(annotation=Annotated[(text | None, *options)], default=None)
    named = optional.replace(name="dimensions", annotation=_Dimensions)
    part = optional.replace(name="layers", annotation=_Layers)
    others = [parameter for name, parameter in shared.items() if name != "model"]
    return with_parameters(with_dimensions, [optional, named, part, *others])
