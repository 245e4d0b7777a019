"""What an operator says about an engine; handed from process to process as JSON."""

from typing import Self

from pydantic import Field, model_validator

from poc_core.errors import OptionsError
from poc_core.serving.model_options import ModelOptions
from workers.engines.kinds import EngineKind, LogprobTokens, Validation


class EngineOptions(ModelOptions):
    """Options of a model and of the machine that serves it; each engine takes what concerns it.

    OptionsError: options that do not go together.
    """

    engine: EngineKind = "vllm"
    # GB of each device for keys and values of decode proofs' steps; None: a share of what is free
    decode_memory_gb: float | None = Field(None, ge=0)
    synthetic_step_ms: float = Field(50.0, ge=0)  # how long a batch takes
    logprob_tokens: LogprobTokens = "ids"  # text: to requests with none of the network's fields
    validation: Validation = "auto"  # how known tokens of chat are scored
    codebook: str = ""  # the file with the points of decode proofs; empty: what ships

    @model_validator(mode="after")
    def _leave_vllm_its_own(self) -> Self:
        if self.engine != "vllm" and (self.n_devices > 1 or self.vllm_args):
            raise OptionsError(
                f"Parallelism and arguments after -- are vLLM's; the {self.engine} engine takes"
                " neither."
            )
        return self
