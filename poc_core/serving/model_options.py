"""A model and how an engine is to serve it: of a deployment, of a command line, of a worker."""

from pathlib import PurePath

from pydantic import BaseModel, ConfigDict, Field

from poc_core.serving.dtypes import Dtype


class ModelOptions(BaseModel):
    """Options of one model. A host's own options fill in the rest (`model_fields_set`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str  # a name on the Hugging Face hub, a shipped model's, or a directory on every host
    served_model_name: str | None = None  # as clients request it; None: see `name`
    dtype: Dtype = "auto"  # of the weights; auto: the checkpoint's
    tensor_parallel: int = Field(1, ge=1)
    pipeline_parallel: int = Field(1, ge=1)
    # tokens of one forward; None: the engine's own default
    max_batch_tokens: int | None = Field(None, ge=1)
    vllm_args: tuple[str, ...] = ()  # further arguments of `vllm serve`, as on its command line

    @property
    def name(self) -> str:
        """The model's name for clients; by default the last part of a directory."""
        return self.served_model_name or (
            PurePath(self.model).name if self.is_directory else self.model
        )

    @property
    def is_directory(self) -> bool:
        """True if the model is a path, which only hosts can read."""
        return self.model.startswith(("/", ".", "~"))

    @property
    def n_devices(self) -> int:
        """GPUs (on a CPU: processes) of one engine."""
        return self.tensor_parallel * self.pipeline_parallel
