"""The lines in which a start says what it has passed."""

from cli.supervise.start_stages import FIRST_WAIT_S, StartStages


class Start:
    """A start by a clock of the test's own."""

    def __init__(self, n: int) -> None:
        self.now = 0.0
        self.told: list[str] = []
        self.stages = StartStages(n, self.told.append, lambda: self.now)

    def at(self, now: float, worker: str, line: str) -> None:
        self.now = now
        self.stages.hear(worker, line)

    def ready_at(self, now: float, worker: str) -> None:
        self.now = now
        self.stages.ready(worker)


def test_each_stage_is_told_with_its_time_when_it_is_over() -> None:
    start = Start(1)
    start.at(2, "worker-0", "[2026-11-23 07:07:22,478: INFO/MainProcess] start: importing vLLM")
    start.at(3, "worker-0", "(EngineCore pid=7) INFO Starting to load model")
    start.at(12.5, "worker-0", "[...: INFO/MainProcess] start: loading the model")
    start.ready_at(50, "worker-0")
    assert start.told == [
        "starting Python: 2.0 s",
        "importing vLLM: 10.5 s",
        "loading the model: 37.5 s",
    ]
    assert start.stages.is_over


def test_a_stage_is_over_when_the_slowest_worker_has_passed_it() -> None:
    start = Start(2)
    start.at(1, "worker-0", "start: loading the model")
    start.ready_at(10, "worker-0")
    assert start.told == []
    start.at(20, "worker-1", "start: loading the model")
    start.ready_at(50, "worker-1")
    assert start.told == ["starting Python: 20.0 s", "loading the model: 30.0 s"]


def test_a_worker_that_begins_anew_repeats_no_stage() -> None:
    start = Start(1)
    for now in (1.0, 5.0):
        start.at(now, "worker-0", "start: importing vLLM")
        start.at(now + 1, "worker-0", "start: loading the model")
    start.ready_at(9, "worker-0")
    start.at(100, "worker-0", "start: importing vLLM")
    assert [line.partition(":")[0] for line in start.told] == [
        "starting Python",
        "importing vLLM",
        "loading the model",
    ]


def test_a_stage_that_a_crash_began_anew_takes_as_long_as_its_last_try() -> None:
    start = Start(1)
    for now in (1.0, 70.0, 140.0):
        start.at(now, "worker-0", "start: importing vLLM")
    start.at(200.0, "worker-0", "start: loading the model")
    assert start.told[-1] == "importing vLLM: 60.0 s"


def test_a_long_wait_is_told_of_ever_more_seldom() -> None:
    start = Start(1)
    start.at(1, "worker-0", "start: loading the model")
    for second in range(int(10 * FIRST_WAIT_S)):
        start.now = 1.0 + second
        start.stages.wait()
    assert start.told[1:] == [
        f"loading the model: {so_far} s so far" for so_far in (60, 120, 240, 480)
    ]
    start.ready_at(1000, "worker-0")
    start.now = 5000
    start.stages.wait()
    assert len(start.told) == 6


def test_the_speeds_of_all_workers_add_up() -> None:
    start = Start(2)
    assert start.stages.speed == ""
    start.at(1, "worker-0", "[...: INFO/MainProcess] self-test: 700.4 nonces/s of 1024 tokens")
    start.at(1, "worker-1", "[...: INFO/MainProcess] self-test: 800.2 nonces/s of 1024 tokens")
    assert start.stages.speed == "1,501 nonces/s of 1024 tokens in the self-test"
