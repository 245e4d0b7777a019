"""compose.yaml, its overrides and the Dockerfiles, checked without a Docker engine."""

import hashlib
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.main import app
from cli.supervise.fleet import WORKER_GRACE_S
from cli.supervise.processes import GUARD_MARGIN_S
from poc_core.settings import Settings
from scripts.requirements import requirements
from tests.harness import compose_file
from tests.harness.compose_file import ROOT, command_of

FILES = ["compose.yaml", "compose.hosts.yaml", "compose.workers.yaml", "compose.tls.yaml"]
ON_A_FURTHER_HOST = {
    "PROOFLINE_MODEL": "tiny-qwen3",
    "REDIS_ADDRESS": "10.0.0.1",
    "PRIVATE_ADDRESS": "10.0.0.2",
}
MONITORING = ("prometheus", "grafana")  # what of them is their own: test_monitoring.py
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
COMMANDS: Any = typer.main.get_command(app)


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    return compose_file.services()


def seconds(duration: str) -> float:
    amount, unit = re.fullmatch(r"(\d+)(s|m)", duration).groups()  # type: ignore[union-attr]
    return int(amount) * {"s": 1, "m": 60}[unit]


def options_of(service: dict[str, Any]) -> dict[str, Any]:
    """What our command line makes of a service's command; an option that does not exist is an
    error.
    """
    program, command, *arguments = command_of(service)
    assert program == "proofline"
    with COMMANDS.commands[command].make_context(command, arguments) as context:
        parsed: dict[str, Any] = context.params
    return parsed


def test_files_follow_the_compose_specification() -> None:
    check = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        *(str(ROOT / file) for file in FILES),
    ]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_proxy_and_the_courier_get_their_certificates_and_no_more_rights_than_others(
    services: dict[str, dict[str, Any]],
) -> None:
    """What the proxy does is in tests/integration/test_tls_proxy.py."""
    found = compose_file.services({"PROOFLINE_TLS": "./tls"}, "compose.tls.yaml")
    certificates = "./tls:/run/tls:ro,z"
    assert found["courier"] == {"volumes": [certificates]}
    tls = found["tls"]
    assert set(tls["volumes"]) == {certificates, "./docker/tls:/etc/proofline:ro,z"}
    assert tls["networks"] == ["outside"]  # without a way to Redis
    for right in ("read_only", "cap_drop", "security_opt", "tmpfs"):
        assert tls[right] == services["api"][right]
    with pytest.raises(LookupError, match="PROOFLINE_TLS"):
        compose_file.services({}, "compose.tls.yaml")


