"""`bench` with the synthetic engine, which sleeps as told, and a made-up profile."""

import importlib.util
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from lab.measure.dimensions import NAMES
from lab.measure.network_models import NETWORK_MODELS, network_model
from poc_core.records import ProofSpec
from tests.harness.commands import run_here
from workers.engines.base import Kernel, RankProfile
from workers.engines.options import EngineOptions
from workers.engines.synthetic import SyntheticEngine

Capture = pytest.CaptureFixture[str]
QUICK = ["--seconds", "0", "--seq-len", "64"]


class ProfiledEngine(SyntheticEngine):
    def __init__(self) -> None:
        super().__init__(EngineOptions(model="tiny-qwen3", engine="synthetic", synthetic_step_ms=1))
        self.options: EngineOptions | None = None
        self.config: dict[str, Any] = {}
        self.closed = False
        self.blind = False

    def profile(self, spec: ProofSpec, nonces: Sequence[int]) -> list[RankProfile]:
        print("noise")
        assert self.options is not None
        self.config = json.loads(Path(self.options.model, "config.json").read_text())
        kernels = [Kernel("", "gemm", 0.006), Kernel("inputs", "mul", 0.002)]
        if self.blind:
            return []
        return [RankProfile("H200", 0, 0.01, 0.008, 6e9 * len(nonces), 6e14, kernels)]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine(stand_in: Callable[[Any], None]) -> ProfiledEngine:
    profiled = ProfiledEngine()
    stand_in(profiled)
    return profiled


def run(*arguments: str) -> int:
    return run_here("bench", *QUICK, *arguments)


def result(capfd: Capture, *arguments: str) -> dict[str, Any]:
    assert run(*arguments, "--json") == 0
    stdout, _ = capfd.readouterr()
    assert stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(stdout)
    return found


def test_the_json_holds_all_that_was_measured_and_what_to_set(
    engine: ProfiledEngine, capfd: Capture
) -> None:
    asked = "--model tiny-qwen3 --seq-len 128 --batch-size 8 --batch-size 999"
    found = result(capfd, *asked.split())
    assert (found["model"], found["engine"]) == ("tiny-qwen3", "vllm")
    assert found["dummy_weights"] is False
    assert (found["tensor_parallel"], found["pipeline_parallel"]) == (1, 1)
    assert [one["seq_len"] for one in found["seq_lens"]] == [64, 128]
    one = found["seq_lens"][0]
    assert [size["whole"]["n"] for size in one["sizes"]] == [8, 32]  # 32 is what fits
    assert all(
        0 < size[kind]["nonces_per_s"] <= 32_000
        for size in one["sizes"]
        for kind in ("whole", "sliced")
    )
    assert [trade["max_step_ms"] for trade in one["trades"]] == [25, 50, 100]
    assert one["parts"]["ms"]["matrix products, attention"] == pytest.approx(6)
    assert sum(one["parts"]["ms"].values()) == pytest.approx(10)
    assert one["parts"]["peak_tflops"] == pytest.approx(600)
    assert one["share_of_peak"] == pytest.approx(
        max(size["whole"]["nonces_per_s"] for size in one["sizes"]) * 6e9 / 6e14
    )
    assert found["advice"]["max_batch_tokens"] in {8 * 64, 32 * 64, 8 * 128, 32 * 128}
    assert found["advice"]["max_step_ms"] in {25, 50, 100}
    assert len(found["advice"]["reasons"]) == 3
    assert engine.closed


