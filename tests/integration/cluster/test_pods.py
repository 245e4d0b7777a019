"""Every set of the chart's values as running pods: probes, a job from end to end, an orderly end.

The engine is synthetic, what runs around it is real. Needs root, for namespaces.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import pytest

from cli.supervise.redis_server import find_redis_server, version_of
from tests.certificates import make_certificate
from tests.cluster import pods
from tests.cluster.chart import objects, running
from tests.cluster.jobs import assert_a_job_is_computed
from tests.cluster.pods import Cluster
from tests.cluster.secrets import secrets_in
from tests.cluster.values import SETS, Values
from tests.harness.samples import MODEL
from tests.stacks.tls_redis import binary_with_tls

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(not pods.possible(), reason="needs root and namespaces"),
    pytest.mark.xdist_group("pods"),  # one network
]

WAIT_S = 300.0
PARALLEL = ("tensorParallel", "pipelineParallel")
# One after the other, as each needs what is before it.
ORDER = ("redis", "api", "courier", "flower", "worker")


def on_a_synthetic_engine(name: str) -> Values:
    """The values of a set, with an engine that needs neither a GPU nor a model."""
    changed = deepcopy(SETS[name])
    worker = changed.setdefault("worker", {})
    worker["options"] = ["--engine", "synthetic"]
    worker.setdefault("model", MODEL)
    for kind in changed.get("workers", []):
        for option in ("model", "options", "engineArgs", "hosts", *PARALLEL):
            kind.pop(option, None)
    return changed


def is_deployed_later(name: str) -> bool:
    return bool(SETS[name].get("worker", {}).get("model") == "")


@contextmanager
def cluster_of(name: str, folder: Path) -> Iterator[Cluster]:
    """The pods of a set, all ready; beside them the Redis that the values name."""
    values = SETS[name]
    found = objects(on_a_synthetic_engine(name))
    secrets = secrets_in(folder)
    add_certificates(secrets, folder)
    with Cluster(found, secrets, folder / "pods") as cluster:
        if "url" in values.get("redis", {}):
            cluster.serve("redis.example", redis_of_theirs(values, secrets, folder))
        if "+sentinel:" in values.get("redis", {}).get("url", ""):
            primary = cluster.hosts["redis.example"]
            cluster.serve("sentinel.example", sentinel_of_theirs(primary, secrets, folder))
        names = sorted(running(found), key=lambda one: ORDER.index(one.partition("-")[0]))
        for one in names:
            cluster.start(one)
            for probe in ("startupProbe", "readinessProbe"):
                if not (one.startswith("worker") and is_deployed_later(name)):
                    cluster.wait(one, probe, WAIT_S)
        yield cluster


def add_certificates(secrets: dict[str, dict[str, str]], folder: Path) -> None:
    def made(name: str) -> tuple[str, str]:
        certificate, key = make_certificate(folder, name, ["DNS:redis.example"])
        return certificate.read_text(), key.read_text()

    (redis, _), (server, key), (client, _) = made("redis"), made("server"), made("client")
    secrets["redis-ca"] = {"ca.pem": redis}
    secrets["tls"] = {"server.crt": server, "server.key": key, "client.crt": client}
    secrets["courier-tls"] = {"courier.pem": server + key, "receivers.pem": client}
    secrets["keys"] = {"keys.json": json.dumps({"keys": []})}


def redis_of_theirs(
    values: Values, secrets: Mapping[str, Mapping[str, str]], folder: Path
) -> list[str]:
    common = ["--save", "", "--dir", str(folder), "--bind", "0.0.0.0"]
    redis = values["redis"]
    if redis["url"].startswith("rediss:"):
        files = [
            *("--tls-cert-file", str(folder / "redis.pem")),
            *("--tls-key-file", str(folder / "redis.key")),
            *("--tls-ca-cert-file", str(folder / "redis.pem"), "--tls-auth-clients", "no"),
        ]
        ports = ["--port", "0", "--tls-port", "6379"]
        password = ["--requirepass", secrets["proofline"]["redis_password"]]
        return [binary_with_tls(), *ports, *files, *password, *common]
    server = str(find_redis_server())
    if redis.get("users"):
        return [server, "--aclfile", str(folder / "redis" / "users.acl"), *common]
    return [server, "--requirepass", secrets["proofline"]["redis_password"], *common]


def sentinel_of_theirs(primary: str, secrets: dict[str, dict[str, str]], folder: Path) -> list[str]:
    """`primary`: its address."""
    password = secrets["proofline"]["redis_password"]
    secrets["proofline"]["sentinel_password"] = "the Sentinels' own"
    config = folder / "sentinel.conf"
    config.write_text(
        f'dir {folder}\nrequirepass "the Sentinels\' own"\n'
        f"sentinel monitor theirs {primary} 6379 1\nsentinel auth-pass theirs {password}\n"
    )
    return [str(find_redis_server()), str(config), "--sentinel"]


@pytest.mark.parametrize("name", list(SETS))
def test_pods_run(name: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    if "mutualTls" in SETS[name].get("api", {}) and shutil.which("nginx") is None:
        pytest.skip("no nginx on PATH (apt-get install nginx-light)")
    redis = SETS[name].get("redis", {})
    if (
        redis.get("users")
        and "url" not in redis
        and (version_of(str(find_redis_server())) or (0,)) < (7,)
    ):
        pytest.skip("the chart's users are of a Redis 7: no redis-server of it on PATH")
    with cluster_of(name, tmp_path) as cluster:
        if is_deployed_later(name):
            deployed = cluster.inside("api", ["proofline", "deploy", MODEL])
            assert deployed.returncode == 0, deployed.stderr
            cluster.wait("worker-gpu", "readinessProbe", WAIT_S)
        assert_a_job_is_computed(cluster)
        for one in cluster.pods:
            cluster.wait(one, "livenessProbe", WAIT_S)
            assert_it_may_do_little(cluster, one)
        if "tls" in cluster.pods["api"].containers:
            assert_a_certificate_is_a_key(cluster, tmp_path)
        for one in reversed(cluster.pods):
            ended = cluster.stop(one)
            assert set(ended.values()) == {0}, (one, ended)


def assert_it_may_do_little(cluster: Cluster, name: str) -> None:
    tried = cluster.inside(name, ["touch", "/file", "/usr/bin/file", "/run/proofline/file"])
    assert tried.stderr.count("Read-only file system") == 3, tried.stderr
    assert not cluster.inside(name, ["touch", "/tmp/file"]).returncode
    for container in cluster.pods[name].containers.values():
        status = Path(f"/proc/{container.main}/status").read_text()
        assert f"Uid:\t{pods.USER}\t" in status
        assert "CapEff:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status


def assert_a_certificate_is_a_key(cluster: Cluster, folder: Path) -> None:
    """The proxy beside the API takes the pinned one alone."""
    url = f"https://{cluster.pods['api'].address}:8443/api/v1/pow/status"
    for name, expected in (("client", "200"), ("server", "400")):
        mine = ["--cert", str(folder / f"{name}.pem"), "--key", str(folder / f"{name}.key")]
        done = subprocess.run(
            [
                *("ip", "netns", "exec", cluster.network, "curl", "--silent", "--insecure"),
                *("--output", "/dev/null", "--write-out", "%{http_code}", *mine, url),
            ],
            capture_output=True,
            text=True,
        )
        assert done.stdout == expected, (name, done)
