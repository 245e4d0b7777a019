"""The settings of what a node computes and keeps; Settings adds the rest and checks them."""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from poc_core.fields import MAX_BATCH_SIZE


class WorkSettings(BaseSettings):
    """The part of Settings about jobs, rounds, callbacks, chat, deployments and Redis."""

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
        description=(
            "Nonces that may wait or run over all jobs, and a fifth as many jobs; more are refused"
            " with 429."
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
            " rounds and plain jobs for constant chat before they get a twentieth of the time."
            " Validations get half of it at once."
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
            " Calls are planned to take a sixth of that at most, the first by the self-test's"
            " times."
            " After 180 s, or three times as long, a batch is handed to another worker."
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
            "Seconds that undelivered callbacks are kept and tried after a round or job ended, and"
            " an unfinished job without progress."
        ),
    )
    outbox_max_bytes: int = Field(
        512 * 1024 * 1024,
        ge=1024,
        description=(
            "Bytes of Redis memory that a round's artifacts may take while they wait for its"
            " receiver, some 80 each of k_dim 12. At the limit the round pauses until some are"
            " delivered; nothing is dropped. For all jobs' callbacks together as much, and a job"
            " with a url for each 512 KiB of it, at least 64; more are refused with 429."
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
    callback_proxy: SecretStr | None = Field(
        None,
        description=(
            "HTTP proxy (http://user:password@host:port) through which callbacks go to public"
            " addresses, which are looked up and checked here. Unset: no proxy, whatever HTTP_PROXY"
            " and the like say."
        ),
    )
    callback_tls_hosts: str = Field(
        "",
        description=(
            "Receivers' names and addresses (after commas) to which callbacks go by https alone,"
            " and with the certificates of the next two."
        ),
    )
    callback_client_cert: str = Field(
        "",
        description=(
            "PEM file with the certificate, and its key, that the courier shows those receivers;"
            " the key may be in a second file, after a comma. Read again when it changes."
        ),
    )
    callback_trusted_certs: Path | None = Field(
        None,
        description=(
            "PEM file of the only certificates, the receivers' own or their authorities', that are"
            " trusted there; unset: the system's. Read again when it changes."
        ),
    )
    api_port: str = Field(
        "8000",
        coerce_numbers_to_str=True,
        description=(
            "The API's port, or several with spaces between, where `up` and `api` have no --port;"
            " no callback goes to them on their own machine."
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
    experts: Literal["exact", "fast"] = Field(
        "exact",
        description=(
            "How proofs multiply experts in MXFP4 (DeepSeek-V4) on Hopper GPUs. exact: by vLLM's"
            " own kernel; fast: in bfloat16, with the same numbers and another order of sums. fast"
            " needs several GB of GPU memory and has not been measured on a complete engine."
        ),
    )
    decode_codebook: str = Field(
        "",
        description=(
            "The network's own file of the 16 points of decode proofs, 16 x 256 little-endian"
            " float32, on each worker's machine; empty: the rebuild that ships. With another file"
            " no worker starts."
        ),
    )
    logprob_tokens: Literal["ids", "text"] = Field(
        "ids",
        description=(
            "What chat's logprobs call tokens. ids: their numbers in decimal, which the network's"
            " validators read; text: to requests without any of the network's fields the token's"
            " text, as OpenAI does."
        ),
    )
    validation: Literal["auto", "pass", "steps"] = Field(
        "auto",
        description=(
            "How other nodes' chats are scored whose tokens are known. pass: in one forward; steps:"
            " decoded token by token; auto: in one forward where a trial at start-up finds it as"
            " near to decoding as batches of another size are."
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
        description=(
            "The Redis that holds jobs, workers and the Celery queues: redis://HOST:6379/0, rediss://"
            " for TLS, or redis+sentinel://HOST:26379,HOST:26379/MASTER/0 where Sentinels know the"
            " primary (docs/redis.md)."
        ),
    )
    redis_password_file: Path | None = Field(
        None, description="File with Redis' password, for a POC_REDIS_URL that has none in it."
    )
    max_body_bytes: int = Field(
        32 * 1024 * 1024,
        ge=1024,
        description=(
            "Bytes of one request body; 100,000 nonces with 100,000 artifacts to validate take"
            " 11 MB."
        ),
    )
    worker_ttl_s: int = Field(
        10,
        ge=2,
        description=(
            "Seconds without a heartbeat after which a worker is dead and its leases are free."
            " Heartbeats are a fifth of it apart; after half of it more, what the dead left is"
            " looked for; a dead courier's callbacks go on after twice as long."
        ),
    )
    engine_hung_s: float = Field(
        100,
        gt=0,
        description=(
            "Seconds that an engine may stand still while requests wait for it. Then it hangs, and"
            " its worker ends with status 70, to be started again: before the network's broker,"
            " after 120 s, restarts the node. However busy it is, an engine that goes on is left"
            " alone."
        ),
    )