def test_people_get_tables_and_at_their_end_what_to_set(
    engine: ProfiledEngine, capfd: Capture
) -> None:
    assert run("--model", "tiny-qwen3", "--max-step-ms", "30") == 0
    stdout, stderr = capfd.readouterr()
    assert "noise" not in stdout
    assert "noise" in stderr
    assert stdout.startswith(
        "Proofs of tiny-qwen3 (vllm, synthetic), tensor parallel 1, pipeline parallel 1, on H200"
    )
    rows = [line.split() for line in stdout.splitlines()]
    sizes = [" ".join(row[:2]) for row in rows if row and row[0] in ("2", "8", "16", "32")]
    assert sizes == ["2 128", "8 512", "16 1,024", "32 2,048"]
    assert ["matrix", "products,", "attention", "6.0", "ms", "60.0", "%"] in rows
    assert ["gaps", "2.0", "ms", "20.0", "%"] in rows
    told = [stdout.index(part) for part in ("Set:", "--max-batch-tokens ", "POC_MAX_STEP_MS=30")]
    assert told == sorted(told)


def test_who_has_no_terminal_is_told_how_far_it_is(engine: ProfiledEngine, capfd: Capture) -> None:
    assert run("--model", "tiny-qwen3") == 0
    stderr = capfd.readouterr().err
    assert "Computing on tiny-qwen3, synthetic: 0 of 17 measurements in 0 s\n" in stderr
    assert "Computing on tiny-qwen3, synthetic: 17 of 17 measurements in " in stderr


