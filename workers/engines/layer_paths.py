"""Module paths of decoder layers in vLLM's models. Imports no torch, so commands start fast."""

# Paths where the network's nodes look for decoder layers. Without these, nodes do not reflect.
FLEET_PATHS = ("model.layers", "transformer.h", "layers")

# vLLM's classes that wrap a language model. The network's nodes do not find their layers.
_WRAPPED = "language_model.model.layers"
KNOWN_PATHS = {
    "DeepseekV4ForConditionalGeneration": _WRAPPED,
    "Gemma3ForConditionalGeneration": _WRAPPED,
    "Gemma3nForConditionalGeneration": _WRAPPED,
    "Gemma4ForConditionalGeneration": _WRAPPED,
    "Glm4vForConditionalGeneration": _WRAPPED,
    "Glm4vMoeForConditionalGeneration": _WRAPPED,
    "Glm5NextForConditionalGeneration": _WRAPPED,
    "KimiK25ForConditionalGeneration": _WRAPPED,
    "KimiVLForConditionalGeneration": _WRAPPED,
    "Mistral3ForConditionalGeneration": _WRAPPED,
    "Qwen3VLForConditionalGeneration": _WRAPPED,
    "Qwen3VLMoeForConditionalGeneration": _WRAPPED,
    "Qwen3_5ForConditionalGeneration": _WRAPPED,
    "Qwen3_5MoeForConditionalGeneration": _WRAPPED,
}
