"""The options of a model, for a deployment, a command line or a worker."""

from pathlib import PurePath
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

# Number formats. Proofs are verified in float32 and bfloat16; float16 overflows in some models.
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
# vLLM's other names of number formats.
ALSO = {"half": "float16", "float": "float32"}


def dtype_of(word: str) -> str:
    """Returns the usual name of a dtype of vLLM: float16 for half, float32 for float."""
    return ALSO.get(word, word)


class ModelOptions(BaseModel):
    """The options of one model. Fields that are not set get the values of a host's own options."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str  # name on the Hugging Face hub, name of a shipped model, or directory on every host
    served_model_name: str | None = None  # as clients request it; None: see `name`
    dtype: Dtype = "auto"  # dtype of the weights; auto: the checkpoint's
    tensor_parallel: int = Field(1, ge=1)
    pipeline_parallel: int = Field(1, ge=1)
    # Tokens of one forward; None for the engine's default.
    max_batch_tokens: int | None = Field(None, ge=1)
    vllm_args: tuple[str, ...] = ()  # further arguments of `vllm serve`, as on its command line

    @property
    def name(self) -> str:
        """The name for clients: `served_model_name`, else `model` or its last directory."""
        return self.served_model_name or (
            PurePath(self.model).name if self.is_directory else self.model
        )

    @property
    def is_directory(self) -> bool:
        """True if the model is a path on the hosts."""
        return self.model.startswith(("/", ".", "~"))

    @property
    def n_devices(self) -> int:
        """The number of GPUs of one engine; without GPUs, the number of the engine's processes."""
        return self.tensor_parallel * self.pipeline_parallel
