"""A Dockerfile taken apart: its stages and instructions, those that ours use and no others."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

KNOWN = {
    *("ARG", "FROM", "RUN", "COPY", "ENV", "WORKDIR", "USER", "LABEL", "HEALTHCHECK"),
    *("ENTRYPOINT", "CMD"),
}
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass
class Image:
    """What a stage has come to: its files, and what whoever starts it goes by."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    folder: str = "/"
    labels: dict[str, str] = field(default_factory=dict)
    health: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Instruction:
    name: str
    text: str


@dataclass(frozen=True)
class Stage:
    base: str
    name: str
    instructions: tuple[Instruction, ...]


def stages(text: str, arguments: Mapping[str, str] | None = None) -> list[Stage]:
    """The stages in order, arguments put into bases. ValueError: an instruction of others."""
    known = dict(arguments or {})
    found: list[tuple[str, str, list[Instruction]]] = []
    for instruction in _instructions(text):
        if instruction.name == "FROM":
            base, _, name = instruction.text.partition(" AS ")
            found.append((expanded(base, known), name or "final", []))
        elif found:
            found[-1][2].append(instruction)
        elif instruction.name == "ARG":
            name, _, default = instruction.text.partition("=")
            known.setdefault(name, default)
        else:
            raise ValueError(f"{instruction.name} stands before FROM")
    return [Stage(base, name, tuple(own)) for base, name, own in found]


def expanded(text: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], ""), text)


def pairs(text: str) -> dict[str, str]:
    """NAME=VALUE pairs of ENV and LABEL."""
    return dict(word.split("=", 1) for word in shlex.split(text))


def words(text: str) -> list[str]:
    """A command, which must be a list: a shell in between would keep signals to itself."""
    found: list[str] = json.loads(text)
    return found


def flags(text: str) -> tuple[list[tuple[str, str]], str]:
    """(NAME, VALUE) of the leading --NAME=VALUE, and the rest."""
    found = []
    while match := re.match(r"--([\w-]+)=(\S+)\s+", text):
        found.append((match[1], match[2]))
        text = text[match.end() :]
    return found, text


def _instructions(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if line.strip() and line.lstrip()[0] != "#"]
    joined = re.sub(r"\\\n", "", "\n".join(lines))
    found = []
    for line in joined.splitlines():
        name, _, rest = line.partition(" ")
        if name not in KNOWN:
            raise ValueError(f"{name} is no instruction that our Dockerfiles use")
        found.append(Instruction(name, re.sub(r"  +", " ", rest.strip())))
    return found
