"""Proofline's settings, from environment variables POC_..., with one module per theme."""

import difflib
from collections.abc import Mapping

from pydantic import ValidationError

from poc_core.errors import SettingsError
from poc_core.redis_at.url import RedisUrl
from poc_core.settings.api import PRIVATE, ApiSettings, parse_networks, parse_ports
from poc_core.settings.callbacks import CallbackSettings
from poc_core.settings.chat import ChatPolicy, ChatSettings, parse_chat_policy
from poc_core.settings.proofs import ProofSettings
from poc_core.settings.redis import REDIS_TIMEOUT_S, RedisSettings
from poc_core.settings.theme import listed

# Errors whose text shows the value, because numbers and choices are never passwords.
_SHOWN = {"int_parsing", "int_from_float", "float_parsing", "bool_parsing", "literal_error"}

__all__ = [
    "PRIVATE",
    "REDIS_TIMEOUT_S",
    "ChatPolicy",
    "Settings",
    "listed",
    "load_settings",
    "parse_chat_policy",
    "parse_networks",
    "parse_ports",
    "stranger_text",
    "strangers",
]


class Settings(RedisSettings, CallbackSettings, ChatSettings, ProofSettings, ApiSettings):
    """The settings of all processes.

    Names that end with _sec or _s are in seconds, with _ms in milliseconds; others are counts.
    """

    @property
    def node_ports(self) -> frozenset[int]:
        """The node's ports according to the settings: those of the API and of Redis."""
        return RedisUrl.of(self.redis_url).ports | set(parse_ports(self.api_port))

    @property
    def visibility_timeout_s(self) -> int:
        """Seconds until the broker redelivers an unacknowledged task. No batch takes as long."""
        return max(180, 3 * self.rpc_timeout_ms // 1000)

    @property
    def delivery_lock_s(self) -> float:
        """Seconds for which a delivery locks its outbox. The largest payload takes less time."""
        return 2 * self.worker_ttl_s


def load_settings(**overrides: object) -> Settings:
    """Reads the settings; `overrides` have priority. Raises SettingsError, which names the invalid
    variables, if there are any.
    """
    try:
        given = {name: value for name, value in overrides.items() if value is not None}
        return Settings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        # Mostly without the values: POC_REDIS_URL may contain a password.
        problems = [
            ": ".join(
                [
                    *(f"POC_{str(part).upper()}" for part in problem["loc"]),
                    problem["msg"].removeprefix("Value error, ")
                    + (f", not {problem['input']!r}" if problem["type"] in _SHOWN else ""),
                ]
            )
            for problem in error.errors(include_url=False)
        ]
        raise SettingsError("; ".join(problems) + ".") from None


def strangers(env: Mapping[str, str]) -> dict[str, str | None]:
    """Returns {unknown POC_ variable: name of the most similar setting, or None}."""
    known = [f"POC_{field.upper()}" for field in Settings.model_fields]
    unknown = sorted(
        name for name in env if name.upper().startswith("POC_") and name.upper() not in known
    )
    return {
        name: next(iter(difflib.get_close_matches(name.upper(), known, 1)), None)
        for name in unknown
    }


def stranger_text(name: str, meant: str | None) -> str:
    return f"{name} is no setting" + (f"; {meant} is." if meant else ".")
