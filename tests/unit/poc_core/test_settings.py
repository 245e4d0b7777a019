"""Settings come from POC_ variables and say what is wrong with them."""

from pathlib import Path

import pytest

from poc_core.errors import SettingsError
from poc_core.queues import celery_config
from poc_core.settings import Settings, load_settings
from scripts.docs_tables import meanings_of_settings


def test_the_names_that_operators_know_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "POC_BATCH_SIZE_DEFAULT": 16,
        "POC_MAX_QUEUED_NONCES": 500,
        "POC_GENERATE_CHUNK_TIMEOUT_SEC": 30,
        "POC_GENERATE_RESULT_TTL_SEC": 60,
        "POC_CALLBACK_INTERVAL_SEC": 2,
        "POC_CALLBACK_MAX_ARTIFACTS": 1000,
        "POC_CALLBACK_MAX_RETRIES": 7,
        "POC_RPC_TIMEOUT_MS": 5000,
    }
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    settings = load_settings()
    assert {name: getattr(settings, name.removeprefix("POC_").lower()) for name in values} == values


def test_the_defaults_are_those_of_the_protocol() -> None:
    settings = Settings()
    assert (settings.batch_size_default, settings.max_queued_nonces) == (32, 100_000)
    assert (settings.generate_chunk_timeout_sec, settings.generate_result_ttl_sec) == (60, 300)
    assert (settings.callback_interval_sec, settings.callback_max_artifacts) == (5, 1_000_000)
    assert settings.rpc_timeout_ms == 60_000


def test_a_given_value_wins_over_the_environment_and_none_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POC_REDIS_URL", "redis://env:1/0")
    assert load_settings(redis_url="redis://given:1/0").redis_url == "redis://given:1/0"
    assert load_settings(redis_url=None).redis_url == "redis://env:1/0"


def test_every_bad_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POC_BATCH_SIZE_DEFAULT", "many")
    monkeypatch.setenv("POC_RPC_TIMEOUT_MS", "-1")
    with pytest.raises(SettingsError, match=r"POC_BATCH_SIZE_DEFAULT: .*POC_RPC_TIMEOUT_MS: "):
        load_settings()


@pytest.mark.parametrize(
    "name", [name for name, field in Settings.model_fields.items() if field.default is None]
)
def test_an_empty_variable_is_unset_if_the_setting_may_be_unset(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """So a line `POC_CALLBACK_TRUSTED_CERTS=` in Compose's .env means the system's certificates."""
    monkeypatch.setenv(f"POC_{name.upper()}", "")
    assert getattr(load_settings(), name) is None


@pytest.mark.parametrize("text", ["", '"32"', "32s"])
@pytest.mark.parametrize("name", ["BATCH_SIZE_DEFAULT", "CALLBACK_INTERVAL_SEC", "REQUIRE_KEYS"])
def test_a_number_or_choice_that_cannot_be_read_is_shown(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    """Compose's `- POC_BATCH_SIZE_DEFAULT="32"` has its quotes in the value."""
    monkeypatch.setenv(f"POC_{name}", text)
    with pytest.raises(SettingsError) as refusal:
        load_settings()
    assert str(refusal.value).endswith(f", not {text!r}.")


@pytest.mark.parametrize(
    "url", ["http://secret@here", "redis://secret@here:port", "unix:///secret", ""]
)
def test_a_bad_redis_url_is_refused_without_showing_its_password(url: str) -> None:
    with pytest.raises(
        SettingsError, match="POC_REDIS_URL: must look like redis://host:port/db"
    ) as refusal:
        load_settings(redis_url=url)
    assert "secret" not in str(refusal.value)


def test_what_a_worker_does_while_it_lives_is_well_within_the_time_after_which_it_is_dead() -> None:
    for ttl_s in (2, 10, 60):
        settings = Settings(worker_ttl_s=ttl_s)
        assert settings.heartbeat_s * 2 < ttl_s  # one may come late
        assert settings.reap_interval_s < ttl_s < settings.delivery_lock_s


@pytest.mark.parametrize("rpc_timeout_ms", [1, 60_000, 600_000])
def test_a_batch_is_handed_on_well_after_one_engine_call_can_have_ended(
    rpc_timeout_ms: int,
) -> None:
    settings = Settings(rpc_timeout_ms=rpc_timeout_ms)
    assert settings.visibility_timeout_s * 1000 >= max(180_000, 3 * rpc_timeout_ms)


def test_every_setting_has_a_unit_or_a_reason() -> None:
    assert meanings_of_settings().keys() == Settings.model_fields.keys()


def test_celery_accepts_json_only_and_acknowledges_late() -> None:
    config = celery_config(Settings(rpc_timeout_ms=90_000))
    assert (config["accept_content"], config["task_serializer"]) == (["json"], "json")
    assert config["task_acks_late"]
    assert config["broker_transport_options"]["visibility_timeout"] == 270


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("yield", ("yield", 0)),
        ("exclusive", ("exclusive", 0)),
        ("off", ("off", 0)),
        ("share:0.3", ("share", 0.3)),
    ],
)
def test_chat_policies(text: str, policy: tuple[str, float]) -> None:
    assert Settings(chat_policy=text).chat == policy


