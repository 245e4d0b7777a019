"""compose.yaml as Compose reads it (variables, commands, environments), without Docker."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>\w+)(?:(?P<how>:-|:\?|\+)(?P<text>[^}]*))?\})")


def services(
    variables: Mapping[str, str] | None = None, file: str = "compose.yaml"
) -> dict[str, dict[str, Any]]:
    """The services by name, with the variables of an .env put in."""
    whole = yaml.safe_load((ROOT / file).read_text())
    found: dict[str, dict[str, Any]] = _interpolated(whole["services"], variables or {})
    return found


def command_of(service: Mapping[str, Any]) -> list[str]:
    """Entrypoint and command; the image's where the service names none."""
    built = service.get("build")
    image = dockerfile_commands(ROOT / built["dockerfile"]) if built else {}
    return _words(service.get("entrypoint", image.get("ENTRYPOINT", []))) + _words(
        service.get("command", image.get("CMD", []))
    )


def dockerfile_commands(path: Path) -> dict[str, list[str]]:
    """ENTRYPOINT and CMD of a Dockerfile, which must be lists."""
    lines = re.findall(r"^(ENTRYPOINT|CMD) \[(.*)\]$", path.read_text(), flags=re.MULTILINE)
    return {name: re.findall(r'"([^"]*)"', words) for name, words in lines}


def _words(command: str | list[str]) -> list[str]:
    return shlex.split(command) if isinstance(command, str) else [str(word) for word in command]


def _interpolated(part: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(part, dict):
        return {name: _interpolated(value, variables) for name, value in part.items()}
    if isinstance(part, list):
        return [_interpolated(value, variables) for value in part]
    return (
        _VARIABLE.sub(lambda match: _value(match, variables), part)
        if isinstance(part, str)
        else part
    )


def _value(match: re.Match[str], variables: Mapping[str, str]) -> str:
    if match[0] == "$$":
        return "$"
    if match["how"] == "+":
        return match["text"] if match["name"] in variables else ""
    value = variables.get(match["name"], "")
    if not value and match["how"] == ":?":
        raise LookupError(f"{match['name']}: {match['text']}")
    return value or (match["text"] or "")
