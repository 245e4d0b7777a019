"""Proofline's settings, read from environment variables that start with POC_."""

import re
import socket
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator

from poc_core.callback_tls import TlsNames
from poc_core.callbacks import CallbackPolicy
from poc_core.errors import SettingsError
from poc_core.redis_at.url import RedisUrl
from poc_core.serving.trusted_models import parse_trusted
from poc_core.work_settings import WorkSettings

# The entry of POC_TRUSTED_NETWORKS that means all private networks.
PRIVATE = "private"
# Seconds to wait for Redis; a longer silence is an error, which clients see as 503.
REDIS_TIMEOUT_S = 5.0


class ChatPolicy(NamedTuple):
    """How chat and proofs share the engine. `fraction`: the proofs' share of time with `share`."""

    mode: Literal["yield", "share", "exclusive", "off"]
    fraction: float = 0.0


class Settings(WorkSettings):
    """The settings of all processes.

    Names that end with _sec or _s are in seconds, with _ms in milliseconds; others are counts.
    """

    # Access to the API and its limits (SECURITY.md).
    require_keys: Literal["auto", "always", "never"] = Field(
        "auto",
        description=(
            "When the API requires a key (Authorization: Bearer): auto (beyond loopback), always,"
            " never. /livez, /api/v1/clock and the console's page need none."
        ),
    )
    cache_salt: Literal["auto", "always", "never"] = Field(
        "auto",
        description=(
            "When each client (key, else address) has its own prefix cache for chat, so that"
            " response times do not reveal others' prompts: auto (if keys are required), always,"
            " never."
        ),
    )
    api_keys_file: Path = Field(
        Path("~/.proofline/keys.json"),
        description=(
            "The API's keys, hashed. `proofline key` writes the file; the API reads it again when"
            " it changes."
        ),
    )
    api_key: SecretStr | None = Field(
        None,
        min_length=16,
        description=(
            "The key that commands send to an API. In an API's environment: one more key, for"
            " everything."
        ),
    )
    trusted_networks: str = Field(
        "",
        description=(
            "Addresses and networks (CIDR, separated by commas) whose clients need no key, such"
            " as the network node's. private: loopback and private networks, except gateways"
            " (SECURITY.md)."
        ),
    )
    allowed_hosts: str = Field(
        "",
        description=(
            "Names by which clients may call the API, separated by commas (.example.org: all"
            " below it; *: any), in addition to addresses, this host's name, the --host, names"
            " without a dot, .localhost, .local and .internal."
        ),
    )
    allowed_origins: str = Field(
        "",
        description=(
            "Origins (https://ui.example.org, separated by commas) whose web pages may use the"
            " API in addition to its own."
        ),
    )
    max_requests_per_s: float | None = Field(
        None,
        gt=0,
        description=(
            "Requests a second of each client (key, else address), with bursts of ten times as"
            " many; more get 429. Unset: unlimited."
        ),
    )
    max_waiting_requests: int = Field(
        256,
        ge=1,
        description="Largest number of waiting requests with wait=true; more get 429.",
    )

    @model_validator(mode="before")
    @classmethod
    def _password_from_file(cls, given: dict[str, Any]) -> dict[str, Any]:
        file, url = (
            given.get("redis_password_file"),
            given.get("redis_url", cls.model_fields["redis_url"].default),
        )
        if not file or not isinstance(url, str) or urlsplit(url).password:
            return given
        try:
            password = Path(file).read_text().strip()
        except OSError as error:
            raise ValueError(
                f"POC_REDIS_PASSWORD_FILE {file} cannot be read ({error.strerror})"
            ) from None
        parts = urlsplit(url)
        user, host = parts.username or "", parts.netloc.rpartition("@")[2]
        return given | {
            "redis_url": parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}").geturl()
        }

    @field_validator("api_key", mode="before")
    @classmethod
    def _no_key(cls, key: object) -> object:
        return key or None  # Compose passes an empty key

    @field_validator("redis_url")
    @classmethod
    def _redis_scheme(cls, url: str) -> str:
        RedisUrl.of(url)
        return url

    @field_validator("callback_allow")
    @classmethod
    def _known_receivers(cls, text: str) -> str:
        CallbackPolicy.of(text)
        return text

    @field_validator("callback_proxy")
    @classmethod
    def _real_proxy(cls, proxy: SecretStr | None) -> SecretStr | None:
        parts = urlsplit(proxy.get_secret_value() if proxy else "http://none")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must look like http://host:port")
        return proxy

    @field_validator("chat_policy")
    @classmethod
    def _known_policy(cls, text: str) -> str:
        parse_chat_policy(text)
        return text

    @field_validator("trusted_models")
    @classmethod
    def _pinned_models(cls, text: str) -> str:
        parse_trusted(text)
        return text

    @field_validator("trusted_networks")
    @classmethod
    def _real_networks(cls, text: str) -> str:
        parse_networks(text)
        return text

    @field_validator("api_port")
    @classmethod
    def _real_ports(cls, text: str) -> str:
        parse_ports(text)
        return text

    @field_validator("allowed_origins")
    @classmethod
    def _real_origins(cls, text: str) -> str:
        for origin in listed(text):
            if not re.fullmatch(r"https?://[^/?#@\s]+", origin):
                raise ValueError(
                    "must be origins such as https://ui.example.org, without a path, after commas"
                )
        return text

    @property
    def trusted(self) -> frozenset[str]:
        return parse_trusted(self.trusted_models)

    @property
    def host(self) -> str:
        return self.host_name or socket.gethostname()

    @property
    def callbacks(self) -> CallbackPolicy:
        return CallbackPolicy.of(self.callback_allow)

    @property
    def callback_tls(self) -> TlsNames:
        return TlsNames.of(
            self.callback_tls_hosts, self.callback_client_cert, self.callback_trusted_certs
        )

    @property
    def own_ports(self) -> frozenset[int]:
        """The node's ports according to the settings: those of the API and of Redis."""
        return RedisUrl.of(self.redis_url).ports | set(parse_ports(self.api_port))

    @property
    def chat(self) -> ChatPolicy:
        return parse_chat_policy(self.chat_policy)

    # Values derived from settings.

    @property
    def job_ttl_sec(self) -> int:
        """Seconds that jobs without progress and records of served models are kept."""
        return self.callback_retention_sec

    @property
    def max_jobs(self) -> int:
        """The limit of unfinished jobs. The overhead of a job is about that of five nonces."""
        return max(1, self.max_queued_nonces // 5)

    @property
    def max_callbacks(self) -> int:
        """The limit of jobs with unfinished callbacks. A client or receiver may have a quarter."""
        return max(64, self.outbox_max_bytes // (512 * 1024))

    @property
    def visibility_timeout_s(self) -> int:
        """Seconds until the broker redelivers an unacknowledged task; no batch takes as long."""
        return max(180, 3 * self.rpc_timeout_ms // 1000)

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats of a worker; a few may come late."""
        return self.worker_ttl_s / 5

    @property
    def reap_interval_s(self) -> float:
        """Seconds between a worker's searches for leftovers of dead workers."""
        return self.worker_ttl_s / 2

    @property
    def delivery_lock_s(self) -> float:
        """Seconds that a delivery locks its outbox; the largest payload takes less."""
        return 2 * self.worker_ttl_s

    @model_validator(mode="after")
    def _certificates_fit(self) -> "Settings":
        TlsNames.of(self.callback_tls_hosts, self.callback_client_cert, self.callback_trusted_certs)
        return self


def parse_chat_policy(text: str) -> ChatPolicy:
    """Parses yield, exclusive, off or share:F with 0 < F < 1. ValueError lists them."""
    match text:
        case "yield" | "exclusive" | "off":
            return ChatPolicy(text)
    mode, _, fraction = text.partition(":")
    try:
        if mode == "share" and 0 < float(fraction) < 1:
            return ChatPolicy("share", float(fraction))
    except ValueError:
        pass
    raise ValueError(
        "must be yield, exclusive, off, or share:F with F between 0 and 1, such as share:0.3"
    )


def listed(text: str) -> list[str]:
    """Splits a comma-separated setting into its entries, in lower case."""
    return [entry.strip().lower() for entry in text.split(",") if entry.strip()]


def parse_ports(text: str) -> list[int]:
    """Parses one or more ports, separated by spaces. ValueError says what is allowed."""
    ports = [int(part) if part.isdecimal() else 0 for part in text.split()]
    if not ports or not all(0 < port < 65536 for port in ports):
        raise ValueError("must be a port from 1 to 65535, or several with spaces between")
    return ports


def parse_networks(text: str) -> list[IPv4Network | IPv6Network]:
    """Parses comma-separated networks, and skips PRIVATE. ValueError says what is allowed."""
    try:
        return [ip_network(entry) for entry in listed(text) if entry != PRIVATE]
    except ValueError:
        raise ValueError(
            "must be addresses or networks such as 10.0.0.0/8, or private, after commas"
        ) from None


def load_settings(**overrides: object) -> Settings:
    """Reads the settings. `overrides` that are not None replace the environment's values.

    SettingsError names the invalid variables.
    """
    try:
        given = {name: value for name, value in overrides.items() if value is not None}
        return Settings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        # Without the values: POC_REDIS_URL may contain a password.
        problems = [
            ": ".join(
                [
                    *(f"POC_{str(part).upper()}" for part in problem["loc"]),
                    problem["msg"].removeprefix("Value error, "),
                ]
            )
            for problem in error.errors(include_input=False, include_url=False)
        ]
        raise SettingsError("; ".join(problems) + ".") from None
