"""A stand-in for the API's routes of jobs."""

from typing import Any

from typer.testing import CliRunner, Result

from cli.main import app
from tests.harness.samples import status_answer

ARTIFACTS = [{"nonce": nonce, "vector_b64": f"vector{nonce}"} for nonce in range(3)]
ENCODING = {"dtype": "f16", "k_dim": 12, "endian": "le"}
RESULT = {
    "status": "completed",
    "request_id": "job-1",
    "artifacts": ARTIFACTS,
    "encoding": ENCODING,
}
PROOF_OPTIONS = ["--block-hash", "0xabc", "--public-key", "node-1"]


class FakeApi:
    """Answers a submission, then each poll with the next of `polls`; the last one repeats."""

    def __init__(self, runner: CliRunner) -> None:
        self.runner, self.url = runner, ""
        self.models = ["tiny-qwen3"]
        self.submission: tuple[int, Any] = (
            200,
            {"status": "queued", "request_id": "job-1", "queued_count": 3},
        )
        self.polls: list[tuple[int, Any]] = [(200, RESULT)]
        self.submitted: list[dict[str, Any]] = []
        self.polled: list[str] = []

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "/api/v1/pow/status":
            return 200, status_answer(self.models)
        if method == "POST" and path == "/api/v1/pow/generate":
            self.submitted.append(body)
            return self.submission
        if path.startswith("/api/v1/pow/generate/"):
            self.polled.append(path.rpartition("/")[2])
            return self.polls.pop(0) if len(self.polls) > 1 else self.polls[0]
        return 404, {"detail": "Not Found"}

    def run(self, command: str, *words: str, input: str | None = None) -> Result:
        return self.runner.invoke(app, [command, "--url", self.url, *words], input=input)


CHAINS = [
    {"nonce": nonce, "vector_b64": "", "k_points_steps": [3, 14, nonce]} for nonce in range(3)
]