class TestServices:
    def test_a_clone_starts_a_whole_node_without_a_gpu(
        self, services: dict[str, dict[str, Any]]
    ) -> None:
        started = {name for name, service in services.items() if not service.get("profiles")}
        assert started == {"secrets", "redis", "api", "courier", "flower", "worker"}
        assert options_of(services["worker"])["model"] == "tiny-qwen3"

    def test_the_env_file_replaces_the_worker_by_one_on_gpus(self) -> None:
        lines = (ROOT / ".env.example").read_text().splitlines()
        section = lines[: next(i for i, line in enumerate(lines) if line.startswith("# --- CPU"))]
        chosen = dict(
            line.removeprefix("#").split("=", 1) for line in section if re.match(r"#[A-Z_]+=", line)
        )
        services = compose_file.services(chosen)
        assert services["worker"]["scale"] == "0"
        assert chosen["COMPOSE_PROFILES"] in services["worker-gpu"]["profiles"]
        options = options_of(services["worker-gpu"])
        assert options["vllm_args"][-1] == '{"max_cudagraph_capture_size": 608}'
        assert options["model"] == chosen["PROOFLINE_MODEL"]
        assert options["vllm_args"] == shlex.split(chosen["PROOFLINE_ENGINE_ARGS"])

    def test_every_variable_is_in_the_example(self) -> None:
        known = set(
            re.findall(r"^#([A-Z_]+)=", (ROOT / ".env.example").read_text(), flags=re.MULTILINE)
        )
        used = {
            name
            for file in FILES
            for name in re.findall(r"(?<!\$)\$\{(\w+)", (ROOT / file).read_text())
        }
        assert used <= known
        assert {name for name in known if name.startswith("POC_")} <= {
            f"POC_{name.upper()}" for name in Settings.model_fields
        }

    @pytest.mark.parametrize("name", ["api", "courier", "flower", "worker", "worker-gpu"])
    def test_commands_and_their_options_exist(
        self, services: dict[str, dict[str, Any]], name: str
    ) -> None:
        assert options_of(services[name])

    def test_a_further_host_has_workers_that_find_redis(self) -> None:
        (worker,) = compose_file.services(ON_A_FURTHER_HOST, "compose.workers.yaml").values()
        assert options_of(worker)["model"] == "tiny-qwen3"
        environment = worker["environment"]
        assert environment["POC_REDIS_URL"] == "redis://worker@10.0.0.1:6379/0"
        (mount,) = (one for one in worker["volumes"] if isinstance(one, dict))
        assert mount["source"] == "./docker/secrets/worker_redis_password"
        assert mount["target"] == environment["POC_REDIS_PASSWORD_FILE"]
        assert mount["bind"]["create_host_path"] is False  # else an empty folder is the password

    @pytest.mark.parametrize("name", list(ON_A_FURTHER_HOST))
    def test_a_further_host_says_what_it_must_be_told(self, name: Any) -> None:
        without = {key: value for key, value in ON_A_FURTHER_HOST.items() if key != name}
        with pytest.raises(LookupError, match=f"^{name}: set {name} "):
            compose_file.services(without, "compose.workers.yaml")

    def test_both_files_start_the_same_worker_on_gpus(
        self, services: dict[str, dict[str, Any]]
    ) -> None:
        (further,) = compose_file.services(ON_A_FURTHER_HOST, "compose.workers.yaml").values()
        first = compose_file.services(ON_A_FURTHER_HOST)["worker-gpu"]
        assert command_of(further) == command_of(first)
        same = [
            "image",
            "build",
            "healthcheck",
            "deploy",
            "stop_grace_period",
            "shm_size",
            "restart",
            "read_only",
            "cap_drop",
            "security_opt",
            "init",
            "logging",
            "mem_limit",
            "memswap_limit",
        ]
        assert {key: further.get(key) for key in same} == {key: first.get(key) for key in same}
        differs = {"POC_REDIS_URL", "POC_CHAT_HOST", "POC_HOST_NAME", "REDIS_PASSWORD"}
        assert further["environment"].keys() - differs == first["environment"].keys() - differs

    def test_workers_have_the_time_to_drain(self, services: dict[str, dict[str, Any]]) -> None:
        for name in ("worker", "worker-gpu"):
            assert seconds(services[name]["stop_grace_period"]) > WORKER_GRACE_S + GUARD_MARGIN_S

    def test_what_runs_for_long_is_watched_and_restarted(
        self, services: dict[str, dict[str, Any]]
    ) -> None:
        for name in services.keys() - {"secrets"}:
            assert services[name]["healthcheck"]["test"], name
            assert services[name]["restart"] == "unless-stopped", name

    def test_no_two_builds_share_a_tag(self, services: dict[str, dict[str, Any]]) -> None:
        tags = [service["image"] for service in services.values() if "build" in service]
        assert len(set(tags)) == len(tags)

    def test_redis_starts_first_and_healthy(self, services: dict[str, dict[str, Any]]) -> None:
        for name in services.keys() - {"secrets", "redis", *MONITORING}:
            assert services[name]["depends_on"] == {"redis": {"condition": "service_healthy"}}, name
        for name in ("redis", *MONITORING):
            assert services[name]["depends_on"] == {
                "secrets": {"condition": "service_completed_successfully"}
            }


