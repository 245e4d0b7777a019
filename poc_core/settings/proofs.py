"""Settings of jobs, of rounds, and of the workers that compute them (protocol.md, section 7)."""

import socket
from typing import Annotated, Literal

from pydantic import Field

from poc_core.fields import MAX_BATCH_SIZE
from poc_core.serving.trusted_models import parse_trusted
from poc_core.settings.theme import Theme, parsed


class ProofSettings(Theme):
    """Jobs, rounds, and the workers that compute them."""

    batch_size_default: int = Field(32, ge=1, le=MAX_BATCH_SIZE)
    """Nonces per batch if a request has no batch_size."""
    max_queued_nonces: int = Field(100_000, ge=1, le=10_000_000)
    """Largest number of nonces in all unfinished jobs; further jobs get 429 (docs/limits.md)."""
    max_result_bytes: int = Field(128 * 1024 * 1024, ge=1024 * 1024, le=2 * 1024 * 1024 * 1024)
    """Largest answer of a job in bytes. The default allows 1,600,000 artifacts of k_dim 12."""
    generate_chunk_timeout_sec: float = Field(60, gt=0)
    """Seconds without a finished batch after which a request with wait=true gets 503. After
    constant chat for half of this time, rounds and jobs get 5 % of the engine's time."""
    generate_result_ttl_sec: int = Field(300, ge=1)
    """Seconds for which a finished job can be fetched. Later the job's request_id is unknown
    (404)."""
    honour_p_value_threshold: bool = False
    """true: a validation uses stat_test.p_value_threshold, as the chain defines this field.
    false: the field is ignored, like on other nodes."""
    decode_codebook: str = ""
    """Path of the network's file with the 16 points of decode proofs (16 x 256 little-endian
    float32) on each worker's machine. Workers refuse other files. Empty: Proofline's own file."""
    experts: Literal["exact", "same"] = "same"
    """How proofs multiply MXFP4 experts (DeepSeek-V4) on Hopper GPUs. exact: with vLLM's kernel.
    same: with a faster kernel that has vLLM's bits."""
    rpc_timeout_ms: int = Field(60_000, ge=1)
    """Milliseconds that one call into the engine may take before the engine counts as lost."""
    worker_ttl_s: int = Field(10, ge=2)
    """A worker without a heartbeat for this many seconds counts as dead, and other workers may
    lease its nonces."""
    engine_hung_s: float = Field(100, gt=0)
    """If requests wait and the engine makes no step for this many seconds, the worker exits with
    code 70 and is restarted. The network node restarts a hanging node after 120 s."""
    host_name: str | None = None
    """This host's name in Flower, status and metrics; set a name in containers. Unset: the system's
    host name."""
    trusted_models: Annotated[str, parsed(parse_trusted)] = ""
    """Models whose code engines may run, in addition to the network's: ORG/NAME@COMMIT, separated
    by commas. If another model is deployed, --trust-remote-code is ignored."""

    @property
    def trusted(self) -> frozenset[str]:
        return parse_trusted(self.trusted_models)

    @property
    def host(self) -> str:
        return self.host_name or socket.gethostname()

    @property
    def max_jobs(self) -> int:
        """The limit of unfinished jobs. One job has about the overhead of five nonces."""
        return max(1, self.max_queued_nonces // 5)

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats of a worker. A few heartbeats may come late."""
        return self.worker_ttl_s / 5

    @property
    def reap_interval_s(self) -> float:
        """Seconds between a worker's searches for leftovers of dead workers."""
        return self.worker_ttl_s / 2
