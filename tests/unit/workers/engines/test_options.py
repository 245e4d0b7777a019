"""The options of an engine, and which do not go together."""

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from poc_core.errors import OptionsError
from workers.engines.options import EngineOptions


def test_handed_on_as_json_they_are_the_same() -> None:
    options = EngineOptions(
        model="/models/m",
        served_model_name="m",
        tensor_parallel=2,
        max_batch_tokens=99,
        vllm_args=("--seed", "1"),
    )
    assert EngineOptions.model_validate_json(options.model_dump_json()) == options


def test_a_model_is_served_under_its_own_name_unless_it_has_another() -> None:
    assert EngineOptions(model="some/model").name == "some/model"
    assert EngineOptions(model="some/model", served_model_name="m").name == "m"


def test_both_parallelisms_multiply() -> None:
    assert EngineOptions(model="m", tensor_parallel=2, pipeline_parallel=3).n_devices == 6


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "transformers", "tensor_parallel": 2},
        {"engine": "synthetic", "pipeline_parallel": 2},
        {"engine": "synthetic", "vllm_args": ("--seed", "1")},
    ],
)
def test_what_only_vllm_can_do_is_refused_for_others(options: Any) -> None:
    with pytest.raises(
        OptionsError, match=f"are vLLM's; the {options['engine']} engine takes neither"
    ):
        EngineOptions(model="m", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "magic"}, "'vllm', 'transformers' or 'synthetic'"),
        ({"dtype": "float8"}, "'auto', 'float32' or 'bfloat16'"),
        ({"tensor_parallel": 0}, "greater than or equal to 1"),
        ({"pipeline_parallel": 0}, "greater than or equal to 1"),
        ({"max_batch_tokens": 0}, "greater than or equal to 1"),
        ({"synthetic_step_ms": -1}, "greater than or equal to 0"),
        ({"tensor_paralel": 2}, "Extra inputs are not permitted"),
    ],
)
def test_what_no_engine_can_do_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EngineOptions(model="m", **options)


def test_they_are_read_without_the_engines() -> None:
    code = (
        "import sys, workers.engines.options; assert not {'torch', 'vllm', 'transformers',"
        " 'celery'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
