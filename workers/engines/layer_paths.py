"""Paths of decoder layers in models as vLLM builds them. Without torch: also for commands."""

# Where the network's nodes look for decoder layers: of a model without these they reflect none.
FLEET_PATHS = ("model.layers", "transformer.h", "layers")

# Architectures, by vLLM's class, that wrap a language model: all beyond the fleet's reach.
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
