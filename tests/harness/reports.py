"""Runs `proofline report` on files of the commands and the API."""

import json
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poc_core.schemes.artifact.encoding import encode_vectors
from tests.harness.commands import run_here
from tests.harness.documents import ROOT

GOLDEN, MADE = ROOT / "tests/data/golden", ROOT / "tests/data/report"
Capture = pytest.CaptureFixture[str]


def generated(
    n: int = 30, seed: int = 1, k_dim: int = 12, offset: float = 0.0, **request: Any
) -> dict[str, Any]:
    """What `generate` writes. The same seed gives the same vectors, moved by about `offset`."""
    vectors = np.random.default_rng(seed).normal(size=(n, k_dim)) / np.sqrt(k_dim)
    moved = vectors + offset * np.random.default_rng(int(1e6 * offset) + 99).normal(
        size=(n, k_dim)
    ) / np.sqrt(k_dim)
    texts = encode_vectors(moved)
    params = {"model": "m", "seq_len": 64, "k_dim": k_dim} | request.pop("params", {})
    return {
        "status": "completed",
        "artifacts": [{"nonce": nonce, "vector_b64": text} for nonce, text in enumerate(texts)],
        "encoding": {"dtype": "f16", "k_dim": k_dim, "endian": "le"},
        "request": {
            "block_hash": "0xabc",
            "public_key": "key",
            "params": params,
            "poc_stronger_rng": False,
        }
        | request,
    }


def verdict(margins: Sequence[float]) -> dict[str, Any]:
    """What the API answers to a validation of chains, as far as it matters here."""
    per_nonce = [
        {
            "nonce": nonce,
            "n_sphere_mismatches": int(margin > 0),
            "n_steps": 9,
            "mismatch_margin_max": margin,
        }
        for nonce, margin in enumerate(margins)
    ]
    return {"status": "completed", "n_total": len(per_nonce), "per_nonce": per_nonce}


class Reports:
    """A folder with files of proofs, and `report` on some of them."""

    def __init__(self, folder: Path, capfd: Capture) -> None:
        self.folder, self.out, self._capfd = folder, folder / "out", capfd

    def write(self, name: str, document: Any) -> str:
        """Writes a document and returns its path."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return str(path)

    def run(self, *arguments: str) -> int:
        return run_here("report", *arguments, "--output", str(self.out))

    def printed(self, *arguments: str) -> str:
        # Rendering takes longer than all else, and another test looks at pictures.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "lab.judge.report_pictures.save", lambda _figure, picture, _option: picture.touch()
            )
            assert self.run(*arguments) == 0
        stdout, _ = self._capfd.readouterr()
        return stdout

    def numbers(self, *arguments: str) -> dict[str, Any]:
        stdout = self.printed(*arguments, "--json")
        assert stdout.count("\n") == 1
        found: dict[str, Any] = json.loads(stdout)
        return found

    def error(self, *arguments: str) -> str:
        existed = self.out.exists()
        assert self.run(*arguments) == 2
        _, stderr = self._capfd.readouterr()
        assert self.out.exists() == existed
        return " ".join(stderr.split())


class Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data
