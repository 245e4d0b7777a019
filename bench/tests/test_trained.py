"""`bench.trained`: the cheats' weights, and the tables of made-up results."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.trained import tables
from bench.trained.machines import (
    ANSWERED,
    CHAINED,
    MACHINES,
    PROOFS,
    VALIDATOR,
    WEIGHTS,
    path,
    proof_spec,
    write,
)
from lab.judge.compute import request_of
from poc_core.arithmetic.encoding import encode_vectors

FAR = {"int8": 0.12, "fp8": 0.25, "int4": 0.7, "pruned": 0.75}  # roughly, as seen


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Proofs as machines so far from the validator would give them."""
    dice = np.random.default_rng(0)
    for seq_len, (n_hashes, n_nonces) in PROOFS.items():
        for n in range(n_hashes):
            own = dice.normal(size=(n_nonces, 12))
            own /= np.linalg.norm(own, axis=-1, keepdims=True)
            for machine in MACHINES:
                apart = 0.0 if machine is VALIDATOR else FAR.get(machine.weights, 0.06)
                off = dice.normal(size=own.shape)
                off /= np.linalg.norm(off, axis=-1, keepdims=True)
                texts = encode_vectors(own + apart * off)
                proof = {
                    "artifacts": [{"nonce": n, "vector_b64": text} for n, text in enumerate(texts)],
                    "request": request_of(proof_spec(0, n, seq_len)),
                }
                write(path(tmp_path, machine.name, f"proof-{seq_len}-{n}"), proof)
    return tmp_path


def cells(lines: list[str], name: str) -> list[str]:
    (line,) = (line for line in lines if line.startswith(f"|{name}|"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_coarser_weights_are_further_off() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    off = {
        change: float(
            (WEIGHTS[change]("model.layers.3.mlp.up_proj.weight", weight) - weight).norm()
        )
        for change in ("int8", "fp8", "int4", "pruned")
    }
    assert off["pruned"] == 0 < off["int8"] < off["fp8"] < off["int4"]


def test_a_layer_that_is_left_out_adds_nothing() -> None:
    weight = torch.ones(4, 4)
    assert not WEIGHTS["pruned"]("model.layers.14.mlp.down_proj.weight", weight).any()
    assert WEIGHTS["pruned"]("model.layers.14.mlp.up_proj.weight", weight).all()
    assert WEIGHTS["pruned"]("model.layers.1.self_attn.o_proj.weight", weight).all()


def test_tables_of_proofs_tell_honest_from_cheat(folder: Path) -> None:
    found = tables.tables(folder)["docs/proofs.md"]
    proofs, powers = found[: found.index("")], found[found.index("") :]
    assert cells(proofs, "honest: one at a time")[3:6] == ["0 %", "0", "0 %"]
    assert cells(proofs, "int4")[4:6] == [str(tables.TRIES), "100 %"]
    assert cells(proofs, "int8")[4] == "0"
    mean = next(line for line in powers if line.startswith("|mean|50"))
    assert mean.split("|")[3].strip() == "100 %"  # int8, which the network's count never finds
    count = next(line for line in powers if line.startswith("|count over 0.4|50"))
    assert count.split("|")[3].strip() == "0 %"


def test_only_proofs_that_all_machines_have_are_in_the_tables(folder: Path) -> None:
    path(folder, "int4", "proof-256-1").unlink()
    assert len(tables.proofs(folder, 256)["int8"]) == PROOFS[256][0] - 1
    path(folder, "int4", "proof-1024-0").unlink()
    path(folder, "int4", "proof-1024-1").unlink()
    assert tables.tables(folder) == {}


def test_a_verdict_is_that_of_proofline_validate(folder: Path) -> None:
    found = tables.proofs(folder, 256)
    verdict = tables.validate(found[VALIDATOR.name][0], found["int4"][0], range(10))
    assert verdict["fraud_detected"]
    assert (verdict["n_total"], verdict["n_mismatch"]) == (10, 10)
    assert verdict["terms"] == "the network's default"


def test_the_picture_is_the_same_each_time(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pictures = [tmp_path / f"{n}.svg" for n in range(2)]
    for one in pictures:
        tables.draw(tables.distances(tables.proofs(folder, 256)), one)
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert b"honest: one at a time" in pictures[0].read_bytes()


def test_tables_of_chains_and_chats(tmp_path: Path) -> None:
    for name in (VALIDATOR.name, *CHAINED):
        chain = [1, 5, 3] if name == "int4" else [1, 2, 3]
        chains = [{"nonce": n, "k_points_steps": chain if n else [1, 2, 3]} for n in range(2)]
        write(path(tmp_path, name, "chains"), {"artifacts": chains})
        judged = [[0, 0.0], [3, 0.04]] if name == "int4" else [[0, 0.0], [0, 0.0]]
        write(path(tmp_path, name, "judged-chains"), judged)
    for name in ANSWERED:
        assert "docs/chat.md" not in tables.tables(tmp_path)
        answer = {
            "similarity": 0.75,
            "reasons": {"calibrated": "positions far apart", "others": "pass"},
        }
        write(path(tmp_path, name, "judged-answers"), [answer])
    found = tables.tables(tmp_path)
    assert cells(found["docs/decode.md"], "int4")[1:] == (
        ["1", "1", "0.0200", "0.0400", "50", "50", "0", "0"]
    )
    assert cells(found["docs/decode.md"], "fp8")[1:3] == ["0", "-"]
    assert cells(found["docs/chat.md"], "int4")[1:] == (["0.750", "0.750", "0", "1"])
