"""The quick part of the model matrix (`make models`): the families that differ most from the
shipped models.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.families import chains, checks
from bench.families.look import BFLOAT16_MEAN, agree
from bench.families.make import FOLDER, families, make
from poc_core.serving.model_options import Dtype
from tests.harness.marks import needs_vllm
from workers.engines.base import Engine
from workers.engines.options import EngineOptions
from workers.load import load_engine
from workers.pipeline import compute_all

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("engines"), needs_vllm]

# States beside attention, which CPUs compute in bfloat16 only; and MLA, each with experts.
QUICK: dict[str, Dtype] = {"qwen3-next": "bfloat16", "deepseek-v3": "float32"}
# Longer than what linear attention computes at once, 64, and a prompt longer than a block of 128.
SPEC = checks.SPEC.model_copy(update={"seq_len": 80})
PROMPT = 140


def options(family: str, model: Path, **more: Any) -> EngineOptions:
    return EngineOptions(
        model=str(model),
        served_model_name=family,
        dtype=QUICK[family],
        max_batch_tokens=2048,
        **more,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(
    scope="module", params=["qwen3-next", pytest.param("deepseek-v3", marks=pytest.mark.slow)]
)
def engine(request: pytest.FixtureRequest, folder: Path, forked_engines: None) -> Iterator[Engine]:
    family: str = request.param
    arguments = ("--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16")
    model = make(family, folder, hidden_size=256)  # of which decode proofs read as many
    engine = load_engine(options(family, model, vllm_args=arguments), 120)
    yield engine
    engine.close()


def test_layers_share_their_caches_and_the_values_are_those_of_private_ones(engine: Engine) -> None:
    assert engine.info.caches == "shared"
    assert checks.shared_against_private(engine, SPEC).exact


def test_slices_change_no_bit_and_chat_between_them_no_token(engine: Engine) -> None:
    assert engine.sliceable
    assert checks.slices_against_whole(engine, SPEC).exact
    beside = checks.chat_beside_proofs(engine, SPEC, PROMPT)
    assert {name: str(one) for name, one in beside.items()} == {
        "chat": "same",
        "beside chat": "same",
    }


def test_transformers_gives_the_same_artifacts(engine: Engine, folder: Path) -> None:
    family = engine.info.name
    other = load_engine(options(family, folder / family, engine="transformers"))
    errors = checks.against(engine, other)
    # In bfloat16 routers that are undecided choose by the processor: of five nonces one lay 0.24
    # off without AVX-512, and two up to 0.12 with it.
    undecided = other.info.dtype == "bfloat16"
    agrees, words = agree(errors, other.info.dtype, with_experts=False)
    assert np.median(errors) <= BFLOAT16_MEAN if undecided else agrees, words


def test_distances_with_layer_hooks_are_computed(engine: Engine) -> None:
    """One rank has whole sums."""
    layer_hooks = {"scheme": "distance", "options": {"randomization": "layer_hooks"}}
    spec = SPEC.model_copy(update=layer_hooks)
    values = compute_all(engine, spec, checks.NONCES)
    assert all(isinstance(value, float) and 1 < value < 2 for value in values)


def test_steps_of_decode_proofs_go_on_from_what_is_kept(engine: Engine) -> None:
    """Keys, values and states: alone, in parts, replayed and beside chat as in one forward."""
    seen = chains.checked(
        engine, chains.SPEC.model_copy(update={"seq_len": 40, "options": {"max_tokens": 8}})
    )
    assert seen["right"], seen


def test_every_family_has_a_configuration_and_a_line_in_the_docs() -> None:
    page = (FOLDER.parents[1] / "docs" / "models.md").read_text()
    assert [family for family in families() if f"| {family} " not in page] == []
