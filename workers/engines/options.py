"""An engine's options, passed between processes as JSON."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from poc_core.errors import OptionsError
from poc_core.serving.model_options import ModelOptions
from poc_core.settings.chat import LogprobTokens, Validation

EngineKind = Literal["vllm", "transformers", "synthetic"]
# Arguments of `vllm serve` that spread an engine over hosts. HostSpan replaces them.
_OF_HOSTS = (
    *("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port", "--headless"),
    *("--data-parallel-size", "-dp"),
)


class HostSpan(BaseModel):
    """This host's part in an engine that runs on several hosts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    n_hosts: int = Field(ge=2)
    rank: int = Field(ge=0)  # this host's rank; 0 for the head, which runs the engine's worker
    head_host: str  # the address or name on which the head listens
    head_port: int = Field(ge=1, le=65535)

    @property
    def head(self) -> str:
        """HOST:PORT of the head, the host that runs the engine's worker."""
        host = f"[{self.head_host}]" if ":" in self.head_host else self.head_host
        return f"{host}:{self.head_port}"

    @property
    def follows(self) -> str:
        """HOST:PORT of the head if this host is a follower; empty if this host is the head."""
        return self.head if self.rank else ""

    def __str__(self) -> str:
        return f"host {self.rank} of an engine over {self.n_hosts}, head {self.head}"


class EngineOptions(ModelOptions):
    """The options of an engine: its model and its machine. Some options apply only to certain
    engines. OptionsError if options contradict each other.
    """

    engine: EngineKind = "vllm"
    # GB per device for keys and values of decode proofs' steps; None for a share of free memory.
    decode_memory_gb: float | None = Field(None, ge=0)
    synthetic_step_ms: float = Field(50.0, ge=0)  # duration of a batch
    logprob_tokens: LogprobTokens = "ids"  # text: only for requests without the network's fields
    validation: Validation = "auto"  # how known tokens of chat are scored
    codebook: str = ""  # file with the points of decode proofs; empty for the shipped file
    span: HostSpan | None = None  # None if the engine runs on this host only

    @property
    def n_devices_here(self) -> int:
        """The number of GPUs (or of processes on CPUs) that one engine has on this host."""
        return self.n_devices // (self.span.n_hosts if self.span else 1)

    @model_validator(mode="after")
    def _divide_among_hosts(self) -> Self:
        if self.span is None:
            return self
        n_hosts = self.span.n_hosts
        if self.engine != "vllm":
            raise OptionsError(f"Only the vllm engine runs on several hosts, not {self.engine}.")
        if self.span.rank >= n_hosts:
            raise OptionsError(
                f"The ranks of {n_hosts} hosts are 0 to {n_hosts - 1}, not {self.span.rank}."
            )
        if said := [word for word in self.vllm_args if word.partition("=")[0] in _OF_HOSTS]:
            raise OptionsError(
                f"--hosts, --rank and --head replace {said[0]}: leave {said[0]} out."
            )
        if self.model and self.n_devices % n_hosts:
            raise OptionsError(
                f"{n_hosts} hosts cannot share {self.n_devices} device(s) (--tensor-parallel x"
                " --pipeline-parallel) evenly."
            )
        return self

    @model_validator(mode="after")
    def _check_vllm_only(self) -> Self:
        if self.engine != "vllm" and (self.n_devices > 1 or self.vllm_args):
            raise OptionsError(
                f"Parallelism and arguments after -- are vLLM's; the {self.engine} engine takes"
                " neither."
            )
        return self
