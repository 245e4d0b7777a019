"""The advice on settings that follows from what was measured."""

import dataclasses

import pytest

from lab.measure.speed import SeqLenSpeeds, Speed, Speeds, Trade
from lab.measure.speed_advice import Division, advise, division_from, division_of
from lab.measure.speed_tables import document
from lab.measure.time_parts import PARTS, TimeParts


def speed(n: int, rate: float, waits_ms: float = 40.0) -> Speed:
    return Speed(n, rate, 3, waits_ms)


def trades(lost: dict[float, float]) -> list[Trade]:
    return [
        Trade(limit_ms, speed(32, 38 * (1 - share), limit_ms - 1), share)
        for limit_ms, share in lost.items()
    ]


def seq_len_speeds(
    rates: dict[int, float] | None = None,
    lost: dict[float, float] | None = None,
    seq_len: int = 1024,
) -> SeqLenSpeeds:
    whole = rates or {8: 30.0, 16: 37.9, 32: 38.0}
    return SeqLenSpeeds(
        seq_len=seq_len,
        sizes=[(speed(n, rate), speed(n, rate * 0.99)) for n, rate in whole.items()],
        trades=trades(lost or {25: 0.05, 50: 0.015, 100: 0.01}),
        parts=TimeParts(
            n=32,
            seconds=dict.fromkeys(PARTS, 0.1) | {"communication": 0.2},
            flops=6e12,
            peak_flops=6e14,
            n_devices=2,
            n_stages=1,
            device="H200",
            longest=[],
        ),
    )


def speeds(*seq_lens: SeqLenSpeeds, tensor: int = 1, pipeline: int = 1) -> Speeds:
    return Speeds(
        "m",
        "vllm",
        "bfloat16",
        True,
        tensor,
        pipeline,
        32_768,
        50.0,
        2.0,
        seq_lens or [seq_len_speeds()],
    )


def test_the_shortest_wait_that_costs_little() -> None:
    advice = advise(speeds())
    assert advice.max_step_ms == 50
    assert (
        "25 ms: 5.0 % of the rate, chat waits 24 ms; 50 ms: 1.5 % of the rate, chat waits 49 ms"
        in advice.reasons[2]
    )
    assert "POC_MAX_STEP_MS=50" in advice.settings()


def test_the_wait_that_costs_least_where_none_is_cheap() -> None:
    assert advise(speeds(seq_len_speeds(lost={25: 0.3, 50: 0.2, 100: 0.1}))).max_step_ms == 100


def test_a_wait_must_be_cheap_at_every_seq_len() -> None:
    short = seq_len_speeds(lost={25: 0.2, 50: 0.1, 100: 0.02}, seq_len=64)
    assert advise(speeds(seq_len_speeds(), short)).max_step_ms == 100


def test_the_fewest_tokens_that_are_nearly_as_fast() -> None:
    advice = advise(speeds())
    assert advice.max_batch_tokens == 16 * 1024
    assert "less than 1 %" in advice.reasons[1]


def test_tokens_that_are_enough_whole_but_not_in_slices_are_not_enough() -> None:
    found = seq_len_speeds()
    sizes = [
        (whole, speed(whole.n, {8: 30.0, 16: 37.0, 32: 38.0}[whole.n])) for whole, _ in found.sizes
    ]
    assert advise(speeds(dataclasses.replace(found, sizes=sizes))).max_batch_tokens == 32_768


def test_no_size_need_be_the_fastest_both_whole_and_in_slices() -> None:
    sizes = [(speed(16, 40.0), speed(16, 39.5)), (speed(32, 39.5), speed(32, 40.0))]
    assert (
        advise(speeds(dataclasses.replace(seq_len_speeds(), sizes=sizes))).max_batch_tokens
        == 32_768
    )


def test_one_size_says_nothing_of_others() -> None:
    advice = advise(speeds(seq_len_speeds({32: 38.0})))
    assert (advice.max_batch_tokens, advice.reasons[1]) == (32_768, "No other was measured.")


def test_tokens_are_enough_at_every_seq_len() -> None:
    short = seq_len_speeds({128: 1000.0, 512: 5000.0}, seq_len=64)
    assert advise(speeds(short, seq_len_speeds())).max_batch_tokens == 512 * 64


def test_more_tokens_may_gain_more_where_the_largest_are_clearly_the_fastest() -> None:
    advice = advise(speeds(seq_len_speeds({16: 30.0, 32: 38.0})))
    assert advice.max_batch_tokens == 32_768
    assert "more may gain more" in advice.reasons[1]


def test_a_model_that_fits_on_one_device_stays_there() -> None:
    advice = advise(speeds())
    assert (advice.tensor_parallel, advice.pipeline_parallel) == (1, 1)
    assert "fits on one device" in advice.reasons[0]


def test_tensor_parallel_alone_says_what_communication_takes_and_how_to_compare() -> None:
    advice = advise(speeds(tensor=2))
    assert advice.tensor_parallel == 2
    assert "Communication takes 22.2 % of the time" in advice.reasons[0]
    assert "--compare" in advice.reasons[0]


def test_pipeline_parallel_alone_says_how_to_compare() -> None:
    advice = advise(speeds(pipeline=2))
    assert advice.pipeline_parallel == 2
    assert "--compare" in advice.reasons[0]


@pytest.mark.parametrize(
    ("others", "best"),
    [
        ([Division(1, 2, {1024: 70.6})], (1, 2)),
        ([Division(1, 2, {1024: 30.0})], (2, 1)),
        # A device alone gives more than half of what two give.
        ([Division(1, 2, {1024: 70.6}), Division(1, 1, {64: 100.0, 1024: 38.4})], (1, 1)),
    ],
)
def test_of_several_divisions_the_one_with_most_nonces_a_second_on_each_device(
    others: list[Division], best: tuple[int, int]
) -> None:
    advice = advise(speeds(tensor=2), others)
    assert (advice.tensor_parallel, advice.pipeline_parallel) == best
    assert "tensor parallel 2, pipeline parallel 1: 19.0" in advice.reasons[0]


def test_divisions_are_compared_at_a_seq_len_that_all_have() -> None:
    advice = advise(speeds(tensor=2), [Division(1, 2, {64: 9000.0})])
    assert advice.tensor_parallel == 2
    assert "9,000" not in advice.reasons[0]


def test_an_earlier_result_is_read_from_its_json() -> None:
    measured = speeds(tensor=2)
    assert division_from(document(measured, advise(measured))) == division_of(measured)
    assert division_of(measured).nonces_per_s == {1024: 38.0}


def test_without_parts_nothing_is_said_of_communication() -> None:
    blind = dataclasses.replace(seq_len_speeds(), parts=None)
    assert "Communication takes" not in advise(speeds(blind, tensor=2)).reasons[0]