class TestSafety:
    def test_nothing_is_published_beyond_loopback(
        self, services: dict[str, dict[str, Any]]
    ) -> None:
        ports = [port for service in services.values() for port in service.get("ports", [])]
        assert len(ports) == 4
        assert all(port.startswith("127.0.0.1:") for port in ports)

    def test_each_service_gets_the_settings_and_only_its_own_secrets(
        self, services: dict[str, dict[str, Any]]
    ) -> None:
        (further,) = compose_file.services(ON_A_FURTHER_HOST, "compose.workers.yaml").values()
        given = compose_file.services({"POC_API_KEY": "x", "HF_TOKEN": "x"})
        for name in ("api", "worker", "worker-gpu", "courier", "flower"):
            assert given[name]["env_file"] == [{"path": ".env", "required": False}], name
            environment = given[name]["environment"]
            assert environment["POC_API_KEY"] == ("x" if name == "api" else ""), name
            has_token = name in ("api", "worker", "worker-gpu")
            assert environment["HF_TOKEN"] == ("x" if has_token else ""), name
        assert further["env_file"] == services["worker-gpu"]["env_file"]

    def test_the_empty_key_that_compose_passes_on_is_none(self) -> None:
        assert Settings(api_key="").api_key is None

    def test_models_that_the_api_downloads_are_the_workers(
        self, services: dict[str, dict[str, Any]]
    ) -> None:
        for name in ("api", "worker", "worker-gpu"):
            assert "cache:/cache" in services[name]["volumes"], name
            assert services[name]["environment"]["HF_HOME"] == "/cache/huggingface", name

    def test_health_checks_start_no_python(self, services: dict[str, dict[str, Any]]) -> None:
        """1.5 s of CPU every 15 s made containers that worked unhealthy on a loaded host."""
        for name in services.keys() - {"secrets", "redis", *MONITORING}:
            check = services[name]["healthcheck"]["test"]
            assert not {"proofline", "python"} & set(check), name

    def test_an_api_that_is_published_on_loopback_alone_needs_no_key(
        self, services: dict[str, dict[str, Any]]
    ) -> None:
        api = services["api"]
        assert api["environment"]["POC_REQUIRE_KEYS"] == "never"
        assert all(port.startswith("127.0.0.1:") for port in api["ports"])
        assert (
            compose_file.services({"POC_REQUIRE_KEYS": "always"})["api"]["environment"][
                "POC_REQUIRE_KEYS"
            ]
            == "always"
        )

    def test_logs_files_and_memory_have_limits(self, services: dict[str, dict[str, Any]]) -> None:
        for name, service in services.items():
            assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name
            assert "ulimits" not in service, name  # refused where the hard limit is lower
            assert service["mem_limit"] is not None, name
            assert service["memswap_limit"] == service["mem_limit"], name
        assert "--maxmemory" in services["redis"]["command"]

    def test_redis_is_on_the_internal_network_only(
        self, services: dict[str, dict[str, Any]]
    ) -> None:
        assert services["redis"]["networks"] == ["internal"]
        assert "ports" not in services["redis"]

    def test_a_private_address_is_needed_to_open_redis(self) -> None:
        with pytest.raises(LookupError, match="PRIVATE_ADDRESS"):
            compose_file.services({}, "compose.hosts.yaml")
        opened = compose_file.services({"PRIVATE_ADDRESS": "10.0.0.1"}, "compose.hosts.yaml")[
            "redis"
        ]
        assert opened["ports"] == ["10.0.0.1:6379:6379"]

    def test_containers_may_do_little(self, services: dict[str, dict[str, Any]]) -> None:
        for name, service in services.items():
            assert service["read_only"] is True, name
            assert service["cap_drop"] == ["ALL"], name
            assert service["security_opt"] == ["no-new-privileges:true"], name

    def test_no_password_is_in_the_files(self) -> None:
        for file in [*FILES, ".env.example"]:
            found = re.findall(r"(?:PASSWORD|TOKEN|AUTH)\w*[=:] *(\S+)", (ROOT / file).read_text())
            assert [
                value for value in found if not value.startswith(("$", "?", "/run/", "#"))
            ] == [], file
        assert subprocess.run(["git", "check-ignore", "-q", ".env"], cwd=ROOT).returncode in (
            0,
            128,
        )


def make_secrets(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "all").mkdir(exist_ok=True)
    docker = ROOT / "docker"
    script = [
        "sh",
        str(docker / "make_secrets.sh"),
        str(folder / "all"),
        str(folder / "each"),
        str(docker / "users.acl"),
    ]
    path = {"PATH": "/usr/bin:/bin"}
    return subprocess.run(script, env=path | environment, capture_output=True, text=True)


def texts(folder: Path) -> dict[str, str]:
    """What is in its files."""
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def hash_of(password: str) -> str:
    return f"#{hashlib.sha256(password.encode()).hexdigest()}"


