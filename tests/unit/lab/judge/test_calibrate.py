"""`calibrate` with the synthetic engine, whose distances are spread like true ones."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cli.main import app
from poc_core.records import ProofSpec
from tests.harness.commands import run_here
from workers.engines.options import EngineOptions
from workers.engines.synthetic import SyntheticEngine
from workers.pipeline import compute_all

Capture = pytest.CaptureFixture[str]
COMMAND = ["calibrate", "--model", "tiny-qwen3"]


class WatchedEngine(SyntheticEngine):
    def __init__(self) -> None:
        super().__init__(EngineOptions(model="tiny-qwen3", engine="synthetic", synthetic_step_ms=0))
        self.options: EngineOptions | None = None
        self.specs: list[ProofSpec] = []
        self.excluded: set[int] = set()
        self.closed = False

    def compute_batch(self, spec: ProofSpec, nonces: Sequence[int]) -> list[Any]:
        print("noise")
        if spec not in self.specs:
            self.specs.append(spec)
        values = super().compute_batch(spec, nonces)
        return [
            None if nonce in self.excluded else value
            for nonce, value in zip(nonces, values, strict=True)
        ]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine(stand_in: Callable[[Any], None]) -> WatchedEngine:
    watched = WatchedEngine()
    stand_in(watched)
    return watched


def run(*arguments: str) -> int:
    return run_here(*COMMAND, *arguments)


def result(capfd: Capture, *arguments: str) -> dict[str, Any]:
    assert run(*arguments, "--json") == 0
    stdout, _ = capfd.readouterr()
    assert stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(stdout)
    return found


def test_the_r_target_lets_the_wanted_share_of_the_distances_pass(
    engine: WatchedEngine, capfd: Capture
) -> None:
    asked = "--nonces 0-199 --block-hashes 3 --valid-rate 0.1 --valid-rate 0.5"
    found = result(capfd, *asked.split())
    assert (found["model"], found["dtype"]) == ("tiny-qwen3", "synthetic")
    assert (found["seq_len"], found["nonces"]) == (256, 200)
    flips = found["randomizations"]["sign_flips"]
    distances = np.array([compute_all(engine, spec, range(200)) for spec in engine.specs])
    assert flips["n"] == distances.size == 600
    assert flips["mean"] == pytest.approx(distances.mean())
    for target, rate in zip(flips["targets"], (0.1, 0.5), strict=True):
        assert (target["wanted_rate"], target["valid_rate"]) == (rate, pytest.approx(rate))
        assert np.mean(distances < target["r_target"]) == pytest.approx(rate)
        assert target["block_rates"] == pytest.approx(
            np.mean(distances < target["r_target"], axis=1).tolist()
        )


def test_the_share_at_a_given_r_target_is_found(engine: WatchedEngine, capfd: Capture) -> None:
    (target,) = result(capfd, "--r-target", "1.414")["randomizations"]["sign_flips"]["targets"]
    assert (target["wanted_rate"], target["r_target"]) == (None, 1.414)
    assert target["valid_rate"] == pytest.approx(0.5, abs=0.03)


def test_made_up_block_hashes_differ_and_are_the_same_every_time(
    engine: WatchedEngine, capfd: Capture
) -> None:
    first = result(capfd, "--nonces", "0-9")["block_hashes"]
    assert len(set(first)) == 8
    assert result(capfd, "--nonces", "0-9", "--block-hashes", "3")["block_hashes"] == first[:3]


def test_proofs_are_for_the_block_hashes_key_and_seq_len_given(
    engine: WatchedEngine, capfd: Capture
) -> None:
    asked = "--block-hash b1 --block-hash b2 --public-key me --seq-len 32 --randomization both"
    assert run("--nonces", "0-9", *asked.split()) == 0
    assert {(spec.scheme, spec.public_key, spec.seq_len) for spec in engine.specs} == {
        ("distance", "me", 32)
    }
    assert [(spec.block_hash, spec.options["randomization"]) for spec in engine.specs] == [
        *(("b1", "sign_flips"), ("b2", "sign_flips")),
        *(("b1", "layer_hooks"), ("b2", "layer_hooks")),
    ]


@pytest.mark.parametrize("randomization", ["sign_flips", "layer_hooks"])
def test_one_randomization_is_computed_alone(
    engine: WatchedEngine, capfd: Capture, randomization: str
) -> None:
    found = result(capfd, "--nonces", "0-9", "--randomization", randomization)
    assert list(found["randomizations"]) == [randomization]


def test_options_reach_the_engine(engine: WatchedEngine, capfd: Capture) -> None:
    options = "--dtype bfloat16 --tensor-parallel 2 --pipeline-parallel 3 --max-batch-tokens 99"
    assert run("--nonces", "0-9", *options.split(), "--", "--enforce-eager") == 0
    chosen = engine.options
    assert chosen is not None
    assert chosen.engine == "vllm"
    assert (chosen.dtype, chosen.tensor_parallel, chosen.pipeline_parallel) == ("bfloat16", 2, 3)
    assert (chosen.max_batch_tokens, chosen.vllm_args) == (99, ("--enforce-eager",))
    assert Path(chosen.model, "config.json").is_file()
    assert engine.closed


def test_people_get_tables_with_both_randomizations_side_by_side(
    engine: WatchedEngine, capfd: Capture
) -> None:
    asked = "--nonces 0-99 --block-hashes 2 --randomization both --r-target 1.414"
    assert run(*asked.split()) == 0
    stdout, stderr = capfd.readouterr()
    assert "noise" not in stdout
    assert "noise" in stderr
    assert stdout.startswith(
        "Distances of tiny-qwen3 (vllm, synthetic), seq_len 256: 100 nonces for each of 2 block"
    )
    rows = [line.split("  ") for line in stdout.splitlines()]
    (r_targets,) = [[cell.strip() for cell in row if cell] for row in rows if "r_target" in row]
    assert r_targets == ["r_target", "1.414000", "1.414000"]
    assert stdout.count("...") == 2  # a row for each block hash
    assert stdout.count(" points") == 8


def test_one_block_hash_has_no_spread_to_show(engine: WatchedEngine, capfd: Capture) -> None:
    assert run("--nonces", "0-99", "--block-hashes", "1") == 0
    stdout, _ = capfd.readouterr()
    assert "each of 1 block hash\n" in stdout
    assert "Block hashes" not in stdout
    spreads = [line for line in stdout.splitlines() if "highest - lowest" in line]
    assert [line.split()[-1] for line in spreads] == ["-", "-"]


def test_nonces_without_a_distance_are_left_out_and_counted(
    engine: WatchedEngine, capfd: Capture
) -> None:
    engine.excluded = {3, 4}
    assert run("--nonces", "0-99", "--block-hashes", "2", "--json") == 0
    stdout, stderr = capfd.readouterr()
    assert json.loads(stdout)["randomizations"]["sign_flips"]["n"] == 196
    assert "4 of the distances could not be computed" in stderr


def test_a_model_without_finite_states_is_an_error(engine: WatchedEngine, capfd: Capture) -> None:
    engine.excluded = set(range(10))
    assert run("--nonces", "0-9") == 1
    assert "output finite" in capfd.readouterr().err


@pytest.mark.xdist_group("pictures")
@pytest.mark.parametrize(("name", "begins"), [("h.png", b"\x89PNG"), ("H.SVG", b"<?xml")])
def test_the_histogram_is_a_picture_of_the_kind_its_name_says(
    engine: WatchedEngine,
    capfd: Capture,
    tmp_path: Path,
    name: str,
    begins: bytes,
) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["--nonces", "0-99", "--randomization", "both", "--r-target", "1.41", "--histogram"]
    assert run(*arguments, str(tmp_path / name)) == 0
    assert (tmp_path / name).read_bytes().startswith(begins)
    assert "r_target" in capfd.readouterr().out


@pytest.mark.usefixtures("without_matplotlib")
def test_without_matplotlib_the_error_says_how_to_install_it_before_anything_is_computed(
    engine: WatchedEngine, capfd: Capture, tmp_path: Path
) -> None:
    assert run("--histogram", str(tmp_path / "h.png")) == 1
    assert "pip install 'proofline[calibrate]'" in capfd.readouterr().err
    assert engine.options is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--valid-rate", "0"], "above 0 and below 1"),
        (["--valid-rate", "10"], "10 % are 0.1"),
        (["--valid-rate", "nan"], "above 0 and below 1"),
        (["--nonces", "0-4"], "take 10 or more"),
        (["--nonces", "5-1"], "runs backwards"),
        (["--r-target", "2.1"], "at most 2"),
        (["--r-target", "0"], "above 0"),
        (["--block-hash", "b", "--block-hashes", "2"], "one of the two"),
        (["--block-hash", "b", "--block-hash", "b"], "given twice"),
        (["--block-hash", ""], "must not be empty"),
        (["--public-key", ""], "must not be empty"),
        (["--histogram", "distances.pdf"], ".png or .svg"),
        (["--histogram", "/nonexistent/h.png"], "another --histogram"),
        (["--model", "./none"], "no directory"),
        (["--engine", "synthetic"], "not one of"),
        (["--block-hashes", "0"], "greater than or equal to 1"),
    ],
)
def test_wrong_options_are_usage_errors_before_anything_is_loaded(
    engine: WatchedEngine, arguments: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    answer = CliRunner().invoke(app, [*COMMAND, *arguments])
    assert answer.exit_code == 2
    assert message in answer.output
    assert engine.options is None
