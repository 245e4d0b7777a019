"""Hosts are invited to a Redis without an ACL file, and to a Redis that speaks TLS."""

import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from cli.join.access import Access, redis_url_of
from cli.join.inviting import Inviting
from cli.join.users import UsersError
from cli.supervise.redis_server import LocalRedis, wait_for_redis
from poc_core.joining.invitations import Invitations
from poc_core.settings import load_settings
from tests.stacks.tls_redis import tls_redis

pytestmark = pytest.mark.integration

PATIENCE_S = 150.0


@pytest.mark.promise(
    "an operator whose Redis would forget hosts or has no password", "cannot invite hosts"
)
def test_a_redis_without_aclfile_forgets_hosts_and_is_told_them_again(tmp_path: Path) -> None:
    own = LocalRedis(tmp_path)

    def start() -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(own.command)
        wait_for_redis(own.url)
        return process

    with ExitStack() as exits:
        exits.callback(own.release)
        process = start()

        def end() -> None:
            process.terminate()
            process.wait(PATIENCE_S)

        exits.callback(end)
        operator = exits.enter_context(redis.Redis.from_url(own.url))
        hosts = Inviting(operator, load_settings(redis_url=own.url))
        place = f"redis://127.0.0.1:{own.port}/0"
        token, forgets = hosts.invite("gpu2", place, None, 3600, {})
        assert "hosts restore" in forgets
        _, offer = Invitations(operator).take(token.id, "here")
        redis_url = offer.opened(token).url_for(token)
        with redis.Redis.from_url(redis_url) as host:
            assert host.ping()
        end()
        process = start()
        with pytest.raises(redis.AuthenticationError):
            redis.Redis.from_url(redis_url).ping()
        assert [(one.name, one.has_user) for one in hosts.rows()] == [("gpu2", False)]
        operator.execute_command("ACL", "SETUSER", "host-stray", "on", ">pw", "+@all")
        assert hosts.restore()[0] == 1
        with redis.Redis.from_url(redis_url) as host:
            assert host.ping()
        assert operator.execute_command("ACL", "GETUSER", "host-stray") is None

        operator.execute_command("ACL", "SETUSER", "default", "nopass")
        with pytest.raises(UsersError, match="lets everybody in"):
            hosts.invite("gpu3", place, None, 3600, {})


def test_a_host_gets_the_certificates_by_which_it_trusts_redis(tmp_path: Path) -> None:
    (tmp_path / "a host's").mkdir()
    with (
        tls_redis(tmp_path) as server,
        redis.Redis.from_url(server.trusting_url) as operator,
    ):
        hosts = Inviting(operator, load_settings(redis_url=server.trusting_url))
        place = f"rediss://127.0.0.1:{server.port}/0"
        token, _ = hosts.invite("gpu2", place, server.certificate.read_text(), 3600, {})
        _, sealed = Invitations(operator).take(token.id, "here")
        offer = sealed.opened(token)
        access = Access(
            api="https://node",
            token_id=token.id,
            name="gpu2",
            redis_url=offer.url_for(token),
            redis_ca=offer.redis_ca,
        )
        url = redis_url_of(tmp_path / "a host's" / "joined.json", access)
        with redis.Redis.from_url(url) as host:
            assert host.ping()
        with pytest.raises(redis.ConnectionError, match="certificate verify failed"):
            redis.Redis.from_url(access.redis_url).ping()