class TestSecrets:
    def test_are_made_up_once(self, tmp_path: Path) -> None:
        assert make_secrets(tmp_path).returncode == 0
        first = texts(tmp_path)
        users = ("api", "worker", "courier", "flower")
        own = {f"all/{name}_redis_password": f"each/{name}/redis_password" for name in users}
        own |= {
            f"all/{name}_password": f"each/{name}/{name}_password" for name in ("flower", "grafana")
        }
        assert first.keys() >= {
            *own,
            *own.values(),
            "all/redis_password",
            "all/redis.conf",
            "all/users.acl",
        }
        passwords = [first[name] for name in (*own, "all/redis_password")]
        assert {len(password) for password in passwords} == {48}
        assert len(set(passwords)) == len(passwords)
        assert [first[of_all] for of_all in own] == [first[of_one] for of_one in own.values()]
        assert first["all/redis.conf"] == f"aclfile {tmp_path}/all/users.acl\n"
        make_secrets(tmp_path)
        assert texts(tmp_path) == first

    def test_each_user_gets_its_rights_under_its_password(self, tmp_path: Path) -> None:
        make_secrets(tmp_path)
        found = texts(tmp_path)
        users = dict(
            line.removeprefix("user ").split(" ", 1) for line in found["all/users.acl"].splitlines()
        )
        assert users.keys() == {"default", "api", "worker", "courier", "flower"}
        rights = (ROOT / "docker" / "users.acl").read_text().splitlines()
        for user, line in users.items():
            file = "redis_password" if user == "default" else f"{user}_redis_password"
            words = line.split()
            assert words[:2] == ["on", hash_of(found[f"all/{file}"])]
            given = [
                word
                for right in rights
                if right.startswith(f"user {user} ")
                for word in right.split()[2:]
            ]
            assert words[len(words) - len(given) :] == given
            assert user == "default" or {"-@all", "resetchannels", "-@dangerous"} <= set(words)

    def test_hosts_that_joined_keep_their_users(self, tmp_path: Path) -> None:
        """Redis writes them into the file, and Compose's next start makes it anew."""
        make_secrets(tmp_path)
        file = tmp_path / "all" / "users.acl"
        first = file.read_text()
        host = "user host-gpu2 on #0123 ~poc:job:* -@all +get\n"
        file.write_text(f"user stranger on nopass ~* +@all\n{first}{host}")
        make_secrets(tmp_path)
        assert file.read_text() == first + host

    def test_redis_can_write_the_file_of_users(self, services: dict[str, dict[str, Any]]) -> None:
        place = services["secrets"]["entrypoint"][-1]
        for name in ("secrets", "redis"):
            assert f"redis:{place}" in services[name]["volumes"], name

    def test_each_service_sees_its_own_alone(self, services: dict[str, dict[str, Any]]) -> None:
        seen = {
            name: [volume for volume in service["volumes"] if volume.startswith("secrets")]
            for name, service in services.items()
            if name not in ("secrets", "redis")
        }
        own = {name: [f"secrets-{name.removesuffix('-gpu')}:/run/proofline:ro"] for name in seen}
        assert seen == own
        for name, service in services.items():
            user = re.match(
                r"redis://(\w+)@", str(service.get("environment", {}).get("POC_REDIS_URL", ""))
            )
            without = name in ("secrets", "redis", "prometheus", "grafana")
            assert without or (user and user[1] == name.removesuffix("-gpu")), name

    def test_prometheus_and_grafana_see_their_own_alone(self, tmp_path: Path) -> None:
        make_secrets(tmp_path)
        found = texts(tmp_path)
        seen = {
            name: text
            for name, text in found.items()
            if name.startswith(("each/prom", "each/graf"))
        }
        assert seen == {
            "each/prometheus/flower_password": found["all/flower_password"],
            "each/prometheus/metrics_key": "",
            "each/grafana/grafana_password": found["all/grafana_password"],
        }
        make_secrets(tmp_path, METRICS_KEY="key")
        assert texts(tmp_path)["each/prometheus/metrics_key"] == "key"

    def test_those_of_the_env_file_are_refused(
        self, services: dict[str, dict[str, Any]], tmp_path: Path
    ) -> None:
        """Every container gets that file."""
        for name in services["secrets"]["environment"].keys() - {"GIVEN"}:
            done = make_secrets(tmp_path, GIVEN=str(tmp_path), **{name: "chosen"})
            assert (done.returncode, "each is a file of docker/secrets" in done.stderr) == (1, True)

    def test_those_of_files_are_taken(self, tmp_path: Path) -> None:
        given = tmp_path / "given"
        given.mkdir()
        (given / "redis_password").write_text("chosen\n")
        (given / "metrics_key").write_text("key\n")
        assert make_secrets(tmp_path, GIVEN=str(given)).returncode == 0
        found = texts(tmp_path)
        assert found["all/redis_password"] == "chosen"
        assert found["each/prometheus/metrics_key"] == "key"
        assert len(found["all/flower_password"]) == 48

    def test_those_of_the_environment_replace_others(self, tmp_path: Path) -> None:
        make_secrets(tmp_path)
        make_secrets(tmp_path, REDIS_PASSWORD="chosen", FLOWER_PASSWORD="too")
        found = texts(tmp_path)
        assert found["all/redis_password"] == "chosen"
        assert found["each/flower/flower_password"] == "too"
        assert f"user default on {hash_of('chosen')} " in found["all/users.acl"]

    def test_a_further_host_with_the_operators_password_is_a_worker(self, tmp_path: Path) -> None:
        """As they had it before there were users."""
        make_secrets(tmp_path, REDIS_PASSWORD="chosen")
        (worker,) = [
            line
            for line in texts(tmp_path)["all/users.acl"].splitlines()
            if line.startswith("user worker ")
        ]
        assert f" {hash_of('chosen')} " in worker

    @pytest.mark.parametrize("password", ["a b", 'quo"te', "new\nline", "$(id)"])
    def test_what_would_need_quoting_is_refused(self, tmp_path: Path, password: str) -> None:
        done = make_secrets(tmp_path, FLOWER_PASSWORD=password)
        assert done.returncode == 1
        assert done.stderr.startswith("FLOWER_PASSWORD may hold letters, digits")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
