"""The oracle of chains against the reference, and the transformers engine against the oracle.

`make models` holds vLLM's chains against the same oracle, family by family.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.families.make import FOR_TRANSFORMERS, make
from bench.families.oracle import Wanted, chains
from poc_core.records import ProofSpec
from poc_core.schemes.artifact.proof import ArtifactScheme
from tests.harness.chains import assert_chain, golden
from tests.harness.golden import l2, model_dir
from workers.engines.base import Engine
from workers.engines.options import EngineOptions
from workers.load import load_engine
from workers.pipeline import compute_all

# One process loads transformers.
pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("transformers")]

WANTED = Wanted("block", "key", seq_len=24, max_tokens=12, nonces=(0, 3, 9))
SPEC = ProofSpec(
    scheme="decode",
    block_hash=WANTED.block_hash,
    public_key=WANTED.public_key,
    seq_len=WANTED.seq_len,
    options={"max_tokens": WANTED.max_tokens},
)


def load(model: Path | str) -> Engine:
    return load_engine(EngineOptions(model=str(model), engine="transformers", dtype="float32"))


@pytest.mark.parametrize("model", ["tiny-qwen3-256", "tiny-qwen3-moe-256"])
def test_its_chains_are_the_references(model: str) -> None:
    case = golden(model, "decode")[0]
    nonces = tuple(one["nonce"] for one in case["artifacts"])
    plan = Wanted(
        case["block_hash"], case["public_key"], case["seq_len"], case["max_tokens"], nonces
    )
    found = chains(model_dir(model), plan)
    for one in case["artifacts"]:
        assert found[one["nonce"]].points == one["k_points_steps"]


def test_experts_chosen_by_token_get_the_ids_of_each_step(tmp_path: Path) -> None:
    """DeepSeek-V4: two layers that route by token id, which a seed neither leads nor counts."""
    small = {"hidden_size": 256, "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 0]}
    folder = make("deepseek-v4", tmp_path, **small) / FOR_TRANSFORMERS
    expected = chains(str(folder), WANTED)
    assert_same(compute_all(load(folder), SPEC, WANTED.nonces), expected)
    others = chains(str(folder), WANTED._replace(other_ids=True))
    assert all(others[nonce].points != expected[nonce].points for nonce in WANTED.nonces)


def test_wrapped_layers_are_reflected_in_chains_and_not_in_artifacts(tmp_path: Path) -> None:
    """The fleet's decode path finds the layers of `language_model.model`, its prefill path none."""
    engine = load(make("kimi-k2.6", tmp_path, hidden_size=256))
    assert engine.info.layers == "language_model.layers"
    assert not engine.info.layers_reflected
    assert_same(
        compute_all(engine, SPEC, WANTED.nonces), chains(str(tmp_path / "kimi-k2.6"), WANTED)
    )
    artifacts = SPEC.model_copy(update={"scheme": "artifact", "options": {}})
    scheme = ArtifactScheme(
        artifacts,
        hidden_size=256,
        n_layers=engine.info.n_layers,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    model: Any = engine.__dict__["_model"]
    with torch.inference_mode():
        states = model(inputs_embeds=scheme.inputs(WANTED.nonces)).last_hidden_state
    plain = scheme.finish(WANTED.nonces, states[:, -1])
    assert l2(compute_all(engine, artifacts, WANTED.nonces), plain, 12).max() < 1e-5


def assert_same(found: list[Any], expected: dict[int, Any]) -> None:
    for chain, nonce in zip(found, WANTED.nonces, strict=True):
        gaps = [best - other for best, other in map(best_two, expected[nonce].scores)]
        assert_chain(chain, expected[nonce].points, gaps)


def best_two(scores: list[float]) -> tuple[float, float]:
    best, other = sorted(scores)[:-3:-1]
    return best, other
