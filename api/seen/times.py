"""Durations of chat requests in this process: histograms for Prometheus."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client import Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

# Seconds: from a tiny model's answer to a long answer after a queue.
_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


def _histogram(name: str, documentation: str) -> Histogram:
    return Histogram(name, documentation, ["model"], registry=None, buckets=_BUCKETS)


@dataclass(frozen=True)
class ChatTimes(Collector):
    """Seconds from a request's arrival to its first token, and to its end, by model."""

    first_token: Histogram = field(
        default_factory=lambda: _histogram(
            "proofline_chat_first_token_seconds",
            "From a streamed chat request's arrival to its first token.",
        )
    )
    whole: Histogram = field(
        default_factory=lambda: _histogram(
            "proofline_chat_request_seconds", "From a chat request's arrival to its answer's end."
        )
    )

    def collect(self) -> Iterable[Metric]:
        for histogram in (self.first_token, self.whole):
            for family in histogram.collect():
                # `_created` series, which Prometheus' text format adds for each series' start, are
                # not needed.
                family.samples = [
                    sample for sample in family.samples if not sample.name.endswith("_created")
                ]
                yield family
