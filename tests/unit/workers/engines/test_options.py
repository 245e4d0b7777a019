"""The options of an engine, and which do not go together."""

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from poc_core.errors import OptionsError
from workers.engines.options import EngineOptions, HostSpan


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
        ({"dtype": "float8"}, "'auto', 'float32', 'bfloat16' or 'float16'"),
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


SECOND = HostSpan(n_hosts=2, rank=1, head_host="10.0.0.1", head_port=7070)


def test_an_engine_over_hosts_is_divided_among_them() -> None:
    options = EngineOptions(model="m", tensor_parallel=8, pipeline_parallel=2, span=SECOND)
    assert (options.n_devices, options.n_devices_here) == (16, 8)
    assert EngineOptions.model_validate_json(options.model_dump_json()) == options
    assert EngineOptions(model="m", tensor_parallel=8).n_devices_here == 8


def test_only_the_head_follows_nobody() -> None:
    head = SECOND.model_copy(update={"rank": 0, "head_host": "fd00::1"})
    assert (SECOND.follows, head.follows) == ("10.0.0.1:7070", "")
    assert str(head) == "host 0 of an engine over 2, head [fd00::1]:7070"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "synthetic"}, "runs on several hosts, not synthetic"),
        ({"span": SECOND.model_copy(update={"rank": 2})}, "ranks of 2 hosts are 0 to 1, not 2"),
        ({"tensor_parallel": 3}, r"2 hosts cannot share 3 device\(s\)"),
        ({"vllm_args": ("--nnodes=2",)}, "replace --nnodes=2"),
        ({"vllm_args": ("-dp", "2")}, "replace -dp"),
    ],
)
def test_what_hosts_cannot_share_is_refused(options: Any, message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        EngineOptions(**{"model": "m", "tensor_parallel": 2, "span": SECOND} | options)


def test_a_host_that_waits_for_a_model_need_not_know_how_it_is_divided() -> None:
    assert EngineOptions(model="", span=SECOND).n_devices == 1


def test_they_are_read_without_the_engines() -> None:
    code = (
        "import sys, workers.engines.options; assert not {'torch', 'vllm', 'transformers',"
        " 'celery'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
