"""Reports on chains: margins, parting machines, mismatch rates."""

import json
from typing import Any

import pytest

from tests.harness.reports import GOLDEN, Capture, Page, Reports, generated, verdict

pytest.importorskip("matplotlib")

pytestmark = pytest.mark.xdist_group("pictures")  # one process loads what draws them


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
