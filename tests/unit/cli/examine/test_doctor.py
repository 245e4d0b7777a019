"""`proofline doctor` as a command: what it looks at, its words, its JSON, its exit code."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.examine import doctor as command
from cli.examine import machine, packages, redis
from cli.examine.findings import Finding, Subject, findings_of
from cli.main import app
from cli.supervise.redis_server import free_port
from poc_core.errors import ProoflineError
from poc_core.gpus import MachineGpus

HERE = ["doctor", "--without-workers"]


@pytest.fixture(autouse=True)
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine is like."""
    monkeypatch.setattr(redis, "local_server", lambda: iter([Subject("redis").ok("its own")]))
    monkeypatch.setattr(
        machine, "port", lambda host, port: iter([Subject("port").ok(f"{host} {port}")])
    )
    monkeypatch.setattr(machine, "disk", lambda what, *_: iter([Subject("disk").ok(what)]))
    monkeypatch.setattr(packages, "imports", lambda *_: iter([Subject("torch").ok("2.13.0")]))


def run(*options: str) -> tuple[int, list[dict[str, Any]]]:
    answer = CliRunner().invoke(app, [*HERE, "--json", *options])
    document = json.loads(answer.stdout)
    assert document["ok"] is (answer.exit_code == 0)
    return answer.exit_code, document["findings"]


def test_all_fine_is_exit_code_0() -> None:
    code, findings = run()
    assert code == 0
    assert [finding["about"] for finding in findings] == ["settings", "redis", "port", "disk"]


def test_each_port_of_the_api_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POC_API_PORT", "8080 5000")
    said = [finding["says"] for finding in run()[1] if finding["about"] == "port"]
    assert said == ["127.0.0.1 8080", "127.0.0.1 5000"]


def test_a_problem_is_exit_code_1_and_comes_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        machine, "port", lambda *_: iter([Subject("port").problem("Taken.", "Another --port.")])
    )
    answer = CliRunner().invoke(app, HERE)
    assert answer.exit_code == 1
    assert "WRONG port        Taken.\n" in answer.stdout
    assert "Do: Another --port.\n" in answer.stdout
    assert "1 wrong." in answer.stderr


def test_a_host_with_workers_has_more_to_look_at() -> None:
    answer = CliRunner().invoke(app, ["doctor", "--json", "--model", "tiny-qwen3"])
    about = [finding["about"] for finding in json.loads(answer.stdout)["findings"]]
    assert {"python", "vllm", "torch", "model", "memory", "family"} <= set(about)


def test_a_driver_that_fails_ends_no_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_host: str) -> MachineGpus:
        raise RuntimeError("Driver/library version mismatch")

    monkeypatch.setattr("poc_core.gpus.read", fails)
    answer = CliRunner().invoke(app, ["doctor", "--json"])
    assert {"gpu", "port"} <= {found["about"] for found in json.loads(answer.stdout)["findings"]}


def test_without_a_redis_no_line_is_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    code, findings = run("--redis-url", f"redis://:secret@127.0.0.1:{free_port()}/0")
    found = next(finding for finding in findings if finding["about"] == "redis")
    assert (code, found["level"]) == (1, "problem")
    assert "does not answer" in found["says"]
    assert "secret" not in json.dumps(findings)
    assert "disk" not in [finding["about"] for finding in findings]  # of a Redis elsewhere


def test_a_receiver_is_looked_at_where_one_is_named() -> None:
    code, findings = run("--callback-url", f"http://127.0.0.1:{free_port()}")
    assert (code, findings[-1]["about"]) == (1, "receiver")


def test_settings_that_cannot_be_read_are_named_and_the_rest_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POC_MAX_WAITING_REQUESTS", "many")
    monkeypatch.setenv("POC_CHAT_POLCY", "off")
    code, findings = run()
    assert code == 1
    assert [(finding["about"], finding["level"]) for finding in findings][:2] == [
        ("settings", "problem"),
        ("settings", "warning"),
    ]
    assert "POC_MAX_WAITING_REQUESTS" in findings[0]["says"]
    monkeypatch.setenv("POC_MAX_WAITING_REQUESTS", "20")
    monkeypatch.delenv("POC_CHAT_POLCY")
    assert run()[0] == 0


def test_a_check_that_breaks_is_a_finding() -> None:
    def breaks() -> Iterator[Finding]:
        yield Subject("one").ok("fine")
        raise ZeroDivisionError("by zero")

    def refuses() -> Iterator[Finding]:
        raise ProoflineError("Not so.")

    one, two, three, four = findings_of(
        [("one", breaks), ("two", refuses), ("three", lambda: [Subject("three").ok("fine")])]
    )
    assert (one.level, four.level) == ("ok", "ok")
    assert "ZeroDivisionError: by zero" in two.says
    assert (three.about, three.says) == ("two", "Not so.")


def test_the_data_directory_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[str, Path]] = []

    def disk(what: str, path: Path, *_: float) -> Iterator[Finding]:
        seen.append((what, path))
        yield Subject("disk").ok(what)

    monkeypatch.setattr(machine, "disk", disk)
    run("--data-dir", str(tmp_path))
    assert seen == [("Redis", tmp_path)]
    assert command.doctor.__doc__


def test_an_image_without_an_engine_is_judged_by_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "OUR_IMAGE", tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    assert "docker compose exec worker proofline doctor" in done.output
    assert "make setup" not in done.output