def test_what_was_measured_is_printed_before_the_engine_ends(
    engine: ProfiledEngine, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    def close() -> None:
        raise TimeoutError

    monkeypatch.setattr(engine, "close", close)
    with pytest.raises(TimeoutError):
        run("--model", "tiny-qwen3", "--json")
    assert json.loads(capfd.readouterr().out)["model"] == "tiny-qwen3"


def test_an_engine_that_cannot_tell_where_time_goes_still_has_speeds(
    engine: ProfiledEngine, capfd: Capture
) -> None:
    engine.blind = True
    assert run("--model", "tiny-qwen3", "--engine", "transformers") == 0
    stdout, stderr = capfd.readouterr()
    assert "Time by part" not in stdout
    assert "Set:" in stdout
    assert "cannot tell where the time goes" in stderr


def test_options_reach_the_engine(engine: ProfiledEngine, capfd: Capture) -> None:
    divided = "--tensor-parallel 2 --pipeline-parallel 3 --max-batch-tokens 99 --dtype bfloat16"
    found = result(capfd, "--model", "tiny-qwen3", *divided.split(), "--batch-size", "1")
    chosen = engine.options
    assert chosen is not None
    assert (chosen.dtype, chosen.tensor_parallel, chosen.pipeline_parallel) == ("bfloat16", 2, 3)
    assert chosen.max_batch_tokens == 99
    assert (found["tensor_parallel"], found["pipeline_parallel"]) == (2, 3)


@pytest.mark.parametrize(("given", "kept"), [(None, "skip"), ("full", "full")])
def test_deepgemm_compiles_nothing_ahead_unless_one_asks_for_it(
    engine: ProfiledEngine, monkeypatch: pytest.MonkeyPatch, given: str | None, kept: str
) -> None:
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP", given or "")
    if given is None:
        monkeypatch.delenv("VLLM_DEEP_GEMM_WARMUP")
    assert run("--model", "tiny-qwen3") == 0
    assert os.environ["VLLM_DEEP_GEMM_WARMUP"] == kept


def test_dimensions_are_a_model_without_weights_that_is_gone_afterwards(
    engine: ProfiledEngine, capfd: Capture
) -> None:
    asked = "--dimensions qwen3-8b --batch-size 1 -- --enforce-eager"
    assert run(*asked.split()) == 0
    assert "Proofs of qwen3-8b (vllm, synthetic, dummy weights)" in capfd.readouterr().out
    assert engine.options is not None
    assert (engine.config["hidden_size"], engine.config["num_hidden_layers"]) == (4096, 36)
    assert engine.options.vllm_args == ("--enforce-eager", "--load-format=dummy")
    assert not Path(engine.options.model).exists()


@pytest.mark.parametrize("name", NAMES)
def test_all_dimensions_are_those_of_a_model(
    engine: ProfiledEngine, capfd: Capture, name: str
) -> None:
    assert result(capfd, "--dimensions", name, "--batch-size", "1")["dummy_weights"] is True
    assert engine.options is not None
    assert engine.options.name == name


def test_of_a_networks_model_few_layers_tell_what_eight_gpus_would_earn(
    engine: ProfiledEngine, capfd: Capture
) -> None:
    asked = ("--dimensions", "minimax-m2.7", "--layers", "16", "--seq-len", "1024")
    found = result(capfd, *asked, "--tensor-parallel", "2")
    assert engine.config["num_hidden_layers"] == 16
    best = max(size["whole"]["nonces_per_s"] for size in found["seq_lens"][1]["sizes"])
    # The engine has one layer of 62; of its 10 ms inputs take 2, whatever the layers are.
    per_gpu = 60 * best / (0.2 + 0.8 * 62) / 2
    assert found["network"] == {
        "model": "minimax-m2.7",
        "layers": 1,
        "of_layers": 62,
        "per_gpu": pytest.approx(per_gpu),
        "gpu": "H200",
        "published": 6912,
        "per_host": pytest.approx(8 * per_gpu),
    }
    assert run(*asked) == 0
    lines = " ".join(capfd.readouterr().out.split())
    assert "(computed with 1 of 62 layers, scaled as if all were alike)" in lines
    assert "Operators publish 6,912 of 8 H200 (2026-09-23): " in lines


def test_a_model_without_a_published_rate_says_so(engine: ProfiledEngine, capfd: Capture) -> None:
    assert run("--dimensions", "kimi-k2.6", "--seq-len", "1024") == 0
    assert "Operators publish no rate for this model" in capfd.readouterr().out


def test_a_repository_is_known_by_its_name() -> None:
    assert network_model("MiniMaxAI/MiniMax-M2.7") is NETWORK_MODELS["minimax-m2.7"]
    named = "/models/deepseek-ai/DeepSeek-V4-Flash-0731"
    assert network_model(named) is NETWORK_MODELS["deepseek-v4-flash"]
    assert network_model("tiny-qwen3") is None


@pytest.mark.parametrize("there", [True, False])
def test_a_networks_model_is_served_as_the_network_serves_it_where_the_host_can(
    engine: ProfiledEngine, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: there or None if name == "flashinfer" else find(name, *rest),
    )
    assert run("--dimensions", "minimax-m2.7", "--", "--kv-cache-dtype=auto") == 0
    assert engine.options is not None
    args = [*engine.options.vllm_args]
    assert ("--attention-backend=FLASHINFER" in args) is there
    assert args.index("--kv-cache-dtype=fp8") < args.index("--kv-cache-dtype=auto")  # which counts


@pytest.mark.parametrize("name", NETWORK_MODELS)
def test_a_networks_model_can_end_early(engine: ProfiledEngine, name: str) -> None:
    assert run("--dimensions", name, "--layers", "5") == 0
    config = engine.config.get("text_config", engine.config)
    assert config["num_hidden_layers"] == 5
    by_layer = ("layer_types", "indexer_types", "mlp_layer_types", "compress_ratios")
    assert {len(config[key]) for key in by_layer if key in config} <= {5}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--model", "tiny-qwen3", "--layers", "2"], "--layers needs --dimensions"),
        (["--dimensions", "qwen3-8b", "--layers", "37"], "These dimensions have 36 layers"),
    ],
)
def test_layers_that_are_not_there_are_refused(
    engine: ProfiledEngine, capfd: Capture, asked: list[str], said: str
) -> None:
    assert run(*asked) == 2
    assert said in capfd.readouterr().err


def test_earlier_results_are_compared(
    engine: ProfiledEngine, capfd: Capture, tmp_path: Path
) -> None:
    earlier = tmp_path / "tensor.json"
    earlier.write_text(json.dumps(result(capfd, "--model", "tiny-qwen3", "--tensor-parallel", "2")))
    pipelined = ("--model", "tiny-qwen3", "--pipeline-parallel", "2")
    found = result(capfd, *pipelined, "--compare", str(earlier))
    assert "tensor parallel 2, pipeline parallel 1: " in found["advice"]["reasons"][0]
    assert found["advice"]["tensor_parallel"] + found["advice"]["pipeline_parallel"] == 3


