"""An engine's options, passed between processes as JSON."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from poc_core.errors import OptionsError
from poc_core.serving.model_options import ModelOptions
from workers.engines.kinds import EngineKind, LogprobTokens, Validation

# Arguments of `vllm serve` that say over which hosts an engine spans; here a HostSpan does.
_OF_HOSTS = (
    *("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port", "--headless"),
    *("--data-parallel-size", "-dp"),
)


class HostSpan(BaseModel):
    """Which part of an engine over several hosts this host has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    n_hosts: int = Field(ge=2)
    rank: int = Field(ge=0)  # of this host; 0: the head, whose worker the engine is
    head_host: str  # the head's address or name, on which it listens
    head_port: int = Field(ge=1, le=65535)

    @property
    def head(self) -> str:
        """HOST:PORT of the head."""
        host = f"[{self.head_host}]" if ":" in self.head_host else self.head_host
        return f"{host}:{self.head_port}"

    @property
    def follows(self) -> str:
        """HOST:PORT of the head, where that is another host; empty on the head."""
        return self.head if self.rank else ""

    def __str__(self) -> str:
        return f"host {self.rank} of an engine over {self.n_hosts}, head {self.head}"


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
    span: HostSpan | None = None  # None: this host has the whole engine

    @property
    def n_devices_here(self) -> int:
        """GPUs (on a CPU: processes) of one engine on this host."""
        return self.n_devices // (self.span.n_hosts if self.span else 1)

    @model_validator(mode="after")
    def _divide_among_hosts(self) -> Self:
        if self.span is None:
            return self
        n_hosts = self.span.n_hosts
        if self.engine != "vllm":
            raise OptionsError(f"An engine over several hosts is vLLM's, not {self.engine}'s.")
        if self.span.rank >= n_hosts:
            raise OptionsError(
                f"The ranks of {n_hosts} hosts are 0 to {n_hosts - 1}, not {self.span.rank}."
            )
        if said := [word for word in self.vllm_args if word.partition("=")[0] in _OF_HOSTS]:
            raise OptionsError(
                f"--hosts, --rank and --head say what {said[0]} would: leave it out."
            )
        if self.model and self.n_devices % n_hosts:
            raise OptionsError(
                f"{n_hosts} hosts cannot share {self.n_devices} device(s) (--tensor-parallel x"
                " --pipeline-parallel) evenly."
            )
        return self

    @model_validator(mode="after")
    def _leave_vllm_its_own(self) -> Self:
        if self.engine != "vllm" and (self.n_devices > 1 or self.vllm_args):
            raise OptionsError(
                f"Parallelism and arguments after -- are vLLM's; the {self.engine} engine takes"
                " neither."
            )
        return self
