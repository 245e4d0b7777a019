"""Code that the themes of the settings share."""

from pydantic_settings import BaseSettings, SettingsConfigDict


class Theme(BaseSettings):
    """Settings about one subject, each with its checks; `Settings` is made of them."""

    model_config = SettingsConfigDict(env_prefix="POC_", extra="ignore", frozen=True)


def listed(text: str) -> list[str]:
    """Splits a comma-separated setting into its entries, in lower case."""
    return [entry.strip().lower() for entry in text.split(",") if entry.strip()]
