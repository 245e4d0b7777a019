"""The text of the metrics, also where it would be more than the network's reader takes."""

import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.node_metrics import exposition
from api.node_metrics.buckets import thinned
from api.node_metrics.engine_samples import samples_of, shown_name
from api.node_metrics.exposition import Sample, Samples, labels, number, text
from tests.vllm_metrics import metrics_text

GPUS = "mlnode_gpu_pcie_replays_total"


def test_labels_are_escaped_as_the_format_wants_it() -> None:
    told = text({GPUS: [Sample(GPUS, labels(gpu_model='a "b"\\\n'), "1")]})
    (family,) = text_string_to_metric_families(told)
    assert family.samples[0].labels == {"gpu_model": 'a "b"\\\n'}


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (5.0, "5"),
        (0.5, "0.5"),
        (1700000000.25, "1700000000.25"),
        (2.0**60, "1.152921504606847e+18"),
    ],
)
def test_numbers_are_as_short_as_they_can_be(value: float, written: str) -> None:
    assert number(value) == written


def test_families_at_the_end_are_left_out_and_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exposition, "MOST_SERIES", 3)
    first = "mlnode_memory_used_bytes"
    with caplog.at_level(logging.WARNING):
        told = text(
            {
                GPUS: [Sample(GPUS, f'gpu_index="{i}"', "1") for i in range(3)],
                first: [Sample(first, "", "1")],
            }
        )
    assert first in told
    assert GPUS not in told
    assert GPUS in caplog.text


def test_no_answer_is_larger_than_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "MOST_BYTES", 200)
    first = "mlnode_memory_used_bytes"
    told = text({GPUS: [Sample(GPUS, f'x="{"y" * 200}"', "1")], first: [Sample(first, "", "1")]})
    assert len(told.encode()) <= 200
    assert first in told


@pytest.fixture
def engine() -> Samples:
    return samples_of(metrics_text())


def test_histograms_are_whole_as_long_as_they_fit(engine: Samples) -> None:
    assert thinned([engine], 5000) == [engine]


@pytest.mark.parametrize("most", [100, 60, 10])
def test_histograms_lose_bounds_evenly_and_never_the_last_the_sum_or_the_count(
    engine: Samples, most: int
) -> None:
    (few,) = thinned([engine], most)
    for family, samples in few.items():
        whole = engine[family]
        assert [one for one in samples if not one.name.endswith("_bucket")] == [
            one for one in whole if not one.name.endswith("_bucket")
        ]
        bounds = [one for one in samples if one.name.endswith("_bucket")]
        assert set(bounds) <= set(whole)
        if bounds:
            assert 'le="+Inf"' in bounds[-1].labels
            assert len(bounds) < sum(one.name.endswith("_bucket") for one in whole)
    n_series = sum(map(len, few.values()))
    assert n_series <= most or all(
        'le="+Inf"' in one.labels for found in few.values() for one in found if "_b" in one.name
    )


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("org/name-1.5", "org/name-1.5"),
        ("tiny-qwen3", "tiny-qwen3"),
        ("/data/models/secret", "secret"),
        ("./here", "here"),
        ("~/models/x", "x"),
        ("a/b/c", "c"),
        ("http://10.0.0.1:80/x", "x"),
    ],
)
def test_a_model_is_shown_by_its_served_name_and_never_by_a_path(model: str, shown: str) -> None:
    assert shown_name(model) == shown