class TestDockerfiles:
    def test_what_they_copy_exists_and_is_sent_to_the_engine(self, path: Any) -> None:
        copied = re.findall(r"^COPY (?!--from)(.+)$", path.read_text(), flags=re.MULTILINE)
        sources = [word for line in copied for word in line.split()[:-1]]
        assert sources
        sent = {
            line.removeprefix("!")
            for line in (ROOT / ".dockerignore").read_text().splitlines()
            if line[0] == "!"
        }
        for source in sources:
            assert (ROOT / source).exists(), source
            assert {source, source.split("/")[0]} & sent, source

    def test_they_install_a_lock_with_hashes_or_what_vllms_own_image_lacks(self, path: Any) -> None:
        text = path.read_text()
        locks = re.findall(r"pip install --no-deps --require-hashes -r (\S+)", text)
        of_vllm = re.findall(r"pip install .*-r \S*requirements\.txt", text)
        assert (locks, len(of_vllm)) == {
            "api": (["locks/api.txt"], 0),
            "node": (["locks/worker-cpu.txt"], 1),
            "worker-cpu": (["locks/worker-cpu.txt"], 0),
            "worker-gpu": ([], 1),
        }[path.name.partition(".")[0]]

    def test_torch_is_only_where_an_engine_is(self, path: Any) -> None:
        with_engine = ("node.Dockerfile", "worker-cpu.Dockerfile")
        assert ("constraints-cpu.txt" in path.read_text()) == (path.name in with_engine)

    def test_the_builds_own_backend_is_kept_and_is_pyprojects(self, path: Any) -> None:
        """Fetched again with each change of our code it was most of a rebuild."""
        backend = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
        (stage,) = (part for part in path.read_text().split("FROM ") if "AS wheel" in part)
        assert re.findall(r'pip install [^"]*"(.+)"', stage) == backend
        assert stage.index("pip install") < stage.index("COPY")
        assert "--no-build-isolation" in stage

    def test_a_change_of_our_code_installs_no_dependency_anew(self, path: Any) -> None:
        """Dependencies are installed before our packages are there, and those without
        dependencies.
        """
        text = path.read_text()
        stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
        for stage in stages:
            if installs := re.search(r"-r \S+\.txt", stage):
                before = stage[: installs.start()]
                assert not re.search(
                    r"^COPY (api|cli|workers|poc_core)\b", before, flags=re.MULTILINE
                )
        assert len(re.findall(r"pip install .*--no-deps /wheels/", text)) == 1

    def test_they_do_not_run_as_root(self, path: Any) -> None:
        if path.name == "node.Dockerfile":
            pytest.skip("docker/node.sh chooses the user: tests/unit/docker/test_node.py")
        assert re.findall(r"^USER (\w+)$", path.read_text(), flags=re.MULTILINE)[-1] == "proofline"

    def test_what_they_run_exists(self, path: Any) -> None:
        image = compose_file.dockerfile_commands(path)
        assert image["ENTRYPOINT"][-1] == "proofline"
        assert image["CMD"][0] in COMMANDS.commands


def test_a_worker_without_a_gpu_brings_no_triton() -> None:
    assert "triton" not in (ROOT / "locks" / "worker-cpu.txt").read_text()


def test_an_unknown_extra_is_an_error() -> None:
    with pytest.raises(KeyError):
        requirements(["nope"])
