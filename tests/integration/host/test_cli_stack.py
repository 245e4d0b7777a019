"""The supervisor of the whole stack: a real redis-server, stand-ins for everything else."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
import redis

from cli.machine import placement
from cli.supervise import processes, stack
from cli.supervise.ports import AddressError
from cli.supervise.stack import Stack, StackError
from cli.terminal import UsageError
from poc_core.errors import OptionsError
from tests.harness.waiting import wait_until
from tests.integration.processes import assert_all_gone, is_running
from tests.stacks.own_redis import write_before_answers
from tests.stacks.up import Up
from workers.engines.options import EngineOptions

pytestmark = pytest.mark.integration

REPOSITORY = Path(stack.__file__).parents[2]

# Every stand-in writes its name to the file "ends" when it is told to end.
FAKE_API = """
import json, pathlib, signal, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
folder, port = pathlib.Path(sys.argv[1]), int(sys.argv[2])

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        status, document = 200, {"status": "ready"}
        if self.path == "/api/v1/pow/status":
            pids = [int(p.name) for p in (folder / "workers").iterdir()]
            document = {"workers": [{"pid": pid, "state": "ready"} for pid in pids]}
        payload = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

def end(*_):
    with (folder / "ends").open("a") as ends:
        ends.write("api\\n")
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
FAKE_WORKER = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])

def end(*_):
    with (folder / "ends").open("a") as ends:
        ends.write("worker\\n")
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
(folder / "environments" / str(os.getpid())).write_text(repr(dict(os.environ)))
(folder / "workers" / str(os.getpid())).touch()
print("the fake worker works", flush=True)
print("name@host ready.", flush=True)
time.sleep(600)
"""
FIRST = f"{socket.gethostname()}/cpu0"  # the first worker of this machine
FAKE_COURIER = """
import pathlib, signal, sys, time

