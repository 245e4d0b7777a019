"""`bench.trained`: the cheats' weights, and the tables of made-up results."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.trained import tables
from bench.trained.machines import KEY, MACHINES, N_NONCES, N_PROOFS, VALIDATOR, WEIGHTS, path
from bench.trained.tables import artifact_samples, draw
from poc_core.arithmetic.encoding import encode_vectors

FAR = {"int8": 0.12, "fp8": 0.25, "int4": 0.7, "pruned": 0.75}  # roughly, as seen


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Artifacts as machines so far from the validator would give them."""
    dice = np.random.default_rng(0)
    own = dice.normal(size=(N_PROOFS, N_NONCES, 12))
    own /= np.linalg.norm(own, axis=-1, keepdims=True)
    for machine in MACHINES:
        apart = 0.0 if machine is VALIDATOR else FAR.get(machine.weights, 0.06)
        off = dice.normal(size=own.shape)
        moved = own + apart * off / np.linalg.norm(off, axis=-1, keepdims=True)
        proofs = [
            {
                "artifacts": [
                    {"nonce": nonce, "vector_b64": text}
                    for nonce, text in enumerate(encode_vectors(vectors))
                ],
                "request": {"block_hash": f"trained-{n}", "public_key": KEY},
            }
            for n, vectors in enumerate(moved)
        ]
        path(tmp_path, machine.name, "artifacts").write_text(json.dumps({"artifact": proofs}))
    return tmp_path


def cells(lines: list[str], name: str) -> list[str]:
    (line,) = (line for line in lines if line.startswith(f"| {name} |"))
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


def test_tables_of_artifacts_tell_honest_from_cheat(folder: Path) -> None:
    found = tables.tables(folder)
    assert set(found) == {"artifacts", "tests"}  # of what is there
    assert cells(found["artifacts"], "honest: one at a time")[6:] == ["0", "0 %"]
    assert cells(found["artifacts"], "int4")[6:] == [str(N_PROOFS), "100 %"]
    assert cells(found["artifacts"], "int8")[6] == "0"
    mean = next(line for line in found["tests"] if line.startswith("| mean | 200"))
    assert mean.split("|")[3].strip() == "100 %"  # int8, which the count never finds
    count = next(line for line in found["tests"] if line.startswith("| count over 0.4 | 200"))
    assert count.split("|")[3].strip() == "0 %"


def test_the_picture_is_the_same_each_time(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pictures = [tmp_path / f"{n}.svg" for n in range(2)]
    for one in pictures:
        draw(artifact_samples(folder), one)
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert b"honest: one at a time" in pictures[0].read_bytes()


def test_tables_of_chains_and_chats() -> None:
    chains = list(tables.chain_table({"int4": [[3, 0.04], [0, 0.0]]}))
    assert cells(chains, "int4")[1:] == ["50 %", "0.0200", "0.0400", "50 %", "50 %", "0 %", "0 %"]
    answer = {
        "distance": 0.25,
        "similarity": 0.75,
        "reasons": {"calibrated": "positions far apart", "others": "pass"},
    }
    chats = list(tables.chat_table({"int4": [answer]}))
    assert cells(chats, "int4")[1:] == [
        "0.2500 (0.2500)",
        "0.750 to 0.750",
        "0 of 1",
        "1 of 1",
        "positions far apart",
    ]
