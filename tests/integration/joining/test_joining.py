"""A host joins by one token over TLS, works, is revoked and ends: real Redis, API and processes."""

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis

from cli.join.inviting import Inviting
from cli.join.users import PREFIX
from cli.supervise.processes import command_of_proofline
from cli.supervise.redis_server import version_of
from poc_core.joining.invitations import HOSTS
from poc_core.joining.offers import SealedOffer
from poc_core.joining.tokens import Token, hashed
from poc_core.periodic import Periodic
from poc_core.settings import load_settings
from poc_core.state.registry import WorkerRegistry
from tests.harness.samples import body, known
from tests.harness.waiting import wait_until
from tests.integration.node import synthetic_artifacts
from tests.integration.processes import descendants
from tests.peers.fake_worker import FakeWorker
from tests.stacks.local_compose import REDIS, LocalCompose
from tests.stacks.tls_proxy import TlsProxy
from tests.stacks.up import environment

pytestmark = pytest.mark.integration

PATIENCE_S = 150.0
GENERATE = "/api/v1/pow/generate"


class Node:
    """Redis with users, the API and TLS before it; no worker yet."""

    def __init__(self, folder: Path, exits: ExitStack) -> None:
        self.folder = folder
        self.started: list[psutil.Popen] = []
        self.compose = exits.enter_context(LocalCompose(folder))
        self.compose.start("redis")
        self.compose.wait_healthy("redis")
        self.compose.start("api")
        self.compose.wait_healthy("api")
        self.operator = exits.enter_context(redis.Redis.from_url(self.compose.redis_url))
        settings = load_settings(redis_url=self.compose.redis_url)
        self.hosts = Inviting(self.operator, settings)
        self.proxy = TlsProxy(folder, int(self.compose.api_url.rpartition(":")[2]))
        exits.callback(self.proxy.close)
        self.http = exits.enter_context(
            httpx.Client(base_url=self.compose.api_url, timeout=PATIENCE_S, trust_env=False)
        )
        self._exits = exits

    def invite(self, name: str, valid_s: float = 3600) -> Path:
        """A file with the token of a new host; of a Redis here, which `hosts invite` refuses."""
        place = f"redis://127.0.0.1:{self.compose.redis_port}/0"
        token, forgets = self.hosts.invite(name, place, None, valid_s, {"POC_WORKER_TTL_S": "7"})
        assert forgets == ""
        file = self.folder / f"{name}.token"
        file.write_text(token.text)
        return file

    def take(self, token: Token) -> str:
        """Has a host join, without its workers: its url of Redis."""
        answer = self.http.post(
            "/api/v1/hosts/join", headers={"Authorization": f"Bearer {token.id}"}
        )
        assert answer.status_code == 200, answer.text
        return SealedOffer.model_validate(answer.json()).opened(token).url_for(token)

    def start_host(self, name: str, *options: str, **env: str) -> psutil.Popen:
        """`proofline workers` on another host, of one synthetic worker."""
        log = self._exits.enter_context((self.folder / f"{name}.log").open("ab"))
        command = [
            *command_of_proofline("workers", "--model", "tiny-qwen3", "--engine", "synthetic"),
            *("--synthetic-step-ms", "300", "--verbose"),
            *("--join-file", str(self.joined(name)), *options),
        ]
        host = psutil.Popen(
            command, env=environment(env), stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        self.started.append(host)
        return host

    def joined(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    @staticmethod
    def end(host: psutil.Popen) -> None:
        if host.poll() is None:
            host.terminate()
            try:
                host.wait(PATIENCE_S)
            except psutil.TimeoutExpired:
                host.kill()
                raise

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """One of our commands; of the operator unless `env` says otherwise."""
        return subprocess.run(
            command_of_proofline(*words),
            env=environment(env or {"POC_REDIS_URL": self.compose.redis_url}),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S * 2,
        )

    def hosts_of_workers(self) -> list[str]:
        """The hosts of the workers that are ready."""
        workers = self.http.get("/api/v1/pow/status").json()["workers"]
        return [worker["host"] for worker in workers if worker["state"] == "ready"]

    def wait_serves(self, name: str) -> None:
        wait_until(lambda: name in self.hosts_of_workers(), f"a worker of {name}", 2 * PATIENCE_S)


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with ExitStack() as exits:
        yield Node(tmp_path_factory.mktemp("joining"), exits)


@pytest.fixture
def node(shared_node: Node) -> Iterator[Node]:
    """One for all tests, each of which finds it without hosts."""
    yield shared_node
    for host in shared_node.started:
        shared_node.end(host)
    for row in shared_node.hosts.rows():
        shared_node.hosts.revoke(row.name)


def users(node: Node) -> set[str]:
    found: Any = node.operator.execute_command("ACL", "USERS")
    return {raw.decode() for raw in found}


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, list[tuple[str, str]]]:
    """Of `proofline doctor --json`: what it looked at -> (level, what it says) of each finding."""
    found: dict[str, list[tuple[str, str]]] = {}
    for one in json.loads(done.stdout)["findings"]:
        found.setdefault(one["about"], []).append((one["level"], one["says"]))
    return found


@pytest.mark.promise(
    "a host's token",
    "appears in no log, environment or process argument; "
    "Redis and the API never receive the token's secrets",
)
@pytest.mark.promise(
    "a revoked host",
    "is locked out at once, also after a restart of Redis; other hosts take over the work",
)
def test_a_host_joins_works_is_revoked_and_ends(node: Node) -> None:
    token_file = node.invite("gpu2")
    token = Token.read(token_file.read_text())
    join = ("--join", node.proxy.pinned_url)
    doctor, home = ("doctor", "--json", "--without-workers"), {"HOME": str(node.folder)}
    looked = node.run(*doctor, *join, "--token-file", str(token_file), **home)
    assert looked.returncode == 0, looked.stdout + looked.stderr
    assert findings(looked)["token"] == [("ok", "is good for one host, gpu2")]

    host = node.start_host("gpu2", *join, PROOFLINE_JOIN_TOKEN=token.text)
    node.wait_serves("gpu2")
    kept = node.joined("gpu2")
    assert kept.stat().st_mode & 0o777 == 0o600
    password = known(re.search(r":([0-9a-f]{64})@", kept.read_text()))
    for process in [host, *descendants(host.pid)]:
        assert token.text not in " ".join(process.cmdline())
        assert process.pid == host.pid or token.text not in str(process.environ())
        assert password[1] not in " ".join(process.cmdline())
    environments = [child.environ() for child in descendants(host.pid)]
    # Celery writes a worker's title over its environment: then nothing of it is to be seen.
    assert {seen.get("POC_WORKER_TTL_S") for seen in environments if seen} == {"7"}
    for log in (node.log("gpu2"), node.compose.log("api")):
        assert token.text not in log
        assert password[1] not in log
    (worker,) = node.http.get("/api/v1/pow/status").json()["workers"]
    assert worker["host"] == "gpu2"

    answer = node.http.post(GENERATE, json=body(nonces=list(range(16)), wait=True)).json()
    assert answer["artifacts"] == synthetic_artifacts(range(16))
    listed = node.run("hosts", "list")
    assert listed.stdout.startswith("gpu2\tjoined\t"), listed.stderr

    # Its work under way when it is revoked is done by another host.
    nonces = list(range(1200))
    job = node.http.post(GENERATE, json=body(nonces=nonces, wait=False)).json()["request_id"]
    wait_until(
        lambda: node.http.get(f"{GENERATE}/{job}").json().get("n_done", 0) > 0, "work", PATIENCE_S
    )
    assert node.hosts.revoke("gpu2") == 1
    assert node.http.get(f"{GENERATE}/{job}").json()["status"] == "running"
    assert PREFIX + "gpu2" not in users(node)
    wait_until(lambda: "gpu2" not in node.hosts_of_workers(), "its workers' end", PATIENCE_S)
    assert [one for one in node.operator.client_list() if one["user"] == "host-gpu2"] == []
    with pytest.raises(redis.AuthenticationError):
        redis.Redis.from_url(json.loads(kept.read_text())["redis_url"]).ping()
    assert host.wait(2 * PATIENCE_S) == 1
    assert "error: Redis refuses host-gpu2, the user of this host: the host is revoked" in node.log(
        "gpu2"
    )
    assert "gpu2" not in str(node.operator.hgetall(HOSTS))

    again = node.start_host("gpu2", *join)
    assert again.wait(PATIENCE_S) == 1
    assert node.log("gpu2").rstrip().endswith("the operator invites it again.")
    looked = node.run(*doctor, "--join-file", str(kept), **home)
    assert looked.returncode == 1
    assert findings(looked)["token"] == [("problem", "This host, gpu2, is revoked.")]

    other = node.start_host("gpu3", *join, "--token-file", str(node.invite("gpu3")))
    wait_until(
        lambda: node.http.get(f"{GENERATE}/{job}").json()["status"] == "completed",
        "the revoked host's work",
        2 * PATIENCE_S,
        0.5,
    )
    answer = node.http.get(f"{GENERATE}/{job}").json()
    assert answer["artifacts"] == synthetic_artifacts(nonces)

    node.end(other)
    wait_until(lambda: "gpu3" not in node.hosts_of_workers(), "its end", PATIENCE_S)
    node.start_host("gpu3")  # with neither a token nor the url
    node.wait_serves("gpu3")
    revoked = node.run("hosts", "revoke", "gpu3")
    assert (revoked.returncode, revoked.stdout) == (0, "")
    assert "gpu3 is revoked; the 1 worker(s) it had are no longer asked" in revoked.stderr


class Chats:
    """A client that chats all the time."""

    def __init__(self, node: Node, model: str) -> None:
        self.statuses: list[int] = []
        self._node, self._model = node, model
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._chat)

    def __enter__(self) -> "Chats":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def more(self) -> None:
        """Waits until a chat that is sent from now on is answered, and some more are."""
        n = len(self.statuses)
        wait_until(lambda: len(self.statuses) > n + 20, "chats", PATIENCE_S)

    def _chat(self) -> None:
        while not self._is_over.wait(0.02):  # without a pause: eight seconds of CPU
            chat = {"model": self._model, "messages": []}
            answer = self._node.http.post("/v1/chat/completions", json=chat)
            self.statuses.append(answer.status_code)


