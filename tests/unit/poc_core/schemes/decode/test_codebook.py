"""The file of the points of decode proofs: the shipped one, or the network's own."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from poc_core.errors import SettingsError
from poc_core.schemes.decode import codebook_file
from poc_core.schemes.decode.codebook import choose_codebook, codebook
from poc_core.schemes.decode.codebook_file import (
    DIM,
    NETWORK_SHA256,
    POINTS,
    SHIPPED,
    SHIPPED_SHA256,
    read_codebook_file,
)
from poc_core.schemes.decode.steps import snap
from tests.harness.golden import ROOT

GOLDEN: dict[str, Any] = json.loads((ROOT / "tests/data/golden/decode-primitives.json").read_text())
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def shipped_again() -> Iterator[None]:
    yield
    choose_codebook("")


def written(path: Path, content: bytes) -> tuple[str, str]:
    path.write_bytes(content)
    return str(path), hashlib.sha256(content).hexdigest()


def test_what_ships_is_what_the_golden_data_was_made_with() -> None:
    assert choose_codebook("") == SHIPPED_SHA256 == GOLDEN["codebook"]["sha256"]
    points = codebook(CPU)
    assert (
        points.shape == (POINTS, DIM) == (GOLDEN["codebook"]["points"], GOLDEN["codebook"]["dim"])
    )
    assert torch.allclose(points.norm(dim=-1), torch.ones(POINTS), atol=1e-6)


def test_the_networks_file_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states, picks = torch.randn(9, DIM), torch.arange(DIM).expand(9, DIM)
    before = snap(states, picks).points
    rows = SHIPPED.read_bytes()
    file, digest = written(
        tmp_path / "reversed",
        b"".join(rows[i : i + 4 * DIM] for i in range(0, len(rows), 4 * DIM)[::-1]),
    )
    monkeypatch.setattr(codebook_file, "NETWORK_SHA256", digest)
    assert choose_codebook(file) == digest
    assert torch.equal(snap(states, picks).points, POINTS - 1 - before)


@pytest.mark.parametrize(
    "content",
    [b"", b"abc", SHIPPED.read_bytes()[::-1], SHIPPED.read_bytes()[: -4 * DIM]],
    ids=["empty", "short", "of the same length", "a row too few"],
)
def test_any_other_file_is_refused_and_changes_nothing(tmp_path: Path, content: bytes) -> None:
    file, digest = written(tmp_path / "file", content)
    with pytest.raises(SettingsError, match=f"has the sha256 {digest}; .* has {NETWORK_SHA256}"):
        choose_codebook(file)
    assert torch.allclose(codebook(CPU).norm(dim=-1), torch.ones(POINTS), atol=1e-6)


def test_one_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        read_codebook_file(str(tmp_path / "none"))


def test_a_damaged_installation_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "codebook.f32").write_bytes(SHIPPED.read_bytes()[:-1])
    with monkeypatch.context() as patch:
        patch.setattr(codebook_file, "SHIPPED", tmp_path / "codebook.f32")
        with pytest.raises(
            SettingsError, match=r"codebook.f32 has the sha256 .*; it is damaged: reinstall"
        ):
            read_codebook_file()