def end(*_):
    with (pathlib.Path(sys.argv[1]) / "ends").open("a") as ends:
        ends.write("courier\\n")
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
(pathlib.Path(sys.argv[1]) / "courier").touch()
time.sleep(600)
"""
READY_S = 300.0
BROKEN_WORKER = "print('no such model', flush=True); raise SystemExit(3)"


class FakeStack(Stack):
    """Its API, workers and courier are the programs above."""

    folder: Path
    worker_code = FAKE_WORKER

    def api_command(self) -> list[str]:
        return [sys.executable, "-c", FAKE_API, str(self.folder), str(self.port)]

    def courier_command(self) -> list[str]:
        return [sys.executable, "-c", FAKE_COURIER, str(self.folder)]

    def worker_command(self) -> list[str]:
        return [sys.executable, "-c", self.worker_code, str(self.folder)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "workers").mkdir()
    (tmp_path / "environments").mkdir()
    monkeypatch.setattr(FakeStack, "folder", tmp_path, raising=False)
    monkeypatch.setattr(processes, "FIRST_BACKOFF_S", 0.05)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def fake_stack(**options: object) -> FakeStack:
    engine = {name: options.pop(name) for name in EngineOptions.model_fields if name in options}
    made = EngineOptions.model_validate({"model": "tiny-qwen3", "engine": "synthetic"} | engine)
    return FakeStack(made, **options)  # type: ignore[arg-type]


def test_everything_runs_and_then_nothing_is_left(folder: Path) -> None:
    with fake_stack(workers=2) as running:
        running.wait_ready(READY_S)
        pids = [running.api_pid, running.redis_pid, *running.worker_pids()]
        assert len(pids) == 4
        assert all(is_running(pid) for pid in pids)
        with redis.Redis.from_url(str(running.redis_url)) as client:
            assert client.config_get("appendonly") == {"appendonly": "yes"}
            data_dir = Path(client.config_get("dir")["dir"])
        assert running.failure() is None
        told = ["the fake worker works", "name@host ready."]
        wait_until(lambda: running.worker_log(1) == told, "its log")
        wait_until((folder / "courier").exists, "the courier")
    assert not any(is_running(pid) for pid in pids)
    assert not data_dir.exists()
    assert (folder / "ends").read_text().split() == ["api", "worker", "worker", "courier"]


def test_the_workers_learn_of_redis_by_their_environment_alone(folder: Path) -> None:
    with fake_stack(env={"POC_CALLBACK_RETENTION_SEC": "77"}) as running:
        running.wait_ready(READY_S)
        (pid,) = running.worker_pids()
        environment = (folder / "environments" / str(pid)).read_text()
        assert f"'POC_REDIS_URL': '{running.redis_url}'" in environment
        assert "'POC_CALLBACK_RETENTION_SEC': '77'" in environment
        assert str(running.redis_url) not in " ".join(Stack.worker_command(running))


def test_each_worker_sees_its_own_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "visible_gpus", lambda: ["0", "1", "2", "3", "4"])
    monkeypatch.setattr(placement, "vllm_runs_on_cpu", lambda: False)
    with fake_stack(engine="vllm", workers=2, tensor_parallel=2) as running:
        running.wait_ready(READY_S)
        texts = [(folder / "environments" / str(pid)).read_text() for pid in running.worker_pids()]
    assert "'CUDA_VISIBLE_DEVICES': '0,1'" in texts[0]
    assert "'CUDA_VISIBLE_DEVICES': '2,3'" in texts[1]


def test_a_killed_worker_comes_back(folder: Path) -> None:
    told: list[str] = []
    with fake_stack(announce=told.append) as running:
        running.wait_ready(READY_S)
        (first,) = running.worker_pids()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: running.worker_pids() not in ([], [first]), "another worker")
        running.wait_ready(READY_S)
    assert f"{FIRST} ended (killed by SIGKILL); restarting it in 0.05 s" in told


def test_a_killed_redis_comes_back_with_its_data(folder: Path) -> None:
    with fake_stack() as running:
        with redis.Redis.from_url(str(running.redis_url), retry=None) as client:
            write_before_answers(str(running.redis_url))
            client.set("key", "kept")
        first = running.redis_pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: running.redis_pid not in (None, first), "another Redis")
        stack.wait_for_redis(str(running.redis_url), timeout_s=READY_S)
        with redis.Redis.from_url(str(running.redis_url)) as client:
            assert client.get("key") == b"kept"


def test_a_data_dir_outlives_the_stack(folder: Path, tmp_path: Path) -> None:
    for expected in (None, b"kept"):
        with (
            fake_stack(data_dir=tmp_path / "data") as running,
            redis.Redis.from_url(str(running.redis_url)) as client,
        ):
            assert client.get("key") == expected
            client.set("key", "kept")


def test_a_redis_that_is_not_ours_is_left_alone(folder: Path) -> None:
    with fake_stack() as owner, fake_stack(redis_url=owner.redis_url) as guest:
        guest.wait_ready(READY_S)
        assert guest.redis_pid is None
        guest.stop()
        assert is_running(owner.redis_pid)


def test_a_worker_that_cannot_start_ends_the_wait_with_its_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeStack, "worker_code", BROKEN_WORKER)
    with fake_stack(max_fast_crashes=1) as running:
        with pytest.raises(StackError) as error:
            running.wait_ready(READY_S)
        message = str(error.value)
        assert message.startswith(f"{FIRST} ended (exit code 3); not restarted: 2 times in a row.")
        assert f"{FIRST} | no such model" in message
        assert str(running.failure()).startswith(f"No worker is left: {FIRST} ended (exit code 3)")


def test_a_stack_that_is_not_ready_in_time_says_what_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FakeStack, "worker_code", "import time; print('loading', flush=True); time.sleep(600)"
    )
    says = rf"Not ready within 0\.5 s: {FIRST} has not loaded the model.*\n.*loading"
    with fake_stack() as running:

        def is_said() -> bool:
            with pytest.raises(StackError) as error:
                running.wait_ready(0.5)
            return re.match(says, str(error.value)) is not None

        wait_until(is_said, "an API that answers, and the worker's first word")


def test_a_port_in_use_is_an_error_before_anything_starts(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        running = fake_stack(port=port)
        with pytest.raises(
            AddressError,
            match=rf"Cannot listen on 127\.0\.0\.1 port {port} .*choose another --port",
        ):
            running.start()
        assert running.redis_pid is None


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fe80::1", "http://[fe80::1]:80"),
        ("localhost", "http://localhost:80"),
    ],
)
def test_the_base_url_can_be_opened_on_this_machine(host: str, url: str) -> None:
    assert (
        Stack(EngineOptions(model="tiny-qwen3", engine="synthetic"), host=host, port=80).base_url
        == url
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "at least one worker"),
        ({"tensor_parallel": 2}, "the synthetic engine takes neither"),
        ({"vllm_args": ["--enforce-eager"]}, "the synthetic engine takes neither"),
        ({"model": "./none"}, "There is no directory"),
        (
            {"redis_url": "redis://127.0.0.1/0", "data_dir": Path("x")},
            "leave it out with --redis-url",
        ),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises((UsageError, OptionsError), match=message):
        fake_stack(**options)


def test_the_worker_command_carries_every_option() -> None:
    options = EngineOptions(
        model="tiny-qwen3",
        engine="vllm",
        dtype="float32",
        tensor_parallel=2,
        synthetic_step_ms=5,
        max_batch_tokens=99,
        vllm_args=("--enforce-eager",),
    )
    *_, name, carried = Stack(options).worker_command()
    assert name == "supervised-worker"
    found = EngineOptions.model_validate_json(carried)
    assert found == options.model_copy(
        update={"model": found.model, "served_model_name": "tiny-qwen3"}
    )
    assert Path(found.model, "config.json").is_file()


UP = """
    import signal, sys
    from pathlib import Path
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where nohup started the tests
    sys.path[:0] = [{repository!r}, {tests!r}]
    import cli.supervise.stack, test_cli_stack
    test_cli_stack.FakeStack.folder = Path({folder!r})
    cli.supervise.stack.Stack = test_cli_stack.FakeStack
    from cli.main import app
    app(["up", "--model", "tiny-qwen3", "--engine", "synthetic", "--port", "0", "--workers", "2"])
