"""What a vLLM engine's own server says at /metrics, without an engine: as 0.32 writes it, counters
beyond the schema's and hours of *_created among it."""

from pathlib import Path

_RECORDED = Path(__file__).parent / "data" / "vllm_metrics" / "0.32.txt"


def metrics_text(model: str = "tiny-qwen3") -> str:
    """Recorded of a real engine that served one request of 5 tokens."""
    return _RECORDED.read_text().replace('model_name="tiny-qwen3"', f'model_name="{model}"')
