"""The points of decode proofs: the file that ships, or another one whose checksum is named."""

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
    choose_codebook("", "")


def written(path: Path, content: bytes) -> tuple[str, str]:
    path.write_bytes(content)
    return str(path), hashlib.sha256(content).hexdigest()


def test_what_ships_is_what_the_golden_data_was_made_with() -> None:
    assert choose_codebook("", "") == SHIPPED_SHA256 == GOLDEN["codebook"]["sha256"]
    points = codebook(CPU)
    assert (
        points.shape == (POINTS, DIM) == (GOLDEN["codebook"]["points"], GOLDEN["codebook"]["dim"])
    )
    assert torch.allclose(points.norm(dim=-1), torch.ones(POINTS), atol=1e-6)


def test_another_file_takes_its_place(tmp_path: Path) -> None:
    states, picks = torch.randn(9, DIM), torch.arange(DIM).expand(9, DIM)
    before = snap(states, picks).points
    rows = SHIPPED.read_bytes()
    file, digest = written(
        tmp_path / "reversed",
        b"".join(rows[i : i + 4 * DIM] for i in range(0, len(rows), 4 * DIM)[::-1]),
    )
    assert choose_codebook(file, f" {digest.upper()} ") == digest
    assert torch.equal(snap(states, picks).points, POINTS - 1 - before)


def test_a_file_with_another_checksum_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    file, digest = written(tmp_path / "file", SHIPPED.read_bytes()[::-1])
    with pytest.raises(
        SettingsError,
        match=f"its sha256 is {digest}, POC_DECODE_CODEBOOK_SHA256 says {SHIPPED_SHA256}",
    ):
        choose_codebook(file, SHIPPED_SHA256)
    assert torch.allclose(codebook(CPU).norm(dim=-1), torch.ones(POINTS), atol=1e-6)


@pytest.mark.parametrize(("file", "digest"), [("/some/file", ""), ("", SHIPPED_SHA256)])
def test_a_file_and_its_checksum_go_together(file: str, digest: str) -> None:
    with pytest.raises(SettingsError, match="go together"):
        read_codebook_file(file, digest)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        SHIPPED.read_bytes()[: -4 * DIM],
        b"\xff" * 4 * POINTS * DIM,
        bytes(4 * POINTS * DIM),
    ],
    ids=["empty", "short", "a row too few", "not finite", "rows without length"],
)
def test_a_file_that_is_no_codebook_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(SettingsError, match="is no codebook: it must hold 16 rows of 256"):
        read_codebook_file(*written(tmp_path / "file", content))


def test_one_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        read_codebook_file(str(tmp_path / "none"), SHIPPED_SHA256)


def test_a_damaged_installation_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "codebook.f32").write_bytes(SHIPPED.read_bytes()[:-1])
    with monkeypatch.context() as patch:
        patch.setattr(codebook_file, "SHIPPED", tmp_path / "codebook.f32")
        with pytest.raises(SettingsError, match=r"codebook.f32 is damaged: its sha256 is"):
            read_codebook_file()