"""
MOST_LINES = 25  # of a start: a terminal of 24 lines shows the last of them


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_up_says_when_it_is_ready_and_stops_everything_on_a_signal(
    folder: Path, number: int
) -> None:
    code = UP.format(
        repository=str(REPOSITORY), tests=str(Path(__file__).parent), folder=str(folder)
    )
    up = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.PIPE, text=True
    )
    try:
        assert up.stderr is not None
        log = [up.stderr.readline()]
        while log[-1] and not log[-1].startswith("up: ready at http://127.0.0.1:"):
            log.append(up.stderr.readline())
        assert (
            log[-1].rstrip().endswith("tiny-qwen3: 2 workers on the CPU; Ctrl-C stops everything")
        ), log
        assert len(log) < MOST_LINES
        logs = folder / "state" / "proofline" / "logs"
        assert any(str(logs) in line for line in log)
        assert "the fake worker works" in (logs / "worker-cpu1.log").read_text()
        wait_until((folder / "courier").exists, "the courier")
        pids = [int(path.name) for path in (folder / "workers").iterdir()]
        assert len(pids) == 2
        up.send_signal(number)
        rest = up.communicate(timeout=READY_S)[0:2][1]
        assert up.returncode == 0
        assert [line.split()[1] for line in rest.splitlines()] == ["stopping", "everything"]
        assert not any(is_running(pid) for pid in pids)
        assert (folder / "ends").read_text().split() == ["api", "worker", "worker", "courier"]
    finally:
        up.kill()
        up.wait()


def test_nothing_is_left_after_up_was_killed(folder: Path) -> None:
    code = UP.format(
        repository=str(REPOSITORY), tests=str(Path(__file__).parent), folder=str(folder)
    )
    up = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.PIPE, text=True
    )
    assert up.stderr is not None
    try:
        assert any("up: ready at" in line for line in up.stderr)
        wait_until((folder / "courier").exists, "the courier")
        guards = psutil.Process(up.pid).children()
        children = [child for guard in guards for child in guard.children()]
        assert (len(guards), len(children)) == (5, 5)
    finally:
        up.kill()
        up.wait()
        up.stderr.close()
    assert_all_gone([*guards, *children])


def test_a_misspelt_setting_is_named_once_by_up_alone() -> None:
    options = ["--model", "tiny-qwen3", "--engine", "synthetic", "--port", "0", "--verbose"]
    up = Up(*options, env={"POC_CHAT_POLCY": "off"})
    try:
        assert len([line for line in up.start if "POC_CHAT_POLCY" in line]) == 1
    finally:
        up.end()