@pytest.mark.promise(
    "a revoked host", "gets no chat after `revoke` returns, whatever the host left in Redis"
)
def test_no_chat_goes_to_a_revoked_host_whatever_it_left_in_redis(node: Node) -> None:
    """It lies about its clock, its name and how long it lives, and others chat all the time."""
    redis_url = node.take(Token.read(node.invite("gpu9").read_text()))
    beats = Periodic("honest", 0.5, lambda: registry.heartbeat(honest.record))
    registry = WorkerRegistry(node.operator, load_settings())
    with (
        FakeWorker("here/gpu0-000000", lambda call: call.answer(b"{}")) as honest,
        FakeWorker("gpu9/gpu0-000000", lambda call: call.answer(b"{}")) as liar,
        redis.Redis.from_url(redis_url) as host,
        Chats(node, honest.record.model) as chats,
    ):
        beats.start()
        record = json.dumps(asdict(replace(liar.record, host="elsewhere")))
        host.hset(f"poc:worker:{liar.record.id}", "record", record)
        host.zadd("poc:workers", {liar.record.id: 4e18})
        wait_until(lambda: liar.received, "a chat at the liar", PATIENCE_S)
        assert node.hosts.revoke("gpu9") == 1
        n_received = len(liar.received)
        n_before = len(chats.statuses)
        chats.more()
        assert len(liar.received) == n_received
        assert set(chats.statuses[n_before:]) == {200}
        beats.stop(PATIENCE_S)
        registry.remove(honest.record.id)
    assert node.operator.keys("poc:worker:gpu9*") == []
    assert liar.record.id.encode() not in node.operator.zrange("poc:workers", 0, -1)


