"""scripts/audit.py on what is installed, locked and checked in; locks match pyproject.toml."""

import re
import string
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts import audit
from scripts.lock import CONTENTS, header
from scripts.setup_env import CONSTRAINTS, LOCKS, UNWANTED_ON_CPU

RANDOM = "".join(string.ascii_letters[(7 * n) % 52] for n in range(43))
DIGITS = "".join(string.hexdigits[(5 * n) % 16] for n in range(48))
# Put together here, else this very file would be found.
PLANTED = {
    "a private key": "-----BEGIN RSA " + "PRIVATE KEY-----\n" + RANDOM,
    "a key of Proofline's API": "proofline_" + RANDOM,
    "a token of the Hugging Face hub": "HF_TOKEN=hf_" + RANDOM[:34],
    "a token of GitHub": "ghp_" + RANDOM[:36],
    "a token of PyPI": "pypi-AgE" + RANDOM + RANDOM,
    "a key of AWS": "AKIA" + RANDOM[:16].upper(),
    "a key of an inference service": "sk-proj-" + RANDOM,
    "a token of Slack": "xoxb-" + RANDOM[:24],
    "a signed token (JWT)": f"eyJ{RANDOM[:20]}.eyJ{RANDOM[:20]}.{RANDOM}",
    "a url with a password": "redis://" + f":{DIGITS}@redis.example:6379/0",
    "a key in a header": "Authorization: Bearer " + DIGITS,
    "a password of 24 random digits or more": f"REDIS_PASSWORD={DIGITS}",
}


def lines_of(lock: Path) -> list[str]:
    """One requirement with its hashes a line."""
    return [
        line
        for line in lock.read_text().replace("\\\n", "").splitlines()
        if not line.startswith("#")
    ]


def pins(lock: Path) -> dict[str, set[Version]]:
    found: dict[str, set[Version]] = {}
    for name, version in audit.PIN.findall(lock.read_text()):
        found.setdefault(canonicalize_name(name), set()).add(Version(version))
    return found


@pytest.fixture(params=CONTENTS)
def lock(request: pytest.FixtureRequest) -> Path:
    return LOCKS / f"{request.param}.txt"


class TestLocks:
    def test_a_lock_is_of_what_pyproject_asks_for_now(self, lock: Path) -> None:
        assert lock.read_text().startswith(header(CONTENTS[lock.stem])), "run `make lock`"

    def test_it_has_every_requirement_at_a_version_that_is_allowed(self, lock: Path) -> None:
        found = pins(lock)
        for requirement in map(Requirement, CONTENTS[lock.stem]):
            if canonicalize_name(requirement.name) != "torch":
                versions = found[canonicalize_name(requirement.name)]
                assert any(requirement.specifier.contains(version) for version in versions), (
                    requirement
                )

    def test_everything_in_it_has_a_hash(self, lock: Path) -> None:
        assert all(re.search(r" --hash=sha256:[0-9a-f]{64}", line) for line in lines_of(lock))

    def test_no_cuda_build_is_in_it(self, lock: Path) -> None:
        assert pins(lock).keys() & {"torch", *UNWANTED_ON_CPU} == set()
        assert not [
            name for name in pins(lock) if name.startswith("nvidia-") and name != "nvidia-ml-py"
        ]
        assert "torch==" in CONSTRAINTS.read_text()

    def test_images_and_ci_have_the_same_versions(self, lock: Path) -> None:
        dev = pins(LOCKS / "dev.txt")
        assert {
            package: dev.get(package, versions) for package, versions in pins(lock).items()
        } == pins(lock)


class TestHoles:
    def test_none_is_known_in_what_is_installed_or_locked(self) -> None:
        assert audit.holes(audit.versions()) == []

    def test_an_old_version_is_found_whatever_its_name_looks_like(self) -> None:
        (found,) = audit.holes([("Python_Multipart", "0.0.26"), ("python-multipart", "0.0.27")])
        assert found.startswith(
            "Python_Multipart 0.0.26 has a known vulnerability, fixed in 0.0.27: CVE-2026-42561"
        )

    def test_every_advisory_is_of_something_that_a_node_runs(self) -> None:
        ours = {canonicalize_name(name) for name, _ in audit.versions()} | {"vllm"}
        assert {canonicalize_name(one["package"]) for one in audit.advisories()} <= ours


class TestSecrets:
    def test_none_is_checked_in(self) -> None:
        assert audit.secrets() == []

    @pytest.mark.parametrize("kind", audit.SECRETS)
    def test_one_is_found_by_its_form(self, kind: str) -> None:
        assert audit.secrets_in(f"before {PLANTED[kind]} after") == [kind]

    @pytest.mark.parametrize(
        "harmless",
        [
            *("password: ${REDIS_PASSWORD:-}", "sk-learn", "hf_token", "ghp_short"),
            *("redis://:PASSWORD@10.0.0.1:6379/0", "http://user:s3cret@host/", "Bearer $KEY"),
            *("redis://[::1]:6379,10.0.0.1:6379/0 a@b", "Authorization: Bearer proofline_..."),
        ],
    )
    def test_what_only_looks_like_one_is_none(self, harmless: str) -> None:
        assert audit.secrets_in(harmless) == []
