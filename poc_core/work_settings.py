"""Settings for jobs, rounds, callbacks, chat, deployments and Redis.

`Settings` adds API access, and validates everything.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from poc_core.fields import MAX_BATCH_SIZE


class WorkSettings(BaseSettings):
    """The part of Settings about jobs, rounds, callbacks, chat, deployments and Redis."""

    model_config = SettingsConfigDict(env_prefix="POC_", extra="ignore", frozen=True)

    # Names and meanings of protocol.md, section 7, which operators already use.
    batch_size_default: int = Field(
        32,
        ge=1,
        le=MAX_BATCH_SIZE,
        description="Nonces per batch if a request has no batch_size.",
    )
    max_queued_nonces: int = Field(
        100_000,
        ge=1,
        le=10_000_000,
        description=(
            "Largest number of nonces in unfinished jobs, and a fifth as many jobs. More get 429."
        ),
    )
    max_result_bytes: int = Field(
        128 * 1024 * 1024,
        ge=1024 * 1024,
        le=2 * 1024 * 1024 * 1024,
        description=(
            "Largest answer of a job in bytes; larger ones get 413 before anything is computed. The"
            " default holds 1,600,000 artifacts of k_dim 12."
        ),
    )
    generate_chunk_timeout_sec: float = Field(
        60,
        gt=0,
        description=(
            "Seconds that a client with wait=true waits for the next batch before it gets 503."
            " Also the seconds of constant chat after which rounds and jobs get 5 % of the time."
        ),
    )
    generate_result_ttl_sec: int = Field(
        300,
        ge=1,
        description=(
            "Seconds that a finished job can be fetched; later its request_id is unknown (404)."
        ),
    )
    callback_interval_sec: float = Field(
        5,
        gt=0,
        description="Seconds between two callbacks of a round.",
    )
    callback_max_artifacts: int = Field(
        1_000_000,
        ge=1,
        description="Largest number of artifacts in one callback payload.",
    )
    callback_max_retries: int | None = Field(
        None,
        ge=1,
        description="Tries per callback payload. Unset: until the retention ends.",
    )
    rpc_timeout_ms: int = Field(
        60_000,
        ge=1,
        description=(
            "Milliseconds that one call into the engine may take before the engine counts as"
            " lost. After three times as long, or 180 s, another worker gets the batch."
        ),
    )

    honour_p_value_threshold: bool = Field(
        False,
        description=(
            "true: a validation uses stat_test.p_value_threshold, as the chain defines it. false:"
            " it is ignored, as by the network's other nodes."
        ),
    )
    callback_retention_sec: int = Field(
        24 * 3600,
        ge=60,
        description=(
            "Seconds that undelivered callbacks are kept after a round or job ended, and that a"
            " job without progress is kept."
        ),
    )
    outbox_max_bytes: int = Field(
        512 * 1024 * 1024,
        ge=1024,
        description=(
            "Bytes of Redis memory for a round's undelivered artifacts (some 80 for each of k_dim"
            " 12); at the limit the round pauses. The same for the callbacks of all jobs, of which"
            " one for each 512 KiB may have a url, at least 64; more get 429."
        ),
    )
    callback_max_bytes: int = Field(
        8 * 1024 * 1024,
        ge=1024,
        description=(
            "Approximate bytes of one callback payload of a round. A receiver that answers 413"
            " gets smaller payloads."
        ),
    )
    callback_allow: str = Field(
        "public,private,loopback",
        description=(
            "Where callbacks may go: public, private, loopback, names, addresses and networks"
            " (10.0.0.0/8), separated by commas. Link-local and cloud metadata addresses must be"
            " listed; the node's own ports are never allowed. `up` with a --host beyond loopback"
            " excludes loopback unless you set this."
        ),
    )
    callback_proxy: SecretStr | None = Field(
        None,
        description=(
            "HTTP proxy (http://user:password@host:port) for callbacks to public addresses, which"
            " are still resolved and checked here. Unset: no proxy; HTTP_PROXY is ignored."
        ),
    )
    callback_tls_hosts: str = Field(
        "",
        description=(
            "Receivers' names and addresses, separated by commas, that get callbacks by https"
            " only, with the certificates of the next two settings."
        ),
    )
    callback_client_cert: str = Field(
        "",
        description=(
            "PEM file with the courier's certificate and key for those receivers, or two files"
            " separated by a comma. Read again when it changes."
        ),
    )
    callback_trusted_certs: Path | None = Field(
        None,
        description=(
            "PEM file of the only trusted certificates of those receivers or their authorities;"
            " unset: the system's. Read again when it changes."
        ),
    )
    api_port: str = Field(
        "8000",
        coerce_numbers_to_str=True,
        description=(
            "The API's port, or several separated by spaces, without --port. No callback goes to"
            " these ports of the node's machines."
        ),
    )

    chat_policy: str = Field(
        "yield",
        description=(
            "Who gets the engine if chat and proofs both need it: yield (chat first), share:0.3"
            " (proofs get at least this fraction of the time), exclusive (chat gets 503 during a"
            " round), off (no chat)."
        ),
    )
    max_step_ms: float = Field(
        50,
        ge=1,
        description=(
            "Largest number of milliseconds that a chat request waits for proofs on the GPU."
        ),
    )
    experts: Literal["exact", "fast"] = Field(
        "exact",
        description=(
            "How proofs multiply MXFP4 experts (DeepSeek-V4) on Hopper GPUs. exact: with vLLM's"
            " kernel. fast: in bfloat16, with another order of sums and several GB more GPU memory"
            " (docs/rates.md)."
        ),
    )
    decode_codebook: str = Field(
        "",
        description=(
            "The network's file of the 16 points of decode proofs (16 x 256 little-endian"
            " float32) on each worker's machine. Empty: Proofline's rebuild. Workers refuse other"
            " files."
        ),
    )
    logprob_tokens: Literal["ids", "text"] = Field(
        "ids",
        description=(
            "Tokens in chat's logprobs. ids: decimal ids, which the network's validators read."
            " text: the token's text, as OpenAI does, for requests without the network's fields."
        ),
    )
    validation: Literal["auto", "pass", "steps"] = Field(
        "auto",
        description=(
            "How chat validations are computed. pass: in one forward pass. steps: token by token."
            " auto: by a test at each start (docs/chat.md)."
        ),
    )
    chat_host: str = Field(
        "127.0.0.1",
        description=(
            "Address on which a worker serves chat to the API; 0.0.0.0 in a private network of"
            " several hosts."
        ),
    )
    chat_advertise_host: str | None = Field(
        None,
        description=(
            "Name by which the API reaches this worker's chat. Unset: POC_CHAT_HOST, or the"
            " host's name."
        ),
    )

    trusted_models: str = Field(
        "",
        description=(
            "Models whose code engines may run, in addition to the network's: ORG/NAME@COMMIT,"
            " separated by commas. For other models --trust-remote-code is left out."
        ),
    )

    host_name: str | None = Field(
        None,
        description=(
            "Name of this host in Flower, status and metrics, for containers. Unset: the system's"
            " host name."
        ),
    )

    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description=(
            "The Redis of the node: redis://HOST:6379/0, rediss:// for TLS, or"
            " redis+sentinel://HOST:26379,HOST:26379/MASTER/0 with Sentinels (docs/redis.md)."
        ),
    )
    redis_password_file: Path | None = Field(
        None, description="File with Redis' password, for a POC_REDIS_URL without one."
    )
    max_body_bytes: int = Field(
        32 * 1024 * 1024,
        ge=1024,
        description="Largest request body in bytes; a validation of 100,000 nonces takes 11 MB.",
    )
    worker_ttl_s: int = Field(
        10,
        ge=2,
        description=(
            "A worker without a heartbeat for this many seconds counts as dead, and its leases"
            " are free. Heartbeats are sent five times as often. A dead courier's callbacks"
            " continue after twice as long."
        ),
    )
    engine_hung_s: float = Field(
        100,
        gt=0,
        description=(
            "An engine without a step for this many seconds while requests wait counts as hanging:"
            " its worker exits with 70 and is restarted. The network node restarts a node after"
            " 120 s."
        ),
    )
