"""The workers of one machine: what each is started with, and when starting another is pointless."""

import json
from pathlib import Path

import pytest

from cli.console import UsageError
from cli.machine import model_memory
from cli.supervise import fleet
from cli.supervise.fleet import CORRUPTS_CHAT, DOES_NOT_FIT, READY, EngineChoice, telling_lines, why_hopeless

GB = 10**9


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory of a model whose weights take 20 GB in bfloat16; the file has holes only."""
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(20 * GB)
    return tmp_path


@pytest.fixture
def gpus_of(monkeypatch: pytest.MonkeyPatch):
    def each(gb: float | None) -> None:
        monkeypatch.setattr(model_memory, "memory_bytes", lambda _gpus: None if gb is None else int(gb * GB))

    return each


class TestEnvironments:
    def test_each_worker_sees_its_own_gpus(self, monkeypatch) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        choice = EngineChoice("tiny-qwen3", tensor_parallel=2)
        found = choice.environments([["0", "1"], ["2", "3"]], 2)
        assert [env["CUDA_VISIBLE_DEVICES"] for env in found] == ["0,1", "2,3"]

    def test_workers_on_cpus_share_cores_and_memory(self, monkeypatch) -> None:
        for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(fleet, "vllm_runs_on_cpu", lambda: True)
        monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1, 2, 3})
        found = EngineChoice("tiny-qwen3").environments([], 2)
        assert [env["VLLM_CPU_OMP_THREADS_BIND"] for env in found] == ["0", "2"]
        assert [env["VLLM_CPU_KVCACHE_SPACE"] for env in found] == ["1", "1"]

    def test_the_synthetic_engine_needs_nothing(self) -> None:
        assert EngineChoice("tiny-qwen3", engine="synthetic").environments([], 3) == [{}, {}, {}]


class TestFit:
    @pytest.mark.parametrize(("gb", "tensor_parallel"), [(24, 1), (12, 2), (None, 1)])
    def test_a_model_that_fits_or_may(self, model, gpus_of, gb, tensor_parallel) -> None:
        gpus_of(gb)
        group = [str(i) for i in range(tensor_parallel)]
        assert EngineChoice(str(model), tensor_parallel=tensor_parallel).environments([group], 1)

    @pytest.mark.parametrize(("gb", "tensor_parallel", "dtype"), [(16, 1, "auto"), (8, 2, "auto"), (24, 1, "float32")])
    def test_one_that_does_not_is_one_line(self, model, gpus_of, gb, tensor_parallel, dtype) -> None:
        gpus_of(gb)
        group = [str(i) for i in range(tensor_parallel)]
        choice = EngineChoice(str(model), tensor_parallel=tensor_parallel, dtype=dtype)
        size = 40 if dtype == "float32" else 20
        wanted = rf"take {size} GB and GPU\(s\) {','.join(group)} have {gb * tensor_parallel} GB: use more --tensor-par"
        with pytest.raises(UsageError, match=wanted):
            choice.environments([group], 1)

    def test_weights_that_are_not_loaded_as_stored_pass(self, model, gpus_of) -> None:
        gpus_of(1)
        assert EngineChoice(str(model), vllm_args=["--load-format=dummy"]).environments([["0"]], 1)

    def test_the_same_weights_in_another_form_do_not_count(self, model) -> None:
        (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
        (model / "consolidated.safetensors").write_bytes(b"x" * 1000)
        (model / "model.safetensors.index.json").write_text(
            json.dumps(
                {"weight_map": {"a": "model-00001-of-00001.safetensors", "b": "model-00001-of-00001.safetensors"}}
            )
        )
        assert model_memory.weights_bytes(model, "auto") == 20 * GB

    @pytest.mark.parametrize(("stored", "dtype", "gb"), [("float32", "auto", 10), ("float32", "float32", 20)])
    def test_auto_loads_float32_as_16_bits(self, model, stored, dtype, gb) -> None:
        (model / "config.json").write_text(json.dumps({"dtype": stored}))
        assert model_memory.weights_bytes(model, dtype) == gb * GB


class TestHopeless:
    @pytest.mark.parametrize(
        "line",
        [
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
            "ValueError: To serve at least one request (4.00 GiB KV cache is needed), which is larger than the "
            "available KV cache memory (1.00 GiB).",
            "ValueError: Free memory on device (3/80 GiB) is less than desired GPU memory utilization (0.9).",
            "ValueError: Available memory on node 0 (21/23 GiB) on startup is less than desired CPU memory",
            "ValueError: Available memory on node 0 (21/23 GiB) on allocation is less than requested memory for kv",
        ],
    )
    def test_a_worker_that_never_had_enough_memory(self, line) -> None:
        assert why_hopeless(["loading", line, "Engine core initialization failed"]) == DOES_NOT_FIT

    def test_the_line_that_ends_a_start(self) -> None:
        assert READY.search("[2026-11-20 16:35:53,031: INFO/MainProcess] gpu0-640d77@vm ready.")
        assert not READY.search("[2026-11-20 16:35:53,031: INFO/MainProcess] Connected to redis://:**@host:6379/0")

    def test_a_model_whose_state_proofs_would_overwrite(self) -> None:
        line = (
            "ProoflineError: layers model.layers.0 .. keep a MambaSpec state, which cannot be isolated from chat; ..."
        )
        assert why_hopeless(["loading", line]) == CORRUPTS_CHAT

    def test_another_cause_may_pass(self) -> None:
        assert why_hopeless(["ConnectionError: Redis is away"]) is None


def test_a_cause_far_above_the_end_of_a_log_is_shown_with_it() -> None:
    cause = "worker pid=7: ValueError: no memory left"
    log = ["started", cause, *[f"line {i}" for i in range(100)], "RuntimeError: see above"]
    assert telling_lines(log) == [cause, "...", *log[-fleet.ERROR_TAIL_LINES :]]
    assert telling_lines(log[-5:]) == log[-5:]
