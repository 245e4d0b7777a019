"""Finding (18): Flower's /metrics tells nothing to those without the password."""

from pathlib import Path

from flower.views.monitor import Metrics

from workers.queue.monitor import lock_metrics


def test_metrics_want_a_user() -> None:
    class Copy(Metrics):
        get = Metrics.get

    lock_metrics(Copy)
    assert Copy.get is not Metrics.get
    assert Copy.get.__wrapped__ is Metrics.get


def test_it_is_what_proofline_flower_runs() -> None:
    source = (Path(__file__).parents[4] / "cli/run/flower.py").read_text()
    assert '"workers.queue.monitor"' in source
