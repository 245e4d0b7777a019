"""`report` on files as the commands and the API write them, and on the golden ones."""

import json
import re
import shlex
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poc_core.schemes.artifact.encoding import encode_vectors
from tests.harness.commands import run_here
from tests.harness.documents import blocks

pytest.importorskip("matplotlib")

pytestmark = pytest.mark.xdist_group("pictures")  # one process loads what draws them

ROOT = Path(__file__).resolve().parents[4]
GOLDEN, MADE = ROOT / "tests/data/golden", ROOT / "tests/data/report"
HONEST = [
    str(MADE / f"{name}.json")
    for name in ("transformers-float32", "transformers-bfloat16", "vllm-bfloat16")
]
CHEATS = ["--tampered", str(MADE / "int8.json"), "--tampered", str(MADE / "int4.json")]
PICTURES = ["distances.png", "machines.png", "power.png"]
Capture = pytest.CaptureFixture[str]


def generated(
    n: int = 30, seed: int = 1, k_dim: int = 12, offset: float = 0.0, **request: Any
) -> dict[str, Any]:
    """What `generate` writes. The same seed gives the same vectors, moved by about `offset`."""
    vectors = np.random.default_rng(seed).normal(size=(n, k_dim)) / np.sqrt(k_dim)
    moved = vectors + offset * np.random.default_rng(int(1e6 * offset) + 99).normal(
        size=(n, k_dim)
    ) / np.sqrt(k_dim)
    texts = encode_vectors(moved)
    params = {"model": "m", "seq_len": 64, "k_dim": k_dim} | request.pop("params", {})
    return {
        "status": "completed",
        "artifacts": [{"nonce": nonce, "vector_b64": text} for nonce, text in enumerate(texts)],
        "encoding": {"dtype": "f16", "k_dim": k_dim, "endian": "le"},
        "request": {
            "block_hash": "0xabc",
            "public_key": "key",
            "params": params,
            "poc_stronger_rng": False,
        }
        | request,
    }


def verdict(margins: Sequence[float]) -> dict[str, Any]:
    """What the API answers to a validation of chains, as far as it matters here."""
    per_nonce = [
        {
            "nonce": nonce,
            "n_sphere_mismatches": int(margin > 0),
            "n_steps": 9,
            "mismatch_margin_max": margin,
        }
        for nonce, margin in enumerate(margins)
    ]
    return {"status": "completed", "n_total": len(per_nonce), "per_nonce": per_nonce}


def examples(document: str, section: str) -> list[str]:
    """Its shell blocks."""
    return [
        block.text
        for block in blocks(ROOT / document)
        if (block.section, block.kind) == (section, "sh")
    ]


