"""Settings of Redis."""

from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from pydantic import Field, field_validator, model_validator

from poc_core.redis_at.url import RedisUrl
from poc_core.settings.theme import Theme

# Seconds to wait for Redis; a longer silence is an error, which clients see as 503.
REDIS_TIMEOUT_S = 5.0


class RedisSettings(Theme):
    """The address of Redis."""

    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description=(
            "The Redis of the node: redis://HOST:6379/0, rediss:// for TLS, or"
            " redis+sentinel://HOST:26379,HOST:26379/MASTER/0 with Sentinels (docs/redis.md)."
        ),
    )
    redis_password_file: Path | None = Field(
        None, description="File with Redis' password, if POC_REDIS_URL contains none."
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

    @field_validator("redis_url")
    @classmethod
    def _redis_scheme(cls, url: str) -> str:
        RedisUrl.of(url)
        return url
