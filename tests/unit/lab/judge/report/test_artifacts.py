"""Reports on artifacts: what is read, compared, recommended and refused."""

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.commands import run_here
from tests.harness.documents import ROOT, blocks
from tests.harness.reports import GOLDEN, MADE, Capture, Page, Reports, generated, verdict

pytest.importorskip("matplotlib")

pytestmark = pytest.mark.xdist_group("pictures")  # one process loads what draws them

HONEST = [
    str(MADE / f"{name}.json")
    for name in ("transformers-float32", "transformers-bfloat16", "vllm-bfloat16")
]
CHEATS = ["--tampered", str(MADE / "int8.json"), "--tampered", str(MADE / "int4.json")]
PICTURES = ["distances.png", "machines.png", "power.png"]


def examples(document: str, section: str) -> list[str]:
    """Its shell blocks."""
    return [
        block.text
        for block in blocks(ROOT / document)
        if (block.section, block.kind) == (section, "sh")
    ]


@pytest.mark.slow
def test_a_report_is_the_documents_three_pictures_and_a_page_that_needs_nothing_else(
    tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.image import imread

    document = (ROOT / "docs/report.md").read_text()
    (block,) = examples("docs/report.md", "Make files and compare them")
    monkeypatch.chdir(ROOT)
    words = shlex.split(block.replace("\\\n", " "))
    assert words[:2] == ["proofline", "report"]
    assert run_here("report", *words[2:], "--output", str(tmp_path / "out")) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [*PICTURES, "report.html"]
    for name in PICTURES:
        pixels = imread(tmp_path / "out" / name)
        assert min(pixels.shape[:2]) >= 400
        assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 20
    page = Page(tmp_path / "out" / "report.html")
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 3
    assert all(
        image["alt"] and str(image["src"]).startswith("data:image/png;base64,") for image in images
    )
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "a"}
    assert ("html", {"lang": "en"}) in page.tags
    stdout, stderr = capfd.readouterr()
    assert f"{tmp_path}/out/report.html shows the pictures." in stderr
    assert "Set dist_threshold 0.02" in page.text
    stdout = " ".join(stdout.split())
    assert "Set dist_threshold 0.02" in stdout
    for line in re.findall(r"^    ((?:Set|An honest) .*)$", document, flags=re.MULTILINE):
        assert line in stdout
    # docs/pictures/report-distances.png; another matplotlib may set its letters elsewhere.
    shown, drawn = (
        imread(ROOT / "docs/pictures/report-distances.png"),
        imread(tmp_path / "out/distances.png"),
    )
    assert shown.shape == drawn.shape
    assert np.mean(np.abs(shown - drawn)) < 0.03


def test_the_names_of_files_are_printed_as_they_are(reports: Reports) -> None:
    names = ("h200[fp8]", "h200[bf16]", ":car:")
    files = [reports.write(f"{name}.json", generated(offset=len(name) / 100)) for name in names]
    printed = reports.printed(*files)
    assert "h200[fp8], h200[bf16]" in printed
    assert "h200[fp8], :car:" in printed


def test_what_is_recommended_tells_honest_machines_from_an_eight_bit_model(
    reports: Reports,
) -> None:
    found = reports.numbers(*HONEST, *CHEATS)
    rule = found["recommended"]
    assert rule["kept"] is True
    assert rule["false_alarm"] <= rule["false_alarm_at_worst"] < rule["fraud_threshold"] == 0.01
    assert rule["miss"] <= rule["miss_at_worst"] <= 0.01
    assert rule["miss"] > 0
    assert found["usual"]["dist_threshold"] == 0.4
    assert found["usual"]["false_alarm"] < 0.05
    assert {(one["name"], one["honest"]) for one in found["comparisons"]} == {
        ("transformers-float32, transformers-bfloat16", True),
        ("transformers-float32, vllm-bfloat16", True),
        ("transformers-bfloat16, vllm-bfloat16", True),
        *((f"{Path(path).stem}, {cheat}", False) for path in HONEST for cheat in ("int8", "int4")),
    }
    assert {one["n"] for one in found["comparisons"]} == {200}


