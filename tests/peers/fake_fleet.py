"""A host's workers that only remember their orders."""

from cli.supervise.start_stages import StartStages
from poc_core.serving.deployments import ChildLog
from poc_core.serving.places import WorkerPlace
from workers.engines.options import EngineOptions


class FakeFleet:
    """Of one worker, which gets ready, fails and ends as it is told."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.children = ["h1/cpu0"]
        self.is_serving = False
        self.left_out = ["--swap-space: vLLM 0.32.0 does not know it"]
        self.why: str | None = None
        self.n_stops = 0
        self.pid: int | None = 7
        self.since = 1.0  # when its worker got ready, or ceased to be
        self.stages = StartStages(1, lambda _message: None)
        self.means = "1 worker on the CPU"

    @property
    def n_ready(self) -> int:
        return int(self.is_serving)

    def logs(self) -> list[ChildLog]:
        return [ChildLog(name="h1/cpu0", pid=self.pid, lines=["loaded"])]

    def places(self) -> list[WorkerPlace]:
        here = {"pid": self.pid, "is_ready": self.is_serving, "since": self.since}
        return [WorkerPlace(name="h1/cpu0", **here)]

    def stop(self) -> None:
        self.n_stops += 1

    def kill(self) -> None:
        pass

    def reason(self) -> str | None:
        return self.why

    failure = reason
