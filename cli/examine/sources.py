"""Finds the settings in effect, and the source of each value."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from pydantic import SecretStr

from poc_core.callbacks import redacted
from poc_core.settings import Settings

HIDDEN = "***"
# Variables without POC_ that Proofline or its child processes read.
OTHERS = (
    "PROOFLINE_URL",
    "PROOFLINE_JOIN_TOKEN",
    "PROOFLINE_FUSED",
    "PROOFLINE_GRAPHS",
    "PROOFLINE_RANDOM_WEIGHTS",
    "PROOFLINE_FLOWER_PASSWORD_FILE",
    "CUDA_VISIBLE_DEVICES",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "GONKA_METRICS",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HF_TOKEN",
)
_SECRET = re.compile(r"PASSWORD$|TOKEN$|KEY$|SECRET$")


@dataclass(frozen=True)
class Setting:
    """A setting and its value. `source`: where it was set, such as "environment"."""

    name: str
    value: Any
    source: str


def settings_in_effect(settings: Settings, env: Mapping[str, str], dotenv: Path) -> list[Setting]:
    """Returns the settings in effect, without passwords. `dotenv`: the .env file of Compose."""
    # In upper case, because pydantic reads names in any case.
    given = {name.upper(): value for name, value in env.items()}
    in_file = read_dotenv(dotenv)
    found = []
    for field, value in settings:
        name = f"POC_{field.upper()}"
        found.append(Setting(name, shown(name, value), _source(name, given, in_file, dotenv)))
    return found


def others_in_effect(env: Mapping[str, str]) -> list[Setting]:
    return [Setting(name, shown(name, env[name]), "environment") for name in OTHERS if name in env]


def shown(name: str, value: Any) -> Any:
    if isinstance(value, SecretStr) or (value and _SECRET.search(name)):
        return HIDDEN
    if isinstance(value, Path):
        return str(value)
    return _without_password(value) if isinstance(value, str) and "://" in value else value


def _without_password(url: str) -> str:
    try:
        parts = urlsplit(redacted(url) or "")
    except ValueError:  # no url, but it may contain a password
        return HIDDEN
    query = [(key, HIDDEN if "password" in key else value) for key, value in parse_qsl(parts.query)]
    return parts._replace(query=urlencode(query, safe="*/")).geturl()


def read_dotenv(path: Path) -> dict[str, str]:
    """Returns the variables that a .env file sets; {} if the file cannot be read."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return {}
    pairs = re.findall(r"^\s*(?:export\s+)?(\w+)\s*=\s*(.*?)\s*$", text, flags=re.MULTILINE)
    return {name.upper(): re.sub(r"""^(['"])(.*)\1$""", r"\2", value) for name, value in pairs}


def _source(name: str, given: Mapping[str, str], in_file: Mapping[str, str], dotenv: Path) -> str:
    if name == "POC_REDIS_URL" and given.get("POC_REDIS_PASSWORD_FILE"):
        return (
            "environment" if name in given else "default"
        ) + ", password from POC_REDIS_PASSWORD_FILE"
    if name in given:
        return (
            f"environment, as {dotenv} has it"
            if in_file.get(name) == given[name]
            else "environment"
        )
    return (
        f"default; {dotenv} sets it for Compose's containers only" if name in in_file else "default"
    )
