"""Settings of Redis."""

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

from pydantic import model_validator

from poc_core.redis_at.url import RedisUrl, read_password
from poc_core.settings.theme import Theme, parsed

# Seconds to wait for Redis; a longer silence is an error, which clients see as 503.
REDIS_TIMEOUT_S = 5.0


class RedisSettings(Theme):
    """The address of Redis."""

    redis_url: Annotated[str, parsed(RedisUrl.of)] = "redis://127.0.0.1:6379/0"
    """Url of the node's Redis: redis://HOST:6379/0, rediss:// for TLS, or
    redis+sentinel://HOST:26379,HOST:26379/MASTER/0 with Sentinels (docs/redis.md)."""
    redis_password_file: Path | None = None
    """File with Redis' password, if POC_REDIS_URL contains none."""

    @model_validator(mode="before")
    @classmethod
    def _password_from_file(cls, given: dict[str, Any]) -> dict[str, Any]:
        file = given.get("redis_password_file")
        url = given.get("redis_url", cls.model_fields["redis_url"].default)
        if not file or not isinstance(url, str) or urlsplit(url).password:
            return given
        parts, password = urlsplit(url), read_password("POC_REDIS_PASSWORD_FILE", file)
        user, host = parts.username or "", parts.netloc.rpartition("@")[2]
        netloc = f"{user}:{quote(password, safe='')}@{host}"
        return given | {"redis_url": parts._replace(netloc=netloc).geturl()}
