"""compose.yaml and its overrides, checked without Docker: services, and what keeps them safe."""

import re
import shlex
import subprocess
import sys
from typing import Any

import pytest

from cli.supervise.fleet import WORKER_GRACE_S
from cli.supervise.processes import GUARD_MARGIN_S
from poc_core.settings import Settings
from tests.harness import compose_file
from tests.harness.commands import COMMANDS
from tests.harness.compose_file import ROOT, command_of

FILES = ["compose.yaml", "compose.hosts.yaml", "compose.workers.yaml", "compose.tls.yaml"]
ON_A_FURTHER_HOST = {
    "PROOFLINE_MODEL": "tiny-qwen3",
    "REDIS_ADDRESS": "10.0.0.1",
    "PRIVATE_ADDRESS": "10.0.0.2",
}
MONITORING = ("prometheus", "grafana")  # what of them is their own: test_monitoring.py


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
