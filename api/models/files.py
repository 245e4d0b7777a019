"""Determines which files of a model vLLM loads, and which of these a folder lacks."""

import json
import os
import re
import stat
from collections.abc import Collection, Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from poc_core.errors import ProoflineError

# File name patterns of weights, each with the name of its index file, in the order in which vLLM's
# loader prefers them. The first is only for models with Mistral's configuration (params.json).
_FORMS = (
    ("consolidated*.safetensors", "consolidated.safetensors.index.json"),
    ("*.safetensors", "model.safetensors.index.json"),
    ("*.bin", "pytorch_model.bin.index.json"),
    ("*.pt", ""),
    ("*.gguf", ""),
)
# Files that training leaves next to the weights.
_OF_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
_CONFIGS = ("config.json", "params.json")  # of transformers and of Mistral
_TOKENIZERS = (
    *("tokenizer.json", "tekken.json", "tokenizer.model.*", "*.model", "*.tiktoken", "*.spm"),
    "vocab.*",
)
_SMALL = (*_TOKENIZERS, "*.json", "*.txt", "*.bpe", "*.jinja", "*.py")
_SHARD = re.compile(r"(.*-)(\d{1,99})(-of-)(\d{1,99})(\.\w+)")
# More shards than any model has.
_MOST_SHARDS = 9999
# JSON files larger than this, such as a tokenizer's, are not parsed.
_PARSED_BYTES = 1024**2


class BrokenModelError(ProoflineError):
    """A model's file cannot be read, or its content is not as expected."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(name: str) -> str:
    """Escapes the bytes of a file's name that are not UTF-8, because JSON cannot contain them."""
    return name.encode(errors="backslashreplace").decode()


def chosen(names: Collection[str]) -> tuple[set[str], str]:
    """Returns the names of the weight files that vLLM loads, and the name of their index file.

    The index file need not exist. Its name is "" if the weights' format has no index.
    """
    for pattern, index in _FORMS[_CONFIGS[1] not in names :]:
        found = {
            name
            for name in names
            if "/" not in name and fnmatch(name, pattern) and name not in _OF_TRAINING
        }
        if found or index in names:
            return found, index
    return set(), ""


def small(names: Collection[str]) -> set[str]:
    """Returns the files that vLLM loads besides weights: configuration, tokenizer, code, index."""
    others = {index for _, index in _FORMS} - {chosen(names)[1]}
    return {
        name
        for name in names
        if (_is_any(name, _SMALL) and "/" not in name and name not in others)
        or _is_any(name, ("*/*.py", "additional_chat_templates/*.jinja"))
    }


def missing(folder: Path) -> list[str]:
    """Returns the names of the files that a model's folder lacks. May raise BrokenModelError."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise BrokenModelError(f"{folder} cannot be read: {error.strerror or error}") from None
    for name in sorted(small(names)):
        if name.endswith(".json") and _size(folder / name) <= _PARSED_BYTES:
            parsed(folder / name)
    weights, index = chosen(names)
    if index in names:
        weights = indexed(folder / index)
    for found in filter(None, map(_SHARD.fullmatch, sorted(weights))):
        before, number, of, last, after = found.groups()
        if int(last) > _MOST_SHARDS:
            raise BrokenModelError(f"{folder} is said to have {last} shards")
        weights |= {f"{before}{n:0{len(number)}}{of}{last}{after}" for n in range(1, int(last) + 1)}
    lacks = [printable(name) for name in sorted(weights) if not _has(folder / name)]
    if not weights:
        lacks.append("weights")
    if not any(name in names for name in _CONFIGS):
        lacks.append(_CONFIGS[0])
    if not any(_is_any(name, _TOKENIZERS) and _has(folder / name) for name in names):
        lacks.append("a tokenizer")
    return lacks


def indexed(path: Path) -> set[str]:
    """Returns the weight files that an index lists. BrokenModelError if `path` is no index."""
    named = parsed(path).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise BrokenModelError(f"{path} is no index of weights")
    return set(named.values())


def parsed(path: Path) -> dict[str, Any]:
    """Parses a JSON file. BrokenModelError if the file cannot be read or has no JSON object."""
    _size(path)  # refuses a pipe, which might never end
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise BrokenModelError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise BrokenModelError(f"{path} is no JSON") from None
    if not isinstance(found, dict):
        raise BrokenModelError(f"{path} holds no JSON object")
    return found


def _has(path: Path) -> bool:
    """Returns True if a file exists and is not empty. Raises BrokenModelError as `_size` does."""
    return os.path.lexists(path) and _size(path) > 0


def _size(path: Path) -> int:
    """Returns a file's size in bytes. BrokenModelError if `path` is no readable regular file."""
    try:
        found = path.stat()
    except OSError as error:
        gone = (
            "is a link to nothing"
            if path.is_symlink()
            else f"cannot be read: {error.strerror or error}"
        )
        raise BrokenModelError(f"{path} {gone}") from None
    if not stat.S_ISREG(found.st_mode):
        raise BrokenModelError(f"{path} is no file")
    return found.st_size


def _is_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
