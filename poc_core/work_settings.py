"""The settings of what a node computes and keeps: jobs, rounds, callbacks, chat, deployments,
Redis.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from poc_core.fields import MAX_BATCH_SIZE


class WorkSettings(BaseSettings):
    """Of Settings, which checks them."""

    model_config = SettingsConfigDict(env_prefix="POC_", extra="ignore", frozen=True)

    # protocol.md, section 7: names and meanings that operators already use.
    batch_size_default: int = Field(
        32,
        ge=1,
        le=MAX_BATCH_SIZE,
        description="Nonces per batch where a request names no batch_size.",
    )
    max_queued_nonces: int = Field(
        100_000,
        ge=1,
        le=10_000_000,
        description="Nonces that may wait or run over all jobs; more are refused with 429.",
    )
    max_jobs: int = Field(
        20_000,
        ge=1,
        le=10_000_000,
        description=(
            "Jobs that may wait or run; more are refused with 429. Each costs every look at them a"
            " little."
        ),
    )
    max_result_bytes: int = Field(
        128 * 1024 * 1024,
        ge=1024 * 1024,
        le=2 * 1024 * 1024 * 1024,
        description=(
            "Bytes of a job's answer, by its nonces and k_dim; larger ones are refused with 413"
            " before anything is computed. It holds 12,000 artifacts of k_dim 4096, or 1,600,000 of"
            " k_dim 12."
        ),
    )
    generate_chunk_timeout_sec: float = Field(
        60,
        gt=0,
        description=(
            "Seconds a client with wait=true waits for the next batch before it gets 503, and"
            " proofs for constant chat before they get a share of the time (POC_STARVATION_SHARE)."
        ),
    )
    generate_result_ttl_sec: int = Field(
        300,
        ge=1,
        description=(
            "Seconds a finished job can be fetched; afterwards its request_id is unknown (404)."
        ),
    )
    callback_interval_sec: float = Field(
        5,
        gt=0,
        description=(
            "Seconds between two callbacks of a round: the freshness that aggregators expect."
        ),
    )
    callback_max_artifacts: int = Field(
        1_000_000,
        ge=1,
        description="Artifacts in one callback payload, which bounds the receiver's memory.",
    )
    callback_max_retries: int | None = Field(
        None,
        ge=1,
        description=(
            "Tries per callback payload. Unset: until retention ends, so that all that was computed"
            " arrives."
        ),
    )
    rpc_timeout_ms: int = Field(
        60_000,
        ge=1,
        description=(
            "Milliseconds one call into the engine may take before the engine counts as lost."
        ),
    )

    honour_p_value_threshold: bool = Field(
        False,
        description=(
            "true: a validation's stat_test.p_value_threshold decides what a fraud is, as the chain"
            " says; else it is ignored, as the network's other nodes ignore it, so that all judge"
            " alike."
        ),
    )
    callback_retention_sec: int = Field(
        24 * 3600,
        ge=60,
        description=(
            "Seconds that undelivered callbacks are kept and tried after a round or job ended."
        ),
    )
    outbox_max_artifacts: int = Field(
        5_000_000,
        ge=1,
        description=(
            "Artifacts of a round that may wait for its receiver, about 80 bytes of Redis memory"
            " each. At the limit the round pauses until some are delivered; nothing is dropped."
        ),
    )
    outbox_max_jobs: int = Field(
        1000,
        ge=1,
        description=(
            "Jobs with a url that may be under way or wait for their receivers; more are refused"
            " with 429."
        ),
    )
    outbox_max_bytes: int = Field(
        512 * 1024 * 1024,
        ge=1024,
        description=(
            "Bytes of Redis memory that a round's artifacts may take while they wait for its"
            " receiver, beside POC_OUTBOX_MAX_ARTIFACTS: values are larger with a large k_dim. For"
            " all jobs' callbacks together as much."
        ),
    )
    callback_max_bytes: int = Field(
        8 * 1024 * 1024,
        ge=1024,
        description=(
            "Bytes of one callback payload of a round, about; one artifact is always sent. A"
            " receiver that answers 413 gets smaller ones by itself."
        ),
    )
    callback_allow: str = Field(
        "public,private,loopback",
        description=(
            "Where callbacks may go: the kinds of addresses public, private and loopback, names,"
            " addresses and networks (10.0.0.0/8), with commas between. Link-local and cloud"
            " metadata addresses only when named, the node's own ports never. `up` with a --host"
            " beyond loopback leaves out loopback unless you set this."
        ),
    )
    api_port: int = Field(
        8000,
        ge=1,
        le=65535,
        description=(
            "The API's port, to which no callback goes on its own machine; `up` and `api` set it by"
            " --port."
        ),
    )
    round_lease_sec: int = Field(
        300,
        ge=10,
        description=(
            "Seconds after which a round's lease is handed to another worker, whatever its holder"
            " does."
        ),
    )

    chat_policy: str = Field(
        "yield",
        description=(
            "Who has the engine when chat and proofs both want it: yield (chat first, proofs while"
            " it is idle), share:F (proofs get at least the fraction F of the time, e.g."
            " share:0.3), exclusive (chat answered 503 while a round runs), off (no chat at all)."
        ),
    )
    max_step_ms: float = Field(
        50,
        ge=1,
        description=(
            "Milliseconds that a chat request waits at most for proofs that the GPU has begun."
        ),
    )
    starvation_share: float = Field(
        0.05,
        gt=0,
        lt=1,
        description=(
            "Share of the engine's time that proofs get under constant chat by policy yield, once"
            " they had none for POC_GENERATE_CHUNK_TIMEOUT_SEC: so that a validation takes long"
            " instead of failing."
        ),
    )
    fused: Literal["auto", "off"] = Field(
        "auto",
        description=(
            "off: proofs by torch's own operations instead of fused kernels, on GPUs; for"
            " comparisons."
        ),
    )
    decode_codebook: str = Field(
        "",
        description=(
            "File of the 16 points of decode proofs, 16 x 256 little-endian float32, on each"
            " worker's machine; empty: the one that ships. All nodes of the network must have the"
            " same."
        ),
    )
    decode_codebook_sha256: str = Field(
        "",
        description=(
            "The sha256 that POC_DECODE_CODEBOOK must have; with another one no worker starts."
        ),
    )
    decode_graphs: Literal["off", "auto"] = Field(
        "auto",
        description=(
            "auto: on a GPU that computes the whole model, steps of decode proofs are recorded as"
            " CUDA graphs and replayed, if a trial at start-up gives the same chains; off: they run"
            " operation by operation."
        ),
    )
    layer_reflections: Literal["fleet", "all"] = Field(
        "fleet",
        description=(
            "Which models' decoder layers are reflected. fleet: those that the network's own nodes"
            " find, which in models that wrap a language model (Kimi-K2.6, Qwen3.5, GLM-5.3-Flash)"
            " is none; all: every model's. Other than fleet only on the day on which the network"
            " changes it."
        ),
    )
    chat_host: str = Field(
        "127.0.0.1",
        description=(
            "Address on which a worker serves chat to the API; in a private network of several"
            " hosts 0.0.0.0."
        ),
    )
    chat_advertise_host: str | None = Field(
        None,
        description=(
            "Name by which the API reaches this worker's chat; unset: POC_CHAT_HOST, or the host's"
            " name."
        ),
    )

    deploy_wait_s: float = Field(
        870,
        gt=0,
        description=(
            "Seconds that POST /api/v1/inference/up waits for a model to serve, below the 900 that"
            " the network's client waits; the deployment itself goes on."
        ),
    )
    trusted_models: str = Field(
        "",
        description=(
            "Models whose code engines may run beside the chain's own, each at one commit:"
            " ORG/NAME@COMMIT, with commas between them. Of others a deployment's"
            " --trust-remote-code is left out."
        ),
    )

    host_name: str | None = Field(
        None,
        description=(
            "Name of this host in Flower, status and metrics, which a container does not know;"
            " unset: what the process takes for it."
        ),
    )

    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="The Redis that holds jobs, workers and the Celery queues.",
    )
    redis_password_file: Path | None = Field(
        None, description="File with Redis' password, for a POC_REDIS_URL that has none in it."
    )
    redis_timeout_s: float = Field(
        5,
        gt=0,
        description=(
            "Seconds to wait for Redis; a longer silence is an error, which clients see as 503."
        ),
    )
    max_body_bytes: int = Field(
        32 * 1024 * 1024,
        ge=1024,
        description=(
            "Bytes of one request body; 100,000 nonces with 100,000 artifacts to validate take"
            " 11 MB."
        ),
    )
    job_ttl_sec: int = Field(
        24 * 3600,
        ge=60,
        description="Seconds an unfinished job is kept without progress: a day without any worker.",
    )
    worker_ttl_s: int = Field(
        10,
        ge=2,
        description=(
            "Seconds without a heartbeat after which a worker is dead and its leases are free."
        ),
    )
    heartbeat_s: float = Field(
        2,
        gt=0,
        description=(
            "Seconds between heartbeats; several fit into worker_ttl_s, so one may be late."
        ),
    )
    engine_hung_s: float = Field(
        120,
        gt=0,
        description=(
            "Seconds that an engine may stand still while requests wait for it. Then it hangs, and"
            " its worker ends with status 70, to be started again. However busy it is, an engine"
            " that goes on is left alone."
        ),
    )
    worker_cache_s: float = Field(
        0.25,
        ge=0,
        le=5,
        description=(
            "Seconds for which the API remembers which workers serve chat, instead of asking Redis"
            " for each request: short beside heartbeat_s, and a worker that ends waits for as long."
        ),
    )
    visibility_timeout_s: int = Field(
        180,
        ge=30,
        description=(
            "Seconds after which the broker hands an unacknowledged task to another worker; "
            "beyond what one batch takes, else a live worker's task runs twice."
        ),
    )
