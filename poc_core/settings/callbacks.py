"""Settings of callbacks: what is delivered, where to, and for how long it is kept."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from poc_core.callbacks import CallbackPolicy, canonical_host
from poc_core.settings.theme import Theme, parsed, split


@dataclass(frozen=True)
class TlsNames:
    """The TLS settings of callbacks."""

    hosts: frozenset[str]
    client: tuple[Path, ...]  # certificate and key in one file, or in two
    trusted: Path | None  # None: the system's certificate authorities

    @classmethod
    def of(cls, hosts: str, client: str, trusted: Path | None) -> Self:
        """Parses the settings. ValueError if they are inconsistent."""
        try:
            named = frozenset(map(canonical_host, split(hosts)))
        except ValueError as error:
            raise ValueError(f"POC_CALLBACK_TLS_HOSTS: {error}") from None
        files = tuple(map(Path, split(client)))
        if len(files) > 2:
            raise ValueError(
                "POC_CALLBACK_CLIENT_CERT names one file, or a certificate and its key with a "
                "comma between"
            )
        if named and not files and trusted is None:
            raise ValueError(
                "POC_CALLBACK_TLS_HOSTS needs POC_CALLBACK_CLIENT_CERT, "
                "POC_CALLBACK_TRUSTED_CERTS or both"
            )
        if (files or trusted is not None) and not named:
            raise ValueError(
                "POC_CALLBACK_CLIENT_CERT and POC_CALLBACK_TRUSTED_CERTS are for the hosts that "
                "POC_CALLBACK_TLS_HOSTS names, and there are none"
            )
        return cls(named, files, trusted)


class CallbackSettings(Theme):
    """Callbacks."""

    callback_interval_sec: float = Field(5, gt=0)
    """Seconds between two callbacks of a round."""
    callback_max_artifacts: int = Field(1_000_000, ge=1)
    """Largest number of artifacts in one callback payload."""
    callback_max_bytes: int = Field(8 * 1024 * 1024, ge=1024)
    """Approximate bytes of one callback payload of a round. A receiver that answers 413 gets
    smaller payloads."""
    callback_max_retries: int | None = Field(None, ge=1)
    """Largest number of attempts per callback payload. Unset: POC_CALLBACK_RETENTION_SEC is the
    only limit."""
    callback_retention_sec: int = Field(24 * 3600, ge=60)
    """Seconds for which undelivered callbacks are kept after the end of their round or job, and for
    which a job without progress is kept."""
    outbox_max_bytes: int = Field(512 * 1024 * 1024, ge=1024)
    """Bytes of Redis memory for a round's undelivered artifacts (about 80 bytes per artifact of
    k_dim 12); at the limit the round pauses. A second limit of the same size applies to the
    callbacks of all jobs; further jobs with a url get 429 (docs/limits.md)."""
    callback_allow: Annotated[str, parsed(CallbackPolicy.of)] = "public,private,loopback"
    """Allowed destinations of callbacks: public, private, loopback, names, addresses and networks
    (10.0.0.0/8), separated by commas. If `up` listens beyond loopback (--host), the default
    excludes loopback (docs/connect.md)."""
    callback_proxy: SecretStr | None = None
    """HTTP proxy (http://user:password@host:port) for callbacks to public addresses, which the
    courier still resolves and checks. Unset: no proxy. HTTP_PROXY is always ignored."""
    callback_tls_hosts: str = ""
    """Names and addresses of receivers, separated by commas, that get callbacks by https alone,
    with POC_CALLBACK_CLIENT_CERT and POC_CALLBACK_TRUSTED_CERTS."""
    callback_client_cert: str = ""
    """PEM file with the courier's certificate and key for POC_CALLBACK_TLS_HOSTS, or two files
    separated by a comma. Changed files are reread."""
    callback_trusted_certs: Path | None = None
    """PEM file with the certificates (of receivers or authorities) that the courier trusts for
    POC_CALLBACK_TLS_HOSTS. Unset: the system's certificates. A changed file is reread."""

    @field_validator("callback_proxy")
    @classmethod
    def _real_proxy(cls, proxy: SecretStr | None) -> SecretStr | None:
        try:
            parts = urlsplit(proxy.get_secret_value() if proxy else "http://none")
            is_real = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # its text may quote the password
            is_real = False
        if not is_real:
            raise ValueError("must look like http://host:port")
        return proxy

    @model_validator(mode="after")
    def _certificates_fit(self) -> Self:
        TlsNames.of(self.callback_tls_hosts, self.callback_client_cert, self.callback_trusted_certs)
        return self

    @property
    def callbacks(self) -> CallbackPolicy:
        return CallbackPolicy.of(self.callback_allow)

    @property
    def callback_tls(self) -> TlsNames:
        return TlsNames.of(
            self.callback_tls_hosts, self.callback_client_cert, self.callback_trusted_certs
        )

    @property
    def max_callbacks(self) -> int:
        """The limit of jobs with unfinished callbacks; a quarter of it per client or receiver."""
        return max(64, self.outbox_max_bytes // (512 * 1024))

    @property
    def job_ttl_sec(self) -> int:
        """Seconds that jobs without progress and records of served models are kept."""
        return self.callback_retention_sec