def test_the_golden_files_are_read_as_they_are(reports: Reports) -> None:
    files = [
        str(GOLDEN / f"{name}.json")
        for name in (
            "h200-tiny-qwen3-bfloat16",
            "cpu-tiny-qwen3-bfloat16",
            "cpu-tiny-qwen3-float32",
        )
    ]
    found = reports.numbers(*files, "--tampered", str(GOLDEN / "cpu-tiny-llama-float32.json"))
    assert {one["n"] for one in found["comparisons"]} == {32}
    far = next(
        one
        for one in found["comparisons"]
        if one["name"] == "h200-tiny-qwen3-bfloat16, cpu-tiny-qwen3-float32"
    )
    # docs/proofs.md: 0.011 to 0.013, 0.030 at most.
    assert far["mean"] == pytest.approx(0.0114, abs=0.0002)
    assert 0.02 < found["recommended"]["dist_threshold"] <= 0.03
    assert found["recommended"]["kept"]


def test_files_of_generate_compute_and_callbacks_go_together(reports: Reports) -> None:
    answer = generated()
    of_compute = generated(offset=0.01) | {"status": None}
    payload = generated(offset=0.02)
    payload |= {"block_hash": "0xabc", "public_key": "key", "node_id": 0, "payload_id": "r-0"}
    del payload["request"]
    bare = generated(offset=0.03)["artifacts"]
    files = [
        reports.write(f"{i}.json", document)
        for i, document in enumerate([answer, of_compute, payload, bare])
    ]
    found = reports.numbers(*files)
    means = {one["name"]: one["mean"] for one in found["comparisons"] if one["honest"]}
    assert len(means) == 6
    assert means["0, 1"] == pytest.approx(0.01, rel=0.2)
    assert means["0, 3"] == pytest.approx(0.03, rel=0.2)


def test_without_tampered_files_the_cheat_makes_vectors_up(reports: Reports) -> None:
    files = [reports.write("a.json", generated()), reports.write("b.json", generated(offset=0.01))]
    found = reports.numbers(*files)
    (invented,) = [one for one in found["comparisons"] if not one["honest"]]
    assert invented["mean"] == pytest.approx(np.sqrt(2), rel=0.15)
    assert any("invented" in note for note in found["notes"])


def test_equal_artifacts_are_told_to_say_little(reports: Reports) -> None:
    found = reports.numbers(
        reports.write("a.json", generated()), reports.write("b.json", generated())
    )
    assert found["recommended"]["dist_threshold"] == 0
    assert any("All honest artifacts are equal" in note for note in found["notes"])


def test_files_of_the_same_name_are_told_apart(reports: Reports) -> None:
    files = [
        reports.write("one/proof.json", generated()),
        reports.write("two/proof.json", generated(offset=0.01)),
    ]
    found = reports.numbers(*files)
    assert found["comparisons"][0]["name"] == f"{files[0]}, {files[1]}"


def test_a_cheat_may_have_computed_with_another_seq_len(reports: Reports) -> None:
    files = [reports.write("a.json", generated()), reports.write("b.json", generated(offset=0.01))]
    short = reports.write("short.json", generated(seed=2, params={"seq_len": 8}))
    assert reports.numbers(*files, "--tampered", short)["recommended"]["kept"]
    assert "seq_len is 64 in one, 8 in the other" in reports.error(*files, short)


