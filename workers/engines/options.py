"""What an operator says about an engine: read once by a command, handed on whole from process
to process as JSON.
"""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from poc_core.errors import OptionsError
from workers.engines.kinds import Dtype, EngineKind


class EngineOptions(BaseModel):
    """Each kind of engine takes what concerns it. OptionsError: options that do not go together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str  # a directory or a name on the Hugging Face hub
    served_model_name: str | None = None  # as clients request it; None: the same as `model`
    engine: EngineKind = "vllm"
    dtype: Dtype = "auto"  # of the weights; auto: the checkpoint's
    tensor_parallel: int = Field(1, ge=1)
    pipeline_parallel: int = Field(1, ge=1)
    max_batch_tokens: int | None = Field(
        None, ge=1
    )  # tokens of one forward; None: the engine's own default
    # GB of each device in which the steps of decode proofs keep keys and values; None: a share of
    # what is free
    decode_memory_gb: float | None = Field(None, ge=0)
    synthetic_step_ms: float = Field(50.0, ge=0)  # how long a batch takes
    codebook: str = ""  # the file with the points of decode proofs; empty: what ships
    vllm_args: tuple[str, ...] = ()  # further arguments of `vllm serve`, as on its command line

    @model_validator(mode="after")
    def _leave_vllm_its_own(self) -> Self:
        if self.engine != "vllm" and (self.n_devices > 1 or self.vllm_args):
            raise OptionsError(
                f"Parallelism and arguments after -- are vLLM's; the {self.engine} engine takes"
                " neither."
            )
        return self

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or self.model

    @property
    def n_devices(self) -> int:
        """GPUs (on a CPU: processes) of one engine."""
        return self.tensor_parallel * self.pipeline_parallel