@pytest.mark.xdist_group("pictures")
@pytest.mark.parametrize(("name", "begins"), [("t.png", b"\x89PNG"), ("T.SVG", b"<?xml")])
def test_the_picture_is_of_the_kind_its_name_says(
    engine: ProfiledEngine, capfd: Capture, tmp_path: Path, name: str, begins: bytes
) -> None:
    pytest.importorskip("matplotlib")
    assert run("--model", "tiny-qwen3", "--picture", str(tmp_path / name)) == 0
    assert (tmp_path / name).read_bytes().startswith(begins)


@pytest.mark.usefixtures("without_matplotlib")
def test_without_matplotlib_the_error_says_how_to_install_it_before_anything_is_loaded(
    engine: ProfiledEngine, capfd: Capture, tmp_path: Path
) -> None:
    assert run("--model", "tiny-qwen3", "--picture", str(tmp_path / "t.png")) == 1
    assert "--picture needs matplotlib" in capfd.readouterr().err
    assert engine.options is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of --model and --dimensions"),
        (["--model", "tiny-qwen3", "--dimensions", "qwen3-8b"], "one of --model and --dimensions"),
        (["--dimensions", "qwen3-9b"], "there are: qwen3-0.6b"),
        (["--dimensions", "qwen3-8b", "--engine", "transformers"], "needs --engine vllm"),
        (["--model", "tiny-qwen3", "--engine", "synthetic"], "not one of"),
        (["--model", "tiny-qwen3", "--picture", "time.pdf"], ".png or .svg"),
        (["--model", "tiny-qwen3", "--picture", "/nonexistent/t.png"], "another --picture"),
        (["--model", "tiny-qwen3", "--compare", "/nonexistent/t.json"], "Cannot read"),
        (["--model", "tiny-qwen3", "--compare", __file__], "holds no result"),
        (["--model", "tiny-qwen3", "--max-step-ms", "0"], "greater than or equal to 1"),
        (["--model", "./none"], "no directory"),
        (["--model", "tiny-qwen3", "words"], "after --"),
    ],
)
def test_wrong_options_are_usage_errors_before_anything_is_loaded(
    engine: ProfiledEngine, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    answer = CliRunner().invoke(app, ["bench", *arguments])
    assert answer.exit_code == 2
    assert message in answer.output
    assert engine.options is None


def test_a_result_of_another_model_is_not_compared(
    engine: ProfiledEngine, capfd: Capture, tmp_path: Path
) -> None:
    earlier = tmp_path / "other.json"
    earlier.write_text(json.dumps(result(capfd, "--model", "tiny-llama")))
    assert run("--model", "tiny-qwen3", "--compare", str(earlier)) == 2
    assert "is about tiny-llama, not tiny-qwen3" in capfd.readouterr().err


@pytest.mark.parametrize(
    "changed",
    [
        {"tensor_parallel": 0},
        {"pipeline_parallel": math.inf},
        {"seq_lens": [{"seq_len": 64, "sizes": [{"whole": {"nonces_per_s": math.nan}}]}]},
        {"model": None},
    ],
)
def test_a_result_with_impossible_numbers_is_not_compared(
    engine: ProfiledEngine, capfd: Capture, tmp_path: Path, changed: dict[str, Any]
) -> None:
    found = result(capfd, "--model", "tiny-qwen3") | changed
    earlier = tmp_path / "odd.json"
    earlier.write_text(json.dumps({name: one for name, one in found.items() if one is not None}))
    assert run("--model", "tiny-qwen3", "--compare", str(earlier)) == 2
    assert "holds no result of `proofline bench --json`" in capfd.readouterr().err


def test_a_seq_len_beyond_the_models_is_refused(engine: ProfiledEngine, capfd: Capture) -> None:
    assert run("--model", "tiny-qwen3", "--seq-len", str(1 << 21)) == 2
    assert "seq_len must be from 1 to" in capfd.readouterr().err
