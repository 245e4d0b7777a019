"""Code that the themes of the settings share."""

from collections.abc import Callable

from pydantic import AfterValidator, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Theme(BaseSettings):
    """Settings about one subject, each with a docstring for docs/settings.md."""

    model_config = SettingsConfigDict(env_prefix="POC_", extra="ignore", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _empty_is_unset(cls, given: object, field: ValidationInfo) -> object:
        """Compose passes a variable without a value as an empty text."""
        optional = cls.model_fields[str(field.field_name)].default is None
        return None if optional and given == "" else given


def parsed(parse: Callable[[str], object]) -> AfterValidator:
    """Returns a pydantic validator for text settings. `parse` raises ValueError for bad texts."""

    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


def split(text: str) -> list[str]:
    """Returns the entries of a comma-separated setting."""
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def listed(text: str) -> list[str]:
    """Returns the entries of a comma-separated setting in lower case."""
    return split(text.lower())
