"""The text of the metrics, also where it would be more than the network's reader takes."""

import logging
from collections.abc import Sequence

import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.node_metrics import exposition
from api.node_metrics.engine_samples import Series, Shape, samples_of, shown_name, thinned
from api.node_metrics.exposition import labels, line, number, text
from tests.vllm_metrics import metrics_text

GPUS = "mlnode_gpu_pcie_replay_total"


def test_labels_are_escaped_as_the_format_wants_it() -> None:
    told = text({GPUS: [line(GPUS, labels(gpu_model='a "b"\\\n'), "1")]})
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
    first = "mlnode_host_memory_used_bytes"
    with caplog.at_level(logging.WARNING):
        told = text(
            {
                GPUS: [line(GPUS, f'gpu_index="{i}"', "1") for i in range(3)],
                first: [line(first, "", "1")],
            }
        )
    assert first in told
    assert GPUS not in told
    assert GPUS in caplog.text


def test_no_answer_is_larger_than_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "MOST_BYTES", 200)
    first = "mlnode_host_memory_used_bytes"
    told = text({GPUS: [line(GPUS, f'x="{"y" * 200}"', "1")], first: [line(first, "", "1")]})
    assert len(told.encode()) <= 200
    assert first in told


@pytest.fixture
def engine() -> Shape:
    return samples_of(metrics_text()).shape


def test_histograms_are_whole_as_long_as_they_fit(engine: Shape) -> None:
    assert thinned([engine], 5000) == {engine: engine.series}


@pytest.mark.parametrize("most", [100, 60, 10])
def test_histograms_lose_bounds_evenly_and_never_the_last_the_sum_or_the_count(
    engine: Shape, most: int
) -> None:
    few = thinned([engine], most)[engine]
    assert [one for one in few if one.bound is None] == [
        one for one in engine.series if one.bound is None
    ]
    assert set(few) <= set(engine.series)
    for family in {one.family for one in engine.series if one.bound is not None}:
        whole, kept = bounds_of(engine.series, family), bounds_of(few, family)
        assert kept[-1] == "+Inf"
        assert len(kept) < len(whole)
    assert len(few) <= most or {one.bound for one in few} == {None, "+Inf"}


def bounds_of(series: Sequence[Series], family: str) -> list[str]:
    return [one.bound for one in series if one.family == family and one.bound is not None]


def test_engines_that_tell_the_same_series_have_one_shape(engine: Shape) -> None:
    later = metrics_text().replace(" 1.0", " 7.0")
    assert samples_of(later).shape is engine
    assert samples_of(later).values != samples_of(metrics_text()).values


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
