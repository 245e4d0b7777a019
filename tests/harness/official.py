"""The network's own deployments: its node configurations, word for word."""

import json
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parents[1] / "data" / "deployments"


class Official(NamedTuple):
    """What POST /api/v1/inference/up is asked for, and the name by which all speak of the model."""

    file: str
    name: str
    model: str
    words: list[str]

    def __str__(self) -> str:
        return self.file

    @property
    def body(self) -> dict[str, object]:
        return {"model": self.model, "dtype": "auto", "additional_args": self.words}


def official() -> list[Official]:
    """The deployments of every node of every file."""
    found = []
    for path in sorted(FOLDER.glob("node-config-*.json")):
        for node in json.loads(path.read_text()):
            for name, said in node["models"].items():
                model, words = name, list(said["args"])
                if other := said.get("model_override"):
                    model = other["hf_repo"]
                    words += ["--revision", other["hf_commit"], "--served-model-name", name]
                file = f"{path.stem.removeprefix('node-config-')}-{node['id']}"
                found.append(Official(file, name, model, words))
    return found
