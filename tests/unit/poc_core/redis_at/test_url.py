"""Urls of Redis: what they name, and what is refused with a sentence."""

from pathlib import Path

import pytest

from poc_core.errors import SettingsError
from poc_core.queues import celery_config
from poc_core.redis_at.url import RedisUrl
from poc_core.settings import load_settings

THREE = "redis+sentinel://worker:p%40ss@10.0.0.1:26379,10.0.0.2,[::1]:26380/node/3"


def test_sentinels_a_master_and_a_database() -> None:
    at = RedisUrl.of(THREE)
    assert at.hosts == (("10.0.0.1", 26379), ("10.0.0.2", 26379), ("::1", 26380))
    assert (at.master, at.tls, at.sentinel, at.ssl) == ("node", False, {}, {})
    assert at.server == {"username": "worker", "password": "p@ss", "db": 3}
    assert at.ports == {26379, 26380, 6379}
    assert RedisUrl.of("redis+sentinel://a,b/node").server == {"db": 0}


def test_one_server() -> None:
    at = RedisUrl.of("redis://:p%40ss@redis.example:6380/2")
    assert (at.hosts, at.master, at.tls) == ((("redis.example", 6380),), "", False)
    assert at.server == {"password": "p@ss", "db": 2}
    assert at.ports == {6380}
    assert RedisUrl.of("redis://redis.example").ports == {6379}


def test_tls_is_for_the_sentinels_too_unless_told_otherwise() -> None:
    url = "rediss+sentinel://a:1,b:2/node/0?ssl_ca_certs=/ca.pem"
    at = RedisUrl.of(url)
    assert at.ssl == {"ssl_cert_reqs": "required", "ssl_ca_certs": "/ca.pem"}
    assert at.sentinel == {"ssl": True, **at.ssl}
    alone = RedisUrl.of(f"{url}&sentinel_tls=no")
    assert (alone.sentinel, alone.ssl) == ({}, at.ssl)
    assert RedisUrl.of("rediss://a/0?ssl_ca_certs=/ca.pem").ssl == at.ssl
    assert RedisUrl.of("redis://a/0").ssl == {}


def test_a_user_and_a_password_for_the_sentinels(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("of a file\n")
    urls = {
        "sentinel_password=own%2F": ("own/",),
        "sentinel_username=asker&sentinel_password=own": ("asker", "own"),
        f"sentinel_password_file={tmp_path}/password": ("of a file",),
    }
    for query, credentials in urls.items():
        at = RedisUrl.of(f"redis+sentinel://:secret@a:1/node/0?{query}")
        assert at.sentinel["credential_provider"].get_credentials() == credentials
        assert at.server == {"password": "secret", "db": 0}


@pytest.mark.promise("a reader of logs or `config`", "sees no password of Redis or Sentinels")
def test_nothing_that_is_shown_has_a_secret() -> None:
    url = f"{THREE}?sentinel_password=own"
    at = RedisUrl.of(url)
    shown = "redis+sentinel://***@10.0.0.1:26379,10.0.0.2:26379,[::1]:26380/node/3"
    assert at.shown == shown
    config = celery_config(load_settings(redis_url=url))["broker_transport_options"]
    for text in (repr(at), str(config)):
        assert "own" not in text
        assert "p@ss" not in text


def test_celery_is_told_the_same() -> None:
    options = celery_config(load_settings(redis_url=THREE))
    assert options["broker_url"] == "sentinel://worker:p%40ss@10.0.0.1:26379/3"
    assert options["broker_use_ssl"] is False
    given = options["broker_transport_options"]
    assert given["master_name"] == "node"
    assert given["sentinels"] == RedisUrl.of(THREE).hosts
    plain = celery_config(load_settings(redis_url="rediss://:p%40ss@redis:1/2?ssl_ca_certs=/ca"))
    assert plain["broker_url"] == "rediss://:p%40ss@redis:1/2"
    assert plain["broker_use_ssl"] == {"ssl_cert_reqs": "required", "ssl_ca_certs": "/ca"}
    assert "master_name" not in plain["broker_transport_options"]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis+sentinel://:secret@/node/0", "names no Sentinel"),
        ("redis+sentinel://:secret@a:26379", "names no master"),
        ("redis+sentinel://:secret@a:26379/0", "names no master"),
        ("redis+sentinel://:secret@a:26379/node/first", "a database's number"),
        ("redis+sentinel://:secret@a:port/node/0", "HOST:PORT with commas between"),
        ("redis+sentinel://:secret@a,,b/node/0", "HOST:PORT with commas between"),
        ("redis+sentinel://:secret@a/node/0?sentinel_pasword=secret", "no option sentinel_pasword"),
        ("redis+sentinel://:secret@a/node/0?sentinel_tls=maybe", "sentinel_tls must be yes or no"),
        ("redis+sentinel://:secret@a/node/0?socket_timeout=soon", "option that cannot be read"),
        ("redis+sentinel://a/node/0?sentinel_password_file=/nowhere", "/nowhere cannot be read"),
        ("redis://:secret@a:1,b:2/0", r"or redis\+sentinel://HOST:26379,"),
        ("redis+cluster://:secret@a:1/0", "must look like redis://"),
        ("redis://:secret@../..:1/0", "must look like redis://"),
        ("redis+sentinel://:secret@a..b/node/0", "HOST:PORT with commas between"),
        ("redis://:secret@a:1/0?tls=yes", "redis-py cannot use: .*'tls'"),
        (
            "redis+sentinel://:secret@a/node/0?tls=yes",
            "redis-py cannot use: .*'tls'",
        ),
        ("rediss://:secret@a:1/0?ssl_cert_reqs=maybe", "an option that redis-py cannot use"),
    ],
)
def test_a_wrong_url_is_refused_with_what_is_wrong(url: str, says: str) -> None:
    with pytest.raises(SettingsError, match=f"POC_REDIS_URL: .*{says}") as caught:
        load_settings(redis_url=url)
    assert "secret" not in str(caught.value)


def test_the_password_of_a_file_is_put_into_a_url_of_sentinels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "password").write_text("a/b\n")
    monkeypatch.setenv("POC_REDIS_URL", "redis+sentinel://worker@a:1,b:2/node/0")
    monkeypatch.setenv("POC_REDIS_PASSWORD_FILE", str(tmp_path / "password"))
    url = load_settings().redis_url
    assert url == "redis+sentinel://worker:a%2Fb@a:1,b:2/node/0"
    assert RedisUrl.of(url).server["password"] == "a/b"
