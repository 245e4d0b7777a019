"""The scheme of poc_core/schemes/README.md, installed beside the others."""

from pathlib import Path

import pytest
import torch

import poc_core.schemes
from cli.ask.scheme_params import OfScheme, job_of
from poc_core.records import ProofSpec
from poc_core.schemes import scheme_names
from poc_core.schemes.base import load_scheme
from poc_core.schemes.contract import contract_of, recognised
from tests.toy_scheme.page import examples, install

PAGE = examples("poc_core/schemes/README.md", "A new scheme")
SPEC = ProofSpec(scheme="peaks", block_hash="b", public_key="k", seq_len=8, options={"n_peaks": 2})


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(PAGE, tmp_path)
    places = [*poc_core.schemes.__path__, str(tmp_path)]
    monkeypatch.setattr(poc_core.schemes, "__path__", places)


def test_the_page_shows_a_whole_one_that_is_short() -> None:
    lines = [line for file in PAGE for line in file.text.splitlines() if line.strip()]
    assert len(lines) <= 60
    assert "peaks" in scheme_names()


def test_it_is_asked_for_by_its_name() -> None:
    place = {"block_hash": "b", "block_height": 0, "public_key": "k", "node_id": 0}
    place |= {"node_count": 1, "nonces": [1, 2]}
    body = job_of(OfScheme("peaks", ["n_peaks=2"]), place, model="m", seq_len=8)
    peaks = contract_of("peaks")
    assert peaks.job_body is not None
    assert recognised(body, [contract_of("artifact"), peaks]) is peaks
    assert peaks.job_body.model_validate(body).spec() == SPEC


def test_it_computes() -> None:
    about = {"hidden_size": 4, "n_layers": 1, "device": torch.device("cpu")}
    scheme = load_scheme(SPEC, dtype=torch.float32, **about)  # type: ignore[arg-type]
    states = torch.tensor([[0.0, 3.0, 1.0, 2.0], [9.0, 0.0, 0.0, 8.0]])
    assert scheme.finish([1, 2], states) == [[1, 3], [0, 3]]  # type: ignore[attr-defined]
    assert len(contract_of("peaks").synthetic_values(SPEC, [1, 2], 4)) == 2
