"""Whether a model's weights can fit on the GPUs of a worker."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.machine import model_memory
from cli.terminal import UsageError

GB = 10**9


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory of a model whose weights take 20 GB in bfloat16; the file has holes only."""
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(20 * GB)
    return tmp_path


@pytest.fixture
def gpus_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    def each(gb: float | None) -> None:
        monkeypatch.setattr(
            model_memory, "memory_bytes", lambda _gpus: None if gb is None else int(gb * GB)
        )

    return each


@pytest.mark.parametrize(("gb", "tensor_parallel"), [(24, 1), (12, 2), (None, 1)])
def test_a_model_that_fits_or_may(model: Path, gpus_of: Any, gb: Any, tensor_parallel: int) -> None:
    gpus_of(gb)
    group = [str(i) for i in range(tensor_parallel)]
    model_memory.check_fits(str(model), "auto", [group], [])


@pytest.mark.parametrize(
    ("gb", "tensor_parallel", "dtype"), [(16, 1, "auto"), (8, 2, "auto"), (24, 1, "float32")]
)
def test_one_that_does_not_is_one_line(
    model: Path, gpus_of: Any, gb: int, tensor_parallel: int, dtype: str
) -> None:
    gpus_of(gb)
    group = [str(i) for i in range(tensor_parallel)]
    size = 40 if dtype == "float32" else 20
    wanted = (
        rf"take {size} GB and GPU\(s\) {','.join(group)} have {gb * tensor_parallel} GB: use more"
        r" --tensor-par"
    )
    with pytest.raises(UsageError, match=wanted):
        model_memory.check_fits(str(model), dtype, [group], [])


def test_weights_that_are_not_loaded_as_stored_pass(model: Path, gpus_of: Any) -> None:
    gpus_of(1)
    model_memory.check_fits(str(model), "auto", [["0"]], ["--load-format=dummy"])


def test_the_same_weights_in_another_form_do_not_count(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    (model / "consolidated.safetensors").write_bytes(b"x" * 1000)
    (model / "model.safetensors.index.json").write_text(
        json.dumps(
            {
                "weight_map": {
                    "a": "model-00001-of-00001.safetensors",
                    "b": "model-00001-of-00001.safetensors",
                }
            }
        )
    )
    assert model_memory.weights_bytes(model, "auto") == 20 * GB


@pytest.mark.parametrize(
    ("stored", "dtype", "gb"), [("float32", "auto", 10), ("float32", "float32", 20)]
)
def test_auto_loads_float32_as_16_bits(model: Path, stored: str, dtype: str, gb: int) -> None:
    (model / "config.json").write_text(json.dumps({"dtype": stored}))
    assert model_memory.weights_bytes(model, dtype) == gb * GB


@pytest.mark.parametrize(
    ("left_gib", "n_workers", "kv_gib", "short"),
    [(20, 1, "1", False), (20, 4, "4", True), (2, 1, None, True), (20, 4, None, False)],
)
def test_memory_that_is_short_is_told_before_a_start(
    monkeypatch: pytest.MonkeyPatch, left_gib: int, n_workers: int, kv_gib: str | None, short: bool
) -> None:
    found = (left_gib * 2**30, 32 * 2**30)
    monkeypatch.setattr(model_memory, "memory_left", lambda: found)
    why = model_memory.short_of_memory("no directory", "auto", n_workers, 1, kv_gib)
    assert (why is not None) == short
    if why is not None:
        assert f"{left_gib}.0 are left" in why
        assert f"{n_workers} worker(s) need about" in why
