"""Where a model's decoder layers are, and whether the network reflects them."""

import pytest
from torch import nn

from workers.engines.decoder_layers import find_decoder_layers

N = 3


def model(lists: dict[str, int], name: str = "SomeForCausalLM") -> nn.Module:
    """A model of that class with lists of so many layers at paths."""
    root = nn.Module()
    for path, n in lists.items():
        *parents, own = path.split(".")
        module = root
        for parent in parents:
            if parent not in module._modules:
                module.add_module(parent, nn.Module())
            module = module.get_submodule(parent)
        module.add_module(own, nn.ModuleList(nn.Module() for _ in range(n)))
    root.__class__ = type(name, (nn.Module,), {})
    return root


@pytest.mark.parametrize(
    ("lists", "path"),
    [
        ({"model.layers": N}, "model.layers"),
        ({"transformer.h": N}, "transformer.h"),
        ({"layers": N}, "layers"),
        ({"visual.layers": N, "model.layers": N}, "model.layers"),
    ],
)
def test_what_the_networks_nodes_find_is_reflected(lists: dict[str, int], path: str) -> None:
    found = find_decoder_layers(model(lists), N)
    assert (found.path, found.reflected, len(found.modules)) == (path, True, N)


@pytest.mark.parametrize(
    "architecture",
    [
        "KimiK25ForConditionalGeneration",
        "Glm5NextForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Newer",
    ],
)
def test_wrapped_layers_are_found_and_not_reflected(architecture: str) -> None:
    paths = (
        "vision_tower.encoder.layers",
        "visual.blocks",
        "language_model.model.layers",
        "mtp.layers",
    )
    wrapped = model(dict.fromkeys(paths, N), architecture)
    found = find_decoder_layers(wrapped, N)
    assert (found.path, found.reflected) == ("language_model.model.layers", False)


@pytest.mark.parametrize(
    "path", ["vision_tower.layers", "visual.blocks", "audio_encoder.layers", "model.experts"]
)
def test_another_tower_never_is_the_decoder(path: str) -> None:
    with pytest.raises(LookupError, match="no list of 3 layers"):
        find_decoder_layers(model({path: N}), N)


def test_two_that_may_be_it_are_refused_by_name() -> None:
    with pytest.raises(
        LookupError, match=r"2 lists of 3 layers \(thinker\.layers, talker\.layers\)"
    ):
        find_decoder_layers(model({"thinker.layers": N, "talker.layers": N}), N)


def test_a_list_of_another_length_is_passed_over() -> None:
    assert (
        find_decoder_layers(model({"layers": N + 1, "decoder.layers": N}), N).path
        == "decoder.layers"
    )


def test_lists_inside_a_layer_are_no_decoder() -> None:
    outer = model({"decoder.layers": N})
    outer.get_submodule("decoder.layers.0").add_module(
        "blocks", nn.ModuleList(nn.Module() for _ in range(N))
    )
    assert find_decoder_layers(outer, N).path == "decoder.layers"
