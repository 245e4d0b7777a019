"""Code that the themes of the settings share."""

from collections.abc import Callable

from pydantic import AfterValidator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Theme(BaseSettings):
    """Settings about one subject, each with a docstring for docs/settings.md."""

    model_config = SettingsConfigDict(env_prefix="POC_", extra="ignore", frozen=True)


def parsed(parse: Callable[[str], object]) -> AfterValidator:
    """Returns a check of a text setting. `parse` raises ValueError for an invalid text."""

    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


def listed(text: str) -> list[str]:
    """Splits a comma-separated setting into its entries, in lower case."""
    return [entry.strip().lower() for entry in text.split(",") if entry.strip()]