@pytest.mark.promise(
    "a compromised host",
    "cannot write other hosts' records (Redis 7), forge events of keys, "
    "or stay listed without a heartbeat",
)
def test_a_host_writes_no_other_hosts_records(node: Node) -> None:
    if (version_of(str(REDIS)) or (0,)) < (7,):
        pytest.skip("this Redis knows no keys that may only be read")
    redis_url = node.take(Token.read(node.invite("gpu2").read_text()))
    with redis.Redis.from_url(redis_url) as host:
        host.hset("poc:worker:gpu2/gpu0-000000", "record", "{}")
        assert host.exists("poc:worker:gpu3/gpu0-000000") == 0  # whose leases it may take
        for command in (
            "HSET poc:worker:gpu3/gpu0-000000 record {}",
            "DEL poc:worker:gpu2-3/gpu0-000000",
            "PEXPIRE poc:worker:here 1",
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                host.execute_command(*command.split())
    node.hosts.revoke("gpu2")


@pytest.mark.promise(
    "a host that joined",
    "has its own Redis user with the rights of `worker`; the API creates no Redis users",
)
def test_each_host_is_a_user_with_the_rights_of_a_worker(node: Node) -> None:
    """And its invitation is nothing to it, as the hosts' users are nothing to the API."""
    token = Token.read(node.invite("gpu4").read_text())
    invitation = f"poc:invite:{hashed(token.id)}"
    redis_url = node.take(token)
    with redis.Redis.from_url(redis_url) as host:
        assert host.exists("poc:job:1", "poc:worker:w") == 0
        for command in (
            f"HGETALL {HOSTS}",
            f"HGETALL {invitation}",
            "SCRIPT LOAD x",
            "ACL SETUSER host-gpu4 +@all",
            "HGETALL poc:receiver:r",
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                host.execute_command(*command.split())
    password = node.compose.secret("api_redis_password")
    with redis.Redis.from_url(node.compose.redis_url_of("api", password)) as api:
        assert api.hget(invitation, "name") == b"gpu4"
        for command in (f"HGETALL {HOSTS}", "ACL SETUSER host-x on", "ACL DELUSER host-gpu4"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                api.execute_command(*command.split())
    node.hosts.revoke("gpu4")


@pytest.mark.promise(
    "a revoked host",
    "is locked out at once, also after a restart of Redis; other hosts take over the work",
)
def test_redis_keeps_hosts_over_its_restart_and_forgets_those_revoked(node: Node) -> None:
    redis_url = node.take(Token.read(node.invite("gpu5").read_text()))
    node.invite("gpu6")
    node.hosts.revoke("gpu6")
    node.compose.stop("redis")
    del node.compose.processes["redis"]
    node.compose.start("redis")
    node.compose.wait_healthy("redis")
    with redis.Redis.from_url(redis_url) as host:
        assert host.ping()
    assert {name for name in users(node) if name.startswith(PREFIX)} == {"host-gpu5"}
    node.hosts.revoke("gpu5")


def test_what_an_operator_does_wrong_is_told(node: Node) -> None:
    invite = ("hosts", "invite", "gpu7", "--hosts-redis-url", "redis://r.invalid")
    made = node.run(*invite)
    assert Token.read(made.stdout).text not in made.stderr
    assert "nothing between this Redis and the host is encrypted" in made.stderr
    again = node.run(*invite)
    assert (again.returncode, "is a host named gpu7" in again.stderr) == (1, True)
    assert again.stdout == ""
    nobody = node.run("hosts", "revoke", "nobody")
    assert (nobody.returncode, "there are: gpu7" in nobody.stderr) == (1, True)
    password = node.compose.secret("api_redis_password")
    no_operator = node.compose.redis_url_of("api", password)
    for words in (["invite", "gpu8", "--hosts-redis-url", "rediss://r.invalid"], ["list"]):
        done = node.run("hosts", *words, POC_REDIS_URL=no_operator)
        assert done.returncode == 1
        assert "may make no users" in done.stderr
        assert "rights of `worker` in docker/users.acl" in done.stderr
        assert password not in done.stderr
    node.hosts.revoke("gpu7")