def test_a_number_of_nonces_too_small_is_said_so(reports: Reports) -> None:
    few = ["--sample-size", "3", "--tampered-share", "0.1"]
    stdout = reports.printed(*HONEST, *CHEATS, *few)
    assert "check 3 nonces. With 3 nonces, " in stdout
    assert "The rule does not keep misses below 1 %" in stdout
    assert "A cheat that tampers with 10 % of its nonces" in stdout


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            generated(block_hash="0xdef"),
            "do not belong together: block_hash is '0xabc' in one, '0xdef' in the other",
        ),
        (generated(public_key="other"), "public_key is 'key' in one, 'other' in the other"),
        (generated(k_dim=8), "k_dim is 12 in one, 8 in the other"),
        (generated(poc_stronger_rng=True), "poc_stronger_rng is False in one, True in the other"),
        (generated(n=7), "have in common 7 nonces; a report takes 20 or more"),
        (generated()["artifacts"] * 2, "holds a nonce twice"),
        ([], "holds no nonce"),
        ({"nonces": [1], "dist": [1.4]}, "judged by r_target; see `proofline calibrate`"),
        (verdict([0.0] * 30), "holds margins of chains"),
        (
            {"artifacts": [{"nonce": 0, "vector_b64": "", "k_points_steps": [1, 2, 3]}]},
            "holds chains of points",
        ),
        ({"status": "failed", "error": "no"}, "holds no artifacts"),
        ([1, 2], "holds no artifacts"),
        (7, "holds no artifacts"),
        ({"artifact": []}, "holds no artifacts"),
        ({"per_nonce": [{"nonce": 1}]}, "holds no artifacts"),
        ({"per_nonce": [{"nonce": 1, "mismatch_margin_max": float("nan")}]}, "holds no artifacts"),
        ({"per_nonce": [{"nonce": 1, "mismatch_margin_max": -0.1}] * 20}, "holds no artifacts"),
        ({"per_nonce": [{"nonce": 1, "mismatch_margin_max": True}] * 20}, "holds no artifacts"),
        (
            {"per_nonce": [{"nonce": 1, "mismatch_margin_max": 0.1, "n_steps": 0}] * 20},
            "holds no artifacts",
        ),
        ({"artifacts": [{"nonce": 1, "k_points_steps": [1, math.inf]}]}, "holds no artifacts"),
        (
            [{"nonce": 0.5, "vector_b64": "AAAAAAAA"}, *generated()["artifacts"][1:]],
            "holds no artifacts",
        ),
        ([{"nonce": "one", "k_points_steps": [1, 2, 3]}], "holds no artifacts"),
        ([{"nonce": "one", "vector_b64": "AAAAAAAA"}], "holds no artifacts"),
        ([{"nonce": 2**64, "vector_b64": "AAAAAAAA"}], "holds no artifacts"),
        ("{", "is not JSON"),
        (
            generated()
            | {"artifacts": [{"nonce": 4, "vector_b64": "AAAA"}], "encoding": {"k_dim": 12}},
            "nonce 4: vector_b64 holds 3 bytes",
        ),
    ],
)
def test_files_that_do_not_belong_together_are_refused(
    reports: Reports, changed: Any, said: str
) -> None:
    assert said in reports.error(
        reports.write("a.json", generated()), reports.write("b.json", changed)
    )


@pytest.mark.parametrize("field", ["block_hash", "k_dim"])
def test_a_cheats_file_must_be_of_the_same_proof_too(reports: Reports, field: str) -> None:
    other = generated(block_hash="0xdef") if field == "block_hash" else generated(k_dim=8)
    files = [reports.write("a.json", generated()), reports.write("b.json", generated(offset=0.01))]
    assert f"{field} is" in reports.error(*files, "--tampered", reports.write("c.json", other))


def test_one_file_cannot_be_compared(reports: Reports, tmp_path: Path) -> None:
    one = reports.write("a.json", generated())
    assert "Give at least two files of honest machines" in reports.error(one)
    assert "given twice" in reports.error(one, one)
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    assert "Cannot read" in reports.error(one, str(loop))
    assert "Cannot read" in reports.error(one, str(tmp_path / "none.json"))


def test_a_file_that_does_not_say_for_which_of_several_proofs_it_is_is_refused(
    reports: Reports,
) -> None:
    golden = json.loads((GOLDEN / "cpu-tiny-qwen3-float32.json").read_text())
    bare = reports.write("bare.json", golden["artifact"][0]["artifacts"])
    whole = reports.write("golden.json", golden)
    assert "does not say for which block hash" in reports.error(bare, whole)


def test_a_folder_that_cannot_be_written_is_named(reports: Reports, capfd: Capture) -> None:
    (reports.out).write_text("a file")
    assert reports.run(*HONEST) == 2
    assert "choose another --output" in capfd.readouterr().err


@pytest.mark.usefixtures("without_matplotlib")
def test_without_matplotlib_the_error_says_how_to_install_it(
    reports: Reports, capfd: Capture
) -> None:
    assert reports.run(*HONEST) == 1
    assert "report needs matplotlib" in capfd.readouterr().err