@pytest.mark.parametrize(
    "text", ["", "Yield", "yield:", "off:1", "share", "share:", "share:0", "share:1", "share:nan"]
)
def test_a_policy_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="must be yield, exclusive, off, or share:F"):
        load_settings(chat_policy=text)


class TestPasswordFile:
    @pytest.fixture(autouse=True)
    def file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "password").write_text("a/b@c\n")
        monkeypatch.setenv("POC_REDIS_PASSWORD_FILE", str(tmp_path / "password"))
        monkeypatch.delenv("POC_REDIS_URL", raising=False)

    def test_its_password_is_put_into_the_url(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert load_settings().redis_url == "redis://:a%2Fb%40c@127.0.0.1:6379/0"
        monkeypatch.setenv("POC_REDIS_URL", "rediss://user@redis:1/2?ssl_ca_certs=/ca.pem")
        assert load_settings().redis_url == "rediss://user:a%2Fb%40c@redis:1/2?ssl_ca_certs=/ca.pem"

    def test_a_password_in_the_url_counts_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("POC_REDIS_PASSWORD_FILE", "/not/there")
        assert (
            load_settings(redis_url="redis://:own@redis:1/0").redis_url == "redis://:own@redis:1/0"
        )

    def test_one_that_cannot_be_read_is_an_error(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "binary").write_bytes(b"\xff\xfe")
        for file in (tmp_path / "nowhere", tmp_path / "binary"):
            monkeypatch.setenv("POC_REDIS_PASSWORD_FILE", str(file))
            with pytest.raises(
                SettingsError, match=f"POC_REDIS_PASSWORD_FILE {file} cannot be read"
            ):
                load_settings()


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("trusted_networks", "10.0.0.0/99", "addresses or networks such as 10.0.0.0/8"),
        ("trusted_networks", "gateway", "addresses or networks such as 10.0.0.0/8"),
        (
            "allowed_origins",
            "https://ui.example.org/path",
            "origins such as https://ui.example.org, without a path",
        ),
        (
            "allowed_origins",
            "ui.example.org",
            "origins such as https://ui.example.org, without a path",
        ),
    ],
)
def test_what_cannot_be_read_says_what_it_may_be(name: str, text: str, allowed: str) -> None:
    with pytest.raises(SettingsError, match=f"POC_{name.upper()}: must be {allowed}"):
        load_settings(**{name: text})


@pytest.mark.parametrize("url", ["http://user:hid/den@proxy:3128", "http://proxy:99999", "proxy"])
def test_a_proxy_without_a_usable_port_is_refused_without_showing_its_password(url: str) -> None:
    with pytest.raises(SettingsError, match="POC_CALLBACK_PROXY: must look like") as refusal:
        load_settings(callback_proxy=url)
    assert "hid" not in str(refusal.value)
