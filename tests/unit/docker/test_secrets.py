"""Secrets of compose.yaml are generated, and only their services read them."""

import hashlib
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.harness.compose_file import ROOT
from tests.harness.documents import blocks


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

    @pytest.mark.parametrize("user", ["worker", "default"])
    def test_one_that_an_editor_wrote_is_that_of_its_user(self, tmp_path: Path, user: str) -> None:
        make_secrets(tmp_path)
        file = "redis_password" if user == "default" else f"{user}_redis_password"
        (tmp_path / "all" / file).write_text("chosen\n")
        assert make_secrets(tmp_path).returncode == 0
        (rights,) = re.findall(rf"^user {user} .*", texts(tmp_path)["all/users.acl"], re.MULTILINE)
        assert hash_of("chosen") in rights.split()

    def test_one_without_a_character_is_generated(self, tmp_path: Path) -> None:
        make_secrets(tmp_path)
        (tmp_path / "all" / "worker_redis_password").write_text("\n")
        assert make_secrets(tmp_path).returncode == 0
        assert len(texts(tmp_path)["each/worker/redis_password"]) == 48

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

    def test_one_that_cannot_be_read_is_not_replaced_by_a_generated_one(
        self, tmp_path: Path
    ) -> None:
        """Docker makes a folder in place of a missing file that a container mounts."""
        (tmp_path / "given" / "redis_password").mkdir(parents=True)
        done = make_secrets(tmp_path, GIVEN=str(tmp_path / "given"))
        assert (done.returncode != 0, "directory" in done.stderr) == (True, True)
        assert texts(tmp_path) == {}

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


@pytest.mark.parametrize("page", ["kubernetes", "redis"])
def test_a_pages_commands_make_them_where_only_the_operator_reads_them(
    page: str, tmp_path: Path
) -> None:
    """In a folder that is not there yet."""
    (block,) = [
        one for one in blocks(ROOT / "docs" / f"{page}.md") if "make_secrets.sh" in one.text
    ]
    commands = block.text.split("\nkubectl ")[0].replace("/etc/", f"{tmp_path}/")
    (tmp_path / "redis").mkdir()
    commands = commands.replace("/var/lib/redis", str(tmp_path / "redis"))
    done = subprocess.run(["sh", "-ec", commands], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    made = tmp_path / "proofline"
    assert (made / "redis_password").exists()
    assert made.stat().st_mode & 0o777 == 0o700


def test_a_backup_before_the_first_key_has_no_file_of_keys(tmp_path: Path) -> None:
    """An empty one, put back, makes `proofline key` and the API refuse it."""
    (backup,) = (
        block
        for block in blocks(ROOT / "docs" / "backup.md")
        if "docker compose exec -T api cat" in block.text
    )
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\nexit 1\n")  # there is no /keys/keys.json yet
    docker.chmod(0o755)
    (tmp_path / ".env").touch()
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["sh", "-c", backup.text], cwd=tmp_path, env={**os.environ, "PATH": path})
    assert [file.name for file in (tmp_path / "backup").iterdir()] == [".env"]