class Reports:
    """A folder with files of proofs, and `report` on some of them."""

    def __init__(self, folder: Path, capfd: Capture) -> None:
        self.folder, self.out, self._capfd = folder, folder / "out", capfd

    def write(self, name: str, document: Any) -> str:
        """Writes a document and returns its path."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return str(path)

    def run(self, *arguments: str) -> int:
        return run_here("report", *arguments, "--output", str(self.out))

    def printed(self, *arguments: str) -> str:
        # Rendering takes longer than all else, and another test looks at pictures.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "lab.judge.report_pictures.save", lambda _figure, picture, _option: picture.touch()
            )
            assert self.run(*arguments) == 0
        stdout, _ = self._capfd.readouterr()
        return stdout

    def numbers(self, *arguments: str) -> dict[str, Any]:
        stdout = self.printed(*arguments, "--json")
        assert stdout.count("\n") == 1
        found: dict[str, Any] = json.loads(stdout)
        return found

    def error(self, *arguments: str) -> str:
        existed = self.out.exists()
        assert self.run(*arguments) == 2
        _, stderr = self._capfd.readouterr()
        assert self.out.exists() == existed
        return " ".join(stderr.split())


@pytest.fixture
def reports(tmp_path: Path, capfd: Capture) -> Reports:
    return Reports(tmp_path, capfd)


class Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


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


def test_verdicts_on_chains_are_judged_by_their_margins(reports: Reports) -> None:
    honest = reports.write("h200.json", verdict([0.0] * 190 + [0.004] * 10))
    random = reports.write("random.json", verdict([0.2, 0.25] * 50))
    found = reports.numbers(honest, "--tampered", random)
    assert found["unit"] == "margin"
    assert found["recommended"]["dist_threshold"] <= 0.004
    assert found["usual"]["dist_threshold"] == 0.025
    assert sorted(path.name for path in (reports.out).iterdir()) == [
        "distances.png",
        "power.png",
        "report.html",
    ]


def test_the_references_verdicts_on_chains_are_read(reports: Reports) -> None:
    """Of its honest and its random chains, on all four machines: as many nonces as a report
    takes.
    """
    per_nonce: dict[str, list[Any]] = {"honest": [], "all_random": []}
    for file in sorted(GOLDEN.glob("decode-cpu-*.json")):
        for case in json.loads(file.read_text())["validation"]:
            per_nonce.setdefault(case["name"], []).extend(case["expect"]["per_nonce"])
    honest, random = (
        reports.write(f"{name}.json", {"per_nonce": per_nonce[name]})
        for name in ("honest", "all_random")
    )
    found = reports.numbers(honest, "--tampered", random)
    assert [one["n"] for one in found["comparisons"]] == [32, 32]
    assert found["recommended"]["kept"]
    assert found["comparisons"][1]["mean"] == pytest.approx(0.24, abs=0.02)


def test_compute_with_enforced_chains_has_margins_too(reports: Reports) -> None:
    def enforced(margin: float) -> dict[str, Any]:
        points = [1 if margin else 0, margin]
        return {
            "artifacts": [
                {"nonce": i, "vector_b64": "", "k_points_steps": points} for i in range(25)
            ]
        }

    found = reports.numbers(
        reports.write("a.json", enforced(0.0)),
        "--tampered",
        reports.write("b.json", enforced(0.3)),
    )
    assert [one["mean"] for one in found["comparisons"]] == [0.0, pytest.approx(0.3)]


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


def chained(chains: dict[int, list[int]], **params: Any) -> dict[str, Any]:
    """What `generate` writes of chains."""
    artifacts = [
        {"nonce": nonce, "vector_b64": "", "k_points_steps": points}
        for nonce, points in chains.items()
    ]
    request = {
        "block_hash": "0xabc",
        "public_key": "key",
        "params": {"seq_len": 64, "decode": True, "max_tokens": 8} | params,
    }
    return {"status": "completed", "artifacts": artifacts, "request": request}


def test_chains_of_several_machines_are_told_how_often_they_part(
    reports: Reports, capfd: Capture
) -> None:
    one = {nonce: [nonce % 16] * 9 for nonce in range(25)}
    parted = one | {3: [3] * 4 + [5] * 5, 4: [4] * 8 + [0], 100: [1] * 9}
    other = one | {3: [9] * 9}
    files = [
        reports.write(f"{name}.json", chained(chains))
        for name, chains in (("h200", one), ("cpu", parted), ("h100", other))
    ]
    assert reports.run(*files, "--json") == 0
    pairs = {pair["name"]: pair for pair in json.loads(capfd.readouterr().out)["pairs"]}
    assert pairs["h200, cpu"] == {
        "name": "h200, cpu",
        "n": 25,
        "n_parted": 2,
        "mean_step": 6.0,
        "share_parted": 2 / 25,
    }
    assert (pairs["h200, h100"]["n_parted"], pairs["h200, h100"]["mean_step"]) == (1, 0.0)
    assert not (reports.out).exists()
    assert reports.run(*files) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "2 (8.0%)" in shown
    assert "proofline validate" in shown


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (chained({n: [1] * 5 for n in range(25)}, max_tokens=4), "max_tokens is 8 in one, 4"),
        (chained({n: [1] * 9 for n in range(7)}), "have in common 7 nonces"),
        (generated(), "holds chains of points"),
    ],
)
def test_chains_that_do_not_belong_together_are_refused(
    reports: Reports, other: Any, said: str
) -> None:
    mine = reports.write("mine.json", chained({n: [1] * 9 for n in range(25)}))
    assert said in reports.error(mine, reports.write("other.json", other))


def test_a_cheats_chains_need_a_validation_of_them(reports: Reports) -> None:
    files = [reports.write(f"{i}.json", chained({n: [1] * 9 for n in range(25)})) for i in range(3)]
    said = reports.error(*files[:2], "--tampered", files[2])
    assert "the answer to a validation of its chains" in said


def test_mismatch_rates_are_told_at_the_thresholds_named_for_chains(reports: Reports) -> None:
    """Of another release, say, and of larger batches, each judged by this machine."""
    release = reports.write(
        "release.json", verdict([0.0] * 90 + [0.026] * 5 + [0.035] * 3 + [0.045] * 2)
    )
    batches = reports.write("batches.json", verdict([0.0] * 99 + [0.03]))
    found = reports.numbers(release, batches)
    rates = {one["name"]: one for one in found["mismatch_rates"]}
    limits = ("0.025", "0.03", "0.04", "0.05")
    assert [rates["release"][limit] for limit in limits] == [0.1, 0.05, 0.02, 0.0]
    # Only what lies beyond a threshold mismatches.
    assert [rates["batches"][limit] for limit in limits] == [0.01, 0.0, 0.0, 0.0]
    assert rates["invented"]["kind"] == "tampered"
    assert rates["invented"]["0.05"] == 1.0
    assert any("invented" in note for note in found["notes"])
    page = Page(reports.out / "report.html")
    assert "Mismatches by dist_threshold" in page.text


def test_chains_that_are_made_up_lie_as_far_off_as_is_known() -> None:
    """0.11 on average of one claim; 0.32 of the largest of 257."""
    from lab.judge.comparisons import invented_margins

    assert invented_margins(2000, 1).mean() == pytest.approx(0.11, abs=0.01)
    assert invented_margins(200, 257).mean() == pytest.approx(0.32, abs=0.02)


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
